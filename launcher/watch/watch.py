"""Watches one attempt in an event loop that reads the guards of all nodes, and returns its Outcome.

lifecycle.py starts the guards (guards.py) and then a Watch. The Watch decides when the attempt
settles, stops and ends (Stage). failures.py decides which failure was the first cause.
"""

from __future__ import annotations

import contextlib
import enum
import selectors
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from boundary import frames
from boundary.schema import Invalid
from launcher.background import MIB
from launcher.machines.engine import Process, error_location
from launcher.node.link import LEASE
from launcher.node.machine import boottime
from launcher.participants import Participants
from launcher.plan.plan import Plan
from launcher.terminal import Stopper, WaitNotice, wakeup
from launcher.watch.attempts import Outcome
from launcher.watch.failures import Failure, explain_failure, find_first_cause
from launcher.watch.guards import GuardConnection, Records, make_task
from launcher.watch.lines import LAST_LINES, RunLogs
from launcher.watch.ruling import Ruling
from report.hang import describe_silent_ranks

# All durations are in seconds.
RENEW_EVERY = 1.0
# A guard that is silent for longer is given up. A network stall of 8 s silences TCP for up to
# 12.6 s (docs/guard-protocol.md), and must not end the run. A frozen machine must be noticed
# within 20 s.
SILENCE = 15.0
SETTLE = 1.5  # after the first failure, for reports of other nodes that may explain the failure
STOP_GRACE = 20  # for workers to save a checkpoint
EXITS_WITHIN = 10.0  # after STOP_GRACE, for guards to end their workers and report
# The event loop turns at least once a second. A longer turn means that this process did not run.
LONGEST_TURN = 5.0
SLICE = 0.1  # for the frames of one guard in a turn, so that no guard holds up the loop
LONGEST_IDLE = 600.0  # in which all other ranks do nothing after one rank has ended with 0
SUCCESSES = ("finished", "alone")  # exit reasons of a guard whose workers all returned 0
STATUS_WITHIN = 1.0  # for a guard to exit after it has closed its stream


class Stage(enum.Enum):
    """Names the stages of a watch. `next_stage` decides when the next stage begins."""

    RUNNING = enum.auto()
    SETTLING = enum.auto()  # a node has failed: reports of other nodes may still show the cause
    STOPPING = enum.auto()  # the user asked to stop: the workers save and exit
    ENDING = enum.auto()  # every guard got the order to kill all remaining processes
    OVER = enum.auto()  # the watch gives up guards that are still silent


def next_stage(stage: Stage, seconds: float, has_failed: bool, stop_requests: int) -> Stage:
    """Return the stage that is due `seconds` after `stage` began. `has_failed`: some node has
    failed; `stop_requests`: how often the user asked to stop."""
    if stage is Stage.RUNNING and has_failed:
        return Stage.SETTLING
    # A stop request counts even after a failure: ranks that still run can save checkpoints.
    if stage in (Stage.RUNNING, Stage.SETTLING) and stop_requests:
        return Stage.STOPPING
    if stage is Stage.SETTLING and seconds >= SETTLE:
        return Stage.ENDING
    # A failure does not shorten STOPPING: the other ranks may still save their checkpoints.
    if stage is Stage.STOPPING and (stop_requests > 1 or seconds > STOP_GRACE + EXITS_WITHIN):
        return Stage.ENDING
    # A running guard answers the order to kill at once, so a silent guard is lost or frozen.
    if stage is Stage.ENDING and seconds > SILENCE:
        return Stage.OVER
    return stage


class Pauses:
    """Notices when this process did not run, because it was stopped (Ctrl-Z, SIGSTOP) or the
    machine slept. Call `check` in each turn of a loop."""

    def __init__(self):
        self._last_check = boottime()
        self.longest_seconds = 0.0

    def check(self) -> float:
        """Return the seconds since the last call if this process did not run, else 0."""
        last_check, self._last_check = self._last_check, boottime()
        pause = self._last_check - last_check
        if pause < LONGEST_TURN:
            return 0.0
        self.longest_seconds = max(self.longest_seconds, pause)
        return pause


class Watch:
    """Runs the event loop until every guard has ended or is given up."""

    def __init__(
        self,
        plan: Plan,
        processes: dict[str, Process],
        logs: RunLogs,
        stopper: Stopper,
        participants: Participants | None = None,  # None: the machines stay the same
    ):
        start_time = time.monotonic()
        self._plan = plan
        self._logs = logs
        self._say = logs.terminal.say
        self._stopper = stopper
        self._participants = participants
        self._regroup_reason: str | None = None  # why the run should go on with other machines
        self._begin = self._end = start_time  # `_end`: when a guard last sent data or hung up
        self._guards = {
            n.host: GuardConnection(n, processes[n.host], start_time) for n in plan.nodes
        }
        self._records = Records(plan, logs.folder, logs.terminal.spool, plan.options.keep * MIB)
        self._ruling = Ruling(logs.folder, self._say)
        self._pauses = Pauses()
        self._failures: list[Failure] = []
        self._stage, self._stage_start = Stage.RUNNING, start_time
        self._started: set[tuple[str, int]] = set()  # (host, rank) of reported worker processes
        self._exited: list[Failure] = []  # ranks that ended with 0; each may explain a failure
        self._notice: WaitNotice | None = WaitNotice(
            logs.terminal, "starting (torch, network, data)"
        )

    def run(self) -> Outcome:
        """Send each guard its task, watch until all guards have ended, and return the Outcome."""
        with selectors.DefaultSelector() as selector, wakeup() as wake, self._ruling:
            selector.register(wake, selectors.EVENT_READ)
            for guard in self._guards.values():
                with self._isolate_errors(guard, selector):
                    selector.register(guard.process, selectors.EVENT_READ, guard)
                    guard.send(make_task(self._plan, guard.node))
            renew_at = time.monotonic() + RENEW_EVERY
            while self._active_guards():
                stop_requests = self._stopper.stop_requests
                # Wait for data of a guard until the leases have to be renewed, or SETTLING ends.
                backlogged = [guard for guard in self._active_guards() if guard.has_backlog]
                until = renew_at
                if self._stage is Stage.SETTLING:
                    until = min(until, self._stage_start + SETTLE)
                wait = min(max(0.0, until - time.monotonic()), RENEW_EVERY)
                ready = [key.data for key, _ in selector.select(0.0 if backlogged else wait)]
                # The wake-up socket has no guard as data. A signal wrote into this socket.
                if None in ready:
                    wake.recv(4096)
                ready = [guard for guard in ready if guard is not None and guard not in backlogged]
                for guard in backlogged + ready:
                    with self._isolate_errors(guard, selector):
                        self._read(guard)
                    # A new stop request is handled before the output of the remaining guards.
                    if self._stopper.stop_requests > stop_requests:
                        break
                # `turn_time` is read before the check for pauses. The check notices a pause before
                # this line. A pause after this line cannot make a guard look silent in this turn.
                turn_time = time.monotonic()
                if pause := self._pauses.check():
                    self._say(
                        f"this machine did not run for {pause:.0f} s: it was stopped, asleep or "
                        "overloaded"
                    )
                    # Messages that arrived during the pause are unread, so no guard was silent:
                    # the clocks of the stage and of all guards start again.
                    self._stage_start = time.monotonic()
                    for guard in self._active_guards():
                        guard.last_frame_time = self._stage_start
                if turn_time >= renew_at:
                    renew_at = turn_time + RENEW_EVERY
                    self._logs.report_disk()
                    # Machines join and leave only while nothing has failed or is being stopped.
                    if self._participants and self._stage is Stage.RUNNING:
                        self._regroup_reason = self._participants.find_regroup_reason()
                    if self._notice:
                        started, size = len(self._started), self._plan.world_size
                        self._notice.update(f"{started} of {size} processes run")
                    for guard in self._active_guards():
                        with self._isolate_errors(guard, selector):
                            guard.renew()
                self._handle_deadlines(turn_time, selector)
        return self._outcome()

    @contextlib.contextmanager
    def _isolate_errors(
        self, guard: GuardConnection, selector: selectors.BaseSelector
    ) -> Iterator[None]:
        """Turn any error while one guard is handled into a failure of that guard's machine, even if
        the error is a defect of Tandem. Hang up if the guard has ended."""
        try:
            yield
        except Invalid as error:
            self._distrust(guard, f"it sent something that no guard sends: {error}")
        except Exception as error:
            self._distrust(guard, f"what it sent ended in an error here: {error_location(error)}")
        if guard.ended:
            self._hang_up(guard, selector)

    def _hang_up(self, guard: GuardConnection, selector: selectors.BaseSelector) -> None:
        """Unregister a guard that has ended, and close the connection to the guard."""
        keys = selector.get_map().values()
        for fd in [key.fd for key in keys if key.data is guard]:
            selector.unregister(fd)
            # A closed ssh channel has another descriptor, or none, so the channel is unregistered
            # before `close`. A lost machine's guard ends by its lease instead.
            if not guard.is_lost:
                with contextlib.suppress(Exception):
                    guard.process.close()

    def _active_guards(self) -> list[GuardConnection]:
        return [guard for guard in self._guards.values() if not guard.ended]

    def _read(self, guard: GuardConnection) -> None:
        """Handle the frames that a guard sent, for about SLICE seconds."""
        data: bytes | None = b""
        if not guard.has_backlog:
            # read() returns b"" at the end of the stream, and None if there is no data yet. After
            # an error, `data` is still b"".
            with contextlib.suppress(OSError):
                data = guard.process.read()
            if data is None:
                return
        start_time = self._end = time.monotonic()
        if not data and not guard.has_backlog:
            self._handle_stream_end(guard)
            return
        guard.has_backlog = True
        for frame, payload in guard.frames.feed(data or b""):
            # Only a whole frame is a sign of life, not a single byte. After the exit frame the
            # stream has to end, so later frames do not count.
            if guard.exit is None:
                guard.last_frame_time = start_time
            self._handle_frame(guard, frame, payload)
            if time.monotonic() - start_time > SLICE:
                return
        guard.has_backlog = False

    def _distrust(self, guard: GuardConnection, message: str) -> None:
        """Stop believing this guard. The caller (_isolate_errors) hangs up; the guard then ends the
        run on its machine, because its stdin is closed."""
        guard.ended = True
        guard.exit = None  # an exit frame that came before is not believed, either
        self._note_failure(guard.node.host, "guard", message=message)

    def _handle_frame(self, guard: GuardConnection, frame: frames.Frame, payload: bytes) -> None:
        host = guard.node.host
        if isinstance(frame, frames.Trouble):
            self._say(f"{host}: {frame.message}")
        elif isinstance(frame, frames.OwnerSign) and self._participants:
            self._participants.note_sign(host, frame.sign)
        elif isinstance(frame, frames.Beat):
            guard.running, guard.idle = frame.running, frame.idle
        elif isinstance(frame, frames.Log):
            self._logs.feed(host, frame.rank, frame.stream, payload)
            if frame.rank is not None:  # a rank has started to print, so the notice is removed
                self._notice = None
        elif isinstance(frame, frames.Record):
            self._records.take(host, frame, payload)
        elif isinstance(frame, frames.Worker):
            self._started.add((host, frame.rank))
        elif isinstance(frame, frames.WorkerExit):
            self._handle_worker_exit(host, frame)
        elif isinstance(frame, frames.Exit):
            self._handle_exit(guard, frame)

    def _handle_exit(self, guard: GuardConnection, frame: frames.Exit) -> None:
        """Note a guard's last frame, and the failure that the frame reports."""
        host = guard.node.host
        guard.exit = frame
        if frame.reason == "busy":
            self._note_failure(host, "busy", message=frame.message)
        # launch also fails after a worker fails. If this host has no failure, launch itself failed.
        elif frame.reason == "failed" and all(f.host != host for f in self._failures):
            self._note_failure(
                host,
                "launch",
                exit_code=frame.exit_code,
                signal=frame.signal,
                message=frame.message,
                last_lines=tuple(self._logs.get_log(host, None).last_lines),
            )
        # Once guards have the order to end, these reasons are expected.
        elif frame.reason in ("lease", "eof", "guard") and not self._is_ending:
            message = {
                "lease": "it heard nothing from here for too long, and stopped its part",
                "eof": "its connection from here ended, and it stopped its part",
                "guard": f"a part of its guard was killed after {self._elapsed_seconds():.0f} s",
            }[frame.reason]
            source = "guard" if frame.reason == "guard" else "gone"
            # If this machine slept, it could not renew the lease: the guard's machine is well. A
            # part of the lease may have been over before the pause began.
            pause = self._pauses.longest_seconds
            if frame.reason == "lease" and pause > LEASE / 2:
                source, message = "paused", f"the control node did not run for {pause:.0f} s"
            self._note_failure(host, source, message=message)

    def _handle_worker_exit(self, host: str, frame: frames.WorkerExit) -> None:
        """Note how a worker ended: as a failure, or as a rank that ended with 0."""
        if self._is_ending:
            return
        last_lines = [*self._logs.get_log(host, frame.rank).last_lines]
        # If the worker printed more than LAST_LINES after the error, the error replaces the oldest
        # of these lines. The guard may join several lines to an exception: compare its beginning.
        if frame.exception and not any(frame.exception[:40] in line for line in last_lines):
            error = [*[frame.exception, *frame.error_lines][: LAST_LINES // 2], "..."]
            last_lines = [*error, *last_lines[len(error) :]]
        # A rank that ended with 0 gets the form of a failure, too: it may explain another failure.
        failure = self._make_failure(
            host,
            "worker" if frame.exit_code != 0 else "left",
            rank=frame.rank,
            exit_code=frame.exit_code or None,  # a Failure has no exit code 0
            signal=frame.signal,
            exception=frame.exception,
            error_lines=tuple(frame.error_lines),
            last_line=frame.last_line,
            last_lines=tuple(last_lines) if frame.exception or frame.exit_code != 0 else (),
            first_on_node=frame.first or frame.exit_code == 0,
        )
        if frame.exit_code == 0:
            self._exited.append(failure)
        # After a stop request, later failures of a node follow from the first failure.
        elif frame.first or not self._stop_requests:
            self._add_failure(failure)

    def _make_failure(self, host: str, source: str, **fields: Any) -> Failure:
        """Return a Failure that happened just now."""
        return Failure(
            host=host,
            source=source,
            order=len(self._failures),
            seconds=self._elapsed_seconds(),
            has_exit_codes=self._plan.program.has_exit_codes,
            **fields,
        )

    def _elapsed_seconds(self) -> float:
        return time.monotonic() - self._begin

    def _note_failure(self, host: str, source: str, **fields: Any) -> None:
        """Add a failure that happened just now."""
        self._add_failure(self._make_failure(host, source, **fields))

    def _add_failure(self, failure: Failure) -> None:
        """Add a failure; before it, add the rank that hung, if the failed rank waited for it."""
        # `priority` is computed and cached now: _isolate_errors turns an error in this computation
        # into a failure of the machine.
        _ = failure.priority
        hang = self._ruling.hang
        # A rank that gives up waiting fails with a lost peer. The awaited rank failed earlier.
        if hang is not None and not self._failures and failure.peer_lost:
            message = f"no step for {hang.seconds:.0f} s: {hang.why}"
            for host, rank in hang.ranks[:1]:  # only the first awaited rank
                if host in self._guards:
                    hung = self._make_failure(host, "hung", rank=rank, message=message)
                    self._failures.append(hung)
        self._failures.append(failure)

    def _find_idle_rank(self) -> Failure | None:
        """Return a failure if one rank has finished and all other ranks have done nothing for
        LONGEST_IDLE. Such a run would never end."""
        waiting = [guard for guard in self._active_guards() if guard.running]
        if not self._exited or not waiting:
            return None
        idle = min(guard.idle or 0.0 for guard in waiting)
        # Only the time since the last exit of a rank counts: before, other ranks may have waited
        # for this rank.
        since_exit = self._elapsed_seconds() - (self._exited[-1].seconds or 0.0)
        if min(idle, since_exit) < LONGEST_IDLE:
            return None
        host, rank, finished = waiting[0].node.host, waiting[0].running[0], self._exited[0]
        standings = self._ruling.standings(self._plan.attempt)
        places = [s.place for s in standings if (s.host, s.rank) == (host, rank)]
        message = (
            f"has done nothing for {idle / 60:.0f} min, after {finished.host}, rank "
            f"{finished.rank} ended with 0: {(places or ['it did not say where it is'])[0]}"
        )
        return self._make_failure(host, "idle", rank=rank, message=message)

    def _handle_stream_end(self, guard: GuardConnection) -> None:
        """Note that a guard's stream has ended: a failure, unless an exit frame came before."""
        guard.ended = True
        status = guard.process.wait(STATUS_WITHIN)
        if guard.exit is not None:
            return
        host = guard.node.host
        # If the connection broke, the guard still runs; it ends its processes after its lease.
        if guard.process.broken:
            guard.is_lost = True
            self._note_failure(host, "gone", message="its ssh connection broke")
            return
        # Unparsed bytes and stderr may say why the guard ended: the last 400 characters are kept.
        output = " ".join(f"{guard.frames.unframed_text()} {guard.process.stderr()}".split())[-400:]
        message = output or f"it was killed after {self._elapsed_seconds():.0f} s"
        self._note_failure(host, "guard", exit_code=status, message=message)

    def _handle_deadlines(self, turn_time: float, selector: selectors.BaseSelector) -> None:
        """Give up silent guards, handle Ctrl-Z, and enter the stages that are due."""
        # A guard sends a beat every second, so a silent machine is off, frozen or unreachable.
        for guard in self._active_guards():
            if turn_time - guard.last_frame_time > SILENCE:
                guard.ended = guard.is_lost = True
                self._hang_up(guard, selector)
                # After the order to end, a failure of source `gone` would have a higher priority
                # than the guard failure that caused the end. So silence is not noted then.
                is_guard_failure = any(failure.source == "guard" for failure in self._failures)
                if not (self._is_ending and is_guard_failure):
                    message = f"no heartbeat for {SILENCE:.0f} s"
                    self._note_failure(guard.node.host, "gone", message=message)
        if self._stage is Stage.RUNNING and (idle := self._find_idle_rank()):
            self._add_failure(idle)
        # The launcher ignores Ctrl-Z, since a suspended launcher cannot renew the leases.
        if self._stopper.suspended:
            self._stopper.suspended = False
            self._say(
                "Ctrl-Z would end the run on every machine, so it is ignored: Ctrl-C ends it in "
                "order, and a run that is started with DETACH=1 needs no terminal"
            )
        # Two stages may be due in one turn, as when the user pressed Ctrl-C twice.
        while True:
            seconds = turn_time - self._stage_start
            stage = next_stage(self._stage, seconds, bool(self._failures), self._stop_requests)
            if stage is self._stage:
                return
            self._enter_stage(stage, turn_time, selector)

    @property
    def _stop_requests(self) -> int:
        """The number of requests to stop: by the user, or one because the machines change."""
        return self._stopper.stop_requests or int(self._regroup_reason is not None)

    def _enter_stage(self, stage: Stage, start: float, selector: selectors.BaseSelector) -> None:
        """Enter a stage: send its order to all guards, and tell the user if the workers stop."""
        self._stage, self._stage_start = stage, start
        if stage is Stage.STOPPING:
            self._ruling.note_stop()
            action = self._plan.program.when_stopped.format(seconds=STOP_GRACE)
            cause = "stopping" if self._stopper.stop_requests else self._regroup_reason
            hint = ""
            if self._stopper.stop_requests:
                hint = " (Ctrl-C or `make stop` again kills them at once)"
            self._say(f"{cause}: the workers {action}{hint}")
        for guard in self._active_guards():
            with self._isolate_errors(guard, selector):
                if stage is Stage.STOPPING:
                    guard.send({"type": "stop", "grace": STOP_GRACE})
                elif stage is Stage.ENDING:
                    guard.send({"type": "kill"})
                elif stage is Stage.OVER:
                    guard.ended = True
                    # If all failures are lost peers, nothing else explains the end of the attempt.
                    if all(failure.peer_lost for failure in self._failures):
                        message = "it got the order to end its processes, but continued"
                        self._note_failure(guard.node.host, "guard", message=message)

    @property
    def _is_ending(self) -> bool:
        """True once the guards got the order to end. After the order, an exit is no failure."""
        return self._stage in (Stage.ENDING, Stage.OVER)

    def _outcome(self) -> Outcome:
        """Return how the attempt ended, after every guard has ended or was given up."""
        exits = {host: guard.exit for host, guard in self._guards.items() if guard.exit}
        lost_hosts = [host for host, guard in self._guards.items() if guard.is_lost]
        all_exited = len(exits) == len(self._guards)
        finished = all_exited and all(frame.reason in SUCCESSES for frame in exits.values())
        # Ranks that never met other ranks are a failure only of an attempt that would otherwise
        # have finished.
        if finished:
            for host, frame in exits.items():
                if frame.reason == "alone":
                    finished = False
                    self._note_failure(host, "alone", message=frame.message)
        status = "finished" if finished else "stopped" if self._stop_requests else "failed"
        cause = find_first_cause(self._failures) if status == "failed" else None
        with_exception = [failure for failure in self._exited if failure.exception]
        if status == "finished":
            cause = find_first_cause(with_exception)
        elif cause and cause.source == "worker":
            # A rank that ended with 0 may explain why another rank failed. The best explanation is
            # a rank that printed an exception and ended before the failure (`order`). For a lost
            # peer the order does not count: another machine may have reported the lost peer first.
            # The second best explanation of a lost peer is a rank that ended without an exception.
            # `message` completes the sentence of an explanation (source `left` in failures.py).
            peer_lost, failed_rank = cause.peer_lost, f"{cause.host}, rank {cause.rank}"
            consequence = None if peer_lost else f"then {explain_failure(cause)[0]}"
            explanations = [
                replace(failure, message=consequence)
                for failure in with_exception
                if (peer_lost or failure.order <= cause.order) and not failure.peer_lost
            ]
            if peer_lost:
                without_exception = [failure for failure in self._exited if not failure.exception]
                explanations += [replace(f, message=failed_rank) for f in without_exception]
            cause = [*explanations, cause][0]
        plan, standings = self._plan, self._ruling.standings(self._plan.attempt)
        is_script = not plan.program.times_steps
        silent_ranks = describe_silent_ranks(standings, plan.world_size, is_script)
        return Outcome(
            status=status,
            cause=cause,
            wall_seconds=self._end - self._begin,
            lost_hosts=lost_hosts,
            exits=exits,
            unreported_hosts=[h for h in self._guards if h not in exits and h not in lost_hosts],
            regroup_reason=self._regroup_reason if status == "stopped" else None,
            silent_ranks=[*silent_ranks.values()],
        )
