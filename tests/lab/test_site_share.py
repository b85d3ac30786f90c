"""A Samba server set up by its role, read by smbclient: who gets in, what leaks, what verify says.

No machine of the lab can mount: test_share_mounts.py does that.
"""

import re
from pathlib import Path

import pytest

from tests.lab.apt_archive import give_packages
from tests.lab.site_plays import (
    changes,
    complaint,
    failures,
    play,
    said,
    write_inventory,
    write_play,
)

VARIABLES = (
    "share_protocol=smb share_host=node1 share_path=/mnt/disk/set data_root=/srv/tandem/data"
)
HOSTS = {f"node{n}": f"ansible_host=192.168.56.{110 + n} {VARIABLES}" for n in (1, 2)}
# What breaks the server, as root on node 1: what its verification says.
BREAKS = {
    "systemctl stop smbd": "smbd.service on node1 is inactive",
    "sed -i 's/hosts allow = /&192.168.56.200 /' /etc/samba/smb.conf":
        "/etc/samba/smb.conf on node1 is not as the inventory says",
    "pdbedit --delete --user=tandem-data":
        "pdbedit --list on node1 does not list tandem-data",
    "mv /mnt/disk/set /mnt/disk/gone":
        "node1 shares /mnt/disk/set, which is gone",
}  # fmt: skip

DISK = """
sudo useradd somebody
sudo mkdir -p /mnt/disk/set
for name in a.png 12:05.png 'a*b' dot.; do echo picture | sudo tee "/mnt/disk/set/$name"; done
sudo chown -R somebody /mnt/disk
sudo chmod -R go= /mnt/disk
"""


@pytest.fixture(scope="module")
def shared(start_lab, tmp_path_factory):
    """Node 1 serves another user's folder, node 2 has smbclient: lab, words, output, password."""
    folder = tmp_path_factory.mktemp("share")
    lab = start_lab("share", "--nodes", "2", "--no-bundle")
    give_packages(lab, [1, 2], "samba", "smbclient", "cifs-utils")
    lab.ssh(2, "sudo apt-get -q -y install smbclient")
    lab.ssh(1, DISK)
    words = [write_play(folder, ["share_server"], hosts="node1"), "-vvv"]
    words += ["--inventory", write_inventory(folder, HOSTS)]
    words += ["-e", "run_user=tandem", "-e", f"share_secret_folder={folder / 'secret'}"]
    done = play(lab, *words)
    return lab, words, done, opened(lab, folder / "secret")


def opened(lab, folder: Path) -> str:
    """The password in a folder of share_secret's."""
    key, sealed = folder / "vault-pass", folder / "share.vault"
    view = ["ansible-vault", "view", "--vault-password-file", str(key), str(sealed)]
    password = lab.control(*view).stdout.strip()
    assert len(password) == 32
    return password


def smbclient(lab, password: str, command: str, user: str = "tandem-data"):
    """smbclient on node 2; its password comes by the environment, in no list of processes."""
    line = f"PASSWD='{password}' smbclient //192.168.56.111/tandem -U {user} -c '{command}'"
    return lab.ssh(2, f"{line} 2>&1; echo code $?")


def test_a_member_reads_what_another_user_owns_and_writes_nothing(shared):
    lab, _, _, password = shared
    assert "picture" in smbclient(lab, password, "get a.png -")
    assert "NT_STATUS" in smbclient(lab, password, "put /etc/hostname b.png")
    assert lab.ssh(1, "sudo ls /mnt/disk/set | wc -l") == "4\n"
    assert lab.ssh(1, "readlink /srv/tandem/data") == "/mnt/disk/set\n"


def test_a_client_sees_names_that_windows_forbids_as_they_are(shared):
    lab, _, _, password = shared
    listed = smbclient(lab, password, "ls")
    for name in ("12:05.png", "a*b", "dot."):
        assert re.search(rf"^  {re.escape(name)} +[AN] ", listed, re.M), listed


def test_a_wrong_password_and_a_guest_are_refused(shared):
    lab, _, _, _ = shared
    assert "NT_STATUS_LOGON_FAILURE" in smbclient(lab, "wrong", "ls")
    assert "a.png" not in lab.ssh(2, "smbclient -N //192.168.56.111/tandem -c ls 2>&1; true")


def test_a_second_run_changes_nothing_and_nothing_shows_the_password(shared):
    lab, words, done, password = shared
    again = play(lab, *words)
    assert changes(again) == {"node1": 0}
    for output in (done.stdout, done.stderr, again.stdout, again.stderr):
        assert password not in output
    key = lab.control("cat", words[-1].partition("=")[2] + "/vault-pass").stdout.strip()
    assert key not in done.stdout
    # By its input, since sudo logs its command line.
    search = "sudo grep -rlF -f - /etc /var/log /home /tmp; true"
    assert lab.ssh(1, search, input=f"{password}\n") == ""


def test_a_samba_server_of_somebody_else_stays_as_it_is(shared):
    lab, words, _, _ = shared
    lab.ssh(
        1,
        "sudo cp -a /etc/samba/smb.conf /root/ours; echo '[theirs]' | sudo tee /etc/samba/smb.conf",
    )
    done = play(lab, *words, check=False)
    assert failures(done) == {"node1"}
    assert "node1 has a Samba server that is not Tandem's" in said(done)
    assert lab.ssh(1, "sudo cat /etc/samba/smb.conf") == "[theirs]\n"
    lab.ssh(1, "sudo mv /root/ours /etc/samba/smb.conf")


@pytest.mark.parametrize("line", BREAKS)
def test_verification_names_what_is_wrong_with_the_server_and_the_next_run_mends_it(
    shared, tmp_path, line
):
    lab, words, _, password = shared
    role = ["share_server", *words[2:]]
    assert complaint(lab, tmp_path, *role) == ""
    lab.ssh(1, f"sudo {line}")
    assert BREAKS[line] in complaint(lab, tmp_path, *role)
    lab.ssh(1, "sudo sh -c 'mv /mnt/disk/gone /mnt/disk/set 2>/dev/null || true'")
    play(lab, *words)
    assert "picture" in smbclient(lab, password, "get a.png -")


def test_verification_names_what_is_wrong_with_the_password(shared, tmp_path):
    lab, words, _, _ = shared
    role = ["share_secret", *words[2:]]
    assert complaint(lab, tmp_path, *role) == ""
    key = Path(words[-1].partition("=")[2]) / "vault-pass"
    key.chmod(0o644)
    assert "vault-pass on the control node can be read by others (mode 0644): chmod 600" in (
        complaint(lab, tmp_path, *role)
    )
    key.chmod(0o600)
    kept = key.read_bytes()
    key.write_text("another")
    assert "share.vault on the control node does not open" in complaint(lab, tmp_path, *role)
    refused = play(lab, *words, check=False)
    assert "share.vault on the control node does not open" in said(refused)
    key.write_bytes(kept)


def test_a_server_that_is_no_line_of_the_inventory_is_an_address(shared, tmp_path):
    """As a Windows PC or a NAS; machines of the lab have no automounts, so the play ends there."""
    lab, words, _, _ = shared
    lab.ssh(2, "sudo apt-get -q -y install cifs-utils")
    client = [write_play(tmp_path, ["share_client"], hosts="node2"), *words[2:]]
    server = ["-e", "share_host=192.168.56.111", "-e", "share_name=pictures"]
    assert "srv-tandem-data.automount not supported" in said(
        play(lab, *client, *server, check=False)
    )
    assert "//192.168.56.111/pictures /srv/tandem/data cifs" in lab.ssh(2, "cat /etc/fstab")
    role = ["share_client", *words[2:], *server]
    wrong = complaint(lab, tmp_path, *role, hosts="node2")
    assert "node2 cannot read the data of 192.168.56.111: ls: cannot access" in wrong
    assert "Nothing tried to mount it. Run: make provision TAGS=data" in wrong
    play(lab, *client, "-e", "share_client_protocol=local")
    assert "tandem" not in lab.ssh(2, "cat /etc/fstab")


def test_another_password_replaces_the_one_from_before(shared, tmp_path):
    """As after the vault was lost, or from another control node."""
    lab, words, _, password = shared
    again = play(lab, *words[:-1], f"share_secret_folder={tmp_path / 'secret'}")
    # Folder, key and vault here; Samba's account and the records of it there.
    assert changes(again) == {"node1": 5}
    assert "picture" in smbclient(lab, opened(lab, tmp_path / "secret"), "get a.png -")
    assert "NT_STATUS_LOGON_FAILURE" in smbclient(lab, password, "ls")
