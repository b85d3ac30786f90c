"""Broken machines: what their peers see, and what mending brings back."""

import subprocess

import pytest

# Holds a connection to node 1's ssh server open and says what becomes of it within 3 seconds.
HOLD = """
import socket, sys
connection = socket.create_connection(("192.168.56.111", 22), timeout=10)
connection.recv(256)
print("open", flush=True)
sys.stdin.readline()
connection.settimeout(3)
try:
    connection.sendall(b"SSH-2.0-probe\\r\\n")
    print("answer" if connection.recv(1) else "closed")
except TimeoutError:
    print("silence")
except ConnectionError:
    print("reset")
"""


class HeldConnection:
    """A connection from the control machine to node 1 that was open before the fault."""

    def __init__(self, lab):
        self.process = subprocess.Popen(
            lab.argv("exec", "--", "python3", "-c", HOLD),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=lab.checkout,
        )
        assert self.process.stdout.readline() == "open\n"

    def fate(self) -> str:
        return self.process.communicate("go\n", timeout=30)[0].strip()


def states(lab):
    rows = [row.split() for row in lab("status").stdout.splitlines()[2:]]
    return {row[0]: (row[2], row[3]) for row in rows}


@pytest.mark.parametrize(
    ("fault", "state"), [("kill", "dead"), ("freeze", "frozen"), ("cut", "cut")]
)
def test_peers_see_silence_and_mending_ends_it(pair, fault, state):
    pair.ssh(1, "echo kept > ~/file; sync")
    held = HeldConnection(pair)
    pair(fault, "1")
    assert states(pair) == {"node1": (state, "no"), "node2": ("running", "yes")}
    assert held.fate() == "silence"
    pair("mend", "1")
    assert pair.ssh(1, "cat ~/file") == "kept\n"
    assert states(pair)["node1"] == ("running", "yes")


def test_a_process_that_is_killed_closes_its_connections(pair):
    """A control experiment: the silence above is due to the loss of power."""
    held = HeldConnection(pair)
    pair.ssh(2, "true")
    pair.ssh(1, "sudo systemctl kill --signal=KILL ssh.service")
    assert held.fate() in ("closed", "reset")


@pytest.mark.long
def test_several_faults_at_once_are_all_mended(pair):
    for fault in ("freeze", "cut"):
        pair(fault, "1")
    assert "frozen, cut" in pair("status").stdout
    pair("mend", "1")
    assert states(pair)["node1"] == ("running", "yes")
    for fault in ("freeze", "cut", "kill", "kill"):
        pair(fault, "1")
    pair("mend", "1")
    assert states(pair)["node1"] == ("running", "yes")


def test_unknown_node_is_refused(lab):
    for verb in ("kill", "freeze", "cut", "mend", "reboot"):
        refused = lab(verb, "7", check=False)
        assert refused.returncode == 1
        assert refused.stderr == f"lab: lab {lab.name} has the nodes 1 to 4, but no node 7\n"


BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


def test_reboot(pair):
    """Files stay, what only the kernel held is gone, and the configured address is back."""
    before = pair.ssh(1, BOOT_ID)
    pair.ssh(1, "touch ~/file; sudo nft add table inet probe; sudo nft list tables | grep probe")
    pair.ssh(1, "sudo ip address add 192.168.56.77/24 dev eth0")
    pair("reboot", "1")
    assert pair.ssh(1, BOOT_ID) != before
    assert pair.ssh(1, "ls ~; sudo nft list tables") == "file\n"
    addresses = pair.ssh(1, "ip -4 -brief address show eth0").split()[2:]
    assert addresses == ["192.168.56.111/24"]
    assert pair.ssh(1, "systemctl is-system-running --wait") == "running\n"


@pytest.mark.long
def test_power_off_from_inside_and_mend(pair):
    before = pair.ssh(2, BOOT_ID)
    pair("ssh", "2", "--", "sudo systemctl poweroff", check=False)
    assert any(states(pair)["node2"][0] == "dead" for _ in range(100))
    pair("mend", "2")
    assert pair.ssh(2, BOOT_ID) != before


SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
end = time.monotonic() + 2
while time.monotonic() < end:
    connection.sendall(bytes(65536))
"""
RECEIVE = """
import socket, time
server = socket.create_server(("", 5000))
print("listening", flush=True)
connection, _ = server.accept()
received, buffer = 0, bytearray(1 << 20)
start = time.monotonic()
while count := connection.recv_into(buffer):
    received += count
print(received * 8 / 1e6 / (time.monotonic() - start))
"""


def megabits(lab, sender: int, receiver: int) -> float:
    server = subprocess.Popen(
        lab.argv("ssh", str(receiver), "--", f"python3 -c '{RECEIVE}'"),
        stdout=subprocess.PIPE,
        text=True,
        cwd=lab.checkout,
    )
    assert server.stdout.readline() == "listening\n"
    lab.ssh(sender, f"python3 -c '{SEND}' 192.168.56.{110 + receiver}")
    return float(server.communicate(timeout=30)[0])


def test_rates_hold_in_both_directions_and_on_one_cable_alone(pair):
    """Goodput is a little below the rate because of headers; shaping is for the upper bound."""
    pair("shape", "20mbit", "1")
    assert [row.split()[-1] for row in pair("status").stdout.splitlines()[2:]] == [
        *("20mbit", "unshaped")
    ]
    assert 10 < megabits(pair, 1, 2) < 22
    assert 10 < megabits(pair, 2, 1) < 22
    pair("shape", "unshaped")
    assert megabits(pair, 1, 2) > 100
