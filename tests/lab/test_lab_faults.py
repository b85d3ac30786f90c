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
    """A connection from the control node to node 1 that was open before the fault."""

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
