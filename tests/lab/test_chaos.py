"""Faults in random order: each is named in time, leaves nothing behind, and the run goes on.

The trainer is a stand-in that writes the same files, so that the machines' cores do not decide
(test_chaos_trainer.py has the real one). TANDEM_CHAOS_TRIALS sets how many trials there are; the
seed is fixed. Every bound is the launcher's own promise (docs/launcher.md), measured from the fault
to what the guards wrote down, on the one clock that all machines of a lab have.
"""

import os
import random
import time
import uuid

import pytest

from tests.lab import chaos_standin
from tests.lab.chaos_run import Running, ended
from tests.lab.lineage import assert_exact

NODES = 4
ALL = range(1, NODES + 1)
EPOCHS = 3
TRIALS = int(os.environ.get("TANDEM_CHAOS_TRIALS", "4"))
DEATH, GONE, CUT, THAW, ORPHANS = 5, 20, 20, 5, 10  # seconds
FIGURES = []


@pytest.fixture(scope="module")
def arena(start_lab, request):
    lab = start_lab("chaos", "--nodes", str(NODES), "--no-bundle")
    for node in ALL:
        chaos_standin.install(lab, node)
    yield lab
    say = request.config.pluginmanager.get_plugin("terminalreporter").write_line
    say("\nseconds from the fault to what is promised of it: all trials, then the bound")
    for kind, bound in sorted({(kind, bound) for kind, _, bound in FIGURES}):
        seconds = sorted(value for name, value, _ in FIGURES if name == kind)
        say(f"  {kind:<34} {' '.join(f'{value:.1f}' for value in seconds)} ({bound})")


class Trial:
    """A run that is allowed to start again, and what is measured of it."""

    def __init__(self, lab, folder, node, step):
        self.lab, self.node, self.step, self.folder = lab, node, step, folder
        self.mark = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
        self.file = chaos_standin.inventory(folder, NODES, self.mark)
        self.words = ("--inventory", str(self.file), "--data", "d", "--epochs", str(EPOCHS))
        self.run, self.hurt_at = None, None

    def begin(self):
        more = ("--max-restarts", "2", "--min-nodes", str(NODES - 1))
        own = ("--", "--sample_log", "--checkpoint_every", "5")
        self.run = Running(self.lab, self.folder, self.mark, *self.words, *more, *own)
        self.run.wait_for(rf"\[node\d \d\] step {self.step}\n", NODES)

    def hurt(self, verb, *words):
        """Do what is to be survived; the clock begins before it."""
        self.hurt_at = time.monotonic()
        self.lab(verb, *words)

    def kill(self, part):
        pid = self.run.pids(self.node)[part]
        self.hurt_at = time.monotonic()
        os.kill(pid, 9)

    def measure(self, kind, nodes, bound, attempt=1, since=None):
        """When the guards of these nodes had ended their parts, after the fault (or `since`)."""
        over = ended(self.run.fetch(nodes, self.folder), attempt)
        assert set(over) == {f"node{n}" for n in nodes}, over
        seconds = max(over.values()) - (since or self.hurt_at)
        FIGURES.append((kind, round(seconds, 2), bound))
        assert seconds <= bound, f"{kind}: {seconds:.2f} s of {bound}"

    def cause(self, **expected):
        """The first attempt's first cause, by these fields."""
        told = self.run.attempts()[0]["first_cause"]
        assert {name: told[name] for name in expected} == expected, told
        return told["message"]

    def others(self):
        return [n for n in ALL if n != self.node]

    def finished_on(self, nodes, attempts=2):
        """The run has ended well, its last attempt on these nodes."""
        assert self.run.end() == 0, self.run.said()
        told = self.run.attempts()
        assert len(told) == attempts and told[-1]["status"] == "finished", told
        assert told[-1]["nodes"] == [f"node{n}" for n in nodes], told


def kill_rank(trial):
    trial.kill("worker")
    trial.finished_on(ALL)
    trial.cause(host=f"node{trial.node}", rank=trial.node - 1, signal="SIGKILL")
    trial.measure("rank killed: over everywhere", ALL, DEATH)


def kill_guard(trial):
    trial.kill("guard")
    trial.finished_on(ALL)
    trial.cause(host=f"node{trial.node}")
    trial.measure("guard killed: over elsewhere", trial.others(), DEATH)


def kill_launch(trial):
    trial.kill("launch")
    trial.finished_on(ALL)
    trial.cause(host=f"node{trial.node}", signal="SIGKILL")
    trial.measure("launch killed: over everywhere", ALL, DEATH)


def kill_node(trial):
    trial.hurt("kill", str(trial.node))
    trial.finished_on(trial.others())
    assert "no heartbeat" in trial.cause(host=f"node{trial.node}")
    trial.measure("power lost: over elsewhere", trial.others(), GONE)


def kill_node_0(trial):
    trial.node = 1
    kill_node(trial)


def freeze_and_thaw(trial):
    trial.hurt("freeze", str(trial.node))
    trial.run.wait_for("attempt 2: ")
    thawed_at = time.monotonic()
    trial.lab("mend", str(trial.node))
    trial.finished_on(trial.others())
    assert "no heartbeat" in trial.cause(host=f"node{trial.node}")
    trial.measure("frozen: over elsewhere", trial.others(), GONE)
    trial.measure("thawed: clean there", [trial.node], THAW, since=thawed_at)


def cut_and_mend(trial):
    trial.hurt("cut", str(trial.node))
    trial.finished_on(trial.others())
    trial.lab("mend", str(trial.node))
    assert "no heartbeat" in trial.cause(host=f"node{trial.node}")
    trial.measure("cut: clean there", [trial.node], CUT)
    trial.measure("cut: over elsewhere", trial.others(), GONE)


def stall_of_8_seconds(trial):
    trial.hurt("cut", str(trial.node))
    time.sleep(max(0.0, trial.hurt_at + 8 - time.monotonic()))
    trial.lab("mend", str(trial.node))
    trial.finished_on(ALL, attempts=1)
    assert trial.run.attempts()[0]["first_cause"] is None


def full_disk(trial):
    trial.lab.ssh(trial.node, "head -c 2G /dev/zero > tandem/fill || true")
    trial.finished_on(trial.others())
    assert "its disk is full" in trial.cause(host=f"node{trial.node}", rank=trial.node - 1)


def kill_controller(trial):
    trial.hurt_at = time.monotonic()
    os.kill(trial.run.controller, 9)
    trial.run.process.wait()
    assert wait_for_none(trial, trial.hurt_at + ORPHANS) == []
    trial.run.start("--resume", trial.run.name)
    trial.finished_on(ALL)
    trial.measure("controller killed: over everywhere", ALL, ORPHANS)


def busy_gpu(trial):
    """A stand-in for nvidia-smi names a real process of the node."""
    holder = trial.lab.ssh(trial.node, "sleep 8888 >/dev/null 2>&1 </dev/null & echo $!").strip()
    smi = "/usr/local/bin/nvidia-smi"
    script = SMI.format(holder=holder)
    trial.lab.ssh(trial.node, f"sudo sh -c 'cat > {smi} && chmod +x {smi}'", input=script)
    try:
        refused = Running(trial.lab, trial.folder, trial.mark, *trial.words)
        assert refused.end() == 2
        said = refused.said()
        where = f"node{trial.node} (192.168.56.{110 + trial.node})"
        assert f"{where}: its GPUs are in use by tandem: sleep 8888 (pid {holder})" in said
        assert "QUEUE=1" in said and "FORCE=1" in said and said.count("in use by") == 1
        own = ("--queue", "--", "--sample_log")
        trial.run = Running(trial.lab, trial.folder, trial.mark, *trial.words, *own)
        trial.run.wait_for(f"waiting: node{trial.node}")
        trial.lab.ssh(trial.node, f"kill {holder}")
        trial.finished_on(ALL, attempts=1)
    finally:
        trial.lab.ssh(trial.node, f"sudo rm {smi}")


SMI = """#!/bin/sh
case "$*" in
*query-gpu*) echo "0, 580.126.20" ;;
*query-compute-apps*) kill -0 {holder} && echo {holder} ;;
esac
"""

FAULTS = [
    *(kill_rank, kill_guard, kill_launch, kill_controller, freeze_and_thaw, cut_and_mend),
    *(kill_node, kill_node_0, stall_of_8_seconds, full_disk, busy_gpu),
]


def trials() -> list:
    dice = random.Random(20260)
    order: list = []
    while len(order) < TRIALS:
        order += dice.sample(FAULTS, len(FAULTS))
    return [(fault, dice.randint(1, NODES), dice.randint(3, 12)) for fault in order[:TRIALS]]


def wait_for_none(trial, limit):
    """What of the run still lives at `limit`, on whichever node."""
    while trial.run.processes() and time.monotonic() < limit:
        time.sleep(0.05)
    return trial.run.processes()


@pytest.fixture
def trial(arena, tmp_path, fault, node, step):
    made = Trial(arena, tmp_path, node, step)
    if fault is full_disk:
        arena.ssh(node, "mkdir -p tandem && sudo mount -t tmpfs -o size=1200m,mode=777 disk tandem")
    if fault is not busy_gpu:
        made.begin()
    yield made
    arena("mend", str(made.node))
    if made.run is not None:
        made.run.close()
    if fault is full_disk:
        arena.ssh(node, "sudo umount -l tandem")


@pytest.mark.parametrize(
    ("fault", "node", "step"), trials(), ids=lambda value: getattr(value, "__name__", value)
)
def test_a_fault_is_named_leaves_nothing_and_the_run_goes_on(arena, trial, fault):
    fault(trial)
    over = time.monotonic()
    arena("mend", str(trial.node))
    assert wait_for_none(trial, over + ORPHANS) == []
    # A machine that was switched off has its disk again.
    vain = assert_exact(trial.run.fetch(ALL, trial.folder), EPOCHS)
    # At most the steps since the last checkpoint, and the one that was under way.
    assert vain <= 6 * NODES * 4
