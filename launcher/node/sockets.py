"""The machine's TCP connections: what was sent to whom and for how long, from the kernel's socket
diagnostics, as `ss -ti` reads; and whether ranks take part in the run, seen from outside.

The formats are those of linux/netlink.h, linux/inet_diag.h and struct tcp_info of linux/tcp.h. They
grow at the end only; bytes and times of sending are there since Linux 4.10.
"""

import collections
import os
import socket
import struct
import time

from launcher.node.processes import PROC, descendants

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, DONE, ERROR = 4, 20, 3, 2
REQUEST_DUMP, WITH_INFO, INFO, ESTABLISHED = 0x301, 1 << 1, 2, 1 << 1
HEADER, ATTRIBUTE = struct.Struct("=LHHLL"), struct.Struct("=HH")
REQUEST = struct.Struct("=BBBBL48x")
# Family, source's port, destination's (both most significant byte first), source, destination,
# interface, cookie; then expires, two queues and user, which are skipped; inode.
MESSAGE = struct.Struct("=B3x2s2s16s16sL8s16xL")
# Offsets in struct tcp_info.
BYTES_ACKED, BYTES_RECEIVED, BUSY_TIME, RECEIVER_LIMITED = 120, 128, 168, 176
MOST_SOCKETS, MOST_PEERS = 1 << 16, 64

# `ends`: own address and port, the peer's address and port; `link`: how /proc names the socket;
# bytes that arrived there and here; seconds in which there was something to send and the peer had
# room for it. These three are None where an older kernel does not say them.
Connection = collections.namedtuple("Connection", "cookie ends link sent received busy")


def connections():
    """The Connections of this network namespace. Raises OSError where the kernel has no such
    diagnostics."""
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
        if len(found) < MOST_SOCKETS:
            found.append(connection(data[at + HEADER.size : at + size]))
        at += size + -size % 4
    return True


def connection(message):
    family, source_port, port, source, destination, _, cookie, inode = MESSAGE.unpack_from(message)
    ports = [int.from_bytes(raw, "big") for raw in (source_port, port)]
    ends = address(family, source), ports[0], address(family, destination), ports[1]
    figures = None, None, None
    at = MESSAGE.size
    while at + ATTRIBUTE.size <= len(message):
        size, kind = ATTRIBUTE.unpack_from(message, at)
        info = message[at + ATTRIBUTE.size : at + size]
        if kind == INFO and len(info) >= RECEIVER_LIMITED + 8:
            sent, received, busy, limited = (
                struct.unpack_from("=Q", info, offset)[0]
                for offset in (BYTES_ACKED, BYTES_RECEIVED, BUSY_TIME, RECEIVER_LIMITED)
            )
            figures = sent, received, max(0, busy - limited) / 1e6
        at += max(ATTRIBUTE.size, size + -size % 4)
    return Connection(cookie, ends, "socket:[{}]".format(inode), *figures)


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
        for cookie, (own, _, peer, _), _, sent, _, busy in connections():
            if own == peer or sent is None:  # this machine to itself
                continue
            now[cookie] = sent, busy
            before = self.sockets.get(cookie, (0, 0.0))
            one = self.sums.setdefault(peer, {"from": own, "sent": 0, "busy": 0.0})
            one["sent"] += max(0, sent - before[0])
            one["busy"] = round(one["busy"] + max(0.0, busy - before[1]), 6)
        self.sockets = now
        most = sorted(self.sums, key=lambda peer: -self.sums[peer]["sent"])[:MOST_PEERS]
        self.sums = {peer: self.sums[peer] for peer in most}
        return {peer: dict(one) for peer, one in self.sums.items()}


RECEIVED_LEAST, SENT_MOST = 1 << 20, 1 << 16  # bytes: of a model, of anything but its gradients


class RankTraffic:
    """What the ranks of this machine exchange with others of the run. `addresses`: theirs."""

    def __init__(self, addresses):
        self.addresses = addresses
        self.met = set()  # ranks that have had a connection whose other end is none of theirs
        self.bytes = {}  # by connection: sent and received, those that have ended included
        self.received_since = None  # when RECEIVED_LEAST had come

    def look(self, pids):
        """`pids` of the ranks that live. Raises OSError where the kernel has no diagnostics."""
        every = {one.link: one for one in connections()}
        held = {rank: every.keys() & sockets_of(pid) for rank, pid in pids.items()}
        ours = {every[link].ends for links in held.values() for link in links}
        for rank, links in held.items():
            own = {every[link].ends for link in links}
            for one in (every[link] for link in links):
                other_end = one.ends[2:] + one.ends[:2]
                if one.ends[2] in self.addresses and other_end not in own:
                    self.met.add(rank)
                    if other_end not in ours and one.sent is not None:
                        self.bytes[one.cookie] = one.sent, one.received
        if self.received_since is None and self.total()[1] >= RECEIVED_LEAST:
            self.received_since = time.monotonic()

    def total(self):
        """Bytes sent and received."""
        return [sum(one[end] for one in self.bytes.values()) for end in (0, 1)]

    def only_received(self, seconds):
        """Bytes received, where a model's worth has come and for so long nothing of that size went
        out: its copies were made equal and no gradient was summed; else None. By machine, since of
        one that has two ranks in a ring the first receives and the second sends."""
        sent, received = self.total()
        if self.received_since is None or sent > SENT_MOST:
            return None
        return received if time.monotonic() >= self.received_since + seconds else None


def sockets_of(pid):
    """How /proc names the sockets of this process and of those that it started."""
    links = set()
    for one in [pid, *descendants(pid)]:
        try:
            for path in (PROC / str(one) / "fd").iterdir():
                links.add(os.readlink(str(path)))  # noqa: PTH115 (Path.readlink needs Python 3.9)
        except OSError:
            continue
    return links
