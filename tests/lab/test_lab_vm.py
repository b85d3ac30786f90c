"""Emulated machines: a kernel of their own, and the same handling as any node."""

import pytest


@pytest.fixture(scope="module")
def machines(start_lab):
    made = start_lab("vm", "--nodes", "2", "--vm", "--cpus", "2", "--memory", "512")
    yield made
    made("down")


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
