"""The queue among people: three of them start twelve runs in one moment from two control machines;
some share machines in part, and one is killed while it waits. Machines, ssh and tickets are real;
the trainer is a stand-in, and so is the second control machine: another checkout."""

import itertools
import json
import os
import re
import signal
import subprocess
import time
import uuid

import pytest

from tests.lab import chaos_standin
from tests.lab.chaos_run import CHECKOUT, PATIENCE, Running, commands

NODES = (1, 2, 3)
PEOPLE = ("anna", "ben", "carl")
# What each person's runs want. (Of one person no two have a name in common, whatever the second.)
WISHES = (("resnet18", (1, 2)), ("resnet34", (2, 3)), ("resnet18", (1, 2, 3)), ("resnet18", (1,)))


@pytest.fixture(scope="module")
def machines(start_lab):
    """Three machines, on each of which three people may train."""
    lab = start_lab("queue", "--nodes", str(len(NODES)), "--no-bundle")
    for node in NODES:
        chaos_standin.install(lab, node)
        for person in PEOPLE:
            home = f"/home/{person}"
            lab.admin(node, f"sudo useradd --create-home --shell /bin/bash {person}")
            lab.admin(
                node, f"sudo cp -r /home/tandem/.ssh {home}/ && sudo chown -R {person}: {home}"
            )
    return lab


class Waiting(Running):
    """A run of a person's own from one of the checkouts."""

    def __init__(self, lab, folder, checkout, person, model, nodes):
        folder.mkdir()
        mark = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
        text = chaos_standin.inventory(folder, len(NODES), mark, 0.1).read_text()
        text = text.replace("train_user=tandem ", f"train_user={person} ")
        kept = [line for line in text.splitlines() if line[:5] in [f"node{n}" for n in nodes]]
        self.inventory = folder / "wanted.ini"
        self.inventory.write_text("\n".join(["[cluster]", *kept, ""]))
        self.checkout, self.person, self.nodes = checkout, person, nodes
        words = ("--data", "d", "--model", model, "--epochs", "2", "--queue")
        super().__init__(
            *(lab, folder, mark, "--inventory", str(self.inventory)),
            *("--nodes", str(len(nodes)), *words),
        )

    def start(self, *words):
        argv = self.lab.argv("exec", "--", "python", "-m", "launcher", "train", *words)
        streams = {"stdout": self.output, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(argv, cwd=self.checkout, **streams)

    @property
    def name(self):
        """The last: one that lost a collision begins anew under another."""
        return re.findall(r"^tandem: run (\S+), attempt", self.said(), re.M)[-1]

    @property
    def folder(self):
        return self.checkout / "runs" / self.name


def places(lab):
    """{(person, run): its ticket's number and name}, as the machines' files have it."""
    line = 'cd /tmp/tandem-queue && for n in [0-9]*; do echo "$n $(stat -c %U $n) $(cat $n)"; done'
    rows = [row for node in NODES for row in lab.ssh(node, f"{line} || true").splitlines()]
    rows = [row.split(" ", 2) for row in rows if row.endswith("}")]
    return {
        (person, name.rpartition(".")[0]): (json.loads(said)["number"], name)
        for name, person, said in rows
    }


def test_twelve_runs_of_three_people_begin_in_the_order_of_their_tickets(machines, tmp_path):
    second = tmp_path / "second"
    subprocess.run(["git", "clone", "--quiet", CHECKOUT, second], check=True)
    wishes = itertools.product(WISHES, PEOPLE)
    runs = [
        Waiting(machines, tmp_path / f"{n}", (CHECKOUT, second)[n % 2], person, *wish)
        for n, (wish, person) in enumerate(wishes)
    ]
    tickets, victim, printed = {}, None, ""
    limit = time.monotonic() + 3 * PATIENCE
    try:
        while any(run.process.poll() is None for run in runs) and time.monotonic() < limit:
            tickets |= places(machines)
            queued = [run for run in runs if "before it as number" in run.said()]
            queued = [run for run in queued if "attempt 1" not in run.said()]
            if victim is None and len(queued) > 3:
                victim = queued[-1]
                printed = machines.control(
                    *("python", "-m", "launcher", "queue", "--inventory", str(runs[2].inventory))
                ).stdout
                for pid, words in commands():
                    if str(victim.inventory) in words and "launcher" in words:
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)
        print(printed, *(run.said() for run in runs), sep="\n")
        assert [run.process.poll() for run in runs if run is not victim] == [0] * 11
        starts = [
            (run.attempts()[0]["started_unix"], set(run.nodes), tickets[run.person, run.name])
            for run in runs
            if run is not victim and (run.person, run.name) in tickets
        ]
        print(*sorted(starts, key=lambda start: start[0]), sep="\n")
        assert len(starts) > 6
        for (one, here, ticket), (other, there, later) in itertools.combinations(starts, 2):
            # With one number they came in one moment: the first to look may begin.
            if here & there and ticket[0] != later[0]:
                assert (one < other) == (ticket < later)
    finally:
        for run in runs:
            run.close()
