"""The guard: one event loop that starts launch, passes on its output and ends everything in time.

Single-threaded on purpose: a child gets its death signal when the thread that forked it ends.
"""

import enum
import json
import os
import pathlib
import selectors
import signal
import time

from contract import records
from contract.scratch import make_scratch, remove_scratch
from launcher.node import machine_lock, owner, sockets
from launcher.node.idle import Idleness
from launcher.node.link import BEAT, BadTask, Link, read_task
from launcher.node.machine import cause_of, identity
from launcher.node.processes import become_subreaper, end_descendants, reap
from launcher.node.records import INTERVAL, Recorder, Tail, exit_entry, leftovers
from launcher.node.stacks import Stacks
from launcher.node.workers import Output, Workers, describe, start_launch

PROTOCOL = 2
WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1)  # USR1: the process above has ended
MACHINE_STOP = 3.0  # seconds the workers get when systemd stops the guard (which itself has 4)


class Stage(enum.Enum):
    """The stage of a guard. It only ever moves down this list."""

    WAITING = "no task yet"
    RUNNING = "launch was started"
    FAILING = "a worker failed: the others of this node have until `kill_at` to say why"
    STOPPING = "the workers were asked to save and leave, and have until `kill_at`"
    DONE = "the loop ends; finish() kills what is left"


class Guard:
    """One attempt of one node."""

    def __init__(self, stdin, stdout, supervision, fallback_reason):
        self.link = Link(stdin, stdout)
        self.frames = self.link.frames
        self.supervision, self.fallback_reason = supervision, fallback_reason
        self.task, self.workers, self.recorder, self.launch = None, None, None, None
        self.output, self.tail, self.stacks, self.marks = None, None, None, []
        self.owner, self.present, self.idleness = None, "", None
        self.launch_status, self.reason, self.message = None, None, None
        self.folder, self.scratch, self.scratch_lock = None, None, None
        self.troubles, self.signals = set(), set()
        self.mono_start = time.monotonic()
        self.stage, self.kill_at = Stage.WAITING, None
        self.traffic, self.meet_by, self.next_look = None, None, 0.0
        self.next_beat = self.next_record = self.mono_start
        self.selector = selectors.DefaultSelector()

    # ---- the loop ----

    def run(self):
        """Live until everything is over. Returns the guard's own exit code."""
        self.listen()
        self.frames.send(
            "hello", protocol=PROTOCOL, way=self.supervision, why=self.fallback_reason, **identity()
        )
        while self.stage is not Stage.DONE:
            self.listen_to_reader()
            self.selector.select(self.patience())
            self.check_lease()
            self.read_orders()
            if self.stage is not Stage.DONE:
                self.look_after_children()
                self.on_time()
        self.finish()
        return 0

    def listen(self):
        """Be woken by orders and signals."""
        self.wake_reader, self.wake_writer = os.pipe()
        for fd in (self.wake_reader, self.wake_writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wake_writer)
        for number in WATCHED:
            signal.signal(number, lambda received, _frame: self.signals.add(received))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's; the control side decides
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(self.wake_reader, selectors.EVENT_READ)
        self.selector.register(self.link.orders.fd, selectors.EVENT_READ)

    def listen_to_reader(self):
        """Be woken when the control side takes more, while there is more."""
        known = self.frames.fd in self.selector.get_map()
        if self.frames.pending and not known:
            self.selector.register(self.frames.fd, selectors.EVENT_WRITE)
        elif known and not self.frames.pending:
            self.selector.unregister(self.frames.fd)

    def patience(self):
        """Seconds until something is due."""
        due = [self.next_beat, self.kill_at]
        if self.output is not None:
            due.append(self.output.next_poll)
        if self.recorder is not None:
            due.append(self.next_record)
        left = [moment - time.monotonic() for moment in due if moment is not None]
        return max(0.0, min([self.link.left(), *left]))

    def check_lease(self):
        """Before anything is read: orders that waited while this machine slept renew nothing."""
        if self.link.left() < 0:
            silence = "nothing was heard from the control machine for {:.0f} s"
            self.end("lease", silence.format(self.link.lease))

    def read_orders(self):
        """Carry out what has come from the control side."""
        for order in self.link.read():
            kind = order.get("type")
            if self.stage is Stage.WAITING and kind == "start":
                self.begin(order)
            elif kind == "stop":
                self.stop("stopped", float(order.get("grace", 20)))
            elif kind == "kill":
                self.end("killed")
        if self.link.lost:
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
        if signal.SIGTERM in self.signals:
            self.stop("guard", MACHINE_STOP)
        self.signals.clear()
        statuses = reap()
        self.note_ended(statuses)
        if self.output is not None and self.stage is not Stage.DONE:
            self.output.poll()
            self.note_orphans(statuses)
        if self.launch_status is not None:
            if self.stage is not Stage.DONE:
                # Launch ends after its workers: their reports have arrived and say why.
                self.output.pass_on()
            alone = self.isolation_warning() if self.launch_status == 0 else None
            whole = "alone" if alone else "finished"
            self.end(self.reason or (whole if self.launch_status == 0 else "failed"), alone)

    def note_ended(self, statuses):
        if self.launch is not None and self.launch.pid in statuses:
            self.launch_status = self.launch.returncode = statuses[self.launch.pid]

    def note_orphans(self, statuses):
        """Report the workers whose end reached this process, as their supervisor was killed. Launch
        takes seconds to notice that; where it was killed itself, its own end says why."""
        for worker in self.workers.running() if self.launch_status is None else []:
            if worker.pid in statuses:
                worker.status = statuses[worker.pid]
                self.worker_ended(worker)

    def on_time(self):
        """Do what the clock says is due."""
        now = time.monotonic()
        self.frames.flush()
        if now >= self.next_beat:
            self.beat()
            self.next_beat = now + (self.task.beat if self.task else BEAT)
            self.look_at_owner()
            self.look_for_group()
        if self.recorder is not None and now >= self.next_record:
            self.recorder.tick()
            self.record_stacks(now)
            self.tail.send(self.frames)
            self.next_record = max(self.next_record + INTERVAL, now)
        if self.kill_at is not None and now >= self.kill_at:
            self.end(self.reason)

    # ---- starting ----

    def begin(self, order):
        """Start launch."""
        try:
            self.task = read_task(order)
            self.link.lease = self.task.lease
            self.claim()
            self.folder = pathlib.Path(self.task.output).absolute() / "nodes" / self.task.host
            self.workers = Workers(self.task.ranks)
            self.output = Output(self.workers, self.link, self.selector, self.worker_ended)
            self.make_folder()
            self.scratch, self.scratch_lock = make_scratch()
            if self.task.measured:
                # Rank 0 reads the file and tells the others, so that all decide by the same facts.
                file = pathlib.Path(self.scratch, "measured.json")
                file.write_text(json.dumps(self.task.measured), encoding="utf-8")
                self.task.env["TANDEM_MEASURED"] = str(file)
            self.launch = start_launch(self.task, self.workers, self.mono_start, self.scratch)
            self.start_recorder()  # takes a moment, in which launch starts already
            self.watch_owner()
        except machine_lock.InUse as error:
            self.end("busy", str(error))
            return
        except (BadTask, OSError) as error:
            self.end("failed", cause_of(error))
            return
        self.stage = Stage.RUNNING
        self.traffic = sockets.RankTraffic(self.task.peers) if self.task.peers else None
        self.meet_by = time.monotonic() + self.task.meet_within
        self.next_record = time.monotonic() + INTERVAL
        self.output.poll()
        self.frames.send("started", pid=self.launch.pid, mono_start=self.mono_start)

    def claim(self):
        """Publish the run's name for others, and claim the machine unless it may be shared."""
        self.marks.append(machine_lock.claim(self.task.run, self.task.holder))
        if not self.task.shared:
            self.marks.append(machine_lock.claim_alone(self.task.run))

    def make_folder(self):
        """Make the folder for the node's files. A full disk is no reason not to run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.trouble("output folder", cause_of(error))

    def start_recorder(self):
        if self.task.record and self.folder.is_dir():
            self.recorder = Recorder(self.task, self.folder, self.trouble, self.workers.pids)
            self.tail = Tail(self.folder, self.task)
            self.stacks = Stacks(self.scratch, self.task.ask_after, self.last_active)
            self.idleness = Idleness(self.recorder.sampler)
            self.recorder.begin()

    # ---- while it runs ----

    def beat(self):
        running = [worker.rank for worker in self.workers.running()] if self.workers else []
        idle = self.idleness.seconds(time.monotonic()) if self.idleness is not None else None
        self.frames.send("beat", unix=time.time(), running=running, idle=idle)

    def record_stacks(self, now):
        """Where ranks stand that have been silent for long; all of them once one has failed, since
        those that go on may be why it did."""
        try:
            line = self.stacks.look(now, self.stage is Stage.FAILING)
        except OSError as error:
            self.trouble("stacks", cause_of(error))
            return
        if line is not None:
            self.recorder.write(line)

    def last_active(self):
        """Of each rank that lives its pid, and when it ended a step last; where none was timed,
        when it printed something."""
        found = {}
        for worker in self.workers.running():
            name = records.steps(worker.rank, self.task.attempt)
            last = self.tail.stepped.get(name) or self.workers.last_output(worker)
            found[worker.rank] = (worker.pid, last)
        return found

    def look_at_owner(self):
        """Tell at once when somebody begins to use this machine, or leaves it."""
        signs = self.owner.lines() if self.owner is not None else []
        if signs and signs[-1] != self.present:
            self.present = signs[-1]
            self.frames.send("owner", sign=self.present or None)
        if self.owner is not None and self.owner.over:
            self.look_again()

    def look_again(self):
        """The process that looks for the owner has ended: start it again, once. Where nobody can
        look, the machine counts as in use: its owner may be back, and must be obeyed."""
        self.owner.stop()
        self.owner = None
        if "owner" not in self.troubles:
            self.trouble("owner", "what looked whether its owner is back ended, and begins again")
            try:
                self.watch_owner()
                return
            except OSError as error:
                cause = cause_of(error)
        else:
            cause = "it ended twice"
        self.trouble("owner's sign", "nobody can look whether its owner is back: " + cause)
        self.present = self.task.owner_signs[0]
        self.frames.send("owner", sign=self.present)

    def watch_owner(self):
        if self.task.owner_signs:
            self.owner = owner.watch(self.task.owner_signs, self.task.away_dir)

    def trouble(self, what, message):
        """Report something that does not end the run, once."""
        if what not in self.troubles:
            self.troubles.add(what)
            self.frames.send("trouble", what=what, message=message)

    def look_for_group(self):
        """Note which ranks meet the others, and whether they send them anything: a script may never
        ask for a process group, or go round its sums."""
        now = time.monotonic()
        if self.traffic is None or now < self.next_look:
            return
        try:
            self.traffic.look(self.workers.pids())
        except OSError:  # this kernel does not say who is connected to whom
            self.traffic = None
            return
        if not self.not_met():  # what is left to see is what they send, if anything
            train = self.traffic.total()[0] > sockets.SENT_MOST
            self.next_look = now + (float("inf") if train else self.task.meet_within / 6)
        signs, alone = {}, self.isolation_warning()
        if alone:
            signs["alone"] = self.not_met()
            self.trouble("group", alone)
        received = self.traffic.only_received(self.task.meet_within)
        if received:
            signs["only_received"] = received
            self.trouble("sums", self.apart(received))
        if self.recorder is not None:
            self.recorder.sampler.signs = signs

    def not_met(self):
        """The ranks that have met no other; none where that is not known."""
        met = self.traffic.met if self.traffic is not None else set(self.task.ranks)
        return [rank for rank in self.task.ranks if rank not in met]

    def isolation_warning(self):
        """What is said of ranks that have met no other for long; None where all have."""
        alone = self.not_met()
        if not alone or time.monotonic() < self.meet_by:
            return None
        told = "{} met no other in {:.0f} s: a script that never calls torch.distributed."
        told += "init_process_group, or starts ranks of its own, trains on each machine by itself"
        ranks = "rank{} {}".format("s" * (len(alone) > 1), ", ".join(map(str, alone)))
        return told.format(ranks, self.task.meet_within)

    def apart(self, received):
        said = "its ranks received {:.1f} MB of the others, and in {:.0f} s since then sent them "
        said += "less than {} kB: no gradients were summed so far. Unless the first step is yet to "
        said += "come, or gradients are to be summed later, each machine trains a model of its own"
        return said.format(received / 1e6, self.task.meet_within, sockets.SENT_MOST >> 10)

    def worker_ended(self, worker):
        """Report it; the first failure starts the clock for the rest of the node."""
        failed = worker.status != 0
        self.workers.describe_ending(worker)
        worker.first = failed and self.stage is Stage.RUNNING
        self.frames.send("worker_exit", **describe(worker))
        if not failed and self.recorder is not None:
            self.recorder.sampler.finished.append(worker.rank)
        if worker.first:
            self.stage, self.reason = Stage.FAILING, "failed"
            self.kill_at = time.monotonic() + self.task.fail_grace

    # ---- ending ----

    def stop(self, reason, grace):
        """Ask the workers to save and leave; end them when `grace` seconds are over. Asking again
        gives them no more time. Where a worker has failed, the others may still save."""
        if self.stage in (Stage.STOPPING, Stage.DONE):
            return
        self.reason, self.stage = self.reason or reason, Stage.STOPPING
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
        """Leave the loop; finish() does the rest. The first reason is kept."""
        if self.stage is not Stage.DONE:
            self.reason = self.reason or reason
            self.message = message
        self.stage = Stage.DONE

    def finish(self):
        """End what is left, write the files, send what was left."""
        if self.owner is not None:
            self.owner.stop()
        spare = self.recorder.helper_pids() if self.recorder is not None else []
        ended, left, statuses = end_descendants(spare)
        self.note_ended(statuses)
        if self.output is not None:
            self.output.pass_on_the_rest()
        members = self.workers.members if self.workers is not None else []
        entry = exit_entry(self.mono_start, self.launch_status, members)
        if self.recorder is not None:
            self.recorder.end(entry, {str(worker.rank): worker.peak for worker in members})
            self.tail.rest(self.frames)
        if left:
            self.message = "processes hang in the kernel and cannot be ended: {}".format(left)
        processes = leftovers(ended, left)
        self.frames.send(
            "exit", reason=self.reason, message=self.message, **dict(entry, **processes)
        )
        self.link.drain()
        if self.scratch is not None:
            remove_scratch(self.scratch, self.scratch_lock)


def serve(supervision, fallback_reason):
    """Be the guard of this process's stdin and stdout."""
    become_subreaper()
    return Guard(0, 1, supervision, fallback_reason).run()
