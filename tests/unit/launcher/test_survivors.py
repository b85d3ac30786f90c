"""Which machines a run goes on with after a start, where some have owners, and some are not fit."""

import io
from types import SimpleNamespace

import pytest

from contract.errors import UserError
from contract.options import Config
from launcher import participants
from launcher.look import OpenMachines
from launcher.machines import owned
from launcher.machines.owned import Owner
from launcher.notify import Notify
from launcher.participants import Participants, Waiter
from launcher.terminal import Stopper, Terminal
from launcher.workload import Requirements
from launcher.workloads.trainer import Trainer
from tests.unit.launcher.launcher_values import SETTINGS, host

YIELDS = Owner(yields=True)


BUSY = {"runs": [{"pid": 7, "run": "another", "holder": "berta@office", "seconds": 9}]}


def survivors(found, stopped=False, force=False, saved=True, notify=None):
    asked = Requirements(Config(force=force), Trainer(SETTINGS), "r")
    terminal, stopper = Terminal(said := io.StringIO()), Stopper()
    stopper.asked = stopped
    waiter = Waiter.later(terminal, notify or Notify(None, terminal), stopper, saved)
    return found.later(asked, waiter), asked, said.getvalue()


def test_one_that_cannot_join_does_not_start_the_run_again_without_end(machines, monkeypatch):
    """Another run has it, whenever it is looked at before an attempt."""
    clock = [1e4]
    monkeypatch.setattr(participants.time, "monotonic", lambda: clock[0])
    hosts = [host(1), host(2, owner=YIELDS)]
    found = Participants(hosts, None)
    machines["node2"] = BUSY
    these, asked, _ = survivors(found)
    assert [one.name for one in these.hosts] == ["node1"]
    assert found.absent()["node2"].startswith("it is in use by berta@office: run another")
    for _ in range(3):
        found.attempt_began(these, asked)
        found.attempt_ended()
        for _ in range(2):  # between two attempts there is nothing to compare it with
            clock[0] += 601
            found.look()
        found.attempt_began(these, asked)
        for _ in range(12):
            clock[0] += 601
            assert found.regroup() is None
            found.look()
    machines["node2"] = {}
    found.look()
    clock[0] += 601
    found.look()
    assert found.regroup() == "node2 can take part"


def test_one_that_nobody_looks_at_again_is_asked_before_the_next_attempt(machines):
    hosts = [host(1), host(2)]
    found = Participants(hosts, 1)
    found.attempt_began(OpenMachines(hosts, {}, {}), None)
    found.attempt_ended()
    machines["node2"] = BUSY
    assert [one.name for one in survivors(found)[0].hosts] == ["node1"]
    assert found.available() == hosts


def test_a_run_that_is_stopped_while_it_waits_says_what_it_waited_for(machines):
    found = Participants([host(1, owner=YIELDS)], None)
    found.note_sign("node1", "seat")
    with pytest.raises(UserError) as caught:
        survivors(found, stopped=True)
    found.note_sign("node1", None)
    assert found.absent() == {"node1": "nobody has used it for less than 10 min"}
    (said,) = caught.value.problems
    assert said == (
        "the run was stopped while it waited: at least 1 machine must be free (node1: somebody "
        "works at it)"
    )
    machines["node2"] = {"writable": False}
    with pytest.raises(UserError) as caught:
        survivors(Participants([host(1), host(2)], None), stopped=True)
    assert "node2" in caught.value.problems[0]
    assert caught.value.problems[1].endswith("that answer and are fit, of which it needs 2")


@pytest.mark.parametrize("saved", [True, False])
def test_all_is_saved_only_where_something_is_and_while_it_waits_that_is_said(
    machines, monkeypatch, saved
):
    found = Participants([host(1, owner=Owner(hours=owned.hours("00:00-24:00")))], None)
    found.note_sign("node1", "asked")
    told = []
    notify = SimpleNamespace(wait=lambda _what: told.append)
    free = lambda _seconds: found.note_sign("node1", None)  # noqa: E731
    monkeypatch.setattr(participants.time, "sleep", free)
    these, _, said = survivors(found, saved=saved, notify=notify)
    assert [one.name for one in these.hosts] == ["node1"]
    assert said.count("all is saved") == saved and said.count("the run waits: at least 1") == 1
    assert ["`tandem away`" in why for why in told] == [True]
