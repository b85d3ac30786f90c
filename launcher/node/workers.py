"""The workers of this node as the guard sees them: their output and how they ended."""

import fcntl
import os
import re

from launcher.node.frames import LineReader
from launcher.node.processes import decode_status

CHUNK = 1 << 16
PIPE_SIZE = 1 << 20  # the most an ordinary user may have: room for a burst between two looks
TAIL = 16384  # bytes of stderr that are kept to find the exception
PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # newer torch puts it before the lines of a traceback
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(:|$)")


class Stream:
    """One pipe for output. The guard keeps both ends: there is no end of file while it lives."""

    def __init__(self, rank, name):
        self.rank, self.name = rank, name
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.tail = b""
        enlarge(self.writer)

    def read(self):
        """What has come since the last look, at most CHUNK bytes; empty when there is nothing."""
        try:
            data = os.read(self.reader, CHUNK)
        except BlockingIOError:
            return b""
        if self.name == "stderr":
            self.tail = (self.tail + data)[-TAIL:]
        return data


def enlarge(fd):
    """A larger pipe, where the kernel allows it."""
    try:
        fcntl.fcntl(fd, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_SIZE)
    except OSError:
        return


class Worker:
    """One rank: `pid` None until it starts, `status` None until it ends; `peak` is the memory that
    it had at most, in bytes."""

    def __init__(self, rank):
        self.rank, self.pid, self.status, self.exception = rank, None, None, None
        self.peak = None
        self.first = False

    @property
    def running(self):
        return self.pid is not None and self.status is None

    def outcome(self):
        """Its entry in the record's last line. A worker that said nothing was ended with its
        supervisor."""
        if self.status is not None:
            code, name = decode_status(self.status)
        else:
            code, name = None, "SIGKILL" if self.pid else None
        return {"exit_code": code, "signal": name, "exception": self.exception}


class Workers:
    """All ranks of the node, launch's own output, and the pipe on which the supervisors report."""

    def __init__(self, ranks):
        self.members = [Worker(rank) for rank in ranks]
        self.launch = [Stream(None, "stdout"), Stream(None, "stderr")]
        self.streams = [[Stream(rank, "stdout"), Stream(rank, "stderr")] for rank in ranks]
        reader, self.control = os.pipe()
        self.reports = LineReader(reader)

    def all_streams(self):
        """Launch's streams, then each rank's."""
        return self.launch + [stream for pair in self.streams for stream in pair]

    def address(self):
        """How supervisors find the pipes: guard's pid, control pipe, `stdout,stderr` by rank."""
        pairs = ["{},{}".format(out.writer, err.writer) for out, err in self.streams]
        return ":".join([str(os.getpid()), str(self.control), *pairs])

    def news(self):
        """The supervisors' reports since the last look: [(event, worker)], states up to date."""
        found = []
        for line in self.reports.lines():
            worker = self.members[line["local_rank"]]
            if line["event"] == "start":
                worker.pid = line["pid"]
            else:
                worker.status, worker.exception = line["status"], line["exception"]
                worker.peak = line["peak"]
            found.append((line["event"], worker))
        return found

    def name_exception(self, worker):
        """Where the worker failed and left no error file, take what its traceback says."""
        if worker.status != 0 and worker.exception is None:
            _, stderr = self.streams[self.members.index(worker)]
            worker.exception = exception_in(stderr.tail)

    def running(self):
        """The workers that are alive."""
        return [worker for worker in self.members if worker.running]

    def pids(self):
        """The pid of each rank that is alive."""
        return {worker.rank: worker.pid for worker in self.running()}


def exception_in(tail):
    """The last line of the last traceback in the end of a stderr, or None."""
    lines = [PREFIX.sub("", line) for line in tail.decode(errors="replace").splitlines()]
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    if not starts:
        return None
    ends = [line for line in lines[starts[-1] + 1 :] if EXCEPTION.match(line)]
    return ends[0][:400] if ends else None


def describe(worker):
    """The fields of a `worker_exit` frame."""
    return dict(worker.outcome(), rank=worker.rank, first=worker.first)
