"""A new address leaves the rest of a card's settings alone, on recorded configurations.

What is written then: network_plans.txt.
"""

import pytest

from planning import network, preserved_settings

REPLACE = {"mode": "replace", "address": "192.168.56.111/24", "gateway": "", "dns": []}
ADD = {**REPLACE, "mode": "add"}
# By DHCP, as systemd-resolved and ip say it.
WAY = {
    "card_dns": "Link 2 (eno1): 192.168.56.1 fd00::53 9.9.9.9",
    "card_search": "Link 2 (eno1): lab.example ~.",
    "resolv": "nameserver 127.0.0.53\n",
    "card_ip4": "",
    "leases": "",
    "route": "default via 192.168.56.1 dev eno1 proto dhcp metric 100 \n"
    "default via 10.9.0.1 dev wlp3s0 proto dhcp metric 600 \n",
}
CARD = {"mac": "52:54:00:12:34:56", "mtu": 1500, "addresses": ["192.168.56.20/24"],
        "dynamic": True, "master": "", "ports": [], "parent": ""}  # fmt: skip


def facts(**changes):
    made = {"host": "node1", "interface": "eno1", "card": CARD, "files": {}, **WAY}
    return {**made, "nmcli": "", "connection": "", "networkctl": "", **changes}


def files_of(made, want=REPLACE):
    return {
        path: file["content"] for path, file in network.network_plan(made, want)["files"].items()
    }


def test_without_systemd_resolved_resolv_conf_says_it():
    text = "domain lab.example\nsearch lab.example b.example\nnameserver 127.0.0.53\nnameserver\n"
    resolv = f"# by dhclient\n{text}nameserver 192.168.56.1\n"
    found = preserved_settings.present_settings(facts(card_dns="", card_search="", resolv=resolv))
    assert (found["dns"], found["search"]) == (["192.168.56.1"], ["lab.example", "b.example"])
    # Name servers of another card are not this one's.
    other = facts(card_dns="Link 2 (eno1):", resolv="nameserver 10.8.0.1\n")
    assert preserved_settings.present_settings(other)["dns"] == []


# A resolver of the machine itself, to which DHCP says whom to ask.
LOCAL = {"card_dns": "", "card_search": "", "resolv": "nameserver 127.0.1.1\nsearch a.example\n"}
IP4 = """\
IP4.ADDRESS[1]:192.168.56.20/24
IP4.GATEWAY:192.168.56.1
IP4.DNS[1]:192.168.56.1
IP4.DNS[2]:9.9.9.9
IP4.DOMAIN[1]:lab.example
"""
NETWORKCTL = """\
  Network File: /etc/systemd/network/20-lan.network
       Address: 192.168.56.20 (DHCP4 via 192.168.56.1)
       Gateway: 192.168.56.1
           DNS: 192.168.56.1
                9.9.9.9
Search Domains: lab.example
"""
LEASE = """\
lease {
  interface "eno1";
  fixed-address 192.168.56.20;
  option subnet-mask 255.255.255.0;
  option domain-name-servers 192.168.56.1,9.9.9.9;
  option domain-name "lab.example";
}
"""
LEASES = LEASE + LEASE.replace("56.20", "77.20").replace("9.9.9.9", "8.8.8.8")


@pytest.mark.parametrize(
    "told", [{"card_ip4": IP4}, {"networkctl": NETWORKCTL}, {"leases": LEASES}], ids=list
)
def test_whom_the_machines_own_resolver_asks_is_kept(told):
    made = facts(**{**LOCAL, "resolv": "nameserver 127.0.1.1\n", **told})
    found = preserved_settings.complete(made, REPLACE)
    assert (found["dns"], found["search"]) == (["192.168.56.1", "9.9.9.9"], ["lab.example"])
    assert preserved_settings.present_settings(facts(**{**LOCAL, **told}))["search"] == [
        "a.example"
    ]
    other = {**LOCAL, "resolv": "nameserver 10.8.0.1\n", **told}
    assert preserved_settings.present_settings(facts(**other))["dns"] == ["10.8.0.1"]


def test_name_servers_that_only_dhcp_knows_are_asked_for_where_it_may_know_them():
    """What is refused: tests/messages/ansible.py."""
    alone = facts(**LOCAL)
    named = preserved_settings.complete(alone, {**REPLACE, "dns": ["127.0.1.1"]})
    assert named["dns"] == ["127.0.1.1"]
    preserved_settings.complete({**alone, "card": {**CARD, "dynamic": False}}, REPLACE)
    preserved_settings.complete(facts(**{**LOCAL, "resolv": ""}), REPLACE)
    preserved_settings.complete(facts(card_dns="Link 2 (eno1):"), REPLACE)
    preserved_settings.complete(facts(**{**LOCAL, "resolv": "nameserver fd00::53\n"}), REPLACE)


def test_a_router_outside_of_the_new_network_is_none():
    away = {**REPLACE, "address": "10.7.0.5/24"}
    for gateway, kept in (("none", ""), ("10.7.0.1", "10.7.0.1")):
        asked = {**away, "gateway": gateway}
        assert preserved_settings.complete(facts(), asked)["gateway"] == kept
    assert preserved_settings.complete(facts(route=""), away)["gateway"] == ""


KEYFILE = """\
[connection]
id=Wired connection 1
uuid=6f1d-uuid
type=ethernet
timestamp=1700000000

[ethernet]
wake-on-lan=64
mtu=9000

[802-1x]
eap=peap;

[ipv4]
method=manual
address1=192.168.56.20/24,192.168.56.1
dns=192.168.56.1;
dns-search=lab.example;
route1=10.20.0.0/16,192.168.56.254

[ipv6]
method=manual
address1=2001:db8::20/64
"""
NM = {
    "files": {"/etc/NetworkManager/system-connections/Wired connection 1": KEYFILE},
    "nmcli": "100 (connected)\nWired connection 1\n6f1d-uuid\nethernet",
    "connection": "manual\n192.168.56.20/24\n192.168.56.1\n192.168.56.1",
}


NETPLAN = """\
network:
  version: 2
  ethernets:
    eno1:
      dhcp4: true
      dhcp4-overrides: {use-dns: false}
      dhcp6: true
      wakeonlan: true
      addresses: [10.1.0.5/16, "2001:db8::20/64", "2001:db8::21/64": {label: x}]
      routes: [{to: default, via: 10.1.0.1}, {to: 10.20.0.0/16, via: 192.168.56.254},
               {to: default, via: "fe80::1"}]
      nameservers: {search: [own.example]}
"""
BY_NETPLAN = {
    "files": {"/etc/netplan/01.yaml": NETPLAN},
    "networkctl": "  Network File: /run/systemd/network/10-netplan-eno1.network\n",
}


NETWORK = """\
[Match]
MACAddress=52:54:00:12:34:56

[Link]
MTUBytes=9000
# of ours

[Network]
DHCP=yes
Address=2001:db8::20/64
Address=10.1.0.5/16
DNS=10.1.0.1
LLMNR=no

[Address]
Address=10.2.0.5/16

[Route]
Gateway=10.1.0.1

[Route]
Destination=10.20.0.0/16
Gateway=192.168.56.254

[DHCPv4]
UseDNS=no
"""
LAN = "/etc/systemd/network/20-lan.network"
BY_NETWORKD = {"files": {LAN: NETWORK}, "networkctl": f"  Network File: {LAN}\n"}


INTERFACES = "/etc/network/interfaces"
STANZA = """\
auto eno1
iface eno1 inet dhcp
    hostname pc1
    mtu 9000
    ethernet-wol g
    up ip route add 10.20.0.0/16 via 192.168.56.254
    dns-search old.example

iface eno1 inet6 auto
"""


# As systemd-networkd and NetworkManager say it, with what networkd adds by itself.
GIVEN = (
    WAY["route"]
    + """\
10.7.0.0/16 dev eno1 proto dhcp scope link metric 100
10.20.0.0/16 via 192.168.56.254 dev eno1 proto dhcp metric 100
10.30.0.1 via 192.168.56.254 dev eno1 proto dhcp metric 100
10.40.0.0/16 via 10.9.0.1 dev wlp3s0 proto dhcp metric 600
9.9.9.9 via 192.168.56.1 dev eno1 proto dhcp src 192.168.56.20 metric 1024
192.168.56.0/24 dev eno1 proto kernel scope link src 192.168.56.20 metric 100
192.168.56.1 dev eno1 proto dhcp scope link src 192.168.56.20 metric 1024
10.50.0.0/16 via 192.168.56.254 dev eno1 proto static metric 100
"""
)
BY_IFUPDOWN = {"files": {INTERFACES: "auto eno1\niface eno1 inet dhcp\n"}}


def test_dhclients_routes_are_told_from_others_by_its_lease():
    option = "option rfc3442-classless-static-routes 16,10,20,192,168,56,254,0,192,168,56,1;\n}"
    way = "default via 192.168.56.1 dev eno1\n10.20.0.0/16 via 192.168.56.254 dev eno1\n"
    way += "10.60.0.0/16 via 192.168.56.254 dev eno1\n"
    made = facts(route=way, leases=LEASE.replace("}", option))
    routes = [{"to": "10.20.0.0/16", "gateway": "192.168.56.254"}]
    assert preserved_settings.complete(made, REPLACE)["routes"] == routes
    static = {**made, "card": {**CARD, "dynamic": False}}
    assert preserved_settings.complete(static, REPLACE)["routes"] == []
