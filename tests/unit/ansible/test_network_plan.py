"""Which manager rules a card and what is planned, over text that real machines printed."""

import copy

import pytest
import yaml

from planning import PlanError, network
from planning import network_facts as facts_of
from tests.unit.ansible import test_preserved_settings as kept
from tests.unit.ansible.provision_machines import ROOT, reviewed

ADD = {"mode": "add", "address": "192.168.56.111/24", "gateway": "", "dns": []}
REPLACE = {
    "mode": "replace",
    "address": "192.168.56.111/24",
    "gateway": "192.168.56.1",
    "dns": ["192.168.56.1", "9.9.9.9"],
}
INTERFACES = "/etc/network/interfaces"
FOLDER = "source /etc/network/interfaces.d/*\nauto lo\niface lo inet loopback\n"
NETWORKD = """* 2: eth0
                     Link File: /usr/lib/systemd/network/99-default.link
                  Network File: /etc/systemd/network/20-lan.network
                          Type: ether
                         State: routable (configured)
"""
WIRED = "100 (connected)\nWired connection 1\n6f1d-uuid\nethernet\n"
# A PC that runs virtual machines: they and the PC share a bridge, which has its port's hardware
# address.
BRIDGE = """network:
  version: 2
  renderer: networkd
  ethernets:
    lan:
      match: {macaddress: "52:54:00:12:34:56"}
      set-name: enp3s0
      dhcp4: false
  bridges:
    br0:
      interfaces: [lan]
      dhcp4: true
      parameters: {stp: false, forward-delay: 0}
"""
BRIDGED = """[
{"ifname":"enp3s0","master":"br0","mtu":1500,"address":"52:54:00:12:34:56","addr_info":[]},
{"ifname":"br0","mtu":1500,"address":"52:54:00:12:34:56","addr_info":
[{"family":"inet","local":"192.168.56.20","prefixlen":24,"dynamic":true}]},
{"ifname":"vnet0","master":"br0","mtu":1500,"address":"fe:54:00:aa:bb:cc","addr_info":[]}]"""
CLOUD_INIT = """network:
  version: 2
  ethernets:
    lan:
      match: {macaddress: "52:54:00:12:34:56"}
      set-name: eth0
      dhcp4: true
"""


CARD = {"mac": "52:54:00:12:34:56", "mtu": 1500, "addresses": ["192.168.56.20/24"],
        "dynamic": False, "master": "", "ports": [], "parent": ""}  # fmt: skip


def card_of(**changes):
    base = {"host": "node1", "interface": "eth0", "card": copy.deepcopy(CARD), "files": {}}
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


def by_netplan(**files):
    text = NETWORKD.replace("/etc/systemd/network/20-lan", "/run/systemd/network/10-netplan-lan")
    named = {"/etc/netplan/50-cloud-init.yaml": CLOUD_INIT}
    return card_of(networkctl=text, files={**named, **files})


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


BOND = BRIDGE.replace("bridges", "bonds").replace("stp: false, forward-delay: 0", "mode: 802.3ad")
VLAN = "  vlans: {lan10: {id: 10, link: lan, dhcp4: true}}\n"


def bridged(interface="br0", **changes):
    card = facts_of.interface_facts(BRIDGED, interface, "node1")
    return card_of(interface=interface, card=card, **changes)


def bridged_by_netplan(text=BRIDGE, interface="br0"):
    file = NETWORKD.replace("/etc/systemd/network/20-lan", "/run/systemd/network/10-netplan-br0")
    return bridged(interface, networkctl=file, files={"/etc/netplan/01.yaml": text})


PORT_BY_IFUPDOWN = "iface enp3s0 inet manual\n"
BRIDGE_BY_IFUPDOWN = PORT_BY_IFUPDOWN + "iface br0 inet dhcp\n    bridge_ports enp3s0\n"
BY_MAC = "[Match]\nMACAddress=52:54:00:12:34:56\n[Network]\nDHCP=yes\n"


@pytest.mark.parametrize("want", [ADD, REPLACE], ids=["add", "replace"])
@pytest.mark.parametrize(
    "facts",
    [
        # Its own card, by name, as each program knows it.
        bridged("enp3s0", nmcli=WIRED),
        bridged("enp3s0", networkctl=NETWORKD, files={kept.LAN: "[Match]\nName=enp3s0\n"}),
        bridged("enp3s0", files={INTERFACES: FOLDER + PORT_BY_IFUPDOWN}),
        bridged_by_netplan(interface="enp3s0"),
        # A bridge that somebody made beside netplan.
        bridged_by_netplan(BRIDGE.partition("  bridges:")[0]),
        bridged(nmcli=WIRED.replace("ethernet", "bridge")),
    ],
)
def test_no_plan_touches_the_port_of_a_bridge(facts, want):
    with pytest.raises(PlanError, match=r"enp3s0|type bridge"):
        network.network_plan(facts, want)


def test_what_would_take_a_bridge_apart_or_reach_its_port_is_refused():
    with pytest.raises(PlanError, match="br0 consists of enp3s0, vnet0"):
        network.network_plan(bridged(files={INTERFACES: BRIDGE_BY_IFUPDOWN}), REPLACE)
    with pytest.raises(PlanError, match="enp3s0"):
        network.network_plan(bridged(networkctl=NETWORKD, files={kept.LAN: BY_MAC}), ADD)


NOW = "manual\n192.168.56.20/24, 10.0.0.1/8\n192.168.56.1\n192.168.56.1,9.9.9.9\n"
OURS = NOW.replace("10.0.0.1/8", "10.0.0.1/8, 192.168.56.111/24")
KEYFILE = "/etc/NetworkManager/system-connections/tandem-eth0.nmconnection"
STATIC = card_of(nmcli=WIRED, connection=NOW)
JUMBO = card_of(nmcli=WIRED, connection="manual\n192.168.56.20/24\n\n\n")
JUMBO["card"]["mtu"] = 9000
OTHER = {"/etc/netplan/60-other.yaml": "network: {version: 2, ethernets: {eth1: {dhcp4: true}}}"}
TWO = (
    "auto eth0\niface eth0 inet dhcp\n    metric 5\n\niface eth0 inet6 auto\niface eth1 inet dhcp\n"
)
DHCP = {**kept.NM, "connection": "auto\n\n\n"}
KEPT = {**REPLACE, "gateway": "", "dns": []}
# {manager and case: (facts, what is wanted)}
PLANS = {
    "NetworkManager, add": (card_of(nmcli=WIRED, connection="auto\n\n\n\n"), ADD),
    "NetworkManager, add to a static address": (STATIC, ADD),
    "NetworkManager, replace": (JUMBO, REPLACE),
    "NetworkManager, keyfile, add": (kept.facts(**kept.NM), ADD),
    "NetworkManager, keyfile": (kept.facts(**kept.NM), KEPT),
    "NetworkManager, no keyfile": (kept.facts(**DHCP | {"files": {}}), KEPT),
    "NetworkManager, DHCP's routes": (kept.facts(**DHCP, route=kept.GIVEN), KEPT),
    "networkd, unmanaged by NetworkManager": (
        card_of(nmcli="10 (unmanaged)\n\n\nethernet\n", networkctl=NETWORKD),
        ADD,
    ),
    "networkd, replace": (
        card_of(networkctl=NETWORKD, files={kept.LAN: "[Match]\nName=eth0\n[Network]\nDHCP=yes\n"}),
        REPLACE,
    ),
    "networkd, full file": (kept.facts(**kept.BY_NETWORKD), KEPT),
    "networkd, DHCP's routes": (kept.facts(**kept.BY_NETWORKD, route=kept.GIVEN), KEPT),
    "netplan, add": (by_netplan(), ADD),
    "netplan, replace": (by_netplan(**OTHER), REPLACE),
    "netplan, full file": (kept.facts(**kept.BY_NETPLAN), KEPT),
    "netplan, bridge, add": (bridged_by_netplan(), ADD),
    "netplan, bridge": (bridged_by_netplan(), REPLACE),
    "netplan, bond": (bridged_by_netplan(BOND), REPLACE),
    "netplan, VLAN": (
        card_of(
            interface="lan10",
            card={**CARD, "parent": "eth0"},
            networkctl=NETWORKD.replace("20-lan", "10-netplan-lan10"),
            files={"/etc/netplan/01.yaml": CLOUD_INIT + VLAN},
        ),
        REPLACE,
    ),
    "networkd, bridge, add": (
        bridged(networkctl=NETWORKD, files={kept.LAN: "[Match]\nName=br0\n[Network]\nDHCP=yes\n"}),
        ADD,
    ),
    "ifupdown, bridge, add": (bridged(files={INTERFACES: FOLDER + BRIDGE_BY_IFUPDOWN}), ADD),
    "netplan, DHCP's routes": (kept.facts(**kept.BY_NETPLAN, route=kept.GIVEN), KEPT),
    "ifupdown, add": (
        card_of(files={INTERFACES: FOLDER + "allow-hotplug eth0\niface eth0 inet dhcp\n"}),
        ADD,
    ),
    "ifupdown, replace": (card_of(files={INTERFACES: TWO}), REPLACE),
    "ifupdown, full stanza": (kept.facts(files={INTERFACES: kept.STANZA}), KEPT),
    "ifupdown, DHCP's routes": (kept.facts(**kept.BY_IFUPDOWN, route=kept.GIVEN), KEPT),
}  # fmt: skip


def shown(plan):
    lines = [
        f"{name}: {line}" for name in ("aside", "apply", "back", "wrong") for line in plan[name]
    ]
    for path, file in plan["files"].items():
        lines += [f"--- {path} {file['mode']}", file["content"].rstrip()]
    return "\n".join(lines)


def test_plans_are_those_that_were_reviewed():
    plans = {case: network.network_plan(*given) for case, given in PLANS.items()}
    names = {"networkd": "systemd-networkd"}
    for case, plan in plans.items():
        manager = case.partition(",")[0]
        assert plan["manager"] == names.get(manager, manager)
    reviewed("network_plans.txt", {case: shown(plan) for case, plan in plans.items()})


@pytest.mark.parametrize("case", [case for case, (_, want) in PLANS.items() if want != ADD])
def test_a_second_plan_is_the_first(case):
    made, want = PLANS[case]
    plan = network.network_plan(made, want)
    files = {path: file["content"] for path, file in plan["files"].items()}
    # What DHCP gave is gone by then.
    later = {**made, "files": files, "route": made["route"].replace(kept.GIVEN, kept.WAY["route"])}
    if made["nmcli"]:
        later["nmcli"] = f"100 (connected)\ntandem-{made['interface']}\nours-uuid\nethernet"
    elif plan["manager"] == "systemd-networkd":
        later["networkctl"] = f"  Network File: {min(files)}\n"
    assert network.network_plan(later, want)["files"] == plan["files"]


def test_networkmanagers_second_address_stays_and_moves():
    ours = {"nmcli": WIRED, "connection": OURS}
    (first,) = network.network_plan(STATIC, ADD)["files"].values()
    again = network.network_plan(card_of(**ours), ADD)
    assert list(again["files"].values()) == [first]
    there = card_of(**ours, files={KEYFILE: first["content"]})
    moved = network.network_plan(there, {**ADD, "address": "192.168.56.112/24"})["files"]
    assert moved[KEYFILE]["content"] == first["content"].replace("56.111", "56.112")


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
    leased = IP_JSON.replace('"prefixlen":24', '"prefixlen":24,"dynamic":true')
    card = {"mac": "52:54:00:12:34:56", "mtu": 1500, "addresses": ["192.168.56.20/24"]}
    card |= {"master": "", "ports": [], "parent": ""}
    for text, dynamic in ((IP_JSON, False), (leased, True)):
        assert facts_of.interface_facts(text, "eth0", "node1") == {**card, "dynamic": dynamic}


def test_addresses_of_the_inventory():
    """The prefix length comes from the card where it is left out."""
    for given, full in (("192.168.56.111", "192.168.56.111/24"), ("10.1.2.3/16", "10.1.2.3/16")):
        assert facts_of.full_address(given, ["192.168.56.20/24"], "node1") == full
    one = {"ansible_host": "10.0.0.5", "address": "10.0.0.9/24"}
    hostvars = {"a": one, "b": {"ansible_host": "10.0.0.9"}}
    conflicts = facts_of.address_conflicts(["a", "b"], hostvars)
    assert conflicts == ["a and b would both have 10.0.0.9."]


def test_printed_files_come_back_whole():
    printed = "/etc/a.yaml:one: 1\n/etc/a.yaml:\n/etc/b:x:y\n"
    assert facts_of.parse_files(printed) == {"/etc/a.yaml": "one: 1\n\n", "/etc/b": "x:y\n"}
