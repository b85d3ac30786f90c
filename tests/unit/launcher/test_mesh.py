"""Every machine reaches every other one by TCP; here over loopback addresses."""

import socket
import sys

import pytest

from launcher import judge, look
from launcher.look import OpenMachines
from launcher.machines.local import LocalNode, LocalProcess
from tests.unit.launcher.launcher_values import codes, facts, host


def machines(count, port=47100):
    hosts = [
        host(n, connection="local", address=f"127.0.7.{n}", env_python=sys.executable)
        for n in range(1, count + 1)
    ]
    found = {h.name: facts(n, free_ports=[port + n]) for n, h in enumerate(hosts, start=1)}
    return OpenMachines(hosts, {h.name: h.engine.node(h) for h in hosts}, found)


def test_a_machine_that_does_not_listen_where_it_should_is_named(monkeypatch):
    three = machines(3, port=47200)

    class Deaf(LocalNode):
        """Node 2 is asked to listen elsewhere, as behind a firewall."""

        def start(self, argv):
            return LocalProcess([*argv[:-1], argv[-1].replace("47202, [", "47299, [")])

    three.nodes["node2"] = Deaf(three.hosts[1])
    found = [*judge.name_unreachable_pairs(three, look.find_unreachable_peers(three))]
    assert codes(found) == ["no-way"] * 2
    assert [one.message.split(" on TCP")[0] for one in found] == [
        "node1 cannot connect to node2 (127.0.7.2)",
        "node3 cannot connect to node2 (127.0.7.2)",
    ]


@pytest.mark.parametrize(("port", "same_user"), [(47300, True), (47400, False)])
def test_two_launchers_may_look_in_the_same_second(port, same_user):
    """Those of two users may not listen on one port; who reaches that one has reached the
    machine."""
    with socket.socket() as other_launcher:
        other_launcher.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other_launcher.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, same_user)
        other_launcher.bind(("127.0.7.1", port + 1))
        other_launcher.listen(8)
        assert not any(look.find_unreachable_peers(machines(3, port=port)).values())


def test_machines_at_one_address_have_nothing_between_them():
    local = [host(n, connection="local", address="127.0.0.1") for n in (1, 2)]
    assert look.find_unreachable_peers(OpenMachines(local, {}, {})) == {}


def test_many_machines_are_tried_in_part_and_all_take_part():
    tried = [look.peers_of(index, 40) for index in range(40)]
    assert max(len(peers) for peers in tried) <= look.ALL_PAIRS
    assert set().union(*tried) == set(range(40))
    assert all(index not in peers for index, peers in enumerate(tried))
    assert look.peers_of(1, 3) == [0, 2]
