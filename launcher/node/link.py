"""The control side as the guard sees it: its task, its orders as JSON Lines, the lease that they
renew, and the frames that it gets (docs/guard-protocol.md)."""

import collections
import json
import os
import select
import time
import types

from launcher.node.machine import boottime

TEXT = 4000  # characters of a field: the control side accepts 4096, and 1 MiB per frame
PATIENCE = 1.0  # seconds between two looks at a reader that takes nothing
BACKLOG = 16 << 20  # bytes kept for a slow reader: 10,000 lines a second for as long as a lease
LEASE, BEAT = 16.0, 1.0  # seconds
NEEDED = object()  # marks a field that has no default
# {field: (its type, its default)}
FIELDS = {
    "run": (str, NEEDED),
    "attempt": (int, NEEDED),
    "host": (str, NEEDED),
    "ranks": (list, NEEDED),  # global ranks of this node; the index is the local rank
    "argv": (list, NEEDED),
    "env": (dict, {}),  # the whole environment, besides what the guard adds
    "cwd": (str, "."),  # where launch starts
    "output": (str, NEEDED),  # the run directory on this node
    "data": (str, ""),  # where the images are; "" when unknown
    "lease": (float, LEASE),  # seconds of silence on stdin that end the run
    "beat": (float, BEAT),  # seconds between two `beat` frames
    "fail_grace": (float, 2.0),  # seconds the node's other workers get after the first failure
    "record": (bool, True),  # whether to record the machine, and to send records
    "holder": (str, "somebody"),  # who started the run, for others who ask
    "interface": (str, ""),  # whose counters are recorded; "": that of the default route
    "shared": (bool, False),  # start although another run has the machine
    "peers": (list, []),  # addresses of ranks, with which each is to connect; []: nobody looks
    "meet_within": (float, 60.0),  # seconds, after which `trouble` names ranks that have not
    # seconds of a rank's silence, after which it is asked for its stack
    "ask_after": (float, 20.0),
    "owner_signs": (list, []),  # of somebody's use of the machine (SIGNS in machines/owned.py)
    "measured": (dict, {}),  # what the ranks decide by when they start; {}: nothing
    "away_dir": (str, ""),  # any file there is an owner's no (docs/office.md)
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
    # The launcher sends its own guard along, so a task that does not fit is a defect.
    missing = [name for name, value in values.items() if value is NEEDED]
    if line.get("type") != "start" or missing:
        raise BadTask("the task for the guard lacks {}".format(", ".join(missing) or "its type"))
    for name, (kind, _) in FIELDS.items():
        # JSON has one type of number: 16 may stand for 16.0.
        if kind is float and isinstance(values[name], int):
            values[name] = float(values[name])
        if not isinstance(values[name], kind):
            raise BadTask("{} in the task for the guard is {!r}".format(name, values[name]))
    texts = values["argv"] + list(values["env"]) + list(values["env"].values())
    if not values["argv"] or not all(isinstance(text, str) for text in texts):
        raise BadTask("argv and env in the task for the guard must be texts, and argv not empty")
    return types.SimpleNamespace(**values)


class FrameWriter:
    """Numbers frames and writes them without ever blocking the guard."""

    def __init__(self, fd):
        # A guard that waits for a slow reader could not end its workers when the lease ends.
        os.set_blocking(fd, False)
        self.fd = fd
        self.seq = 0
        self.pending = collections.deque()
        self.size = 0  # bytes in `pending`
        self.is_broken = False  # the reader is gone

    def send(self, kind, payload=b"", **fields):
        """Queue one frame, and write as much as the reader takes at once."""
        head = {"type": kind}
        for name, value in fields.items():
            head[name] = value[:TEXT] if isinstance(value, str) else value
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
                # A pipe may take a part of a frame; the rest of it has to go first.
                if written < len(frame):
                    self.pending.appendleft(frame[written:])
        except BlockingIOError:
            return
        except OSError:
            self.is_broken, self.size = True, 0
            self.pending.clear()

    @property
    def is_full(self):
        """True when the reader is so far behind that workers have to wait with their output."""
        return self.size > BACKLOG


class LineReader:
    """Reads JSON Lines from a descriptor that may end or be cut anywhere."""

    def __init__(self, fd):
        os.set_blocking(fd, False)
        self.fd = fd
        self.partial = b""
        self.is_closed = False

    def lines(self):
        """Return the objects that are complete by now. Other lines are dropped."""
        while not self.is_closed:
            try:
                chunk = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                break
            except OSError:  # the connection was reset
                chunk = b""
            self.is_closed = not chunk
            self.partial += chunk
        # The rest may be half an order, which is carried out when it is complete, or never.
        complete, _, self.partial = self.partial.rpartition(b"\n")
        return [item for item in map(parse, complete.split(b"\n")) if isinstance(item, dict)]


def parse(line):
    """Parse one line of JSON; return None if it is none."""
    try:
        return json.loads(line.decode())
    except ValueError:
        return None


class Link:
    """Holds both directions of the connection, and the lease."""

    def __init__(self, stdin, stdout):
        self.frames, self.orders = FrameWriter(stdout), LineReader(stdin)
        self.lease = LEASE
        # A clock that counts sleep, too: a machine that slept must not go on with an old lease.
        self.renewed = boottime()

    def seconds_left(self):
        """Return the seconds until the lease ends; below 0 when it has ended."""
        return self.renewed + self.lease - boottime()

    def read_orders(self):
        """Return the orders that have arrived. Each of them renews the lease."""
        orders = self.orders.lines()
        if orders:
            self.renewed = boottime()
        return orders

    @property
    def is_lost(self):
        """True when the connection has ended."""
        return self.orders.is_closed or self.frames.is_broken

    def can_deliver(self):
        """Return whether frames wait and their reader may still take them."""
        return bool(self.frames.pending) and self.seconds_left() >= 0 and not self.orders.is_closed

    def wait_for_reader(self):
        """Give a slow reader time to take some more."""
        select.select([], [self.frames.fd], [], PATIENCE)
        self.read_orders()
        self.frames.flush()
