"""What must not end a run: a terminal that takes nothing, a stopped controller, a full disk."""

import errno
import io
import json
import os
import selectors
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher import background
from launcher.background import MIB, RotatingLog
from launcher.terminal import Stopper, Terminal
from launcher.watch import attempts, lines
from launcher.watch.failures import explain_failure
from launcher.watch.lines import RunLogs
from launcher.watch.ruling import Ruling
from launcher.watch.watch import Watch
from report.hang import Hang
from tests.unit.launcher.launcher_values import build, facts, host
from tests.unit.launcher.scripted_guards import OBEYS, watch

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
    terminal.open_log(tmp_path / "controller.log")
    lines = [f"line {number} {'x' * 100}" for number in range(80_000)]

    def show():
        for start in range(0, len(lines), 100):
            terminal.lines(lines[start : start + 100])

    assert within(60, show), "showing waited for the terminal"
    assert terminal._screen.drain(0.1) is False  # left in the end, if it never takes anything
    terminal.spool.drain()
    assert (tmp_path / "controller.log").read_text().splitlines() == lines
    shown = bytearray()

    def take():
        while b"\nlast\n" not in shown:
            shown.extend(os.read(reader.fileno(), 1 << 16))

    terminal.lines(["last"])
    assert within(60, take)
    assert terminal.drain()
    seen = shown.decode().splitlines()
    assert seen[0] == lines[0] and seen[-2:] == [lines[-1], "last"]
    told = [line for line in seen if line.startswith("tandem: ")]
    assert len(told) == 1 and "lines are not shown, because the terminal stopped reading" in told[0]
    assert int(told[0].split()[1]) == len(lines) + 2 - len(seen)


def test_a_pause_while_it_waits_is_known_before_silence_is_judged(tmp_path, monkeypatch):
    """Stopped within select(), as it nearly always is; what the guards sent comes a little later,
    through the thread that reads ssh."""
    offset, waits = [0.0], []

    class Stopped(selectors.DefaultSelector):
        def select(self, timeout=None):
            waits.append(timeout)
            if len(waits) == 3:
                offset[0] = 40.0
                return []
            return super().select(timeout)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + offset[0])
    monkeypatch.setattr("launcher.watch.watch.time", clock)
    monkeypatch.setattr("launcher.watch.watch.boottime", clock.monotonic)
    monkeypatch.setattr(selectors, "DefaultSelector", Stopped)
    monkeypatch.setattr("launcher.watch.watch.RENEW_EVERY", 0.05)
    outcome, said = watch(tmp_path, ["time.sleep(0.6)\nend('lease')"])
    assert "tandem: this machine did not run for 4" in said and len(waits) >= 3
    assert "the control node did not run for 4" in outcome.cause.message
    assert (outcome.cause.source, outcome.lost_hosts) == ("paused", [])


def test_ctrl_z_is_refused():
    before = signal.getsignal(signal.SIGTSTP)
    with Stopper().listening() as stopper:
        assert signal.getsignal(signal.SIGTSTP) != before  # which would stop this process
        os.kill(os.getpid(), signal.SIGTSTP)
        assert signal.getsignal(signal.SIGTTOU) is signal.SIG_IGN
    assert stopper.suspended and signal.getsignal(signal.SIGTSTP) == before


class Full:
    """Makes os.write behave as on a full disk while `full` is set."""

    def __init__(self, monkeypatch):
        self.full, self.write = False, os.write
        monkeypatch.setattr(os, "write", self)

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
        """What has been said about the disk so far."""
        logs.report_disk()
        lines = screen.getvalue().splitlines()
        return [line for line in lines if line.startswith("tandem: the control node's disk")]

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
        "tandem: 5 lines are missing here: the control node's disk was full or failed",
        "after",
    ]


@pytest.mark.parametrize("text", [b"x" * 80, b""])
def test_a_disk_that_hangs_holds_up_nothing(run_logs, monkeypatch, text):
    """Behaves like an NFS server that went away: a write returns when it is back, or never. Lines
    without text take memory, too."""
    logs, look, path = run_logs
    back, begun, write = threading.Event(), threading.Event(), os.write
    told = [b"%02d %s\n" % (number, text) if text else b"\n" for number in range(30)]
    limit = 10 * (len(told[0]) + background.WRITE_OVERHEAD)
    monkeypatch.setattr(background, "SPOOL_CHARACTERS", limit)
    monkeypatch.setattr(lines, "STALL_SECONDS", 1e-6)

    def hang(*words):
        begun.set()
        return back.wait(60) and write(*words)

    monkeypatch.setattr(os, "write", hang)
    feed = partial(logs.feed, "node1", 0, "stdout")
    try:
        feed(told[0])
        assert begun.wait(60)  # from here on the spool has room for ten more lines
        assert within(20, lambda: [feed(one) for one in told[1:]])
        assert "disk is full or hangs" in look()[-1]
    finally:
        back.set()
    logs.terminal.spool.drain()
    feed(b"after\n")
    logs.terminal.spool.drain()
    assert "takes lines again" in look()[-1]
    logs.close()
    *first, missing, last = path.read_text().splitlines()
    assert first == [one.decode().strip() for one in told[:11]] and last == "after"
    assert missing.startswith("tandem: 19 lines are missing here")


def test_a_log_that_cannot_be_rotated_grows_on_and_keeps_its_file(tmp_path, monkeypatch):
    log = RotatingLog(tmp_path / "log", 1600)
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
    assert (tmp_path / "log").read_text() == "after\n" and log.lost_lines == 0


def test_logs_leave_room_for_what_matters(tmp_path, monkeypatch):
    log = RotatingLog(tmp_path / "log", MIB)
    monkeypatch.setattr("launcher.background.RESERVED_BYTES", 1 << 62)
    log._checked_at = 0.0
    log.write(["x"])
    assert log.lost_lines == 1 and not (tmp_path / "log").exists()


def test_a_log_keeps_its_beginning_and_its_end(tmp_path):
    log = RotatingLog(tmp_path / "rank0.log", 64 << 10)
    lines = [f"line {number:06}" for number in range(40_000)]
    for start in range(0, len(lines), 50):
        log.write(lines[start : start + 50])
    log.close()
    path = tmp_path / "rank0.log"
    files = [file for file in (*background.older_files(path), path) if file.exists()]
    assert sum(path.stat().st_size for path in files) <= (64 << 10) + 5 * 600
    assert files[0].name == "rank0.log.first" and files[-1].name == "rank0.log"
    first = files[0].read_text().splitlines()
    assert first == lines[: len(first)] and len(first) > 200
    rest = [line for path in files[1:] for line in path.read_text().splitlines()]
    assert rest == lines[-len(rest) :] and len(rest) > 3000


def test_attempts_survive_a_full_disk(tmp_path, monkeypatch):
    held = attempts.Attempts(tmp_path)
    held.begin(build([host(1)], [facts(1)]), "first attempt", 0.0)

    def write_json(path, value):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(attempts, "write_json", write_json)
    held.close("finished")
    assert "No space left on device" in held.problem
    assert json.loads((tmp_path / "attempts.json").read_text())["status"] == "running"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempts.json"]


GIVES_UP = """
say(type="worker_exit", rank=%d, exit_code=1, signal=None, first=True, exception=%r)
end("failed")
"""


LEFT = """
say(type="worker_exit", rank=%d, first=False, exit_code=0, signal=None, exception=%r)
end("finished")
"""
LOST = "RuntimeError: [gloo/x.cc] Connection closed by peer [192.0.2.2]:1"
BAD_LABEL = "ValueError: label 7 of cat.jpg is not in [0, 2)"


@pytest.mark.parametrize(
    ("exception", "source"),
    [
        (LOST, "left"),
        ("ValueError: of its own", "worker"),
    ],
)
def test_a_rank_that_left_in_order_is_why_another_lost_it(tmp_path, monkeypatch, exception, source):
    """As where ranks have unequal numbers of batches; whichever is heard of first."""
    monkeypatch.setattr("launcher.watch.watch.SETTLE", 5)
    for later in ("", "time.sleep(0.3)"):
        outcome, _ = watch(tmp_path, [GIVES_UP % (0, exception), later + LEFT % (1, None)])
        who = ("node2", 1) if source == "left" else ("node1", 0)
        assert (outcome.cause.source, outcome.cause.host, outcome.cause.rank) == (source, *who)


@pytest.mark.parametrize(
    ("other", "status"),
    [
        (LEFT % (0, LOST), "finished"),
        (GIVES_UP % (0, LOST), "failed"),
        ("time.sleep(0.3)" + GIVES_UP % (0, "KeyError: 'x'"), "failed"),
    ],
)
def test_an_exception_is_the_first_cause_though_its_rank_ended_with_0(
    tmp_path, monkeypatch, other, status
):
    monkeypatch.setattr("launcher.watch.watch.SETTLE", 5)
    outcome, _ = watch(tmp_path, [other, LEFT % (1, BAD_LABEL)])
    message, _ = explain_failure(outcome.cause)
    assert (outcome.status, attempts.choose_exit_code(outcome)) == (status, int(status == "failed"))
    assert f"node2, rank 1 ended with 0 after it printed {BAD_LABEL}" in message
    assert ("KeyError: 'x'" in message) == ("KeyError" in other)


def test_an_error_is_among_the_last_lines_whatever_was_printed_after_it(tmp_path):
    text = "".join(f"later {number}\n" for number in range(40))
    log = f"say(type='log', rank=0, stream='stderr', bytes={len(text)})\n"
    log += f"sys.stdout.write({text!r}); sys.stdout.flush()"
    last = watch(tmp_path, [log + GIVES_UP % (0, BAD_LABEL)])[0].cause.last_lines
    assert (len(last), last[0], last[-1]) == (lines.LAST_LINES, BAD_LABEL, "later 39")


IDLE = """
say(type="beat", unix=1.0, running=[1], idle=%s)
for number, line in enumerate(sys.stdin):
    if '"kill"' in line or number == %d:
        end("killed" if '"kill"' in line else "finished")
        break
"""


@pytest.mark.parametrize(("seconds", "idle"), [(601, 601), (601, 599), (601, None), (599, 601)])
def test_a_run_ends_when_one_rank_is_done_and_no_other_has_done_anything_for_long(
    tmp_path, monkeypatch, idle, seconds
):
    """`seconds` after the first one ended; `idle` is what the other machine counts."""
    monkeypatch.setattr("launcher.watch.watch.RENEW_EVERY", 0.05)
    monkeypatch.setattr("launcher.watch.watch.SETTLE", 0)
    monkeypatch.setattr(Watch, "_elapsed_seconds", lambda watch: seconds if watch._exited else 0)
    ends = idle == seconds == 601
    # It leaves by itself only where nothing ends it: the other guard may take long to begin.
    outcome, _ = watch(tmp_path, [LEFT % (0, None), IDLE % (idle, 1000 if ends else 8)])
    cause = outcome.cause and (outcome.cause.source, outcome.cause.rank)
    assert cause == (("idle", 1) if ends else None)


@pytest.mark.parametrize(
    ("exception", "source"),
    [
        ("RuntimeError: [gloo/x.cc] Timed out waiting 120000ms for recv operation", "hung"),
        ("ValueError: of its own", "worker"),
    ],
)
def test_the_rank_that_the_others_waited_for_is_the_first_cause(
    tmp_path, monkeypatch, exception, source
):
    """Rank 0 gives up; its error says only that another did not come."""
    hang = Hang(107.0, [("node2", 1)], "its process is stopped")
    monkeypatch.setattr(Ruling, "report_hang", lambda self, *_: None)  # nothing is recorded here
    seen = property(lambda _: hang, lambda *_: None)
    monkeypatch.setattr(Ruling, "hang", seen, raising=False)
    outcome, _ = watch(tmp_path, [GIVES_UP % (0, exception), OBEYS])
    who = ("node2", 1) if source == "hung" else ("node1", 0)
    cause = outcome.cause
    assert (cause.source, cause.host, cause.rank) == (source, *who)
