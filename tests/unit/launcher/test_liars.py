"""A guard that sends what no guard does, and what is said of machines then."""

import pytest

from boundary.frames import Exit, Process
from launcher.watch.attempts import Outcome, leftovers
from tests.unit.launcher.scripted_guards import watch

pytestmark = pytest.mark.usefixtures("settles_soon")
GOOD = "for line in sys.stdin:\n    if 'kill' in line: end('killed'); break\n"
LIES = {
    "another rank": "say(type='log', rank=7, stream='stdout', bytes=3)",
    "deep": "sys.stdout.write('{\"type\": ' + '[' * 200000 + '\\n' + 'y' * (3 << 20))\n"
    "sys.stdout.flush()",
    "endless": "\nwhile True: sys.stdout.write('y' * 65536)",
}


@pytest.mark.parametrize("name", LIES)
def test_a_guard_that_lies_is_its_nodes_failure(tmp_path, name):
    """More lies: test_validate.py."""
    outcome, _ = watch(tmp_path, [GOOD, LIES[name] + "\nsys.stdin.read()"])
    assert outcome.status == "failed"
    assert (outcome.cause.host, outcome.cause.source) == ("node2", "guard")
    assert "it sent something that no guard sends" in outcome.cause.message
    assert outcome.exits["node1"].reason == "killed"
    assert outcome.unresponsive == ["node2"]
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
    monkeypatch.setattr("launcher.watch.watch.SILENCE", 1.0)
    outcome, _ = watch(tmp_path, [said + GOOD, DEAF])
    assert outcome.unresponsive == ["node2"] and outcome.cause.host == host
    told = "it was told to end its part, but went on" in (outcome.cause.message or "")
    assert told == (host == "node2")


def test_what_still_lives_is_named_in_few_words():
    left = [Process(number, "x" * 4000) for number in range(20_000)]
    ended = Exit("failed", None, None, None, 0.0, 1.0, {}, [], left)
    outcome = Outcome("failed", None, 1.0, [], {"node1": ended})
    (line,) = leftovers(outcome)
    assert line.startswith("node1: still alive: 0 xxx") and line.endswith("x and 19995 more")
    assert len(line) < 1200
