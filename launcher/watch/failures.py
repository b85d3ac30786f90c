"""Lists the kinds of failure that can end a run, and finds the first cause of a failed attempt: the
failure that explains all others. watch.py collects failures; attempts.json has the first cause.

Clocks of different machines are not compared. On each machine the guard reports which worker failed
first. Between machines, an error that only says "a peer is gone" is the last choice for the cause.
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
from launcher.watch.known_errors import KNOWN_ERRORS, SIGNAL_MEANINGS

# Gaps have a limit: with `.*`, matching a line that repeats the first word takes time that grows
# with the square of its length.
PEER_LOST = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|socket closed|"
    r"connect(ion)? (to .{0,200})?refused|remote process has exited|ncclRemoteError|"
    r"timed? ?out (waiting|after)|timeout.{0,200}(barrier|store|allreduce|broadcast|recv|send)|"
    r"watchdog caught collective|failed to (recv|send).{0,200}got \d+ bytes|"
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
# A rank may print lines that make these patterns slow: twenty lines of 4096 characters take 0.2 s.
# Therefore only the beginning of each line is searched.
SEARCHED_CHARACTERS = 1000
TRAINER_MESSAGE = re.compile(r"^trainer: (.*)", re.MULTILINE)
# torch.distributed.launch prints `Signal 9 (SIGKILL) received by PID 4711` for a killed rank.
LAUNCH_SIGNAL = re.compile(r"Signal \d+ \((SIG\w{3,7})\) received by PID")
READ_BELOW = "read its last lines below"  # the remedy of a kind that has no better remedy


@dataclass(frozen=True)
class Failure:
    """Describes what went wrong on one node, as the control node saw it. The values of `source`:

    worker  a rank failed
    launch  torch.distributed.launch failed
    gone    the machine or the connection to the machine was lost
    guard   the guard was killed, or sent data that no guard sends
    busy    another run uses the machine
    left    a rank ended with 0; either other ranks still waited, or the rank printed an exception
    idle    a rank has done nothing for a long time after another rank ended with 0
    paused  the control node did not run, so the lease of the guard ended
    hung    a rank made no progress until the ranks that waited for it gave up
    alone   all ranks returned 0, and some ranks never met another rank

    `has_exit_codes`: the program uses the exit codes of contract/errors.py and takes the trainer's
    options, as our trainer does and a user's script does not.
    """

    host: str
    source: str
    order: int  # the number of failures that this watch had noted before
    rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    seconds: float | None = None  # since the attempt began
    exception: str | None = None
    error_lines: tuple[str, ...] = ()  # lines that belong to the exception
    # The line after the error that says most (node/errors.py), which may not be last_lines[-1].
    last_line: str | None = None
    message: str | None = None  # completes the sentence of its kind, so its form depends on source
    last_lines: tuple[str, ...] = ()  # the newest lines that it printed, to show them
    first_on_node: bool = True  # no other rank of this machine failed before this rank
    has_exit_codes: bool = True
    file_hint: str | None = None  # the remedy for a file that was not sent

    @cached_property
    def text(self) -> str:
        """The whole text of the failure: exception, message and last lines."""
        return "\n".join(filter(None, [self.exception, self.message, *self.last_lines]))

    @cached_property
    def evidence(self) -> str:
        """The text in which known errors are searched."""
        lines = [*self.last_lines]
        # A signal may end a process at any line, so the last lines prove nothing. SIGABRT differs:
        # a library prints its error and then aborts. If there is an exception, lines outside its
        # traceback are only warnings.
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
        """The priority of the failure's kind."""
        # Searching the patterns may take long (SEARCHED_CHARACTERS), so this property is cached.
        priority: CausePriority = _answer(self, "priority")
        return priority

    @property
    def restart(self) -> Restart:
        """The result that another attempt would probably have."""
        restart: Restart = _answer(self, "restart")
        return restart

    @property
    def no_resume(self) -> str | None:
        """Why a run that this failure ended should not be resumed, with {run} for the run's name;
        None if the run may be resumed."""
        template: str | None = _answer(self, "no_resume")
        return template

    @property
    def run_exit_code(self) -> int:
        """The exit code of a run that this failure ended."""
        # Like a shell, the run exits with 128 + the signal's number. A signal without a name in
        # Python, such as most real-time signals, counts as SIGKILL.
        by_signal = 128 + getattr(signal, self.signal, signal.SIGKILL) if self.signal else None
        return _answer(self, "exit_code") or by_signal or self.exit_code or 1

    def words(self) -> dict[str, object]:
        """Return {name: text} to fill the sentences of a FailureKind. Unknown names are absent."""
        newest_line = self.last_lines[-1] if self.last_lines else None
        # launch prints the signal near its end. The limit keeps the search fast.
        launch_signal = LAUNCH_SIGNAL.search(self.text[-4000:])
        message = self.trainer_message
        words = {
            "host": self.host,
            "who": self.host if self.rank is None else f"{self.host}, rank {self.rank}",
            "exit_code": self.exit_code,
            "signal": self.signal,
            "ending": self.signal or f"exit code {self.exit_code}",
            "killed_by": launch_signal and launch_signal[1],  # such as SIGKILL
            "source": self.source,
            "message": self.message,
            "exception": self.exception,
            # Unknown with an exception, so that the kind whose sentence has the exception answers.
            "last_line": None if self.exception else self.last_line,
            "trainer_message": message,
            "trainer_line": f"trainer: {message}" if message else newest_line,
        }
        # These clauses end a sentence. The clause for an unknown fact is empty, not absent.
        ends = {
            "after": "" if self.seconds is None else f" after {self.seconds:.0f} s",
            "and_message": f": {self.message}" if self.message else "",
            "and_error": f": {self.exception}" if self.exception else "",
            "and_last_line": f"; its last line is: {self.last_line}" if self.last_line else "",
        }
        return {name: value for name, value in words.items() if value is not None} | ends


class CausePriority(enum.IntEnum):
    """Orders failures: a failure with a lower number explains failures with higher numbers."""

    BUSY = 0
    INDEPENDENT = 1  # no other failure is needed to explain this failure
    GUARD = 2  # explains lost peers, but a rank's own failure says more
    LAUNCH = 3  # launch also fails after any of its ranks has failed
    PEER_LOST = 4


class Restart(enum.Enum):
    """Names the results that another attempt may have."""

    HELPS = enum.auto()
    SAME_AGAIN = enum.auto()
    IN_SMALLER_PIECES = enum.auto()  # with micro-batches of half the size


@dataclass(frozen=True)
class FailureKind:
    """Describes one kind of failure, and what follows if it is a run's first cause.

    Several kinds may fit one failure. Each field is a question. The first kind in FAILURE_KINDS
    that fits the failure, and whose field is not None, answers this question. Sentences are
    templates for Failure.words(). A template with an unknown word is no answer.
    """

    fits: Callable[[Failure], bool]
    priority: CausePriority | None = None
    sentence: str | None = None
    remedy: str | None = None  # belongs to the sentence
    general_remedy: str | None = None  # replaces `remedy` for a user's script
    restart: Restart | None = None
    reason: str | None = None  # why another attempt begins
    exit_code: int | None = None  # of the run; if None, Failure.run_exit_code chooses the code
    one_rank_explains: bool | None = None  # all ranks end like this, but only one prints why
    no_resume: str | None = None  # why the run should not continue from its checkpoint
    hint: str | None = None  # a script's failure gets this hint instead of the sentence


# The next functions return tests for FailureKind.fits.
def _source_is(*sources: str) -> Callable[[Failure], bool]:
    return lambda failure: failure.source in sources


def _exit_code_is(code: int, source: str | None = None) -> Callable[[Failure], bool]:
    """Return a test for this exit code, of a program that uses the codes of contract/errors.py."""

    def fits(failure: Failure) -> bool:
        is_code = failure.exit_code == code and failure.has_exit_codes
        return is_code and source in (None, failure.source)

    return fits


def _signal_is(name: str, source: str | None = None) -> Callable[[Failure], bool]:
    return lambda failure: failure.signal == name and source in (None, failure.source)


def _evidence_has(pattern: str) -> Callable[[Failure], bool]:
    return lambda failure: bool(re.search(pattern, failure.evidence))


def _lost_its_peer(failure: Failure) -> bool:
    """Return whether a rank failed only because another process is gone."""
    if failure.source != "worker" and not (failure.source == "left" and failure.exception):
        return False
    # A trainer exits with STOPPED only after a request to stop, which has another cause.
    if failure.exit_code == STOPPED and failure.has_exit_codes:
        return True
    lines = [line[:SEARCHED_CHARACTERS] for line in failure.last_lines]
    # NCCL's watchdog aborts a process that has printed no error of its program. Without SIGABRT the
    # trainer's message may itself only report the lost peer.
    is_aborted = failure.signal == "SIGABRT"
    if failure.signal is None or is_aborted:
        has_error = failure.exception or (is_aborted and failure.trainer_message)
        if not has_error and NCCL_PEER_LOST.search("\n".join(lines)):
            return True
    if failure.signal is not None:  # the signal is the reason, whatever the rank has printed
        return False
    # Programs that print no exception name the lost peer in one of their last three lines.
    text = (failure.exception or "\n".join(lines[-3:]))[: 3 * SEARCHED_CHARACTERS]
    return bool(PEER_LOST.search(text) or NCCL_PEER_LOST.search(text))


KILLED_IN_LAUNCH = "{host}: a process of torch.distributed.launch was ended by {killed_by}{after}"


def _make_signal_kinds(name: str, meaning: str, remedy: str) -> tuple[FailureKind, ...]:
    """Return three kinds: the signal `name` ended launch, a rank, or a process of launch."""
    # The double braces keep {host}, {who} and {after} for Failure.words().
    launch = f"{{host}}: torch.distributed.launch was ended by {name}{{after}}: {meaning}"
    rank = f"{{who}} was ended by {name}{{after}}: {meaning}"
    return (
        FailureKind(_signal_is(name, "launch"), sentence=launch, remedy=remedy),
        FailureKind(_signal_is(name), sentence=rank, remedy=remedy),
        # Launch itself was not killed, but reports the signal of a process that it started.
        FailureKind(
            lambda failure: failure.source == "launch" and failure.words().get("killed_by") == name,
            sentence=f"{KILLED_IN_LAUNCH}: {meaning}",
            remedy=remedy,
        ),
    )


# Kinds with stronger evidence come first, because the first kind that fits a failure answers.
FAILURE_KINDS: tuple[FailureKind, ...] = (
    FailureKind(
        _exit_code_is(OUT_OF_MEMORY, "worker"),
        priority=CausePriority.INDEPENDENT,
        restart=Restart.IN_SMALLER_PIECES,
        reason="{host} ran out of memory; micro-batches are 1/{divisor} now",
    ),
    # Precedes the kinds of exit codes: even if they say SAME_AGAIN, the next attempt can use the
    # machines whose disks have space.
    FailureKind(
        _evidence_has(r"No space left on device|Disk quota exceeded|Errno 28|ENOSPC"),
        sentence="{who}: its disk is full",
        hint="its disk is full",
        remedy="delete old runs in <node_dir>/runs on that machine, then type "
        "`make train RESUME=latest`",
        general_remedy="delete old runs in <node_dir>/runs on that machine, then start it again",
        restart=Restart.HELPS,
    ),
    *(
        FailureKind(
            _evidence_has(error.pattern),
            sentence=f"{{who}}: {error.meaning}",
            remedy=error.remedy,
            general_remedy=error.general_remedy,
            hint=error.meaning,
        )
        for error in KNOWN_ERRORS
    ),
    *(kind for name, texts in SIGNAL_MEANINGS.items() for kind in _make_signal_kinds(name, *texts)),
    FailureKind(
        lambda failure: failure.signal is not None,
        sentence="{who} ended by {signal}",
        remedy=READ_BELOW,
    ),
    # For a script. Without an exception a word is unknown, so that a later kind answers.
    FailureKind(
        lambda failure: failure.source == "worker" and not failure.has_exit_codes,
        sentence="{who}: {exception}{and_last_line}",
        remedy=READ_BELOW,
        reason="{who} failed: {exception}",
    ),
    # A guard's failure has the guard's exit code, which must not become the run's. The other
    # sources have no exit code.
    FailureKind(
        _source_is("busy", "paused", "gone", "guard", "hung", "alone", "left", "idle"), exit_code=1
    ),
    FailureKind(
        _source_is("busy"),
        priority=CausePriority.BUSY,
        sentence="{host}: {message}",
        reason="{host}: {message}",
        remedy="wait with QUEUE=1, or ask the person who started that run",
    ),
    FailureKind(
        _source_is("paused"),
        sentence="{message}, so {host} received no messages and ended its processes",
        remedy="do not stop or suspend the control node during a run (with DETACH=1 it needs no "
        "terminal); `make train RESUME=latest` continues the run",
        general_remedy="do not stop or suspend the control node during a run (with "
        "DETACH=1 it needs no terminal)",
        reason="{message}",
    ),
    FailureKind(
        _source_is("hung"),
        sentence="{who} stopped, and the other ranks gave up waiting for it: {message}",
        remedy="find out on that machine what the process waits for (ps -eo pid,stat,wchan:20,cmd; "
        "dmesg); with MAX_RESTARTS=3, Tandem restarts the run",
        general_remedy="find out on that machine what the process waits for (ps -eo "
        "pid,stat,wchan:20,cmd; dmesg); with RESUME_ARGS=... and MAX_RESTARTS=3, Tandem restarts "
        "it",
        reason="{who} hung",
    ),
    # A rank with source `left` has either printed an exception or finished before other ranks.
    FailureKind(
        _source_is("left"),
        sentence="{who} ended with 0 after it printed {exception}{and_message}",
        remedy="read its last lines below; if the script ends with another exit code after an "
        "error, the run stops at once",
        reason="{who} ended with 0 after it printed {exception}",
    ),
    FailureKind(
        _source_is("left"),
        # watch.py puts the rank that still waited, such as `pc2, rank 1`, into `message`.
        sentence="{who} finished{after}, while {message} still waited for it",
        remedy="give each rank the same number of batches: use a DistributedSampler, "
        "drop_last=True in the DataLoader, or DistributedDataParallel's join()",
        reason="{who} finished before the other ranks",
    ),
    FailureKind(
        _source_is("idle"),
        sentence="{who} {message}",
        remedy="end its threads and processes before the script ends, or make its threads daemons "
        "(threading.Thread(daemon=True))",
        restart=Restart.SAME_AGAIN,
    ),
    FailureKind(
        _source_is("alone"),
        sentence="{host}: {message}",
        remedy="call init_process_group, and wrap the model in DistributedDataParallel, or give "
        "Lightning's Trainer num_nodes; NODES=1 on a machine with one GPU needs neither",
        restart=Restart.SAME_AGAIN,
    ),
    FailureKind(
        _source_is("gone"),
        sentence="{host} does not answer any more{and_message}",
        remedy="check its power and its network cable; MAX_RESTARTS=3 continues without it",
        general_remedy="check its power and its network cable; with RESUME_ARGS=... and "
        "MAX_RESTARTS=3 a run continues without it",
        reason="{host} does not answer any more{and_message}",
    ),
    FailureKind(
        _source_is("guard"),
        priority=CausePriority.GUARD,
        sentence="the guard on {host}, the process that watches the ranks, ended{and_message}",
        remedy="find out who killed it; with MAX_RESTARTS=3, Tandem restarts the run",
        general_remedy="find out who killed it; with RESUME_ARGS=... and "
        "MAX_RESTARTS=3, Tandem restarts the run",
    ),
    # For signals without a meaning in the table. Without a signal {killed_by} is unknown, and the
    # next kind answers.
    FailureKind(_source_is("launch"), sentence=KILLED_IN_LAUNCH, remedy=READ_BELOW),
    FailureKind(
        _source_is("launch"),
        priority=CausePriority.LAUNCH,
        sentence="{host} could not run torch.distributed.launch{and_message}{after}",
        remedy="read nodes/<host>/launch.log in the run's folder",
    ),
    FailureKind(
        _exit_code_is(DIVERGED),
        sentence="{trainer_message}",
        remedy="start a new run with the suggested options, such as ARGS='--lr 0.01'",
        restart=Restart.SAME_AGAIN,
        one_rank_explains=True,
        no_resume="runs/{run}/checkpoints has the last checkpoint; RESUME={run} would repeat the "
        "steps that diverged, and fail again",
    ),
    # For a failure without a trainer's message.
    FailureKind(
        _exit_code_is(DIVERGED),
        sentence="the loss became infinite or NaN",
        remedy="start a new run with a smaller learning rate, such as ARGS='--lr 0.01'",
    ),
    # INDEPENDENT, because its message may quote a file server's "connection reset", which is no
    # lost peer.
    FailureKind(
        _exit_code_is(DATA_LOST),
        priority=CausePriority.INDEPENDENT,
        sentence="{who}: trainer: {trainer_message}",
        remedy="when its disk or file server works again, type `make train RESUME=latest`; with "
        "MAX_RESTARTS=3 a run restarts without the machines that cannot read their images",
        one_rank_explains=True,
    ),
    FailureKind(
        _exit_code_is(BAD_INPUT),
        sentence="{who}: {trainer_line}",
        remedy="correct this and start again",
        restart=Restart.SAME_AGAIN,
        one_rank_explains=True,
    ),
    FailureKind(_lost_its_peer, priority=CausePriority.PEER_LOST),
    FailureKind(
        _source_is("worker"),
        sentence="{who} ended with exit code {exit_code}; its last line is: {last_line}",
        remedy=READ_BELOW,
        reason="{who} failed: {ending}",
    ),
    # Fits every failure, so that its questions always have an answer.
    FailureKind(
        lambda failure: True,
        priority=CausePriority.INDEPENDENT,
        sentence="{who} ended with exit code {exit_code}{and_error}",
        remedy=READ_BELOW,
        restart=Restart.HELPS,
        reason="{host}: {source} failed",
    ),
)


def _answer(failure: Failure, question: str) -> Any:
    """Return the first kind's answer to `question`, a field of FailureKind; None if no kind that
    fits the failure answers."""
    answers = ((getattr(kind, question), kind) for kind in FAILURE_KINDS)
    # `fits` may search twenty lines for a pattern, so only kinds with an answer are tested.
    fitting = (answer for answer, kind in answers if answer is not None and kind.fits(failure))
    return next(fitting, None)


def find_first_cause(failures: list[Failure]) -> Failure | None:
    """Return the failure that explains all other failures; None for an empty list."""
    # If all ranks end alike, the rank that printed a message explains the silent ranks.
    return min(
        failures,
        key=lambda failure: (
            failure.priority,
            bool(_answer(failure, "one_rank_explains")) and failure.trainer_message is None,
            not failure.first_on_node,
            failure.order,
        ),
        default=None,
    )


def explain_failure(failure: Failure) -> tuple[str, str]:
    """Return a sentence about what happened, and the remedy."""
    words = failure.words()
    kinds = [kind for kind in FAILURE_KINDS if kind.sentence is not None and kind.fits(failure)]
    # Text that a script prints may only look like a known error. Such a kind therefore gives no
    # sentence, and its meaning becomes a hint before the remedy.
    hints = [kind for kind in kinds if kind.hint and not failure.has_exit_codes]
    for kind in kinds:
        if kind not in hints:
            with contextlib.suppress(KeyError):  # a word is unknown
                sentence = str(kind.sentence).format_map(words)
                remedy = _choose_remedy(kind, failure)
                if hints:
                    remedy = f"perhaps {hints[0].hint}: {_choose_remedy(hints[0], failure)}"
                # The report prints these commands later, so they name the run's inventory.
                return sentence, failure.file_hint or verbs.with_inventory(remedy)
    raise AssertionError("the last kind fits every failure")


def _choose_remedy(kind: FailureKind, failure: Failure) -> str:
    general_remedy = None if failure.has_exit_codes else kind.general_remedy
    return general_remedy or kind.remedy or READ_BELOW


def as_document(failure: Failure) -> dict[str, Any]:
    """Return the failure as attempts.json records it (boundary.run_files.FirstCause)."""
    message, remedy = explain_failure(failure)
    values = asdict(failure)
    fields = ("host", "rank", "exit_code", "signal", "exception")
    return {
        **{name: values[name] for name in fields},
        "message": message,
        "remedy": remedy,
        "last_lines": list(failure.last_lines),
    }


def explain_restart(failure: Failure, divisor: int) -> str:
    """Return why another attempt begins. `divisor`: the next attempt divides the micro-batches of
    the options by this number, after a rank ran out of memory."""
    words = {**failure.words(), "divisor": divisor}
    for kind in FAILURE_KINDS:
        if kind.reason is not None and kind.fits(failure):
            with contextlib.suppress(KeyError):  # a word is unknown
                return kind.reason.format_map(words)
    raise AssertionError("the last kind fits every failure")
