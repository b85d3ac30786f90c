"""What a share's fstab line says, which disks are mounted, and its password: made once, encrypted,
readable by its owner alone, and never shown."""

import json
import pwd
import shutil
import subprocess
import sys

import pytest
import yaml
from ansible.parsing.vault import VaultLib, VaultSecret

from planning import PlanError, share
from tests.unit.ansible.provision_machines import ROOT, ansible_playbook

MACHINE = {
    "kernel": "6.1.0-25-amd64",
    "speed": 10000,
    "ids": "uid=1000(anna) gid=1001(anna) groups=1001(anna)",
}


COMMON = "ro,nosuid,nodev,hard,_netdev,nofail,x-tandem,x-systemd.automount"


def test_no_boot_waits_for_a_share_and_nobody_writes():
    """SMB takes its password from a file, and speaks 3.1.1 alone."""
    assert share.share_options("nfs", {**MACHINE, "speed": 1000}) == (
        f"{COMMON},x-systemd.mount-timeout=20,vers=4.2,noatime"
    )
    assert share.share_options("smb", MACHINE) == (
        f"{COMMON},x-systemd.mount-timeout=20,credentials=/etc/tandem/share.credentials,"
        "vers=3.1.1,uid=1000,gid=1001,file_mode=0444,dir_mode=0555"
    )


def test_what_is_cached_is_mounted_behind_the_daemon_that_keeps_it():
    for kind in share.KINDS:
        options = share.share_options(kind, MACHINE, cached=True).split(",")
        assert {"fsc", "x-systemd.after=cachefilesd.service"} <= set(options)


GB = 10**9


@pytest.mark.parametrize(
    ("limit", "fstype", "total", "free", "kept", "stop"),
    [
        (200, "ext4", 1000, 600, "", 40),
        (200, "xfs", 1000, 500, f"{100 * GB}\t/var/cache/fscache\n", 40),  # of which it has 100
        (900, "ext4", 1000, 600, "", 8),  # not all of what is free
        (50, "ext4", 1000, 600, "du: no such folder", 55),
        (20, "ext4", 1000, 600, "", None),  # less than the percentages can say
        (200, "ext4", 1000, 110, "", None),
        (200, "overlay", 1000, 600, "", None),
    ],
)
def test_a_cache_leaves_as_much_free_as_makes_its_limit(limit, fstype, total, free, kept, stop):
    df = f"Type 1B-blocks Avail\n{fstype} {total * GB} {free * GB}\n"
    plan = share.share_cache(limit, df, kept, True)
    # In this order: the kernel refuses one that is above a later one as it is by then.
    limits = [] if stop is None else [("brun", stop + 4), ("bcull", stop + 2), ("bstop", stop)]
    assert [*plan["limits"].items()] == limits
    assert bool(plan["refusal"]) is (stop is None)
    assert share.share_cache(limit, df, kept, False)["refusal"]


@pytest.mark.parametrize(
    ("kernel", "speed", "several"),
    [
        ("5.3.0", 2500, True),
        ("6.1.0-25-amd64", 1000, False),
        ("4.15.0-213-generic", 10000, False),
    ],
)
def test_several_connections_where_the_kernel_has_them_and_the_link_is_fast(kernel, speed, several):
    options = share.share_options("nfs", {**MACHINE, "kernel": kernel, "speed": speed})
    assert ("nconnect=4" in options.split(",")) is several


def test_sources():
    assert share.share_source("smb", "10.0.0.5", "/x", "tandem") == "//10.0.0.5/tandem"
    assert share.share_source("nfs", "10.0.0.5", "/media/d", "tandem") == "10.0.0.5:/media/d"


def test_a_kind_is_a_row_with_its_tasks_and_any_other_is_refused_by_name():
    server, client = (ROOT / "ansible/roles" / name for name in ("share_server", "share_client"))
    settings = yaml.safe_load((server / "vars/main.yml").read_text())["share_server_kinds"]
    assert list(settings) == list(share.KINDS)
    for kind in share.KINDS:
        assert share.share_kind(kind)["service"].endswith(".service")
        assert kind not in share.share_others(kind)
        tasks = server / f"{kind}.yml", server / f"uninstall_{kind}.yml", client / f"{kind}.yml"
        assert all((path.parent / "tasks" / path.name).is_file() for path in tasks)
    for refuse in (
        lambda: share.share_source("sshfs", "10.0.0.5", "/x", "tandem"),
        lambda: share.share_options("sshfs", MACHINE),
        lambda: share.share_refusal("sshfs", "/data", mounted("ext4")),
        lambda: share.share_others("sshfs"),  # before anything of the other kinds is removed
    ):
        with pytest.raises(PlanError, match="share_protocol is 'sshfs'"):
            refuse()


def mounted(fstype, options="ro,relatime", source="/dev/sdb1"):
    """As findmnt of util-linux 2.38 prints it."""
    row = {"target": "/media/win", "source": source, "fstype": fstype, "options": options}
    return json.dumps({"filesystems": [row]})


def test_what_can_be_shared_is_not_refused():
    """What is refused, and why a share cannot be read: tests/messages/ansible.py."""
    assert share.share_refusal("smb", "/media/win", mounted("ntfs3")) == ""
    assert share.share_refusal("nfs", "/data", mounted("ext4")) == ""


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
    by_us = LSBLK.replace('"1.8T", "mountpoint": null}', f'"1.8T", "mountpoint": "{PLACE}"}}')
    assert by_us != LSBLK and share.share_disk(disk, by_us, True, "smb", PLACE, "node1") == plan


@pytest.mark.parametrize("path", ["/srv/tandem/data", "/mnt/Mein-Datensatz/ä b", "/.hidden/.x_1:2"])
def test_units_are_named_as_systemd_names_them(path):
    escaped = subprocess.run(["systemd-escape", "--path", path], capture_output=True, text=True)
    assert share.share_unit(path) == escaped.stdout.strip()


PLAY = """
- name: Made here
  hosts: localhost
  gather_facts: false
  roles: [share_secret]

- name: Given for an existing server
  hosts: localhost
  gather_facts: false
  vars: {share_secret_given: "of-the-windows-pc"}
  roles: [share_secret]
  post_tasks:
    - name: It is what is used
      ansible.builtin.assert: {that: share_secret_password == "of-the-windows-pc"}
      no_log: true
"""


def test_a_password_is_made_sealed_and_never_shown(tmp_path):
    folder = tmp_path / "secret"
    done = ansible_playbook(tmp_path, PLAY, "-vvv", "-e", f"share_secret_folder={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    key = (folder / "vault-pass").read_text()
    sealed = (folder / "share.vault").read_bytes()
    password = VaultLib([("default", VaultSecret(key.encode()))]).decrypt(sealed).decode()
    assert len(password) == 32 and password != key
    modes = [oct(path.stat().st_mode & 0o777) for path in (folder, *sorted(folder.iterdir()))]
    assert modes == ["0o700", "0o600", "0o600"]
    for secret in (key, password, "of-the-windows-pc"):
        assert secret not in done.stdout + done.stderr


ROOTS = """
- name: A folder of root's
  hosts: cluster
  gather_facts: false
  vars:
    share_server_path: /usr
    share_server_group: cluster
    share_server_name: tandem
    share_server_user: tandem-data
  tasks:
    - name: Find out as whom it is read
      share_reader: {path: /usr, user: nobody}
      register: share_server_folder
    - name: Write what is shared
      ansible.builtin.template:
        src: "{{ roles }}/share_server/templates/{{ item }}.j2"
        dest: "{{ folder }}/{{ item }}"
        mode: "0600"
      loop: [exports, smb.conf]
"""


def test_no_folder_is_shared_as_root(tmp_path):
    nobody = pwd.getpwnam("nobody")
    words = ["-e", f"folder={tmp_path}", "-e", f"roles={ROOT / 'ansible/roles'}"]
    hosts = {"pc1": {"ansible_host": "192.0.2.1", "ansible_connection": "local"}}
    done = ansible_playbook(tmp_path, ROOTS, *words, inventory=hosts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"anonuid={nobody.pw_uid},anongid={nobody.pw_gid}," in (tmp_path / "exports").read_text()
    assert "force user = nobody\n" in (tmp_path / "smb.conf").read_text() + "\n"


def test_what_a_client_does_not_see_of_a_share_is_said(tmp_path):
    """By the program that the role sends to both sides."""
    for side in ("server", "client"):
        for split in ("train", "val"):
            for name in ("ant", "12:05"):
                (tmp_path / side / "set" / split / name).mkdir(parents=True)
                (tmp_path / side / "set" / split / name / "0.jpg").touch()

    def listing(side):
        tasks = yaml.safe_load((ROOT / "ansible/roles/share_client/tasks/verify.yml").read_text())
        [task] = [t for t in tasks if t["name"].startswith("List the data sets")]
        lines = task["ansible.builtin.command"]["stdin"].splitlines()[1:]
        source = (ROOT / "contract/layout.py").read_text()
        argv = [sys.executable, "-ISBc", "\n".join([source, *lines])]
        argv += [str(tmp_path / side), str(tmp_path / "node")]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def loss():
        return share.share_loss(listing("client"), listing("server"), "node2", "node1")

    assert loss() == ""
    (tmp_path / "client/other/train").mkdir(parents=True)  # of the client alone: it is not lost
    assert loss() == ""
    (tmp_path / "client/set/val/12:05").rename(tmp_path / "client/set/val/UOWP42~0")
    assert "set/train: node2 sees" in loss() and "UOWP42~0 is a class" in loss()
    for split in ("train", "val"):
        shutil.rmtree(tmp_path / "client/set" / split)
    assert "node2 sees nothing" in loss()
