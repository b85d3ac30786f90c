"""What TCP sent to whom, by the kernel's own diagnostics, over real connections."""

import contextlib
import socket
import struct

import pytest

from launcher.node import sockets

OWN, PEER = "127.77.0.1", "127.77.0.2"  # two addresses of the loopback card


@contextlib.contextmanager
def connected():
    with socket.create_server((PEER, 0)) as server:
        client = socket.create_connection(server.getsockname(), source_address=(OWN, 0))
        there, _ = server.accept()
        with client, there:
            yield client, there


def drain(there, count):
    while count:
        count -= len(there.recv(count))


def test_bytes_are_counted_by_peer_and_stay_when_a_connection_ends():
    peers = sockets.Peers()
    for size, total in ((300_000, 300_000), (200_000, 500_000)):
        with connected() as (client, there):
            client.sendall(bytes(size))
            drain(there, size)
            found = peers.look()
        assert (found[PEER]["from"], found[PEER]["sent"]) == (OWN, pytest.approx(total, abs=4))
    assert peers.look()[PEER] == found[PEER]
    assert all(one["from"] != peer for peer, one in found.items())  # this machine to itself


def test_time_in_which_the_receiver_has_no_room_is_not_the_link_s():
    """A sender that the receiver makes wait has waited for no cable."""
    with connected() as (client, _):
        client.settimeout(0.7)
        with contextlib.suppress(socket.timeout):
            client.sendall(bytes(64 << 20))  # more than both buffers
        busy = {one.ends[2]: one.busy for one in sockets.connections()}[PEER]
    assert busy < 0.3


def test_addresses_are_written_as_people_do():
    mapped = bytes(10) + b"\xff\xff" + bytes((192, 168, 56, 111))
    assert sockets.address(socket.AF_INET6, mapped) == "192.168.56.111"
    assert sockets.address(socket.AF_INET, bytes((10, 0, 0, 7)) + bytes(12)) == "10.0.0.7"
    assert sockets.address(socket.AF_INET6, bytes(15) + b"\x02") == "::2"


def test_an_older_kernel_says_less_and_an_error_is_one():
    short = struct.pack("=HH", 4 + 100, sockets.INFO) + bytes(100)
    ports = b"\0\1", b"\1\0"
    head = sockets.MESSAGE.pack(socket.AF_INET, *ports, bytes(16), b"\1" * 16, 0, bytes(8), 7)
    found = sockets.parse_connection(head + short)
    assert (found.ends, found.link) == (("0.0.0.0", 1, "1.1.1.1", 256), "socket:[7]")
    assert found.sent is found.received is found.busy is None
    answer = sockets.HEADER.pack(36, sockets.ERROR, 0, 0, 0) + struct.pack("=l", -2) + bytes(16)
    with pytest.raises(OSError, match="socket diagnostics"):
        sockets.parse_answer(answer, [])
