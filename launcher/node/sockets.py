"""Reads the machine's TCP connections, with bytes and times of sending, from the kernel's socket
diagnostics, as `ss -ti` does. Peers sums the traffic by peer for the records, and RankTraffic
judges for the guard whether the ranks train together.

The formats are in linux/netlink.h, linux/inet_diag.h and struct tcp_info of linux/tcp.h. New
kernels only add fields at the end. Linux 4.10 and newer report bytes and times of sending.
"""

import collections
import os
import socket
import struct
import time

from launcher.node.processes import PROC, descendants

# A request for the established connections of a family, with tcp_info (the attribute INFO).
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, DONE, ERROR = 4, 20, 3, 2
REQUEST_DUMP, WITH_INFO, INFO, ESTABLISHED = 0x301, 1 << 1, 2, 1 << 1
HEADER, ATTRIBUTE = struct.Struct("=LHHLL"), struct.Struct("=HH")
REQUEST = struct.Struct("=BBBBL48x")
# Fields of struct inet_diag_msg: family, source port, destination port (both big-endian), source,
# destination, interface, cookie; four skipped fields; inode.
MESSAGE = struct.Struct("=B3x2s2s16s16sL8s16xL")
# Offsets in struct tcp_info.
BYTES_ACKED, BYTES_RECEIVED, BUSY_TIME, RECEIVER_LIMITED = 120, 128, 168, 176
MOST_SOCKETS, MOST_PEERS = 1 << 16, 64  # that are kept: any user can make connections

# `cookie`: the kernel's number of the connection, never used again. `ends`: local address and port,
# then the peer's. `link`: the name of the socket in /proc. `sent`: bytes that the peer has
# acknowledged. `received`: bytes. `busy`: seconds in which there was something to send, and the
# peer had room. The last three are None on a kernel before 4.10.
Connection = collections.namedtuple("Connection", "cookie ends link sent received busy")


def connections():
    """Return the Connections of this network namespace. Raises OSError if the kernel cannot."""
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
            # Time in which the receiver had no room says nothing about the network.
            figures = sent, received, max(0, busy - limited) / 1e6
        offset += max(ATTRIBUTE.size, size + -size % 4)
    return Connection(cookie, ends, "socket:[{}]".format(inode), *figures)


def address(family, raw):
    """Return the text of an address."""
    # ::ffff:1.2.3.4 is an IPv4 address in the form of IPv6, which becomes 1.2.3.4.
    if family == socket.AF_INET6 and raw[:12] == bytes(10) + b"\xff\xff":
        family, raw = socket.AF_INET, raw[12:]
    return socket.inet_ntop(family, raw[:4] if family == socket.AF_INET else raw)


class Peers:
    """Sums bytes and seconds of sending by peer, including connections that have ended."""

    def __init__(self):
        self.sums = {}  # as `look` returns them
        self.sockets = {}  # {cookie: (sent, busy)} of the connections at the last look

    def look(self):
        """Return {peer's address: {"from": local address, "sent": bytes, "busy": seconds}} since
        the first look, of the MOST_PEERS that got the most bytes. Raises OSError."""
        sockets = {}
        for connection in connections():
            local, _, peer, _ = connection.ends
            sent, busy = connection.sent, connection.busy
            # A connection within this machine uses no network. An old kernel reports no bytes.
            if local == peer or sent is None:
                continue
            sockets[connection.cookie] = sent, busy
            sent_before, busy_before = self.sockets.get(connection.cookie, (0, 0.0))
            sums = self.sums.setdefault(peer, {"from": local, "sent": 0, "busy": 0.0})
            sums["sent"] += max(0, sent - sent_before)
            sums["busy"] = round(sums["busy"] + max(0.0, busy - busy_before), 6)
        self.sockets = sockets
        top_peers = sorted(self.sums, key=lambda peer: -self.sums[peer]["sent"])[:MOST_PEERS]
        self.sums = {peer: self.sums[peer] for peer in top_peers}
        return {peer: dict(sums) for peer, sums in self.sums.items()}


# A machine that received RECEIVED_LEAST bytes got at least a small model. A machine that sent no
# more than SENT_MOST bytes sent no gradients of such a model.
RECEIVED_LEAST, SENT_MOST = 1 << 20, 1 << 16


class RankTraffic:
    """Sums the bytes that the ranks of this machine exchange with the machines at `addresses`, and
    notes which ranks have met another rank."""

    def __init__(self, addresses):
        self.addresses = addresses
        self.met = set()  # ranks that have had a connection to another rank
        self.bytes = {}  # {cookie: (sent, received)}, ended connections included
        self.received_since = None  # when RECEIVED_LEAST bytes had come

    def look(self, pids):
        """Note the connections of the living ranks `pids`, {rank: pid}. Raises OSError if the
        kernel has no socket diagnostics."""
        by_link = {connection.link: connection for connection in connections()}
        links_of_rank = {rank: by_link.keys() & sockets_of(pid) for rank, pid in pids.items()}
        local_ends = {by_link[link].ends for links in links_of_rank.values() for link in links}
        for rank, links in links_of_rank.items():
            rank_ends = {by_link[link].ends for link in links}
            for connection in (by_link[link] for link in links):
                # A connection within the rank is also listed from its other end, in `rank_ends`. A
                # connection of two ranks of this machine uses no network, and is in `local_ends`.
                local_address, local_port, peer_address, peer_port = connection.ends
                ends_from_peer = peer_address, peer_port, local_address, local_port
                if peer_address in self.addresses and ends_from_peer not in rank_ends:
                    self.met.add(rank)
                    if ends_from_peer not in local_ends and connection.sent is not None:
                        self.bytes[connection.cookie] = connection.sent, connection.received
        _, received = self.total()
        if self.received_since is None and received >= RECEIVED_LEAST:
            self.received_since = time.monotonic()

    def total(self):
        """Return (bytes sent, bytes received)."""
        sent = sum(sent for sent, _ in self.bytes.values())
        return sent, sum(received for _, received in self.bytes.values())

    def only_received(self, seconds):
        """Return the received bytes if the machine received a model, and in the `seconds` after
        that sent almost nothing, so no gradients. Returns None otherwise."""
        # The sums are of the machine, because in a ring its first rank receives and its last sends.
        sent, received = self.total()
        if self.received_since is None or sent > SENT_MOST:
            return None
        return received if time.monotonic() >= self.received_since + seconds else None


def sockets_of(pid):
    """Return the names in /proc (`socket:[4711]`) of a process's sockets, and its descendants'."""
    links = set()
    for process in [pid, *descendants(pid)]:
        try:
            for path in (PROC / str(process) / "fd").iterdir():
                links.add(os.readlink(str(path)))  # noqa: PTH115 (Path.readlink needs Python 3.9)
        except OSError:
            continue
    return links
