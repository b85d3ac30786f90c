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
        ("auto", ["127.0.0.1", "10.0.0.2"], "10.0.0.2", "pc2"),  # the control machine is a member
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
waitsync:*) [ "$ROLE" = right ] ;;
*:right) echo A,10.0.3.1,2 ;;
*:server) echo 7F7F0101,127.127.1.1,10 ;;
*:broken) exit 1 ;;
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
# Clusters by name: the server's role and facts, whether it goes on, and its machines: role, strict,
# whether it goes on, and who is blamed. Some are one inventory, in which each has its own server.
CLUSTERS = {
    # it failed before, so nobody else does, not even in `make verify`
    "before": ("gone", FINE, "-", [("alone", True, "+", "before-1, which gives the time")]),
    # it runs no chrony, which is reported for it alone
    "broken": ("broken", FINE, "-", [("alone", False, "+", "on broken-1, the clock of the")]),
    # its ufw drops the requests
    "ufw": ("server", UFW, "+", [("alone", False, "+", "ufw-2 does not follow the clock"),
                                 ("alone", True, "-", "at ufw-1, which gives the time")]),
    # nothing is wrong with it
    "fine": ("server", FINE, "+", [("right", False, "+", ""),
                                   ("alone", False, "-", "on fine-3 does not follow fine-1")]),
}  # fmt: skip


def inventory(names):
    for number, (name, (role, facts, _, others)) in enumerate(CLUSTERS.items()):
        if name not in names:
            continue
        for place, (own, strict) in enumerate([(role, True), *(row[:2] for row in others)], 1):
            yield f"{name}-{place}", {
                "clock_server": f"{name}-1", "strict": strict, "preflight_facts": facts,
                "ansible_host": f"10.0.{number}.{place}", "role": own,
            }  # fmt: skip


@pytest.mark.parametrize(
    "names", [("before", "ufw"), pytest.param(("broken", "fine"), marks=pytest.mark.long)]
)
def test_whose_fault_it_is_that_a_machine_does_not_follow(tmp_path, names):
    path = stand_in(tmp_path, chronyc=CHRONYC)
    said = played(tmp_path, PLAY, 2, dict(inventory(names)), PATH=path)
    said, _, recap = said.partition("PLAY RECAP")
    ended = dict(re.findall(r"(\S+) : ok=\d+ .*? failed=(\d)", recap))
    for name in names:
        _, _, server, others = CLUSTERS[name]
        for place, well in enumerate([server, *(row[2] for row in others)], 1):
            assert "+-"[int(ended[f"{name}-{place}"])] == well, (name, place, said)
        assert all(row[3] in said for row in others), name
