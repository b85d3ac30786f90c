"""PyCharm from a stand-in of its archive: off by default, installed, refused, removed."""

import hashlib
import tarfile

import pytest

from tests.lab.disks import changed_files
from tests.lab.site_plays import changes, failures, play, said, write_inventory, write_play
from tests.lab.standins.standin_toolkit import add
from tests.lab.test_site_toolkit import UNINSTALL

HOSTS = {"node1": "ansible_host=192.168.56.111"}
ENTRY = "/usr/share/applications/tandem-pycharm.desktop"


@pytest.fixture(scope="module")
def machine(start_lab, tmp_path_factory):
    """A lab of one machine, the words that name it, and the stand-in of the archive."""
    folder = tmp_path_factory.mktemp("pycharm")
    archive = folder / "standin-pycharm-2024.1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        add(tar, "pycharm-2024.1/bin/pycharm.sh", "#!/bin/sh\necho standin\n", 0o755)
        add(tar, "pycharm-2024.1/bin/pycharm.svg", "<svg/>")
    (folder / "uninstall.yml").write_text(UNINSTALL.replace("[nccl, cudnn, cuda]", "[pycharm]"))
    return (
        start_lab("pycharm", "--nodes", "1", "--no-bundle"),
        [
            write_play(folder, ["pycharm"], become=True),
            "--inventory",
            write_inventory(folder, HOSTS),
        ],
        archive,
    )


def wanted(archive, digest=None):
    digest = digest or hashlib.sha256(archive.read_bytes()).hexdigest()
    return ["-e", f"pycharm_archive={archive}", "-e", f"pycharm_sha256={digest}"]


def test_installed_on_request_and_taken_away(machine):
    lab, words, archive = machine
    before = changed_files(lab, 1)
    off = ["-e", "pycharm_archive=", "-e", "pycharm_sha256="]
    assert changes(play(lab, *words, *off)) == {"node1": 0}
    refused = play(lab, *words, *wanted(archive, "0" * 64), check=False)
    assert failures(refused) == {"node1"}
    assert "has the SHA-256" in said(refused) and "jetbrains.com" in said(refused)
    assert changed_files(lab, 1) == before
    play(lab, *words, *wanted(archive))
    assert changes(play(lab, *words, *wanted(archive))) == {"node1": 0}
    assert changes(play(lab, "--check", *words, *wanted(archive))) == {"node1": 0}
    entry = lab.ssh(1, f"cat {ENTRY}")
    command = entry.split("Exec=")[1].split(" %f")[0]
    assert lab.ssh(1, command) == "standin\n"
    lab.ssh(1, f"sudo chmod -x {command}")
    broken = play(lab, *words, *wanted(archive), check=False)
    assert failures(broken) == {"node1"}
    assert "/opt/pycharm on node1 is not the PyCharm of standin-pycharm-2024.1" in said(broken)
    play(lab, str(archive.parent / "uninstall.yml"), *words[1:])
    assert changed_files(lab, 1) == before
