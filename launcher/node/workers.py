"""The workers of this node as the guard sees them: how launch starts them, what they print on its
way to the control side, and how they ended."""

import collections
import fcntl
import os
import pathlib
import resource
import selectors
import signal
import subprocess
import sys
import time

from launcher.node.errors import describe_ending, lines_of
from launcher.node.link import LineReader
from launcher.node.machine import IN_JOB, PATH, who
from launcher.node.processes import decode_status, die_with_parent

OPEN_FILES = 65536  # data loaders pass tensors as descriptors; 1024, the usual limit, is too few
POLL = 0.05  # seconds between two reads of output that keeps coming: one read takes many lines
CHUNK = 1 << 16
PIPE_SIZE = 1 << 20  # the most an ordinary user may have: room for a burst between two looks
# What is kept of each stream to find the error in: rich's boxes alone may have 100 KiB.
TAIL, PIECES = 1 << 18, 4000  # bytes; reads


class Stream:
    """One pipe for output. The guard keeps both ends: there is no end of file while it lives."""

    def __init__(self, rank, name):
        self.rank, self.name = rank, name
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.pieces, self.kept = collections.deque(), 0  # what came last: (when, bytes)
        self.last = None  # when something came
        enlarge(self.writer)

    def read(self):
        """What has come since the last look, at most CHUNK bytes; empty when there is nothing."""
        try:
            data = os.read(self.reader, CHUNK)
        except BlockingIOError:
            return b""
        self.last = time.monotonic()
        self.pieces.append((self.last, data))
        self.kept += len(data)
        while self.kept > TAIL or len(self.pieces) > PIECES:
            self.kept -= len(self.pieces.popleft()[1])
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
        self.rank, self.pid, self.status = rank, None, None
        self.exception, self.error_lines, self.last_line = None, [], None
        self.started = None
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
                worker.pid, worker.started = line["pid"], time.monotonic()
            else:
                worker.status, worker.peak = line["status"], line["peak"]
            found.append((line["event"], worker))
        return found

    def describe_ending(self, worker):
        """Note what its output says about its end."""
        streams = self.streams[self.members.index(worker)]
        ending = describe_ending([lines_of(each.pieces) for each in streams], worker.status != 0)
        worker.exception, worker.error_lines, worker.last_line = ending

    def running(self):
        """The workers that are alive."""
        return [worker for worker in self.members if worker.running]

    def pids(self):
        """The pid of each rank that is alive."""
        return {worker.rank: worker.pid for worker in self.running()}

    def last_output(self, worker):
        """When it printed last, or started."""
        streams = self.streams[self.members.index(worker)]
        return max([worker.started, *(one.last for one in streams if one.last is not None)])


def describe(worker):
    """The fields of a `worker_exit` frame."""
    details = {"error_lines": worker.error_lines, "last_line": worker.last_line}
    return dict(worker.outcome(), rank=worker.rank, first=worker.first, **details)


def start_launch(task, workers, mono_start, scratch):
    """Start it in a session of its own: a signal to its group spares the guard. `scratch` is a
    folder for temporary files that is the run user's alone. Raises OSError."""
    guard = os.getpid()
    stdout, stderr = workers.launch
    return subprocess.Popen(
        task.argv,
        cwd=task.cwd,
        env=environment(task, workers, mono_start, scratch),
        stdin=subprocess.DEVNULL,
        stdout=stdout.writer,
        stderr=stderr.writer,
        start_new_session=True,
        preexec_fn=lambda: prepare_child(guard),
    )


def environment(task, workers, mono_start, scratch):
    """The whole environment of launch. Only HOME comes from the guard's own, so no shell startup
    file matters; in a Slurm job all of it does, with what its modules have set."""
    name, home = who()
    here = pathlib.Path(__file__).resolve().parent
    values = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", home)}
    values.update(os.environ if IN_JOB in os.environ else {})
    values.update(USER=name, LOGNAME=name, TMPDIR=scratch)
    values.update(task.env)
    values.update(TANDEM_NODE=task.host, TANDEM_ATTEMPT=str(task.attempt))
    values.update(TANDEM_GUARD_MONO=repr(mono_start))
    values.update(PYTHON_EXEC=str(here / "worker"), TANDEM_GUARD_PIPES=workers.address())
    values.update(TANDEM_WORKER_PYTHON=task.argv[0], TANDEM_GUARD_PYTHON=sys.executable)
    values.update(TANDEM_STACKS_FOLDER=scratch)
    return values


def prepare_child(guard):
    """In the forked child, before launch takes over."""
    die_with_parent(signal.SIGKILL, guard)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class Output:
    """Passes output and news on; `ended(worker)` is called at the end of each worker."""

    def __init__(self, workers, link, selector, ended):
        self.workers, self.link, self.selector, self.ended = workers, link, selector, ended
        self.next_poll = None  # None: woken by the next byte

    def poll(self):
        """Every POLL seconds while there is something, else when woken."""
        now = time.monotonic()
        if self.next_poll is not None and now < self.next_poll:
            return
        busy = self.pass_on()
        self.listen(not busy)
        self.next_poll = now + POLL if busy else None

    def listen(self, wanted):
        """Be woken by output, or not."""
        readers = [stream.reader for stream in self.workers.all_streams()]
        for fd in [*readers, self.workers.reports.fd]:
            known = fd in self.selector.get_map()
            if wanted and not known:
                self.selector.register(fd, selectors.EVENT_READ)
            elif known and not wanted:
                self.selector.unregister(fd)

    def pass_on(self):
        """Send news, and a worker's output before its end. Returns whether more may follow."""
        frames = self.link.frames
        news = self.workers.news()
        busy = frames.full or self.pass_on_output()
        for event, worker in news:
            if event == "start":
                frames.send("worker", rank=worker.rank, pid=worker.pid)
            else:
                self.ended(worker)
        return busy

    def pass_on_output(self):
        """Send what the workers wrote. Returns whether there was anything."""
        frames, found = self.link.frames, False
        for stream in self.workers.all_streams():
            data = stream.read()
            while data:
                found = True
                frames.send("log", data, rank=stream.rank, stream=stream.name)
                data = b"" if frames.full else stream.read()
        return found

    def pass_on_the_rest(self):
        """All writers are dead: what is in the pipes now is the rest."""
        self.pass_on()
        while self.link.frames.full and self.link.deliverable():
            self.link.wait_for_reader()
            self.pass_on()
