"""Watches one attempt: an event loop over the guards of all nodes at once, the stages that it goes
through, and whether this process itself could not run."""

from __future__ import annotations

import contextlib
import enum
import selectors
import socket
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
from launcher.watch.failures import Failure, explained, first_of
from launcher.watch.guards import Guarded, Records, task
from launcher.watch.lines import LAST_LINES, RunLogs
from launcher.watch.ruling import Ruling
from report.hang import describe_silent_ranks

RENEW_EVERY = 1.0
# A stall of 8 s makes TCP silent for up to 12.6 s (docs/guard-protocol.md); a frozen machine has to
# be noticed within 20 s.
SILENCE = 15.0
# Seconds that the watch waits, after the first failure, for reports of other nodes.
SETTLE = 1.5
STOP_GRACE = 20  # seconds that workers get to save
EXITS_WITHIN = 10.0  # seconds after these, in which guards end their workers and report
# The event loop turns at least once a second; under load it is late by less than this.
LONGEST_TURN = 5.0
# Seconds in which frames of one machine are taken in a turn; the others wait for the next turn.
SLICE = 0.1
LONGEST_IDLE = 600.0  # seconds that all ranks may do nothing after one has ended with 0
SUCCESSES = ("finished", "alone")  # reasons of a guard whose workers all returned 0
STATUS_WITHIN = 1.0  # seconds in which a guard that has closed its stream has to end


class Stage(enum.Enum):
    """Names the stages of a watch; `next_stage` decides how one follows another."""

    RUNNING = enum.auto()
    SETTLING = enum.auto()  # something failed: what others report now may turn out to be its cause
    STOPPING = enum.auto()  # the user asked: the workers save and leave
    ENDING = enum.auto()  # every guard was told to kill what is left
    OVER = enum.auto()  # guards that are silent even now are given up


def next_stage(stage: Stage, seconds: float, failed: bool, stop_requests: int) -> Stage:
    """Return the stage to be in, `seconds` after `stage` began. `failed`: some node has failed;
    `stop_requests`: how often the user asked to stop."""
    if stage is Stage.RUNNING and failed:
        return Stage.SETTLING
    # Also while a failure settles: whoever asked wants checkpoints of the ranks that still run.
    if stage in (Stage.RUNNING, Stage.SETTLING) and stop_requests:
        return Stage.STOPPING
    if stage is Stage.SETTLING and seconds >= SETTLE:
        return Stage.ENDING
    # Failures change nothing here: one rank that cannot save must not keep the others from it.
    if stage is Stage.STOPPING and (stop_requests > 1 or seconds > STOP_GRACE + EXITS_WITHIN):
        return Stage.ENDING
    # A living guard answers a kill at once; one that is silent for this long is gone or frozen.
    if stage is Stage.ENDING and seconds > SILENCE:
        return Stage.OVER
    return stage


class Pauses:
    """Notices when this process did not run: it was stopped (Ctrl-Z, SIGSTOP), or the machine
    slept. Call `check` in each turn of a loop. `longest` is in seconds."""

    def __init__(self):
        self._last_check = boottime()
        self.longest = 0.0

    def check(self) -> float:
        """Return the seconds since the last call if this process did not run, else 0."""
        last_check, self._last_check = self._last_check, boottime()
        pause = self._last_check - last_check
        if pause < LONGEST_TURN:
            return 0.0
        self.longest = max(self.longest, pause)
        return pause


class Watch:
    """Runs the event loop until every guard has ended or is given up."""

    def __init__(
        self,
        plan: Plan,
        processes: dict[str, Process],
        logs: RunLogs,
        stopper: Stopper,
        participants: Participants | None = None,
    ):
        now = time.monotonic()
        self._plan = plan
        self._logs = logs
        self._say = logs.terminal.say
        self._stopper = stopper
        self._participants = participants
        self._regroup: str | None = None
        self._begin = self._end = now
        self._guards = {n.host: Guarded(n, processes[n.host], now) for n in plan.nodes}
        self._records = Records(plan, logs.folder, logs.terminal.spool, plan.options.keep * MIB)
        self._ruling = Ruling(logs.folder, self._say)
        self._pauses = Pauses()
        self._failures: list[Failure] = []
        self._stage, self._since = Stage.RUNNING, now
        self._started: set[tuple[str, int]] = set()  # (host, rank) that a guard reported
        self._exited: list[Failure] = []  # ranks that ended with 0
        self._notice: WaitNotice | None = WaitNotice(
            logs.terminal, "starting (torch, network, data)"
        )

    def run(self) -> Outcome:
        with selectors.DefaultSelector() as selector, wakeup() as wake, self._ruling:
            selector.register(wake, selectors.EVENT_READ)
            for guard in self._guards.values():
                with self._isolate_errors(guard, selector):
                    selector.register(guard.process, selectors.EVENT_READ, guard)
                    guard.send(task(self._plan, guard.node))
            renew_at = time.monotonic() + RENEW_EVERY
            while self._active():
                stop_requests = self._stopper.asked
                for guard in self._wait_for_guards(selector, wake, renew_at):
                    with self._isolate_errors(guard, selector):
                        self._read(guard)
                    # A stop comes before more output, which waits for the next turn.
                    if self._stopper.asked > stop_requests:
                        break
                now = time.monotonic()
                # After `now`, by which silence is judged: an earlier pause is known by then, and
                # one that begins here counts against nobody.
                # All clocks start again: what a node sent is still unread, so none was silent.
                if pause := self._pauses.check():
                    self._say(
                        f"this machine did not run for {pause:.0f} s: it was stopped, asleep or "
                        "overloaded"
                    )
                    self._since = time.monotonic()
                    for guard in self._active():
                        guard.heard = self._since
                if now >= renew_at:
                    renew_at = now + RENEW_EVERY
                    self._logs.report_disk()
                    # Once something has failed or stops, no machine joins or leaves any more.
                    if self._participants and self._stage is Stage.RUNNING:
                        self._regroup = self._participants.regroup()
                    if self._notice:
                        started, size = len(self._started), self._plan.world_size
                        self._notice.update(f"{started} of {size} processes run")
                    for guard in self._active():
                        with self._isolate_errors(guard, selector):
                            guard.renew()
                self._handle_deadlines(now, selector)
        return self._outcome()

    @contextlib.contextmanager
    def _isolate_errors(self, guard: Guarded, selector: selectors.BaseSelector) -> Iterator[None]:
        """Make any error in what is done with one machine and its data, a defect of ours included,
        that machine's failure."""
        try:
            yield
        except Invalid as error:
            self._distrust(guard, f"it sent something that no guard sends: {error}")
        except Exception as error:
            self._distrust(guard, f"what it sent ended in an error here: {error_location(error)}")
        if guard.ended:
            self._hang_up(guard, selector)

    def _hang_up(self, guard: Guarded, selector: selectors.BaseSelector) -> None:
        """Unregister a guard that has ended, and close the connection to it."""
        keys = selector.get_map().values()
        for fd in [key.fd for key in keys if key.data is guard]:
            selector.unregister(fd)
            # Only now: a channel that is closed has another descriptor, or none.
            if not guard.gone:
                with contextlib.suppress(Exception):
                    guard.process.close()

    def _wait_for_guards(
        self, selector: selectors.BaseSelector, wake: socket.socket, until: float
    ) -> list[Guarded]:
        """Wait until a guard has sent something, or until `until`; return the guards to read."""
        backlogged = [guard for guard in self._active() if guard.has_backlog]
        if self._stage is Stage.SETTLING:
            until = min(until, self._since + SETTLE)
        wait = min(max(0.0, until - time.monotonic()), RENEW_EVERY)
        ready = [key.data for key, _ in selector.select(0.0 if backlogged else wait)]
        # A signal woke the loop: empty its socket.
        if None in ready:
            wake.recv(4096)
        return backlogged + [g for g in ready if g is not None and g not in backlogged]

    def _active(self) -> list[Guarded]:
        return [guard for guard in self._guards.values() if not guard.ended]

    def _read(self, guard: Guarded) -> None:
        """Handle the frames that a guard sent, for about SLICE seconds."""
        data: bytes | None = b""
        if not guard.has_backlog:
            # An error ends the stream, as no data does.
            with contextlib.suppress(OSError):
                data = guard.process.read()
            if data is None:
                return
        now = self._end = time.monotonic()
        if not data and not guard.has_backlog:
            self._handle_stream_end(guard)
            return
        guard.has_backlog = True
        for frame, payload in guard.frames.feed(data or b""):
            # Only a whole frame is a sign of life, not a single byte now and then; and after
            # the last frame the stream has to end.
            if guard.exit is None:
                guard.heard = now
            self._handle_frame(guard, frame, payload)
            if time.monotonic() - now > SLICE:
                return
        guard.has_backlog = False

    def _distrust(self, guard: Guarded, message: str) -> None:
        """Stop believing this guard. The caller closes its stdin, which ends the run there."""
        guard.ended = True
        guard.exit = None
        self._fail(self._failure(guard.node.host, "guard", message=message))

    def _handle_frame(self, guard: Guarded, frame: frames.Frame, payload: bytes) -> None:
        host = guard.node.host
        if isinstance(frame, frames.Trouble):
            self._say(f"{host}: {frame.message}")
        elif isinstance(frame, frames.OwnerSign) and self._participants:
            self._participants.note_sign(host, frame.sign)
        elif isinstance(frame, frames.Beat):
            guard.running, guard.idle = frame.running, frame.idle
        elif isinstance(frame, frames.Log):
            self._logs.feed(host, frame.rank, frame.stream, payload)
            if frame.rank is not None:  # a rank prints: the start is over
                self._notice = None
        elif isinstance(frame, frames.Record):
            self._records.take(host, frame, payload)
        elif isinstance(frame, frames.Worker):
            self._started.add((host, frame.rank))
        elif isinstance(frame, frames.WorkerExit):
            self._handle_worker_exit(host, frame)
        elif isinstance(frame, frames.Exit):
            self._handle_exit(guard, frame)

    def _handle_exit(self, guard: Guarded, frame: frames.Exit) -> None:
        """Note a guard's last frame, and the failure that it reports."""
        host = guard.node.host
        guard.exit = frame
        if frame.reason == "busy":
            self._fail(self._failure(host, "busy", message=frame.message))
        # A worker's failure, if there is one, explains launch's.
        elif frame.reason == "failed" and all(f.host != host for f in self._failures):
            self._fail(
                self._failure(
                    host,
                    "launch",
                    exit_code=frame.exit_code,
                    signal=frame.signal,
                    message=frame.message,
                    last_lines=tuple(self._logs.get_log(host, None).last_lines),
                )
            )
        elif frame.reason in ("lease", "eof", "guard") and not self._ending:
            message = {
                "lease": "it heard nothing from here for too long, and stopped its part",
                "eof": "its connection from here ended, and it stopped its part",
                "guard": f"a part of its guard was killed after {self._seconds():.0f} s",
            }[frame.reason]
            source = "guard" if frame.reason == "guard" else "gone"
            # The lease ended because this machine slept: it could not renew it.
            if frame.reason == "lease" and self._pauses.longest > LEASE / 2:
                source = "paused"
                message = f"the control node did not run for {self._pauses.longest:.0f} s"
            self._fail(self._failure(host, source, message=message))

    def _handle_worker_exit(self, host: str, frame: frames.WorkerExit) -> None:
        """Note how a worker ended, as a failure or among the ranks that ended with 0."""
        if self._ending:
            return
        last_lines = [*self._logs.get_log(host, frame.rank).last_lines]
        # More was printed after the error than LAST_LINES: show the error instead of some of it.
        if frame.exception and not any(frame.exception[:40] in line for line in last_lines):
            error = [*[frame.exception, *frame.error_lines][: LAST_LINES // 2], "..."]
            last_lines = [*error, *last_lines[len(error) :]]
        failure = self._failure(
            host,
            "worker" if frame.exit_code != 0 else "left",
            rank=frame.rank,
            exit_code=frame.exit_code or None,
            signal=frame.signal,
            exception=frame.exception,
            error_lines=tuple(frame.error_lines),
            last_line=frame.last_line,
            last_lines=tuple(last_lines) if frame.exception or frame.exit_code != 0 else (),
            first_on_node=frame.first or frame.exit_code == 0,
        )
        if frame.exit_code == 0:
            self._exited.append(failure)
        # After a stop only the first failure of a node counts: the others follow from it.
        elif frame.first or not self._stop_requests:
            self._fail(failure)

    def _failure(self, host: str, source: str, **fields: Any) -> Failure:
        """Return a Failure of now."""
        return Failure(
            host=host,
            source=source,
            order=len(self._failures),
            seconds=self._seconds(),
            has_exit_codes=self._plan.program.has_exit_codes,
            **fields,
        )

    def _seconds(self) -> float:
        return time.monotonic() - self._begin

    def _fail(self, failure: Failure) -> None:
        """Add a failure."""
        # Judged now: an error in it is then a failure of its machine (_isolate_errors).
        _ = failure.priority
        hang = self._ruling.hang
        # The first rank gave up its wait: the rank for which all waited failed before it.
        if hang is not None and not self._failures and failure.peer_lost:
            message = f"no step for {hang.seconds:.0f} s: {hang.why}"
            for host, rank in hang.ranks[:1]:
                if host in self._guards:
                    hung = self._failure(host, "hung", rank=rank, message=message)
                    self._failures.append(hung)
        self._failures.append(failure)

    def _find_idle_rank(self) -> Failure | None:
        """Return a failure if a rank has finished and for LONGEST_IDLE no other has done anything:
        nothing would ever end this run."""
        waiting = [guard for guard in self._active() if guard.running]
        if not self._exited or not waiting:
            return None
        idle = min(guard.idle or 0.0 for guard in waiting)
        if min(idle, self._seconds() - (self._exited[-1].seconds or 0.0)) < LONGEST_IDLE:
            return None
        host, rank, finished = waiting[0].node.host, waiting[0].running[0], self._exited[0]
        standings = self._ruling.standings(self._plan.attempt)
        places = [s.place for s in standings if (s.host, s.rank) == (host, rank)]
        message = (
            f"has done nothing for {idle / 60:.0f} min, after {finished.host}, rank "
            f"{finished.rank} ended with 0: {(places or ['it did not say where it is'])[0]}"
        )
        return self._failure(host, "idle", rank=rank, message=message)

    def _handle_stream_end(self, guard: Guarded) -> None:
        """Note that a guard's stream has ended; a failure if no `exit` frame came before."""
        guard.ended = True
        status = guard.process.wait(STATUS_WITHIN)
        if guard.exit is not None:
            return
        host = guard.node.host
        # The guard still runs, and ends its part when its lease is over.
        if guard.process.broken:
            guard.gone = True
            self._fail(self._failure(host, "gone", message="its ssh connection broke"))
            return
        output = " ".join(f"{guard.frames.rest()} {guard.process.stderr()}".split())[-400:]
        message = output or f"it was killed after {self._seconds():.0f} s"
        self._fail(self._failure(host, "guard", exit_code=status, message=message))

    def _handle_deadlines(self, now: float, selector: selectors.BaseSelector) -> None:
        """Give up silent guards, handle Ctrl-Z, and enter the stages that are due."""
        # A guard sends a beat every second: a silent machine is off, frozen or unreachable.
        for guard in self._active():
            if now - guard.heard > SILENCE:
                guard.ended = guard.gone = True
                self._hang_up(guard, selector)
                # Silence after the order to end must not hide a guard that is distrusted.
                if not (self._ending and self._distrusted):
                    message = f"no heartbeat for {SILENCE:.0f} s"
                    self._fail(self._failure(guard.node.host, "gone", message=message))
        if idle := self._find_idle_rank() if self._stage is Stage.RUNNING else None:
            self._fail(idle)
        # A suspended process cannot renew the leases.
        if self._stopper.suspended:
            self._stopper.suspended = False
            self._say(
                "Ctrl-Z would end the run on every machine, so it is ignored: Ctrl-C ends it in "
                "order, and a run that is started with DETACH=1 needs no terminal"
            )
        # More than one stage may be due at once, as when a second Ctrl-C came.
        while True:
            seconds = now - self._since
            stage = next_stage(self._stage, seconds, bool(self._failures), self._stop_requests)
            if stage is self._stage:
                return
            self._enter_stage(stage, now, selector)

    @property
    def _stop_requests(self) -> int:
        """The number of requests to stop, by the user or by an owner who is back."""
        return self._stopper.asked or int(self._regroup is not None)

    def _enter_stage(self, stage: Stage, now: float, selector: selectors.BaseSelector) -> None:
        """Send the order of a new stage to all guards, and report it if the workers stop."""
        self._stage, self._since = stage, now
        if stage is Stage.STOPPING:
            self._ruling.note_stop()
            action = self._plan.program.when_stopped.format(seconds=STOP_GRACE)
            cause = "stopping" if self._stopper.asked else self._regroup
            hint = " (press again to kill them at once)" if self._stopper.asked else ""
            self._say(f"{cause}: the workers {action}{hint}")
        for guard in self._active():
            with self._isolate_errors(guard, selector):
                if stage is Stage.STOPPING:
                    guard.send({"type": "stop", "grace": STOP_GRACE})
                elif stage is Stage.ENDING:
                    guard.send({"type": "kill"})
                elif stage is Stage.OVER:
                    guard.ended = True
                    # If all others only lost their peer, this guard holds on to the run.
                    if all(failure.peer_lost for failure in self._failures):
                        message = "it got the order to end its processes, but continued"
                        self._fail(self._failure(guard.node.host, "guard", message=message))

    @property
    def _distrusted(self) -> bool:
        """True if a guard was killed, or sent what no guard sends."""
        return any(failure.source == "guard" for failure in self._failures)

    @property
    def _ending(self) -> bool:
        """True once the guards got the order to end: a guard's end is no failure then."""
        return self._stage in (Stage.ENDING, Stage.OVER)

    def _outcome(self) -> Outcome:
        """Return how the attempt ended, once every guard has ended or is given up."""
        exits = {host: guard.exit for host, guard in self._guards.items() if guard.exit}
        gone = [host for host, guard in self._guards.items() if guard.gone]
        all_exited = len(exits) == len(self._guards)
        finished = all_exited and all(frame.reason in SUCCESSES for frame in exits.values())
        # Only now is it a failure that ranks met no other: the run was to end by itself.
        for host, frame in exits.items() if finished else ():
            if frame.reason == "alone":
                finished = False
                self._fail(self._failure(host, "alone", message=frame.message))
        status = "finished" if finished else "stopped" if self._stop_requests else "failed"
        cause = first_of(self._failures) if status == "failed" else None
        # Only now: another machine may report later that one of its ranks had ended.
        with_exception = [failure for failure in self._exited if failure.exception]
        if status == "finished":
            cause = first_of(with_exception)
        elif cause and cause.source == "worker":
            # A rank that ended with 0 explains the failure of another: first one that printed an
            # exception (before the failure, unless that is a lost peer), then, for a lost peer, one
            # that just ended.
            is_lost, lost_rank = cause.peer_lost, f"{cause.host}, rank {cause.rank}"
            silent = [failure for failure in self._exited if is_lost and not failure.exception]
            earlier = [f for f in with_exception if is_lost or f.order <= cause.order]
            earlier = [failure for failure in earlier if not failure.peer_lost]
            consequence = None if is_lost else f"then {explained(cause)[0]}"
            cause = [
                *(replace(failure, message=consequence) for failure in earlier),
                *(replace(failure, message=lost_rank) for failure in silent),
                cause,
            ][0]
        plan, standings = self._plan, self._ruling.standings(self._plan.attempt)
        is_script = not plan.program.times_steps
        silent_ranks = describe_silent_ranks(standings, plan.world_size, is_script)
        return Outcome(
            status=status,
            cause=cause,
            wall_seconds=self._end - self._begin,
            gone=gone,
            exits=exits,
            unresponsive=[host for host in self._guards if host not in exits and host not in gone],
            regroup=self._regroup if status == "stopped" else None,
            silent_ranks=[*silent_ranks.values()],
        )
