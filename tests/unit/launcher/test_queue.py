"""The order of runs that wait: tickets on local nodes, each of which has a folder of its own."""

import json
import math
import os
import time
from types import SimpleNamespace

import pytest

from contract.errors import UserError
from launcher import folders, queue
from launcher.node import tickets
from launcher.queue import Place
from tests.unit.launcher.launcher_values import host

RUN = "20261125T0900{:02}Z-resnet18-2n"


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """{name: Node} of three, m1, m2 and m3."""
    hosts = [host(number, name=f"m{number}", connection="local") for number in (1, 2, 3)]
    for one in hosts:
        (tmp_path / one.name).mkdir()
        (tmp_path / one.name).chmod(0o1777)
    monkeypatch.setattr(queue, "folder_of", lambda one: str(tmp_path / one.name))
    monkeypatch.setattr(queue.inventory, "load", lambda _file: hosts)
    monkeypatch.setattr(folders, "RUNS", tmp_path / "runs")
    # It would find the guards of tests beside this one.
    monkeypatch.setattr(queue, "running", lambda _nodes: {})
    return {one.name: one.engine.node(one) for one in hosts}


@pytest.fixture
def wait(machines):
    """wait(place, second of its name, "m1", ...) -> {machine: number that is before it there}"""

    def take(place, second, *names):
        before = place.take({name: machines[name] for name in names}, RUN.format(second))
        return {name: ticket.number for name, ticket in before.items()}

    return take


def test_two_runs_whose_machines_overlap_in_part_wait_in_one_order_on_all(wait):
    a, b, c, d = (Place() for _ in range(4))
    assert wait(a, 1, "m1", "m2") == {}
    assert wait(b, 2, "m2", "m3") == {"m2": 1}
    assert wait(c, 3, "m1") == {"m1": 1}
    assert wait(d, 4, "m1", "m3") == {"m1": 2, "m3": 2}
    assert [one.number for one in (a, b, c, d)] == [1, 2, 2, 3]
    a.leave()
    assert wait(b, 2, "m2", "m3") == wait(c, 3, "m1") == {}
    b.leave()
    assert wait(d, 4, "m1", "m3") == {"m1": 2}


def test_of_two_that_came_in_one_moment_the_earlier_name_is_first(wait):
    late, early = Place(), Place()
    wait(late, 2, "m1")
    early.number, early.name = late.number, RUN.format(1) + ".aaaaaaaa"
    assert wait(early, 1, "m1", "m2") == {}
    assert wait(late, 2, "m1", "m2") == {"m1": 1, "m2": 1}


def test_a_name_serves_one_start(wait):
    place = Place()
    assert place.run() == ""
    wait(place, 7, "m1")
    assert (place.run(), place.run()) == (RUN.format(7), "")


def ticket(**changes):
    boot = tickets.BOOT.read_text().strip()
    until = tickets.boottime() + 60
    return {"number": 1, "holder": "ben@desk", "boot": boot, "until": until, **changes}


def test_a_dead_waiter_is_passed_over_and_then_cleared_away(wait, machines, tmp_path):
    path = tmp_path / "m1" / RUN.format(1)
    path.write_text(json.dumps(ticket(until=tickets.boottime() - 1)))
    place = Place()
    assert wait(place, 2, "m1") == {} and place.number == 1
    assert [one.dead for one in queue.look(machines)["m1"].tickets] == [tickets.SILENT, ""]
    for long_dead in (ticket(until=tickets.boottime() - tickets.LEASE - 1), ticket(boot="x")):
        path.write_text(json.dumps(long_dead))
        assert wait(place, 2, "m1") == {} and not path.exists()


ODD = ["", "[", "[]", "[" * 5000, "{}", "\0", json.dumps("x" * 9000)]
ODD += [
    json.dumps(ticket(**{name: value}))
    for name, value in (
        *(("number", value) for value in (0, -1, True, 1.5, "1", 1 << 40)),
        *(("until", value) for value in (math.nan, math.inf, 1e300, "1")),
        *(("holder", value) for value in (None, ["x"])),
    )
]


def test_what_is_no_ticket_stops_nobody(wait, machines, tmp_path):
    folder = tmp_path / "m1"
    for number, text in enumerate(ODD):
        (folder / f"{RUN.format(number)}.odd").write_text(text)
    (folder / "a b\x1b[2J").write_text(json.dumps(ticket()))
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "folder").mkdir()
    place = Place()
    assert wait(place, 1, "m1") == {} and place.number == 1
    seen = queue.look(machines)["m1"]
    assert [one.dead for one in seen.tickets].count(tickets.DAMAGED) == len(ODD) + 4
    assert [one.name for one in seen.waiting] == [place.name]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a file to others")
def test_a_ticket_is_of_whoever_its_file_belongs_to(wait, machines, tmp_path):
    """Of a user who is gone, and in another's name."""
    path = tmp_path / "m1" / RUN.format(1)
    path.write_text(json.dumps(ticket(holder="root@desk")))
    os.chown(path, 54321, 54321)
    (one,) = queue.look(machines)["m1"].tickets
    assert (one.user, one.holder) == ("54321", "root@desk")
    path.write_text(json.dumps(ticket(until=tickets.boottime() - 1e5)))
    assert wait(Place(), 2, "m1") == {} and path.exists()


def test_one_whose_ticket_was_taken_away_waits_no_longer(wait, capsys):
    first, second = Place(), Place()
    wait(first, 1, "m1", "m2")
    wait(second, 2, "m1")
    assert queue.queue("inventory.ini", "1") == 0
    assert RUN.format(1) not in capsys.readouterr().out
    with pytest.raises(UserError, match="as number 1: its ticket was taken away"):
        wait(first, 1, "m1", "m2")
    assert wait(second, 2, "m1") == {}
    with pytest.raises(UserError, match="REMOVE=9: no ticket has that number or run"):
        queue.queue("inventory.ini", "9")


def test_one_that_could_not_renew_its_ticket_for_long_keeps_its_number(wait, monkeypatch, tmp_path):
    first, second = Place(), Place()
    wait(first, 1, "m1")
    wait(second, 2, "m1")
    (tmp_path / "m1" / first.name).unlink()
    later = time.monotonic() + tickets.LEASE + 1
    monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=lambda: later))
    assert wait(first, 1, "m1") == {}
    assert wait(second, 2, "m1") == {"m1": 1}


def test_a_machine_without_a_queue_keeps_nobody_waiting(wait, machines, tmp_path, capsys):
    (tmp_path / "m1").rmdir()
    place = Place()
    assert wait(place, 1, "m1", "m2") == {}
    assert queue.queue("inventory.ini", None) == 0
    assert f"m1 has no queue: {tmp_path}/m1: No such file" in capsys.readouterr().out
    (tmp_path / "m1").mkdir()
    (tmp_path / "m1").chmod(0o1777)
    assert wait(place, 1, "m1", "m2") == {}  # there it was not taken away


def test_who_has_no_ticket_does_not_go_before_those_who_have(wait, machines):
    assert queue.problems(machines) == []
    wait(Place(), 1, "m2")
    (problem,) = queue.problems(machines)
    assert problem.code == "queue" and problem.text.startswith(f"m2: run {RUN.format(1)} of ")


@pytest.mark.parametrize("name", ["..", "/dev", "../x", "", "\0"])
def test_a_name_that_is_none_of_a_run_is_looked_for_nowhere(machines, monkeypatch, name):
    monkeypatch.setattr(queue.control, "controller", lambda folder: pytest.fail(str(folder)))
    assert queue.left(name) == ""


def test_the_queue_is_printed_in_its_order_after_who_trains(wait, machines, monkeypatch, capsys):
    trains = {("20261125T085900Z-vgg11-1n", "carla@desk"): ["m3"]}
    monkeypatch.setattr(queue, "running", lambda _nodes: trains)
    monkeypatch.setattr(queue, "left", lambda _run: "2 h 5 min to go")
    first, second = Place(), Place()
    wait(first, 2, "m1", "m2")
    wait(second, 1, "m2")
    assert queue.queue("inventory.ini", None) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [
        ["-", "20261125T085900Z-vgg11-1n"],
        ["1", RUN.format(2)],
        ["2", RUN.format(1)],
    ]
    assert "trains, 2 h 5 min to go" in " ".join(rows[0]) and "m1, m2: waits" in " ".join(rows[1])


def test_of_machines_that_cannot_be_asked_nothing_is_said(machines, monkeypatch, capsys):
    reached = [{"m1": machines["m1"]}, {}]
    failures = {"m2": "m2 (10.0.0.2, port 22): cannot be reached"}
    monkeypatch.setattr(queue.engine, "open_all", lambda _hosts: (reached.pop(0), failures))
    assert queue.queue("inventory.ini", None) == 0
    assert "nobody has m1, and" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"m2 .* cannot be reached"):
        queue.queue("inventory.ini", None)
