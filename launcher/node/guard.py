"""Runs one attempt on one node. The guard is an event loop that starts launch
(torch.distributed.run), sends the output of the workers to the control node, and ends all processes
in time. start.py calls `serve`. docs/guard-protocol.md defines the frames and the orders.

The guard has one thread on purpose: a child gets its death signal when the thread that forked it
ends. No call in the loop waits for another process, because the lease may end at any time.
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
from launcher.node.records import INTERVAL, Recorder, Tail, exit_entry, list_leftovers
from launcher.node.stacks import Stacks
from launcher.node.workers import Output, Workers, start_launch

PROTOCOL = 2
# SIGUSR1 comes when the process above the guard has ended.
WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1)
# The workers get this time when systemd stops the guard. The guard itself has 4 s (TimeoutStopSec).
MACHINE_STOP_SECONDS = 3.0
# A fraction of the task's `meet_within`: how often the connections are checked once all ranks have
# met, and how long a successful run has to last before ranks that did not meet are reported.
CHECK_FRACTION = 1 / 6


class Stage(enum.Enum):
    """Names the stages of a guard, in their order. A guard may skip stages, but never goes back."""

    WAITING = "no task yet"
    RUNNING = "launch was started"
    FAILING = "a worker failed: the other workers of this node have until `kill_at` to say why"
    STOPPING = "the workers were asked to save and leave, and have until `kill_at`"
    DONE = "the loop ends; finish() kills what is left"


class Guard:
    """Runs one attempt. `supervision`: service or wardens (start.py). `fallback_reason`: why the
    guard is not a service, or None. Times are of the monotonic clock, in seconds."""

    def __init__(self, stdin, stdout, supervision, fallback_reason):
        self.link = Link(stdin, stdout)
        self.frames = self.link.frames
        self.supervision, self.fallback_reason = supervision, fallback_reason
        self.selector = selectors.DefaultSelector()
        self.mono_start = time.monotonic()
        self.stage, self.kill_at = Stage.WAITING, None
        # start_task makes these. `claims`: sockets whose names show this run to other guards
        # (machine_lock.py). `scratch`: a private folder for temporary files.
        self.task, self.workers, self.output, self.launch = None, None, None, None
        self.folder, self.scratch, self.scratch_lock, self.claims = None, None, None, []
        # start_task makes these, too, unless the task wants no records.
        self.recorder, self.tail, self.stacks, self.idleness = None, None, None, None
        # The process that watches for the owner, and the sign of the owner (SIGNS in owned.py) that
        # was sent last ("" for none).
        self.owner_watch, self.owner_sign = None, ""
        # The connections of the ranks, the time at which all ranks should have met, and the time of
        # the next check of the connections.
        self.traffic, self.meet_by, self.next_group_check = None, None, 0.0
        # Launch's wait status, and the reason and the message of the exit frame.
        self.launch_status, self.reason, self.message = None, None, None
        # The subjects of reported problems, and the signals since the last turn of the loop.
        self.troubles, self.signals = set(), set()
        self.next_beat = self.next_record = self.mono_start

    # ---- the loop ----

    def run(self):
        """Run the loop until the attempt is over, and end all processes. Returns the exit code."""
        self.register_wakeups()
        self.frames.send(
            "hello", protocol=PROTOCOL, way=self.supervision, why=self.fallback_reason, **identity()
        )
        while self.stage is not Stage.DONE:
            # Wake up for a writable stdout only while frames wait: an idle pipe is always writable.
            is_registered = self.frames.fd in self.selector.get_map()
            if self.frames.pending and not is_registered:
                self.selector.register(self.frames.fd, selectors.EVENT_WRITE)
            elif is_registered and not self.frames.pending:
                self.selector.unregister(self.frames.fd)
            # Sleep until the next deadline, unless an order, a signal or output comes first.
            deadlines = [self.next_beat, self.kill_at]
            if self.output is not None:
                deadlines.append(self.output.next_poll)
            if self.recorder is not None:
                deadlines.append(self.next_record)
            time_now = time.monotonic()
            seconds = [deadline - time_now for deadline in deadlines if deadline is not None]
            self.selector.select(max(0.0, min([self.link.seconds_left(), *seconds])))
            # The lease is checked before the orders are read: orders that waited in the pipe while
            # this machine slept must not renew the lease.
            if self.link.seconds_left() < 0:
                silence = "nothing was heard from the control node for {:.0f} s"
                self.leave_loop("lease", silence.format(self.link.lease))
            self.read_orders()
            if self.stage is not Stage.DONE:
                self.handle_children()
                self.do_due_work()
        self.finish()
        return 0

    def register_wakeups(self):
        """Let orders and signals wake the loop. Output.poll adds the workers' pipes."""
        # Each signal writes a byte into this pipe. Without the pipe, select() would continue to
        # wait after the signal's handler.
        self.wake_reader, self.wake_writer = os.pipe()
        for fd in (self.wake_reader, self.wake_writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wake_writer)
        for number in WATCHED:
            signal.signal(number, lambda received, _frame: self.signals.add(received))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        # Only the control node ends a run: the signals of a terminal must not.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(self.wake_reader, selectors.EVENT_READ)
        self.selector.register(self.link.orders.fd, selectors.EVENT_READ)

    def read_orders(self):
        """Carry out the orders that have come from the control node."""
        for order in self.link.read_orders():
            kind = order.get("type")
            if self.stage is Stage.WAITING and kind == "start":
                self.start_task(order)
            elif kind == "stop":
                self.stop_workers("stopped", float(order.get("grace", 20)))
            elif kind == "kill":
                self.leave_loop("killed")
        if self.link.is_lost:
            self.leave_loop("eof", "the connection to the control node ended")

    def handle_children(self):
        """Handle signals and ended processes, and pass on what the workers wrote."""
        # Empty the pipe of register_wakeups: its bytes only woke the loop.
        while True:
            try:
                os.read(self.wake_reader, 512)
            except BlockingIOError:
                break
        # A signal that comes from here on is for the next turn; clear() would lose it.
        signals, self.signals = self.signals, set()
        if signal.SIGUSR1 in signals:
            self.leave_loop("guard", "one of the guard's wardens was killed")
        if signal.SIGTERM in signals:
            self.stop_workers("guard", MACHINE_STOP_SECONDS)
        statuses = reap()
        self.note_launch_end(statuses)
        if self.output is not None and self.stage is not Stage.DONE:
            self.output.poll()
            # A worker whose supervisor was killed becomes a child of the guard. Launch takes
            # seconds to notice that. If launch itself has ended, its end is the reason instead.
            for worker in self.workers.running():
                if self.launch_status is None and worker.pid in statuses:
                    worker.status = statuses[worker.pid]
                    self.report_worker_end(worker)
        if self.launch_status is not None:
            if self.stage is not Stage.DONE:
                # Launch ends after its workers, so the supervisors' reports have arrived. Read
                # them first: the first failure of a worker gives the reason.
                self.output.pass_on()
            # A success counts only if the ranks met: otherwise the reason is `alone`. In a run that
            # is shorter than meet_within, the ranks may have met between two checks. So such a run
            # is `finished`, and only gets the warning.
            reason, warning = "failed", None
            if self.launch_status == 0:
                reason, warning = "finished", self.isolation_warning(CHECK_FRACTION)
            if warning and time.monotonic() >= self.meet_by:
                reason = "alone"
            elif warning:
                self.report_trouble("group", warning)
            self.leave_loop(reason, warning)

    def note_launch_end(self, statuses):
        """Note launch's wait status if launch is among the ended processes `statuses` (by pid)."""
        if self.launch is not None and self.launch.pid in statuses:
            # reap() has already waited for launch, so Popen gets the status here.
            self.launch_status = self.launch.returncode = statuses[self.launch.pid]

    def do_due_work(self):
        """Send the beat, write the records and end the grace period, each when it is due."""
        time_now = time.monotonic()
        self.frames.flush()
        if time_now >= self.next_beat:
            running = [worker.rank for worker in self.workers.running()] if self.workers else []
            idle = self.idleness.seconds(time_now) if self.idleness is not None else None
            self.frames.send("beat", unix=time.time(), running=running, idle=idle)
            self.next_beat = time_now + (self.task.beat if self.task else BEAT)
            self.check_owner()
            self.check_group()
        if self.recorder is not None and time_now >= self.next_record:
            self.recorder.tick()
            # Record the stacks of ranks that have been silent for long. After a failure all ranks
            # are asked: a rank that continues may have caused it.
            try:
                line = self.stacks.look(time_now, self.stage is Stage.FAILING)
            except OSError as error:
                self.report_trouble("stacks", cause_of(error))
                line = None
            if line is not None:
                self.recorder.write(line)
            self.tail.send(self.frames)
            # Each line is due an interval after the line before was due, so that delays do not add
            # up. A loop that was late by more than that omits the missed lines.
            self.next_record = max(self.next_record + INTERVAL, time_now)
        if self.kill_at is not None and time_now >= self.kill_at:
            self.leave_loop(self.reason)

    # ---- starting ----

    def start_task(self, order):
        """Claim the machine, and start launch and the recorder. `order`: the line of type `start`
        (link.read_task). Leaves the loop if the start fails."""
        try:
            self.task = read_task(order)
            self.link.lease = self.task.lease
            # The first claim shows the run to other users. The second keeps other runs away.
            self.claims.append(machine_lock.claim(self.task.run, self.task.holder))
            if not self.task.shared:
                self.claims.append(machine_lock.claim_alone(self.task.run))
            self.folder = pathlib.Path(self.task.output).absolute() / "nodes" / self.task.host
            self.workers = Workers(self.task.ranks)
            self.output = Output(self.workers, self.link, self.selector, self.report_worker_end)
            # The run starts even if a full disk takes no folder for the node's files.
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self.report_trouble("output folder", cause_of(error))
            self.scratch, self.scratch_lock = make_scratch()
            if self.task.measured:
                # Rank 0 reads this file and sends it to all ranks, so that all decide alike.
                file = pathlib.Path(self.scratch, "measured.json")
                file.write_text(json.dumps(self.task.measured), encoding="utf-8")
                self.task.env["TANDEM_MEASURED"] = str(file)
            self.launch = start_launch(self.task, self.workers, self.mono_start, self.scratch)
            # The recorder takes a moment to start, so launch is started first.
            if self.task.record and self.folder.is_dir():
                self.recorder = Recorder(
                    self.task, self.folder, self.report_trouble, self.workers.pids
                )
                self.tail = Tail(self.folder, self.task)
                self.stacks = Stacks(self.scratch, self.task.ask_after, self.find_last_activity)
                self.idleness = Idleness(self.recorder.sampler)
                self.recorder.begin()
            self.watch_owner()
        except machine_lock.InUse as error:
            self.leave_loop("busy", str(error))
            return
        except (BadTask, OSError) as error:
            self.leave_loop("failed", cause_of(error))
            return
        self.stage = Stage.RUNNING
        self.traffic = sockets.RankTraffic(self.task.peers) if self.task.peers else None
        self.meet_by = time.monotonic() + self.task.meet_within
        self.next_record = time.monotonic() + INTERVAL
        self.output.poll()
        self.frames.send("started", pid=self.launch.pid, mono_start=self.mono_start)

    # ---- while it runs ----

    def find_last_activity(self):
        """Return {rank: (pid, when it was last active, its counted sums)} of the ranks that live. A
        rank is active when it ends a step or enters a sum. A rank that records neither is active
        when it prints."""
        activity = {}
        for worker in self.workers.running():
            sums = worker.read_sums()
            name = records.steps(worker.rank, self.task.attempt)
            # `newest` is in nanoseconds of the same clock (contract/records.py).
            last_active = max(self.tail.step_times.get(name, 0.0), sums.get("newest", 0) / 1e9)
            if not last_active:
                reads = [stream.last_read for stream in worker.streams if stream.last_read]
                last_active = max([worker.start_time, *reads])
            activity[worker.rank] = (worker.pid, last_active, sums)
        return activity

    def check_owner(self):
        """Send a frame when somebody begins to use this machine, or stops using it."""
        if self.owner_watch is None:
            return
        # At each change the process prints a sign, or an empty line for none: the last line counts.
        signs = self.owner_watch.lines()
        if signs and signs[-1] != self.owner_sign:
            self.owner_sign = signs[-1]
            self.frames.send("owner", sign=self.owner_sign or None)
        if not self.owner_watch.has_ended:
            return
        # The process has ended. Start another process, but only once in an attempt.
        self.owner_watch.stop()
        self.owner_watch = None
        if "owner" not in self.troubles:
            self.report_trouble(
                "owner", "what looked whether its owner is back ended, and begins again"
            )
            try:
                self.watch_owner()
                return
            except OSError as error:
                cause = cause_of(error)
        else:
            cause = "it ended twice"
        # A machine that no process watches counts as in use, because its owner may be back.
        self.report_trouble("owner's sign", "nobody can look whether its owner is back: " + cause)
        self.owner_sign = self.task.owner_signs[0]
        self.frames.send("owner", sign=self.owner_sign)

    def watch_owner(self):
        """Start the process that watches for the owner, if the task names signs. Raises OSError."""
        if self.task.owner_signs:
            self.owner_watch = owner.watch(self.task.owner_signs, self.task.away_dir)

    def report_trouble(self, subject, message):
        """Report a problem that does not end the run, once for each subject."""
        if subject not in self.troubles:
            self.troubles.add(subject)
            self.frames.send("trouble", what=subject, message=message)

    def check_group(self):
        """Report ranks that train apart. A script that makes no process group connects them to no
        other rank. A script that avoids DDP's sums sends no gradients."""
        time_now = time.monotonic()
        if self.traffic is None or time_now < self.next_group_check:
            return
        try:
            self.traffic.look(self.workers.pids())
        except OSError:  # this kernel has no socket diagnostics
            self.traffic = None
            return
        # Once all ranks have met, a check only looks whether ranks send gradients. A look at all
        # sockets takes time, so the checks become rare. Once gradients flow, the checks end.
        if not self.unmet_ranks():
            sent_bytes, _ = self.traffic.total()
            is_summing = sent_bytes > sockets.SENT_MOST
            pause = float("inf") if is_summing else CHECK_FRACTION * self.task.meet_within
            self.next_group_check = time_now + pause
        signs, warning = {}, self.isolation_warning(1)
        if warning:
            signs["alone"] = self.unmet_ranks()
            self.report_trouble("group", warning)
        received_bytes = self.traffic.only_received(self.task.meet_within)
        if received_bytes:
            signs["only_received"] = received_bytes
            message = (
                "its ranks received {:.1f} MB of the others, and in {:.0f} s since then sent "
                "them less than {} kB: no gradients were summed so far. Unless the first step "
                "is yet to come, or gradients are to be summed later, each machine trains a "
                "model of its own"
            ).format(received_bytes / 1e6, self.task.meet_within, sockets.SENT_MOST >> 10)
            self.report_trouble("sums", message)
        if self.recorder is not None:
            self.recorder.sampler.signs = signs  # the report reads them in the records

    def unmet_ranks(self):
        """Return the ranks that have connected to no other rank; [] if the kernel does not say."""
        met = self.traffic.met if self.traffic is not None else set(self.task.ranks)
        return [rank for rank in self.task.ranks if rank not in met]

    def isolation_warning(self, fraction):
        """Return a warning with the ranks that have connected to no other rank, if this fraction of
        `meet_within` is over. Returns None before, and if all ranks have met."""
        unmet, allowed = self.unmet_ranks(), self.task.meet_within
        started_at = self.meet_by - allowed
        seconds = min(allowed, time.monotonic() - started_at)
        if not unmet or seconds < fraction * allowed:
            return None
        ranks = "rank{} {}".format("s" * (len(unmet) > 1), ", ".join(map(str, unmet)))
        return (
            "{} connected to no other rank within {:.0f} s: a script that never calls "
            "torch.distributed.init_process_group, or starts its own ranks, trains separately "
            "on each machine"
        ).format(ranks, seconds)

    def report_worker_end(self, worker):
        """Report a worker's end. The first failure starts the clock for the other workers."""
        failed = worker.status != 0
        worker.is_first_failure = failed and self.stage is Stage.RUNNING
        self.frames.send("worker_exit", **worker.describe_end())
        if not failed and self.recorder is not None:
            self.recorder.sampler.finished.append(worker.rank)
        if worker.is_first_failure:
            self.stage, self.reason = Stage.FAILING, "failed"
            self.kill_at = time.monotonic() + self.task.fail_grace

    # ---- ending ----

    def stop_workers(self, reason, grace):
        """Ask the workers to save and exit; end them when `grace` seconds are over."""
        # A second order gives no more time. The first order after a failure does, so that the other
        # workers can still save.
        if self.stage in (Stage.STOPPING, Stage.DONE):
            return
        self.reason, self.stage = self.reason or reason, Stage.STOPPING
        self.kill_at = time.monotonic() + grace
        if self.workers is None:  # no task has come, so there is nothing to wait for
            self.leave_loop(reason)
            return
        # While no worker runs yet, launch gets the signal.
        running = [worker.pid for worker in self.workers.running()]
        for pid in running or [self.launch.pid]:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue

    def leave_loop(self, reason, message=None):
        """Let the loop end, for `reason` unless there is an earlier reason. Then finish() runs."""
        if self.stage is not Stage.DONE:
            self.reason = self.reason or reason
            self.message = message
        self.stage = Stage.DONE

    def finish(self):
        """End all processes, write the last records and send the last frames."""
        if self.owner_watch is not None:
            self.owner_watch.stop()
        # nvidia-smi stays: the last sample still needs it, and then the recorder ends it.
        nvidia_smi = self.recorder.sampler.gpus.process if self.recorder is not None else None
        spared = [nvidia_smi.process.pid] if nvidia_smi is not None else []
        commands, hanging, statuses = end_descendants(spared)
        self.note_launch_end(statuses)
        if self.output is not None:
            # All writers are dead, so the pipes contain the end of the output.
            self.output.pass_on()
            while self.frames.is_full and self.link.can_deliver():
                self.link.wait_for_reader()
                self.output.pass_on()
        members = self.workers.members if self.workers is not None else []
        entry = exit_entry(self.mono_start, self.launch_status, members)
        if self.recorder is not None:
            self.recorder.end(entry, {str(worker.rank): worker.peak for worker in members})
            self.tail.send_end(self.frames)
        if hanging:  # a machine that must be rebooted matters more than an earlier message
            self.message = "processes hang in the kernel and cannot be ended: {}".format(hanging)
        processes = list_leftovers(commands, hanging)
        self.frames.send(
            "exit", reason=self.reason, message=self.message, **dict(entry, **processes)
        )
        # Deliver the frames that wait, for as long as the control node renews the lease.
        while self.link.can_deliver():
            self.link.wait_for_reader()
        if self.scratch is not None:
            remove_scratch(self.scratch, self.scratch_lock)


def serve(supervision, fallback_reason):
    """Be the guard of this process's stdin and stdout."""
    become_subreaper()
    return Guard(0, 1, supervision, fallback_reason).run()
