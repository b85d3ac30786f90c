"""The driver by packages, in short: what test_site_driver.py looks at in detail."""

from tests.lab import driver_standins as standins
from tests.lab.site_plays import changes, play, said

VERSION = "535.261.03"


def test_a_driver_comes_by_packages_and_a_second_run_changes_nothing(start_lab, tmp_path):
    lab = start_lab("short", "--nodes", "1", "--no-bundle")
    standins.install(lab, 1, standins.build_archive(tmp_path, VERSION))
    words = standins.write_words(tmp_path)
    assert f"module and nvidia-smi agree: {VERSION}" in said(play(lab, *words))
    assert "nvidia-kernel-dkms" in lab.ssh(1, "apt-mark showhold").split()
    assert changes(play(lab, *words)) == {"node1": 0}
    lab("down")
