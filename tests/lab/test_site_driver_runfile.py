"""The driver by NVIDIA's installer: its flags, what stands in its way, and what cuts it off."""

import pytest

from tests.lab import driver_standins as standins
from tests.lab.site_plays import changes, failures, play, said

VERSION, NEWER = "570.10.01", "580.126.20"
FOLDERS = "/etc/apt /etc/modprobe.d /var/lib/tandem/driver /var/lib/nvidia"
STATE = f"dpkg-query --show; ls -R {FOLDERS} 2>&1; ls /usr/bin"


@pytest.fixture
def machine(start_lab, tmp_path):
    """A machine with a card and no driver in its archive: the lab, and the words of a play."""
    lab = start_lab("runfile", "--nodes", "1", "--no-bundle")
    standins.install(lab, 1, standins.build_archive(tmp_path))
    yield lab, standins.write_words(tmp_path)
    lab("down")


def runfile(folder, version=VERSION):
    path, digest = standins.write_runfile(folder, version)
    return ["-e", f"driver_runfile={path}", "-e", f"driver_runfile_sha256={digest}"]


def test_installed_kept_upgraded_and_taken_away(machine, tmp_path):
    lab, words = machine
    fresh = lab.ssh(1, STATE)
    done = play(lab, *words, *runfile(tmp_path))
    assert f"module and nvidia-smi agree: {VERSION}" in said(done)
    assert lab.ssh(1, "cat /var/lib/nvidia/type") == "open\n"
    for more in ([], ["-e", "driver_policy=keep"], ["--check"]):
        assert changes(play(lab, *words, *runfile(tmp_path), *more)) == {"node1": 0}
    assert changes(play(lab, *words, *runfile(tmp_path, NEWER))) == {"node1": 0}
    standins.start_powerd(lab, 1)
    upgrade = [*words, *runfile(tmp_path, NEWER), "-e", "driver_policy=upgrade"]
    assert f"module and nvidia-smi agree: {NEWER}" in said(play(lab, *upgrade))
    assert lab.ssh(1, "systemctl is-active nvidia-powerd") == "active\n"
    assert changes(play(lab, *upgrade)) == {"node1": 0}
    wrong = play(lab, *words, "-e", "driver_source=package", check=False)
    assert "was installed by NVIDIA's own installer" in said(wrong)
    (tmp_path / "uninstall.yml").write_text(standins.UNINSTALL)
    play(lab, str(tmp_path / "uninstall.yml"), *words[1:])
    assert lab.ssh(1, STATE) == fresh


def test_a_wrong_file_leaves_the_machine_as_it_was(machine, tmp_path):
    lab, words = machine
    before = lab.ssh(1, STATE)
    path, _ = standins.write_runfile(tmp_path)
    wrong = ["-e", f"driver_runfile={path}", "-e", f"driver_runfile_sha256={'0' * 64}"]
    done = play(lab, *words, *wrong, check=False)
    assert "it is damaged, or not the file that was named" in said(done)
    assert lab.ssh(1, STATE) == before
    full = "sudo mount -t tmpfs -o size=1m full /var/tmp"
    lab.ssh(1, full)
    done = play(lab, *words, *runfile(tmp_path), check=False)
    assert "/var/tmp has 0.0 GB free, and the driver needs 0.5 GB" in said(done)
    assert lab.ssh(1, STATE) == before


def test_half_a_file_a_full_disk_and_a_power_cut_are_finished_by_the_next_run(machine, tmp_path):
    lab, words = machine
    words += runfile(tmp_path)
    name = f"standin-NVIDIA-Linux-x86_64-{VERSION}.run"
    half = f"/var/lib/tandem/driver-files/{name}"
    lab.ssh(1, f"sudo mkdir {half.rpartition('/')[0]}; echo half | sudo tee {half}")
    standins.fill_firmware_disk(lab, 1)
    done = play(lab, *words, check=False)
    assert "No space left on device" in said(done)
    lab.ssh(1, "sudo umount /usr/lib/firmware/nvidia")
    standins.cut_power_halfway(lab, 1, *words)
    assert f"module and nvidia-smi agree: {VERSION}" in said(play(lab, *words))
    assert changes(play(lab, *words)) == {"node1": 0}


def test_under_a_display_it_waits_for_a_boot_without_and_whoever_sits_there_is_asked(
    machine, tmp_path
):
    lab, words = machine
    words += runfile(tmp_path)
    standins.start_desktop(lab, 1)
    done = play(lab, *words, check=False)
    assert failures(done) == {"node1"} and "anna is logged in at its screen" in said(done)
    assert "kwin_x11" in lab.ssh(1, "pgrep --list-full kwin_x11")
    assert lab.ssh(1, "systemctl is-active standin-display") == "active\n"
    done = play(lab, *words, "-e", "allow_stop_display=true")
    assert f"module and nvidia-smi agree: {VERSION}" in said(done)
    assert lab.ssh(1, "systemctl is-active standin-display") == "active\n"
    assert lab.ssh(1, "systemctl get-default") == "graphical.target\n"
    # Shown before there was a driver, and then by it: not at the boot for the installer.
    assert VERSION in lab.ssh(1, "tail --lines=+2 /opt/standin/shown | head -1")
    assert changes(play(lab, *words)) == {"node1": 0}


def test_secure_boot_is_said_before_and_its_steps_after_the_installer(machine, tmp_path):
    """The stand-in's installer would end in its log: it loads what it has built, as NVIDIA's."""
    lab, words = machine
    words += runfile(tmp_path)
    lab.ssh(1, "sudo touch /opt/standin/secure-boot; sudo systemctl restart standin-kernel")
    key = "/var/lib/dkms/mok.pub"
    assert f"signed with {key}, which you must enrol at its screen" in said(
        play(lab, "--check", *words)
    )
    for _ in range(2):
        done = play(lab, *words, check=False)
        assert failures(done) == {"node1"}
        assert f"mokutil --import {key}" in said(done) and "Enroll MOK" in said(done)
    read = f"sudo openssl x509 -inform DER -noout -subject -in {key}"
    assert "DKMS module signing key" in lab.ssh(1, read)
    assert lab.ssh(1, "sudo stat -c %a /var/lib/dkms/mok.key") == "600\n"
    lab.ssh(1, "sudo touch /opt/standin/trusted")  # a person's part
    assert f"module and nvidia-smi agree: {VERSION}" in said(play(lab, *words))
    assert changes(play(lab, *words)) == {"node1": 0}
