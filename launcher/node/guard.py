"""The guard: one event loop that starts launch, passes on its output, ends everything in time.

Single-threaded on purpose: the death signal of a child follows the thread that forked it.
"""

import os
import pathlib
import select
import selectors
import signal
import time

from launcher.node import exits, wardens
from launcher.node.frames import FrameWriter, LineReader
from launcher.node.launch import start_launch
from launcher.node.machine import boottime, cause_of, disk_free, identity
from launcher.node.processes import become_subreaper, end_descendants, reap
from launcher.node.recorder import Recorder
from launcher.node.task import DEFAULTS, BadTask, read_task
from launcher.node.workers import Workers, describe

PROTOCOL = 1
SAMPLE = 1.0  # seconds between two samples of the recorders
LOOK = 0.05  # seconds between two looks at output that keeps coming: one read takes many lines
MACHINE_STOP = 3.0  # seconds the workers get when systemd stops the guard (which itself has 4)


class Guard:
    """One attempt of one node. `stage` goes waiting -> running -> (stopping ->) done."""

    def __init__(self, stdin, stdout, way, why):
        self.frames, self.orders = FrameWriter(stdout), LineReader(stdin)
        self.way, self.why = way, why
        self.task, self.workers, self.recorder, self.launch = None, None, None, None
        self.launch_status, self.reason, self.message = None, None, None
        self.folder, self.troubles, self.signals = None, set(), set()
        self.mono_start = time.monotonic()
        self.stage, self.kill_at = "waiting", None
        self.renewed = boottime()
        self.next_beat = self.next_sample = self.mono_start
        self.next_look = None
        self.selector = selectors.DefaultSelector()

    # ---- the loop ----

    def run(self):
        """Live until everything is over. Returns the guard's own exit code."""
        self.listen()
        self.frames.send("hello", protocol=PROTOCOL, way=self.way, why=self.why, **identity())
        while self.stage != "done":
            self.listen_to_reader()
            self.selector.select(self.patience())
            self.check_lease()
            self.read_orders()
            if self.stage != "done":
                self.look_after_children()
                self.on_time()
        self.finish()
        return 0

    def listen(self):
        """Get woken by orders and by signals."""
        wake_reader, self.wake_writer = os.pipe()
        self.wake_reader = wake_reader
        for fd in (wake_reader, self.wake_writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wake_writer)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda received, _frame: self.signals.add(received))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, wardens.WATCHED)
        for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's; the control side decides
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(wake_reader, selectors.EVENT_READ)
        self.selector.register(self.orders.fd, selectors.EVENT_READ)

    def listen_to_reader(self):
        """Be woken when the control side takes more, while there is more."""
        known = self.frames.fd in self.selector.get_map()
        if self.frames.pending and not known:
            self.selector.register(self.frames.fd, selectors.EVENT_WRITE)
        elif known and not self.frames.pending:
            self.selector.unregister(self.frames.fd)

    def patience(self):
        """Seconds until something is due."""
        lease_left = self.renewed + self.lease() - boottime()
        due = [self.next_beat, self.kill_at, self.next_look]
        if self.task is not None and self.task.record:
            due.append(self.next_sample)
        left = [moment - time.monotonic() for moment in due if moment is not None]
        return max(0.0, min([lease_left, *left]))

    def lease(self):
        return self.task.lease if self.task is not None else DEFAULTS["lease"]

    def check_lease(self):
        """Before anything is read: orders that waited while this machine slept renew nothing."""
        if boottime() - self.renewed > self.lease():
            silence = "nothing was heard from the control machine for {:.0f} s".format(self.lease())
            self.end("lease", silence)

    def read_orders(self):
        """Carry out what has come from the control side."""
        for order in self.orders.lines():
            self.renewed = boottime()
            kind = order.get("type")
            if self.stage == "waiting" and kind == "start":
                self.begin(order)
            elif kind == "stop" and self.stage in ("waiting", "running"):
                self.stop("stopped", float(order.get("grace", 20)))
            elif kind == "kill":
                self.end("killed")
        if self.orders.ended or self.frames.broken:
            self.end("eof", "the connection to the control machine ended")

    def look_after_children(self):
        """Signals, ended processes, and what the workers wrote."""
        while True:
            try:
                os.read(self.wake_reader, 512)
            except BlockingIOError:
                break
        if signal.SIGUSR1 in self.signals:
            self.end("guard", "one of the guard's wardens was killed")
        if signal.SIGTERM in self.signals and self.stage in ("waiting", "running"):
            self.stop("guard", MACHINE_STOP)
        self.signals.clear()
        self.note_ended(reap())
        if self.workers is not None and self.stage != "done":
            self.look_at_workers()
        if self.launch_status is not None:
            if self.stage != "done":
                self.pass_on()  # launch ends after its workers: their news has come, and says why
            self.end(self.reason or ("finished" if self.launch_status == 0 else "failed"))

    def note_ended(self, statuses):
        if self.launch is not None and self.launch.pid in statuses:
            self.launch_status = self.launch.returncode = statuses[self.launch.pid]

    def on_time(self):
        """What is due by the clock."""
        now = time.monotonic()
        self.frames.flush()
        if now >= self.next_beat:
            self.beat()
            self.next_beat = now + (self.task.beat if self.task else DEFAULTS["beat"])
        if self.recorder is not None and now >= self.next_sample:
            self.recorder.sample()
            self.next_sample = max(self.next_sample + SAMPLE, now)
        if self.kill_at is not None and now >= self.kill_at:
            self.end(self.reason)

    # ---- starting ----

    def begin(self, order):
        """Start launch."""
        try:
            self.task = read_task(order)
            self.folder = pathlib.Path(self.task.output).absolute() / "nodes" / self.task.host
            self.workers = Workers(self.task.ranks)
            self.make_folder()
            self.start_recorder()
            self.launch = start_launch(self.task, self.workers, self.mono_start)
        except (BadTask, OSError) as error:
            self.end("failed", cause_of(error))
            return
        self.stage = "running"
        self.next_sample = time.monotonic() + SAMPLE
        self.look_at_workers()
        self.frames.send("started", pid=self.launch.pid, mono_start=self.mono_start)

    def make_folder(self):
        """Where the node's files go. A full disk is no reason not to run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.trouble("output folder", cause_of(error))

    def start_recorder(self):
        if self.task.record and self.folder.is_dir():
            self.recorder = Recorder(self.task, self.folder, self.trouble)
            self.recorder.start()

    # ---- while it runs ----

    def beat(self):
        running = [worker.rank for worker in self.workers.running()] if self.workers else []
        free = disk_free(self.folder) if self.folder is not None else None
        self.frames.send("beat", unix=time.time(), running=running, disk_free=free)

    def trouble(self, what, message):
        """Report something that does not end the run, once."""
        if what not in self.troubles:
            self.troubles.add(what)
            self.frames.send("trouble", what=what, message=message)

    def look_at_workers(self):
        """Pass on output and news: every LOOK seconds while there is any, else when woken."""
        now = time.monotonic()
        if self.next_look is not None and now < self.next_look:
            return
        busy = self.pass_on()
        self.listen_to_workers(not busy)
        self.next_look = now + LOOK if busy else None

    def listen_to_workers(self, wanted):
        """Be woken by output, or not."""
        readers = [stream.reader for stream in self.workers.all_streams()]
        for fd in [*readers, self.workers.reports.fd]:
            known = fd in self.selector.get_map()
            if wanted and not known:
                self.selector.register(fd, selectors.EVENT_READ)
            elif known and not wanted:
                self.selector.unregister(fd)

    def pass_on(self):
        """Send news and output, a worker's output before its end. Tells whether more may follow."""
        news = self.workers.news()
        busy = self.frames.full or self.pass_on_output()
        for event, worker in news:
            if event == "start":
                self.frames.send("worker", rank=worker.rank, pid=worker.pid)
            else:
                self.worker_ended(worker)
        return busy

    def pass_on_output(self):
        """Send what the workers wrote. Returns whether there was anything."""
        found = False
        for stream in self.workers.all_streams():
            data = stream.read()
            while data:
                found = True
                self.frames.send("log", data, rank=stream.rank, stream=stream.name)
                data = b"" if self.frames.full else stream.read()
        return found

    def worker_ended(self, worker):
        """Report it; the first failure starts the clock for the rest of the node."""
        failed = worker.status != 0
        self.workers.name_exception(worker)
        worker.first = failed and self.reason is None
        self.frames.send("worker_exit", **describe(worker))
        if worker.first:
            self.reason = "failed"
            self.kill_at = time.monotonic() + self.task.fail_grace

    # ---- ending ----

    def stop(self, reason, grace):
        """Ask the workers to save and leave; end them when `grace` seconds are over."""
        self.reason, self.stage = self.reason or reason, "stopping"
        self.kill_at = time.monotonic() + grace
        if self.workers is None:
            self.end(reason)
            return
        running = [worker.pid for worker in self.workers.running()]
        for pid in running or [self.launch.pid]:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue

    def end(self, reason, message=None):
        """Leave the loop; finish() does the rest. The first reason stays."""
        if self.stage != "done":
            self.reason = self.reason or reason
            self.message = message
        self.stage = "done"

    def finish(self):
        """End what is left, write the files, send the proof."""
        spare = self.recorder.pids() if self.recorder is not None else []
        ended, left, statuses = end_descendants(spare)
        self.note_ended(statuses)
        if self.workers is not None:
            self.look_one_last_time()
        if self.recorder is not None:
            self.recorder.stop()
        members = self.workers.members if self.workers is not None else []
        entry = exits.entry(self.mono_start, self.launch_status, members)
        try:
            exits.write(self.folder, self.task, entry)
        except OSError as error:
            self.trouble("exit.json", cause_of(error))
        if left:
            self.message = "processes hang in the kernel and cannot be ended: {}".format(left)
        proof = exits.proof(ended, left)
        self.frames.send("exit", reason=self.reason, message=self.message, **dict(entry, **proof))
        self.drain()

    def look_one_last_time(self):
        """All writers are dead: what is in the pipes now is the rest."""
        self.pass_on()
        while self.frames.full and self.deliverable():
            self.wait_for_reader()
            self.pass_on()

    def deliverable(self):
        """Whether there is a reader to wait for."""
        alive = boottime() - self.renewed <= self.lease()
        return bool(self.frames.pending) and alive and not self.orders.ended

    def wait_for_reader(self):
        """Let a slow reader take some more."""
        select.select([], [self.frames.fd], [], SAMPLE)
        if self.orders.lines():
            self.renewed = boottime()
        self.frames.flush()

    def drain(self):
        """Deliver the last frames as long as the control side shows that it lives."""
        while self.deliverable():
            self.wait_for_reader()


def serve(way, why):
    """Be the guard of this process's stdin and stdout."""
    become_subreaper()
    return Guard(0, 1, way, why).run()
