"""The network card that Gloo is to use, where nobody has said it."""

import contextlib
import fcntl
import socket
import struct
from typing import Optional

SIOCGIFADDR = 0x8915  # of Linux: the first IPv4 address of a card


def card_towards(address: str) -> Optional[str]:
    """The card by which this machine reaches `address`; None for loopback and where it cannot be
    told. By itself Gloo takes what the machine's own name resolves to, which in Debian's and
    Ubuntu's /etc/hosts is 127.0.1.1: no other machine finds it there."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing, but chooses the route
        own = probe.getsockname()[0]
        for _, name in [] if own.startswith("127.") else socket.if_nameindex():
            with contextlib.suppress(OSError):  # a card without an address
                asked = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, asked)
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return None
