"""A machine without internet gets all from the control node, and tries nowhere else."""

import json
import subprocess

import pytest

from tests.lab.conftest import CHECKOUT
from tests.lab.disks import changed_files
from tests.lab.site_plays import changes, failures, play, write_inventory
from tests.unit.ansible.provision_machines import load

debs = load("ansible/bundle.py").debs

HOSTS = {"node1": "ansible_host=192.168.56.111 offline=true release=bookworm"}
# Packages that the lab's machines have and a desktop may lack.
LACKING = "chrony sysstat nftables python3-venv python3.11-venv python3-apt rsync"
# A machine of the lab has no route out, so what it tries would end inside it. With one to the
# control node each attempt arrives there and is counted: another network, names, a proxy.
WATCH = """
table inet watch {
    counter left { }
    chain arriving {
        type filter hook prerouting priority -300;
        iifname != "br0" accept
        ip daddr != { 192.168.56.0/24, 224.0.0.0/4, 255.255.255.255 } counter name left
        ip6 daddr != { fe80::/10, ff00::/8 } counter name left
        ip daddr 192.168.56.1 udp dport 53 counter name left
        ip daddr 192.168.56.1 tcp dport { 53, 80, 443, 3128, 3142, 8080 } counter name left
    }
}
"""


def attempts(lab) -> int:
    """Packets that tried to leave since the last call."""
    listed = lab.control("nft", "--json", "reset", "counter", "inet", "watch", "left").stdout
    return next(row["counter"]["packets"] for row in json.loads(listed)["nftables"][1:])


@pytest.fixture(scope="module")
def inventory(tmp_path_factory) -> str:
    return write_inventory(tmp_path_factory.mktemp("inventory"), HOSTS)


@pytest.fixture(scope="module")
def lab(start_lab, inventory):
    """One fresh machine, watched. The bundle is gathered outside of the lab, where internet is."""
    book = CHECKOUT / "ansible/playbooks/bundle.yml"
    program = CHECKOUT / ".venv/bin/ansible-playbook"
    subprocess.run([program, book, "--inventory", inventory], cwd=CHECKOUT, check=True)
    lab = start_lab("offline", "--nodes", "1", "--no-bundle")
    lab.ssh(1, f"sudo dpkg --purge {LACKING}")
    lab.ssh(1, "sudo ip route add default via 192.168.56.1")
    lab.ssh(1, "echo nameserver 192.168.56.1 | sudo tee /etc/resolv.conf")
    lab.control("nft", "--file", "-", input=WATCH)
    lab.ssh(1, "getent hosts deb.debian.org || true")
    assert attempts(lab) > 0, "the watch sees no name server being asked"
    lab.ssh(1, "timeout 2 bash -c '</dev/tcp/192.0.2.1/80' || true")
    assert attempts(lab) > 0, "the watch sees no connection to another network"
    yield lab
    lab("down")


@pytest.fixture
def broken():
    """One byte of a package is wrong."""
    package = next((CHECKOUT / "bundle/debs/bookworm-amd64").glob("sysstat_*.deb"))
    whole = package.read_bytes()
    package.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    yield package
    package.write_bytes(whole)


def test_a_broken_package_is_named_before_the_machine_is_touched(lab, inventory, broken):
    hosts = lab.ssh(1, "cat /etc/hosts")
    done = play(lab, "site.yml", "--inventory", inventory, check=False)
    assert failures(done) == {"node1"} and changes(done) == {"node1": 0}
    assert f"{broken} is broken" in " ".join(done.stdout.split())
    assert lab.ssh(1, "cat /etc/hosts") == hosts


def test_check_of_a_fresh_machine_predicts_and_changes_nothing(lab, inventory):
    before = changed_files(lab, 1)
    done = play(lab, "site.yml", "--inventory", inventory, "--check")
    assert changes(done)["node1"] > 5
    said = " ".join(done.stdout.split())
    assert "bundle/debs/bookworm-amd64" in said and "chrony" in said
    assert changed_files(lab, 1) == before
    assert attempts(lab) == 0


def test_all_comes_from_the_control_machine(lab, inventory):
    attempts(lab)
    done = play(lab, "site.yml", "--inventory", inventory)
    assert not failures(done)
    assert attempts(lab) == 0
    lab.ssh(1, "iostat -o JSON -d -x >/dev/null && sudo nft list tables")
    for words in ([], ["--check"]):
        again = play(lab, "site.yml", "--inventory", inventory, *words)
        assert changes(again) == {"node1": 0}
    assert attempts(lab) == 0


def test_a_package_that_breaks_on_the_machine_is_named(lab, inventory):
    package = lab.ssh(1, "ls /var/lib/tandem/apt/packages/sysstat_*.deb").strip()
    lab.ssh(1, f"sudo cp -p {package} /tmp/whole.deb; sudo truncate -s 1000 {package}")
    verdict = play(lab, "ansible/playbooks/verify.yml", "--inventory", inventory, check=False)
    lab.ssh(1, f"sudo cp -p /tmp/whole.deb {package}")
    assert failures(verdict) == {"node1"}
    assert "are broken (sysstat_" in " ".join(verdict.stdout.split())


def test_every_package_of_every_role_installs(lab, inventory, tmp_path):
    """Among them those that this inventory does not ask for: Samba, NFS, compilers."""
    names = sorted(debs.role_packages())
    assert {"samba", "nfs-kernel-server", "python3-venv"} <= set(names)
    (tmp_path / "group_vars").symlink_to(CHECKOUT / "group_vars")
    book = tmp_path / "all.yml"
    book.write_text(
        "- hosts: cluster\n  roles:\n"
        f"    - {{role: packages, packages_wanted: {json.dumps(names)}}}\n"
    )
    attempts(lab)
    play(lab, str(book), "--inventory", inventory)
    lab.ssh(1, f"dpkg --status {' '.join(names)} >/dev/null")
    lab.ssh(1, "python3 -m venv /tmp/environment && /tmp/environment/bin/pip --version")
    assert attempts(lab) == 0
