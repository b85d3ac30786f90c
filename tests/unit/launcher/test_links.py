"""Links are measured in disjoint pairs, then all at once; what was to run runs then."""

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contract.errors import UserError
from launcher import measure
from launcher.node import pairprobe
from tests.unit.launcher.launcher_values import facts, host

CHECKOUT = Path(__file__).parents[3]


@pytest.mark.parametrize(("count", "rounds"), [(2, 1), (3, 3), (16, 15)])
def test_each_pair_is_measured_once_and_none_shares_a_cable(count, rounds):
    names = [f"node{n}" for n in range(count)]
    by_round = list(zip(*(measure.make_rounds(names, name) for name in names)))
    assert len(by_round) == rounds + 1
    pairs = []
    for turns in by_round[:-1]:
        here = {(name, turn["partner"]) for name, turn in zip(names, turns) if turn}
        assert here == {(b, a) for a, b in here}  # whom I measure with measures with me
        clients = [name for name, turn in zip(names, turns) if turn and turn["role"] == "client"]
        assert 2 * len(clients) == len(here)
        pairs += [frozenset(pair) for pair in here]
    assert set(pairs) == {frozenset(pair) for pair in itertools.combinations(names, 2)}
    assert len(pairs) == count * (count - 1)
    assert all(turn["role"] == "ring" for turn in by_round[-1])


def test_nodes_of_one_machine_have_no_link_to_measure():
    local = [host(n, connection="local", address="127.0.0.1") for n in (1, 2)]
    assert measure.make_timetables(local, {one.name: facts(1) for one in local}) == {}
    assert measure.make_timetables([host(1)], {"node1": facts(1)}) == {}


def test_a_port_must_be_free_everywhere():
    found = {"node1": facts(1), "node2": facts(2, free_ports=[29502, 29503])}
    made = measure.make_timetables([host(1), host(2)], found)
    assert {one["port"] for one in made.values()} == {29502}
    with pytest.raises(UserError, match="no port is free"):
        measure.make_timetables([host(1), host(2)], {**found, "node2": facts(2, free_ports=[1])})


def test_machines_measure_each_other_and_go_on(tmp_path, monkeypatch):
    """127.0.0.x stand for machines."""
    monkeypatch.setattr("launcher.measure.STREAM", {"seconds": 0.05, "settle": 0.0})
    hosts = [host(n, address=f"127.0.0.{n}") for n in (1, 2, 3)]
    free = {one.name: facts(1, free_ports=[29478]) for one in hosts}
    prepare = [sys.executable, "-m", "launcher.node.pairprobe"]
    running, files = [], []
    for name, table in measure.make_timetables(hosts, free).items():
        files.append(tmp_path / name / "links.json")
        then = [sys.executable, "-c", "print('then this')"]
        env = {"HOME": str(tmp_path), "TANDEM_LINKS": json.dumps(table)}
        argv, pipe = [*prepare, str(files[-1]), *then], subprocess.PIPE
        running.append(subprocess.Popen(argv, cwd=CHECKOUT, env=env, stdout=pipe, text=True))
    assert [one.communicate(timeout=90)[0] for one in running] == ["then this\n"] * 3
    figures = [json.loads(file.read_text()) for file in files]
    assert all(one["ring"]["mbit"] > 0 for one in figures)
    pairs = [pair for one in figures for pair in one["pairs"].values()]
    assert len(pairs) == 3
    assert all(pair["mbit_to"] > 0 and pair["mbit_from"] > 0 for pair in pairs)
    assert all(pair["mtu"] > 60000 for pair in pairs)  # loopback carries 65536


def test_a_firewall_that_drops_datagrams_makes_no_small_packets(monkeypatch):
    monkeypatch.setattr(pairprobe, "arrives", lambda probe, size: False)
    plan = {"address": "127.0.0.1", "peers": {"node2": "127.0.0.1"}, "port": 9}
    assert pairprobe.measure_mtu(plan, "node2") is None
    monkeypatch.setattr(pairprobe, "arrives", lambda probe, size: size <= 1400)
    assert pairprobe.measure_mtu(plan, "node2") == 1400 + pairprobe.HEADERS


STRANGERS = {
    "no token": b'{"host": "node2", "test": "done"}\n',
    "another token": b'{"token": "\xc3\xa9", "host": "node2", "test": "done"}\n',
    "nested": b"[" * 4000 + b"\n",
    "too long": b"x" * 10_000,
    "nothing": b"",
}


def test_a_partner_that_has_given_up_is_met_in_the_round_of_all():
    with socket.create_server(("127.0.0.1", 0)) as any_port:
        plan = {"address": "127.0.0.1", "port": any_port.getsockname()[1], "token": "secret"}
    early = {}
    with (
        pairprobe.Listener(plan) as door,
        socket.create_connection((plan["address"], plan["port"])) as partner,
    ):
        partner.sendall(b'{"token": "secret", "host": "node2", "test": "ring"}\n')
        with pytest.raises(OSError, match="gave up"):
            pairprobe.serve_round(door, {**plan, "patience": 10}, "node2", early)
        (connection, request) = early["node2"]
        connection.close()
        assert request["test"] == "ring"


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_whoever_has_no_token_keeps_nobody_waiting(said):
    with socket.create_server(("127.0.0.1", 0)) as any_port:
        plan = {"address": "127.0.0.1", "port": any_port.getsockname()[1], "token": "secret"}
    with contextlib.ExitStack() as held:
        door = held.enter_context(pairprobe.Listener(plan))

        def say(words):
            there = (plan["address"], plan["port"])
            one = held.enter_context(socket.create_connection(there, timeout=10))
            one.sendall(words)
            return one

        for _ in range(2 * pairprobe.MOST_WAITING):
            say(said)
        partner = say(b'{"token": "secret", "host": "node2", "test": "ring"}\n.')
        connection, request = door.accept(time.monotonic() + 10)
        held.enter_context(connection)
        # It is the partner's, and what follows its request is still there.
        assert connection.getpeername() == partner.getsockname()
        assert (request["host"], connection.recv(8)) == ("node2", b".")
        with pytest.raises(socket.timeout, match="did not come in time"):
            door.accept(time.monotonic() + 0.1)
