"""Measures the network between machines, for `make plan`. launcher/measure.py makes a timetable of
rounds, and runs this program on each machine with the turns of that machine. Below, `plan` is a
machine's timetable (make_timetables in launcher/measure.py).

In each round a machine measures with one partner or rests, so no two measurements share a cable.
The client of a pair measures, and its partner serves. A client waits until its partner has reached
the round, which keeps the machines in step. In a round `ring` all machines send at once, each to
the next machine, as in an all-reduce. Standard library only, Python >= 3.6.
"""

import hmac
import json
import os
import select
import socket
import statistics
import struct
import sys
import threading
import time
from pathlib import Path

CHUNK_BYTES = 1 << 20  # of one send or one receive
LINE_BYTES = 4096  # at most, of a request or an answer
# Connections that have not sent their request yet. If there are more, the oldest one is closed.
MOST_WAITING = 32
# These first seconds of a stream do not count, because TCP starts slowly, and because a rate limit
# may allow a burst. The plan's `settle` may replace this value.
SETTLE_SECONDS = 0.25
PINGS = 300  # for the median and the 99th percentile of the latency
# The time for each answer of a partner that has answered once. For the first answer a partner has
# the plan's `patience`, because it may still be in an earlier round.
TIMEOUT_SECONDS = 30.0
# Options of a socket in linux/in.h. PROBE sets DF (do not fragment), and the kernel keeps the size
# of datagrams. IP_MTU returns the MTU of the route to the peer.
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3
IP_MTU = 14
HEADERS = 28  # bytes of the IPv4 and UDP headers


def extend_line(connection, line):
    """Add the bytes that have arrived, up to the end of the line, to `line`, and return the result.
    Later bytes stay in the socket. Raises OSError at the stream's end, and for too long a line."""
    peeked = connection.recv(LINE_BYTES, socket.MSG_PEEK)
    # Without a line's end, all bytes belong to the line. At the stream's end, recv(1) returns b"".
    line += connection.recv(peeked.find(b"\n") + 1 or len(peeked) or 1)
    if not peeked or len(line) > LINE_BYTES:
        raise OSError("the partner hung up")
    return line


def parse(line):
    """Parse a JSON object. Returns {} for any other line."""
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_line(connection):
    """Read and parse the partner's answer. Raises OSError."""
    # The time limit is for the whole line: a partner that sends single bytes gets no more time.
    line, end = b"", time.monotonic() + connection.gettimeout()
    while not line.endswith(b"\n"):
        if time.monotonic() > end:
            raise socket.timeout("the partner did not answer in time")
        line = extend_line(connection, line)
    return parse(line)


def send_line(connection, value):
    """Send a value as a line of JSON. Raises OSError."""
    connection.sendall(json.dumps(value).encode() + b"\n")


def send_for(connection, plan, seconds):
    """Send as fast as the link allows, for the seconds that do not count and then for `seconds`.
    Then end the stream. Raises OSError."""
    settle_seconds = plan.get("settle", SETTLE_SECONDS)
    block, end = bytes(CHUNK_BYTES), time.monotonic() + settle_seconds + seconds
    while time.monotonic() < end:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)


def receive_rate(connection, plan):
    """Return the Mbit/s of payload that arrive until the stream ends. Raises OSError."""
    buffer, settle_seconds = bytearray(CHUNK_BYTES), plan.get("settle", SETTLE_SECONDS)
    start = counted_from = counted_to = None
    counted_bytes = 0
    # The first chunk after `settle_seconds` starts the clock. The bytes of later chunks count.
    while True:
        size = connection.recv_into(buffer)
        time_now = time.monotonic()
        if not size:
            break
        if start is None:
            start = time_now
        if counted_from is None:
            if time_now - start >= settle_seconds:
                counted_from = time_now
            continue
        counted_bytes, counted_to = counted_bytes + size, time_now
    if not counted_bytes or counted_to == counted_from:
        raise OSError("too little arrived to measure")
    return round(counted_bytes * 8 / (counted_to - counted_from) / 1e6, 1)


# ---------------------------------------------------------------------------- the serving side


class Listener:
    """Accepts connections of partners, which send the plan's token, and drops other connections."""

    def __init__(self, plan):
        self.server, self.token = socket.socket(), plan["token"].encode()
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.server.bind((plan["address"], plan["port"]))
        self.server.listen(128)
        self.server.setblocking(False)
        self.waiting = {}  # {connection: its request so far}, the oldest first

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for connection in (*self.waiting, self.server):
            connection.close()

    def accept(self, end):
        """Return the next connection whose request has the token, and that request: a dictionary
        of `connect`. Raises socket.timeout at the time `end`."""
        while True:
            seconds_left = end - time.monotonic()
            if seconds_left <= 0:
                raise socket.timeout("the partner did not come in time")
            ready, _, _ = select.select([self.server, *self.waiting], [], [], seconds_left)
            for connection in ready:
                if connection is self.server:
                    self.admit()
                    continue
                # `admit` may have closed this connection in this loop, because too many waited.
                request = self.read_request(connection) if connection in self.waiting else None
                if request:
                    return connection, request

    def admit(self):
        """Accept a connection, and wait for its request in `waiting`."""
        try:
            connection, _ = self.server.accept()
        except OSError:  # the peer has closed the connection already
            return
        connection.settimeout(TIMEOUT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.waiting[connection] = b""
        if len(self.waiting) > MOST_WAITING:
            self.drop(next(iter(self.waiting)))

    def read_request(self, connection):
        """Return a partner's request if it is complete, else None. Closes a connection that sends
        anything but a request with the token."""
        try:
            line = self.waiting[connection] = extend_line(connection, self.waiting[connection])
        except OSError:
            self.drop(connection)
            return None
        if not line.endswith(b"\n"):
            return None
        request = parse(line)
        fields = [request.get(name) for name in ("token", "host", "test")]
        are_texts = all(isinstance(field, str) for field in fields)
        # Another token comes from another user, or from the probe of another plan.
        if not are_texts or not hmac.compare_digest(fields[0].encode(errors="replace"), self.token):
            self.drop(connection)
            return None
        del self.waiting[connection]
        return request

    def drop(self, connection):
        del self.waiting[connection]
        connection.close()


def serve_round(listener, plan, partner, early):
    """Serve one partner until it sends `done`, or `patience` is over.

    `early`: {host: (connection, request)} of partners that have reached a later round, and wait.
    New ones are added. Raises OSError if this partner is one of them: then it has given up this
    round.
    """
    end = time.monotonic() + plan["patience"]
    while True:
        connection, request = early.pop(partner, None) or listener.accept(end)
        test = request["test"]
        # These are the requests of a pair's round. The only other request is `ring`, whose round is
        # later.
        is_later = test not in ("latency", "receive", "send", "mtu", "done")
        if is_later or request["host"] != partner:
            early[request["host"]] = connection, request
            if request["host"] == partner:
                raise OSError("the partner gave up")
            continue
        with connection:
            if test == "done":
                return
            if test == "mtu":  # serve_mtu answers, once its UDP socket can receive
                serve_mtu(connection, plan)
                continue
            # The empty answer starts the test. With "receive", this machine receives.
            send_line(connection, {})
            if test == "latency":
                byte = connection.recv(1)
                while byte:
                    connection.sendall(byte)
                    byte = connection.recv(1)
            elif test == "receive":
                send_line(connection, {"mbit": receive_rate(connection, plan)})
            elif test == "send":
                send_for(connection, plan, request["seconds"])
                connection.recv(1)  # returns when the partner has read everything, and closes


def serve_mtu(connection, plan):
    """Answer each datagram with its length, until the TCP connection ends."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as echo:
        echo.bind((plan["address"], plan["port"]))
        echo.settimeout(0.05)  # so often the loop looks whether the connection has ended
        send_line(connection, {})
        connection.setblocking(False)
        end = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < end:
            try:
                data, sender = echo.recvfrom(65536)
                echo.sendto(struct.pack("!I", len(data)), sender)
            except socket.timeout:
                try:
                    if not connection.recv(1):
                        return
                except BlockingIOError:
                    pass  # the connection is still open


# ---------------------------------------------------------------------------- the measuring side


def connect(plan, partner, test, awaits_answer=True):
    """Return a connection to the partner, after a request for `test`. If `awaits_answer`, waits for
    the partner's answer, which comes once the partner is in this round. Raises OSError."""
    end = time.monotonic() + plan["patience"]
    while True:
        try:
            address = (plan["peers"][partner], plan["port"])
            connection = socket.create_connection(address, timeout=5)
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    # The partner's kernel accepts connections while the partner is still in an earlier round. So
    # the first answer may take `patience`.
    connection.settimeout(plan["patience"])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request = {"token": plan["token"], "host": plan["host"], "test": test}
    send_line(connection, dict(request, seconds=plan["seconds"]))
    if awaits_answer:
        read_line(connection)
        connection.settimeout(TIMEOUT_SECONDS)
    return connection


def measure_pair(plan, partner):
    """Return the figures of this machine's link to a partner: `latency_ms`, `latency_p99_ms`,
    `mbit_to`, `mbit_from` and `mtu`. Raises OSError."""
    figures = {}
    with connect(plan, partner, "latency") as connection:
        times = []
        for _ in range(PINGS):
            start = time.monotonic()
            connection.sendall(b"x")
            connection.recv(1)
            times.append((time.monotonic() - start) * 1000)
        figures["latency_ms"] = round(statistics.median(times), 3)
        figures["latency_p99_ms"] = round(sorted(times)[int(PINGS * 0.99)], 3)
    # The partner measures, because the sender does not know what has arrived.
    with connect(plan, partner, "receive") as connection:
        send_for(connection, plan, plan["seconds"])
        figures["mbit_to"] = read_line(connection).get("mbit")
        if not isinstance(figures["mbit_to"], (int, float)):
            raise OSError("the partner did not say what arrived")
    with connect(plan, partner, "send") as connection:
        figures["mbit_from"] = receive_rate(connection, plan)
    with connect(plan, partner, "mtu"):
        figures["mtu"] = measure_mtu(plan, partner)
    connect(plan, partner, "done", awaits_answer=False).close()
    return figures


def measure_mtu(plan, partner):
    """Return the bytes of the largest IPv4 packet that arrives whole; None if none arrives."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        probe.bind((plan["address"], 0))
        probe.connect((plan["peers"][partner], plan["port"]))
        probe.settimeout(0.3)  # for the answer to one datagram
        # Search between 576 bytes, which every IPv4 host must accept, and the route's MTU.
        low, high = 576 - HEADERS, probe.getsockopt(socket.IPPROTO_IP, IP_MTU) - HEADERS
        if arrives(probe, high):
            return high + HEADERS
        if not arrives(probe, low):  # a firewall that drops every datagram: the MTU is unknown
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if arrives(probe, middle):
                low = middle  # the largest that has arrived
            else:
                high = middle
    return low + HEADERS


def arrives(probe, size):
    """Return whether the partner gets a datagram of this size, in one of three attempts."""
    for _ in range(3):
        try:
            probe.send(bytes(size))
            if struct.unpack("!I", probe.recv(4))[0] == size:
                return True
        except (OSError, struct.error):
            continue
    return False


# ------------------------------------------------------------------------ all machines at once


def measure_ring(listener, plan, turn, early):
    """Return {"mbit": the rate at which bytes arrive from the previous machine of the ring}, while
    each machine sends to the next one (`partner`). Raises OSError."""
    with connect(plan, turn["partner"], "ring", awaits_answer=False) as outgoing:
        request, end = None, time.monotonic() + plan["patience"]
        # A request for another test belongs to an earlier round, and is ignored.
        while request is None or request["test"] != "ring":
            incoming, request = early.pop(turn["before"], None) or listener.accept(end)
        with incoming:
            incoming.settimeout(plan["patience"])
            # A byte travels around the ring twice, from the machine that is `first`. After the
            # first time all machines are ready. After the second time all begin together.
            for _ in range(2):
                if turn["first"]:
                    outgoing.sendall(b".")
                if not incoming.recv(1):
                    raise OSError("the machine before it hung up")
                if not turn["first"]:
                    outgoing.sendall(b".")
            sending = (outgoing, plan, plan["seconds"])
            sender = threading.Thread(target=send_for, args=sending)
            sender.start()
            try:
                return {"mbit": receive_rate(incoming, plan)}
            finally:
                sender.join()


# ------------------------------------------------------------------------------- this machine


def measure_links(plan):
    """Measure in all turns of this machine, and return its figures. A link that failed has only an
    `error`. A turn of the plan is {"role": "client", "partner": "node2"}, or None if the machine
    rests. The turn `ring` also has the machine `before` this one, and whether this one is `first`.
    """
    result, early = {"host": plan["host"], "address": plan["address"], "pairs": {}}, {}
    # The speed is in Mbit/s. Both are None if the interface does not say.
    result["card"] = {"interface": plan["interface"]}
    for name in ("mtu", "speed"):
        try:
            path = Path("/sys/class/net") / plan["interface"] / name
            result["card"][name] = int(path.read_text())
        except (OSError, ValueError):
            result["card"][name] = None
    with Listener(plan) as listener:
        for turn in filter(None, plan["rounds"]):
            figures, partner = None, turn["partner"]
            try:
                if turn["role"] == "ring":
                    figures = measure_ring(listener, plan, turn, early)
                elif turn["role"] == "client":
                    figures = measure_pair(plan, partner)
                else:  # the partner records the figures
                    serve_round(listener, plan, partner, early)
            except (OSError, ValueError) as error:
                figures = {"error": str(error) or type(error).__name__}
            if turn["role"] == "ring":
                result["ring"] = figures
            elif figures is not None:
                result["pairs"][partner] = figures
    return result


def measure_and_run(result, command):
    """Measure by the timetable in TANDEM_LINKS, write the figures to the Path `result`, and become
    `command`. Exits with a message if a link failed."""
    # The timetable has the token, and other users can read a command line: hence the environment.
    figures = measure_links(json.loads(os.environ.pop("TANDEM_LINKS")))
    pairs = list(figures["pairs"].items())
    pairs.append(("the machine before it in the ring", figures["ring"]))
    failed = ["{}: {}".format(peer, pair["error"]) for peer, pair in pairs if "error" in pair]
    if failed:
        sys.exit("the link could not be measured with " + ", ".join(failed))
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(figures) + "\n")
    os.execv(command[0], command)  # noqa: S606 (no shell is what is wanted)


if __name__ == "__main__":
    measure_and_run(Path(sys.argv[1]), sys.argv[2:])
