"""Healthy machines: what they are, who reaches whom, what `exec` and `ssh` pass through."""

import hashlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

CONNECT = (
    'python3 -c "import socket, errno; s = socket.socket(); s.settimeout(5); '
    "print(errno.errorcode.get(s.connect_ex(('{}', {})), 'connected'))\""
)


def test_status_is_a_table(lab):
    head, titles, *rows = lab("status").stdout.splitlines()
    assert head == f"lab {lab.name}: 4 nodes, Debian bookworm"
    assert titles.split() == ["node", "address", "state", "ssh", "rate"]
    expected = [[f"node{i}", f"192.168.56.11{i}", "running", "yes", "1gbit"] for i in (1, 2, 3, 4)]
    assert [row.split() for row in rows] == expected


def test_machines_are_whole_and_differ(lab):
    line = (
        "hostname; cat /etc/machine-id; ls /etc/ssh/*.pub | xargs cat; "
        "systemctl is-system-running --wait"
    )
    said = [lab.ssh(i, line).splitlines() for i in (1, 2, 3, 4)]
    assert [s[0] for s in said] == ["node1", "node2", "node3", "node4"]
    assert {s[-1] for s in said} == {"running"}
    for each in zip(*(s[1:-1] for s in said)):
        assert len(set(each)) == 4, each


def test_ssh_gives_the_output_alone_and_the_exit_code(lab):
    done = lab("ssh", "2", "--", "echo out; echo error >&2; exit 3", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "error\n")
    assert lab.ssh(2, "cat", input="through\n") == "through\n"


def test_user_may_become_root_without_a_password(lab):
    assert lab.ssh(1, "whoami; sudo -n whoami").split() == ["tandem", "root"]


def test_hosts_file_is_debians(lab):
    assert "127.0.1.1\tnode3\n" in lab.ssh(3, "cat /etc/hosts")


@pytest.mark.parametrize("address", ["192.0.2.2", "198.51.100.1"])
def test_no_way_out(lab, address):
    """Documentation addresses: no route, so not even a packet. The host itself is no neighbour."""
    probe = CONNECT.format(address, 80)
    assert lab.ssh(1, probe) == "ENETUNREACH\n"
    assert lab.control("sh", "-c", probe).stdout == "ENETUNREACH\n"
    assert lab.stranger("sh", "-c", probe).stdout == "ENETUNREACH\n"
    assert lab.ssh(1, "ip route show default; ip -6 route show default") == ""


def test_nodes_and_places_reach_each_other(lab):
    assert lab.ssh(1, CONNECT.format("192.168.56.114", 22)) == "connected\n"
    assert lab.stranger("sh", "-c", CONNECT.format("192.168.56.111", 22)).stdout == "connected\n"
    for place in (lab.control, lab.stranger):
        up = place("ip", "-brief", "address", "show", "lo").stdout
        assert "127.0.0.1/8" in up


def test_host_has_no_part_of_the_network():
    shown = subprocess.run(["ip", "address"], capture_output=True, text=True).stdout
    assert "192.168.56." not in shown


def test_control_is_known_and_the_stranger_is_not(lab):
    command = ["ssh", "-o", "BatchMode=yes", "tandem@192.168.56.111", "hostname"]
    assert lab.control(*command).stdout == "node1\n"
    assert "Host key verification failed" in lab.stranger(*command, check=False).stderr
    command[1:1] = ["-o", "StrictHostKeyChecking=accept-new"]
    assert "Permission denied" in lab.stranger(*command, check=False).stderr


def test_own_ssh_folder_is_out_of_sight_and_untouched(lab):
    def content(folder):
        return {p.name: hashlib.sha256(p.read_bytes()).digest() for p in folder.iterdir()}

    mine = Path("~/.ssh").expanduser()
    before = content(mine)
    assert lab.control("sh", "-c", "touch ~/.ssh/config; ls ~/.ssh").stdout.split() == [
        *("config", "id_ed25519", "id_ed25519.pub", "known_hosts")
    ]
    lab.control("sh", "-c", "rm ~/.ssh/config")
    assert content(mine) == before


def test_exec_keeps_folder_input_output_and_exit_code(lab, tmp_path):
    script = "pwd; cat; echo error >&2; exit 9"
    env = {**os.environ, "PYTHONPATH": str(lab.checkout)}
    options = {"input": "in\n", "cwd": tmp_path, "env": env, "check": False}
    done = lab.control("sh", "-c", script, **options)
    assert (done.returncode, done.stdout, done.stderr) == (9, f"{tmp_path}\nin\n", "error\n")


def test_exec_finds_names_tools_and_network_cards(lab):
    script = "getent hosts node4; echo $PATH; ls /sys/class/net"
    names, path, *cards = lab.control("sh", "-c", script).stdout.splitlines()
    assert names.split()[0] == "192.168.56.114"
    assert path.startswith(f"{lab.checkout}/.venv/bin:")
    assert set(cards) == {"lo", "br0", "ps", "p1", "p2", "p3", "p4"}


def test_exec_becomes_the_command(lab):
    """So that signals, job control and waiting work as if the command had been typed."""
    command = lab.argv("exec", "--", "sh", "-c", "echo $$; exec sleep 60")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=lab.checkout)
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM


def test_environments_are_shared_and_written_by_the_first_alone(lab):
    lab.ssh(1, "sudo touch /opt/tandem/envs/.probe")
    try:
        assert lab.ssh(3, "ls -A /opt/tandem/envs | grep probe") == ".probe\n"
        refused = lab("ssh", "2", "--", "sudo touch /opt/tandem/envs/.probe", check=False)
        assert "Read-only file system" in refused.stderr
    finally:
        lab.ssh(1, "sudo rm /opt/tandem/envs/.probe")


def test_second_up_is_refused_and_harms_nothing(lab):
    boots = lab.ssh(1, "cat /proc/sys/kernel/random/boot_id")
    done = lab("up", "--no-bundle", check=False)
    assert done.returncode == 1
    assert done.stderr == f"lab: lab {lab.name} is up already: python -m lab down\n"
    assert lab.ssh(1, "cat /proc/sys/kernel/random/boot_id") == boots


def test_two_labs_do_not_disturb_each_other(lab, pair):
    """Same addresses, other machines."""
    ours, theirs = (each.ssh(1, "cat /etc/machine-id") for each in (lab, pair))
    assert ours != theirs
    pair("kill", "1")
    pair("down")
    assert lab.ssh(1, "cat /etc/machine-id") == ours


def test_bare_machines_are_as_an_installer_leaves_them(start_lab):
    bare = start_lab("bare", "--nodes", "1", "--bare")
    assert bare("status").stdout.startswith(f"lab {bare.name}: 1 bare nodes, Debian bookworm\n")
    assert bare.ssh(1, "whoami; hostname; ls -A ~/.ssh 2>&1 || true").split()[:2] == [
        *("student", "node1")
    ]
    assert bare.control("sh", "-c", "ls -A ~/.ssh").stdout == ""
    refused = bare("ssh", "1", "--", "sudo -n true", check=False)
    assert "a password is required" in refused.stderr
    assert bare.ssh(1, "sudo --stdin whoami", input="lab\n") == "root\n"


def test_older_release(start_lab):
    old = start_lab("old", "--nodes", "1", "--release", "bullseye", "--no-bundle")
    line = (
        "python3 --version; . /etc/os-release; echo $VERSION_ID; systemctl is-system-running --wait"
    )
    assert old.ssh(1, line).splitlines() == ["Python 3.9.2", "11", "running"]


def test_default_name_follows_the_checkout(lab, tmp_path):
    """A copy elsewhere has a lab of its own, also where only root may look."""
    tmp_path.chmod(0o700)
    copy = tmp_path / "a checkout"
    copy.mkdir()
    parts = ["lab", "ansible/releases.yml"]  # the latter says which releases there are
    subprocess.run(["cp", "-r", "--parents", *parts, str(copy)], cwd=lab.checkout, check=True)
    python = lab.argv("up")[:3]
    options = {"cwd": copy, "capture_output": True, "text": True}
    try:
        up = subprocess.run([*python, "up", "--nodes", "1", "--no-bundle"], **options)
        assert up.returncode == 0, up.stderr
        name = re.match(r"lab (tandem-[0-9a-f]{8}): ", up.stdout)[1]
        assert Path(f"/run/tandem-lab/{name}").is_dir()
        shown = subprocess.run([*python, "ssh", "1", "--", "hostname"], **options)
        assert shown.stdout == "node1\n"
    finally:
        down = subprocess.run([*python, "down"], **options)
    assert (down.returncode, down.stderr) == (0, "")
