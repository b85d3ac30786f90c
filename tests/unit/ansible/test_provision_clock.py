"""Who gives the others the time."""

import re

import pytest

from planning import clock
from tests.unit.ansible.provision_machines import ROOT, played, stand_in

MEMBERS = {"pc1": "10.0.0.1", "pc2": "10.0.0.2"}


@pytest.mark.parametrize(
    ("wanted", "own_addresses", "address", "host"),
    [
        ("auto", ["127.0.0.1", "10.0.0.9"], "10.0.0.1", "pc1"),
        ("auto", ["127.0.0.1", "10.0.0.2"], "10.0.0.2", "pc2"),  # the control node is a member
        ("pc2", [], "10.0.0.2", "pc2"),
        ("10.0.0.2", [], "10.0.0.2", "pc2"),
        ("10.0.0.254", [], "10.0.0.254", ""),  # a router that serves time
    ],
)
def test_the_server(wanted, own_addresses, address, host):
    assert clock.clock_server(MEMBERS, wanted, own_addresses) == {"address": address, "host": host}


UFW = {"ufw_conf": "ENABLED=yes\n", "firewalld": False}


def test_a_server_with_no_fault_or_that_nobody_knows_is_not_blamed():
    """What is said of others: tests/messages/ansible.py."""
    off = {"ufw_conf": "ENABLED=no\n", "firewalld": False}
    assert clock.clock_servers_fault("pc1", off, failed=False) == ""
    assert clock.clock_servers_fault("", UFW, failed=True) == ""  # a router that serves time


CHRONYC = """\
case "$1:$ROLE" in
waitsync:*) exit 1 ;;
*:server) echo 7F7F0101,127.127.1.1,10 ;;
*) echo 00000000,,0 ;;
esac
"""
PLAY = [{
    "name": "The clock",
    "hosts": "cluster",
    "gather_facts": False,
    "vars_files": [f"{ROOT}/ansible/roles/clock/vars/main.yml"],
    "environment": {"ROLE": "{{ role }}", "PATH": "{{ lookup('env', 'PATH') }}"},
    "tasks": [
        {"ansible.builtin.fail": {"msg": "broken before"}, "when": "role == 'gone'"},
        {
            "ansible.builtin.import_tasks": f"{ROOT}/ansible/roles/clock/tasks/verify.yml",
            "vars": {"clock_strict": "{{ strict }}"},
        },
    ],
}]  # fmt: skip


FINE = {"ufw_conf": "", "firewalld": False}
# Three clusters: {machine: (its server, role, the server's facts, strict, whether it goes on)}.
MACHINES = {
    # It failed before, so nobody else does, not even in `make verify`.
    "gone": ("gone", "gone", FINE, True, False),
    "after": ("gone", "alone", FINE, True, True),
    # Its ufw drops the requests.
    "ufw": ("ufw", "server", UFW, True, True),
    "beside": ("ufw", "alone", UFW, False, True),
    "strict": ("ufw", "alone", UFW, True, False),
    # Nothing is wrong with it.
    "fine": ("fine", "server", FINE, True, True),
    "lone": ("fine", "alone", FINE, False, False),
}


def test_whose_fault_it_is_that_a_machine_does_not_follow(tmp_path):
    """That a server without chrony is named: tests/lab/test_site_verify.py."""
    hosts = {
        name: {"clock_server": server, "role": role, "preflight_facts": facts, "strict": strict,
               "ansible_host": f"10.0.0.{number}"}
        for number, (name, (server, role, facts, strict, _)) in enumerate(MACHINES.items(), 1)
    }  # fmt: skip
    said = played(tmp_path, PLAY, 2, hosts, PATH=stand_in(tmp_path, chronyc=CHRONYC))
    said, _, recap = said.partition("PLAY RECAP")
    ended = dict(re.findall(r"(\S+) : ok=\d+ .*? failed=(\d)", recap))
    assert {name: failed == "0" for name, failed in ended.items()} == {
        name: row[-1] for name, row in MACHINES.items()
    }, said
    assert "gone, the time server" in said and "on ufw, the time server" in said
    assert "beside does not follow the clock" in said and "on lone does not follow fine" in said
