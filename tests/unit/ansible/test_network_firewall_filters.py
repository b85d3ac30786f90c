"""The firewall's judgement over facts as real machines give them."""

import json

import pytest

from planning import firewall
from planning.errors import PlanError


def _chains(*chains):
    """As `nft --json list chains` of nftables 1.0.6 prints it."""
    head = {
        "metainfo": {
            "version": "1.0.6",
            "release_name": "Lester Gooch #5",
            "json_schema_version": 1,
        }
    }
    return json.dumps({"nftables": [head, *({"chain": chain} for chain in chains)]})


UFW = {"family": "ip", "table": "filter", "name": "INPUT", "handle": 1, "type": "filter",
       "hook": "input", "prio": 0, "policy": "drop"}  # fmt: skip
DOCKER = {"family": "ip", "table": "filter", "name": "FORWARD", "handle": 2, "type": "filter",
          "hook": "forward", "prio": 0, "policy": "drop"}  # fmt: skip
OURS = {"family": "inet", "table": "tandem", "name": "input", "handle": 1, "type": "filter",
        "hook": "input", "prio": 0, "policy": "drop"}  # fmt: skip


def test_a_free_machine_is_ours():
    assert firewall.other_firewall({}, "", "") is None
    assert firewall.other_firewall({}, "ENABLED=no\n", _chains(OURS)) is None


def test_docker_filters_what_it_forwards_and_does_not_rule_input():
    assert (
        firewall.other_firewall({"docker.service": {"state": "running"}}, "", _chains(DOCKER))
        is None
    )


def test_ufw_rules_only_when_it_is_enabled():
    assert firewall.other_firewall({}, "# comment\nENABLED=yes\nLOGLEVEL=low\n", "") == "ufw"
    assert firewall.other_firewall({}, 'ENABLED="yes"\n', "") == "ufw"


def test_firewalld_rules_only_when_it_runs():
    assert (
        firewall.other_firewall({"firewalld.service": {"state": "running"}}, "", "") == "firewalld"
    )
    assert firewall.other_firewall({"firewalld.service": {"state": "stopped"}}, "", "") is None


def test_a_table_that_drops_by_default_is_named():
    assert "table ip filter, chain INPUT" in firewall.other_firewall({}, "", _chains(UFW))


def test_only_dockers_own_bridges_are_let_in():
    names = ["br-lan", "br-0a1b2c3d4e5f", "docker0", "docker01", "eth0", "lo"]
    assert firewall.container_bridges(names) == ["br-0a1b2c3d4e5f", "docker0"]


@pytest.mark.parametrize(
    ("text", "address", "port"),
    [
        ("192.168.56.1 40310 192.168.56.111 2222", "192.168.56.1", "2222"),
        ("fe80::1%eth0 40310 fe80::2%eth0 22", "fe80::1", "22"),
        ("", "", "22"),
    ],
)
def test_the_control_machine_is_who_connected(text, address, port):
    assert firewall.connection_end(text) == {"address": address, "ssh_port": port}


def test_sets_hold_no_overlaps_which_nftables_would_refuse():
    sets = firewall.by_family(["192.168.56.0/24", "192.168.56.7", "fd00::1", ""])
    assert sets == {"ipv4": ["192.168.56.0/24"], "ipv6": ["fd00::1/128"]}


def test_a_name_instead_of_an_address_is_refused_with_the_remedy():
    told = r"'pc1\.local' is not an address.*Write the address"
    with pytest.raises(PlanError, match=told):
        firewall.by_family(["pc1.local"])


CONTROL = {"networks": ["127.0.0.1/8", "10.0.0.200/24", "10.8.0.2/24"], "gateways": ["10.0.0.254"]}


@pytest.mark.parametrize(
    "told",
    [
        "0.0.0.0/0",  # everybody
        "0.0.0.0",
        "10.0.0.0/24",
        "10.0.0.9\nallow 0.0.0.0/0",  # a line of its own
        "10.0.0.9(rw,no_root_squash) *",
        "10.0.0.9, 0.0.0.0/0",
        "8.8.8.8",  # of no network of the members
        "10.8.0.7",  # of another network of the control machine's
        "10.0.0.255",
        "10.0.0.254",  # the way out
        "10.0.0.200",  # the control machine
        "10.0.0.2",  # another member's in the inventory
        "224.0.0.1",
        "127.0.0.1",
        "fe80::1",
        "",
        7,
        None,
        ["10.0.0.9"],
    ],
)
def test_what_a_machine_says_lets_nobody_else_in(told):
    hostvars = {
        "a": {"ansible_host": "10.0.0.1", "ansible_facts": {"all_ipv4_addresses": [told]}},
        "b": {"ansible_host": "10.0.0.2"},
    }
    found = firewall.member_addresses(["a", "b"], hostvars, CONTROL)
    assert found == ["10.0.0.1", "10.0.0.2"]


def test_a_second_address_of_the_members_network_is_a_members():
    facts = {"all_ipv4_addresses": ["10.0.0.9"]}
    hostvars = {"a": {"ansible_host": "10.0.0.1", "ansible_facts": facts}}
    assert firewall.member_addresses(["a"], hostvars, CONTROL) == ["10.0.0.1", "10.0.0.9"]
    # Behind a router the control machine sees no network of theirs: the written one counts.
    far = {"networks": ["172.16.0.1/24"], "gateways": []}
    assert firewall.member_addresses(["a"], hostvars, far) == ["10.0.0.1"]
    hostvars["a"]["address"] = "10.0.0.8/24"
    found = firewall.member_addresses(["a"], hostvars, far)
    assert found == ["10.0.0.1", "10.0.0.8", "10.0.0.9"]


def test_the_control_machine_may_be_a_member_with_a_second_address():
    control = {"networks": ["10.0.0.1/24", "10.0.0.9/24"], "gateways": []}
    facts = {"all_ipv4_addresses": ["10.0.0.1", "10.0.0.9"]}
    hostvars = {"a": {"ansible_host": "10.0.0.1", "ansible_facts": facts}}
    assert firewall.member_addresses(["a"], hostvars, control) == ["10.0.0.1", "10.0.0.9"]


def test_members_are_known_by_todays_and_by_the_static_address():
    hostvars = {
        "a": {"ansible_host": "10.0.0.5", "address": "192.168.56.111/24"},
        "b": {"ansible_host": "10.0.0.6"},
    }
    found = firewall.member_addresses(["a", "b"], hostvars, CONTROL)
    assert found == ["10.0.0.5", "10.0.0.6", "192.168.56.111"]


def test_members_are_known_by_the_addresses_that_they_send_from():
    """a was given a second address, and Linux sends from the first; c has only its new one."""
    facts = {host: [f"10.0.0.{n}", "172.17.0.1"] for n, host in enumerate("abc", start=1)}
    hostvars = {
        "a": {"ansible_host": "10.0.0.11", "address": "10.0.0.11/24", "network_mode": "add"},
        "b": {"ansible_host": "10.0.0.2"},
        "c": {"ansible_host": "10.0.0.13", "address": "10.0.0.13", "network_mode": "replace"},
        "off": {"ansible_host": "10.0.0.4"},
    }
    for host, addresses in facts.items():
        hostvars[host]["ansible_facts"] = {"all_ipv4_addresses": addresses}
    found = firewall.member_addresses([*"abc", "off"], hostvars, CONTROL)
    assert found == ["10.0.0.1", "10.0.0.11", "10.0.0.13", "10.0.0.2", "10.0.0.4"]
