"""A small control side for the tests: starts a guard and reads its frames."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GUARD = ROOT / "launcher" / "node"
# A worker that ignores signals, with a child in a session of its own, as a data loader may have.
DEAF_WORKER = (
    "import os, signal, time\n"
    "for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):\n"
    "    signal.signal(number, signal.SIG_IGN)\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    os.write(1, b'child %d\\n' % os.getpid())\n"
    "    time.sleep(600)\n"
    "time.sleep(600)\n"
)
LAUNCH = str(Path(__file__).with_name("guard_launch.py"))
PATIENCE = 20.0  # seconds; a test that waits longer has failed


class Client:
    """One guard as a subprocess (or any command that becomes one), its frames in `frames`."""

    def __init__(self, command=None):
        command = command or [sys.executable, "-IB", str(GUARD), "test"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.frames, self.buffer, self.ended = [], b"", False
        self.output = {}  # (rank, stream): bytes
        self.records = {}  # file: bytes

    def send(self, **order):
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its last frames say why
            self.process.stdin.write(json.dumps(order).encode() + b"\n")

    def start(self, output, argv, ranks=(0,), **options):
        # Shared: this machine may be training, or have these tests twice.
        task = {"run": "r", "attempt": 1, "host": "node1", "record": False, "shared": True}
        task.update(options, ranks=list(ranks), argv=argv, output=str(output))
        self.send(type="start", **task)

    def pump(self, seconds):
        """Read once, if something comes within this time. Returns whether something came."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return False
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        self.ended = self.ended or not data
        self.take(data)
        return bool(data)

    def take(self, data):
        """Moves complete frames to `frames`."""
        self.buffer += data
        while b"\n" in self.buffer:
            line, _, rest = self.buffer.partition(b"\n")
            frame = json.loads(line)
            size = frame.get("bytes", 0)
            if len(rest) < size:
                return
            if frame["type"] == "log":
                key = frame["rank"], frame["stream"]
                self.output.setdefault(key, bytearray()).extend(rest[:size])
            elif frame["type"] == "record":
                self.records[frame["file"]] = self.records.get(frame["file"], b"") + rest[:size]
            self.buffer = rest[size:]
            self.frames.append(frame)

    def wait_for(self, kind, renew=True, seconds=PATIENCE, **fields):
        """The first frame of this kind (and with these fields), renewing the lease meanwhile."""
        limit, next_lease = time.monotonic() + seconds, time.monotonic()
        while True:
            for frame in self.frames:
                if frame["type"] == kind and fields.items() <= frame.items():
                    return frame
            assert not self.ended, f"the guard ended without {kind}: {self.frames[-5:]}"
            assert time.monotonic() < limit, f"no {kind} in {seconds} s: {self.frames[-5:]}"
            if renew and time.monotonic() >= next_lease:
                self.send(type="lease")
                next_lease = time.monotonic() + 0.5
            self.pump(0.1)

    def wait_for_output(self, text, rank=0, stream="stdout"):
        """Waits until a rank has printed this, renewing the lease meanwhile."""
        limit = time.monotonic() + PATIENCE
        while text not in self.output.get((rank, stream), b""):
            assert time.monotonic() < limit, f"{text} was not printed: {self.output}"
            self.send(type="lease")
            self.pump(0.1)

    def close(self):
        """Ends the guard, if it still runs, by closing its stdin."""
        self.process.stdin.close()
        try:
            self.process.wait(15)
        finally:
            self.process.stdout.close()


def workers(script, number=1):
    """argv of the stand-in for launch."""
    return [sys.executable, LAUNCH, str(number), script]


def environment(mark, **more):
    name, _, value = mark.partition("=")
    return dict(more, **{name: value})


def alive(mark):
    """Pids of processes with `mark` in their environment: what a guard may have left behind."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark.encode() in environment and state not in "ZX":
                found.append(int(entry.name))
    return found


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(mark, seconds):
    """Waits until no such process is left; returns those that are left when the time is over."""
    limit = time.monotonic() + seconds
    while alive(mark) and time.monotonic() < limit:
        time.sleep(0.02)
    return alive(mark)


def kill(pid):
    with contextlib.suppress(ProcessLookupError):  # it may have ended with another one
        os.kill(pid, signal.SIGKILL)
