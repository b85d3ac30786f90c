"""A new address leaves the rest of a card's settings alone, on recorded configurations."""

import pytest
import yaml

from planning import network, network_netplan, network_nm, preserved_settings

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
        "dynamic": True}  # fmt: skip


def facts(**changes):
    made = {"host": "node1", "interface": "eno1", "card": CARD, "files": {}, **WAY}
    return {**made, "nmcli": "", "connection": "", "networkctl": "", **changes}


def files_of(made, want=REPLACE):
    return {
        path: file["content"] for path, file in network.network_plan(made, want)["files"].items()
    }


def again(made, want=REPLACE):
    """The files of a second plan, made from those of the first."""
    return files_of({**made, "files": {**made["files"], **files_of(made, want)}}, want)


# --- router, name servers, search domain ---------------------------------------------------------


def test_what_dhcp_gave_is_kept_by_the_cards_own_answers():
    assert preserved_settings.present_way(facts()) == {
        "dns": ["192.168.56.1", "9.9.9.9"],
        "search": ["lab.example"],
        "gateway": "192.168.56.1",
    }


def test_without_systemd_resolved_resolv_conf_says_it():
    text = (
        "# by dhclient\ndomain lab.example\nsearch lab.example b.example\nnameserver 127.0.0.53\n"
    )
    found = preserved_settings.present_way(
        facts(card_dns="", card_search="", resolv=f"{text}nameserver 192.168.56.1\nnameserver\n")
    )
    assert (found["dns"], found["search"]) == (["192.168.56.1"], ["lab.example", "b.example"])


def test_name_servers_of_another_card_are_not_this_ones():
    other = facts(card_dns="Link 2 (eno1):", resolv="nameserver 10.8.0.1\n")
    assert preserved_settings.present_way(other)["dns"] == []


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
    found = preserved_settings.completed(made, REPLACE)
    assert (found["dns"], found["search"]) == (["192.168.56.1", "9.9.9.9"], ["lab.example"])
    assert preserved_settings.present_way(facts(**{**LOCAL, **told}))["search"] == ["a.example"]
    other = {**LOCAL, "resolv": "nameserver 10.8.0.1\n", **told}
    assert preserved_settings.present_way(facts(**other))["dns"] == ["10.8.0.1"]


def test_name_servers_that_only_dhcp_knows_are_asked_for_where_it_may_know_them():
    """What is refused: refusals.py."""
    alone = facts(**LOCAL)
    named = preserved_settings.completed(alone, {**REPLACE, "dns": ["127.0.1.1"]})
    assert named["dns"] == ["127.0.1.1"]
    preserved_settings.completed({**alone, "card": {**CARD, "dynamic": False}}, REPLACE)
    preserved_settings.completed(facts(**{**LOCAL, "resolv": ""}), REPLACE)
    preserved_settings.completed(facts(card_dns="Link 2 (eno1):"), REPLACE)
    preserved_settings.completed(facts(**{**LOCAL, "resolv": "nameserver fd00::53\n"}), REPLACE)


def test_a_router_outside_of_the_new_network_is_none():
    away = {**REPLACE, "address": "10.7.0.5/24"}
    for gateway, kept in (("none", ""), ("10.7.0.1", "10.7.0.1")):
        asked = {**away, "gateway": gateway}
        assert preserved_settings.completed(facts(), asked)["gateway"] == kept
    assert preserved_settings.completed(facts(route=""), away)["gateway"] == ""


# --- NetworkManager ------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("want", "first"), [(REPLACE, "111"), (ADD, "20")])
def test_networkmanager_keeps_the_rest_of_the_connection(want, first):
    (text,) = files_of(facts(**NM), want).values()
    for line in ("wake-on-lan=64", "mtu=9000", "eap=peap;", "address1=2001:db8::20/64",
                 "dns-search=lab.example;", "route1=10.20.0.0/16,192.168.56.254",
                 "gateway=192.168.56.1"):  # fmt: skip
        assert text.splitlines().count(line) == 1, line
    assert f"[ipv4]\nmethod=manual\naddress1=192.168.56.{first}/24\n" in text
    assert "6f1d-uuid" not in text and "timestamp" not in text
    assert text.count("mtu=") == text.count("[ipv6]") == 1


def test_networkmanagers_second_plan_is_the_first():
    made = facts(**NM)
    (first,) = files_of(made).values()
    ours = {"nmcli": "100 (connected)\ntandem-eno1\nours-uuid\nethernet",
            "connection": "manual\n192.168.56.111/24\n192.168.56.1\n192.168.56.1,9.9.9.9",
            }  # fmt: skip
    path = network_nm.KEYFILE.format("eno1")
    assert files_of(facts(**ours, files={path: first})) == {path: first}


def test_networkmanager_by_dhcp_keeps_name_servers_and_search_domain():
    made_up = {**NM, "files": {}, "connection": "auto\n\n\n"}
    (text,) = files_of(facts(**made_up)).values()
    assert "dns=192.168.56.1;9.9.9.9;\ndns-search=lab.example;\n" in text
    assert "[ipv6]\nmethod=auto\n" in text


# --- netplan -------------------------------------------------------------------------------------

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


def test_netplan_keeps_the_rest_of_the_card():
    made = facts(**BY_NETPLAN)
    (text,) = files_of(made).values()
    card = yaml.safe_load(text)["network"]["ethernets"]["eno1"]
    assert card == {
        "dhcp4": False,
        "dhcp6": True,
        "wakeonlan": True,
        "addresses": ["192.168.56.111/24", "2001:db8::20/64", {"2001:db8::21/64": {"label": "x"}}],
        "routes": [
            {"to": "0.0.0.0/0", "via": "192.168.56.1"},
            {"to": "10.20.0.0/16", "via": "192.168.56.254"},
            {"to": "default", "via": "fe80::1"},
        ],
        "nameservers": {"search": ["own.example"], "addresses": ["192.168.56.1", "9.9.9.9"]},
    }
    assert again({**made, "files": {}} | {"files": {network_netplan.NETPLAN: text}}) == {
        network_netplan.NETPLAN: text
    }


# --- systemd-networkd ----------------------------------------------------------------------------

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


def test_networkd_keeps_the_rest_of_the_file():
    made = facts(**BY_NETWORKD)
    ((path, text),) = files_of(made).items()
    assert text == (
        "[Match]\nName=eno1\n\n[Network]\nAddress=192.168.56.111/24\nGateway=192.168.56.1\n"
        "DNS=192.168.56.1\nDNS=9.9.9.9\nDHCP=ipv6\nAddress=2001:db8::20/64\nLLMNR=no\n"
        "Domains=lab.example\n\n[Link]\nMTUBytes=9000\n\n"
        "[Route]\nDestination=10.20.0.0/16\nGateway=192.168.56.254\n"
    )
    ours = facts(files={path: text}, networkctl=f"  Network File: {path}\n")
    assert files_of(ours) == {path: text}


# --- ifupdown ------------------------------------------------------------------------------------


def test_ifupdown_keeps_the_rest_of_the_stanza():
    text = (
        "auto eno1\niface eno1 inet dhcp\n    hostname pc1\n    mtu 9000\n    ethernet-wol g\n"
        "    up ip route add 10.20.0.0/16 via 192.168.56.254\n    dns-search old.example\n\n"
        "iface eno1 inet6 auto\n"
    )
    made = facts(files={"/etc/network/interfaces": text})
    (new,) = files_of(made).values()
    assert new == (
        "auto eno1\niface eno1 inet6 auto\niface eno1 inet static\n"
        "    address 192.168.56.111/24\n    gateway 192.168.56.1\n"
        "    dns-nameservers 192.168.56.1 9.9.9.9\n    dns-search lab.example\n"
        "    mtu 9000\n    ethernet-wol g\n"
        "    up ip route add 10.20.0.0/16 via 192.168.56.254\n"
    )
    assert again(made) == {"/etc/network/interfaces": new}


# --- routes that DHCP gave -----------------------------------------------------------------------

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
ETH = "/etc/network/interfaces"
BY_IFUPDOWN = {"files": {ETH: "auto eno1\niface eno1 inet dhcp\n"}}
BY = {
    "NetworkManager": (
        {**NM, "connection": "auto\n\n\n"},
        "route1=10.20.0.0/16,192.168.56.254\nroute2=10.7.0.0/16\n"
        "route3=10.20.0.0/16,192.168.56.254\nroute4=10.30.0.1/32,192.168.56.254\n",
    ),
    "netplan": (
        BY_NETPLAN,
        "      - scope: link\n        to: 10.7.0.0/16\n"
        "      - to: 10.20.0.0/16\n        via: 192.168.56.254\n"
        "      - to: 10.30.0.1/32\n        via: 192.168.56.254\n",
    ),
    "systemd-networkd": (
        BY_NETWORKD,
        "\n[Route]\nDestination=10.7.0.0/16\nScope=link\n"
        "\n[Route]\nDestination=10.20.0.0/16\nGateway=192.168.56.254\n"
        "\n[Route]\nDestination=10.30.0.1/32\nGateway=192.168.56.254\n",
    ),
    "ifupdown": (
        BY_IFUPDOWN,
        "    up ip route replace 10.7.0.0/16 dev eno1\n"
        "    up ip route replace 10.20.0.0/16 via 192.168.56.254 dev eno1\n"
        "    up ip route replace 10.30.0.1/32 via 192.168.56.254 dev eno1\n",
    ),
}


@pytest.mark.parametrize("manager", BY)
def test_routes_that_dhcp_gave_become_static(manager):
    by, lines = BY[manager]
    ((path, text),) = files_of(facts(**by, route=GIVEN)).items()
    assert lines in text
    for other in ("10.40.0.0", "to: 9.9.9.9", "9.9.9.9/32", "10.50.0.0", "192.168.56.0/24"):
        assert other not in text
    static = facts(**by, route=WAY["route"]) | {"files": {path: text}}
    if manager == "NetworkManager":
        static["nmcli"] = "100 (connected)\ntandem-eno1\nours-uuid\nethernet"
    if manager == "systemd-networkd":
        static["networkctl"] = f"  Network File: {path}\n"
    assert files_of(static) == {path: text}


def test_dhclients_routes_are_told_from_others_by_its_lease():
    option = "option rfc3442-classless-static-routes 16,10,20,192,168,56,254,0,192,168,56,1;\n}"
    way = "default via 192.168.56.1 dev eno1\n10.20.0.0/16 via 192.168.56.254 dev eno1\n"
    way += "10.60.0.0/16 via 192.168.56.254 dev eno1\n"
    made = facts(route=way, leases=LEASE.replace("}", option))
    routes = [{"to": "10.20.0.0/16", "gateway": "192.168.56.254"}]
    assert preserved_settings.completed(made, REPLACE)["routes"] == routes
    static = {**made, "card": {**CARD, "dynamic": False}}
    assert preserved_settings.completed(static, REPLACE)["routes"] == []
