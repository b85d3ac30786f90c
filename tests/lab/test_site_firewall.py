"""The firewall: members in, strangers out, before and after a reboot, and never the key lost."""

import json
import subprocess

import pytest

from lab import plan
from lab.node import SSH_LOST
from tests.lab.knock import answering
from tests.lab.site_plays import (
    changes,
    complaint,
    failures,
    play,
    reboot,
    said,
    write_inventory,
    write_play,
)

HOSTS = {f"node{n}": f"ansible_host=192.168.56.{110 + n}" for n in (1, 2)}
# Rendezvous and store, data shares, clock, and a port as torch and NCCL choose them.
TCP = [22, 111, 123, 139, 445, 2049, 29400, 29500, 45678]
UDP = [111, 123, 2049, 45678]
# Listens on the ports that are free, answers UDP, and says when it is ready.
LISTEN = """
import select, socket, sys
tcp, udp = eval(sys.argv[1])
sockets = {}
for kind, ports in ((socket.SOCK_STREAM, tcp), (socket.SOCK_DGRAM, udp)):
    for port in ports:
        one = socket.socket(socket.AF_INET, kind)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("0.0.0.0", port))
        if kind == socket.SOCK_STREAM:
            one.listen()
        sockets[one] = kind
print("ready", flush=True)
while True:
    for one in select.select(list(sockets), [], [])[0]:
        if sockets[one] == socket.SOCK_STREAM:
            one.accept()[0].close()
        else:
            one.sendto(b"x", one.recvfrom(9)[1])
"""
ALL = [f"tcp {port}" for port in TCP] + [f"udp {port}" for port in UDP]


class Listener:
    """Node 1 listening on every port that the cluster uses."""

    def __init__(self, lab):
        free = ([port for port in TCP if port != 22], UDP)
        self.lab = lab
        self.process = subprocess.Popen(
            lab.argv("ssh", "1", "--", f"sudo python3 -c '{LISTEN}' \"{free}\""),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            cwd=lab.checkout,
        )

    def __enter__(self):
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.lab.ssh(
            1, "sudo fuser -k 45678/tcp 2>/dev/null || sudo kill $(pgrep -f '^python3 -c')"
        )
        self.process.wait(timeout=30)


def reached(lab, place: str) -> list[str]:
    """The ports of node 1 that answer at a place (control, stranger, an address)."""
    return answering(lab, place, "192.168.56.111", TCP, UDP)


@pytest.fixture(scope="module")
def guarded(start_lab, tmp_path_factory):
    """Two machines with the firewall set: the lab and the words that set it again."""
    folder = tmp_path_factory.mktemp("firewall")
    lab = start_lab("firewall", "--nodes", "2", "--no-bundle")
    words = [write_play(folder, ["firewall"]), "--inventory", write_inventory(folder, HOSTS)]
    with Listener(lab):
        assert reached(lab, "stranger") == ALL  # what the firewall is for
    play(lab, "--check", *words)
    assert max(changes(play(lab, *words)).values()) > 0
    return lab, words


def test_a_second_run_changes_nothing(guarded):
    lab, words = guarded
    assert changes(play(lab, *words)) == {"node1": 0, "node2": 0}
    assert changes(play(lab, "--check", *words)) == {"node1": 0, "node2": 0}


@pytest.mark.parametrize("rebooted", [False, True])
def test_members_reach_every_port_and_a_stranger_of_the_lan_ssh_alone(guarded, rebooted):
    lab, _ = guarded
    if rebooted:
        reboot(lab, 1)
    with Listener(lab):
        assert reached(lab, "192.168.56.112") == ALL
        assert reached(lab, "stranger") == ["tcp 22"]
        assert reached(lab, "control") == ["tcp 22"]


@pytest.mark.long
def test_who_listened_is_named_before_the_first_rules(guarded):
    lab, words = guarded
    lab.ssh(2, "sudo nft delete table inet tandem")
    with Listener(lab):
        lab.ssh(1, "sudo nft delete table inet tandem")
        said = " ".join(play(lab, *words).stdout.split())
    assert "node1: from now on only members reach" in said and "python3 (tcp 45678)" in said
    assert "node2: from now on only members" not in said  # sshd alone listens there


def from_the_office(lab, address: str, line: str) -> list[str]:
    """Words that log somebody in at node 1 from an address of the office's network."""
    state = plan.STATE / lab.name
    known = f"UserKnownHostsFile={state / 'known_hosts'}"
    words = ["ssh", "-F", "/dev/null", "-i", state / "control.ssh/id_ed25519", "-b", address]
    # Where packets are dropped ssh gives up by itself.
    patience = ("ConnectTimeout=3", "ServerAliveInterval=5", "ServerAliveCountMax=4")
    for option in (known, "HostKeyAlias=192.168.56.111", "BatchMode=yes", *patience):
        words += ["-o", option]
    return lab.argv("exec", "--from", "stranger", "--", *map(str, words), "tandem@10.77.0.2", line)


@pytest.mark.long
def test_who_came_by_ssh_over_another_card_is_named_before_it_is_cut(guarded):
    """Node 1 has a card in an office's network beside the one that trains."""
    lab, words = guarded
    lab.ssh(1, "sudo ip link add office link eth0 type macvlan mode bridge; "
               "sudo ip address add 10.77.0.2/24 brd + dev office; sudo ip link set office up; "
               "sudo nft delete table inet tandem")  # fmt: skip
    for last in (8, 9):
        lab.stranger("ip", "address", "add", f"10.77.0.{last}/24", "dev", "eth0")
    earlier = from_the_office(lab, "10.77.0.8", "date +%F")
    today = subprocess.run(earlier, capture_output=True, text=True, check=True).stdout.strip()
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(from_the_office(lab, "10.77.0.9", "echo in; cat"), **streams) as there:
        assert there.stdout.readline() == "in\n"
        told = said(play(lab, *words))
        assert (f"node1: from now on ssh from 10.77.0.8 (tandem, {today}), "
                "10.77.0.9 (connected now) is dropped") in told  # fmt: skip
        assert "admin_cidrs: [10.77.0.0/24]." in told
        assert "node2: from now on ssh" not in told
        there.stdin.write("still here\n")  # what is connected stays so
        there.stdin.close()
        assert there.stdout.readline() == "still here\n"
    assert subprocess.run(earlier, capture_output=True).returncode == SSH_LOST
    lab.ssh(1, "sudo nft delete table inet tandem")
    told = said(play(lab, *words, "-e", json.dumps({"admin_cidrs": ["10.77.0.0/24"]})))
    assert "from now on ssh" not in told
    assert subprocess.run(earlier, capture_output=True).returncode == 0
    lab.ssh(1, "sudo ip link delete office")
    play(lab, *words)


@pytest.mark.long
def test_a_stranger_of_the_lan_reaches_no_ssh_where_that_is_set(guarded):
    lab, words = guarded
    play(lab, *words, "-e", "firewall_ssh_lan=false")
    with Listener(lab):
        assert reached(lab, "stranger") == []
        assert reached(lab, "control") == ["tcp 22"]
    play(lab, *words)


@pytest.mark.long
def test_rules_that_do_not_load_at_boot_leave_the_machine_closed_and_it_is_said(guarded, tmp_path):
    lab, words = guarded
    lab.ssh(1, "echo 'no rule' | sudo tee --append /etc/tandem/firewall.nft")
    reboot(lab, 1)
    with Listener(lab):
        assert reached(lab, "stranger") == reached(lab, "192.168.56.112") == ["tcp 22"]
    assert lab.ssh(1, "systemctl is-active tandem-firewall || true").strip() == "failed"
    said = complaint(lab, tmp_path, "firewall", *words[1:], gather=True)
    assert "The rules of node1 could not be loaded at boot" in said
    play(lab, *words)
    with Listener(lab):
        assert reached(lab, "192.168.56.112") == ALL


@pytest.mark.long
def test_rules_of_others_stay(guarded):
    lab, words = guarded
    lab.ssh(2, "sudo nft add table inet theirs; sudo nft delete table inet tandem")
    play(lab, *words)
    tables = lab.ssh(2, "sudo nft list tables").splitlines()
    assert sorted(tables) == ["table inet tandem", "table inet theirs"]
    lab.ssh(2, "sudo nft delete table inet theirs")


def test_rules_that_would_lock_the_control_machine_out_are_taken_back(guarded):
    lab, words = guarded
    before = lab.ssh(2, "sudo nft list ruleset; cat /etc/tandem/firewall.nft")
    wrong = json.dumps({"firewall_connection": {"client": "192.168.56.77", "ssh_port": "22"}})
    done = play(lab, *words, "--limit", "node2", "-e", wrong, "-e", "firewall_rollback_seconds=16",
                "-e", "firewall_ssh_lan=false", check=False)  # fmt: skip
    assert failures(done) == {"node2"}
    assert "The new firewall rules of node2 were undone" in done.stdout
    assert lab.ssh(2, "sudo nft list ruleset; cat /etc/tandem/firewall.nft") == before


@pytest.mark.long
def test_a_machine_that_ufw_rules_is_left_alone_or_refused(guarded):
    lab, words = guarded
    lab.ssh(2, "sudo mkdir /etc/ufw; echo ENABLED=yes | sudo tee /etc/ufw/ufw.conf")
    done = play(lab, *words, "--limit", "node2")
    assert "node2 gets no firewall from Tandem: ufw filters" in " ".join(done.stdout.split())
    refused = play(lab, *words, "--limit", "node2", "-e", "firewall_policy=require", check=False)
    assert failures(refused) == {"node2"}
    lab.ssh(2, "sudo rm -r /etc/ufw")
