"""Whether a process takes part in the run, seen from outside: torch's process groups meet at a TCP
store on the rendezvous port, to which each member stays connected."""

import os
import re

from launcher.node.processes import PROC, descendants

ESTABLISHED = "01"
# proc(5): number, own address:port, the peer's, state, two queues, timer, retransmits, user,
# timeout, inode.
LINE = re.compile(
    r"^\s*\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:([0-9A-F]{4}) ([0-9A-F]{2})"
    r" \S+ \S+ \S+ +\d+ +\d+ (\d+)",
    re.M,
)


def sockets(port):
    """The inodes of this machine's connections from or to the port, as links in /proc name them."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            text = (PROC / "net" / name).read_text()
        except OSError:
            continue
        for own, peer, state, inode in LINE.findall(text):
            if state == ESTABLISHED and port in (int(own, 16), int(peer, 16)):
                found.add("socket:[{}]".format(inode))
    return found


def is_connected(pid, port):
    """Whether this process, or one that it started, has a connection from or to the port."""
    wanted = sockets(port)
    for one in [pid, *descendants(pid)] if wanted else []:
        try:
            held = list((PROC / str(one) / "fd").iterdir())
        except OSError:
            continue
        for path in held:
            try:
                if os.readlink(str(path)) in wanted:  # noqa: PTH115 (Path.readlink needs Python 3.9)
                    return True
            except OSError:
                continue
    return False
