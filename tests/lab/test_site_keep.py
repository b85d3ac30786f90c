"""Two PCs that already work: with driver_policy: keep, site.yml leaves their driver as it is.

Card, kernel module and driver are stand-ins, so no machine computes on a GPU (prove_count=0).
"""

import pytest

from tests.lab import driver_standins as standins
from tests.lab.site_plays import (
    changed_tasks,
    changes,
    draw_digits,
    gather_bundle,
    play,
    said,
    write_inventory,
)

VERSION = "580.178.04"
PACKAGES = "nvidia-kernel-dkms nvidia-smi libcuda1 libnvidia-ml1"
BAN = "/etc/modprobe.d/nvidia-installer-disable-nouveau.conf"
# Packages of driver, toolkit and kernel, what is held, and the files that rule them.
STATE = (
    "dpkg-query --show --showformat '${Package} ${Version} ${Status}\n' "
    "| grep -E 'nvidia|cuda|nccl|cudnn|^linux-|dkms|firmware|gcc'; apt-mark showhold; "
    "ls /etc/apt/preferences.d /etc/apt/apt.conf.d /etc/modprobe.d /usr/local; "
    "systemctl get-default; cat /proc/driver/nvidia/version; ls /usr/bin/nvidia-*"
)


@pytest.fixture(scope="module")
def kept(start_lab, tmp_path_factory):
    """The lab, the words of a play, and the state before the first one: node1 has its driver by
    packages, node2 by NVIDIA's installer."""
    gather_bundle("cpu")
    draw_digits()
    folder = tmp_path_factory.mktemp("keep")
    archive = standins.build_archive(folder, VERSION)
    standins.build_deb(archive, "build-essential", "1")  # role base wants it
    standins.index(archive)
    lab = start_lab("keep", "--nodes", "2", "--no-bundle")
    for node in (1, 2):
        standins.install(lab, node, archive)
    lab.ssh(1, f"sudo apt-get -q -y --no-install-recommends install {PACKAGES}")
    runfile, _ = standins.write_runfile(folder, VERSION)
    tools = f"dkms gcc make linux-headers-{standins.KERNEL}"
    lab.ssh(2, f"sudo apt-get -q -y --no-install-recommends install {tools}")
    standins.send(lab, 2, {"/root/driver.run": runfile.read_bytes(), BAN: b"blacklist nouveau\n"})
    flags = "--silent --dkms --disable-nouveau --kernel-module-type=open"
    lab.ssh(2, f"sudo sh /root/driver.run {flags}")
    for node in (1, 2):
        lab.ssh(node, "sudo modprobe nvidia")
    hosts = {f"node{n}": f"ansible_host=192.168.56.{110 + n} driver_policy=keep" for n in (1, 2)}
    inventory = write_inventory(folder, hosts)
    words = ["--inventory", inventory, "-e", "stack=cu132", "-e", "prove_count=0"]
    return lab, words, {node: lab.ssh(node, STATE) for node in (1, 2)}


def test_site_leaves_the_driver_and_says_so(kept):
    lab, words, before = kept
    done = said(play(lab, "site.yml", *words))
    assert done.count(f"driver {VERSION} is loaded, the stack needs 580 or newer") == 2
    assert done.count("so toolkit: auto means no CUDA toolkit") == 2
    assert done.count("so apex: auto means no apex") == 2
    assert {node: lab.ssh(node, STATE) for node in (1, 2)} == before


def test_a_second_run_changes_nothing_and_verify_is_content(kept):
    lab, words, before = kept
    again = play(lab, "site.yml", *words)
    assert changes(again) == {"node1": 0, "node2": 0}, changed_tasks(again)
    play(lab, "ansible/playbooks/verify.yml", *words)
    assert {node: lab.ssh(node, STATE) for node in (1, 2)} == before


def test_they_train(kept):
    lab, words, _ = kept
    argv = ["python", "-m", "launcher", "train", "--inventory", words[1], "--nodes", "2"]
    lab.control(*argv, "--model", "resnet18", "--epochs", "1", "--", "--device", "cpu")


def test_uninstall_leaves_driver_and_ban_of_nouveau(kept):
    lab, words, before = kept
    play(lab, "ansible/playbooks/uninstall.yml", *words)
    assert {node: lab.ssh(node, STATE) for node in (1, 2)} == before
    assert lab.ssh(2, f"cat {BAN}") == "blacklist nouveau\n"
