"""What a share's fstab line says, and which disks are refused."""

import json
import re
import subprocess

import pytest

from planning import PlanError, share

MACHINE = {
    "kernel": "6.1.0-25-amd64",
    "speed": 10000,
    "ids": "uid=1000(anna) gid=1001(anna) groups=1001(anna)",
}


@pytest.mark.parametrize("protocol", ["nfs", "smb"])
def test_no_boot_waits_for_a_share_and_nobody_writes(protocol):
    options = share.share_options(protocol, MACHINE).split(",")
    wanted = {"ro", "nosuid", "nodev", "_netdev", "nofail", "x-systemd.automount"}
    assert wanted <= set(options)


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


def mounted(fstype, options="ro,relatime", source="/dev/sdb1"):
    """As findmnt of util-linux 2.38 prints it."""
    row = {"target": "/media/win", "source": source, "fstype": fstype, "options": options}
    return json.dumps({"filesystems": [row]})


@pytest.mark.parametrize("filesystem", ["fuseblk", "ntfs3"])
def test_an_ntfs_disk_goes_by_smb_and_not_by_nfs(filesystem):
    refusal = share.share_refusal("nfs", "/media/win", mounted(filesystem))
    assert refusal.startswith("/media/win lies on an NTFS disk")
    assert "share_protocol: smb" in refusal
    assert share.share_refusal("smb", "/media/win", mounted(filesystem)) == ""


def test_a_share_is_not_shared_again():
    assert "itself a share" in share.share_refusal("smb", "/mnt/nas", mounted("nfs4"))
    assert share.share_refusal("nfs", "/data", mounted("ext4")) == ""


def test_a_disk_of_a_desktop_is_refused_since_it_goes_with_its_user():
    found = mounted("ntfs3", "rw,nosuid,nodev,uid=1000,gid=1000,uhelper=udisks2")
    refusal = share.share_refusal("smb", "/media/anna/Daten/set", found)
    assert "goes when that user logs out" in refusal and "set share_disk" in refusal


# A PC with Windows beside Linux, as `lsblk --json --paths` of util-linux 2.38 prints it.
LSBLK = json.dumps(
    {
        "blockdevices": [
            {"name": "/dev/sda", "fstype": None, "label": None, "uuid": None, "size": "1.8T",
             "mountpoint": None, "children": [
                 {"name": "/dev/sda1", "fstype": "ntfs", "label": "Daten",
                  "uuid": "01DA5C3B6E7F1230", "size": "1.8T", "mountpoint": None}]},
            {"name": "/dev/sdb", "fstype": "BitLocker", "label": None, "uuid": None,
             "size": "931G", "mountpoint": None},
            {"name": "/dev/nvme0n1", "fstype": None, "label": None, "uuid": None, "size": "477G",
             "mountpoint": None, "children": [
                 {"name": "/dev/nvme0n1p1", "fstype": "vfat", "label": None, "uuid": "A1B2-C3D4",
                  "size": "512M", "mountpoint": "/boot/efi"},
                 {"name": "/dev/nvme0n1p2", "fstype": "ext4", "label": None,
                  "uuid": "6a0f", "size": "468G", "mountpoint": "/"},
                 {"name": "/dev/nvme0n1p3", "fstype": "swap", "label": None, "uuid": "77",
                  "size": "8G", "mountpoint": None}]},
        ]
    }
)  # fmt: skip


PLACE = "/srv/tandem/disk"


@pytest.mark.parametrize("disk", ["UUID=01DA5C3B6E7F1230", "LABEL=Daten", "/dev/sda1"])
def test_an_ntfs_disk_is_mounted_read_only_by_its_uuid(disk):
    plan = share.share_disk(disk, LSBLK, True, "smb", PLACE, "node1")
    assert (plan["source"], plan["fstype"]) == ("UUID=01DA5C3B6E7F1230", "ntfs3")
    assert {"ro", "nosuid", "nodev", "nofail", "umask=0222"} == set(plan["options"].split(","))
    assert share.share_disk(disk, LSBLK, False, "smb", PLACE, "node1")["fstype"] == "ntfs-3g"


@pytest.mark.parametrize(
    ("disk", "reason"),
    [
        ("/dev/sdb", "is encrypted (BitLocker)"),
        ("/dev/nvme0n1", "holds no file system"),
        ("UUID=none", "is none of its disks. Disks with data: /dev/sda1, /dev/sdb, /dev/nvme0n1p1"),
        ("PARTUUID=1", "is none of its disks"),
        ("UUID=6a0f", "/dev/nvme0n1p2 is mounted at / already"),
    ],
)
def test_a_disk_that_cannot_be_mounted_is_refused_with_the_reason(disk, reason):
    with pytest.raises(PlanError, match=f"^node1: .*{re.escape(reason)}"):
        share.share_disk(disk, LSBLK, True, "smb", PLACE, "node1")


def test_a_disk_that_nfs_cannot_export_is_refused_before_it_is_mounted():
    with pytest.raises(PlanError, match=r"^node1: /dev/sda1 is an NTFS disk, which"):
        share.share_disk("LABEL=Daten", LSBLK, True, "nfs", PLACE, "node1")
    mounted_by_us = LSBLK.replace(
        '"1.8T", "mountpoint": null}', f'"1.8T", "mountpoint": "{PLACE}"}}'
    )
    assert share.share_disk("LABEL=Daten", mounted_by_us, True, "smb", PLACE, "node1")


def test_a_missing_folder_names_the_disks_that_nobody_has_mounted():
    said = share.share_missing("/media/disk2/images", LSBLK)
    assert "nobody has mounted: /dev/sda1 (ntfs, Daten, 1.8T), /dev/sdb (BitLocker" in said
    assert "set share_disk: /dev/sda1" in said
    assert "nvme" not in said
    alone = json.dumps({"blockdevices": json.loads(LSBLK)["blockdevices"][2:]})
    assert share.share_missing("/x", alone).endswith("Correct share_path, or mount its disk.")


@pytest.mark.parametrize("path", ["/srv/tandem/data", "/mnt/Mein-Datensatz/ä b", "/.hidden/.x_1:2"])
def test_units_are_named_as_systemd_names_them(path):
    escaped = subprocess.run(["systemd-escape", "--path", path], capture_output=True, text=True)
    assert share.share_unit(path) == escaped.stdout.strip()


@pytest.mark.parametrize(
    ("protocol", "journal", "meaning"),
    [
        ("smb", "mount error(13): Permission denied", "the password or the account is refused"),
        ("smb", "mount error(2): No such file or directory", "no share of that name"),
        ("smb", "mount error(112): Host is down", "SMB 1 alone"),
        ("nfs", "mount.nfs4: access denied by server while mounting", "does not export the folder"),
        ("nfs", "mount.nfs4: No route to host", "does not answer"),
        ("smb", "mount error(113): could not connect to 10.0.0.5Unable to find", "not answer"),
        ("smb", "mount error: cifs filesystem not supported by the system", "no driver"),
        ("nfs", "mount: unknown filesystem type 'nfs4'", "no driver"),
        ("nfs", "srv-x.mount: Mounting timed out. Terminating.", "does not answer"),
        ("nfs", "something new", "something new"),
    ],
)
def test_why_a_share_cannot_be_read_is_said_in_a_sentence(protocol, journal, meaning):
    assert meaning in share.share_failure(protocol, f"Mounting /srv/x...\n{journal}", "ls: No")


def test_a_folder_that_nothing_is_mounted_at_is_no_silent_server():
    assert share.share_failure("nfs", "\n", "ls: No") == (
        "ls: No. Nothing tried to mount it. Run: make provision TAGS=data."
    )
