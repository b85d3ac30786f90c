"""Every machine reaches every other one by TCP; here over loopback addresses."""

import socket
import sys

import pytest

from launcher.machines import probe
from launcher.machines.engines.local import LocalNode, LocalProcess
from tests.unit.launcher.launcher_values import facts, host


def machines(count, port=47100):
    hosts = [
        host(n, connection="local", address=f"127.0.7.{n}", env_python=sys.executable)
        for n in range(1, count + 1)
    ]
    found = {h.name: facts(n, free_ports=(port + n,)) for n, h in enumerate(hosts, start=1)}
    return hosts, {h.name: h.engine.node(h) for h in hosts}, found


def test_a_machine_that_does_not_listen_where_it_should_is_named(monkeypatch):
    hosts, nodes, found = machines(3, port=47200)

    class Deaf(LocalNode):
        """Node 2 is asked to listen elsewhere, as behind a firewall."""

        def start(self, argv):
            return LocalProcess([*argv[:-1], argv[-1].replace("47202, [", "47299, [")])

    nodes["node2"] = Deaf(hosts[1])
    told = probe.check_ways(hosts, nodes, found)
    assert [line.split(" by TCP")[0] for line in told] == [
        "node1 does not reach node2 (127.0.7.2)",
        "node3 does not reach node2 (127.0.7.2)",
    ]
    assert all("firewall of node2" in line for line in told)


@pytest.fixture
def listening():
    """Makes a listening socket with the options given."""
    held = []

    def listen(address, *options):
        held.append(socket.socket())
        for option in options:
            held[-1].setsockopt(socket.SOL_SOCKET, option, 1)
        held[-1].bind(address)
        held[-1].listen(8)

    yield listen
    for one in held:
        one.close()


def test_two_launchers_may_look_in_the_same_second(listening):
    listening(("127.0.7.1", 47301), socket.SO_REUSEADDR, socket.SO_REUSEPORT)
    assert probe.check_ways(*machines(3, port=47300)) == []
    local = [host(n, connection="local", address="127.0.0.1") for n in (1, 2)]
    assert probe.check_ways(local, {}, {}) == []  # nothing is between them


def test_a_launcher_of_another_user_that_looks_in_the_same_second_stops_nobody(listening):
    """Two users may not listen on one port; who reaches that one has reached the machine."""
    listening(("127.0.7.1", 47401), socket.SO_REUSEADDR)
    assert probe.check_ways(*machines(2, port=47400)) == []


def test_many_machines_are_tried_in_part_and_all_take_part():
    tried = [probe.peers_of(index, 40) for index in range(40)]
    assert max(len(peers) for peers in tried) <= probe.ALL_PAIRS
    assert set().union(*tried) == set(range(40))
    assert all(index not in peers for index, peers in enumerate(tried))
    assert probe.peers_of(1, 3) == [0, 2]
