"""Reads the machine's TCP connections, what was sent to whom and for how long, from the kernel's
socket diagnostics, as `ss -ti` does; and judges from outside whether ranks take part in the run.

The formats are those of linux/netlink.h, linux/inet_diag.h and struct tcp_info of linux/tcp.h. They
grow at the end only. Linux 4.10 and newer report bytes and times of sending.
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

# `ends`: local address and port, the peer's address and port; `link`: how /proc names the socket;
# `sent`, `received`: bytes that arrived there and here; `busy`: seconds in which there was
# something to send and the peer had room for it. These three are None on a kernel before 4.10.
Connection = collections.namedtuple("Connection", "cookie ends link sent received busy")


def connections():
    """Return the Connections of this network namespace. Raises OSError if the kernel has no such
    diagnostics."""
    result = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as link:
        link.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = REQUEST.pack(family, socket.IPPROTO_TCP, WITH_INFO, 0, ESTABLISHED)
            size = HEADER.size + len(request)
            link.send(HEADER.pack(size, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 0, 0) + request)
            has_more = True
            while has_more:
                has_more = parse_answer(link.recv(1 << 16), result)
    return result


def parse_answer(data, result):
    """Add the connections of one answer to the list `result`. Returns whether more answers follow.
    Raises OSError if the answer is an error."""
    offset = 0
    while offset + HEADER.size <= len(data):
        size, kind, _, _, _ = HEADER.unpack_from(data, offset)
        if kind == ERROR:
            number = -struct.unpack_from("=l", data, offset + HEADER.size)[0]
            raise OSError(number, "socket diagnostics")
        if kind == DONE or size < HEADER.size:
            return False
        if len(result) < MOST_SOCKETS:
            result.append(parse_connection(data[offset + HEADER.size : offset + size]))
        offset += size + -size % 4  # messages begin at multiples of 4 bytes
    return True


def parse_connection(message):
    """Return the Connection that one message describes."""
    family, source_port, port, source, destination, _, cookie, inode = MESSAGE.unpack_from(message)
    ports = [int.from_bytes(raw, "big") for raw in (source_port, port)]
    ends = address(family, source), ports[0], address(family, destination), ports[1]
    figures = None, None, None
    offset = MESSAGE.size
    while offset + ATTRIBUTE.size <= len(message):
        size, kind = ATTRIBUTE.unpack_from(message, offset)
        info = message[offset + ATTRIBUTE.size : offset + size]
        if kind == INFO and len(info) >= RECEIVER_LIMITED + 8:
            sent, received, busy, limited = (
                struct.unpack_from("=Q", info, field)[0]
                for field in (BYTES_ACKED, BYTES_RECEIVED, BUSY_TIME, RECEIVER_LIMITED)
            )
            # Time in which the receiver had no room says nothing about the cable.
            figures = sent, received, max(0, busy - limited) / 1e6
        offset += max(ATTRIBUTE.size, size + -size % 4)
    return Connection(cookie, ends, "socket:[{}]".format(inode), *figures)


def address(family, raw):
    """Return an address as people write it."""
    # An IPv4 address that is mapped into IPv6, ::ffff:1.2.3.4, is written as 1.2.3.4.
    if family == socket.AF_INET6 and raw[:12] == bytes(10) + b"\xff\xff":
        family, raw = socket.AF_INET, raw[12:]
    return socket.inet_ntop(family, raw[:4] if family == socket.AF_INET else raw)


class Peers:
    """Sums bytes and seconds of sending by peer. A sum keeps the connections that have ended."""

    def __init__(self):
        self.sums, self.sockets = {}, {}

    def look(self):
        """Return {peer's address: {"from": local address, "sent": bytes, "busy": seconds}} since
        the first look, of the MOST_PEERS that got the most bytes. Raises OSError."""
        sockets = {}
        for cookie, (local, _, peer, _), _, sent, _, busy in connections():
            if local == peer or sent is None:  # this machine to itself
                continue
            sockets[cookie] = sent, busy
            sent_before, busy_before = self.sockets.get(cookie, (0, 0.0))
            sums = self.sums.setdefault(peer, {"from": local, "sent": 0, "busy": 0.0})
            sums["sent"] += max(0, sent - sent_before)
            sums["busy"] = round(sums["busy"] + max(0.0, busy - busy_before), 6)
        self.sockets = sockets
        top_peers = sorted(self.sums, key=lambda peer: -self.sums[peer]["sent"])[:MOST_PEERS]
        self.sums = {peer: self.sums[peer] for peer in top_peers}
        return {peer: dict(sums) for peer, sums in self.sums.items()}


# Bytes: a model has at least the first, and whatever is no gradient has less than the second.
RECEIVED_LEAST, SENT_MOST = 1 << 20, 1 << 16


class RankTraffic:
    """Sums what the ranks of this machine exchange with the run's machines, at `addresses`."""

    def __init__(self, addresses):
        self.addresses = addresses
        self.met = set()  # ranks that have had a connection to another rank
        self.bytes = {}  # {cookie: (sent, received)}, ended connections included
        self.received_since = None  # when RECEIVED_LEAST had come

    def look(self, pids):
        """Note the connections of the ranks that live, {rank: pid}. Raises OSError if the kernel
        has no diagnostics."""
        by_link = {connection.link: connection for connection in connections()}
        links_of_rank = {rank: by_link.keys() & sockets_of(pid) for rank, pid in pids.items()}
        local_ends = {by_link[link].ends for links in links_of_rank.values() for link in links}
        for rank, links in links_of_rank.items():
            rank_ends = {by_link[link].ends for link in links}
            for connection in (by_link[link] for link in links):
                # A connection within one rank has both ends among the rank's ends; one between two
                # ranks of this machine has them among this machine's, and uses no cable.
                other_end = connection.ends[2:] + connection.ends[:2]
                if connection.ends[2] in self.addresses and other_end not in rank_ends:
                    self.met.add(rank)
                    if other_end not in local_ends and connection.sent is not None:
                        self.bytes[connection.cookie] = connection.sent, connection.received
        if self.received_since is None and self.total()[1] >= RECEIVED_LEAST:
            self.received_since = time.monotonic()

    def total(self):
        """Return [bytes sent, bytes received]."""
        return [sum(figures[way] for figures in self.bytes.values()) for way in (0, 1)]

    def only_received(self, seconds):
        """Return the bytes received if a model's worth came and in the `seconds` after it almost
        nothing went out, else None: the ranks' models were made equal, and no gradient summed."""
        # By machine and not by rank: in a ring the first of its ranks receives, the last sends.
        sent, received = self.total()
        if self.received_since is None or sent > SENT_MOST:
            return None
        return received if time.monotonic() >= self.received_since + seconds else None


def sockets_of(pid):
    """Return /proc's names of the sockets of a process and of its descendants."""
    links = set()
    for process in [pid, *descendants(pid)]:
        try:
            for path in (PROC / str(process) / "fd").iterdir():
                links.add(os.readlink(str(path)))  # noqa: PTH115 (Path.readlink needs Python 3.9)
        except OSError:
            continue
    return links
