"""Who gives the others the time."""

import json
import os
import re
import subprocess

import pytest

from contract.machines import CLOCK_TOLERANCE
from planning import clock, preflight
from tests.unit.ansible.provision_machines import QUESTION, ROOT, machine

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


@pytest.mark.parametrize(
    ("server", "facts", "gone", "said"),
    [
        ("pc1", {}, True, "pc1, which gives the time, did not answer or has failed"),
        ("pc1", UFW, False, "on pc1: sudo ufw allow from"),
        ("pc1", {"ufw_conf": "", "firewalld": True}, False, "--add-service=ntp"),
        ("pc1", {"ufw_conf": "ENABLED=no\n", "firewalld": False}, False, ""),
        ("", UFW, True, ""),  # a router that serves time: nothing is known of it
    ],
)
def test_the_servers_own_fault_is_named(server, facts, gone, said):
    found = clock.clock_servers_fault(server, facts, gone)
    assert said in found and bool(found) == bool(said)


CHRONYC = """#!/bin/sh
case "$1:$ROLE" in
waitsync:*) [ "$ROLE" = right ] ;;
*:right) echo A,10.0.4.1,2 ;;
*:server) echo 7F7F0101,127.127.1.1,10 ;;
*:broken) exit 1 ;;
*) echo 00000000,,0 ;;
esac
"""
PLAY = [{
    "name": "The clock",
    "hosts": "cluster",
    "gather_facts": False,
    "environment": {"ROLE": "{{ role }}", "PATH": "{{ lookup('env', 'PATH') }}"},
    "tasks": [
        {"ansible.builtin.include_vars": f"{ROOT}/ansible/roles/clock/vars/main.yml"},
        {"ansible.builtin.fail": {"msg": "broken before"}, "when": "role == 'gone'"},
        {
            "ansible.builtin.include_tasks": f"{ROOT}/ansible/roles/clock/tasks/verify.yml",
            "vars": {"clock_strict": "{{ strict }}"},
        },
    ],
}]  # fmt: skip


FINE = {"ufw_conf": "", "firewalld": False}
# Clusters by name: role of the server and of its machine, the server's facts, strict, who goes on,
# and what is said. All are one inventory, in which each has its own server.
CLUSTERS = {
    # it failed before, so nobody else does, not even in `make verify`
    "before": ("gone", "alone", FINE, True, "-+", "before-2 does not follow the clock of the"),
    # it runs no chrony, which is reported for it alone
    "broken": ("broken", "alone", FINE, False, "-+", "broken-1, the clock of the cluster, gives"),
    # its ufw drops the requests
    "ufw": ("server", "alone", UFW, False, "++", "ufw is switched on at ufw-1, which gives the"),
    "verify": ("server", "alone", UFW, True, "+-", "(on verify-1: sudo ufw allow from <address"),
    # nothing is wrong with it
    "fine": ("server", "right", FINE, False, "++", ""),
    "own": ("server", "alone", FINE, False, "+-", "chrony on own-2 does not follow own-1, the"),
}


def inventory():
    hosts = {}
    for number, (name, (server, other, facts, strict, _, _)) in enumerate(CLUSTERS.items()):
        shared = {"clock_server": f"{name}-1", "strict": strict, "preflight_facts": facts}
        for place, role in ((1, server), (2, other)):
            own = {"ansible_host": f"10.0.{number}.{place}", "role": role}
            hosts[f"{name}-{place}"] = {**shared, **own}
    return {"cluster": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}


def test_whose_fault_it_is_that_a_machine_does_not_follow(tmp_path):
    (tmp_path / "chronyc").write_text(CHRONYC)
    (tmp_path / "chronyc").chmod(0o755)
    (tmp_path / "hosts.yml").write_text(json.dumps(inventory()))
    (tmp_path / "play.yml").write_text(json.dumps(PLAY))
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    argv = ["ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml")]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **path})
    said, _, recap = " ".join(done.stdout.split()).partition("PLAY RECAP")
    for name, (*_, well, sentence) in CLUSTERS.items():
        ended = [re.search(rf"{name}-{place} .*?failed=(\d)", recap).group(1) for place in (1, 2)]
        assert ["+-"[int(failed)] for failed in ended] == list(well), (name, said)
        assert sentence in said, name


def test_a_clock_is_wrong_for_make_check_where_it_is_wrong_for_a_run():
    """For a run: tests/unit/launcher/test_preflight.py."""
    tolerance = CLOCK_TOLERANCE
    for off, wrong in ((tolerance - 0.5, False), (tolerance + 1.5, True)):
        facts = machine(clock=QUESTION["clock"][1] + off)
        found = preflight.findings(facts, QUESTION)
        assert [finding["fault"] for finding in found] == ["clock"] * wrong
