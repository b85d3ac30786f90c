"""Debian's own driver in a virtual machine: DKMS's module for its kernel, and no card to drive."""

import subprocess
from pathlib import Path

import pytest

from lab import base
from lab.plan import CACHE, System, check_packages
from tests.lab import driver_standins as standins
from tests.lab.site_plays import failures, play

TOOLS = "dkms,gcc,make,linux-headers-cloud-amd64"
SYSTEM = System(vm=True, packages=check_packages(TOOLS))
WANTED = ("nvidia-kernel-dkms", "nvidia-smi", "libcuda1")
SOURCES = (
    "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
    f"{base.MIRROR} bookworm main contrib non-free non-free-firmware\n"
)
# A hook of DKMS's packaging for modules that were built elsewhere.
READY = "/usr/share/nvidia-current-dkms/nvidia-current-535.261.03.dkms.tar.gz"
# The machines boot from an initial RAM disk of the lab; making Debian's takes minutes of an
# emulated processor, five times over.
NO_INITRD = "s/^update_initramfs=.*/update_initramfs=no/"


def fill(folder: Path) -> None:
    """Downloads the driver and what the machines' base lacks for it."""
    (folder / "apt/lists/partial").mkdir(parents=True)
    (folder / "sources.list").write_text(SOURCES)
    options = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "apt/lists",
        "Dir::State::status": base.folder(SYSTEM) / "var/lib/dpkg/status",
        "Dir::Cache::archives": folder,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
    }
    settings = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    for verb in (["update"], ["install", "--yes", "--download-only", *WANTED]):
        subprocess.run(["apt-get", *settings, *verb], check=True, capture_output=True)


def archive(made: Path) -> Path:
    """The driver's packages and, in built.tar.gz, what DKMS built of them for the machines' kernel.

    Kept for the next time. made: an empty folder to make it in.
    """
    kept = CACHE / "archives" / f"driver-{base.folder(SYSTEM).name}"
    if kept.is_dir():
        return kept
    debs = made / "archive"
    (debs / "partial").mkdir(parents=True)
    fill(debs)
    standins.index(debs)
    script = [Path(__file__).with_name("dkms_build.sh"), base.folder(SYSTEM), debs, made / "work"]
    private = ["unshare", "--mount", "--propagation", "private", "sh"]
    done = subprocess.run([*private, *script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nvidia-current/535.261.03" in done.stdout and "installed" in done.stdout
    for left in ("apt", "partial", "lock", "sources.list"):
        subprocess.run(["rm", "-rf", debs / left], check=True)
    unfinished = kept.with_name(f"{kept.name}.unfinished")
    subprocess.run(["rm", "-rf", unfinished], check=True)
    subprocess.run(["cp", "-r", debs, unfinished], check=True)
    unfinished.rename(kept)
    return kept


@pytest.fixture(scope="module")
def machine(start_lab, tmp_path_factory):
    options = ["--nodes", "1", "--vm", "--memory", "1024", "--cpus", "2", "--with", TOOLS]
    lab = start_lab("driver-vm", *options)
    standins.install(lab, 1, archive(tmp_path_factory.mktemp("driver")), kernel=False)
    lab.ssh(1, f"sudo sed -i {NO_INITRD} /etc/initramfs-tools/update-initramfs.conf")
    yield lab, standins.write_words(tmp_path_factory.mktemp("words"))
    lab("down")


def test_dkms_serves_the_running_kernel_and_the_missing_card_is_said(machine):
    lab, words = machine
    lab.ssh(1, f"sudo mkdir -p {READY.rpartition('/')[0]}")
    lab.ssh(1, f"sudo mv /opt/standin/archive/built.tar.gz {READY}")
    done = play(lab, *words, check=False)
    text = " ".join(done.stdout.split())
    assert failures(done) == {"node1"}, done.stdout
    kernel = lab.ssh(1, "uname -r").strip()
    assert f"module 535.261.03 is built for {kernel}, but cannot be loaded" in text, done.stdout
    assert "the kernel finds no card for it (No such device)" in text
    status = lab.ssh(1, "sudo dkms status")
    assert f"nvidia-current/535.261.03, {kernel}, x86_64: installed" in status
    # Debian's name of the module, to which its modprobe.d leads whoever asks for nvidia.
    answer = lab.ssh(1, "sudo modinfo nvidia-current")
    assert "version:        535.261.03" in answer and f"vermagic:       {kernel} " in answer
    assert "modprobe -i nvidia-current" in lab.ssh(1, "sudo modprobe --dry-run --verbose nvidia")
    held = lab.ssh(1, "apt-mark showhold").split()
    assert {"nvidia-kernel-dkms", "nvidia-smi", "libcuda1", "linux-image-cloud-amd64"} <= set(held)
    loading = lab("ssh", "1", "--", "sudo modprobe nvidia", check=False)
    assert "No such device" in loading.stderr
