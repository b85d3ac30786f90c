"""The network interface by which this machine reaches another. Standard library only: the launcher
runs it on the machines before a run, and a process without a launcher runs it itself.
"""

import array
import fcntl
import socket
import struct
from pathlib import Path
from typing import Dict, Optional

SIOCGIFCONF = 0x8912  # Linux ioctl: all IPv4 addresses with their interfaces
IFREQ = 40  # sizeof(struct ifreq) on 64-bit Linux


def route(peer: str) -> Dict[str, Optional[str]]:
    """The interface towards `peer` (`interface`) and this machine's address on it (`source`), or
    the `error`. Sends nothing."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((peer, 9))  # chooses the route
            source = sock.getsockname()[0]
    except OSError as error:
        return {"interface": None, "source": None, "error": error.strerror or str(error)}
    return {"interface": interface_of(source), "source": source, "error": None}


def interface_towards(address: str) -> Optional[str]:
    """The interface that Gloo should use unless the user has chosen one; None for loopback and
    where it cannot be determined. By default, Gloo uses the address that the host name resolves to,
    which in Debian's and Ubuntu's /etc/hosts is 127.0.1.1: no other machine can reach it there."""
    found = route(address)["interface"]
    return None if found == "lo" else found


def interface_of(address: str) -> Optional[str]:
    """The interface that has an address; found without `ip`, which may not be installed."""
    if address.startswith("127."):
        return "lo"
    if ":" in address:
        return _bearing_ipv6(address)
    memory = array.array("B", bytes(1024 * IFREQ))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iL", len(memory), memory.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(sock.fileno(), SIOCGIFCONF, request))[0]
    found = memory.tobytes()[:used]
    wanted = socket.inet_aton(address)
    for start in range(0, used, IFREQ):
        if found[start + 20 : start + 24] == wanted:
            # An alias such as eth0:1 is an address of eth0.
            return found[start : start + 16].split(b"\0")[0].decode().split(":")[0]
    return None


def _bearing_ipv6(address: str) -> Optional[str]:
    wanted = socket.inet_pton(socket.AF_INET6, address.split("%")[0]).hex()
    for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
        fields = line.split()
        if fields[0] == wanted:
            return fields[5]
    return None
