"""What happens to the control machine during a run, and what docs/launcher.md promises of it.

The trainer is a stand-in; machines, ssh, terminals and disks are real. The wall clock is that of
the controller's Python alone: machines of a lab have the clock of this one, which no test may set.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time

import pytest

from tests.lab.chaos_run import Running
from tests.lab.chaos_trial import ORPHANS
from tests.lab.control_machine import CTRL_Q, CTRL_S, CTRL_Z, fill

NODES = 2
LONGER_THAN_THE_LEASE = 20


def trains(run):
    run.wait_for(r"\] step 3\n", NODES)
    return run


def clean(run):
    """Nothing of it lives when guards without a controller have had their time."""
    limit = time.monotonic() + ORPHANS
    while run.processes() and time.monotonic() < limit:
        time.sleep(0.05)
    return run.processes() == []


def finished(run):
    """It has ended well, in one attempt."""
    assert run.end() == 0, run.said()
    assert "Traceback" not in run.said()
    (attempt,) = run.attempts()
    assert attempt["status"] == "finished" and attempt["first_cause"] is None
    assert (run.folder / "report.html").exists() and clean(run)


def steps(run, rank):
    log = (run.folder / f"nodes/node{rank + 1}/rank{rank}.log").read_text()
    return [int(number) for number in re.findall(r"^step (\d+)$", log, re.M)]


def test_a_terminal_that_is_stopped_ends_nothing(start):
    run = trains(start(25, terminal=True))
    run.press(CTRL_S)
    time.sleep(LONGER_THAN_THE_LEASE)
    shown = len(run.said())
    run.press(CTRL_Q)
    finished(run)
    for rank in range(NODES):
        assert steps(run, rank) == list(range(1, 25 * 13 + 1))
    kept = (run.folder / "controller.log").read_text()
    assert len(run.said()) > shown and "lines not shown" not in run.said()
    assert run.said().count("] step ") == kept.count("] step ") == NODES * 25 * 13


def test_a_terminal_that_is_stopped_for_good_ends_nothing(start):
    run = trains(start(25, terminal=True))
    folder = run.folder
    run.press(CTRL_S)
    assert run.end() == 0
    assert "everything is in runs/" in (folder / "controller.log").read_text()
    assert (folder / "report.html").exists() and clean(run)


def test_ctrl_z_is_refused(start):
    run = trains(start(5, terminal=True))
    run.press(CTRL_Z)
    run.wait_for("tandem: Ctrl-Z would end the run on every machine, so it is ignored")
    finished(run)


def test_a_window_that_is_closed_ends_nothing_under_nohup(start):
    run = trains(start(10, terminal=True, before="trap '' HUP"))
    folder = run.folder
    run.hang_up()
    assert run.end() == 0
    assert "everything is in runs/" in (folder / "controller.log").read_text() and clean(run)


@pytest.mark.parametrize(("size", "forced"), [(60, True), (600, False)])
def test_a_run_is_refused_where_its_disk_is_full(start, small_disk, size, forced):
    run = start(1, *(["--force"] if forced else []), disk=small_disk(size))
    assert run.end() == 2
    assert re.search(r"^tandem: this machine: only \d+ MiB free where runs/ lies", run.said(), re.M)
    assert ("FORCE=1" in run.said()) == (not forced)
    assert ", attempt 1" not in run.said() and list(run.disk.iterdir()) == []


def test_a_disk_that_is_full_for_a_while_costs_lines_alone(start, small_disk):
    run = trains(start(25, disk=small_disk(1200)))
    full = fill(run.disk)
    run.wait_for("tandem: this machine's disk")
    time.sleep(LONGER_THAN_THE_LEASE)
    full.unlink()
    run.wait_for("takes lines again")
    finished(run)
    for rank in range(NODES):
        log = (run.folder / f"nodes/node{rank + 1}/rank{rank}.log").read_text()
        (missing,) = re.findall(r"^tandem: (\d+) lines are missing here", log, re.M)
        assert int(missing) + len(log.splitlines()) == 25 * 13 + 2  # `training`, and that line


def test_a_disk_that_is_full_at_the_end_is_a_sentence(start, small_disk):
    run = trains(start(5, disk=small_disk(1200)))
    full = fill(run.disk)
    assert run.end() == 74, run.said()
    assert run.said().count("this machine's disk took no more of the run's records") == 1
    assert "Traceback" not in run.said() and run.attempts()[0]["status"] == "finished"
    assert clean(run) and full.exists()


def test_too_few_open_files_are_a_sentence(start):
    run = start(1, before="ulimit -n 100")
    assert run.end() == 2
    assert run.said() == (
        "tandem: 2 machines need about 144 open files, and this machine allows 100 (`ulimit -Hn`): "
        "raise nofile in /etc/security/limits.conf, or give fewer NODES.\n"
    )


def test_few_open_files_are_enough(start):
    finished(start(2, before="ulimit -Sn 20; ulimit -Hn 150"))


CLOCK = """
import time
real, begin = time.time, time.monotonic()
def jumps():
    seconds = time.monotonic() - begin
    return real() + (86400 if 8 < seconds < 12 else -86400 if seconds >= 12 else 0)
time.time = jumps
"""


def test_a_clock_that_is_set_ends_nothing(start, tmp_path):
    """A day forwards, then two days back."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    run = start(25, before=f"export PYTHONPATH={shlex.quote(str(tmp_path))}")
    finished(run)
    assert run.attempts()[0]["wall_seconds"] < 600


@pytest.fixture
def network(machines):
    """network(False): of all that the control machine sends and gets nothing arrives; the machines
    go on to see each other. network(True): as before."""
    inside = ["ip", "netns", "exec", f"{machines.name}-control", "nft"]
    rules = (
        "table inet torture { chain i { type filter hook input priority 0; policy drop; }; "
        "chain o { type filter hook output priority 0; policy drop; }; }"
    )

    def switch(on, check=True):
        words = ["delete", "table", "inet", "torture"] if on else [rules]
        subprocess.run([*inside, *words], check=check, stderr=subprocess.PIPE)

    yield switch
    switch(True, check=False)  # a test that failed may have left it off


def test_a_network_that_is_away_ends_a_run_that_goes_on_later(start, network):
    run = trains(start(30, "--", "--checkpoint_every", "2"))
    cut_at = time.monotonic()
    network(False)
    assert run.end() == 1
    assert run.said().count("does not answer; its guard ends its part by itself") == NODES
    assert (
        "tandem: no machine answers: check first that this one is connected to the network\n"
        in run.said()
    )
    assert "Traceback" not in run.said()
    network(True)
    over = [entry["mono_end"] for entry in ends(run)]
    assert len(over) == NODES and max(over) - cut_at < LONGER_THAN_THE_LEASE
    assert clean(run)
    run.start("--resume", run.name)
    assert run.end() == 0, run.said()
    assert run.attempts()[-1]["resumed_samples"] > 0


def ends(run):
    """What the guards of the first attempt wrote down as they ended, on the machines."""
    line = f"tail -qn 1 tandem/runs/{run.name}/nodes/*/machine.1.jsonl"
    found = [json.loads(run.lab.ssh(node, line)) for node in range(1, NODES + 1)]
    return [last for last in found if last["kind"] == "exit"]


def test_of_two_that_resume_one_goes_on(start, tmp_path):
    run = trains(start(10, "--", "--checkpoint_every", "2"))
    os.kill(run.controller, signal.SIGKILL)
    run.process.wait()
    assert clean(run)
    (tmp_path / "second").mkdir()
    second = Running(run.lab, tmp_path / "second", run.mark, "--resume", run.name)
    run.start("--resume", run.name)
    codes = [run.end(), second.end()]
    assert sorted(codes) == [0, 2], run.said() + second.said()
    refused = (run, second)[codes.index(2)].said()
    assert "is being carried out by process" in refused or "it is in use by" in refused
    assert [one["status"] for one in run.attempts()] == ["failed", "finished"]
    assert clean(run)


@pytest.mark.parametrize("seconds", [8, 30])
def test_a_controller_that_is_stopped_for_a_while(start, seconds):
    run = trains(start(15))
    os.kill(run.controller, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(run.controller, signal.SIGCONT)
    if seconds < LONGER_THAN_THE_LEASE:
        finished(run)
    else:
        assert run.end() == 1
        told = run.attempts()[0]["first_cause"]["message"]
        assert re.match(r"the control machine did not run for (29|3\d) s", told)
        assert clean(run) and "switched on" not in run.said()
    assert "tandem: this machine did not run for " in run.said()
