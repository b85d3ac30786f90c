"""Emulated machines: a kernel of their own, and the same handling as any node."""

import platform

import pytest


@pytest.fixture(scope="module")
def machines(start_lab):
    made = start_lab("vm", "--nodes", "2", "--vm")
    yield made
    made("down")


def test_kernel_is_their_own_and_mounts_nfs(machines):
    assert machines.ssh(1, "uname -r").strip() != platform.release()
    export = "/srv/d 192.168.56.112(ro,fsid=1)"
    machines.ssh(
        1, f"sudo sh -c 'mkdir /srv/d; echo shared >/srv/d/f; echo \"{export}\" >/etc/exports'"
    )
    machines.ssh(1, "sudo systemctl start nfs-server")
    mount = "sudo mount -t nfs4 -o vers=4.2 192.168.56.111:/srv/d /mnt"
    assert machines.ssh(2, f"{mount} && cat /mnt/f") == "shared\n"
    refused = machines("ssh", "2", "--", "sudo touch /mnt/new", check=False)
    assert "Read-only file system" in refused.stderr


def test_power_is_lost_and_comes_back(machines):
    machines.ssh(2, "echo kept > ~/file; sync")
    machines("kill", "2")
    assert "dead" in machines("status").stdout
    machines("mend", "2")
    assert machines.ssh(2, "cat ~/file; hostname").split() == ["kept", "node2"]
