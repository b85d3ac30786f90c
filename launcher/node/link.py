"""The control side as the guard sees it: its orders as JSON Lines, the lease that they renew, and
the frames that it gets (docs/guard-protocol.md)."""

import collections
import json
import os
import select
import time

from launcher.node.machine import boottime
from launcher.node.task import LEASE

TEXT = 4000  # characters of a field: the control side accepts 4096, and 1 MiB per frame
PATIENCE = 1.0  # seconds between two looks at a reader that takes nothing
BACKLOG = 16 << 20  # bytes kept for a slow reader: 10,000 lines a second for as long as a lease


class FrameWriter:
    """Numbers frames and writes them without ever blocking the guard."""

    def __init__(self, fd):
        os.set_blocking(fd, False)
        self.fd = fd
        self.seq = 0
        self.pending = collections.deque()
        self.size = 0  # bytes in `pending`
        self.broken = False  # nobody reads any more

    def send(self, kind, payload=b"", **fields):
        """Queue one frame, and write as much as the reader takes at once."""
        head = {"type": kind}
        for name, value in fields.items():
            head[name] = value[:TEXT] if isinstance(value, str) else value
        if payload:
            head["bytes"] = len(payload)
        head["seq"], head["mono"] = self.seq, round(time.monotonic(), 6)
        self.seq += 1
        if not self.broken:
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
                if written < len(frame):
                    self.pending.appendleft(frame[written:])
        except BlockingIOError:
            return
        except OSError:
            self.broken, self.size = True, 0
            self.pending.clear()

    @property
    def full(self):
        """Whether the reader is so far behind that no more output should be taken from workers."""
        return self.size > BACKLOG


class LineReader:
    """Reads JSON Lines from a descriptor that may end or be cut anywhere."""

    def __init__(self, fd):
        os.set_blocking(fd, False)
        self.fd = fd
        self.partial = b""
        self.ended = False

    def lines(self):
        """The objects that are complete by now. Lines that are not a JSON object are dropped."""
        while not self.ended:
            try:
                chunk = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                break
            except OSError:  # the connection was reset
                chunk = b""
            self.ended = not chunk
            self.partial += chunk
        whole, _, self.partial = self.partial.rpartition(b"\n")
        return [item for item in map(parse, whole.split(b"\n")) if isinstance(item, dict)]


def parse(line):
    """One line as JSON, or None."""
    try:
        return json.loads(line.decode())
    except ValueError:
        return None


class Link:
    """Both directions of the connection, and how long its silence may last."""

    def __init__(self, stdin, stdout):
        self.frames, self.orders = FrameWriter(stdout), LineReader(stdin)
        self.lease = LEASE
        self.renewed = boottime()

    def left(self):
        """Seconds until the lease ends; below 0 when it has ended."""
        return self.renewed + self.lease - boottime()

    def read(self):
        """The orders that have arrived. Each of them renews the lease."""
        orders = self.orders.lines()
        if orders:
            self.renewed = boottime()
        return orders

    @property
    def lost(self):
        """Whether the connection has ended."""
        return self.orders.ended or self.frames.broken

    def deliverable(self):
        """Whether there are frames left, and a reader to wait for."""
        return bool(self.frames.pending) and self.left() >= 0 and not self.orders.ended

    def wait_for_reader(self):
        """Give a slow reader time to take some more."""
        select.select([], [self.frames.fd], [], PATIENCE)
        self.read()
        self.frames.flush()

    def drain(self):
        """Deliver the last frames as long as the control side shows that it lives."""
        while self.deliverable():
            self.wait_for_reader()
