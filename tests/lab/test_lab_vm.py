"""Emulated machines: a kernel of their own, and the same handling as any node."""

import platform

import pytest


@pytest.fixture(scope="module")
def machines(start_lab):
    made = start_lab("vm", "--nodes", "2", "--vm", "--cpus", "2", "--memory", "512")
    yield made
    made("down")


def test_hardware_is_as_asked_for(machines):
    processors, megabytes, disk = machines.ssh(
        1, "nproc; free -m | awk '/^Mem/ {print $2}'; df --output=size -BG / | tail -1"
    ).split()
    assert processors == "2"
    assert 400 < int(megabytes) < 512
    assert int(disk.rstrip("G")) >= 30


def test_kernel_is_their_own_and_mounts_nfs(machines):
    assert machines.ssh(1, "uname -r").strip() != platform.release()
    machines.ssh(
        1,
        "sudo sh -ec 'mkdir /srv/d; echo shared >/srv/d/f;"
        ' echo "/srv/d 192.168.56.112(ro,fsid=1)" >/etc/exports; systemctl start nfs-server\'',
    )
    mount = "sudo mount -t nfs4 -o vers=4.2 192.168.56.111:/srv/d /mnt"
    assert machines.ssh(2, f"{mount} && cat /mnt/f && sudo umount /mnt") == "shared\n"


def test_power_is_lost_and_comes_back(machines):
    machines.ssh(2, "echo kept > ~/file; sync")
    machines("kill", "2")
    assert "dead" in machines("status").stdout
    machines("mend", "2")
    assert machines.ssh(2, "cat ~/file; hostname").split() == ["kept", "node2"]


def test_reboot_keeps_what_was_not_even_synced(machines):
    boot_id = "cat /proc/sys/kernel/random/boot_id"
    before = machines.ssh(2, f"echo kept > ~/rebooted; {boot_id}")
    machines("reboot", "2")
    kept, after = machines.ssh(2, f"cat ~/rebooted; {boot_id}").split()
    assert kept == "kept" and after != before.strip()
