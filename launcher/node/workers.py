"""The workers of this node as the guard sees them: how launch starts them, what they print on its
way to the control side, and how they ended."""

import collections
import contextlib
import fcntl
import os
import pathlib
import resource
import selectors
import signal
import struct
import subprocess
import sys
import time

from contract import records
from launcher.node.errors import describe_ending, lines_of
from launcher.node.link import LineReader
from launcher.node.machine import IN_JOB, PATH, current_user
from launcher.node.processes import decode_status, die_with_parent

OPEN_FILES = 65536  # data loaders pass tensors as descriptors; 1024, the usual limit, is too few
POLL = 0.05  # seconds between two reads of output that keeps coming: one read takes many lines
CHUNK = 1 << 16
PIPE_SIZE = 1 << 20  # the most an ordinary user may have: room for a burst between two looks
# The end of each stream, in which the error is found: one traceback of rich may have 100 KiB.
TAIL, PIECES = 1 << 18, 4000  # bytes; reads


class Stream:
    """Holds a pipe for output. The guard keeps both ends, so it sees no end of file."""

    def __init__(self, rank, name):
        self.rank, self.name = rank, name
        self.reader, self.writer = os.pipe()
        # Only the reader: a rank that prints waits for the guard, as it would for a terminal.
        os.set_blocking(self.reader, False)
        self.pieces, self.tail_bytes = collections.deque(), 0  # the end of it: (when, bytes)
        self.last_read = None  # when something came last
        # The kernel may refuse: all pipes of a user together have a limit. A small one does, too.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.writer, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_SIZE)

    def read(self):
        """Return what has come since the last look, at most CHUNK bytes; b"" for nothing."""
        try:
            data = os.read(self.reader, CHUNK)
        except BlockingIOError:
            return b""
        self.last_read = time.monotonic()
        self.pieces.append((self.last_read, data))
        self.tail_bytes += len(data)
        # Tiny reads are limited by their number: each costs memory besides its bytes.
        while self.tail_bytes > TAIL or len(self.pieces) > PIECES:
            self.tail_bytes -= len(self.pieces.popleft()[1])
        return data


class Worker:
    """Describes a rank: `pid` is None until it starts, `status` until it ends; `peak` is its
    largest resident memory, in bytes."""

    def __init__(self, rank):
        self.rank, self.pid, self.status = rank, None, None
        self.exception, self.error_lines, self.last_line = None, [], None
        self.start_time = None
        self.peak = None
        self.is_first_failure = False
        # In memory, so that a rank that counts never waits for a disk; without a name, so that
        # nothing stays behind. -1: this kernel has no such file, and nothing is counted.
        self.counters = -1
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
            self.counters = os.open("/dev/shm", flags, 0o600)  # noqa: S108 (it has no name)
            os.truncate(self.counters, records.SUM_BYTES)

    @property
    def is_running(self):
        return self.pid is not None and self.status is None

    def read_sums(self):
        """Return what the rank has counted of its sums, by the names of SUM_COUNTERS; {} if it
        counts none."""
        data = b"" if self.counters < 0 else os.pread(self.counters, records.SUM_BYTES, 0)
        # The script may have cut the file.
        if len(data) < records.SUM_BYTES:
            return {}
        values = struct.unpack("={}q".format(len(records.SUM_COUNTERS)), data)
        sums = dict(zip(records.SUM_COUNTERS, values))
        # A process that the rank started may have written there.
        return sums if sums["pid"] == self.pid else {}

    def outcome(self):
        """Return the worker's entry in the record's last line."""
        if self.status is not None:
            code, name = decode_status(self.status)
        else:
            # No supervisor reported its end: it was killed together with its supervisor.
            code, name = None, "SIGKILL" if self.pid else None
        return {"exit_code": code, "signal": name, "exception": self.exception}


class Workers:
    """Holds the ranks of the node, launch's output, and the pipe on which supervisors report."""

    def __init__(self, ranks):
        self.members = [Worker(rank) for rank in ranks]
        self.launch = [Stream(None, "stdout"), Stream(None, "stderr")]
        self.streams = [[Stream(rank, "stdout"), Stream(rank, "stderr")] for rank in ranks]
        reader, self.control = os.pipe()
        self.reports = LineReader(reader)

    def all_streams(self):
        """Return launch's streams, then each rank's."""
        return self.launch + [stream for pair in self.streams for stream in pair]

    def address(self):
        """Return where supervisors find the pipes, `pid:control:out,err,counters:...`: the guard's
        pid and its descriptors, three for each local rank. -1: this rank has no counters."""
        triples = [
            "{},{},{}".format(out.writer, err.writer, worker.counters)
            for (out, err), worker in zip(self.streams, self.members)
        ]
        return ":".join([str(os.getpid()), str(self.control), *triples])

    def read_reports(self):
        """Read the supervisors' reports since the last look and update the workers. Returns
        [(event, worker)], whose event is "start" or "exit"."""
        events = []
        for report in self.reports.lines():
            worker = self.members[report["local_rank"]]
            if report["event"] == "start":
                worker.pid, worker.start_time = report["pid"], time.monotonic()
            else:
                worker.status, worker.peak = report["status"], report["peak"]
            events.append((report["event"], worker))
        return events

    def describe_ending(self, worker):
        """Note in the worker what its output says about its end."""
        streams = self.streams[self.members.index(worker)]
        ending = describe_ending(
            [lines_of(stream.pieces) for stream in streams], worker.status != 0
        )
        worker.exception, worker.error_lines, worker.last_line = ending

    def running(self):
        """Return the workers that are alive."""
        return [worker for worker in self.members if worker.is_running]

    def pids(self):
        """Return {rank: pid} of the workers that are alive."""
        return {worker.rank: worker.pid for worker in self.running()}

    def last_output(self, worker):
        """Return when the worker printed last, or else started (monotonic clock, seconds)."""
        streams = self.streams[self.members.index(worker)]
        reads = [stream.last_read for stream in streams if stream.last_read is not None]
        return max([worker.start_time, *reads])


def describe(worker):
    """Return the fields of a `worker_exit` frame."""
    details = {"error_lines": worker.error_lines, "last_line": worker.last_line}
    return dict(worker.outcome(), rank=worker.rank, first=worker.is_first_failure, **details)


def start_launch(task, workers, mono_start, scratch):
    """Start torch.distributed.run. `scratch` is a folder for temporary files that only the run's
    user can enter. Raises OSError."""
    guard = os.getpid()
    stdout, stderr = workers.launch

    def prepare_child():
        die_with_parent(signal.SIGKILL, guard)
        # The guard ignores these two (register_wakeups), and a child would inherit that.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_unlimited = hard_limit == resource.RLIM_INFINITY
        open_files = OPEN_FILES if is_unlimited else min(OPEN_FILES, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard_limit))

    # In a session of its own: a signal to launch's process group spares the guard.
    return subprocess.Popen(
        task.argv,
        cwd=task.cwd,
        env=environment(task, workers, mono_start, scratch),
        stdin=subprocess.DEVNULL,
        stdout=stdout.writer,
        stderr=stderr.writer,
        start_new_session=True,
        preexec_fn=prepare_child,
    )


def environment(task, workers, mono_start, scratch):
    """Return the whole environment of launch."""
    name, home = current_user()
    node_folder = pathlib.Path(__file__).resolve().parent
    # Of the guard's environment only HOME, so that no shell startup file matters; in a Slurm job
    # all of it, which has what the job's modules have set.
    values = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", home)}
    values.update(os.environ if IN_JOB in os.environ else {})
    values.update(USER=name, LOGNAME=name, TMPDIR=scratch)
    values.update(task.env)
    values.update(TANDEM_NODE=task.host, TANDEM_ATTEMPT=str(task.attempt))
    values.update(TANDEM_GUARD_MONO=repr(mono_start))
    # Launch starts the script `worker` in place of Python, which needs the other values.
    values.update(PYTHON_EXEC=str(node_folder / "worker"), TANDEM_GUARD_PIPES=workers.address())
    values.update(TANDEM_WORKER_PYTHON=task.argv[0], TANDEM_GUARD_PYTHON=sys.executable)
    values.update(TANDEM_STACKS_FOLDER=scratch)
    return values


class Output:
    """Passes on output and reports, and calls `on_exit(worker)` at the end of each worker."""

    def __init__(self, workers, link, selector, on_exit):
        self.workers, self.link, self.selector, self.on_exit = workers, link, selector, on_exit
        self.next_poll = None  # None: the next byte wakes the loop

    def poll(self):
        """Pass on what has come. Output that keeps coming waits POLL seconds, to be read at once;
        otherwise the next byte wakes the loop."""
        now = time.monotonic()
        if self.next_poll is not None and now < self.next_poll:
            return
        is_busy = self.pass_on()
        readers = [stream.reader for stream in self.workers.all_streams()]
        for fd in [*readers, self.workers.reports.fd]:
            is_registered = fd in self.selector.get_map()
            if not is_busy and not is_registered:
                self.selector.register(fd, selectors.EVENT_READ)
            elif is_registered and is_busy:
                self.selector.unregister(fd)
        self.next_poll = now + POLL if is_busy else None

    def pass_on(self):
        """Send output and reports. Returns whether more may follow at once."""
        frames = self.link.frames
        # Reports are read before the output and sent after it: a worker's end comes last.
        events = self.workers.read_reports()
        is_busy = frames.is_full
        for stream in self.workers.all_streams() if not is_busy else []:
            data = stream.read()
            while data:
                is_busy = True
                frames.send("log", data, rank=stream.rank, stream=stream.name)
                data = b"" if frames.is_full else stream.read()
        for event, worker in events:
            if event == "start":
                frames.send("worker", rank=worker.rank, pid=worker.pid)
            else:
                self.on_exit(worker)
        return is_busy
