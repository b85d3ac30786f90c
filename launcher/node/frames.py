"""The protocol as bytes: outgoing frames, incoming JSON Lines (docs/guard-protocol.md)."""

import collections
import json
import os
import time

TEXT = 4000  # characters of a field: the control side accepts 4096, and 1 MiB per frame
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
