"""Machines that somebody works at: what the inventory says of them, and who takes part when."""

import io
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from contract.errors import UserError
from contract.options import Config
from launcher import participants
from launcher.look import OpenMachines
from launcher.machines import inventory, owned
from launcher.machines.owned import Owner
from launcher.notify import Notify
from launcher.participants import Availability, Moment, Participants, Waiter
from launcher.problems import Problem
from launcher.terminal import Stopper, Terminal
from launcher.workload import Requirements
from launcher.workloads.trainer import Trainer
from tests.unit.launcher.launcher_values import SETTINGS, VERSIONS, facts, host
from tests.unit.launcher.test_inventory import document

MONDAY = datetime(2026, 11, 23, 20, 0)
YIELDS, NIGHTS = Owner(yields=True), Owner(hours=owned.hours("19:00-07:30,sat,sun"))
FREE = Availability(free_since=0.0, why="", fit=True)
USED = Availability(None, owned.SIGNS["seat"])
LONG_AGO = -1e6


@pytest.mark.parametrize(
    ("text", "day", "has"),
    [
        ("19:00-07:30", "2026-11-23T19:00", True),
        ("19:00-07:30", "2026-11-23T18:59", False),
        ("19:00-07:30", "2026-11-24T07:29", True),
        ("19:00-07:30", "2026-11-24T07:30", False),
        ("19:00-07:30", "2026-11-23T03:00", True),  # Sunday's night reaches into Monday
        ("sat,sun", "2026-11-30T00:00", False),
        ("19:00-07:30,sat,sun", "2026-11-28T12:00", True),
        ("12:00-13:00, 18:00-24:00", "2026-11-27T23:59", True),
    ],
)
def test_hours_go_over_midnight_and_over_the_week(text, day, has):
    assert owned.hours(text).has(datetime.fromisoformat(day)) is has


@pytest.mark.parametrize(
    ("word", "text", "said"),
    [
        ("owner", "maybe", "owner is 'maybe': the only word is yields: write owner=yields, or"),
        ("hours", "19:00-19:00", "19:00-19:00 is no span of time: write spans of each day like"),
        ("hours", "10:00-24:30", "10:00-24:30 is no span of time"),
        ("hours", "19:00-07:30,07:00-08:00", "19:00-07:30 and 07:00-08:00 overlap"),
        ("hours", "sat,sat", "sat and sat overlap"),
        ("hours", "25:00-26:00", "'25:00-26:00' is neither a span of time nor a day"),
        ("idle_minutes", "0", "that is no number of minutes up to 1440: write minutes, like 10"),
        ("away_dir", "away", "that is no path from /"),
        ("owners", "yields", "owners= is no word: write owner=, or call it otherwise"),
        ("Hour", "sat", "Hour= is no word: write hours="),
        ("idle_minutes", "5", "idle_minutes= stands without owner= or hours=: nobody would be"),
    ],
)
def test_words_that_mean_nothing_are_refused_in_one_sentence(word, text, said):
    words = {"ansible_host": "192.0.2.1", word: text}
    with pytest.raises(UserError) as caught:
        inventory.parse(document(pc3=words), Path("inventory.ini"))
    (problem,) = caught.value.problems
    assert problem.startswith("pc3: in inventory.ini ") and said in problem


def test_words_of_the_inventory_become_what_is_agreed():
    words = {"owner": "yields", "hours": "sat", "idle_minutes": "2.5", "away_dir": "/tmp/away"}
    (found,) = inventory.parse(document(pc3={"ansible_host": "192.0.2.1", **words}), Path("i.ini"))
    assert found.owner == Owner(True, owned.hours("sat"), 150.0, "/tmp/away")
    assert found.owner.told() == "yields to its owner and is used in its hours alone (sat)"
    assert [Owner().signs, NIGHTS.signs, YIELDS.signs] == [(), ("asked",), tuple(owned.SIGNS)]


ALL = ["node1", "node2", "node3"]


@pytest.mark.parametrize(
    ("inside", "reports", "now", "changed", "why"),
    [
        (ALL, [FREE, FREE, FREE], 1.0, 0.0, None),
        # Node 0 has an owner, too; one that is back is never waited for.
        (ALL, [USED, FREE, FREE], 1.0, 0.0, "node1 leaves: somebody works at it"),
        (ALL[:2], [FREE, FREE, USED], 5000.0, 0.0, None),
        (ALL[:2], [FREE, FREE, FREE], 599.0, 0.0, None),
        (ALL[:2], [FREE, FREE, FREE], 600.0, 0.0, "node3 can take part"),
        # Free for long enough, but the machines changed a moment ago.
        (ALL[:2], [FREE, FREE, FREE], 601.0, 60.0, None),
        # Nothing is wrong with it only where that was looked at.
        (ALL[:2], [FREE, FREE, Availability(free_since=0.0)], 601.0, 0.0, None),
        # Leaving goes first.
        (ALL[:2], [FREE, USED, FREE], 601.0, 0.0, "node2 leaves: somebody works at it"),
    ],
)
def test_when_a_run_goes_on_with_other_machines(inside, reports, now, changed, why):
    hosts = [host(number, owner=YIELDS) for number in (1, 2, 3)]
    assert participants.regroup(hosts, inside, dict(zip(ALL, reports)), MONDAY, now, changed) == why


def test_only_where_an_owner_yields_must_a_machine_have_been_free_for_a_while():
    for owner, why in ((YIELDS, "nobody has used it for less than 10 min"), (NIGHTS, None)):
        assert participants.absence(host(1, owner=owner), FREE, False, MONDAY, 599.0) == why


def test_an_owner_who_comes_and_goes_every_minute_costs_no_more_than_one_start_in_ten():
    """Two hours of it, a look each second, as the watch does."""
    hosts, inside, changed = [host(1), host(2, owner=YIELDS)], ["node1", "node2"], 0.0
    report, starts = FREE, []
    for second in range(2 * 3600):
        here = second // 60 % 2 == 1
        if here:
            report = USED
        elif report.free_since is None:
            report = Availability(free_since=float(second), why="", fit=True)
        reports = {"node1": FREE, "node2": report}
        if participants.regroup(hosts, inside, reports, MONDAY, float(second), changed):
            missing = participants.absence(
                hosts[1], report, "node2" in inside, MONDAY, float(second)
            )
            inside = ["node1"] if missing else ["node1", "node2"]
            changed = float(second)
            starts.append(second)
    assert starts == [60]  # it leaves once, and never is free for ten minutes


def machines_facts(machines, *numbers):
    return {f"node{n}": facts(n, **machines[f"node{n}"]) for n in numbers}


def names(machines):
    return [one.name for one in machines.hosts]


DESKS = [host(1), host(2, owner=YIELDS), host(3, owner=YIELDS)]
ASKED = Requirements(Config(), Trainer(SETTINGS))
BUSY = {"runs": [{"pid": 7, "run": "another", "holder": "berta@office", "seconds": 9}]}


def test_a_start_leaves_out_who_has_an_owner_there_and_who_is_off(machines):
    machines["node2"] = {"sign": "seat"}
    del machines["node3"]
    known = Participants(DESKS, None)
    assert names(known.present(ASKED)) == ["node1"]
    assert known.absent() == {"node2": "somebody works at it", "node3": "it does not answer"}


def test_a_machine_of_the_cluster_alone_is_not_left_out(machines):
    """Without MIN_NODES a run needs all of those."""
    hosts = [host(1), host(2), host(3, owner=YIELDS), host(4, owner=NIGHTS)]
    assert [participants.least(*one) for one in ((None, hosts), (3, hosts), (None, hosts[2:]))] == [
        2,
        3,
        1,
    ]
    del machines["node1"]
    with pytest.raises(UserError, match="node1 does not answer"):
        Participants(DESKS, None).present(ASKED)
    assert names(Participants(DESKS, 2).present(ASKED)) == ["node2", "node3"]


def test_one_that_others_have_is_left_out_unless_it_is_waited_for(machines):
    machines.update(node1=BUSY, node2=BUSY)  # without node1 the run does not begin
    known = Participants(DESKS, None)
    assert names(known.present(ASKED)) == ["node1", "node3"]
    assert known.absent()["node2"].startswith("it is in use by berta@office: run another")
    for word in ("queue", "force"):
        asked = Requirements(Config(**{word: True}), Trainer(SETTINGS))
        assert names(Participants(DESKS, None).present(asked)) == ["node1", "node2", "node3"]


def test_too_few_by_the_clock_are_asked_nothing(monkeypatch):
    nights = [host(1, owner=Owner(hours=owned.hours("00:00-00:01"))), host(2)]
    known = Participants(nights, 2)
    monkeypatch.setattr(participants, "datetime", type("Noon", (), {"now": lambda: MONDAY}))
    monkeypatch.setattr(participants.look, "open_and_probe", None)
    assert names(known.present(ASKED)) == []
    assert known.absent() == {"node1": "it is outside its hours (00:00-00:01)"}


def test_one_that_joins_must_go_together_with_the_others(machines):
    machines["node3"] = {"versions": {**VERSIONS, "torch": "2.14.0"}}
    known, waiter = Participants(DESKS, None), Waiter.first(Config(), Terminal(io.StringIO()))
    assert names(known.later(ASKED, waiter)) == ALL  # nobody took part yet
    known.attempt_began(OpenMachines(DESKS[:2], {}, machines_facts(machines, 1, 2)), ASKED)
    known.attempt_ended()
    assert names(known.later(ASKED, waiter)) == ["node1", "node2"]
    assert known.absent()["node3"].startswith("torch differs between machines")
    known.attempt_began(OpenMachines(DESKS[:2], {}, machines_facts(machines, 1, 2)), ASKED)
    known.mark_absent("node3")
    known._seen(DESKS[2], None)
    known._known["node3"] = Availability(free_since=LONG_AGO)
    known._seen(DESKS[2], None)
    assert known._known["node3"].why.startswith("torch differs between machines")


ABSENT = {"node3": "somebody works at it"}


@pytest.mark.parametrize(
    ("fit", "absent", "moment", "patience"),
    [
        (ALL[:2], ABSENT, Moment.FIRST, "start"),
        (ALL[:1], ABSENT, Moment.FIRST, None),  # whoever does not answer is waited for, too
        (ALL[:2], ABSENT, Moment.LATER, "start"),
        (ALL[:1], ABSENT, Moment.LATER, 90.0),  # node2 may come back
        (ALL[:1], {**ABSENT, "node2": "asked"}, Moment.LATER, None),  # as long as it takes
        ([], {}, Moment.LATER, 90.0),
    ],
)
def test_a_start_needs_enough_machines_and_owners_are_waited_for_without_end(
    fit, absent, moment, patience
):
    wait = participants.decide(fit, 3, 2, absent, moment, ["node2: full"])
    assert (wait.patience if wait else "start") == patience
    if wait and patience:
        assert wait.wrong == ("node2: full",) and "MIN_NODES is 2" in wait.over


@pytest.mark.parametrize(
    ("code", "asked", "out"),
    [
        ("machine-busy", {}, {Moment.FIRST, Moment.LATER, Moment.JOINING}),
        ("machine-busy", {"queue": True}, {Moment.LATER, Moment.JOINING}),  # the first waits
        ("machine-busy", {"force": True}, set()),
        ("gpus-busy", {}, {Moment.FIRST, Moment.JOINING}),  # the run's own may still be leaving
        ("not-writable", {"force": True}, {Moment.LATER, Moment.JOINING}),  # the first is refused
        ("clock", {}, set()),
    ],
)
def test_whether_one_machine_s_problem_leaves_it_out_depends_on_when(code, asked, out):
    config = Config(**asked)
    problem = Problem(code, "said")
    assert {m for m in Moment if participants.keeps_out(problem, m, config)} == out


def test_whoever_comes_back_too_late_ends_the_run_with_what_is_wrong(machines, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(participants.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        participants.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )
    machines["node2"] = {"writable": False}
    terminal = Terminal(io.StringIO())
    waiter = Waiter.later(terminal, Notify(None, terminal), Stopper(), True)
    with pytest.raises(UserError) as caught:
        Participants(DESKS[:2], 2).later(ASKED, waiter)
    assert "node2" in caught.value.problems[0] and "MIN_NODES is 2" in caught.value.problems[1]
    assert participants.PATIENCE < clock[0] < participants.PATIENCE + 10


def test_a_machine_outside_is_looked_at_over_one_connection(monkeypatch):
    """Each one that is opened writes into its owner's journal."""
    hosts, log, sign = [host(1), host(2, owner=YIELDS)], [], ["seat"]

    def open_all(those):
        log.extend(f"open {one.name}" for one in those)
        return {one.name: SimpleNamespace(host=one) for one in those}, {}

    close = lambda nodes: log.extend(f"close {name}" for name in nodes)  # noqa: E731
    monkeypatch.setattr(participants.engine, "open_all", open_all)
    monkeypatch.setattr(participants.engine, "close_all", close)
    monkeypatch.setattr(participants, "ask", lambda nodes: dict.fromkeys(nodes, sign[0]))
    found = Participants(hosts, None)
    found.attempt_began(OpenMachines(hosts[:1], {}, {}), None)
    found.look()
    found.look()
    assert log == ["open node2"]
    sign[0] = participants.SILENT
    found.look()
    assert log.pop() == "close node2"
    sign[0] = None
    found.look()
    assert log == ["open node2"] * 2
    found.attempt_began(OpenMachines(hosts, {}, {}), None)
    found.look()
    assert log[2:] == ["close node2"]


# Which machines a run goes on with, once it has begun.


def survivors(found, stopped=False, saved=True, notify=None):
    asked = replace(ASKED, run="r")
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
