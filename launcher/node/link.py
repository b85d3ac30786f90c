"""Connects the guard to the control node (docs/guard-protocol.md): reads the task and the orders,
which are JSON Lines, holds the lease that each order renews, and writes the frames. No call blocks,
except `wait_for_reader`."""

import collections
import json
import os
import select
import time
import types

from launcher.node.machine import boottime

FIELD_CHARACTERS = 4000  # of a text: the control node accepts 4096, and 1 MiB per frame
READER_SECONDS = 1.0  # that one call waits for a slow reader
BACKLOG_BYTES = 16 << 20  # for a slow reader: 10,000 lines a second for as long as a lease
LEASE, BEAT = 16.0, 1.0  # seconds; see FIELDS
NEEDED = object()  # marks a field that has no default
# {field of a task: (type, default)}
FIELDS = {
    "run": (str, NEEDED),
    "attempt": (int, NEEDED),
    "host": (str, NEEDED),
    "ranks": (list, NEEDED),  # global ranks of this node; the index is the local rank
    "argv": (list, NEEDED),
    "env": (dict, {}),  # the whole environment, to which the guard adds some variables
    "cwd": (str, "."),  # where launch starts
    "output": (str, NEEDED),  # the run directory on this node
    "data": (str, ""),  # the folder of the images; "" if unknown
    "lease": (float, LEASE),  # seconds of silence on stdin that end the run
    "beat": (float, BEAT),  # seconds between two `beat` frames
    "fail_grace": (float, 2.0),  # seconds of the node's other workers after the first failure
    "record": (bool, True),  # whether to record the machine, and to send records
    "holder": (str, "somebody"),  # the person who started the run, for other users
    "interface": (str, ""),  # to record its counters; "": the interface of the default route
    "shared": (bool, False),  # start although another run has the machine
    "peers": (list, []),  # addresses of the run's machines; []: do not watch the connections
    "meet_within": (float, 60.0),  # seconds in which each rank has to connect to another rank
    "ask_after": (float, 20.0),  # seconds of silence after which a rank is asked for its stack
    "owner_signs": (list, []),  # signs that somebody uses the machine (SIGNS in machines/owned.py)
    "measured": (dict, {}),  # Measurements of contract/decisions.py, for the ranks
    "away_dir": (str, ""),  # a file in this folder is an owner's opt-out (docs/office.md)
}


class BadTask(Exception):
    """A task cannot be carried out; the text is the reason, for people."""


def read_task(line):
    """Return a namespace with the FIELDS of a `start` line. Raises BadTask."""
    fields = {name: line.get(name) for name in FIELDS}
    values = {
        name: default if fields[name] is None else fields[name]
        for name, (_, default) in FIELDS.items()
    }
    # The launcher also sends this guard's code, so a task that does not fit is a defect.
    missing = [name for name, value in values.items() if value is NEEDED]
    if line.get("type") != "start" or missing:
        raise BadTask("the task for the guard lacks {}".format(", ".join(missing) or "its type"))
    for name, (kind, _) in FIELDS.items():
        # JSON has only one type of number, so 16.0 may arrive as 16.
        if kind is float and isinstance(values[name], int):
            values[name] = float(values[name])
        if not isinstance(values[name], kind):
            raise BadTask("{} in the task for the guard is {!r}".format(name, values[name]))
    texts = values["argv"] + list(values["env"]) + list(values["env"].values())
    if not values["argv"] or not all(isinstance(text, str) for text in texts):
        raise BadTask("argv and env in the task for the guard must be texts, and argv not empty")
    return types.SimpleNamespace(**values)


class FrameWriter:
    """Numbers frames and writes them without ever blocking the guard (docs/guard-protocol.md)."""

    def __init__(self, fd):
        # A guard that waits for a slow reader could not end its workers when the lease ends.
        os.set_blocking(fd, False)
        self.fd = fd
        self.seq = 0
        self.pending = collections.deque()
        self.size = 0  # bytes in `pending`
        self.is_broken = False  # the reader is gone

    def send(self, kind, payload=b"", **fields):
        """Queue a frame of a `kind` with these `fields`, and the bytes `payload`. Writes as much as
        the reader takes at once."""
        head = {"type": kind}
        for name, value in fields.items():
            head[name] = value[:FIELD_CHARACTERS] if isinstance(value, str) else value
        if payload:
            head["bytes"] = len(payload)
        head["seq"], head["mono"] = self.seq, round(time.monotonic(), 6)
        self.seq += 1
        if not self.is_broken:
            frame = json.dumps(head, separators=(",", ":")).encode() + b"\n" + payload
            self.pending.append(frame)
            self.size += len(frame)
            self.flush()

    def flush(self):
        """Write as much as the reader takes now."""
        try:
            while self.pending:
                frame = self.pending[0]
                written = os.write(self.fd, frame)
                self.size -= written
                self.pending.popleft()
                # A pipe may take a part of a frame. The remaining part must be the next to go.
                if written < len(frame):
                    self.pending.appendleft(frame[written:])
        except BlockingIOError:
            return
        except OSError:
            self.is_broken, self.size = True, 0
            self.pending.clear()

    @property
    def is_full(self):
        """Whether the reader is so slow that workers have to wait with their output."""
        return self.size > BACKLOG_BYTES


class LineReader:
    """Reads JSON Lines from a descriptor that may end or be cut anywhere."""

    def __init__(self, fd):
        os.set_blocking(fd, False)
        self.fd = fd
        self.partial = b""
        self.is_closed = False

    def lines(self):
        """Return the objects whose lines are complete. Drops lines that are not JSON objects."""
        while not self.is_closed:
            try:
                chunk = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                break
            except OSError:  # the connection was reset
                chunk = b""
            self.is_closed = not chunk
            self.partial += chunk
        # The bytes after the last newline may be half an order, so they wait for its end.
        complete, _, self.partial = self.partial.rpartition(b"\n")
        return [item for item in map(parse, complete.split(b"\n")) if isinstance(item, dict)]


def parse(line):
    """Parse a line of JSON. Returns None for any other line."""
    try:
        return json.loads(line.decode())
    except ValueError:
        return None


class Link:
    """Holds both directions of the connection, and the lease."""

    def __init__(self, stdin, stdout):
        self.frames, self.orders = FrameWriter(stdout), LineReader(stdin)
        self.lease = LEASE
        # This clock also counts sleep: a machine that slept must not continue with an old lease.
        self.renewed_at = boottime()

    def seconds_left(self):
        """Return the seconds until the lease ends; negative if the lease has ended."""
        return self.renewed_at + self.lease - boottime()

    def read_orders(self):
        """Return the orders that have arrived. Each of them renews the lease."""
        orders = self.orders.lines()
        if orders:
            self.renewed_at = boottime()
        return orders

    @property
    def is_lost(self):
        """Whether the connection has ended."""
        return self.orders.is_closed or self.frames.is_broken

    def can_deliver(self):
        """Return whether frames wait and their reader may still take them."""
        return bool(self.frames.pending) and self.seconds_left() >= 0 and not self.orders.is_closed

    def wait_for_reader(self):
        """Wait up to READER_SECONDS for a slow reader, and write more frames."""
        select.select([], [self.frames.fd], [], READER_SECONDS)
        self.read_orders()
        self.frames.flush()
