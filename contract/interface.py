"""Find the network interface by which this machine reaches another. Standard library only: the
launcher's probe runs it on machines that have no packages yet."""

import array
import fcntl
import socket
import struct
from pathlib import Path
from typing import Dict, Optional

SIOCGIFCONF = 0x8912  # Linux ioctl that returns all IPv4 addresses with their interfaces
IFREQ = 40  # sizeof(struct ifreq) on 64-bit Linux


def route(peer: str) -> Dict[str, Optional[str]]:
    """Return the interface towards an IP address (`interface`) and this machine's address on it
    (`source`), or the `error`. Sends nothing."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((peer, 9))  # for UDP, the kernel only chooses the route
            source = sock.getsockname()[0]
    except OSError as error:
        return {"interface": None, "source": None, "error": error.strerror or str(error)}
    return {"interface": interface_of(source), "source": source, "error": None}


def interface_towards(address: str) -> Optional[str]:
    """Return the interface that Gloo should use unless the user has chosen one; None for loopback,
    or if it is unknown. By default, Gloo uses the address that the host name resolves to, which in
    Debian's and Ubuntu's /etc/hosts is 127.0.1.1: no other machine can reach it there."""
    interface = route(address)["interface"]
    return None if interface == "lo" else interface


def interface_of(address: str) -> Optional[str]:
    """Return the interface that has an address, or None. Works without the program `ip`."""
    if address.startswith("127."):
        return "lo"
    if ":" in address:
        octets = socket.inet_pton(socket.AF_INET6, address.split("%")[0]).hex()
        # `fe80000000000000021422fffe123456 02 40 20 80     eth0`
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if fields[0] == octets:
                return fields[5]
        return None
    # /proc has no such list for IPv4. The kernel fills `memory` with one ifreq for each address.
    memory = array.array("B", bytes(1024 * IFREQ))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iL", len(memory), memory.buffer_info()[0])
        length = struct.unpack("iL", fcntl.ioctl(sock.fileno(), SIOCGIFCONF, request))[0]
    table, octets_v4 = memory.tobytes()[:length], socket.inet_aton(address)
    # An ifreq has the name of an interface in 16 bytes, and the address after 4 bytes more.
    for start in range(0, length, IFREQ):
        if table[start + 20 : start + 24] == octets_v4:
            # An alias such as eth0:1 is an address of eth0.
            return table[start : start + 16].split(b"\0")[0].decode().split(":")[0]
    return None
