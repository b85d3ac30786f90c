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
from launcher.machines import engine, inventory, owned
from launcher.machines.owned import Owner
from launcher.notify import Notify
from launcher.participants import MachineGroup, Moment, Participants, Presence, Waiter, select
from launcher.problems import Problem, problem
from launcher.terminal import Stopper, Terminal
from tests.unit.launcher import launcher_values
from tests.unit.launcher.launcher_values import VERSIONS, facts, host
from tests.unit.launcher.test_inventory import document

MONDAY = datetime(2026, 11, 23, 20, 0)
YIELDS, NIGHTS = Owner(yields=True), Owner(hours=owned.read_hours("19:00-07:30,sat,sun"))
FREE = Presence(free_since=0.0, is_fit=True)
USED = Presence(absence=Problem("owner-there", owned.SIGNS["seat"], ("node1",)))


@pytest.mark.parametrize(
    ("text", "day", "has"),
    [
        ("19:00-07:30", "2026-11-23T18:59", False),
        ("19:00-07:30", "2026-11-24T07:30", False),
        ("19:00-07:30", "2026-11-23T03:00", True),  # Sunday's night reaches into Monday
        ("sat,sun", "2026-11-30T00:00", False),
        ("19:00-07:30,sat,sun", "2026-11-28T12:00", True),
        ("12:00-13:00, 18:00-24:00", "2026-11-27T23:59", True),
    ],
)
def test_hours_go_over_midnight_and_over_the_week(text, day, has):
    assert owned.read_hours(text).has(datetime.fromisoformat(day)) is has


@pytest.mark.parametrize(
    ("word", "text", "said"),
    [
        ("owner", "maybe", "owner is 'maybe': the only value is yields: write owner=yields, or"),
        ("hours", "19:00-19:00", "19:00-19:00 is not a span of time: write spans of time"),
        ("hours", "19:00-07:30,07:00-08:00", "19:00-07:30 and 07:00-08:00 overlap"),
        ("hours", "25:00-26:00", "'25:00-26:00' is neither a span of time nor a day"),
        ("idle_minutes", "0", "that is not a number of minutes up to 1440"),
        ("away_dir", "away", "that is not an absolute path"),
        ("owners", "yields", "owners= is not a setting: write owner=, or choose another name"),
        ("idle_minutes", "5", "idle_minutes= has no effect without owner= or hours="),
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
    assert found.owner == Owner(True, owned.read_hours("sat"), 150.0, "/tmp/away")
    assert found.owner.describe() == "yields to its owner and is used only in its hours (sat)"
    assert [Owner().signs, NIGHTS.signs, YIELDS.signs] == [(), ("asked",), tuple(owned.SIGNS)]


ALL = ["node1", "node2", "node3"]
DESKS = [host(1), host(2, owner=YIELDS), host(3, owner=YIELDS)]


def known(hosts, presence=None, config=None, **changes):
    """What is known of these machines; by default nobody has used them for long."""
    presence = {**{one.name: Presence() for one in hosts}, **(presence or {})}
    return MachineGroup([*hosts], config or Config(), presence, **changes)


@pytest.mark.parametrize(
    ("inside", "reports", "now", "changed", "names", "out"),
    [
        (ALL, [FREE, FREE, FREE], 1.0, 0.0, ALL, []),
        # Node 0 has an owner, too; one that is back is never waited for.
        (ALL, [USED, FREE, FREE], 1.0, 0.0, ALL[1:], ["owner-there"]),
        (ALL[:2], [FREE, FREE, USED], 5000.0, 0.0, ALL[:2], ["owner-there"]),
        (ALL[:2], [FREE, FREE, FREE], 599.0, 0.0, ALL[:2], ["used-lately"]),
        (ALL[:2], [FREE, FREE, FREE], 600.0, 0.0, ALL, []),
        # Free for long enough, but the machines changed a moment ago.
        (ALL[:2], [FREE, FREE, FREE], 601.0, 60.0, ALL[:2], []),
        # Nothing is wrong with it only where that was looked at.
        (ALL[:2], [FREE, FREE, Presence(free_since=0.0)], 601.0, 0.0, ALL[:2], []),
    ],
)
def test_when_a_run_goes_on_with_other_machines(inside, reports, now, changed, names, out):
    hosts = [host(number, owner=YIELDS) for number in (1, 2, 3)]
    state = known(hosts, dict(zip(ALL, reports)), training_names=inside, attempt_start=changed)
    selection = select(Moment.RUNNING, state, MONDAY, now)
    assert selection.names == names
    assert [entry.code for entry in selection.left_out.values()] == out


def test_only_where_an_owner_yields_must_a_machine_have_been_free_for_a_while():
    for owner, out in ((YIELDS, {"node1"}), (NIGHTS, set())):
        state = known([host(1, owner=owner), host(2)], {"node1": FREE})
        assert select(Moment.START, state, MONDAY, 599.0).left_out.keys() == out


def test_an_owner_who_comes_and_goes_every_minute_costs_no_more_than_one_start_in_ten():
    """Two hours of it, a look each second, as the watch does."""
    state = known([host(1), host(2, owner=YIELDS)], {"node2": FREE}, training_names=ALL[:2])
    starts = []
    for second in range(2 * 3600):
        is_there, was_there = second // 60 % 2 == 1, state.presence["node2"].absence
        if is_there:
            state.presence["node2"] = USED
        elif was_there:
            state.presence["node2"] = Presence(free_since=float(second), is_fit=True)
        names = select(Moment.RUNNING, state, MONDAY, float(second)).names
        if names != state.training_names:
            state.training_names, state.attempt_start = names, float(second)
            starts.append(second)
    assert starts == [60]  # it leaves once, and never is free for ten minutes


# Why there is no start yet.
BUSY, SILENT = Problem("machine-busy", "", ("node2 (192.0.2.2)",)), Problem("unreached", "off")
ABSENT, UNFIT = {"node3": USED}, Problem("not-writable", "full", BUSY.labels)


@pytest.mark.parametrize(
    ("moment", "seen", "found", "names", "wait"),
    [
        (Moment.START, ABSENT, [], ALL[:2], "start"),
        (Moment.START, {**ABSENT, "node2": Presence(absence=SILENT)}, [], ALL[:1], "endless"),
        (Moment.START, ABSENT, [BUSY], ALL[:1], "endless"),
        (Moment.RESTART, ABSENT, [], ALL[:2], "start"),
        (Moment.RESTART, {**ABSENT, "node2": Presence(absence=SILENT)}, [], ALL[:1], "patience"),
        (Moment.RESTART, ABSENT, [UNFIT], ALL[:1], "patience"),
        (Moment.RESTART, {**ABSENT, "node2": USED}, [], ALL[:1], "endless"),
        (Moment.RESTART, {}, [UNFIT], ["node1", "node3"], "start"),
    ],
)
def test_a_start_needs_enough_machines_and_owners_are_waited_for_without_end(
    moment, seen, found, names, wait
):
    state = known(DESKS, seen, Config(min_nodes=2), participated={*ALL})
    selection = select(moment, state, MONDAY, 0.0, found)
    assert (selection.names, bool(selection.wait)) == (names, wait != "start")
    assert selection.is_endless == (wait != "patience")
    if wait == "patience":
        with pytest.raises(UserError, match=f"(?s){'full' if found else 'off'}.*needs 2 machines"):
            select(moment, state, MONDAY, 0.0, found, waited=participants.PATIENCE + 1)


OUT, START, REFUSED, WAITS = "out", "starts", "refused", "waits"
MOMENTS = (Moment.DRY_RUN, Moment.START, Moment.RESTART)


@pytest.mark.parametrize(
    ("code", "words", "needed", "optional"),
    [
        # of a machine that the run needs, and of another: at a dry run, a start and a restart
        ("machine-busy", {}, (START, REFUSED, OUT), (START, OUT, OUT)),
        ("machine-busy", {"queue": True}, (START, WAITS, OUT), (START, WAITS, OUT)),
        # The run's own processes may still be leaving them.
        ("gpus-busy", {}, (START, REFUSED, START), (START, OUT, START)),
        ("not-writable", {"force": True}, (REFUSED, REFUSED, OUT), (REFUSED, REFUSED, OUT)),
        ("clock", {}, (REFUSED, REFUSED, START), (REFUSED, REFUSED, START)),
        ("clock", {"force": True}, (START,) * 3, (START,) * 3),
        ("data-note", {}, (START,) * 3, (START,) * 3),
    ],
)
def test_what_a_machine_s_problem_does_depends_on_when(code, words, needed, optional):
    def outcome(moment, number):
        # Enough others are there in any case.
        hosts = [host(1), host(2, owner=YIELDS), *(host(n, owner=YIELDS) for n in (3, 4))]
        state = known(hosts, config=Config(**words), participated={one.name for one in hosts})
        found = [Problem(code, "said", (host(number).label(),))]
        try:
            selection = select(moment, state, MONDAY, 0.0, found)
        except UserError:
            return REFUSED
        is_out = f"node{number}" in selection.left_out
        return OUT if is_out else WAITS if selection.wait else START

    assert tuple(outcome(moment, 1) for moment in MOMENTS) == needed
    assert tuple(outcome(moment, 2) for moment in MOMENTS) == optional


def test_a_machine_of_the_cluster_alone_is_not_left_out():
    """Without MIN_NODES a run needs all of those."""
    hosts = [host(1), host(2), host(3, owner=YIELDS), host(4, owner=NIGHTS)]
    for config, those, count in ((Config(), hosts, 2), (Config(min_nodes=3), hosts, 3)):
        gone = {one.name: USED for one in those}
        wait = select(Moment.RESTART, known(those, gone, config), MONDAY, 0.0).wait
        assert f"at least {count} machines" in wait
    gone = {"node1": Presence(absence=SILENT)}
    with pytest.raises(UserError, match="off"):
        select(Moment.START, known(hosts, gone), MONDAY, 0.0)
    state = known(hosts, gone, Config(min_nodes=2))
    assert select(Moment.START, state, MONDAY, 0.0).names == ["node2", "node3", "node4"]


# The loop that asks and waits.


def machines_facts(machines, *numbers):
    return {f"node{n}": facts(n, **machines[f"node{n}"]) for n in numbers}


def begin(found, config=None, moment=Moment.START, waiter=None):
    """The machines that a run has, and what was said."""
    terminal = Terminal(said := io.StringIO())
    waiter = waiter or Waiter(terminal, Notify(None, terminal))
    needs = replace(launcher_values.needs(config, model="resnet18"), run="r")
    these = found.gather(moment, needs, waiter, "r")
    terminal.drain()
    return these, needs, said.getvalue()


def names(found, **words):
    return [one.name for one in begin(found, **words)[0].hosts]


TAKEN = {"runs": [{"pid": 7, "run": "another", "holder": "berta@office", "seconds": 9}]}
OFF = "node3 (tandem@192.0.2.3, port 22): its host key differs from the key in your known_hosts"


def test_a_start_leaves_machines_out_and_says_why(machines):
    machines.update(node2={"sign": "seat"}, node3=OFF)
    these, _, said = begin(Participants(DESKS, Config()))
    assert [one.name for one in these.hosts] == ["node1"]
    assert said.splitlines() == [
        "tandem: the run begins without node2 (192.0.2.2): somebody uses it",
        f"tandem: the run begins without {OFF}",
    ]
    machines["node2"] = problem("python-missing", host(2), python="/no/python", reason="no file")
    assert (
        "without node2 (192.0.2.2): there is no Python at /no/python"
        in begin(Participants(DESKS, Config(min_nodes=1)))[2]
    )


def test_a_machine_that_a_run_needs_is_asked_once(machines, monkeypatch):
    """It answers every other time."""
    real, calls = engine.open_all, []

    def open_all(hosts):
        calls.append(hosts)
        machines["node1"] = "node1: gone" if len(calls) % 2 else {}
        return real(hosts)

    monkeypatch.setattr(engine, "open_all", open_all)
    with pytest.raises(UserError, match="node1: gone"):
        begin(Participants(DESKS, Config()))
    assert len(calls) == 1


def test_what_is_wrong_together_with_a_machine_that_is_left_out_refuses_nothing(machines):
    machines["node3"] = {**TAKEN, "versions": {**VERSIONS, "torch": "2.14.0"}}
    assert names(Participants(DESKS, Config())) == ["node1", "node2"]
    with pytest.raises(UserError, match="torch differs"):
        begin(Participants(DESKS, Config(force=True)), Config(force=True))


def test_too_few_by_the_clock_are_asked_nothing(monkeypatch):
    nights = [host(1, owner=Owner(hours=owned.read_hours("00:00-00:01"))), host(2)]
    monkeypatch.setattr(participants, "datetime", SimpleNamespace(now=lambda: MONDAY))
    monkeypatch.setattr(participants.look, "open_and_probe", None)
    with pytest.raises(UserError, match=r"waited: at least 2.*only at these times: 00:00-00:01"):
        restart(Participants(nights, Config(min_nodes=2)), stopped=True)


def test_a_start_waits_for_a_machine_that_is_silent_and_asks_it_anew(machines, monkeypatch):
    machines["node3"] = OFF
    monkeypatch.setattr(participants.time, "sleep", lambda _: machines.update(node3={}))
    config = Config(min_nodes=3)
    these, _, said = begin(Participants([host(n) for n in (1, 2, 3)], config), config)
    assert [one.name for one in these.hosts] == ALL
    assert f"waiting: at least 3 machines must be free: {OFF}" in said


def test_one_that_joins_must_go_together_with_the_others(machines):
    machines["node3"] = {"versions": {**VERSIONS, "torch": "2.14.0"}}
    found = Participants(DESKS, Config())
    training = OpenMachines(DESKS[:2], {}, machines_facts(machines, 1, 2))
    with found.training(training, begin(Participants(DESKS[:1], Config()))[1]):
        found.look()
        assert found.presence["node3"].absence.message.startswith("torch differs between machines")
    these, _, said = begin(found, moment=Moment.RESTART)
    assert [one.name for one in these.hosts] == ["node1", "node2"]
    assert "the run continues without node3 (192.0.2.3): torch differs between machines" in said


def restart(found, stopped=False, lead="the run waits", notify=None):
    terminal, stopper = Terminal(io.StringIO()), Stopper()
    stopper.stop_requests = stopped
    waiter = Waiter(terminal, notify or Notify(None, terminal), stopper=stopper, lead=lead)
    return begin(found, moment=Moment.RESTART, waiter=waiter)


def test_whoever_comes_back_too_late_ends_the_run_with_what_is_wrong(machines, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(participants.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        participants.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )
    machines.update(node2={"writable": False}, node3=OFF)
    with pytest.raises(UserError) as caught:
        restart(Participants([host(n) for n in (1, 2, 3)], Config(min_nodes=2)))
    unfit, silent, short = caught.value.problems
    assert "node2" in unfit and silent == OFF and "needs 2 machines, but only 1" in short
    assert participants.PATIENCE < clock[0] < participants.PATIENCE + 10


def test_a_machine_outside_is_looked_at_over_one_connection(machines, monkeypatch):
    """Each one that is opened writes into its owner's journal."""
    log, real = [], engine.open_all

    def open_all(those):
        log.extend(f"open {one.name}" for one in those)
        return real(those)

    close = lambda nodes: log.extend(f"close {name}" for name in nodes)  # noqa: E731
    monkeypatch.setattr(engine, "open_all", open_all)
    monkeypatch.setattr(engine, "close_all", close)
    machines["node2"] = {"sign": "seat"}
    found = Participants(DESKS[:2], Config())
    found.training_names = ["node1"]
    found.look()
    found.look()
    assert log == ["open node2"]
    del machines["node2"]["sign"]
    monkeypatch.setattr(participants.remote, "ask", None)  # no answer comes
    found.look()
    assert log.pop() == "close node2" and found.presence["node2"].absence.code == "owner-unknown"
    found.look()
    found.training_names = ALL[:2]
    found.look()
    assert log == ["open node2", "open node2", "close node2"]


def test_one_that_cannot_join_does_not_start_the_run_again_without_end(machines, monkeypatch):
    """Another run has it, whenever it is looked at before an attempt."""
    clock = [1e4]
    monkeypatch.setattr(participants.time, "monotonic", lambda: clock[0])
    found = Participants([host(1), host(2, owner=YIELDS)], Config())
    machines["node2"] = TAKEN
    these, needs, _ = restart(found)
    assert [one.name for one in these.hosts] == ["node1"]
    for _ in range(3):
        with found.training(these, needs):
            pass
        for _ in range(2):  # between two attempts there is nothing to compare it with
            clock[0] += 601
            found.look()
        with found.training(these, needs):
            for _ in range(12):
                clock[0] += 601
                assert found.find_regroup_reason() is None
                found.look()
    with found.training(these, needs):
        machines["node2"] = {}
        found.look()
        clock[0] += 601
        found.look()
        assert found.find_regroup_reason() == "node2 can participate"
        found.note_sign("node1", "seat")
        assert found.find_regroup_reason() == "node1 leaves: somebody uses it"  # which goes first


def test_one_that_nobody_looks_at_again_is_asked_before_the_next_attempt(machines):
    hosts = [host(1), host(2)]
    found = Participants(hosts, Config(min_nodes=1))
    with found.training(OpenMachines(hosts, {}, {}), None):
        pass
    for taken, those in ((TAKEN, ["node1"]), ({}, ["node1", "node2"])):
        machines["node2"] = taken
        assert [one.name for one in restart(found)[0].hosts] == those


def test_a_run_that_is_stopped_while_it_waits_says_what_it_waited_for(machines):
    found = Participants([host(1, owner=YIELDS)], Config())
    found.note_sign("node1", "seat")
    with pytest.raises(UserError) as caught:
        restart(found, stopped=True)
    assert caught.value.problems == (
        "the run was stopped while it waited: at least 1 machine must be free: node1: somebody "
        "uses it",
    )
    found.note_sign("node1", None)
    assert found.select(Moment.RESTART).left_out["node1"].message == (
        "somebody used it less than 10 min ago"
    )
    machines["node2"] = {"writable": False}
    with pytest.raises(UserError) as caught:
        restart(Participants([host(1), host(2)], Config()), stopped=True)
    assert "node2" in caught.value.problems[0]
    assert caught.value.problems[1].endswith("2 machines must be ready")


def test_while_it_waits_that_is_said_once(machines, monkeypatch):
    found = Participants([host(1, owner=Owner(hours=owned.read_hours("00:00-24:00")))], Config())
    found.note_sign("node1", "asked")
    told, pauses = [], iter([lambda: None, lambda: found.note_sign("node1", None)])
    notify = SimpleNamespace(make_reminder=lambda _what: told.append)
    monkeypatch.setattr(participants.time, "sleep", lambda _: next(pauses)())
    terminal = Terminal(said := io.StringIO())
    waiter = Waiter(terminal, notify, stopper=Stopper(), lead="the run waits")
    assert names(found, moment=Moment.RESTART, waiter=waiter) == ["node1"]
    terminal.drain()
    assert said.getvalue().count("the run waits: at least 1") == 1
    assert ["`tandem away`" in why for why in told] == [True, True]
