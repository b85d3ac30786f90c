"""What can end a run: the kinds of failure, and which of several failures explains the others.

Clocks of different machines are not compared. On one machine the guard says which worker failed
first; between machines, an error that only says "a peer is gone" ranks below any other.
"""

from __future__ import annotations

import contextlib
import enum
import re
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from contract import verbs
from contract.errors import BAD_INPUT, DATA_LOST, DIVERGED, OUT_OF_MEMORY, STOPPED
from launcher.watch.known_errors import KNOWN_ERRORS, SIGNALS

# Gaps have a limit: with `.*`, matching a line that repeats the first word takes time that grows
# with the square of its length.
PEER_LOST = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|socket closed|"
    r"connect(ion)? (to .{0,200})?refused|remote process has exited|ncclRemoteError|"
    r"timed? ?out (waiting|after)|timeout.{0,200}(barrier|store|allreduce|broadcast|recv|send)|"
    r"watchdog caught collective|failed to (recv|send).{0,200}got (0|\d+) bytes|"
    r"Connect timeout|DistNetworkError|DistStoreError|store->get|"
    r"gloo/transport.{0,200}(closed|reset|timeout|timed out|refused|Connect)",
    re.IGNORECASE,
)
# What NCCL prints in a process whose peer is gone: its watchdog then ends the process by SIGABRT,
# and C++ stack frames follow. The wording is that of torch 1.12 to 2.15 and NCCL 2.10 to 2.27.
NCCL_PEER_LOST = re.compile(
    r"watchdog caught collective|ncclRemoteError|NCCL communicator was aborted|"
    r"Some NCCL operations have failed or timed out|taking the entire process down|"
    r"socket(Progress|Poll|Connect)\w{0,20}:? .{0,200}(closed|reset|timed out|refused)",
    re.IGNORECASE,
)
# Characters of a line that are looked at: these patterns take 0.2 s for twenty lines of 4096 that
# somebody made for them.
JUDGED = 1000
OWN_WORDS = re.compile(r"^trainer: (.*)", re.MULTILINE)
KILLED_IN_LAUNCH = re.compile(r"Signal \d+ \((SIG\w{3,7})\) received by PID")
READ_BELOW = "read its last lines below"  # where nothing better is known


@dataclass(frozen=True)
class Failure:
    """Something that went wrong on one node, as it reached the control machine.

    `source`: worker (a rank failed), launch (launch failed), gone (the machine, or the connection
    to it), guard (its guard was killed, or sends what no guard does), busy (another run has the
    machine), left (a rank ended with 0, and the others lost it or it printed an exception), idle (a
    rank does nothing after another ended with 0), paused (the control machine did not run, so the
    lease ended), hung (a rank for which the others waited until they gave up), alone (all ranks
    returned 0, and some have met no other). `has_exit_codes`: the program's exit codes are those of
    contract/errors.py, and it takes the trainer's options.
    """

    host: str
    source: str
    order: int
    rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    seconds: float | None = None  # since the attempt began
    exception: str | None = None
    error_lines: tuple[str, ...] = ()  # what belongs to the exception
    last_line: str | None = None  # what was printed after it, or without it
    message: str | None = None
    last_lines: tuple[str, ...] = ()
    first_on_node: bool = True
    has_exit_codes: bool = True
    file_hint: str | None = None  # on a file that the error names and that is here

    @cached_property
    def text(self) -> str:
        """All that is known in words."""
        return "\n".join(filter(None, [self.exception, self.message, *self.last_lines]))

    @cached_property
    def evidence(self) -> str:
        """What known errors are looked for in: the exception, the lines that belong to it and its
        causes. The last lines only where there is no traceback: others are mere warnings."""
        lines = [*self.last_lines]
        if self.signal not in (None, "SIGABRT"):
            lines = []
        elif self.exception:
            lines = [self.exception, *self.error_lines]
        return "\n".join(filter(None, [self.message, *lines]))

    @cached_property
    def own_words(self) -> str | None:
        """What the trainer said last; torch may add warnings as it exits."""
        said: list[str] = OWN_WORDS.findall("\n".join(self.last_lines))
        return said[-1] if said else None

    @cached_property
    def peer_lost(self) -> bool:
        """Whether the error only says that another process is gone."""
        return self.priority is CausePriority.PEER_LOST

    @cached_property
    def priority(self) -> CausePriority:
        """Its kind's priority, judged once: lines that were made for these patterns cost time."""
        found: CausePriority = _answer(self, "priority")
        return found

    def words(self) -> dict[str, object]:
        """What sentences are made of; what is not known of this failure is left out."""
        last = self.last_lines[-1] if self.last_lines else None
        killed = KILLED_IN_LAUNCH.search(self.text[-4000:])
        known = {
            "host": self.host,
            "who": self.host if self.rank is None else f"{self.host}, rank {self.rank}",
            "exit_code": self.exit_code,
            "signal": self.signal,
            "how": self.signal or f"exit code {self.exit_code}",
            "killed": killed and killed[1],
            "source": self.source,
            "message": self.message,
            "exception": self.exception,
            "last_line": None if self.exception else self.last_line,
            "own": self.own_words,
            "last": f"trainer: {self.own_words}" if self.own_words else last,
        }
        # What goes on with a sentence, if it is known.
        ends = {
            "after": "" if self.seconds is None else f" after {self.seconds:.0f} s",
            "and_message": f": {self.message}" if self.message else "",
            "and_error": f": {self.exception}" if self.exception else "",
            "and_last_line": f"; it printed last: {self.last_line}" if self.last_line else "",
        }
        return {name: value for name, value in known.items() if value is not None} | ends


class CausePriority(enum.IntEnum):
    """Whose failure explains the others: the lowest wins."""

    BUSY = 0
    OWN = 1
    GUARD = 2
    LAUNCH = 3
    PEER_LOST = 4


class Restart(enum.Enum):
    """What another attempt would come to."""

    HELPS = enum.auto()
    SAME_AGAIN = enum.auto()
    IN_SMALLER_PIECES = enum.auto()  # with micro-batches of half the size


@dataclass(frozen=True)
class FailureKind:
    """One kind of failure: how it is told, and what follows if it is a run's first cause.

    Several kinds may fit one failure. Each question (a field that is not None) is answered by the
    first of FAILURE_KINDS that fits and has an answer. Sentences are templates of Failure.words();
    one whose words are not all known is no answer.
    """

    fits: Callable[[Failure], bool]
    priority: CausePriority | None = None
    sentence: str | None = None
    remedy: str | None = None  # goes with the sentence
    general_remedy: str | None = None  # for a program with options of its own
    restart: Restart | None = None
    reason: str | None = None  # why there is another attempt
    exit_code: int | None = None  # of the run; where no kind says, it is the process's own
    one_rank_explains: bool | None = None  # all ranks of a machine end by it, and one says why
    no_resume: str | None = None  # why the run is not to be continued from what it saved
    known: str | None = None  # what it means: of a script it goes before the remedy, as a hint


def _from(*sources: str) -> Callable[[Failure], bool]:
    return lambda failure: failure.source in sources


def _exits(code: int, source: str | None = None) -> Callable[[Failure], bool]:
    """Whether it is this exit code of the trainer."""

    def fits(failure: Failure) -> bool:
        own = failure.exit_code == code and failure.has_exit_codes
        return own and source in (None, failure.source)

    return fits


def _ended_by(name: str, source: str | None = None) -> Callable[[Failure], bool]:
    return lambda failure: failure.signal == name and source in (None, failure.source)


def _killed_in_launch(name: str) -> Callable[[Failure], bool]:
    """Whether launch says that a signal ended one of its processes."""

    return lambda failure: failure.source == "launch" and failure.words().get("killed") == name


def _says(pattern: str) -> Callable[[Failure], bool]:
    return lambda failure: bool(re.search(pattern, failure.evidence))


def _lost_its_peer(failure: Failure) -> bool:
    aborted = failure.signal == "SIGABRT"
    if failure.source != "worker" and not (failure.source == "left" and failure.exception):
        return False
    if failure.exit_code == STOPPED and failure.has_exit_codes:
        return True
    lines = [line[:JUDGED] for line in failure.last_lines]
    if failure.signal is None or aborted:
        own = failure.exception or (aborted and failure.own_words)
        if not own and NCCL_PEER_LOST.search("\n".join(lines)):
            return True
    if failure.signal is not None:
        return False
    said = (failure.exception or "\n".join(lines[-3:]))[: 3 * JUDGED]
    return bool(PEER_LOST.search(said) or NCCL_PEER_LOST.search(said))


LAUNCHED = "{host}: a process of torch.distributed.launch was ended by {killed}{after}"


def _by_signal(name: str, meaning: str, remedy: str) -> tuple[FailureKind, ...]:
    """A process that a signal ended: launch itself, another, and one of which launch says so."""
    launch = f"{{host}}: torch.distributed.launch was ended by {name}{{after}}: {meaning}"
    own = f"{{who}} was ended by {name}{{after}}: {meaning}"
    return (
        FailureKind(_ended_by(name, "launch"), None, launch, remedy),
        FailureKind(_ended_by(name), None, own, remedy),
        FailureKind(_killed_in_launch(name), None, f"{LAUNCHED}: {meaning}", remedy),
    )


# In the order in which they are asked.
FAILURE_KINDS: tuple[FailureKind, ...] = (
    FailureKind(
        _exits(OUT_OF_MEMORY, "worker"),
        priority=CausePriority.OWN,
        restart=Restart.IN_SMALLER_PIECES,
        reason="{host} ran out of memory; micro-batches are 1/{divisor} now",
    ),
    # One machine's trouble, without which others can go on, whatever its exit code says.
    FailureKind(
        _says(r"No space left on device|Disk quota exceeded|Errno 28|ENOSPC"),
        sentence="{who}: its disk is full",
        known="its disk is full",
        remedy="make room where node_dir lies (old runs: <node_dir>/runs), then continue with "
        "`make train RESUME=latest`",
        general_remedy="make room where node_dir lies (old runs: <node_dir>/runs), then "
        "start it again",
        restart=Restart.HELPS,
    ),
    *(
        FailureKind(
            _says(one.pattern),
            sentence=f"{{who}}: {one.meaning}",
            remedy=one.remedy,
            general_remedy=one.general_remedy,
            known=one.meaning,
        )
        for one in KNOWN_ERRORS
    ),
    *(kind for name, told in SIGNALS.items() for kind in _by_signal(name, *told)),
    FailureKind(
        lambda failure: failure.signal is not None,
        sentence="{who} ended by {signal}",
        remedy=READ_BELOW,
    ),
    FailureKind(
        lambda failure: failure.source == "worker" and not failure.has_exit_codes,
        sentence="{who}: {exception}{and_last_line}",
        remedy=READ_BELOW,
        reason="{who} failed: {exception}",
    ),
    # No process says another.
    FailureKind(
        _from("busy", "paused", "gone", "guard", "hung", "alone", "left", "idle"), exit_code=1
    ),
    FailureKind(
        _from("busy"),
        priority=CausePriority.BUSY,
        sentence="{host}: {message}",
        remedy="wait for it (QUEUE=1), or ask its owner",
    ),
    FailureKind(
        _from("paused"),
        sentence="{message}, so {host} heard nothing from it and stopped its part",
        remedy="do not stop or suspend the control machine during a run (with DETACH=1 it needs no "
        "terminal); `make train RESUME=latest` continues the run",
        general_remedy="do not stop or suspend the control machine during a run (with "
        "DETACH=1 it needs no terminal)",
        reason="{message}",
    ),
    FailureKind(
        _from("hung"),
        sentence="{who} held the others up until they gave up: {message}",
        remedy="look there at what holds it (ps -eo pid,stat,wchan:20,cmd; dmesg); MAX_RESTARTS=3 "
        "starts the run again",
        general_remedy="look there at what holds it (ps -eo pid,stat,wchan:20,cmd; dmesg); "
        "with RESUME_ARGS= and MAX_RESTARTS=3 a run starts again",
        reason="{who} hung",
    ),
    FailureKind(
        _from("left"),
        sentence="{who} ended with 0 after it printed {exception}{and_message}",
        remedy="read its last lines below; a script that ends with another code after an error "
        "stops the run at once",
        reason="{who} ended with 0 after it printed {exception}",
    ),
    FailureKind(
        _from("left"),
        sentence="{who} had ended in order{after}, while {message} went on and waited for it",
        remedy="give each rank as many batches: by a DistributedSampler, drop_last=True of the "
        "loader, or DistributedDataParallel's join()",
        reason="{who} had ended before the others",
    ),
    FailureKind(
        _from("idle"),
        sentence="{who} {message}",
        remedy="end what it waits for before the script ends, or make its threads daemons "
        "(threading.Thread(daemon=True))",
        restart=Restart.SAME_AGAIN,
    ),
    FailureKind(
        _from("alone"),
        sentence="{host}: {message}",
        remedy="call init_process_group before the model is made, and wrap it in "
        "DistributedDataParallel; NODES=1 on a machine with one GPU needs neither",
        restart=Restart.SAME_AGAIN,
    ),
    FailureKind(
        _from("gone"),
        sentence="{host} is gone{and_message}",
        remedy="check that it is switched on and plugged in; MAX_RESTARTS=3 continues without it",
        general_remedy="check that it is switched on and plugged in; with RESUME_ARGS= and "
        "MAX_RESTARTS=3 a run goes on without it",
        reason="{host} gone: {message}",
    ),
    FailureKind(
        _from("guard"),
        priority=CausePriority.GUARD,
        sentence="{host} lost its guard{and_message}",
        remedy="find out who killed or changed it; MAX_RESTARTS=3 starts the run again",
        general_remedy="find out who killed or changed it; with RESUME_ARGS= and "
        "MAX_RESTARTS=3 a run starts again",
    ),
    FailureKind(_from("launch"), sentence=LAUNCHED, remedy=READ_BELOW),
    FailureKind(
        _from("launch"),
        priority=CausePriority.LAUNCH,
        sentence="{host} could not run torch.distributed.launch{and_message}{after}",
        remedy="read nodes/<host>/launch.log of the run",
    ),
    FailureKind(
        _exits(DIVERGED),
        sentence="{own}",
        remedy="start a new run with what is suggested; such options are given as ARGS='--lr 0.01'",
        restart=Restart.SAME_AGAIN,
        one_rank_explains=True,
        no_resume="what was saved before is in runs/{run}/checkpoints; RESUME={run} would repeat "
        "the steps that diverged, and end in the same way",
    ),
    FailureKind(
        _exits(DIVERGED),
        sentence="the loss is not finite any more",
        remedy="start a new run with a smaller learning rate, as ARGS='--lr 0.01'",
    ),
    FailureKind(
        _exits(DATA_LOST),
        priority=CausePriority.OWN,
        sentence="{who}: trainer: {own}",
        remedy="when it is well again, `make train RESUME=latest` goes on; with MAX_RESTARTS=3 a "
        "run starts again by itself, without a machine that cannot read its images",
        one_rank_explains=True,
    ),
    FailureKind(
        _exits(BAD_INPUT),
        sentence="{who}: {last}",
        remedy="correct it and start again",
        restart=Restart.SAME_AGAIN,
        one_rank_explains=True,
    ),
    FailureKind(_lost_its_peer, priority=CausePriority.PEER_LOST),
    FailureKind(
        _from("worker"),
        sentence="{who} ended with exit code {exit_code}; it printed last: {last_line}",
        remedy=READ_BELOW,
        reason="{who} failed: {how}",
    ),
    FailureKind(
        lambda failure: True,
        priority=CausePriority.OWN,
        sentence="{who} ended with exit code {exit_code}{and_error}",
        remedy=READ_BELOW,
        restart=Restart.HELPS,
        reason="{host}: {source} failed",
    ),
)


def _answer(failure: Failure, question: str) -> Any:
    """What the first kind that fits and answers says; None where none does."""
    answers = ((getattr(kind, question), kind) for kind in FAILURE_KINDS)
    fitting = (one for one, kind in answers if one is not None and kind.fits(failure))
    return next(fitting, None)


def first_of(failures: list[Failure]) -> Failure | None:
    """The failure that explains the others."""

    def place(failure: Failure) -> tuple[int, bool, bool, int]:
        silent = bool(_answer(failure, "one_rank_explains")) and failure.own_words is None
        return (failure.priority, silent, not failure.first_on_node, failure.order)

    return min(failures, key=place, default=None)


def explained(failure: Failure) -> tuple[str, str]:
    """One sentence about what happened, and one about what to do; its commands keep the run's list
    of machines, for the report prints them, too."""
    words = failure.words()
    told = [kind for kind in FAILURE_KINDS if kind.sentence is not None and kind.fits(failure)]
    hints = [kind for kind in told if kind.known and not failure.has_exit_codes]
    for kind in told:
        if kind not in hints:
            with contextlib.suppress(KeyError):  # a word that is not known
                sentence = str(kind.sentence).format_map(words)
                remedy = _remedy(kind, failure)
                if hints:
                    remedy = f"perhaps {hints[0].known}: {_remedy(hints[0], failure)}"
                return sentence, failure.file_hint or verbs.with_inventory(remedy)
    raise AssertionError("the last kind fits every failure")


def _remedy(kind: FailureKind, failure: Failure) -> str:
    own = None if failure.has_exit_codes else kind.general_remedy
    return own or kind.remedy or READ_BELOW


def document(failure: Failure) -> dict[str, Any]:
    """The failure as attempts.json has it."""
    message, remedy = explained(failure)
    kept = asdict(failure)
    fields = ("host", "rank", "exit_code", "signal", "exception")
    return {
        **{name: kept[name] for name in fields},
        "message": message,
        "remedy": remedy,
        "last_lines": list(failure.last_lines),
    }


def restart(failure: Failure) -> Restart:
    """What another attempt would come to."""
    found: Restart = _answer(failure, "restart")
    return found


def reason(failure: Failure, divisor: int) -> str:
    """Why another attempt begins, whose micro-batches are 1/`divisor` of what was asked for."""
    words = {"message": None, **failure.words(), "divisor": divisor}
    for kind in FAILURE_KINDS:
        if kind.reason is not None and kind.fits(failure):
            with contextlib.suppress(KeyError):  # a word that is not known
                return kind.reason.format_map(words)
    raise AssertionError("the last kind fits every failure")


def exit_code(failure: Failure) -> int:
    """The exit code of a run that it ended; where a signal ended a process 128 + signal, as in a
    shell."""
    own = 128 + getattr(signal, failure.signal, signal.SIGKILL) if failure.signal else None
    return _answer(failure, "exit_code") or own or failure.exit_code or 1


def no_resume(failure: Failure, run: str) -> str | None:
    """Why a run that it ended is not to be continued from what it saved; None where it is."""
    template = _answer(failure, "no_resume")
    return template and template.format(run=run)
