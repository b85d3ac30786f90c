"""Tests whether this machine reaches its peers by TCP: each listens, and connects to all others.

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
    """Listen on `address`, connect to `peers`, a list of [address, port], and print after the mark
    the peers that cannot be reached."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Another launcher may test in the same second. Both may listen on the port.
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    is_listening = listen(server, address, listen_port)
    results = [{"address": a, "port": port, "why": reach(family, (a, port))} for a, port in peers]
    print(mark + json.dumps([result for result in results if result["why"]]))
    sys.stdout.flush()
    # Peers may still connect. When all have finished, the control node closes stdin.
    deadline = time.monotonic() + WAIT_SECONDS
    while not select.select([sys.stdin], [], [], 0.1)[0] and time.monotonic() < deadline:
        is_listening = is_listening or listen(server, address, listen_port)


def listen(server, address, port):
    """Listen on a port. Returns False if another process uses it. Exits on any other error."""
    try:
        server.bind((address, port))
    except OSError as error:
        # The launcher of another user tests at this moment, and users cannot share a port. A peer
        # that reaches that launcher has reached this machine, too.
        if error.errno == errno.EADDRINUSE:
            return False
        sys.exit(f"it cannot listen on {address}, port {port}: {error.strerror or error}")
    server.listen(64)
    return True


def reach(family, peer):
    """Connect to a peer. Returns None, or the reason why it cannot be reached."""
    deadline = time.monotonic() + CONNECT_SECONDS
    # Try again for a while: the peer may begin to listen later than this machine.
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(CONNECT_SECONDS)
            try:
                sock.connect(peer)
                return None
            except OSError as error:
                reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            return reason
        time.sleep(0.1)
