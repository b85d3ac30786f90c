"""A watch: which stage follows which; guards that send what no guard does, a byte now and then, or
nothing, and what is said of machines then."""

import os

import pytest

from boundary.frames import Exit, Process
from launcher.machines.local import LocalProcess
from launcher.watch.attempts import Outcome, describe_leftovers
from launcher.watch.watch import EXITS_WITHIN, SETTLE, SILENCE, STOP_GRACE, Stage, next_stage
from tests.unit.launcher.scripted_guards import OBEYS, watch

WAITS = "sys.stdin.read()"
settles_soon = pytest.mark.usefixtures("settles_soon")
RUNNING, SETTLING, STOPPING = Stage.RUNNING, Stage.SETTLING, Stage.STOPPING
ENDING, OVER = Stage.ENDING, Stage.OVER
LATE = STOP_GRACE + EXITS_WITHIN + 1


@pytest.mark.parametrize(
    ("stage", "seconds", "failed", "asked", "then"),
    [
        (RUNNING, 0, True, 0, SETTLING),
        (RUNNING, 0, False, 1, STOPPING),
        (SETTLING, SETTLE / 2, True, 0, SETTLING),
        (SETTLING, SETTLE, True, 0, ENDING),
        # Who asks while a failure settles gets checkpoints of those that still run.
        (SETTLING, SETTLE, True, 1, STOPPING),
        (STOPPING, STOP_GRACE, True, 1, STOPPING),
        (STOPPING, 0, False, 2, ENDING),
        (STOPPING, LATE, False, 1, ENDING),
        # The order to kill is given only once, whatever comes in.
        (ENDING, SILENCE / 2, True, 3, ENDING),
        (ENDING, SILENCE + 1, True, 0, OVER),
        (OVER, 1e6, True, 3, OVER),
    ],
)
def test_stages_follow_each_other(stage, seconds, failed, asked, then):
    assert next_stage(stage, seconds, failed, asked) is then


PIECE_OF_STEPS = {"type": "record", "file": "rank1.1.steps.jsonl", "offset": 0, "bytes": 4}
LIES = {
    "another rank": "say(type='log', rank=7, stream='stdout', bytes=3)",
    "deep": "sys.stdout.write('{\"type\": ' + '[' * 200000 + '\\n' + 'y' * (3 << 20))\n"
    "sys.stdout.flush()",
    "endless": "\nwhile True: sys.stdout.write('y' * 65536)",
    # Pieces of records, each with bytes that would be written.
    **{
        name: f"say(**{ {**PIECE_OF_STEPS, **odd}!r}); sys.stdout.write('abcd'); sys.stdout.flush()"
        for name, odd in {
            "another rank's record": {"file": "rank0.1.steps.jsonl"},
            "a record beyond its end": {"offset": 10},
        }.items()
    },
}


@settles_soon
@pytest.mark.parametrize("name", LIES)
def test_a_guard_that_lies_is_its_nodes_failure(tmp_path, name):
    """More lies: test_validate.py."""
    outcome, _ = watch(tmp_path, [OBEYS, LIES[name] + "\nsys.stdin.read()"])
    assert outcome.status == "failed"
    assert (outcome.cause.host, outcome.cause.source) == ("node2", "guard")
    assert "it sent something that no guard sends" in outcome.cause.message
    assert outcome.exits["node1"].reason == "killed"
    assert outcome.unreported_hosts == ["node2"]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == []


PEER_LOST = (
    "say(type='worker_exit', rank=0, exit_code=1, signal=None,"
    " exception='RuntimeError: Connection closed by peer', first=True)\n"
)
DEAF = "while True:\n    say(type='beat', unix=1.0, running=[1], disk_free=1)\n    time.sleep(0.1)"


@settles_soon
@pytest.mark.parametrize(
    ("said", "host"),
    [(PEER_LOST, "node2"), (PEER_LOST.replace("Connection closed by peer", "x"), "node1")],
    ids=["others only lost it", "another has a failure of its own"],
)
def test_who_holds_on_to_a_run_is_its_failure(tmp_path, monkeypatch, said, host):
    monkeypatch.setattr("launcher.watch.watch.SILENCE", 1.0)
    outcome, _ = watch(tmp_path, [said + OBEYS, DEAF])
    assert outcome.unreported_hosts == ["node2"] and outcome.cause.host == host
    told = "it got the order to end its processes, but continued" in (outcome.cause.message or "")
    assert told == (host == "node2")


def test_what_still_lives_is_named_in_few_words():
    left = [Process(number, "x" * 4000) for number in range(20_000)]
    ended = Exit("failed", None, None, None, 0.0, 1.0, {}, [], left)
    outcome = Outcome("failed", None, 1.0, [], {"node1": ended})
    (line,) = describe_leftovers(outcome)
    assert line.startswith("node1: still alive: 0 xxx") and line.endswith("x and 19995 more")
    assert len(line) < 1200


LOG = "say(type='log', rank=0, stream='stdout', bytes=1000000)"
DRIPS = "\nwhile True: sys.stdout.write('x'); sys.stdout.flush(); time.sleep(0.05)"
LIE = "say(type='upgrade')\n"


@pytest.mark.parametrize(
    ("said", "status"),
    [(LOG, "failed"), ("end('finished')", "finished")],
    ids=["half a log", "exit"],
)
def test_a_byte_now_and_then_is_no_sign_of_life(tmp_path, monkeypatch, said, status):
    monkeypatch.setattr("launcher.watch.watch.SILENCE", 1.0)
    outcome, _ = watch(tmp_path, [said + DRIPS])
    assert (outcome.status, outcome.lost_hosts) == (status, ["node1"])


@settles_soon
def test_a_machine_that_falls_silent_as_it_is_ended_hides_no_liar(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.watch.watch.SILENCE", 1.0)
    outcome, _ = watch(tmp_path, [WAITS, LIE + WAITS])
    assert (outcome.cause.host, outcome.cause.source) == ("node2", "guard")
    assert outcome.lost_hosts == ["node1"]


class Reopens(LocalProcess):
    """As a channel of paramiko, it has another descriptor once it was closed."""

    def close(self):
        self._stdin.close()
        self._stdout = os.fdopen(os.dup(self.fileno()), "rb")


@settles_soon
def test_a_liar_whose_connection_is_closed_ends_no_watch(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.unit.launcher.scripted_guards.LocalProcess", Reopens)
    outcome, _ = watch(tmp_path, [LIE + WAITS])
    assert (outcome.cause.host, outcome.cause.source) == ("node1", "guard")
