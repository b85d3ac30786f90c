"""One trial of the chaos tests: a run with restarts, a fault, what is promised of it.

Every bound is the launcher's own promise (docs/launcher.md), measured from the fault to what the
guards wrote down, on the one clock that all machines of a lab have.
"""

import os
import time
from pathlib import Path

from tests.lab.chaos_run import Running, ended
from tests.lab.lineage import assert_exact

DEATH, GONE, CUT, THAW, ORPHANS = 5, 20, 20, 5, 10  # seconds
FIGURES = []


def print_figures(config) -> None:
    """What all trials have measured, as one line for each promise."""
    lines = ["", "seconds from the fault to what is promised of it, in all trials (the bound)"]
    for kind, bound in sorted({(kind, bound) for kind, _, bound in FIGURES}):
        seconds = sorted(value for name, value, _ in FIGURES if name == kind)
        lines.append(f"  {kind:<34} {' '.join(f'{value:.1f}' for value in seconds)} ({bound})")
    with config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n".join(lines), flush=True)


class Trial:
    """A run that is allowed to start again, and what is measured of it."""

    def __init__(self, lab, folder: Path, mark: str, nodes: int, node: int, words: tuple):
        self.lab, self.folder, self.mark, self.words = lab, folder, mark, words
        self.all, self.node, self.hurt_first = range(1, nodes + 1), node, node
        self.run, self.hurt_at = None, None

    def begin(self):
        more = ("--max-restarts", "2", "--min-nodes", str(len(self.all) - 1))
        own = ("--", "--sample_log", "--checkpoint_every", "5")
        self.run = Running(self.lab, self.folder, self.mark, *self.words, *more, *own)

    def hurt(self, verb, *words):
        """Causes the fault that the run is to survive; the clock starts just before."""
        self.hurt_at = time.monotonic()
        self.lab(verb, *words)

    def kill(self, part):
        pid = self.run.pids(self.node)[part]
        self.hurt_at = time.monotonic()
        os.kill(pid, 9)

    def measure(self, kind, nodes, bound, attempt=1, since=None):
        """Seconds from the fault (or `since`) until these nodes' guards had ended their parts."""
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

    def left(self, limit):
        """Which of the run's processes still live at `limit`, on any node."""
        while self.run.processes() and time.monotonic() < limit:
            time.sleep(0.05)
        return self.run.processes()

    def survive(self, fault, epochs):
        """Causes the fault; checks what holds after any. Returns how many samples were wasted."""
        fault(self)
        over = time.monotonic()
        self.lab("mend", str(self.node))
        assert self.left(over + ORPHANS) == []
        # A machine that was switched off has its disk again.
        return assert_exact(self.run.fetch(self.all, self.folder), epochs)

    def close(self):
        for node in {self.node, self.hurt_first}:
            self.lab("mend", str(node))
        if self.run is not None:
            self.run.close()

    def others(self, than=None):
        """All nodes but the one with the fault, or but another one."""
        return [n for n in self.all if n != (than or self.node)]

    def finished_on(self, nodes, attempts=2):
        """Asserts that the run has succeeded, with its last attempt on these nodes."""
        assert self.run.end() == 0, self.run.said()
        told = self.run.attempts()
        assert len(told) == attempts and told[-1]["status"] == "finished", told
        assert told[-1]["nodes"] == [f"node{n}" for n in nodes], told


def kill_rank(trial):
    trial.kill("worker")
    trial.finished_on(trial.all)
    trial.cause(host=f"node{trial.node}", rank=trial.node - 1, signal="SIGKILL")
    trial.measure("rank killed: over everywhere", trial.all, DEATH)


def kill_guard(trial):
    trial.kill("guard")
    trial.finished_on(trial.all)
    trial.cause(host=f"node{trial.node}")
    trial.measure("guard killed: over elsewhere", trial.others(), DEATH)


def kill_launch(trial):
    trial.kill("launch")
    trial.finished_on(trial.all)
    trial.cause(host=f"node{trial.node}", signal="SIGKILL")
    trial.measure("launch killed: over everywhere", trial.all, DEATH)


def kill_node(trial):
    trial.hurt("kill", str(trial.node))
    trial.finished_on(trial.others())
    assert "no heartbeat" in trial.cause(host=f"node{trial.node}")
    trial.measure("power lost: over elsewhere", trial.others(), GONE)


def kill_node_0(trial):
    trial.node = 1
    kill_node(trial)


def leave_and_return(trial):
    """A machine is gone for one attempt; what it had trained on by then no longer counts."""
    trial.hurt("kill", str(trial.node))
    trial.run.wait_for("attempt 2: ")
    trial.lab("mend", str(trial.node))
    count = len(trial.all)
    trial.run.wait_for(r"\] training\n", count + count - 1)
    trial.node, gone = trial.others()[0], trial.node
    trial.kill("worker")
    trial.finished_on(trial.all, attempts=3)
    trial.cause(host=f"node{gone}")
    assert f"node{gone}" not in trial.run.attempts()[1]["nodes"]
    trial.measure("rank killed: over everywhere", trial.others(than=gone), DEATH, attempt=2)


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
    trial.finished_on(trial.all, attempts=1)
    assert trial.run.attempts()[0]["first_cause"] is None


# As systemd-oomd does it: the mark by which systemd knows its kills, then SIGKILL to all.
STANDIN_OOMD = """
import os, pathlib
(group,) = pathlib.Path("/sys/fs/cgroup/user.slice").glob("**/tandem-*.service")
print(os.getxattr(group, "user.oomd_omit").decode())
os.setxattr(group, "user.oomd_ooms", b"1")
os.setxattr(group, "user.oomd_kill", b"4")
(group / "cgroup.kill").write_text("1")
"""


def oomd_kill(trial):
    """systemd-oomd is a stand-in: the lab's machines have no limits on memory, which it needs. The
    run had asked to be spared."""
    trial.hurt_at = time.monotonic()
    assert trial.lab.admin(trial.node, f"sudo python3 -c '{STANDIN_OOMD}'") == "1\n"
    trial.finished_on(trial.all)
    said = trial.cause(host=f"node{trial.node}")
    assert "systemd-oomd ended the run on this machine because memory was short" in said


def small_disk(lab, node):
    """A disk for the runs of a machine which a test can fill."""
    lab.ssh(node, "mkdir -p tandem")
    lab.admin(node, "sudo mount -t tmpfs -o size=1200m,mode=777 disk /home/tandem/tandem")


def no_small_disk(lab, node):
    lab.admin(node, "sudo umount -l /home/tandem/tandem")


# Most of it is reserved at once: writing a gigabyte may take as long as the run.
FILL = "fallocate -l 1000M tandem/fill; head -c 2G /dev/zero >> tandem/fill || true"


def full_disk(trial):
    """Of a machine with a small disk."""
    trial.lab.ssh(trial.node, FILL)
    trial.finished_on(trial.others())
    assert "its disk is full" in trial.cause(host=f"node{trial.node}", rank=trial.node - 1)


DIGITS = "/srv/tandem/data/digits"


def own_mount(lab, node):
    """The data of a machine on a mount of their own, beside which there are none."""
    aside = f"mv {DIGITS} {DIGITS}.aside && mkdir {DIGITS} && mount -t tmpfs share {DIGITS}"
    lab.admin(node, f"sudo sh -ec '{aside} && cp -a {DIGITS}.aside/. {DIGITS}'")


def no_own_mount(lab, node):
    line = f"umount -l {DIGITS}; rmdir {DIGITS} && mv {DIGITS}.aside {DIGITS}"
    lab.admin(node, f"sudo sh -c '{line}'")


def lose_data(trial):
    """The share that a machine's images are on is unmounted under the run."""
    trial.lab.admin(trial.node, f"sudo umount -l {DIGITS}")
    trial.finished_on(trial.others())
    said = trial.cause(host=f"node{trial.node}", rank=trial.node - 1, exit_code=78)
    assert f"{DIGITS} (share, tmpfs) stopped delivering images" in said


def kill_controller(trial):
    trial.hurt_at = time.monotonic()
    os.kill(trial.run.controller, 9)
    trial.run.process.wait()
    assert trial.left(trial.hurt_at + ORPHANS) == []
    trial.run.start("--resume", trial.run.name)
    trial.finished_on(trial.all)
    trial.measure("controller killed: over everywhere", trial.all, ORPHANS)
