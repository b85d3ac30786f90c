"""Starts launch (torch.distributed.run) and holds its workers, the ranks of this node: their pipes,
their counters and their ends. Output sends what they print to the control node. guard.py decides
when a worker has to end. A supervisor (supervisor.py) runs between launch and each worker: it
connects the worker to its pipes, and reports when the worker starts and ends."""

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

OPEN_FILES = 65536  # data loaders pass tensors as descriptors, so the usual 1024 do not suffice
POLL_SECONDS = 0.05  # between two reads while output keeps coming: one read takes many lines
READ_BYTES = 1 << 16  # of one read at most: as much as an ordinary pipe holds
# The largest pipe of an ordinary user, so that a burst between two reads does not stop a rank.
PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)  # named since Python 3.10
# The end of each stream is kept, to find the error in it: at most so many bytes, of so many reads.
# One traceback of rich may have 100 KiB.
TAIL_BYTES, TAIL_PIECES = 1 << 18, 4000


class Stream:
    """Holds a pipe for stdout or stderr of a rank, or of launch (rank None). The guard keeps both
    ends open, so a read never reports the end of the file."""

    def __init__(self, rank, name):
        self.rank, self.name = rank, name
        self.reader, self.writer = os.pipe()
        # Only the reader does not block: a rank that prints waits, as for a terminal.
        os.set_blocking(self.reader, False)
        # The end of the stream, as (time of the read, bytes), and the sum of the bytes.
        self.pieces, self.tail_bytes = collections.deque(), 0
        self.last_read = None  # when the newest bytes came; None before the first
        # The kernel limits the sum of all pipes of a user. A small pipe works, too.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.writer, F_SETPIPE_SZ, PIPE_BYTES)

    def read(self):
        """Return the next bytes, at most READ_BYTES; b"" if none have come."""
        try:
            data = os.read(self.reader, READ_BYTES)
        except BlockingIOError:
            return b""
        self.last_read = time.monotonic()
        self.pieces.append((self.last_read, data))
        self.tail_bytes += len(data)
        # The number of pieces is limited, because each one takes memory besides its bytes.
        while self.tail_bytes > TAIL_BYTES or len(self.pieces) > TAIL_PIECES:
            _, oldest = self.pieces.popleft()
            self.tail_bytes -= len(oldest)
        return data


class Worker:
    """Holds the state of a rank. `pid` is None until the rank starts. `status`, its wait status, is
    None until it ends. `peak`: its largest resident memory, in bytes. `exception`: the line of
    its output that says why it ended, or None. `counters`: the descriptor of a file in which the
    rank counts its sums (contract/records.py), or -1."""

    def __init__(self, rank):
        self.rank, self.pid, self.status = rank, None, None
        self.streams = [Stream(rank, "stdout"), Stream(rank, "stderr")]
        self.exception = None
        self.start_time = None  # of the monotonic clock
        self.peak = None
        self.is_first_failure = False  # among the workers of this node
        # The file is in memory, so that a rank that counts never waits for a disk. It has no name,
        # so that it never stays behind. Some kernels have no such files.
        self.counters = -1
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
            self.counters = os.open("/dev/shm", flags, 0o600)  # noqa: S108 (it has no name)
            os.truncate(self.counters, records.SUM_BYTES)

    @property
    def is_running(self):
        return self.pid is not None and self.status is None

    def read_sums(self):
        """Return the rank's counters, by the names of SUM_COUNTERS; {} if it counts none."""
        data = b"" if self.counters < 0 else os.pread(self.counters, records.SUM_BYTES, 0)
        # The script can open the file, too, and may have cut it.
        if len(data) < records.SUM_BYTES:
            return {}
        values = struct.unpack("={}q".format(len(records.SUM_COUNTERS)), data)
        sums = dict(zip(records.SUM_COUNTERS, values))
        # Another process that the rank started may have written into the file.
        return sums if sums["pid"] == self.pid else {}

    def outcome(self):
        """Return the worker's entry in the last line of the machine's record."""
        if self.status is not None:
            code, name = decode_status(self.status)
        else:
            # Nothing reported the worker's end: it was killed together with its supervisor, or has
            # never started.
            code, name = None, "SIGKILL" if self.pid else None
        return {"exit_code": code, "signal": name, "exception": self.exception}

    def describe_end(self):
        """Find the error in the rank's output, and return the fields of a `worker_exit` frame."""
        lines = [lines_of(stream.pieces) for stream in self.streams]
        self.exception, error_lines, last_line = describe_ending(lines, self.status != 0)
        details = {"error_lines": error_lines, "last_line": last_line}
        return dict(self.outcome(), rank=self.rank, first=self.is_first_failure, **details)


class Workers:
    """Holds the ranks of the node, launch's streams, and the pipe on which supervisors report."""

    def __init__(self, ranks):
        self.members = [Worker(rank) for rank in ranks]
        self.launch_streams = [Stream(None, "stdout"), Stream(None, "stderr")]
        reader, self.control = os.pipe()
        self.reports = LineReader(reader)

    def all_streams(self):
        """Return launch's streams, then each rank's."""
        return self.launch_streams + [stream for rank in self.members for stream in rank.streams]

    def address(self):
        """Return the guard's pid and descriptors, by which supervisors open the pipes and counters:
        `pid:control:out,err,counters:...`, with three descriptors for each local rank."""
        triples = []
        for worker in self.members:
            out, err = worker.streams
            triples.append("{},{},{}".format(out.writer, err.writer, worker.counters))
        return ":".join([str(os.getpid()), str(self.control), *triples])

    def running(self):
        """Return the workers that are alive."""
        return [worker for worker in self.members if worker.is_running]

    def pids(self):
        """Return {rank: pid} of the workers that are alive."""
        return {worker.rank: worker.pid for worker in self.running()}


def start_launch(task, workers, mono_start, scratch):
    """Start launch, and return its Popen. `task`: the namespace of link.read_task. `mono_start`:
    when the guard began, by the monotonic clock. `scratch`: a private folder for temporary files.
    Raises OSError."""
    guard_pid = os.getpid()
    stdout, stderr = workers.launch_streams

    def prepare_child():
        die_with_parent(signal.SIGKILL, guard_pid)
        # A child inherits that the guard ignores these two signals (register_wakeups).
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_unlimited = hard_limit == resource.RLIM_INFINITY
        open_files = OPEN_FILES if is_unlimited else min(OPEN_FILES, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard_limit))

    # Launch gets a session, so that a signal to its process group does not reach the guard.
    return subprocess.Popen(
        task.argv,
        cwd=task.cwd,
        env=make_environment(task, workers, mono_start, scratch),
        stdin=subprocess.DEVNULL,
        stdout=stdout.writer,
        stderr=stderr.writer,
        start_new_session=True,
        preexec_fn=prepare_child,
    )


def make_environment(task, workers, mono_start, scratch):
    """Return the whole environment of launch, which its supervisors and workers inherit."""
    name, home = current_user()
    node_folder = pathlib.Path(__file__).resolve().parent
    # Only HOME comes from the guard's environment, so that the shell's startup files do not matter.
    # In a Slurm job the whole environment does, because the job's modules have set variables.
    values = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", home)}
    values.update(os.environ if IN_JOB in os.environ else {})
    values.update(USER=name, LOGNAME=name, TMPDIR=scratch)
    values.update(task.env)
    # A rank's records name the node and the attempt, and take the guard's start for the rank's own.
    values.update(TANDEM_NODE=task.host, TANDEM_ATTEMPT=str(task.attempt))
    values.update(TANDEM_GUARD_MONO=repr(mono_start))
    # Launch starts the script `worker` instead of Python. Its supervisor needs the other values.
    values.update(PYTHON_EXEC=str(node_folder / "worker"), TANDEM_GUARD_PIPES=workers.address())
    values.update(TANDEM_WORKER_PYTHON=task.argv[0], TANDEM_GUARD_PYTHON=sys.executable)
    values.update(TANDEM_STACKS_FOLDER=scratch)
    return values


class Output:
    """Sends output and starts of workers to the control node, and calls `on_exit` with each worker
    that has ended. `selector`: of the guard's loop."""

    def __init__(self, workers, link, selector, on_exit):
        self.workers, self.link, self.selector, self.on_exit = workers, link, selector, on_exit
        self.next_poll = None  # None: the next byte wakes the loop

    def poll(self):
        """Send the output that has come. While output keeps coming, it is read every POLL_SECONDS.
        Otherwise the next byte wakes the guard's loop."""
        time_now = time.monotonic()
        if self.next_poll is not None and time_now < self.next_poll:
            return
        is_busy = self.pass_on()
        readers = [stream.reader for stream in self.workers.all_streams()]
        for fd in [*readers, self.workers.reports.fd]:
            is_registered = fd in self.selector.get_map()
            if not is_busy and not is_registered:
                self.selector.register(fd, selectors.EVENT_READ)
            elif is_registered and is_busy:
                self.selector.unregister(fd)
        self.next_poll = time_now + POLL_SECONDS if is_busy else None

    def pass_on(self):
        """Send output and reports. Returns whether more output may follow at once."""
        frames = self.link.frames
        # If the control node reads too slowly, the workers' pipes fill up, and the workers wait.
        # The reports of supervisors are read before the output and handled after it, so that a
        # worker's end comes last.
        reports = self.workers.reports.lines()
        is_busy = frames.is_full
        for stream in [] if is_busy else self.workers.all_streams():
            data = stream.read()
            while data:
                is_busy = True
                frames.send("log", data, rank=stream.rank, stream=stream.name)
                data = b"" if frames.is_full else stream.read()
        for report in reports:
            worker = self.workers.members[report["local_rank"]]
            if report["event"] == "start":
                worker.pid, worker.start_time = report["pid"], time.monotonic()
                frames.send("worker", rank=worker.rank, pid=worker.pid)
            else:
                worker.status, worker.peak = report["status"], report["peak"]
                self.on_exit(worker)
        return is_busy
