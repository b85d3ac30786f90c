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
from report.hang import by_place

RENEW_EVERY = 1.0
# A stall of 8 s makes TCP silent for up to 12.6 s (docs/guard-protocol.md); a frozen machine has to
# be noticed within 20 s.
SILENCE = 15.0
# How long the watch waits, after the first failure, for reports of other nodes.
SETTLE = 1.5
STOP_GRACE = 20
EXITS_WITHIN = 10.0
# The event loop turns at least once a second; under load it is late by less than this.
LONGEST_TURN = 5.0
# How long frames of one machine are taken in a turn; the rest of them waits for the next.
SLICE = 0.1
LONGEST_IDLE = 600.0  # how long all ranks may do nothing after one has ended with 0
WHOLE = ("finished", "alone")  # why a guard ends whose workers all returned 0
STATUS_WITHIN = 1.0  # how long a guard that has closed its stream may take to end


class Stage(enum.Enum):
    """Where a watch stands; `due` says, without a clock of its own, how one follows another."""

    RUNNING = enum.auto()
    SETTLING = enum.auto()  # something failed: what others report now may turn out to be its cause
    STOPPING = enum.auto()  # the user asked: the workers save and leave
    ENDING = enum.auto()  # every guard was told to kill what is left
    OVER = enum.auto()  # guards that are silent even now are given up


def due(stage: Stage, seconds: float, failed: bool, asked: int) -> Stage:
    """The stage to be in, `seconds` after entering `stage`. `failed`: some node has failed;
    `asked`: how often the user asked to stop."""
    if stage is Stage.RUNNING and failed:
        return Stage.SETTLING
    # Also while a failure settles: whoever asked wants checkpoints of the ranks that still run.
    if stage in (Stage.RUNNING, Stage.SETTLING) and asked:
        return Stage.STOPPING
    if stage is Stage.SETTLING and seconds >= SETTLE:
        return Stage.ENDING
    # Failures change nothing here: one rank that cannot save must not keep the others from it.
    if stage is Stage.STOPPING and (asked > 1 or seconds > STOP_GRACE + EXITS_WITHIN):
        return Stage.ENDING
    # A living guard answers a kill at once; one that is silent for this long is gone or frozen.
    if stage is Stage.ENDING and seconds > SILENCE:
        return Stage.OVER
    return stage


class Pauses:
    """When this process did not run: it was stopped (Ctrl-Z, SIGSTOP), or the machine slept. Call
    `check` in each turn of a loop."""

    def __init__(self):
        self._seen = boottime()
        self.longest = 0.0

    def check(self) -> float:
        """How many seconds since the last call this process did not run; 0 in an ordinary turn."""
        before, self._seen = self._seen, boottime()
        pause = self._seen - before
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
        most = plan.options.keep * MIB
        self._records = Records(plan, logs.folder, logs.terminal.spool, most)
        self._ruling = Ruling(logs.folder, self._say)
        self._pauses = Pauses()
        self._failures: list[Failure] = []
        self._stage, self._since = Stage.RUNNING, now
        self._begun: set[tuple[str, int]] = set()  # processes that a guard reported
        self._left: list[Failure] = []  # ranks that ended with 0
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
                asked = self._stopper.asked
                for guard in self._ready(selector, wake, renew_at):
                    with self._isolate_errors(guard, selector):
                        self._read(guard)
                    if self._stopper.asked > asked:
                        break  # what the others sent is still there in the next turn
                now = time.monotonic()
                # After `now`, by which silence is judged: an earlier pause is known by then, and
                # one that begins here counts against nobody.
                self._notice_pause()
                if now >= renew_at:
                    renew_at = now + RENEW_EVERY
                    self._logs.report_disk()
                    if self._participants and self._stage is Stage.RUNNING:
                        self._regroup = self._participants.regroup()
                    if self._notice:
                        begun, size = len(self._begun), self._plan.world_size
                        self._notice.update(f"{begun} of {size} processes run")
                    for guard in self._active():
                        with self._isolate_errors(guard, selector):
                            guard.renew()
                self._decide(now, selector)
        return self._outcome()

    @contextlib.contextmanager
    def _isolate_errors(self, guard: Guarded, selector: selectors.BaseSelector) -> Iterator[None]:
        """Around whatever is done with one machine and its data: what goes wrong there, a defect of
        ours included, is that machine's failure."""
        try:
            yield
        except Invalid as error:
            self._distrust(guard, f"it sent something that no guard sends: {error}")
        except Exception as error:
            self._distrust(guard, f"what it sent ended in an error here: {error_location(error)}")
        if guard.ended:
            self._hang_up(guard, selector)

    def _hang_up(self, guard: Guarded, selector: selectors.BaseSelector) -> None:
        keys = selector.get_map().values()
        for fd in [key.fd for key in keys if key.data is guard]:
            selector.unregister(fd)
            # Only now: a channel that is closed has another descriptor, or none.
            if not guard.gone:
                with contextlib.suppress(Exception):
                    guard.process.close()

    def _ready(
        self, selector: selectors.BaseSelector, wake: socket.socket, until: float
    ) -> list[Guarded]:
        """The guards that have sent something, once one has or at `until`."""
        behind = [guard for guard in self._active() if guard.behind]
        if self._stage is Stage.SETTLING:
            until = min(until, self._since + SETTLE)
        wait = min(max(0.0, until - time.monotonic()), RENEW_EVERY)
        ready = [key.data for key, _ in selector.select(0.0 if behind else wait)]
        if None in ready:
            wake.recv(4096)
        return behind + [one for one in ready if one is not None and one not in behind]

    def _notice_pause(self) -> None:
        """No node counts as silent while this process did not run: what it sent is still unread."""
        pause = self._pauses.check()
        if not pause:
            return
        self._say(
            f"this machine did not run for {pause:.0f} s: it was stopped, asleep or overloaded"
        )
        now = time.monotonic()
        for guard in self._active():
            guard.heard = now
        self._since = now

    def _active(self) -> list[Guarded]:
        return [guard for guard in self._guards.values() if not guard.ended]

    def _read(self, guard: Guarded) -> None:
        """Take what a guard sent, for about SLICE seconds."""
        data: bytes | None = b""
        if not guard.behind:
            with contextlib.suppress(OSError):
                data = guard.process.read()
            if data is None:
                return
        now = self._end = time.monotonic()
        if not data and not guard.behind:
            self._ended(guard)
            return
        guard.behind = True
        for frame, payload in guard.frames.feed(data or b""):
            # Only a whole frame is a sign of life, not a single byte now and then; and after
            # the last frame the stream has to end.
            if guard.exit is None:
                guard.heard = now
            self._take(guard, frame, payload)
            if time.monotonic() - now > SLICE:
                return
        guard.behind = False

    def _distrust(self, guard: Guarded, message: str) -> None:
        """Stop believing this guard. Its stdin is closed then, which ends the run on its
        machine."""
        guard.ended = True
        guard.exit = None
        self._fail(self._failure(guard.node.host, "guard", message=message))

    def _take(self, guard: Guarded, frame: frames.Frame, payload: bytes) -> None:
        host = guard.node.host
        if isinstance(frame, frames.Trouble):
            self._say(f"{host}: {frame.message}")
        elif isinstance(frame, frames.OwnerSign) and self._participants:
            self._participants.note_sign(host, frame.sign)
        elif isinstance(frame, frames.Beat):
            guard.running, guard.idle = frame.running, frame.idle
        elif isinstance(frame, frames.Log):
            self._logs.feed(host, frame.rank, frame.stream, payload)
            if frame.rank is not None:
                self._notice = None
        elif isinstance(frame, frames.Record):
            self._records.take(host, frame, payload)
        elif isinstance(frame, frames.Worker):
            self._begun.add((host, frame.rank))
        elif isinstance(frame, frames.WorkerExit):
            self._worker_exit(host, frame)
        elif isinstance(frame, frames.Exit):
            self._exit(guard, frame)

    def _exit(self, guard: Guarded, frame: frames.Exit) -> None:
        host = guard.node.host
        guard.exit = frame
        if frame.reason == "busy":
            self._fail(self._failure(host, "busy", message=frame.message))
        elif frame.reason == "failed" and all(one.host != host for one in self._failures):
            self._fail(
                self._failure(
                    host,
                    "launch",
                    exit_code=frame.exit_code,
                    signal=frame.signal,
                    message=frame.message,
                    last_lines=tuple(self._logs.of(host, None).last),
                )
            )
        elif frame.reason in ("lease", "eof", "guard") and not self._ending:
            message = {
                "lease": "it heard nothing from here for too long, and stopped its part",
                "eof": "its connection from here ended, and it stopped its part",
                "guard": f"a part of its guard was killed after {self._seconds():.0f} s",
            }[frame.reason]
            source = "guard" if frame.reason == "guard" else "gone"
            if frame.reason == "lease" and self._pauses.longest > LEASE / 2:
                source = "paused"
                message = f"the control machine did not run for {self._pauses.longest:.0f} s"
            self._fail(self._failure(host, source, message=message))

    def _worker_exit(self, host: str, frame: frames.WorkerExit) -> None:
        if self._ending:
            return
        last_lines = [*self._logs.of(host, frame.rank).last]
        if frame.exception and not any(frame.exception[:40] in line for line in last_lines):
            # More was printed after the error than is kept.
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
            self._left.append(failure)
        elif frame.first or not self._asked:
            self._fail(failure)

    def _failure(self, host: str, source: str, **fields: Any) -> Failure:
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
        _ = failure.priority  # judged now, within the border of its machine
        if not self._failures and failure.peer_lost:
            self._failures += self._hung()
        self._failures.append(failure)

    def _hung(self) -> list[Failure]:
        """The rank for which the others waited when the first of them gave up."""
        hang = self._ruling.hang
        if hang is None:
            return []
        message = f"no step for {hang.seconds:.0f} s: {hang.why}"
        return [
            self._failure(host, "hung", rank=rank, message=message)
            for host, rank in hang.ranks[:1]
            if host in self._guards
        ]

    def _find_idle_rank(self) -> Failure | None:
        """A rank that goes on after another has finished, if for LONGEST_IDLE no rank has done
        anything: nothing would ever end this run."""
        waiting = [guard for guard in self._active() if guard.running]
        if not self._left or not waiting:
            return None
        idle = min(guard.idle or 0.0 for guard in waiting)
        if min(idle, self._seconds() - (self._left[-1].seconds or 0.0)) < LONGEST_IDLE:
            return None
        host, rank, first = waiting[0].node.host, waiting[0].running[0], self._left[0]
        standings = self._ruling.standings(self._plan.attempt)
        places = [one.place for one in standings if (one.host, one.rank) == (host, rank)]
        message = (
            f"has done nothing for {idle / 60:.0f} min, after {first.host}, rank {first.rank} "
            f"ended with 0: {(places or ['it did not say where it stands'])[0]}"
        )
        return self._failure(host, "idle", rank=rank, message=message)

    def _ended(self, guard: Guarded) -> None:
        guard.ended = True
        status = guard.process.wait(STATUS_WITHIN)
        if guard.exit is not None:
            return
        host = guard.node.host
        if guard.process.broken:
            guard.gone = True
            self._fail(self._failure(host, "gone", message="its ssh connection broke"))
            return
        said = " ".join(f"{guard.frames.rest()} {guard.process.stderr()}".split())[-400:]
        said = said or f"it was killed after {self._seconds():.0f} s"
        self._fail(self._failure(host, "guard", exit_code=status, message=said))

    def _decide(self, now: float, selector: selectors.BaseSelector) -> None:
        """Act on what follows from time or from a signal."""
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
        if self._stopper.suspended:
            self._stopper.suspended = False
            self._say(
                "Ctrl-Z would end the run on every machine, so it is ignored: Ctrl-C ends it in "
                "order, and a run that is started with DETACH=1 needs no terminal"
            )
        while True:
            stage = due(self._stage, now - self._since, bool(self._failures), self._asked)
            if stage is self._stage:
                return
            self._enter(stage, now, selector)

    @property
    def _asked(self) -> int:
        """How often a stop was asked for, by the user or by an owner who is back."""
        return self._stopper.asked or int(self._regroup is not None)

    def _enter(self, stage: Stage, now: float, selector: selectors.BaseSelector) -> None:
        self._stage, self._since = stage, now
        if stage is Stage.STOPPING:
            self._ruling.note_stop()
            what = self._plan.program.when_stopped.format(seconds=STOP_GRACE)
            why = "stopping" if self._stopper.asked else self._regroup
            again = " (press again to kill them at once)" if self._stopper.asked else ""
            self._say(f"{why}: the workers {what}{again}")
        for guard in self._active():
            with self._isolate_errors(guard, selector):
                if stage is Stage.STOPPING:
                    guard.send({"type": "stop", "grace": STOP_GRACE})
                elif stage is Stage.ENDING:
                    guard.send({"type": "kill"})
                elif stage is Stage.OVER:
                    guard.ended = True
                    # The others only lost their peer: it is this one that holds on to the run.
                    if all(failure.peer_lost for failure in self._failures):
                        message = "it was told to end its part, but went on"
                        self._fail(self._failure(guard.node.host, "guard", message=message))

    @property
    def _distrusted(self) -> bool:
        """Whether a guard was killed, or sent what no guard does."""
        return any(failure.source == "guard" for failure in self._failures)

    @property
    def _ending(self) -> bool:
        """Whether the guards were told to end, so that a guard's end is no failure."""
        return self._stage in (Stage.ENDING, Stage.OVER)

    def _outcome(self) -> Outcome:
        exits = {host: guard.exit for host, guard in self._guards.items() if guard.exit}
        gone = [host for host, guard in self._guards.items() if guard.gone]
        whole = len(exits) == len(self._guards)
        finished = whole and all(one.reason in WHOLE for one in exits.values())
        for host, frame in exits.items() if finished else ():
            if frame.reason == "alone":  # only now: the others were to end by themselves
                finished = False
                self._fail(self._failure(host, "alone", message=frame.message))
        status = "finished" if finished else "stopped" if self._asked else "failed"
        cause = first_of(self._failures) if status == "failed" else None
        # Only now: another machine may report later that one of its ranks had ended.
        printed = [failure for failure in self._left if failure.exception]
        if status == "finished":
            cause = first_of(printed)
        elif cause and cause.source == "worker":
            is_lost, other = cause.peer_lost, f"{cause.host}, rank {cause.rank}"
            in_order = [one for one in self._left if is_lost and not one.exception]
            own = [one for one in printed if is_lost or one.order <= cause.order]
            own = [one for one in own if not one.peer_lost]
            then = None if is_lost else f"then {explained(cause)[0]}"
            cause = [
                *(replace(one, message=then) for one in own),
                *(replace(one, message=other) for one in in_order),
                cause,
            ][0]
        return Outcome(
            status=status,
            cause=cause,
            wall_seconds=self._end - self._begin,
            gone=gone,
            exits=exits,
            unresponsive=[host for host in self._guards if host not in exits and host not in gone],
            regroup=self._regroup if status == "stopped" else None,
            silent_ranks=[*by_place(self._ruling.standings(self._plan.attempt)).values()],
        )
