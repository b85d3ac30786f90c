"""Whether this machine reaches its peers by TCP: each listens, then each connects to all others.

Standard library only.
"""

import errno
import json
import select
import socket
import sys
import time

CONNECT_SECONDS = 3.0
WAIT_SECONDS = 20.0


def main(address, listen_port, peers, mark):
    """Listen on `address`; connect to `peers`, a list of [address, port]; print what failed
    after the mark."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Another launcher may look in the same second; both may listen, so neither stops the other.
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listens = listen(server, address, listen_port)
    tried = [{"address": a, "port": port, "why": reach(family, (a, port))} for a, port in peers]
    print(mark + json.dumps([one for one in tried if one["why"]]))
    sys.stdout.flush()
    # Others may still be on their way: the control machine ends this by closing stdin.
    deadline = time.monotonic() + WAIT_SECONDS
    while not select.select([sys.stdin], [], [], 0.1)[0] and time.monotonic() < deadline:
        listens = listens or listen(server, address, listen_port)


def listen(server, address, port):
    """Whether it listens. If not, another user's launcher looks in this moment (they may not share
    a port as those of one user may), and who reaches that one has reached this machine."""
    try:
        server.bind((address, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        sys.exit(f"it cannot listen on {address}, port {port}: {error.strerror or error}")
    server.listen(64)
    return True


def reach(family, peer):
    """Why a peer cannot be reached, or None. The peer may begin to listen a little later than
    this machine."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(CONNECT_SECONDS)
            try:
                sock.connect(peer)
                return None
            except OSError as error:
                said = error.strerror or str(error)
        if time.monotonic() > deadline:
            return said
        time.sleep(0.1)
