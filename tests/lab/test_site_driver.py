"""The driver by packages: installed, held, upgraded, taken away (card and kernel: stand-ins)."""

import pytest

from tests.lab import driver_standins as standins
from tests.lab.site_plays import changes, failures, play, reboot, said

OLD, NEW = "580.159.04", "580.178.04"
LOADED = "cat /proc/driver/nvidia/version"
BOOTED = "systemctl show --property=UserspaceTimestampMonotonic"


@pytest.fixture(scope="module")
def machine(start_lab, tmp_path_factory):
    """A machine with a Turing card and an archive of packages: the lab, and the words of a play."""
    folder = tmp_path_factory.mktemp("driver")
    archive = standins.build_archive(folder, OLD)
    lab = start_lab("driver", "--nodes", "1", "--no-bundle")
    standins.install(lab, 1, archive)
    return lab, standins.write_words(folder), archive


@pytest.mark.long
def test_keep_touches_nothing_and_says_what_is_missing(machine):
    lab, words, _ = machine
    before = lab.ssh(1, "dpkg-query --show; ls /etc/apt /etc/modprobe.d /var/lib")
    done = play(lab, *words, "-e", "driver_policy=keep", check=False)
    assert failures(done) == {"node1"}
    assert "no driver is loaded" in said(done) and "driver_policy: install" in said(done)
    assert lab.ssh(1, "dpkg-query --show; ls /etc/apt /etc/modprobe.d /var/lib") == before


def test_packages_are_installed_loaded_and_held(machine):
    lab, words, _ = machine
    checked = play(lab, "--check", *words)
    assert f"nvidia-kernel-dkms={OLD}-1" in said(checked)
    done = play(lab, *words)
    assert f"module and nvidia-smi agree: {OLD}" in said(done)
    assert f"Kernel Module {OLD}" in " ".join(lab.ssh(1, LOADED).split())
    held = lab.ssh(1, "apt-mark showhold").split()
    assert {"nvidia-kernel-dkms", "nvidia-smi", "libnvidia-ml1"} <= set(held)


def test_a_second_run_changes_nothing(machine):
    lab, words, _ = machine
    for more in ([], ["-e", "driver_policy=upgrade"], ["--check"]):
        assert changes(play(lab, *words, *more)) == {"node1": 0}


@pytest.mark.long
def test_install_keeps_and_upgrade_moves(machine):
    lab, words, archive = machine
    standins.build_driver(archive, NEW)
    standins.index(archive)
    standins.send_archive(lab, 1, archive)
    lab.ssh(1, "sudo apt-get -q update; sudo apt-get -q -y dist-upgrade")
    assert OLD in lab.ssh(1, "dpkg-query --show nvidia-smi")  # pinned and held
    assert changes(play(lab, *words)) == {"node1": 0}
    standins.start_powerd(lab, 1)
    before = lab.ssh(1, BOOTED)
    done = play(lab, *words, "-e", "driver_policy=upgrade")
    assert f"module and nvidia-smi agree: {NEW}" in said(done)
    assert lab.ssh(1, BOOTED) == before
    assert lab.ssh(1, "systemctl is-active nvidia-powerd") == "active\n"
    assert changes(play(lab, *words, "-e", "driver_policy=upgrade")) == {"node1": 0}
    assert "nvidia-smi" in lab.ssh(1, "apt-mark showhold").split()


@pytest.mark.long
def test_a_mismatch_is_recognised_and_cured_by_a_reboot(machine):
    lab, words, _ = machine
    lab.ssh(1, f"sudo sed -i s/{NEW}/580.150.01/ /proc/driver/nvidia/version")
    lab.ssh(1, "sudo touch /opt/standin/busy")
    assert "Driver/library version mismatch" in lab.ssh(1, "nvidia-smi || true")
    kept = play(lab, *words, "-e", "driver_policy=keep", check=False)
    assert "driver/library version mismatch" in said(kept)
    before = lab.ssh(1, BOOTED)
    done = play(lab, *words)
    assert f"module and nvidia-smi agree: {NEW}" in said(done)
    assert lab.ssh(1, BOOTED) != before
    lab.ssh(1, "sudo rm /opt/standin/busy")


@pytest.mark.long
def test_make_verify_names_a_package_that_may_move(machine, tmp_path):
    lab, words, _ = machine
    (tmp_path / "verify.yml").write_text(standins.VERIFY)
    looks = [str(tmp_path / "verify.yml"), *words[1:]]
    play(lab, *looks)
    lab.ssh(1, "sudo apt-mark unhold nvidia-smi")
    done = play(lab, *looks, check=False)
    assert failures(done) == {"node1"}
    assert "node1: nvidia-smi may move overnight" in said(done)
    lab.ssh(1, "sudo apt-mark hold nvidia-smi")


@pytest.mark.long
def test_a_power_limit_outlives_a_reboot(machine):
    lab, words, _ = machine
    asked = "nvidia-smi --query-gpu=name,power.min_limit"
    limited = [*words, "-e", "driver_power_limit_watts=200"]
    play(lab, *limited)
    reboot(lab, 1)
    lab.ssh(1, "systemctl is-system-running --wait || true")
    assert lab.ssh(1, asked).strip().endswith(" 200.00, Enabled")
    assert changes(play(lab, *limited)) == {"node1": 0}
    refused = play(lab, *words, "-e", "driver_power_limit_watts=400", check=False)
    assert "its Stand-in RTX 2080 Ti accepts 100 to 280 W" in said(refused)
    assert lab.ssh(1, asked).strip().endswith(" 200.00, Enabled")
    play(lab, *words)
    assert lab.ssh(1, "ls /etc/systemd/system | grep tandem-gpu || true") == ""


@pytest.mark.long
def test_uninstall_takes_it_away(machine, tmp_path):
    lab, words, _ = machine
    uninstall = tmp_path / "uninstall.yml"
    uninstall.write_text(standins.UNINSTALL)
    play(lab, str(uninstall), *words[1:])
    names = "nvidia-kernel-dkms nvidia-smi libnvidia-ml1 libcuda1 dkms gcc make"
    assert lab.ssh(1, f"dpkg-query --show {names} 2>/dev/null || true") == ""
    left = "/etc/apt/preferences.d /etc/apt/apt.conf.d /etc/modprobe.d /var/lib/tandem"
    assert "tandem-" not in lab.ssh(1, f"ls -R {left} 2>/dev/null || true")
    assert lab.ssh(1, "apt-mark showhold") == ""
    assert changes(play(lab, str(uninstall), *words[1:])) == {"node1": 0}
