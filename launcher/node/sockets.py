"""The machine's TCP connections: what was sent to whom and for how long, from the kernel's socket
diagnostics, as `ss -ti` reads; and whether a process takes part in the run, seen from outside.

The formats are those of linux/netlink.h, linux/inet_diag.h and struct tcp_info of linux/tcp.h. They
grow at the end only; bytes and times of sending are there since Linux 4.10.
"""

import os
import re
import socket
import struct

from launcher.node.processes import PROC, descendants

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, DONE, ERROR = 4, 20, 3, 2
REQUEST_DUMP, WITH_INFO, INFO, ESTABLISHED = 0x301, 1 << 1, 2, 1 << 1
HEADER, ATTRIBUTE = struct.Struct("=LHHLL"), struct.Struct("=HH")
REQUEST = struct.Struct("=BBBBL48x")
# Family, ports, source, destination, interface, cookie; then expires, two queues, user, inode.
MESSAGE = struct.Struct("=B3xHH16s16sL8s20x")
BYTES_ACKED, BUSY_TIME, RECEIVER_LIMITED = 120, 168, 176  # offsets in struct tcp_info
MOST_SOCKETS, MOST_PEERS = 4096, 64


def connections():
    """[(cookie, own address, peer's address, bytes that arrived there, seconds)] of this network
    namespace's connections to other machines. The seconds are those in which there was something to
    send and the peer had room for it. Raises OSError where the kernel has no such diagnostics."""
    found = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as link:
        link.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = REQUEST.pack(family, socket.IPPROTO_TCP, WITH_INFO, 0, ESTABLISHED)
            size = HEADER.size + len(request)
            link.send(HEADER.pack(size, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 0, 0) + request)
            more = True
            while more:
                more = take(link.recv(1 << 16), found)
    return found


def take(data, found):
    """Add the connections of one answer to `found`. Returns whether there is another answer."""
    at = 0
    while at + HEADER.size <= len(data):
        size, kind, _, _, _ = HEADER.unpack_from(data, at)
        if kind == ERROR:
            raise OSError(
                -struct.unpack_from("=l", data, at + HEADER.size)[0], "socket diagnostics"
            )
        if kind == DONE or size < HEADER.size:
            return False
        one = connection(data[at + HEADER.size : at + size])
        if one is not None and len(found) < MOST_SOCKETS:
            found.append(one)
        at += size + -size % 4
    return True


def connection(message):
    """One connection; None of one to this machine itself, or where the kernel says too little."""
    family, _, _, source, destination, _, cookie = MESSAGE.unpack_from(message)
    own, peer = address(family, source), address(family, destination)
    at = MESSAGE.size
    while at + ATTRIBUTE.size <= len(message):
        size, kind = ATTRIBUTE.unpack_from(message, at)
        info = message[at + ATTRIBUTE.size : at + size]
        if kind == INFO and len(info) >= RECEIVER_LIMITED + 8 and own != peer:
            sent, busy, limited = (
                struct.unpack_from("=Q", info, offset)[0]
                for offset in (BYTES_ACKED, BUSY_TIME, RECEIVER_LIMITED)
            )
            return cookie, own, peer, sent, max(0, busy - limited) / 1e6
        at += max(ATTRIBUTE.size, size + -size % 4)
    return None


def address(family, raw):
    """An address as people write it; one of version 4 that stands in one of version 6 as itself."""
    if family == socket.AF_INET6 and raw[:12] == bytes(10) + b"\xff\xff":
        family, raw = socket.AF_INET, raw[12:]
    return socket.inet_ntop(family, raw[:4] if family == socket.AF_INET else raw)


class Peers:
    """Bytes and seconds of sending, by peer: the sums go on growing when a connection ends."""

    def __init__(self):
        self.sums, self.sockets = {}, {}

    def look(self):
        """{peer's address: {"from": own address, "sent": bytes, "busy": seconds}} since the first
        look, of the MOST_PEERS that most was sent to. Raises OSError."""
        now = {}
        for cookie, own, peer, sent, busy in connections():
            now[cookie] = sent, busy
            before = self.sockets.get(cookie, (0, 0.0))
            one = self.sums.setdefault(peer, {"from": own, "sent": 0, "busy": 0.0})
            one["sent"] += max(0, sent - before[0])
            one["busy"] = round(one["busy"] + max(0.0, busy - before[1]), 6)
        self.sockets = now
        most = sorted(self.sums, key=lambda peer: -self.sums[peer]["sent"])[:MOST_PEERS]
        self.sums = {peer: self.sums[peer] for peer in most}
        return {peer: dict(one) for peer, one in self.sums.items()}


# proc(5): number, own address:port, the peer's, state (1: established), two queues, timer,
# retransmits, user, timeout, inode.
LINE = re.compile(
    r"^\s*\d+: ([0-9A-F]+):([0-9A-F]{4}) ([0-9A-F]+):([0-9A-F]{4}) 01"
    r" \S+ \S+ \S+ +\d+ +\d+ (\d+)",
    re.M,
)


def established():
    """{(own address, port, the peer's address, port): how /proc names its socket} of this machine's
    connections."""
    found = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            text = (PROC / "net" / name).read_text()
        except OSError:
            continue
        for own, own_port, peer, peer_port, inode in LINE.findall(text):
            ends = [(own, own_port), (peer, peer_port)]
            key = [(address(family, raw_address(one)), int(port, 16)) for one, port in ends]
            found[key[0] + key[1]] = "socket:[{}]".format(inode)
    return found


def raw_address(digits):
    """The kernel prints an address as numbers of 32 bits in its own order."""
    words = [digits[at : at + 8] for at in range(0, len(digits), 8)]
    return b"".join(struct.pack("=L", int(word, 16)) for word in words).ljust(16, b"\0")


def is_connected(pid, addresses):
    """Whether this process, or one that it started, has a connection to one of these addresses
    whose other end is none of theirs."""
    ends = established()
    wanted = {key: link for key, link in ends.items() if key[2] in addresses}
    held = set()
    for one in [pid, *descendants(pid)] if wanted else []:
        try:
            for path in (PROC / str(one) / "fd").iterdir():
                held.add(os.readlink(str(path)))  # noqa: PTH115 (Path.readlink needs Python 3.9)
        except OSError:
            continue
    others = [key for key, link in wanted.items() if link in held]
    return any(ends.get(key[2:] + key[:2]) not in held for key in others)
