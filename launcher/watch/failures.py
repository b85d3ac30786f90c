"""Lists the kinds of failure that can end a run, and finds the one that explains the others.

Clocks of different machines are not compared. On one machine the guard reports which worker failed
first; between machines, an error that only says "a peer is gone" comes after any other.
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
# Characters of a line that are searched: these patterns take 0.2 s for twenty lines of 4096
# characters that somebody made for them.
JUDGED = 1000
TRAINER_MESSAGE = re.compile(r"^trainer: (.*)", re.MULTILINE)
KILLED_IN_LAUNCH = re.compile(r"Signal \d+ \((SIG\w{3,7})\) received by PID")
READ_BELOW = "read its last lines below"  # where nothing better is known


@dataclass(frozen=True)
class Failure:
    """Describes what went wrong on one node, as the control node saw it.

    `source`: worker (a rank failed), launch (launch failed), gone (the machine, or the connection
    to it), guard (its guard was killed, or sends what no guard sends), busy (another run has the
    machine), left (a rank ended with 0, and the others lost it or it printed an exception), idle (a
    rank does nothing after another ended with 0), paused (the control node did not run, so the
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
        """All text of the failure: exception, message and last lines."""
        return "\n".join(filter(None, [self.exception, self.message, *self.last_lines]))

    @cached_property
    def evidence(self) -> str:
        """The text in which known errors are searched: an exception with its lines and causes."""
        lines = [*self.last_lines]
        # A signal ends a process at any line, so its last lines prove nothing. Beside a traceback
        # the other last lines are mere warnings.
        if self.signal not in (None, "SIGABRT"):
            lines = []
        elif self.exception:
            lines = [self.exception, *self.error_lines]
        return "\n".join(filter(None, [self.message, *lines]))

    @cached_property
    def trainer_message(self) -> str | None:
        """The trainer's last message, before warnings that torch may add as it exits."""
        messages: list[str] = TRAINER_MESSAGE.findall("\n".join(self.last_lines))
        return messages[-1] if messages else None

    @cached_property
    def peer_lost(self) -> bool:
        """True if the error only says that another process is gone."""
        return self.priority is CausePriority.PEER_LOST

    @cached_property
    def priority(self) -> CausePriority:
        """The priority of its kind."""
        # Cached: lines that somebody made for these patterns cost time.
        priority: CausePriority = _answer(self, "priority")
        return priority

    def words(self) -> dict[str, object]:
        """Return the words for FailureKind's sentences, {name: text}, without unknown ones."""
        last_line = self.last_lines[-1] if self.last_lines else None
        killed = KILLED_IN_LAUNCH.search(self.text[-4000:])
        words = {
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
            "own": self.trainer_message,
            "last": f"trainer: {self.trainer_message}" if self.trainer_message else last_line,
        }
        # These continue a sentence; unknown ones are empty, and the sentence ends before them.
        ends = {
            "after": "" if self.seconds is None else f" after {self.seconds:.0f} s",
            "and_message": f": {self.message}" if self.message else "",
            "and_error": f": {self.exception}" if self.exception else "",
            "and_last_line": f"; its last line is: {self.last_line}" if self.last_line else "",
        }
        return {name: value for name, value in words.items() if value is not None} | ends


class CausePriority(enum.IntEnum):
    """Ranks failures by what they explain: the lowest explains the others."""

    BUSY = 0
    OWN = 1
    GUARD = 2
    LAUNCH = 3
    PEER_LOST = 4


class Restart(enum.Enum):
    """Names the results that another attempt may have."""

    HELPS = enum.auto()
    SAME_AGAIN = enum.auto()
    IN_SMALLER_PIECES = enum.auto()  # with micro-batches of half the size


@dataclass(frozen=True)
class FailureKind:
    """Describes one kind of failure, and what follows if it is a run's first cause.

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
    exit_code: int | None = None  # the run's; if no kind has one, the process's exit code
    one_rank_explains: bool | None = None  # all ranks of a machine end by it, and one says why
    no_resume: str | None = None  # why the run is not to be continued from what it saved
    known: str | None = None  # its meaning, a hint before the remedy if a script failed


def _from(*sources: str) -> Callable[[Failure], bool]:
    return lambda failure: failure.source in sources


def _exits(code: int, source: str | None = None) -> Callable[[Failure], bool]:
    """Return a test for failures by this exit code of the trainer."""

    def fits(failure: Failure) -> bool:
        is_code = failure.exit_code == code and failure.has_exit_codes
        return is_code and source in (None, failure.source)

    return fits


def _ended_by(name: str, source: str | None = None) -> Callable[[Failure], bool]:
    return lambda failure: failure.signal == name and source in (None, failure.source)


def _says(pattern: str) -> Callable[[Failure], bool]:
    return lambda failure: bool(re.search(pattern, failure.evidence))


def _lost_its_peer(failure: Failure) -> bool:
    """Return whether a rank failed only because another process is gone."""
    is_aborted = failure.signal == "SIGABRT"
    if failure.source != "worker" and not (failure.source == "left" and failure.exception):
        return False
    # The trainer ends so when it is stopped.
    if failure.exit_code == STOPPED and failure.has_exit_codes:
        return True
    lines = [line[:JUDGED] for line in failure.last_lines]
    # NCCL's watchdog aborts a process without any exception of the program.
    if failure.signal is None or is_aborted:
        has_error = failure.exception or (is_aborted and failure.trainer_message)
        if not has_error and NCCL_PEER_LOST.search("\n".join(lines)):
            return True
    if failure.signal is not None:
        return False
    text = (failure.exception or "\n".join(lines[-3:]))[: 3 * JUDGED]
    return bool(PEER_LOST.search(text) or NCCL_PEER_LOST.search(text))


LAUNCHED = "{host}: a process of torch.distributed.launch was ended by {killed}{after}"


def _by_signal(name: str, meaning: str, remedy: str) -> tuple[FailureKind, ...]:
    """Return the kinds in which this signal ended launch, a rank, or a process that launch
    reports."""
    launch = f"{{host}}: torch.distributed.launch was ended by {name}{{after}}: {meaning}"
    rank = f"{{who}} was ended by {name}{{after}}: {meaning}"

    return (
        FailureKind(_ended_by(name, "launch"), None, launch, remedy),
        FailureKind(_ended_by(name), None, rank, remedy),
        # Launch itself lives, and reports the signal of a process that it started.
        FailureKind(
            lambda failure: failure.source == "launch" and failure.words().get("killed") == name,
            None,
            f"{LAUNCHED}: {meaning}",
            remedy,
        ),
    )


# In the order of proof: the first that fits a failure answers.
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
        remedy="delete old runs in <node_dir>/runs on that machine, then type "
        "`make train RESUME=latest`",
        general_remedy="delete old runs in <node_dir>/runs on that machine, then start it again",
        restart=Restart.HELPS,
    ),
    *(
        FailureKind(
            _says(error.pattern),
            sentence=f"{{who}}: {error.meaning}",
            remedy=error.remedy,
            general_remedy=error.general_remedy,
            known=error.meaning,
        )
        for error in KNOWN_ERRORS
    ),
    *(kind for name, texts in SIGNALS.items() for kind in _by_signal(name, *texts)),
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
    # No process of a program has an exit code for these.
    FailureKind(
        _from("busy", "paused", "gone", "guard", "hung", "alone", "left", "idle"), exit_code=1
    ),
    FailureKind(
        _from("busy"),
        priority=CausePriority.BUSY,
        sentence="{host}: {message}",
        remedy="wait with QUEUE=1, or ask the person who started that run",
    ),
    FailureKind(
        _from("paused"),
        sentence="{message}, so {host} received no messages and ended its processes",
        remedy="do not stop or suspend the control node during a run (with DETACH=1 it needs no "
        "terminal); `make train RESUME=latest` continues the run",
        general_remedy="do not stop or suspend the control node during a run (with "
        "DETACH=1 it needs no terminal)",
        reason="{message}",
    ),
    FailureKind(
        _from("hung"),
        sentence="{who} stopped, and the other ranks gave up waiting for it: {message}",
        remedy="find out on that machine what the process waits for (ps -eo pid,stat,wchan:20,cmd; "
        "dmesg); MAX_RESTARTS=3 starts the run again",
        general_remedy="find out on that machine what the process waits for (ps -eo "
        "pid,stat,wchan:20,cmd; dmesg); with RESUME_ARGS= and MAX_RESTARTS=3 a run starts again",
        reason="{who} hung",
    ),
    FailureKind(
        _from("left"),
        sentence="{who} ended with 0 after it printed {exception}{and_message}",
        remedy="read its last lines below; if the script ends with another exit code after an "
        "error, the run stops at once",
        reason="{who} ended with 0 after it printed {exception}",
    ),
    FailureKind(
        _from("left"),
        sentence="{who} finished{after}, while {message} still waited for it",
        remedy="give each rank the same number of batches: use a DistributedSampler, "
        "drop_last=True in the DataLoader, or DistributedDataParallel's join()",
        reason="{who} finished before the other ranks",
    ),
    FailureKind(
        _from("idle"),
        sentence="{who} {message}",
        remedy="end its threads and processes before the script ends, or make its threads daemons "
        "(threading.Thread(daemon=True))",
        restart=Restart.SAME_AGAIN,
    ),
    FailureKind(
        _from("alone"),
        sentence="{host}: {message}",
        remedy="call init_process_group, and wrap the model in DistributedDataParallel, or give "
        "Lightning's Trainer num_nodes; NODES=1 on a machine with one GPU needs neither",
        restart=Restart.SAME_AGAIN,
    ),
    FailureKind(
        _from("gone"),
        sentence="{host} does not answer any more{and_message}",
        remedy="check its power and its network cable; MAX_RESTARTS=3 continues without it",
        general_remedy="check its power and its network cable; with RESUME_ARGS= and "
        "MAX_RESTARTS=3 a run continues without it",
        reason="{host} does not answer any more: {message}",
    ),
    FailureKind(
        _from("guard"),
        priority=CausePriority.GUARD,
        sentence="the guard on {host}, the process that watches the ranks, ended{and_message}",
        remedy="find out who killed it; MAX_RESTARTS=3 starts the run again",
        general_remedy="find out who killed it; with RESUME_ARGS= and "
        "MAX_RESTARTS=3 a run starts again",
    ),
    FailureKind(_from("launch"), sentence=LAUNCHED, remedy=READ_BELOW),
    FailureKind(
        _from("launch"),
        priority=CausePriority.LAUNCH,
        sentence="{host} could not run torch.distributed.launch{and_message}{after}",
        remedy="read nodes/<host>/launch.log in the run's folder",
    ),
    FailureKind(
        _exits(DIVERGED),
        sentence="{own}",
        remedy="start a new run with the suggested options, such as ARGS='--lr 0.01'",
        restart=Restart.SAME_AGAIN,
        one_rank_explains=True,
        no_resume="runs/{run}/checkpoints has the last checkpoint; RESUME={run} would repeat the "
        "steps that diverged, and fail again",
    ),
    FailureKind(
        _exits(DIVERGED),
        sentence="the loss became infinite or NaN",
        remedy="start a new run with a smaller learning rate, such as ARGS='--lr 0.01'",
    ),
    FailureKind(
        _exits(DATA_LOST),
        priority=CausePriority.OWN,
        sentence="{who}: trainer: {own}",
        remedy="when its disk or file server works again, type `make train RESUME=latest`; with "
        "MAX_RESTARTS=3 a run restarts without the machines that cannot read their images",
        one_rank_explains=True,
    ),
    FailureKind(
        _exits(BAD_INPUT),
        sentence="{who}: {last}",
        remedy="correct this and start again",
        restart=Restart.SAME_AGAIN,
        one_rank_explains=True,
    ),
    FailureKind(_lost_its_peer, priority=CausePriority.PEER_LOST),
    FailureKind(
        _from("worker"),
        sentence="{who} ended with exit code {exit_code}; its last line is: {last_line}",
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
    """Return the first answer of a kind that fits, the value of its field `question`; None if no
    kind answers."""
    answers = ((getattr(kind, question), kind) for kind in FAILURE_KINDS)
    # A test may search twenty lines for a pattern, so kinds without an answer are not tested.
    fitting = (answer for answer, kind in answers if answer is not None and kind.fits(failure))
    return next(fitting, None)


def first_of(failures: list[Failure]) -> Failure | None:
    """Return the failure that explains the others; None of an empty list."""

    def sort_key(failure: Failure) -> tuple[int, bool, bool, int]:
        is_silent = bool(_answer(failure, "one_rank_explains")) and failure.trainer_message is None
        return (failure.priority, is_silent, not failure.first_on_node, failure.order)

    return min(failures, key=sort_key, default=None)


def explained(failure: Failure) -> tuple[str, str]:
    """Return one sentence about what happened, and one about what to do."""
    words = failure.words()
    kinds = [kind for kind in FAILURE_KINDS if kind.sentence is not None and kind.fits(failure)]
    # What a script prints may only look like a known error: that is a hint, and no sentence.
    hints = [kind for kind in kinds if kind.known and not failure.has_exit_codes]
    for kind in kinds:
        if kind not in hints:
            with contextlib.suppress(KeyError):  # a word is unknown
                sentence = str(kind.sentence).format_map(words)
                remedy = _remedy(kind, failure)
                if hints:
                    remedy = f"perhaps {hints[0].known}: {_remedy(hints[0], failure)}"
                # The commands name the run's list of machines: the report prints them, too.
                return sentence, failure.file_hint or verbs.with_inventory(remedy)
    raise AssertionError("the last kind fits every failure")


def _remedy(kind: FailureKind, failure: Failure) -> str:
    general_remedy = None if failure.has_exit_codes else kind.general_remedy
    return general_remedy or kind.remedy or READ_BELOW


def document(failure: Failure) -> dict[str, Any]:
    """Return the failure as attempts.json has it."""
    message, remedy = explained(failure)
    values = asdict(failure)
    fields = ("host", "rank", "exit_code", "signal", "exception")
    return {
        **{name: values[name] for name in fields},
        "message": message,
        "remedy": remedy,
        "last_lines": list(failure.last_lines),
    }


def restart(failure: Failure) -> Restart:
    """Return the result that another attempt would have."""
    result: Restart = _answer(failure, "restart")
    return result


def reason(failure: Failure, divisor: int) -> str:
    """Return why another attempt begins, whose micro-batches are 1/`divisor` of the options'."""
    words = {"message": None, **failure.words(), "divisor": divisor}
    for kind in FAILURE_KINDS:
        if kind.reason is not None and kind.fits(failure):
            with contextlib.suppress(KeyError):  # a word is unknown
                return kind.reason.format_map(words)
    raise AssertionError("the last kind fits every failure")


def exit_code(failure: Failure) -> int:
    """Return the exit code of a run that this failure ended."""
    # After a signal 128 + its number, as in a shell. A real-time signal has no name here.
    by_signal = 128 + getattr(signal, failure.signal, signal.SIGKILL) if failure.signal else None
    return _answer(failure, "exit_code") or by_signal or failure.exit_code or 1


def no_resume(failure: Failure, run: str) -> str | None:
    """Return why a run that this failure ended is not to be continued; None if it may be."""
    template = _answer(failure, "no_resume")
    return template and template.format(run=run)
