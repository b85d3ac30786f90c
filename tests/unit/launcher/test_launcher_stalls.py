"""What must not end a run: a terminal that takes nothing, a stopped controller, a full disk; and a
guard that sends what no guard does."""

import errno
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launcher import spool
from launcher.after.messages import proof
from launcher.after.sizes import MIB
from launcher.before import problems
from launcher.during import attempts, kept, lines, pauses, stages
from launcher.during.cause import Failure, first_of
from launcher.during.kept import KeptLog
from launcher.during.lines import RunLogs, Terminal
from launcher.during.pitfalls import explain
from launcher.during.stopper import Stopper
from launcher.during.watch import LEASE, Outcome, Watch
from launcher.engines.local import LocalProcess
from tests.unit.launcher.launcher_values import build, facts, host

pytestmark = pytest.mark.usefixtures("settles_soon")
CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def pipe():
    """A terminal that takes nothing until somebody reads."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as there, os.fdopen(writer, "w") as here:
        yield there, here


def within(seconds, work):
    """Whether a piece of work ends in time."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_a_stalled_terminal_holds_up_nothing_and_the_log_is_whole(pipe, tmp_path):
    reader, out = pipe
    terminal = Terminal(out)
    terminal.keep_in(tmp_path / "controller.log")
    lines = [f"line {number} {'x' * 100}" for number in range(80_000)]

    def show():
        for start in range(0, len(lines), 100):
            terminal.lines(lines[start : start + 100])

    assert within(60, show), "showing waited for the terminal"
    terminal.spool.drain()
    assert (tmp_path / "controller.log").read_text().splitlines() == lines
    shown = bytearray()

    def take():
        while b"\nlast\n" not in shown:
            shown.extend(os.read(reader.fileno(), 1 << 16))

    terminal.line("last")
    assert within(60, take)
    assert terminal.drain()
    seen = shown.decode().splitlines()
    assert seen[0] == lines[0] and seen[-2:] == [lines[-1], "last"]
    told = [line for line in seen if line.startswith("tandem: ")]
    assert len(told) == 1 and "lines not shown: the terminal took none for a while" in told[0]
    assert int(told[0].split()[1]) == len(lines) + 2 - len(seen)


def test_a_terminal_that_never_takes_anything_is_left_in_the_end(pipe, monkeypatch):
    _, out = pipe
    terminal = Terminal(out)
    terminal.lines(["x" * 100] * 10_000)
    assert terminal._screen.drain(0.3) is False


GUARD = """
import json, sys, time
def say(**frame):
    sys.stdout.write(json.dumps(frame) + "\\n")
    sys.stdout.flush()
task = json.loads(sys.stdin.readline())
say(type="hello", protocol=1, way="service")
def end(reason):
    say(type="exit", reason=reason, message=None, exit_code=0, signal=None, mono_start=0.0,
        mono_end=1.0, workers={}, ended=[], left=[])
"""


def watch(tmp_path, scripts, terminal=None):
    """An attempt of guards that run these scripts. Returns its outcome and what was said."""
    said = io.StringIO()
    nodes = range(1, len(scripts) + 1)
    hosts = [host(n, connection="local", address="127.0.0.1") for n in nodes]
    plan = build(hosts, [facts(n) for n in nodes])
    processes = {
        f"node{n}": LocalProcess([sys.executable, "-c", GUARD + script])
        for n, script in zip(nodes, scripts)
    }
    logs = RunLogs(tmp_path, terminal or Terminal(said), len(scripts))
    try:
        return Watch(plan, processes, logs, Stopper()).run(), said.getvalue()
    finally:
        logs.close()
        for process in processes.values():
            process.close()


GOOD = "for line in sys.stdin:\n    if 'kill' in line: end('killed'); break\n"
LIES = {
    "another rank": "say(type='log', rank=7, stream='stdout', bytes=3)",
    "a path": "say(type='log', rank='../../../.bashrc', stream='stdout', bytes=3)",
    "no rank": "say(type='worker_exit', exit_code=1)",
    "no number": "say(type='worker_exit', rank=1, exit_code='1', signal=None, exception=None,"
    " first=True)",
    "size": "say(type='log', rank=1, stream='stdout', bytes=-5)",
    "type": "say(type=['exit'])",
    "unknown": "say(type='upgrade')",
    "empty exit": "say(type='exit')",
    "left": "say(type='exit', reason='failed', message=None, exit_code=0, signal=None,"
    " mono_start=0.0, mono_end=1.0, workers={}, ended=[], left=['x'])",
    "reason": "end('because')",
    "message": "say(type='trouble', what='x', message={'a': 1})",
    "deep": "sys.stdout.write('{\"type\": ' + '[' * 200000 + '\\n' + 'y' * (3 << 20))\n"
    "sys.stdout.flush()",
    "endless": "\nwhile True: sys.stdout.write('y' * 65536)",
}


@pytest.mark.parametrize("name", LIES)
def test_a_guard_that_lies_is_its_nodes_failure(tmp_path, name):
    outcome, _ = watch(tmp_path, [GOOD, LIES[name] + "\nsys.stdin.read()"])
    assert outcome.status == "failed"
    assert (outcome.cause.host, outcome.cause.kind) == ("node2", "guard")
    assert "it sent something that no guard sends" in outcome.cause.message
    assert outcome.exits["node1"]["reason"] == "killed"
    assert outcome.lingering == ["node2"]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == []


PEER_LOST = (
    "say(type='worker_exit', rank=0, exit_code=1, signal=None,"
    " exception='RuntimeError: Connection closed by peer', first=True)\n"
)
DEAF = "while True:\n    say(type='beat', unix=1.0, running=[1], disk_free=1)\n    time.sleep(0.1)"


@pytest.mark.parametrize(
    ("said", "host"),
    [(PEER_LOST, "node2"), (PEER_LOST.replace("Connection closed by peer", "x"), "node1")],
    ids=["others only lost it", "another has a failure of its own"],
)
def test_who_holds_on_to_a_run_is_its_failure(tmp_path, monkeypatch, said, host):
    monkeypatch.setattr(stages, "SILENCE", 1.0)
    outcome, _ = watch(tmp_path, [said + GOOD, DEAF])
    assert outcome.lingering == ["node2"] and outcome.cause.host == host
    told = "it was told to end its part, and went on" in (outcome.cause.message or "")
    assert told == (host == "node2")


def test_what_still_lives_is_named_in_few_words():
    left = [{"pid": number, "command": "x" * 4000} for number in range(20_000)]
    outcome = Outcome("failed", None, 1.0, [], {"node1": {"left": left, "ended": []}})
    (line,) = proof(outcome)
    assert line.startswith("node1: still alive: 0 xxx") and line.endswith("x and 19995 more")
    assert len(line) < 1200


def test_what_a_guard_says_is_shown_clean(tmp_path):
    told = r"say(type='trouble', what='x', message='\x1b]0;owned\x07disk \ud800 full')"
    told += "\nend('finished')"
    outcome, said = watch(tmp_path, [told])
    assert outcome.status == "finished"
    assert said == "tandem: node1: disk \ufffd full\n"


def test_a_pause_of_the_controller_is_no_silence_of_a_node(tmp_path, monkeypatch):
    """The clock jumps as after Ctrl-Z or a closed lid; the node went on all the time."""
    jump = iter([0.0, 0.0, 40.0])
    offset = [0.0]

    def now():
        offset[0] = max(offset[0], next(jump, 40.0))
        return offset[0]

    monkeypatch.setattr(pauses, "now", now)
    script = "time.sleep(1.5)\nend('lease')"
    outcome, said = watch(tmp_path, [script])
    assert "tandem: this machine did not run for 40 s: it was stopped, asleep or overloaded" in said
    assert (outcome.cause.kind, outcome.gone) == ("paused", [])
    message, remedy = explain(outcome.cause)
    assert "the control machine did not run for 40 s" in message and "switched on" not in remedy


def test_a_paused_controller_explains_what_follows():
    paused = Failure(host="node1", kind="paused", order=2, message="x")
    killed = Failure(
        host="node2", kind="worker", order=1, signal="SIGKILL", first_on_node=False, rank=1
    )
    assert first_of([killed, paused]) is paused
    assert pauses.LONGEST_TURN < LEASE / 2


def test_ctrl_z_is_refused():
    script = (
        "import os, signal\nfrom launcher.during.stopper import Stopper\nstopper = Stopper()\n"
        "with stopper.listening():\n"
        "    os.kill(os.getpid(), signal.SIGTSTP)\n"
        "    print(stopper.suspended, signal.getsignal(signal.SIGTTOU) is signal.SIG_IGN)\n"
        "print(signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    ) as child:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        stopped = os.WIFSTOPPED(status)
        if stopped:
            child.kill()
        else:
            child.returncode = os.waitstatus_to_exitcode(status)
        said = child.stdout.read()
    assert not stopped
    assert said == "True True\nTrue\n"


class Full:
    """os.write as on a full disk while `full` is set."""

    def __init__(self, monkeypatch):
        self.full, self.write = False, os.write
        monkeypatch.setattr(kept.os, "write", self)

    def __call__(self, fd, data):
        if self.full:
            self.write(fd, data[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.write(fd, data)


@pytest.fixture
def run_logs(tmp_path):
    """The logs of a run of one rank, and what its terminal shows."""
    screen = io.StringIO()
    logs = RunLogs(tmp_path, Terminal(screen), 1)

    def look():
        """What was said of the disk until now."""
        logs.look()
        lines = screen.getvalue().splitlines()
        return [line for line in lines if line.startswith("tandem: this machine's disk")]

    return logs, look, tmp_path / "nodes/node1/rank0.log"


def test_a_full_disk_costs_lines_and_says_so(run_logs, monkeypatch):
    logs, look, path = run_logs
    disk = Full(monkeypatch)
    logs.feed("node1", 0, "stdout", b"before\n")
    logs.terminal.spool.drain()
    disk.full = True
    for number in range(5):
        logs.feed("node1", 0, "stdout", b"lost %d\n" % number)
    logs.terminal.spool.drain()
    assert len(look()) == len(look()) == 1 and "disk is full" in look()[0]
    disk.full = False
    logs.feed("node1", 0, "stdout", b"after\n")
    logs.terminal.spool.drain()
    assert len(look()) == 2 and "takes lines again" in look()[1]
    logs.close()
    assert path.read_text().splitlines() == [
        "before",
        "tandem: 5 lines are missing here: this machine's disk took none",
        "after",
    ]


def test_a_disk_that_hangs_holds_up_nothing(run_logs, monkeypatch):
    """As an NFS server does that went away: a write returns when it is back, or never."""
    logs, look, path = run_logs
    back, write = threading.Event(), kept.os.write
    monkeypatch.setattr(spool, "BACKLOG", 1000)
    monkeypatch.setattr(lines, "STALLED", 1e-6)
    monkeypatch.setattr(kept.os, "write", lambda *words: back.wait(60) and write(*words))
    told = [b"line %02d %s\n" % (number, b"x" * 80) for number in range(30)]
    try:
        assert within(20, lambda: [logs.feed("node1", 0, "stdout", one) for one in told])
        assert "disk is full or takes nothing" in look()[-1]
    finally:
        back.set()
    logs.terminal.spool.drain()
    logs.feed("node1", 0, "stdout", b"after\n")
    logs.terminal.spool.drain()
    assert "takes lines again" in look()[-1]
    logs.close()
    *first, missing, last = path.read_text().splitlines()
    assert first == [one.decode().strip() for one in told[: len(first)]] and 5 < len(first) < 20
    assert (
        missing.startswith(f"tandem: {30 - len(first)} lines are missing here") and last == "after"
    )


def test_a_log_whose_folder_cannot_be_made_ends_nothing(run_logs):
    logs, look, path = run_logs
    path.parent.parent.write_text("in the way")
    logs.feed("node1", 0, "stdout", b"lost\n")
    logs.terminal.spool.drain()
    assert "are left out" in look()[0]
    path.parent.parent.unlink()
    logs.feed("node1", 0, "stdout", b"after\n")
    logs.close()
    assert path.read_text().splitlines()[0].startswith("tandem: 1 lines are missing here")


def test_a_log_that_cannot_be_rotated_grows_on_and_keeps_its_file(tmp_path, monkeypatch):
    log = KeptLog(tmp_path / "log", 1600)
    refuse = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(refuse))
        for number in range(30):
            log.write([f"line {number}"])
    log.write(["rotated"])
    log.write(["after"])
    log.close()
    first = (tmp_path / "log.first").read_text().splitlines()
    assert first == [*(f"line {number}" for number in range(30)), "rotated"]
    assert (tmp_path / "log").read_text() == "after\n" and log.lost == 0


def test_logs_leave_room_for_what_matters(tmp_path, monkeypatch):
    log = KeptLog(tmp_path / "log", MIB)
    monkeypatch.setattr(kept, "RESERVE", 1 << 62)
    log._looked = 0.0
    log.write(["x"])
    assert log.lost == 1 and not (tmp_path / "log").exists()


def test_a_log_keeps_its_beginning_and_its_end(tmp_path):
    log = KeptLog(tmp_path / "rank0.log", 64 << 10)
    lines = [f"line {number:06}" for number in range(40_000)]
    for start in range(0, len(lines), 50):
        log.write(lines[start : start + 50])
    log.close()
    files = kept.parts(tmp_path / "rank0.log")
    assert sum(path.stat().st_size for path in files) <= (64 << 10) + 5 * 600
    assert files[0].name == "rank0.log.first" and files[-1].name == "rank0.log"
    first = files[0].read_text().splitlines()
    assert first == lines[: len(first)] and len(first) > 200
    rest = [line for path in files[1:] for line in path.read_text().splitlines()]
    assert rest == lines[-len(rest) :] and len(rest) > 3000


def test_attempts_survive_a_full_disk(tmp_path, monkeypatch):
    held = attempts.Attempts(tmp_path)
    held.begin(build([host(1)], [facts(1)]), "first attempt", 0.0)
    seen, full = attempts.write_json, []

    def write_json(path, value):
        if (tmp_path / ".spare").exists() or full:  # nothing is free but what was kept for it
            raise OSError(errno.ENOSPC, "No space left on device")
        seen(path, value)

    monkeypatch.setattr(attempts, "write_json", write_json)
    assert (tmp_path / ".spare").stat().st_size == attempts.SPARE
    held.close("failed")
    assert json.loads((tmp_path / "attempts.json").read_text())["status"] == "failed"
    full.append(True)
    held.close("finished")
    assert "No space left on device" in held.problem
    assert json.loads((tmp_path / "attempts.json").read_text())["status"] == "failed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempts.json"]


def test_preflight_looks_at_this_machines_disk():
    assert problems.of_control(2 << 30) == []
    (soft,) = problems.of_control(900 << 20)
    (hard,) = problems.of_control(90 << 20)
    assert not soft.fatal and hard.fatal
    assert "this machine: only 900 MiB free where runs/ lies" in soft.text
