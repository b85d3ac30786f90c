"""`make check` on real machines: clean ones, then faults planted on each, all said at once."""

import hashlib
import json
import shlex

import pytest

from tests.lab.site_plays import CHECKOUT, changes, failures, play, said, write_inventory

# A connection kept open from before would not notice another host key.
FRESH = "ANSIBLE_SSH_ARGS=-o ControlMaster=no -o ControlPath=none -o StrictHostKeyChecking=yes"
CHECK = ("env", FRESH, "python", "ansible/check.py")

# On node1, all at once. The last one takes sudo away, so nothing can follow it.
PLANTED = {
    "dpkg": "touch /var/lib/dpkg/updates/0001",
    "rsync": "mv /usr/bin/rsync /usr/bin/rsync.away",
    "mount": "echo 'server:/data /data nfs4 defaults 0 0' >>/etc/fstab",
    "library_path": "echo LD_LIBRARY_PATH=/usr/lcoal/cuda/lib64 >>/etc/environment",
    "firewall": 'mkdir -p /etc/ufw; echo ENABLED=\\"yes\\" >/etc/ufw/ufw.conf',
    "disk_full": "mount -t tmpfs -o size=1m tmpfs /srv",
    "inodes": "mount -t tmpfs -o nr_inodes=1000 tmpfs /var/tmp",
    "read_only": "mkdir -p /opt/tandem; mount -t tmpfs -o ro tmpfs /opt/tandem",
    "mtu": "ip link set eth0 mtu 1400",
    "overlap": "ip link add docker0 type bridge; ip address add 192.168.0.1/16 dev docker0",
    "venv": "mv /usr/lib/python3.11/ensurepip /usr/lib/python3.11/away",
    "sudo": "rm /etc/sudoers.d/tandem",
}
# Machines as somebody might list them by mistake: {name: (its line, the fault)}. node4 has the
# address of node3 too, and one more.
MISTAKEN = {
    "node1": ("ansible_host=192.168.56.111 env_python=/usr/bin/python3", "loopback_name"),
    "node2": ("ansible_host=192.168.56.112 env_manager=uv", "uv"),
    "node3": ("ansible_host=192.168.56.113", "duplicate_address"),
    "node4": ("ansible_host=192.168.56.114 env_manager=conda conda_installer=''", "installer"),
    "other": ("ansible_host=192.168.56.150", "host_key_unknown"),
    "closed": ("ansible_host=192.168.56.114 ansible_port=9", "no_sshd"),
    "misspelt": ("ansible_host=no-such-machine.invalid", "name"),
}
TAKEN = ("192.168.56.113", "192.168.56.150")
# A package without the one that it needs, as `dpkg -i` of a downloaded file leaves it.
HALF_INSTALL = """
cd $(mktemp -d); mkdir -p half/DEBIAN
printf 'Package: standin-half\nVersion: 1\nArchitecture: all\nMaintainer: T\n' >half/DEBIAN/control
printf 'Depends: standin-other\nDescription: stand-in\n' >>half/DEBIAN/control
dpkg-deb --build half >/dev/null; dpkg --install half.deb >/dev/null 2>&1 || true
"""
HOLD_THE_LOCK = """
import fcntl, time
lock = open("/var/lib/dpkg/lock-frontend", "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
open("/run/held", "w")
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def machines(start_lab):
    return start_lab("faults", "--nodes", "4", "--no-bundle")


def check(lab, *options):
    """(exit code, {host: {fault: finding}})."""
    done = lab.control(*CHECK, "--json", *options, check=False)
    assert done.stdout, done.stderr
    found = {}
    for finding in json.loads(done.stdout)["findings"]:
        found.setdefault(finding["host"], {})[finding["fault"]] = finding
    return done.returncode, found


def test_clean_machines_have_no_fault_and_the_absent_one_is_named(machines):
    code, found = check(machines)
    assert {host: set(faults) for host, faults in found.items()} == {"node5": {"unreachable"}}
    assert code == 1
    assert "No route to host" in found["node5"]["unreachable"]["cause"]
    done = machines.control(*CHECK, "--limit", "node1,node2", check=False)
    assert (done.returncode, done.stdout) == (0, "make check found no problems.\n")


def test_an_inventory_that_cannot_be_read_is_not_a_clean_cluster(machines):
    assert machines.control(*CHECK, "--inventory", "/nowhere", check=False).returncode == 2


def test_mistaken_lines_of_the_inventory_are_named(machines, tmp_path):
    for address in TAKEN:
        machines.ssh(4, f"sudo ip address add {address}/24 dev eth0")
    lines = {name: line for name, (line, _) in MISTAKEN.items()}
    code, found = check(machines, "--inventory", write_inventory(tmp_path, lines))
    for address in TAKEN:
        machines.ssh(4, f"sudo ip address del {address}/24 dev eth0")
    assert code == 1
    expected = {name: {fault} for name, (_, fault) in MISTAKEN.items()}
    expected["node4"].add("unlisted_address")
    assert {host: set(faults) for host, faults in found.items()} == expected


def test_no_space_is_asked_for_once_the_environment_is_made(machines):
    machines.ssh(2, "sudo mount -t tmpfs -o size=1m tmpfs /opt/tandem")
    before = check(machines, "--limit", "node2")
    lock = hashlib.sha256((CHECKOUT / "ansible/locks/cpu-py3.11.txt").read_bytes()).hexdigest()
    made = f"/opt/tandem/envs/cpu-{lock[:12]}"
    machines.ssh(2, f"sudo mkdir -p {made}; sudo touch {made}/.tandem-lock")
    after = check(machines, "--limit", "node2")
    machines.ssh(2, "sudo umount /opt/tandem")
    assert set(before[1]["node2"]) == {"disk_full"}
    assert after == (0, {})


def test_packages_that_apt_calls_broken_are_one_sentence_and_nothing_changes(machines):
    machines.ssh(2, f"sudo sh -ec {shlex.quote(HALF_INSTALL)}")
    machines.ssh(2, "touch /tmp/before")
    code, found = check(machines, "--limit", "node2")
    assert code == 1 and set(found["node2"]) == {"dpkg"}
    assert "(standin-half : Depends: standin-other" in found["node2"]["dpkg"]["cause"]
    done = play(machines, "site.yml", "--limit", "node2", check=False)
    assert failures(done) == {"node2"} and "apt --fix-broken install" in said(done)
    assert changes(done) == {"node2": 0}
    changed = "sudo find /etc /opt /srv /var/lib/tandem /var/lib/dpkg -newer /tmp/before"
    assert machines.ssh(2, f"{changed} -not -type d 2>/dev/null || true") == ""
    machines.ssh(2, "sudo dpkg --purge standin-half")
    assert check(machines, "--limit", "node2") == (0, {})


def test_planted_faults_are_all_said_at_once(machines):
    command = f"setsid python3 -c {shlex.quote(HOLD_THE_LOCK)} </dev/null >/dev/null 2>&1 &"
    machines.ssh(1, f"sudo sh -c {shlex.quote(command)}; until test -e /run/held; do :; done")
    own = machines.ssh(1, "cat /etc/machine-id").strip()
    machines.ssh(4, f"echo {own} | sudo tee /etc/machine-id")
    machines.ssh(1, f"sudo sh -c {shlex.quote('; '.join(PLANTED.values()))}")
    machines.ssh(
        2, "sudo sh -c 'rm /etc/ssh/ssh_host_ed25519*; ssh-keygen -A; systemctl restart ssh'"
    )
    machines.admin(3, "mv .ssh/authorized_keys .ssh/away")
    code, found = check(machines)
    assert code == 1
    assert set(found["node1"]) == {*PLANTED, "apt_lock"}
    assert found["node1"]["apt_lock"]["cause"].startswith("python3 (process ")
    assert set(found["node2"]) == {"host_key_changed"}
    assert set(found["node3"]) == {"login"}
    assert set(found["node4"]) == {"duplicate_machine_id"}
    assert set(found["node5"]) == {"unreachable"}
