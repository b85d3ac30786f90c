"""Machines that are unlike (BALANCE=): three of the lab, each of which sleeps another time for each
image, with a stand-in for the model. Containers of one kernel are nodes of one machine, which share
its speed: a stand-in for what tells kernels apart makes each a machine of its own."""

import json
import re
import subprocess
import time

import pytest

from report.measure import images_per_second
from report.read import read_run
from tests.lab.test_train import CHECKOUT, LAUNCH, launch, run_folder

MODEL = "tests/lab/sleeping_model.py:sleeper"
WORDS = ("--nodes", "3", "--model", MODEL, "--batch", "24", "--precision", "fp32")
KERNEL = "/sys/kernel/vmcoreinfo"  # by which launcher/node/probe.py knows a kernel
PATIENCE = 300  # seconds
SPEEDS = {"node1": 1 / 0.02, "node2": 1 / 0.03, "node3": 1 / 0.04}  # images/s
IDEAL = sum(SPEEDS.values())


@pytest.fixture(scope="module")
def unlike(provisioned):
    for node in (1, 2, 3):
        standin = "/run/standin-kernel"
        line = f"echo {node} > {standin} && mount --bind {standin} {KERNEL}"
        provisioned.admin(node, f"sudo sh -c '{line}'")
    yield provisioned
    for node in (1, 2, 3):
        provisioned.admin(node, f"sudo umount {KERNEL}")


def trained(lab, *words):
    """(summary of a run, what it printed)"""
    done = launch(lab, "train", *WORDS, "--epochs", "2", *words)
    return json.loads((run_folder(done) / "summary.json").read_text()), done.stdout


def parts(said):
    """{machine: images of a step}"""
    (line,) = re.findall(r"images a step: ((?:node\d \d+(?:, )?)+)", " ".join(said.split()))
    return {name: int(count) for name, count in re.findall(r"(node\d) (\d+)", line)}


def test_parts_by_measured_speeds_come_near_the_ideal(unlike):
    equal, said = trained(unlike, "--balance", "off")
    assert "images a step" not in said
    assert any("BALANCE=auto" in item["change"] for item in equal["advice"])
    planned = launch(unlike, "plan", "--measure", *WORDS)
    assert "BALANCE=auto" in planned.stdout
    balanced, said = trained(unlike)
    assert not any("BALANCE" in item["change"] for item in balanced["advice"])
    shares = parts(said)
    assert sum(shares.values()) == 3 * 24
    for name, speed in SPEEDS.items():
        assert shares[name] / 72 == pytest.approx(speed / IDEAL, rel=0.15)
    best = ":".join(f"{speed:.0f}" for speed in SPEEDS.values())
    by_hand, _ = trained(unlike, "--balance", best)
    rates = [run["images_per_second"] for run in (equal, balanced, by_hand)]
    print("images/s in equal parts, by measured speeds, by hand:", *map(round, rates))
    assert rates[1] >= 0.8 * rates[0] * IDEAL / (3 * SPEEDS["node3"])
    assert rates[1] >= 0.9 * rates[2]


def attempts(before):
    """Those of the run that began since."""
    found = set((CHECKOUT / "runs").glob("2*-sleeper-*/attempts.json")) - before
    return [(path, json.loads(path.read_text())["attempts"]) for path in found]


def rate(folder, attempt):
    """Images/s of the run in an attempt, as its report counts them."""
    return images_per_second([rank for rank in read_run(folder).ranks if rank.attempt == attempt])


def test_a_machine_that_joins_makes_a_run_faster(unlike, tmp_path):
    """After the test before, by which all three were measured."""
    away = "/var/tmp/standin-away"
    unlike.member(3, f"mkdir -p {away} && touch {away}/anna")
    words = f"hours=00:00-24:00 idle_minutes=0.2 away_dir={away}"
    lines = [
        f"node{n} ansible_host=192.168.56.{110 + n} {words if n == 3 else ''}" for n in (1, 2, 3)
    ]
    users = "[cluster:vars]\nansible_user=tandem-admin\ntrain_user=tandem\n"
    (tmp_path / "pcs.ini").write_text("\n".join(["[cluster]", *lines, users]))
    before = set((CHECKOUT / "runs").glob("2*-sleeper-*/attempts.json"))
    command = (*LAUNCH, "train", "--inventory", str(tmp_path / "pcs.ini"), *WORDS[2:])
    argv = unlike.argv("exec", "--", *command, "--epochs", "8")
    with (tmp_path / "said").open("w+") as said:
        run = subprocess.Popen(argv, cwd=unlike.checkout, stdout=said, stderr=said)
        until = time.monotonic() + PATIENCE
        while not attempts(before) and run.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(20)  # of training on two
        unlike.member(3, f"rm {away}/anna")
        assert run.wait(PATIENCE) == 0, (tmp_path / "said").read_text()
    ((path, (first, second)),) = attempts(before)
    assert [first["nodes"], second["nodes"]] == [["node1", "node2"], ["node1", "node2", "node3"]]
    assert second["balance"]["node1"] / second["balance"]["node3"] == pytest.approx(2, rel=0.15)
    two, three = rate(path.parent, 1), rate(path.parent, 2)
    print(f"two {two:.0f}, with a third of half the speed {three:.0f} images/s")
    assert three >= 0.9 * two * IDEAL / (IDEAL - SPEEDS["node3"])
