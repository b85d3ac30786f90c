"""The firewall's decisions about facts of real machines."""

import pytest

from planning import firewall


def _chains(*chains):
    """As `nft list chains` prints them, from 0.8.2 (priorities are numbers) to 1.1."""
    return "".join(
        f"table {table} {{\n\tchain {name} {{\n\t\ttype filter hook {hook}; {policy};\n\t}}\n}}\n"
        for table, name, hook, policy in chains
    )


UFW = ("ip filter", "INPUT", "input priority 0", "policy drop")
DOCKER = ("ip filter", "FORWARD", "forward priority filter", "policy drop")
OURS = ("inet tandem", "input", "input priority filter", "policy drop")
OPEN = ("inet theirs", "input", "input priority filter", "policy accept")


RUNS = {"firewalld.service": {"state": "running"}}
OFF = {"firewalld.service": {"state": "stopped"}, "docker.service": {"state": "running"}}
NOTED = "# Warning: table ip nat is managed by iptables-nft, do not touch!\n"
TABLE = "nftables table ip filter, chain INPUT"


@pytest.mark.parametrize(
    ("services", "ufw", "chains", "rules"),
    [
        ({}, "", "", None),
        ({}, "ENABLED=no\n", _chains(OURS), None),
        (OFF, "", _chains(OURS, OPEN, DOCKER), None),  # Docker filters what it forwards
        ({}, "# comment\nENABLED=yes\nLOGLEVEL=low\n", "", "ufw"),
        (RUNS, "", "", "firewalld"),
        ({}, "", NOTED + _chains(OURS, OPEN, DOCKER, UFW), TABLE),
    ],
)
def test_who_rules_a_machines_firewall(services, ufw, chains, rules):
    assert firewall.other_firewall(services, ufw, chains) == rules


def test_bridges_of_containers_and_virtual_machines_are_let_in():
    guests = ["br-0a1b2c3d4e5f", "docker0", "incusbr0", "lxdbr0", "podman1", "virbr0"]
    others = ["br-lan", "docker01", "eth0", "lo", "virbr0-nic", "br0", "podman"]
    assert firewall.container_bridges({"interfaces": [*others, *guests]}) == guests


def test_a_bridge_that_a_card_is_part_of_leads_to_the_lan():
    for ports, bridges in ((["veth0-a", "eno1"], []), (["veth0-a"], ["lxdbr0"])):
        facts = {
            "interfaces": ["lxdbr0", "eno1", "veth0_a"],
            "lxdbr0": {"type": "bridge", "interfaces": ports},
            "eno1": {"type": "ether", "pciid": "0000:02:00.0"},
            "veth0_a": {"type": "ether"},
        }
        assert firewall.container_bridges(facts) == bridges


CARDS = {
    "interfaces": ["lo", "eno1", "enp3s0.7", "docker0"],
    "lo": {"ipv4": {"address": "127.0.0.1", "prefix": "8"}},
    "eno1": {
        "ipv4": {"address": "192.168.56.20", "prefix": "24"},
        "ipv4_secondaries": [{"address": "192.168.56.111", "prefix": "24"}],
        "ipv6": [
            {"address": "fe80::1", "prefix": "64"},
            {"address": "2001:db8::7", "prefix": "128"},
        ],
    },
    "enp3s0_7": {"ipv4": {"address": "10.7.0.5", "prefix": "16"}},
    "docker0": {"ipv4": {"address": "172.17.0.1", "prefix": "16"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "networks"),
    [
        ("192.168.56.111", ["192.168.56.0/24", "192.168.56.0/24", "fe80::/64"]),
        ("fe80::1", ["192.168.56.0/24", "192.168.56.0/24", "fe80::/64"]),
        ("10.7.0.5", ["10.7.0.0/16"]),
        ("203.0.113.9", []),  # behind a router that rewrites addresses: nobody is let in
        ("", []),
    ],
)
def test_ssh_is_open_to_the_network_of_the_card_by_which_the_control_machine_comes(own, networks):
    assert firewall.interface_networks(CARDS, own) == networks


# As ss of iproute2 6.1 prints it.
SOCKETS = """\
udp UNCONN 0      0            0.0.0.0:5353       0.0.0.0:*    users:(("avahi-daemon",pid=7,fd=12))
udp UNCONN 0      0      127.0.0.53%lo:53         0.0.0.0:*    users:(("systemd-res",pid=5,fd=13))
udp UNCONN 0      0            0.0.0.0:2049       0.0.0.0:*
tcp LISTEN 0      128          0.0.0.0:22         0.0.0.0:*    users:(("sshd",pid=9,fd=3))
tcp LISTEN 0      50           0.0.0.0:445        0.0.0.0:*    users:(("smbd",pid=8,fd=30))
tcp LISTEN 0      50              [::]:445           [::]:*    users:(("smbd",pid=8,fd=29))
tcp LISTEN 0      128        127.0.0.1:631        0.0.0.0:*    users:(("cupsd",pid=6,fd=7))
tcp LISTEN 0      128            [::1]:631           [::]:*    users:(("cupsd",pid=6,fd=6))
tcp LISTEN 0      511                *:8888             *:*    users:(("jupyter-lab",pid=4,fd=6))
"""


def test_who_listens_and_will_be_cut_off_is_named():
    told = ["jupyter-lab (tcp 8888)", "smbd (tcp 445)", "the kernel (udp 2049)"]
    assert firewall.find_cut_off_listeners(SOCKETS, "22", []) == told
    opened = [{"port": 445, "from": "192.168.56.0/24"}, {"port": 2049, "protocol": "udp"}]
    assert firewall.find_cut_off_listeners(SOCKETS, "22", opened) == told[:1]
    assert "sshd (tcp 22)" in firewall.find_cut_off_listeners(SOCKETS, "2222", [])


# As ss of iproute2 6.1 prints those that are established, and 4.15 with a blank less.
CONNECTED = """\
0      0      192.168.56.20:22     192.168.56.1:40310
0      36            10.7.0.5:22        10.7.0.31:51234
0 0 [::ffff:10.7.0.5]:22 [::ffff:10.7.0.32]:51235
0      0      [fe80::1%eno1]:22 [fe80::9%eno1]:40000
"""
# As sshd of OpenSSH 8.2 and sshd-session of 9.9 say whom they let in (auth.c, auth_log).
JOURNAL = r"""
2026-10-01T09:00:00+0200 pc1 sshd[80]: Accepted password for anna from 100.101.2.3 port 51000 ssh2
2026-10-19T09:00:00+0200 pc1 sshd-session[81]: Accepted publickey for CORP\ben from 100.101.2.3 port 51000 ssh2: ED25519 SHA256:x
2026-10-20T09:00:00+0200 pc1 sshd[82]: Failed password for root from 203.0.113.7 port 51000 ssh2
2026-10-20T09:00:00+0200 pc1 sshd[83]: Accepted publickey for anna from 192.168.56.1 port 51000 ssh2: RSA SHA256:x
2026-10-20T09:00:00+0200 pc1 sshd[84]: Accepted publickey for anna from 2001:db8::8 port 51000 ssh2: RSA SHA256:x
2026-10-20T09:00:00+0200 pc1 sshd[85]: Accepted publickey for anna from 127.0.0.1 port 51000 ssh2: RSA SHA256:x
2026-10-21T09:00:00+0200 pc1 sshd[86]: Accepted publickey for anna from 10.7.0.31 port 51000 ssh2: RSA SHA256:x
"""  # noqa: E501


def test_who_comes_by_ssh_and_will_not_get_in_is_named():
    admitted = ["192.168.56.1", "192.168.56.0/24", "fe80::/64", ""]
    found = firewall.find_cut_off_peers(CONNECTED, JOURNAL, admitted, CARDS)
    assert found == {
        "peers": [
            "100.101.2.3 (CORP\\ben, 2026-10-19)",
            "2001:db8::8 (anna, 2026-10-20)",
            "10.7.0.31 (connected now)",
            "10.7.0.32 (connected now)",
        ],
        "admin_cidrs": ["10.7.0.0/16", "100.101.2.3", "2001:db8::8"],
    }
    let_in = [*admitted, *found["admin_cidrs"]]
    assert firewall.find_cut_off_peers(CONNECTED, JOURNAL, let_in, CARDS)["peers"] == []


def test_a_network_that_is_not_private_is_not_proposed():
    """A machine that says that it is in 0.0.0.0/0 opens nothing by that."""
    wide = {"interfaces": ["a"], "a": {"ipv4": {"address": "10.7.0.5", "prefix": "0"}}}
    found = firewall.find_cut_off_peers("0 0 10.7.0.5:22 10.7.0.31:51234", "", [], wide)
    assert found["admin_cidrs"] == ["10.7.0.31"]


@pytest.mark.parametrize(
    ("text", "address", "own", "port"),
    [
        ("192.168.56.1 40310 192.168.56.111 2222", "192.168.56.1", "192.168.56.111", "2222"),
        ("fe80::1%eth0 40310 fe80::2%eth0 22", "fe80::1", "fe80::2", "22"),
        ("", "", "", "22"),
    ],
)
def test_the_control_machine_is_who_connected(text, address, own, port):
    found = firewall.read_ssh_connection(text)
    assert found == {"client": address, "server": own, "ssh_port": port}


def test_sets_hold_no_overlaps_which_nftables_would_refuse():
    sets = firewall.split_by_family(["192.168.56.0/24", "192.168.56.7", "fd00::1", ""])
    assert sets == {"ipv4": ["192.168.56.0/24"], "ipv6": ["fd00::1/128"]}


@pytest.mark.parametrize(
    "told",
    [
        *("10.0.0.9", "10.0.0.255"),  # free ones of the members' network
        *("0.0.0.0/0", "10.0.0.0/24", "10.0.0.9(rw,no_root_squash) *"),
        *("8.8.8.8", "10.8.0.7"),  # of no network of the members; another of the control node's
        *("10.0.0.254", "10.0.0.200"),  # the way out, and the control node
        *("224.0.0.1", "127.0.0.1", "fe80::1", "", 7, None, ["10.0.0.9"]),
    ],
)
def test_what_a_machine_says_lets_nobody_else_in(told):
    """Neither by what it says alone, nor beside an address that it was given."""
    facts = {"all_ipv4_addresses": [told] if told != 7 else told}
    hostvars = {
        "a": {"ansible_host": "10.0.0.1", "address": "10.0.0.3/24", "ansible_facts": facts},
        "b": {"ansible_host": "10.0.0.2"},
    }
    found = firewall.member_addresses(["a", "b"], hostvars)
    assert found == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_members_are_known_by_todays_by_the_static_and_by_their_other_addresses():
    hostvars = {
        "a": {"ansible_host": "10.0.0.5", "address": "192.168.56.111/24"},
        "b": {"ansible_host": "10.0.0.6", "other_addresses": "10.0.0.7, fd00::1"},
        "c": {"other_addresses": ["10.0.0.9"]},
    }
    found = firewall.member_addresses(["a", "b", "c"], hostvars)
    known = ["10.0.0.5", "10.0.0.6", "10.0.0.7", "10.0.0.9", "192.168.56.111", "c", "fd00::1"]
    assert found == known


def test_a_machine_keeps_the_address_beside_which_it_gets_another():
    for others, kept in (("", "10.0.0.5"), ("10.0.0.8,10.0.0.7", "10.0.0.7,10.0.0.5")):
        own = {"inventory_hostname": "a", "ansible_host": "10.0.0.5", "other_addresses": others}
        assert firewall.kept_addresses(own, "10.0.0.8") == kept
