"""What a share's fstab line says, and which disks are refused."""

import pytest

from tests.unit.ansible.provision_machines import load

share = load("ansible/filter_plugins/share.py")

MACHINE = {"kernel": "6.1.0-25-amd64", "speed": 10000, "uid": "1000", "gid": "1000"}


@pytest.mark.parametrize("protocol", ["nfs", "smb"])
def test_no_boot_waits_for_a_share_and_nobody_writes(protocol):
    options = share.share_options(protocol, MACHINE).split(",")
    assert {"ro", "_netdev", "nofail", "x-systemd.automount"} <= set(options)


def test_smb_takes_its_password_from_a_file_and_speaks_3_1_1_alone():
    options = share.share_options("smb", MACHINE).split(",")
    assert "credentials=/etc/tandem/share.credentials" in options
    assert "vers=3.1.1" in options
    assert not [option for option in options if option.startswith("pass")]


@pytest.mark.parametrize(
    ("kernel", "speed", "several"),
    [
        ("6.1.0-25-amd64", 10000, True),
        ("5.3.0", 2500, True),
        ("6.1.0-25-amd64", 1000, False),
        ("6.1.0-25-amd64", -1, False),
        ("4.15.0-213-generic", 10000, False),
    ],
)
def test_several_connections_where_the_kernel_has_them_and_the_link_is_fast(kernel, speed, several):
    options = share.share_options("nfs", {**MACHINE, "kernel": kernel, "speed": speed})
    assert ("nconnect=4" in options.split(",")) is several


def test_sources():
    assert share.share_source("smb", "10.0.0.5", "/x", "tandem") == "//10.0.0.5/tandem"
    assert share.share_source("nfs", "10.0.0.5", "/media/d", "tandem") == "10.0.0.5:/media/d"


@pytest.mark.parametrize("filesystem", ["fuseblk", "ntfs3"])
def test_an_ntfs_disk_goes_by_smb_and_not_by_nfs(filesystem):
    refusal = share.share_refusal("nfs", "/media/win", filesystem)
    assert refusal.startswith("/media/win lies on an NTFS disk")
    assert "share_protocol: smb" in refusal
    assert share.share_refusal("smb", "/media/win", filesystem) == ""


def test_a_share_is_not_shared_again():
    assert "itself a share" in share.share_refusal("smb", "/mnt/nas", "nfs4")
    assert share.share_refusal("nfs", "/data", "ext4") == ""
