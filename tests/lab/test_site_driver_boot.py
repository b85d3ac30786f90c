"""What only a boot or a firmware decides: reboots, nouveau, Secure Boot, upgrades of the night."""

import re
import subprocess

import pytest

from lab import base
from lab.plan import System
from tests.lab import driver_standins as standins
from tests.lab.site_plays import changes, failures, play, said

OLD, NEW = "580.159.04", "580.178.04"
ORIGIN = 'Unattended-Upgrade::Origins-Pattern { "origin=standin"; };'


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return standins.build_archive(tmp_path_factory.mktemp("boot"), OLD)


def test_machines_are_rebooted_one_at_a_time(pair, archive, tmp_path):
    for node in (1, 2):
        standins.install(pair, node, archive)
        pair.ssh(node, "sudo touch /opt/standin/nouveau; sudo systemctl restart standin-kernel")
        pair.ssh(node, "sudo rm /opt/standin/on /opt/standin/off")
    words = standins.write_words(tmp_path, nodes=2)
    done = play(pair, *words)
    assert said(done).count(f"module and nvidia-smi agree: {OLD}") == 2
    # The stand-in kernel writes when it goes and when it comes: here, by a reboot of the role's.
    (off1, on1), (off2, on2) = (
        [float(pair.ssh(node, f"cat /opt/standin/{what}")) for what in ("off", "on")]
        for node in (1, 2)
    )
    assert off1 < on1 and off2 < on2
    assert on1 <= off2 or on2 <= off1
    assert changes(play(pair, *words)) == {"node1": 0, "node2": 0}


@pytest.fixture
def machine(start_lab, archive, tmp_path):
    lab = start_lab("boot", "--nodes", "1", "--no-bundle")
    standins.install(lab, 1, archive)
    yield lab, standins.write_words(tmp_path)
    lab("down")


SIGNED, LATER = "580.173.02-0ubuntu0.24.04.1", "580.180.01-0ubuntu0.24.04.1"
OPEN = f"linux-modules-nvidia-580-open-{standins.KERNEL}"


def offer_signed(lab, folder, version):
    """An archive with driver `version` and modules that were signed for driver SIGNED."""
    folder.mkdir()
    standins.build_tools(folder)
    standins.build_ubuntu(folder, version, SIGNED)
    standins.index(folder)
    lab.ssh(1, "sudo rm -rf /opt/standin/archive")
    standins.send_archive(lab, 1, folder)
    lab.ssh(1, "sudo apt-get -q update")


@pytest.mark.parametrize("desktop", [False, True])
def test_secure_boot_with_signed_modules_builds_nothing_and_asks_for_no_key(
    machine, tmp_path, desktop
):
    """Stand-ins for Ubuntu's packages, with the real ones' relations, and the machine's own apt."""
    lab, words = machine
    wanted = [*words, "-e", "stack=cu132"]
    if desktop:
        standins.start_desktop(lab, 1)
        wanted += ["-e", "allow_stop_display=true"]  # for a reboot, where one is needed
    lab.ssh(1, "sudo touch /opt/standin/secure-boot; sudo systemctl restart standin-kernel")

    offer_signed(lab, tmp_path / "unmatched", LATER)
    lab.ssh(1, "sudo apt-get -q -y install --no-install-recommends linux-image-standin")
    listed = "dpkg-query --show --showformat '${Package}\\n'"
    before = lab.ssh(1, f"{listed}; ls /etc/apt/*.d")
    done = play(lab, *wanted, check=False)
    assert failures(done) == {"node1"}
    assert "Secure Boot is on, and apt cannot install linux-modules-nvidia-580-open-s" in said(done)
    assert lab.ssh(1, f"{listed}; ls /etc/apt/*.d") == before

    offer_signed(lab, tmp_path / "matched", SIGNED)
    simulate = "apt-get --simulate --no-install-recommends install"
    former = lab.ssh(1, f"{simulate} {OPEN} nvidia-driver-580-open")
    assert "Inst nvidia-dkms-580-open" in former and "Inst dkms" in former
    checked = said(play(lab, "--check", *wanted))
    planned = re.findall(r"((?:linux|nvidia)-[a-z0-9.-]+)=[0-9]", checked)
    assert "linux-modules-nvidia-580-open-standin" in planned
    assert ("nvidia-driver-580-open" in planned) == desktop
    simulated = lab.ssh(1, f"{simulate} {' '.join(planned)}")
    coming = set(re.findall(r"^Inst (\S+)", simulated, re.MULTILINE))
    assert OPEN in coming and not {"dkms", "nvidia-dkms-580-open"} & coming
    assert "module and nvidia-smi agree: 580.173.02" in said(play(lab, *wanted))
    assert set(lab.ssh(1, listed).split()) - set(before.split()) == coming
    assert changes(play(lab, *wanted)) == {"node1": 0}
    held = set(lab.ssh(1, "apt-mark showhold").split())
    # The modules are prebuilt, so the kernel moves with them and is not held.
    assert {name for name in planned if not name.startswith("linux-")} <= held
    assert not any(name.startswith("linux-") for name in held)


def versions(lab):
    """The machine's packages: {name: version}."""
    shown = lab.ssh(1, "dpkg-query --show --showformat '${Package} ${Version}\\n'")
    return dict(line.split() for line in shown.splitlines())


def test_an_upgrade_asks_first_and_boots_without_the_desktop(machine, tmp_path):
    """A newer kernel and a newer driver, on a machine that somebody sits at."""
    lab, words = machine
    words = standins.write_upgrade(tmp_path, words)
    own = standins.build_archive(tmp_path, OLD)
    lab.ssh(1, "sudo apt-get -q -y install --no-install-recommends linux-image-amd64")
    play(lab, str(tmp_path / "play.yml"), *words[1:])
    standins.start_desktop(lab, 1)
    standins.build_driver(own, NEW)
    standins.build_deb(
        own, "linux-image-amd64", "6.1.2-1", postinst="touch /boot/vmlinuz-99.0-standin\n"
    )
    standins.index(own)
    standins.send_archive(lab, 1, own)
    state = (
        "apt-mark showhold; dpkg-query --show; ls /etc/apt/*.d /etc/tmpfiles.d /etc/systemd/system;"
        "systemctl show --property=UserspaceTimestampMonotonic; systemctl get-default"
    )
    before = lab.ssh(1, state)
    assert "nvidia-kernel-dkms\n" in before.partition("\t")[0]  # held
    done = play(lab, *words, check=False)
    assert failures(done) == {"node1"} and "STOP_DISPLAY=1 after make" in said(done)
    assert "a newer kernel is available (from linux-image-amd64)" in said(done)
    assert lab.ssh(1, state) == before
    done = play(lab, *words, "-e", "allow_stop_display=true")
    assert "it reboots into multi-user.target" in said(done)
    assert f"module and nvidia-smi agree: {NEW}" in said(done)
    # It was shown by the old driver, and then by the new one: not at the new kernel's boot.
    assert re.findall(r"Module +(\S+)", lab.ssh(1, "cat /opt/standin/shown")) == [OLD, NEW]
    assert lab.ssh(1, "systemctl is-active standin-display") == "active\n"
    after = lab.ssh(1, state)
    assert after.splitlines()[-1] == before.splitlines()[-1] == "graphical.target"
    assert "tandem-driver.conf" not in after
    assert "linux-image-amd64\n" in after.partition("\t")[0]  # held again
    assert changes(play(lab, *words)) == {"node1": 0}


def test_an_upgrade_that_breaks_off_holds_again_what_it_let_go(machine, tmp_path):
    lab, words = machine
    words = standins.write_upgrade(tmp_path, words)
    own = standins.build_archive(tmp_path, OLD)
    lab.ssh(1, "sudo apt-get -q -y install --no-install-recommends linux-image-amd64")
    play(lab, str(tmp_path / "play.yml"), *words[1:])
    held = set(lab.ssh(1, "apt-mark showhold").split())
    assert {"linux-image-amd64", "nvidia-kernel-dkms", "nvidia-smi"} <= held
    standins.build_driver(own, NEW)
    standins.build_deb(own, "linux-image-amd64", "6.1.2-1")
    standins.index(own)
    standins.send_archive(lab, 1, own)
    standins.fill_firmware_disk(lab, 1)
    done = play(lab, *words, check=False)
    assert failures(done) == {"node1"} and "No space left on device" in said(done), done.stdout
    assert "Upgrading stopped at node1. Once that is fixed, make upgrade continues" in said(done)
    assert "are not held" not in said(done)
    assert held <= set(lab.ssh(1, "apt-mark showhold").split())
    assert "tandem-driver" in lab.ssh(1, "ls /etc/apt/preferences.d /etc/apt/apt.conf.d")
    lab.ssh(1, "sudo umount /usr/lib/firmware/nvidia")
    assert f"module and nvidia-smi agree: {NEW}" in said(play(lab, *words))
    assert held <= set(lab.ssh(1, "apt-mark showhold").split())
    assert changes(play(lab, *words)) == {"node1": 0}


def test_power_lost_while_packages_are_unpacked_is_finished_by_the_next_run(machine):
    lab, words = machine
    standins.cut_power_halfway(lab, 1, *words)
    assert "nvidia-kernel-dkms" in lab.ssh(1, "sudo dpkg --audit || true")
    assert f"module and nvidia-smi agree: {OLD}" in said(play(lab, *words))
    assert lab.ssh(1, "sudo dpkg --audit") == ""
    assert changes(play(lab, *words)) == {"node1": 0}


def test_a_build_that_fails_leaves_the_card_to_nouveau(machine):
    lab, words = machine
    lab.ssh(1, "sudo touch /opt/standin/nouveau /opt/standin/no-build")
    lab.ssh(1, "sudo systemctl restart standin-kernel")
    before = lab.ssh(1, "ls /etc/modprobe.d; apt-mark showhold; systemctl get-default")
    done = play(lab, *words, check=False)
    assert failures(done) == {"node1"} and "Bad return status" in said(done), done.stdout
    assert lab.ssh(1, "ls /etc/modprobe.d; apt-mark showhold; systemctl get-default") == before
    assert "nouveau" in lab.ssh(1, "ls /sys/module")
    lab.ssh(1, "sudo rm /opt/standin/no-build")
    assert f"module and nvidia-smi agree: {OLD}" in said(play(lab, *words))
    assert changes(play(lab, *words)) == {"node1": 0}


def add_unattended_upgrades(folder):
    """Debian's unattended-upgrades and what the machines lack for it, downloaded here."""
    (folder / "partial").mkdir()
    status = f"Dir::State::status={base.folder(System())}/var/lib/dpkg/status"
    argv = ["apt-get", "install", "--download-only", "--yes", "--no-install-recommends"]
    argv += ["-o", status, "-o", f"Dir::Cache::archives={folder}", "unattended-upgrades"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    for left in ("partial", "lock"):
        subprocess.run(["rm", "-rf", folder / left], check=True)


@pytest.mark.parametrize("follows", [False, True], ids=["held kernel", "DKMS has its headers"])
def test_unattended_upgrades_move_no_driver_and_a_kernel_only_if_its_module_follows(
    machine, archive, tmp_path, follows
):
    lab, words = machine
    own = tmp_path / "archive"
    subprocess.run(["cp", "-r", archive, own], check=True)
    add_unattended_upgrades(own)
    modules = "linux-modules-nvidia-535-generic"
    for name in (modules, "standin-neighbour"):
        standins.build_deb(own, name, "1")
    if follows:
        standins.build_series(own, "6.1.1-1")
        lab.ssh(1, "sudo mkdir -p /var/lib/dkms/nvidia-current")
    standins.index(own)
    standins.send_archive(lab, 1, own)
    packages = f"unattended-upgrades linux-image-amd64 {modules} standin-neighbour"
    install = "DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends"
    lab.ssh(1, f"sudo apt-get -q update; sudo {install} {packages}")
    play(lab, *words)
    standins.build_driver(own, NEW)
    if follows:
        standins.build_series(own, "6.1.2-1")
    else:
        standins.build_deb(own, "linux-image-amd64", "6.1.2-1")
    for name in (modules, "standin-neighbour"):
        standins.build_deb(own, name, "2")
    standins.index(own)
    standins.send_archive(lab, 1, own)
    lab.ssh(1, f"echo '{ORIGIN}' | sudo tee /etc/apt/apt.conf.d/60standin; sudo apt-get -q update")
    show = "dpkg-query --show 'nvidia-*' 'libnvidia-*' libcuda1"
    before, kernel = lab.ssh(1, show), versions(lab)["linux-image-amd64"]
    lab.ssh(1, "sudo unattended-upgrade --verbose 2>&1 | sudo tee /opt/standin/night")
    after = versions(lab)
    assert after["standin-neighbour"] == "2" and lab.ssh(1, show) == before
    assert (after["linux-image-amd64"] != kernel, after[modules] == "2") == (follows, follows)
    assert f"module and nvidia-smi agree: {NEW}" in said(
        play(lab, *words, "-e", "driver_policy=upgrade")
    )
