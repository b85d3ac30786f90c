"""An NTFS disk, on a machine with a kernel of its own: found, mounted for reading, shared by Samba.

Debian's kernel for virtual machines lacks ntfs3, so ntfs-3g reads it; the disk is a loop device,
which udev and lsblk treat as they do a partition.
"""

import pytest

from tests.lab.site_plays import changes, failures, play, write_inventory, write_play

PLACE = "/srv/tandem/disk"
MAKE_DISKS = """sudo sh -ec '
truncate -s 64M /srv/windows.img
truncate -s 1M /srv/locked.img
losetup /dev/loop0 /srv/windows.img
mkntfs --quick --quiet --label Daten /dev/loop0
mount -t ntfs-3g /dev/loop0 /mnt
mkdir /mnt/digits
echo picture >/mnt/digits/a.png
umount /mnt
# What BitLocker writes in front of a volume: a signature, and at 176 the place of its metadata.
printf "\\353\\130\\220-FVE-FS-" | dd of=/srv/locked.img conv=notrunc status=none
printf "\\0\\020\\0\\0\\0\\0\\0\\0" | dd of=/srv/locked.img bs=1 seek=176 conv=notrunc status=none
printf -- "-FVE-FS-\\100\\0\\002\\0" | dd of=/srv/locked.img bs=1 seek=4096 conv=notrunc status=none
losetup /dev/loop1 /srv/locked.img
udevadm trigger --settle /dev/loop0 /dev/loop1
rm -f /etc/samba/smb.conf # the packages of the emulated machines came with it
'"""


@pytest.fixture(scope="module")
def machine(start_lab):
    lab = start_lab("ntfs", "--nodes", "1", "--vm", "--with", "ntfs-3g", "--no-bundle")
    lab.ssh(1, MAKE_DISKS)
    yield lab
    lab("down")


def share(lab, folder, disk: str, protocol: str = "smb"):
    """One play of the server's role."""
    variables = (
        f"share_protocol={protocol} share_host=node1 share_disk={disk} data_root=/srv/tandem/data"
    )
    inventory = write_inventory(folder, {"node1": f"ansible_host=192.168.56.111 {variables}"})
    return play(lab, write_play(folder, ["share_server"]), "--inventory", inventory,
                "-e", f"share_secret_folder={folder / 'secret'}", check=False)  # fmt: skip


def test_a_disk_that_cannot_be_shared_is_refused_and_nothing_is_mounted(machine, tmp_path):
    for disk, protocol, reason in (
        ("LABEL=Daten", "nfs", "/dev/loop0 is an NTFS disk, which the kernel's NFS server"),
        ("/dev/loop1", "smb", "/dev/loop1 is encrypted (BitLocker)"),
    ):
        done = share(machine, tmp_path, disk, protocol)
        assert failures(done) == {"node1"} and reason in " ".join(done.stdout.split())
    assert machine.ssh(1, f"findmnt {PLACE}; grep -c {PLACE} /etc/fstab || true") == "0\n"


def test_an_ntfs_disk_is_read_by_samba_and_written_by_nobody(machine, tmp_path):
    done = share(machine, tmp_path, "LABEL=Daten")
    assert done.returncode == 0, done.stdout
    assert changes(share(machine, tmp_path, "LABEL=Daten")) == {"node1": 0}
    found = machine.ssh(1, f"findmnt --noheadings --output FSTYPE,OPTIONS {PLACE}")
    kind, options = found.split()
    assert kind == "fuseblk" and {"ro", "nosuid", "nodev"} <= set(options.split(","))
    sealed = [str(tmp_path / "secret" / name) for name in ("vault-pass", "share.vault")]
    view = ["ansible-vault", "view", "--vault-password-file", *sealed]
    password = machine.control(*view).stdout.strip()
    read = (
        "smbclient //127.0.0.1/tandem -U tandem-data -c 'get digits/a.png -; put /etc/hostname b'"
    )
    said = machine.ssh(1, f"PASSWD='{password}' {read} 2>&1 || true")
    assert "picture" in said and "NT_STATUS" in said
    refused = machine("ssh", "1", "--", f"sudo touch {PLACE}/b", check=False)
    assert "Read-only file system" in refused.stderr


def test_local_takes_the_disk_out_again(machine, tmp_path):
    assert share(machine, tmp_path, "LABEL=Daten", "local").returncode == 0
    assert machine.ssh(1, f"findmnt {PLACE}; grep -c {PLACE} /etc/fstab || true") == "0\n"
