"""A defect in what is done for one machine is that machine's failure alone."""

from pathlib import Path

import pytest

from launcher.watch.guards import Guarded
from launcher.watch.lines import RankLog
from tests.unit.launcher.scripted_guards import watch

pytestmark = pytest.mark.usefixtures("settles_soon")
GOOD = "for line in sys.stdin:\n    if 'kill' in line: end('killed'); break\n"


def planted(monkeypatch, owner, name, here):
    real = getattr(owner, name)

    def broken(*args, **more):
        if here(*args):
            raise LookupError("planted")
        return real(*args, **more)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("order", ["send", "renew"])
def test_a_defect_in_what_a_machine_is_sent_is_its_failure_alone(tmp_path, monkeypatch, order):
    """In what it sends: test_records.py."""
    monkeypatch.setattr("launcher.watch.watch.RENEW_EVERY", 0.1)
    planted(monkeypatch, Guarded, order, lambda guard, *_: guard.node.host == "node2")
    outcome, _ = watch(tmp_path, [GOOD, "sys.stdin.read()"])
    assert outcome.status == "failed" and outcome.exits["node1"]["reason"] == "killed"
    assert outcome.cause.host == "node2"
    assert f"LookupError: planted ({Path(__file__).name}:" in outcome.cause.message


def test_a_defect_in_a_machines_last_lines_ends_no_run(tmp_path, monkeypatch):
    planted(monkeypatch, RankLog, "close", lambda log: "node1" in log._label)
    say = "say(type='log', rank=task['ranks'][0], stream='stdout', bytes=1)\n"
    say += "print('x', end='', flush=True)\nend('finished')"
    outcome, _ = watch(tmp_path, [say, say])
    assert outcome.status == "finished"
    assert (tmp_path / "nodes/node2/rank1.log").read_text() == "x\n"
