"""Healthy machines: what they are, where they end, and what a second `up` finds."""

import hashlib
from pathlib import Path


def test_machines_are_whole_and_differ(lab):
    line = (
        "hostname; cat /etc/machine-id; ls /etc/ssh/*.pub | xargs cat; "
        "systemctl is-system-running --wait"
    )
    said = [lab.ssh(i, line).splitlines() for i in (1, 2, 3, 4)]
    assert [s[0] for s in said] == ["node1", "node2", "node3", "node4"]
    assert {s[-1] for s in said} == {"running"}
    for each in zip(*(s[1:-1] for s in said)):
        assert len(set(each)) == 4, each


def test_no_way_out(lab):
    """A documentation address: no route, so not even a packet."""
    probe = (
        'python3 -c "import socket, errno; s = socket.socket(); s.settimeout(5); '
        "print(errno.errorcode.get(s.connect_ex(('192.0.2.2', 80))))\""
    )
    assert lab.ssh(1, probe) == "ENETUNREACH\n"
    assert lab.control("sh", "-c", probe).stdout == "ENETUNREACH\n"
    assert lab.stranger("sh", "-c", probe).stdout == "ENETUNREACH\n"
    assert lab.ssh(1, "ip route show default; ip -6 route show default") == ""


def test_own_ssh_folder_is_out_of_sight_and_untouched(lab):
    def content(folder):
        return {p.name: hashlib.sha256(p.read_bytes()).digest() for p in folder.iterdir()}

    mine = Path("~/.ssh").expanduser()
    before = content(mine)
    assert lab.control("sh", "-c", "touch ~/.ssh/config; ls ~/.ssh").stdout.split() == [
        *("config", "id_ed25519", "id_ed25519.pub", "known_hosts")
    ]
    lab.control("sh", "-c", "rm ~/.ssh/config")
    assert content(mine) == before


def test_second_up_is_refused_and_harms_nothing(lab):
    boots = lab.ssh(1, "cat /proc/sys/kernel/random/boot_id")
    done = lab("up", "--no-bundle", check=False)
    assert done.returncode == 1
    assert done.stderr == f"lab: lab {lab.name} is up already: python -m lab down\n"
    assert lab.ssh(1, "cat /proc/sys/kernel/random/boot_id") == boots
