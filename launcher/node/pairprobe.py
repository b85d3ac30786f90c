"""Measures the network between machines, for `make plan`.

Every machine runs this with its own part of one timetable. In each round a machine measures with
one partner or rests, so no two measurements share a cable. A client waits until its partner has
reached the round, so nobody else has to keep them in step. In a round `ring` all machines send at
once, each to the next, as in an all-reduce. Standard library only, Python >= 3.6.
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

CHUNK = 1 << 20
LINE = 4096  # bytes of a request or an answer
WAITING = 32  # connections that may be about to say their request; the oldest leaves first
# Seconds at the start of a stream that are left out, if the plan does not name others (`settle`):
# slow start, a shaper's burst.
SETTLE = 0.25
PINGS = 300
# For a partner that has answered; one that has not is waited for until `patience` is over.
TIMEOUT = 30.0
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: set DF, do not lower the size by itself
IP_MTU = 14  # linux/in.h: the MTU of the way to the peer
HEADERS = 28  # bytes of the IPv4 and UDP headers


def listen(plan):
    """The TCP socket on which this machine serves, bound to its own address alone."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((plan["address"], plan["port"]))
    server.listen(128)
    return server


def take_line(connection, said):
    """What has arrived of a line after `said`, up to its end; nothing after it is consumed. Raises
    OSError at the end of the stream, and for a line that is too long."""
    there = connection.recv(LINE, socket.MSG_PEEK)
    said += connection.recv(there.find(b"\n") + 1 or len(there) or 1)
    if not there or len(said) > LINE:
        raise OSError("the partner hung up")
    return said


def parse(line):
    """A JSON object; an empty one where the line is none."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_line(connection):
    """The partner's answer, which has to be whole within the connection's timeout."""
    line, end = b"", time.monotonic() + connection.gettimeout()
    while not line.endswith(b"\n"):
        if time.monotonic() > end:
            raise socket.timeout("the partner did not answer in time")
        line = take_line(connection, line)
    return parse(line)


def send_line(connection, value):
    connection.sendall(json.dumps(value).encode() + b"\n")


def send_for(connection, plan, seconds):
    """Send as fast as the link allows for this many seconds, after those that are left out."""
    block, end = bytes(CHUNK), time.monotonic() + seconds + plan.get("settle", SETTLE)
    while time.monotonic() < end:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)


def receive_rate(connection, plan):
    """Mbit/s of payload that arrived, without the seconds at the start that are left out."""
    buffer, settle = bytearray(CHUNK), plan.get("settle", SETTLE)
    began = counted_from = last = None
    total = 0
    while True:
        got = connection.recv_into(buffer)
        now = time.monotonic()
        if not got:
            break
        if began is None:
            began = now
        if counted_from is None:
            if now - began >= settle:
                counted_from = now
            continue
        total, last = total + got, now
    if not total or last == counted_from:
        raise OSError("too little arrived to measure")
    return round(total * 8 / (last - counted_from) / 1e6, 1)


# ---------------------------------------------------------------------------- the serving side


class Listener:
    """Where partners come in. Others may come, too, before it is known that they have no token:
    they keep nobody waiting, whatever they say or leave unsaid."""

    def __init__(self, plan):
        self.server, self.token = listen(plan), plan["token"].encode()
        self.server.setblocking(False)
        self.coming = {}  # connection: what it has said, in the order of their coming

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for connection in (*self.coming, self.server):
            connection.close()

    def accept(self, end):
        """The next connection from a peer that knows the token, and its request. Raises
        socket.timeout at the moment `end`."""
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise socket.timeout("the partner did not come in time")
            ready, _, _ = select.select([self.server, *self.coming], [], [], left)
            for connection in ready:
                if connection is self.server:
                    self.admit()
                    continue
                request = self.listen_to(connection) if connection in self.coming else None
                if request:
                    return connection, request

    def admit(self):
        try:
            connection, _ = self.server.accept()
        except OSError:  # it has left already
            return
        connection.settimeout(TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.coming[connection] = b""
        if len(self.coming) > WAITING:
            self.leave(next(iter(self.coming)))

    def listen_to(self, connection):
        """A peer's request when it has said it. Whoever says something else is left."""
        try:
            said = self.coming[connection] = take_line(connection, self.coming[connection])
        except OSError:
            self.leave(connection)
            return None
        if not said.endswith(b"\n"):
            return None
        request = parse(said)
        token, *others = [request.get(name) for name in ("token", "host", "test")]
        words = all(isinstance(one, str) for one in (token, *others))
        if not words or not hmac.compare_digest(token.encode(errors="replace"), self.token):
            self.leave(connection)  # a stranger, or another run's probe
            return None
        del self.coming[connection]
        return request

    def leave(self, connection):
        del self.coming[connection]
        connection.close()


def serve_round(door, plan, partner, early):
    """Serve one partner until it says that it has finished, or `patience` is over.

    early: {host: (connection, request)} of partners of later rounds that connected early and wait.
    Raises OSError where this one waits in a later round, too, since it has given up.
    """
    end = time.monotonic() + plan["patience"]
    while True:
        connection, request = early.pop(partner, None) or door.accept(end)
        later = request["test"] not in (*SERVE, "done")
        if later or request["host"] != partner:
            early[request["host"]] = connection, request
            if request["host"] == partner:
                raise OSError("the partner gave up")
            continue
        with connection:
            if request["test"] == "done":
                return
            SERVE[request["test"]](connection, plan, request)


def serve_latency(connection, plan, request):
    send_line(connection, {})
    while True:
        byte = connection.recv(1)
        if not byte:
            return
        connection.sendall(byte)


def serve_receive(connection, plan, request):
    send_line(connection, {})
    rate = receive_rate(connection, plan)
    send_line(connection, {"mbit": rate})


def serve_send(connection, plan, request):
    send_line(connection, {})
    send_for(connection, plan, request["seconds"])
    connection.recv(1)  # the partner closes when it has read all


def serve_mtu(connection, plan, request):
    """Answer each datagram with its length, until the TCP connection ends."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as echo:
        echo.bind((plan["address"], plan["port"]))
        echo.settimeout(0.05)
        send_line(connection, {})
        connection.setblocking(False)
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            try:
                data, sender = echo.recvfrom(65536)
                echo.sendto(struct.pack("!I", len(data)), sender)
            except socket.timeout:
                try:
                    if not connection.recv(1):
                        return
                except BlockingIOError:
                    pass


SERVE = {"latency": serve_latency, "receive": serve_receive, "send": serve_send, "mtu": serve_mtu}

# ---------------------------------------------------------------------------- the measuring side


def connect(plan, partner, test, agreed=True):
    """A connection on which the partner has agreed to a test (or, without `agreed`, will
    read the request for one); waits until the partner is in this round."""
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
    # The kernel accepted it, but the partner may still be in another round: then this waits.
    connection.settimeout(plan["patience"])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request = {"token": plan["token"], "host": plan["host"], "test": test}
    send_line(connection, dict(request, seconds=plan["seconds"]))
    if agreed:
        read_line(connection)
        connection.settimeout(TIMEOUT)
    return connection


def measure_round(plan, partner):
    """All figures of one pair, seen from here."""
    found = {}
    for test, measure in MEASURE.items():
        with connect(plan, partner, test) as connection:
            found.update(measure(connection, plan, partner))
    connect(plan, partner, "done", agreed=False).close()
    return found


def measure_latency(connection, plan, partner):
    times = []
    for _ in range(PINGS):
        began = time.monotonic()
        connection.sendall(b"x")
        connection.recv(1)
        times.append((time.monotonic() - began) * 1000)
    median, late = statistics.median(times), sorted(times)[int(PINGS * 0.99)]
    return {"latency_ms": round(median, 3), "latency_p99_ms": round(late, 3)}


def measure_sending(connection, plan, partner):
    send_for(connection, plan, plan["seconds"])
    rate = read_line(connection).get("mbit")
    if not isinstance(rate, (int, float)):
        raise OSError("the partner did not say what arrived")
    return {"mbit_to": rate}


def measure_receiving(connection, plan, partner):
    return {"mbit_from": receive_rate(connection, plan)}


def measure_mtu(connection, plan, partner):
    """The largest IPv4 packet that arrives whole, found by datagrams that may not be fragmented."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        probe.bind((plan["address"], 0))
        probe.connect((plan["peers"][partner], plan["port"]))
        probe.settimeout(0.3)
        # Every IPv4 host must accept 576 bytes.
        low, high = 576 - HEADERS, probe.getsockopt(socket.IPPROTO_IP, IP_MTU) - HEADERS
        if arrives(probe, high):
            return {"mtu": high + HEADERS}
        if not arrives(probe, low):  # a firewall that drops every datagram says nothing of sizes
            return {"mtu": None}
        while high - low > 1:
            middle = (low + high) // 2
            if arrives(probe, middle):
                low = middle
            else:
                high = middle
    return {"mtu": low + HEADERS}


def arrives(probe, size):
    for _ in range(3):
        try:
            probe.send(bytes(size))
            if struct.unpack("!I", probe.recv(4))[0] == size:
                return True
        except (OSError, struct.error):
            continue
    return False


# By what the partner is asked to do.
MEASURE = {
    "latency": measure_latency,
    "receive": measure_sending,
    "send": measure_receiving,
    "mtu": measure_mtu,
}


# ------------------------------------------------------------------------ all machines at once


def measure_ring(door, plan, turn, early):
    """What arrives from the machine before this one while each sends to the next. Before that a
    byte goes round twice, from the machine that is `first`: all are there, then all begin."""
    with connect(plan, turn["partner"], "ring", agreed=False) as onward:
        request, end = None, time.monotonic() + plan["patience"]
        while request is None or request["test"] != "ring":
            before, request = early.pop(turn["before"], None) or door.accept(end)
        with before:
            before.settimeout(plan["patience"])
            for _ in range(2):
                if turn["first"]:
                    onward.sendall(b".")
                if not before.recv(1):
                    raise OSError("the machine before it hung up")
                if not turn["first"]:
                    onward.sendall(b".")
            sending = (onward, plan, plan["seconds"])
            sender = threading.Thread(target=send_for, args=sending)
            sender.start()
            try:
                return {"mbit": receive_rate(before, plan)}
            finally:
                sender.join()


# ------------------------------------------------------------------------------- this machine


def card(interface):
    """MTU and speed of a network card (Mbit/s, None where the driver does not report it)."""
    figures = {"interface": interface}
    for name in ("mtu", "speed"):
        try:
            figures[name] = int((Path("/sys/class/net") / interface / name).read_text())
        except (OSError, ValueError):
            figures[name] = None
    return figures


def take_part(door, plan, turn, early):
    """What this machine measured in a round, or why it could not; None where its partner did."""
    try:
        if turn["role"] == "ring":
            return measure_ring(door, plan, turn, early)
        if turn["role"] == "client":
            return measure_round(plan, turn["partner"])
        return serve_round(door, plan, turn["partner"], early)
    except (OSError, ValueError) as error:
        return {"error": str(error) or type(error).__name__}


def main(plan):
    """All figures of this machine."""
    result, early = {"host": plan["host"], "address": plan["address"], "pairs": {}}, {}
    result["card"] = card(plan["interface"])
    with Listener(plan) as door:
        for turn in filter(None, plan["rounds"]):
            found = take_part(door, plan, turn, early)
            if turn["role"] == "ring":
                result["ring"] = found
            elif found is not None:
                result["pairs"][turn["partner"]] = found
    return result


def measure_and_run(result, command):
    """Write what was measured by the timetable in TANDEM_LINKS, and become the command; exit if a
    link failed. (The timetable holds the token by which the machines know each other, and other
    users may read a command line.)"""
    figures = main(json.loads(os.environ.pop("TANDEM_LINKS")))
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
