"""NetworkManager, netplan and ifupdown: each rules one machine's card, and gets its address; and
netplan a bridge that virtual machines share with the PC."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.site_plays import changes, failures, play, reboot, write_inventory, write_play

NODES = {1: "NetworkManager", 2: "netplan", 3: "ifupdown", 4: "netplan"}
# What an installer that knows these programs leaves: today's address, by each one's own file.
KEYFILE = """[connection]
id=lan
uuid=2d0b5c0e-3f5c-4a51-9b53-6f3a1f0a7c11
type=ethernet
interface-name=eth0
[ipv4]
method=manual
address1=192.168.56.111/24
[ipv6]
method=ignore
"""
NETPLAN = "network: {version: 2, ethernets: {eth0: {addresses: [192.168.56.112/24]}}}\n"
BRIDGE = """network:
  version: 2
  ethernets: {eth0: {dhcp4: false}}
  bridges:
    br0: {interfaces: [eth0], addresses: [192.168.56.114/24], parameters: {stp: false}}
"""
INTERFACES = """auto eth0
iface eth0 inet static
    address 192.168.56.113/24
source /etc/network/interfaces.d/*
"""
CARDS = {
    1: ("/etc/NetworkManager/system-connections/lan.nmconnection", KEYFILE),
    2: ("/etc/netplan/01-lan.yaml", NETPLAN),
    3: ("/etc/network/interfaces", INTERFACES),
    4: ("/etc/netplan/01-lan.yaml", BRIDGE),
}
RULES = {
    1: "systemctl disable systemd-networkd networking; systemctl enable NetworkManager",
    2: "systemctl disable NetworkManager networking; systemctl enable systemd-networkd",
    3: "systemctl disable systemd-networkd NetworkManager; systemctl enable networking",
    4: "systemctl disable NetworkManager networking; systemctl enable systemd-networkd",
}
ADDRESSES = "ip -4 -o address show scope global | awk '{print $2 $4}'"
DEVICES = {1: "eth0", 2: "eth0", 3: "eth0", 4: "br0"}
FILES = "sudo find /etc/NetworkManager/system-connections /etc/netplan /etc/network -type f | sort"


@dataclass
class Managed:
    """Four machines, and the plays over them."""

    lab: object
    folder: Path
    play: str

    def words(self, addresses: dict[int, str], more: str = "") -> list[str]:
        hosts = {
            f"node{n}": f"ansible_host=192.168.56.{110 + n} address={address} {more}"
            for n, address in addresses.items()
        }
        return ["--inventory", write_inventory(self.folder, hosts)]

    def at(self, node: int, line: str, address: str | None = None) -> list[str]:
        target = f"tandem@{address or f'192.168.56.{110 + node}'}"
        return self.lab.control("ssh", "-o", "ConnectTimeout=5", target, line).stdout.split()


@pytest.fixture(scope="module")
def managed(start_lab, tmp_path_factory):
    lab = start_lab("managers", "--nodes", "4", "--no-bundle",
                    "--with", "network-manager,netplan.io,ifupdown")  # fmt: skip
    for node, (path, text) in CARDS.items():
        lab.ssh(node, f"sudo install -D -m 600 /dev/stdin {path}", input=text)
        line = f"rm /etc/systemd/network/10-lan.network; {RULES[node]}"
        lab.ssh(node, f"sudo sh -c '{line}'")
        reboot(lab, node)
    folder = tmp_path_factory.mktemp("managers")
    return Managed(lab, folder, write_play(folder, ["network"]))


def test_an_added_address_is_there_beside_the_other_after_a_reboot_too(managed):
    words = managed.words({n: f"192.168.56.{120 + n}" for n in NODES})
    said = play(managed.lab, "--check", managed.play, *words).stdout
    for node, manager in NODES.items():
        assert f"node{node}: {manager} would get" in " ".join(said.split())
    assert max(changes(play(managed.lab, managed.play, *words)).values()) > 0
    for node in NODES:
        reboot(managed.lab, node)
        own = DEVICES[node]
        expected = {f"{own}192.168.56.{110 + node}/24", f"{own}192.168.56.{120 + node}/24"}
        assert set(managed.at(node, ADDRESSES, f"192.168.56.{120 + node}")) == expected
    assert changes(play(managed.lab, managed.play, *words)) == {f"node{n}": 0 for n in NODES}


def test_taken_back_all_is_as_it_was(managed):
    words = managed.words({n: f"192.168.56.{120 + n}" for n in NODES})
    play(managed.lab, "ansible/playbooks/uninstall.yml", *words, "--tags", "network")
    for node, (path, text) in CARDS.items():
        assert managed.at(node, ADDRESSES) == [f"{DEVICES[node]}192.168.56.{110 + node}/24"]
        assert path in managed.at(node, FILES)
        assert not [file for file in managed.at(node, FILES) if "tandem" in file]
        assert managed.lab.ssh(node, f"sudo cat {path}") == text


def test_a_wrong_address_comes_back_by_itself(managed):
    words = managed.words({n: f"10.99.0.{n}/24" for n in NODES}, "network_mode=replace")
    done = play(managed.lab, managed.play, *words, "-e", "network_rollback_seconds=24", check=False)
    assert failures(done) == {f"node{n}" for n in NODES}
    for node, (path, text) in CARDS.items():
        assert managed.at(node, ADDRESSES) == [f"{DEVICES[node]}192.168.56.{110 + node}/24"]
        assert managed.lab.ssh(node, f"sudo cat {path}") == text
        # The trial had begun: before it there was nothing to put back.
        assert "rolled-back" in managed.at(node, "sudo ls /var/lib/tandem/network")


def test_a_replaced_address_is_the_only_one_after_a_reboot_too(managed):
    words = managed.words({n: f"192.168.56.{130 + n}/24" for n in NODES}, "network_mode=replace")
    play(managed.lab, managed.play, *words, "-e", "network_update_inventory=true")
    for node in NODES:
        reboot(managed.lab, node, f"192.168.56.{130 + node}")
        only = [f"{DEVICES[node]}192.168.56.{130 + node}/24"]
        assert managed.at(node, ADDRESSES, f"192.168.56.{130 + node}") == only
    assert changes(play(managed.lab, managed.play, *words)) == {f"node{n}": 0 for n in NODES}
