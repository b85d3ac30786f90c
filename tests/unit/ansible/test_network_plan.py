"""Which manager rules a card and what is planned, over text that real machines printed."""

from pathlib import Path

import pytest
import yaml

from planning import network
from planning import network_facts as facts_of
from tests.unit.ansible.provision_machines import ROOT

ADD = {"mode": "add", "address": "192.168.56.111/24", "gateway": "", "dns": []}
REPLACE = {
    "mode": "replace",
    "address": "192.168.56.111/24",
    "gateway": "192.168.56.1",
    "dns": ["192.168.56.1", "9.9.9.9"],
}
INTERFACES = "/etc/network/interfaces"
NETWORKD = """* 2: eth0
                     Link File: /usr/lib/systemd/network/99-default.link
                  Network File: /etc/systemd/network/20-lan.network
                          Type: ether
                         State: routable (configured)
"""
WIRED = "100 (connected)\nWired connection 1\n6f1d-uuid\nethernet\n"
CLOUD_INIT = """network:
  version: 2
  ethernets:
    lan:
      match: {macaddress: "52:54:00:12:34:56"}
      set-name: eth0
      dhcp4: true
"""


def card_of(**changes):
    card = {"mac": "52:54:00:12:34:56", "mtu": 1500, "addresses": ["192.168.56.20/24"]}
    card["dynamic"] = False
    base = {"host": "node1", "interface": "eth0", "card": card, "files": {}}
    way = dict.fromkeys(["card_dns", "card_search", "resolv", "route", "card_ip4", "leases"], "")
    return {**base, **way, "nmcli": "", "connection": "", "networkctl": "", **changes}


# The form of iproute2 4.15 (Ubuntu 18.04): a blank at the end of each line, no JSON of routes.
ROUTES = """\
default via 192.168.56.1 dev eno1 proto dhcp metric 100 
default proto static metric 200 
	nexthop via 10.9.0.1 dev wlp3s0 weight 1 
	nexthop via 10.8.0.1 dev eth2 weight 1 onlink 
10.7.0.0/16 dev tun0 scope link 
192.168.56.0/24 dev eno1 proto kernel scope link src 192.168.56.20 metric 100 
blackhole 172.30.0.0/16 proto bird 
unreachable default dev lo metric 4294967295 error -101 
"""  # noqa: W291


def test_routes_are_read_from_the_text_that_every_release_prints():
    rows = [(way["to"], way["gateway"], way["card"]) for way in facts_of.routes(ROUTES)]
    assert rows == [
        ("default", "192.168.56.1", "eno1"),
        ("default", "10.9.0.1", "wlp3s0"),
        ("default", "10.8.0.1", "eth2"),
        ("10.7.0.0/16", "", "tun0"),
        ("192.168.56.0/24", "", "eno1"),
        ("default", "", "lo"),
    ]
    assert facts_of.routes("") == []


def test_networkmanager_gets_a_connection_of_ours_and_goes_back_to_its_own():
    facts = card_of(nmcli=WIRED, connection="auto\n\n\n\n")
    plan = network.network_plan(facts, ADD)
    assert plan["manager"] == "NetworkManager"
    (path, file), *rest = plan["files"].items()
    assert not rest
    assert path == "/etc/NetworkManager/system-connections/tandem-eth0.nmconnection"
    assert file["mode"] == "0600"
    assert "method=auto\naddress1=192.168.56.111/24\n" in file["content"]
    assert "mtu" not in file["content"]
    # Or, if NetworkManager had made that connection up and forgot it, to one that it makes anew.
    assert plan["back"][-1] == "nmcli connection up uuid 6f1d-uuid || nmcli device connect eth0"


def test_networkmanager_adds_to_a_static_address_and_keeps_its_gateway_and_dns():
    now = "manual\n192.168.56.20/24, 10.0.0.1/8\n192.168.56.1\n192.168.56.1,9.9.9.9\n"
    facts = card_of(nmcli=WIRED, connection=now)
    ((path, file),) = network.network_plan(facts, ADD)["files"].items()
    ipv4 = (
        "[ipv4]\nmethod=manual\naddress1=192.168.56.20/24\naddress2=10.0.0.1/8\n"
        "address3=192.168.56.111/24\ngateway=192.168.56.1\ndns=192.168.56.1;9.9.9.9;\n"
    )
    assert ipv4 in file["content"]
    ours = now.replace("10.0.0.1/8", "10.0.0.1/8, 192.168.56.111/24")
    again = network.network_plan(card_of(nmcli=WIRED, connection=ours), ADD)
    assert list(again["files"].values()) == [file]
    facts = card_of(nmcli=WIRED, connection=ours, files={path: file["content"]})
    (moved,) = network.network_plan(facts, {**ADD, "address": "192.168.56.112/24"})[
        "files"
    ].values()
    assert moved["content"] == file["content"].replace("56.111", "56.112")


def test_networkmanager_replace_is_manual_with_gateway_and_dns():
    facts = card_of(nmcli=WIRED, connection="manual\n192.168.56.20/24\n\n\n")
    facts["card"]["mtu"] = 9000
    (file,) = network.network_plan(facts, REPLACE)["files"].values()
    assert "method=manual\naddress1=192.168.56.111/24\ngateway=192.168.56.1\n" in file["content"]
    assert "dns=192.168.56.1;9.9.9.9;\n" in file["content"]
    assert "mtu=9000\n" in file["content"]


def test_a_card_that_networkmanager_leaves_alone_belongs_to_networkd():
    facts = card_of(nmcli="10 (unmanaged)\n\n\nethernet\n", networkctl=NETWORKD)
    plan = network.network_plan(facts, ADD)
    assert plan["manager"] == "systemd-networkd"
    assert plan["files"] == {
        "/etc/systemd/network/20-lan.network.d/tandem.conf": {
            "content": "[Network]\nAddress=192.168.56.111/24\n",
            "mode": "0644",
        }
    }


def test_networkd_replace_comes_before_every_other_file():
    files = {"/etc/systemd/network/20-lan.network": "[Match]\nName=eth0\n[Network]\nDHCP=yes\n"}
    plan = network.network_plan(card_of(networkctl=NETWORKD, files=files), REPLACE)
    ((path, file),) = plan["files"].items()
    assert Path(path).name < "00-anything.network"
    assert file["content"] == (
        "[Match]\nName=eth0\n\n[Network]\nAddress=192.168.56.111/24\nGateway=192.168.56.1\n"
        "DNS=192.168.56.1\nDNS=9.9.9.9\nDHCP=ipv6\n"
    )


def by_netplan(**files):
    text = NETWORKD.replace("/etc/systemd/network/20-lan", "/run/systemd/network/10-netplan-lan")
    named = {"/etc/netplan/50-cloud-init.yaml": CLOUD_INIT}
    return card_of(networkctl=text, files={**named, **files})


def test_netplan_knows_the_card_by_its_mac_address():
    plan = network.network_plan(by_netplan(), ADD)
    assert plan["manager"] == "netplan"
    ((path, file),) = plan["files"].items()
    assert path == "/etc/netplan/90-tandem.yaml"
    assert yaml.safe_load(file["content"]) == {
        "network": {"version": 2, "ethernets": {"lan": {"addresses": ["192.168.56.111/24"]}}}
    }
    assert plan["aside"] == []


def test_netplan_replace_holds_everything_and_sets_the_others_aside():
    other = "network: {version: 2, ethernets: {eth1: {dhcp4: true}}}"
    facts = by_netplan(**{"/etc/netplan/60-other.yaml": other})
    plan = network.network_plan(facts, REPLACE)
    assert plan["aside"] == ["/etc/netplan/50-cloud-init.yaml", "/etc/netplan/60-other.yaml"]
    cards = yaml.safe_load(plan["files"]["/etc/netplan/90-tandem.yaml"]["content"])["network"]
    assert cards["ethernets"]["eth1"] == {"dhcp4": True}
    assert cards["ethernets"]["lan"]["addresses"] == ["192.168.56.111/24"]
    assert cards["ethernets"]["lan"]["dhcp4"] is False
    assert cards["ethernets"]["lan"]["match"] == {"macaddress": "52:54:00:12:34:56"}


@pytest.mark.parametrize(
    ("texts", "server"),
    [
        (["{renderer: NetworkManager}"], "apply"),
        (["{ethernets: {renderer: NetworkManager}}"], "apply"),
        (["{ethernets: {lan: {renderer: NetworkManager}}}"], "apply"),
        (["{renderer: networkd}"], "generate"),
        # The desktop's cards by NetworkManager, the one that trains by networkd, and the reverse.
        (["{renderer: NetworkManager}", "{ethernets: {lan: {renderer: networkd}}}"], "generate"),
        (["{renderer: networkd, ethernets: {renderer: NetworkManager}}"], "apply"),
    ],
)
def test_netplan_is_applied_by_the_renderer_of_the_card_itself(texts, server):
    more = {f"/etc/netplan/{n}.yaml": f"network: {text}" for n, text in enumerate(texts, 60)}
    assert network.network_plan(by_netplan(**more), ADD)["apply"][0] == f"netplan {server}"


def test_what_files_of_networks_hold_is_shown_by_no_option_of_ansible():
    """A card with 802.1X has its password in them, and --diff shows what is written."""
    tasks = yaml.safe_load((ROOT / "ansible/roles/network/tasks/trial.yml").read_text())
    block = next(task["block"] for task in tasks if "block" in task)
    writing = [task for task in block if "network_planned.files.values()" in str(task)]
    assert writing and all(task.get("no_log") is True for task in writing)


def test_ifupdown_adds_a_second_stanza():
    files = {
        INTERFACES: "source /etc/network/interfaces.d/*\nauto lo\n"
        "iface lo inet loopback\nallow-hotplug eth0\niface eth0 inet dhcp\n"
    }
    plan = network.network_plan(card_of(files=files), ADD)
    assert plan["manager"] == "ifupdown"
    ((path, file),) = plan["files"].items()
    assert path == "/etc/network/interfaces.d/tandem-eth0"
    assert file["content"] == "iface eth0 inet static\n    address 192.168.56.111/24\n"
    assert plan["apply"] == ["ip address add 192.168.56.111/24 broadcast + dev eth0"]


def test_ifupdown_replace_rewrites_only_the_cards_own_stanza_and_is_stable():
    files = {
        INTERFACES: "auto eth0\niface eth0 inet dhcp\n    metric 5\n\n"
        "iface eth0 inet6 auto\niface eth1 inet dhcp\n"
    }
    (file,) = network.network_plan(card_of(files=files), REPLACE)["files"].values()
    assert file["content"] == (
        "auto eth0\niface eth0 inet6 auto\niface eth1 inet dhcp\n"
        "iface eth0 inet static\n    address 192.168.56.111/24\n    gateway 192.168.56.1\n"
        "    dns-nameservers 192.168.56.1 9.9.9.9\n    metric 5\n"
    )
    again = card_of(files={INTERFACES: file["content"]})
    (second,) = network.network_plan(again, REPLACE)["files"].values()
    assert second == file


def test_what_is_not_so_yet_is_named():
    lan = {"/etc/systemd/network/20-lan.network": "[Network]\nAddress=192.168.56.20/24\n"}
    facts = card_of(networkctl=NETWORKD, files=lan)
    plan = network.network_plan(facts, ADD)
    (path,) = plan["files"]
    no_address = "eth0 has no address 192.168.56.111/24"
    assert plan["wrong"] == [no_address, f"{path} is missing"]
    facts["files"] = {path: "something else"}
    assert network.network_plan(facts, ADD)["wrong"] == [no_address, f"{path} is changed"]
    facts["files"] = {path: file["content"] for path, file in plan["files"].items()}
    facts["card"]["addresses"].append("192.168.56.111/24")
    assert network.network_plan(facts, ADD)["wrong"] == []
    facts["files"] |= lan
    replaced = network.network_plan(facts, REPLACE)
    facts["files"] = lan | {path: file["content"] for path, file in replaced["files"].items()}
    assert network.network_plan(facts, REPLACE)["wrong"] == ["eth0 has 192.168.56.20/24 too"]


IP_JSON = """[{"ifindex":1,"ifname":"lo","mtu":65536,"address":"00:00:00:00:00:00","addr_info":
[{"family":"inet","local":"127.0.0.1","prefixlen":8}]},
{"ifindex":2,"ifname":"eth0","mtu":1500,"address":"52:54:00:12:34:56","addr_info":
[{"family":"inet","local":"192.168.56.20","prefixlen":24},
{"family":"inet6","local":"fe80::1","prefixlen":64}]}]"""


def test_the_card_is_the_one_that_holds_the_address():
    assert facts_of.interface_of(IP_JSON, "192.168.56.20", "node1") == "eth0"
    printed = (
        '[{},{"ifname":"lo","mtu":65536,"addr_info":[{}]},{"ifname":"eno1","mtu":1500,"addr_info":'
        '[{},{"family":"inet","local":"192.168.56.20","prefixlen":24}]}]'
    )  # as an old ip leaves them empty
    assert facts_of.interface_of(printed, "192.168.56.20", "node1") == "eno1"
    assert facts_of.card_facts(printed, "eno1", "node1")["addresses"] == ["192.168.56.20/24"]


def test_card_facts_hold_ipv4_alone():
    card = facts_of.card_facts(IP_JSON, "eth0", "node1")
    assert card == {"mac": "52:54:00:12:34:56", "mtu": 1500, "addresses": ["192.168.56.20/24"],
                    "dynamic": False}  # fmt: skip
    leased = IP_JSON.replace('"prefixlen":24', '"prefixlen":24,"dynamic":true')
    assert facts_of.card_facts(leased, "eth0", "node1")["dynamic"]


@pytest.mark.parametrize(
    ("given", "full"),
    [("192.168.56.111", "192.168.56.111/24"), ("10.1.2.3/16", "10.1.2.3/16")],
)
def test_the_prefix_length_comes_from_the_card_when_it_is_left_out(given, full):
    assert facts_of.full_address(given, ["192.168.56.20/24"], "node1") == full


def test_two_machines_with_one_address_are_named():
    hostvars = {
        "a": {"ansible_host": "10.0.0.5", "address": "10.0.0.9/24"},
        "b": {"ansible_host": "10.0.0.9"},
    }
    conflicts = facts_of.address_conflicts(["a", "b"], hostvars)
    assert conflicts == ["a and b would both have 10.0.0.9."]


def test_printed_files_come_back_whole():
    printed = "/etc/a.yaml:one: 1\n/etc/a.yaml:\n/etc/b:x:y\n"
    assert facts_of.parse_files(printed) == {"/etc/a.yaml": "one: 1\n\n", "/etc/b": "x:y\n"}
