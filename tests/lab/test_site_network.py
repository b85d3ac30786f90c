"""Static addresses: a right one survives a reboot, a wrong one comes back by itself."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.lab.site_plays import (
    changes,
    complaint,
    failures,
    play,
    reboot,
    write_inventory,
    write_play,
)

HOSTS = {
    "node1": "ansible_host=192.168.56.111 address=10.99.0.1/24",
    "node2": "ansible_host=192.168.56.112 address=192.168.56.122",
    "node3": "ansible_host=192.168.56.113 address=192.168.56.123/24 network_mode=replace",
}
ADDRESSES = "ip -4 -o address show eth0 | awk '{print $4}'"


@pytest.fixture(scope="module")
def addressed(start_lab, tmp_path_factory):
    """Three machines, asked for a wrong, an added and a replaced address in one run."""
    folder = tmp_path_factory.mktemp("network")
    lab = start_lab("network", "--nodes", "3", "--no-bundle")
    inventory = write_inventory(folder, HOSTS)
    words = [write_play(folder, ["network"]), "--inventory", inventory]
    play(lab, "--check", *words)
    assert lab.ssh(2, ADDRESSES).split() == ["192.168.56.112/24"]
    done = play(lab, *words, "-e", "network_rollback_seconds=24",
                "-e", "network_update_inventory=true", check=False)  # fmt: skip
    return lab, words, done


def at(lab, address: str, line: str) -> list[str]:
    return lab.control("ssh", "-o", "ConnectTimeout=5", f"tandem@{address}", line).stdout.split()


def test_a_wrong_address_comes_back_and_is_reported(addressed):
    lab, _, done = addressed
    assert failures(done) == {"node1"}
    said = " ".join(done.stdout.split())
    assert "node1 could not be reached at 10.99.0.1/24 within 12 s" in said
    assert lab.ssh(1, ADDRESSES).split() == ["192.168.56.111/24"]
    assert lab.ssh(1, "ls /etc/systemd/network") == "10-lan.network\n"


def test_right_addresses_are_there_and_in_the_inventory(addressed):
    lab, words, _ = addressed
    assert at(lab, "192.168.56.122", ADDRESSES) == ["192.168.56.112/24", "192.168.56.122/24"]
    assert at(lab, "192.168.56.123", ADDRESSES) == ["192.168.56.123/24"]
    lines = Path(words[-1]).read_text().splitlines()
    assert lines[1:4] == [
        f"node1 {HOSTS['node1']}",
        "node2 ansible_host=192.168.56.122 other_addresses=192.168.56.112 address=192.168.56.122",
        "node3 ansible_host=192.168.56.123 address=192.168.56.123/24 network_mode=replace",
    ]


def test_a_second_run_changes_nothing(addressed):
    lab, words, _ = addressed
    again = play(lab, *words, "--limit", "node2,node3")
    assert changes(again) == {"node2": 0, "node3": 0}


@pytest.mark.parametrize(("node", "address"), [(2, "192.168.56.122"), (3, "192.168.56.123")])
def test_a_right_address_survives_a_reboot(addressed, node, address):
    lab, _, _ = addressed
    before = at(lab, address, ADDRESSES)
    reboot(lab, node, address)
    assert at(lab, address, ADDRESSES) == before


def test_verification_names_an_address_that_the_next_boot_will_not_have(addressed, tmp_path):
    lab, words, _ = addressed
    role = ["network", *words[1:], "--limit", "node2,node3"]
    assert complaint(lab, tmp_path, *role) == ""
    file = "/etc/systemd/network/10-lan.network.d/tandem.conf"
    at(lab, "192.168.56.122", f"sudo mv {file} /root/")
    said = complaint(lab, tmp_path, *role)
    assert "node2 does not have its static address as it was set in systemd-networkd" in said
    assert f"{file} is missing" in said
    at(lab, "192.168.56.122", f"sudo mv /root/tandem.conf {file}")


@pytest.mark.long
def test_power_lost_during_the_trial_gives_the_old_configuration_at_the_next_boot(addressed):
    lab, words, _ = addressed
    running = subprocess.Popen(
        lab.argv("exec", "--", "ansible-playbook", *words, "--limit", "node1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=lab.checkout,
    )
    try:
        deadline = time.monotonic() + 240
        while "10.99.0.1/24" not in lab.ssh(1, ADDRESSES):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        lab("kill", "1")
    finally:
        running.terminate()
        running.wait(timeout=30)
    lab("mend", "1")
    lab.ssh(1, "systemctl is-system-running --wait || true")
    assert lab.ssh(1, ADDRESSES).split() == ["192.168.56.111/24"]
    assert lab.ssh(1, "sudo ls /var/lib/tandem/network").split().count("pending") == 0


def test_an_address_that_somebody_has_is_refused_and_nothing_changes(addressed, tmp_path):
    lab, words, _ = addressed
    taken = write_inventory(tmp_path, {"node1": "ansible_host=192.168.56.111 address=192.168.56.1"})
    done = play(lab, words[0], "--inventory", taken, check=False)
    assert "Another machine answers at 192.168.56.1 already" in " ".join(done.stdout.split())
    assert changes(done) == {"node1": 0}
