"""Read a run's folder, during the run and afterwards: no other module does.

`make status`, `make top`, the report, comparisons and sweeps take their figures from a RunRecord.
boundary/run_files.py defines each record, and docs/run-directory.md the folder. A sentence in
`RunRecord.missing` says how many lines were not records. This module computes no means: measure.py
does.
"""

from __future__ import annotations

import contextlib
import math
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from boundary import run_files
from boundary.run_files import MOST_RANKS
from boundary.schema import convert_what_fits
from contract.errors import UserError
from contract.records import CATEGORIES, MOST_SCALARS
from report.files import (
    Entry,
    Growing,
    files_of_hosts,
    natural,
    read_last_object,
    read_object,
    time_of,
)

# A line of kind `step` is about one or more steps. At most so many lines are in memory (116 bytes
# each), of all ranks together. Neighbouring lines of a longer run are joined, but each rank has at
# least LEAST_LINES lines in each attempt.
MOST_STEPS, LEAST_LINES = 1_000_000, 8
MOST_OTHER_LINES = 4000  # lines of each rank and attempt that are not steps; the newest are kept
MOST_RECORDS = 4096  # RankRecords: one for each rank in each attempt
LARGEST_STRIDE = 1 << 60  # steps; no run has so many
RECENT_LINES = 100  # of a machine, one a second, for a view of its present state
STALL_SECONDS = 5.0  # after which a rank records where it is
BETWEEN = "between_epochs"
# The categories in `StepColumns.seconds`: start_stop is not in the loop, and the seconds of BETWEEN
# are in the column `between`.
TIMED = tuple(name for name in CATEGORIES if name not in ("start_stop", BETWEEN))
# The columns of StepColumns that are arrays; `seconds` and `scalars` are dictionaries of arrays.
COLUMNS = ("count", "step", "samples", "clock", "longest", "loss", "exact", "between")


def doubles() -> array[float]:
    return array("d")


@dataclass
class StepColumns:
    """The lines of steps of one rank in one attempt, in the order written. Beyond `limit` lines,
    neighbouring lines are joined, but not the first line, which measurements omit."""

    count: array[int] = field(default_factory=lambda: array("q"))  # steps of the line
    step: array[int] = field(default_factory=lambda: array("q"))  # number of the line's last step
    samples: array[float] = field(default_factory=doubles)
    clock: array[float] = field(default_factory=doubles)  # seconds of the loop, at the line's end
    longest: array[float] = field(default_factory=doubles)  # seconds of the line's longest step
    loss: array[float] = field(default_factory=doubles)  # NaN between log points
    exact: array[int] = field(default_factory=lambda: array("b"))  # 1: exact sums, as in a warm-up
    between: array[float] = field(default_factory=doubles)  # seconds between epochs, before a step
    seconds: dict[str, array[float]] = field(
        default_factory=lambda: {name: doubles() for name in TIMED}
    )
    # NaN: the scalar was not recorded, or was not finite.
    scalars: dict[str, array[float]] = field(default_factory=dict)
    limit: int = MOST_STEPS
    stride: int = 1  # joined lines end at step numbers that are multiples of `stride`

    def __len__(self) -> int:
        return len(self.count)

    @property
    def total(self) -> list[float]:
        """The seconds of each line, over all categories."""
        return [sum(line) for line in zip(*self.seconds.values())]

    def since(self, index: int) -> StepColumns:
        """Return a copy of the lines from `index` on."""
        seconds = {name: values[index:] for name, values in self.seconds.items()}
        scalars = {name: values[index:] for name, values in self.scalars.items()}
        columns = {name: getattr(self, name)[index:] for name in COLUMNS}
        return replace(self, **columns, seconds=seconds, scalars=scalars)

    def append(self, line: run_files.RankLine, clock: float) -> None:
        """Add a line of steps. `clock`: seconds of the loop at its end."""
        seconds = line.seconds
        mean = sum(seconds.values()) / line.steps
        self.count.append(line.steps)
        self.step.append(line.step)
        self.samples.append(line.samples or 0.0)
        self.clock.append(clock)
        self.longest.append(mean if line.longest is None else line.longest)
        self.loss.append(math.nan if line.loss is None else line.loss)
        self.exact.append(line.exact)
        self.between.append(seconds.get(BETWEEN, 0.0))
        for name, values in self.seconds.items():
            values.append(seconds.get(name, 0.0))
        # A scalar that appears late has no values in the earlier lines.
        for name in line.scalars:
            if name not in self.scalars and len(self.scalars) < MOST_SCALARS:
                self.scalars[name] = array("d", [math.nan] * (len(self) - 1))
        for name, values in self.scalars.items():
            value = line.scalars.get(name)
            values.append(math.nan if value is None else value)
        self.thin(self.limit)

    def thin(self, limit: int) -> None:
        """Set the limit, and join lines if there are more."""
        self.limit = limit
        if len(self) <= limit:
            return
        # Joining down to half of the limit makes joining rare. Powers of two let the lines of all
        # ranks end at the same steps, so that the waits of ranks can be compared.
        self._join()
        while len(self) > limit // 2 and self.stride < LARGEST_STRIDE:
            self.stride *= 2
            self._join()

    def _join(self) -> None:
        """Join all lines between two multiples of `stride`, exact steps apart from other steps."""
        # Lines with equal keys are joined. Only lines that no run writes let `stride` grow to
        # LARGEST_STRIDE. They all get the same key, which joins them in any case.
        is_possible = self.stride < LARGEST_STRIDE
        keys = [
            ((step - 1) // self.stride, exact) if is_possible else (0, 0)
            for step, exact in zip(self.step, self.exact)
        ]
        # Line 0 stays by itself. Keys a, a, a, b, b give the ends 0, 2 and 4.
        final = len(keys) - 1
        ends = [i for i in range(len(keys)) if i in (0, final) or keys[i] != keys[i + 1]]
        begins = [0, *(end + 1 for end in ends)]
        spans = [slice(begin, end + 1) for begin, end in zip(begins, ends)]

        def join(column: array[Any], combine: Callable[..., Any]) -> None:
            column[:] = array(column.typecode, [combine(column[span]) for span in spans])

        def last_number(values: array[Any]) -> Any:
            # The last value that is a number: NaN differs from itself.
            return next((value for value in reversed(values) if value == value), math.nan)

        summed: list[array[Any]] = [self.count, self.samples, self.between]
        for column in (*summed, *self.seconds.values()):
            join(column, sum)
        for column in (self.loss, *self.scalars.values()):
            join(column, last_number)
        join(self.longest, max)
        join(self.exact, max)
        join(self.step, last_number)
        join(self.clock, last_number)


class TimedEvaluation(NamedTuple):
    clock: float  # seconds of the loop at the evaluation's end
    scores: run_files.Evaluation


class OtherLine(NamedTuple):
    """A line about evaluation, saving or the end of a rank. `seconds`: by category."""

    clock: float
    seconds: dict[str, float]


class Stalled(NamedTuple):
    """A step that took STALL_SECONDS or more, by the clock of the loop."""

    clock: float
    seconds: float


@dataclass
class RankRecord:
    """The records of one rank in one attempt."""

    host: str
    rank: int
    attempt: int
    start: run_files.RankStart = field(default_factory=run_files.RankStart)
    end: run_files.RankEnd = field(default_factory=run_files.RankEnd)
    seconds: dict[str, float] = field(default_factory=dict)  # by category, over all lines
    steps: StepColumns = field(default_factory=StepColumns)
    evaluations: list[TimedEvaluation] = field(default_factory=list)
    other_lines: deque[OtherLine] = field(default_factory=lambda: deque(maxlen=MOST_OTHER_LINES))
    # The newest line, if it is a `stall` line: where the rank was when a step took long. Any other
    # line makes it blank again.
    stall: run_files.Stall = field(default_factory=run_files.Stall)
    # True from a `stall` line until the line with the stall's seconds, which may come later than
    # other lines.
    is_stalled: bool = False
    stalls: deque[Stalled] = field(default_factory=lambda: deque(maxlen=MOST_OTHER_LINES))
    unix: float = field(default=0.0, repr=False)  # when the file grew, by this machine's clock
    epoch: int | None = None  # of the last step, from 0
    loss: float | None = None  # at the last log point, like top1
    top1: float | None = None
    epochs_begun: int = 0  # without the first epoch
    not_finite: dict[str, int] = field(default_factory=dict)  # scalar -> first step with NaN or inf
    unsummed: int = 0  # the most steps in a row whose gradients were not summed
    is_uncounted: bool = False  # the program could not count the samples of some step

    @property
    def clock(self) -> float:
        """Seconds of the loop so far."""
        return sum(self.seconds.values())

    @property
    def step_count(self) -> int:
        return sum(self.steps.count)

    def cut_to_last(self, seconds: float, least_steps: int = 0) -> RankRecord:
        """Return a record of the last `seconds`, or of a longer time with `least_steps` measured
        steps, if there are so many."""
        since = self.clock - seconds
        # Measurements omit the first line, so the record begins with the line before `since`.
        index = max(0, sum(clock < since for clock in self.steps.clock) - 1)
        while index and sum(self.steps.count[index + 1 :]) < least_steps:
            index -= 1
        # The other lines must cover the same time as the lines of steps.
        since = min(since, self.steps.clock[index]) if len(self.steps) else since
        other_lines = deque(line for line in self.other_lines if line.clock >= since)
        steps = self.steps.since(index)
        # Without the work between epochs, which is in `steps.between`.
        spent: dict[str, float] = {name: sum(values) for name, values in steps.seconds.items()}
        for line in other_lines:
            add_seconds(spent, line.seconds)
        return replace(self, steps=steps, other_lines=other_lines, seconds=spent)

    def fold(self, entry: Entry) -> None:
        """Add one line of the rank's file."""
        kind = entry.get("kind")
        # A rank records a stall while the stall lasts. Any other line shows that the stall is over.
        if kind == "stall":
            self.stall, self.is_stalled = convert_what_fits(entry, run_files.Stall), True
            return
        self.stall = run_files.Stall()
        if kind == "start":
            self.start = convert_what_fits(entry, run_files.RankStart)
            return
        line: run_files.RankLine = convert_what_fits(entry, run_files.RankLine)
        add_seconds(self.seconds, line.seconds)
        clock = self.clock
        if self.is_stalled:
            # Lines of short steps may precede the line of the long step with the stall's seconds. A
            # line about an evaluation or saving, which may take long, ends the stall, and no
            # Stalled is recorded.
            spent = sum(line.seconds.values()) if line.longest is None else line.longest
            if spent >= STALL_SECONDS and kind in ("step", "end"):
                self.stalls.append(Stalled(clock - spent, spent))
            self.is_stalled = spent < STALL_SECONDS and kind == "step"
        if kind == "step":
            # A script records its loss as a scalar, and the trainer in a field of its own.
            loss = line.scalars.get("loss", line.loss)
            self.loss = self.loss if loss is None else loss
            self.top1 = self.top1 if line.top1 is None else line.top1
            # Before the first line there is no epoch, and some programs count no epochs.
            if self.epoch is not None and line.epoch is not None:
                self.epochs_begun += max(0, line.epoch - self.epoch)
            self.epoch = line.epoch
            self.unsummed = max(self.unsummed, line.unsummed)
            self.is_uncounted |= line.samples is None
            # The values on the right win, so that each scalar keeps its first step.
            if len(self.not_finite) < MOST_SCALARS:
                self.not_finite = {**line.not_finite, **self.not_finite}
            self.steps.append(line, clock)
            return
        self.other_lines.append(OtherLine(clock, line.seconds))
        if kind == "evaluate":
            scores = convert_what_fits(entry, run_files.Evaluation)
            if scores.samples == 0:  # older records have scores even then
                scores.top1 = scores.top5 = scores.loss = None
            # A full list keeps the oldest evaluations, which show how the model learned, and the
            # newest one, which shows what it reached.
            if scores.epoch is not None:
                del self.evaluations[MOST_OTHER_LINES - 1 :]
                self.evaluations.append(TimedEvaluation(clock, scores))
        if kind == "end":
            self.end = convert_what_fits(entry, run_files.RankEnd)


def first_start(records: list[RankRecord]) -> run_files.RankStart:
    """Return the first start line of the records. It is blank if no rank wrote one."""
    return next((record.start for record in records if record.start), run_files.RankStart())


def add_seconds(total: dict[str, float], seconds: dict[str, float]) -> None:
    """Add `seconds` to `total`, key by key."""
    for category, value in seconds.items():
        total[category] = total.get(category, 0.0) + value


@dataclass
class Machine:
    """The records of one machine, in the order written."""

    host: str
    # Each iteration reads the files again, because the lines of weeks fill hundreds of megabytes.
    files: list[tuple[Path, int]] = field(default_factory=list)  # with their attempts
    recent: deque[Entry] = field(default_factory=lambda: deque(maxlen=RECENT_LINES))  # the newest
    stacks: Entry = field(default_factory=dict)  # the newest `stacks` line: frames of silent ranks
    unix: float = 0.0  # when the file grew last, by this machine's clock

    @property
    def mono(self) -> float:
        """The machine's clock at its newest line, in seconds; 0 if `recent` is empty."""
        return (time_of(self.recent[-1].get("mono")) or 0.0) if self.recent else 0.0

    def __iter__(self) -> Iterator[Entry]:
        """Yield all lines of the machine, oldest first, each with its attempt."""
        for path, attempt in self.files:
            yield from lines_of(Growing(path), attempt)


def lines_of(file: Growing, attempt: int) -> Iterator[Entry]:
    """Yield a machine's lines, each with its attempt."""
    for line in file.lines():
        line["attempt"] = attempt
        yield line


@dataclass
class RunRecord:
    """The files of one run. Hosts are inventory names."""

    folder: Path
    plan: run_files.RunPlan
    attempts: list[run_files.AttemptRecord]
    status: str | None
    ranks: list[RankRecord]
    exits: dict[tuple[str, int], run_files.GuardEnd]  # by host and attempt
    machines: dict[str, Machine]
    missing: list[str]  # sentences

    @property
    def program(self) -> run_files.PlannedProgram:
        return self.plan.program

    @property
    def sample(self) -> str:
        """The word for one thing that the program trains on, such as `image`."""
        return self.program.sample

    @property
    def samples(self) -> str:
        return f"{self.sample}s"

    @property
    def untimed(self) -> bool:
        """True if the plan requires no step times, and no rank recorded any."""
        return not self.program.times_steps and not self.ranks

    @property
    def hosts(self) -> list[str]:
        """All hosts: the planned hosts in the plan's order, then others that left a record."""
        planned = [node.host for node in self.plan.nodes if node.host is not None]
        recorded = {record.host for record in self.ranks} | {host for host, _ in self.exits}
        recorded |= set(self.machines)
        return planned + sorted(recorded - set(planned), key=natural)

    @property
    def newest_attempt(self) -> int | None:
        """The newest attempt of which a rank left records; None without such an attempt."""
        return max((record.attempt for record in self.ranks), default=None)

    def ranks_in(self, attempt: int | None) -> list[RankRecord]:
        """Return the records of the ranks in an attempt; [] for None."""
        return [record for record in self.ranks if record.attempt == attempt]

    @property
    def nodes_per_machine(self) -> dict[str, int]:
        """Host -> number of nodes on its machine, for nodes of connection `local`. All of them are
        processes of the control node, so each host has the same number."""
        nodes = [node for node in self.plan.nodes if node.connection == "local"]
        local = [node.host for node in nodes if node.host is not None]
        return {host: len(local) for host in local}

    @property
    def on_one_machine(self) -> bool:
        """True if all ranks are processes of one machine, without a network between them."""
        return len(self.hosts) == 1 or self.nodes_per_machine.keys() >= set(self.hosts)

    @property
    def unix(self) -> float | None:
        """When the newest record arrived, by this machine's clock."""
        return max((machine.unix for machine in self.machines.values()), default=None)


@contextlib.contextmanager
def skip_damaged_records(host: str, note: Callable[[str], None]) -> Iterator[None]:
    """Turn an error in the records of one machine into a sentence for `note`, because damaged
    records must not hide those of other machines."""
    try:
        yield
    except (UserError, MemoryError):  # a limit of the report itself
        raise
    except Exception as error:
        kind = type(error).__name__
        note(f"{host}: its records cannot be read ({kind}: {error}).")


def read_run(folder: Path) -> RunRecord:
    """Read `folder` once. Raises UserError if it holds nothing of a run."""
    return Reader(folder).read()


# In attempt 1 rank 3 writes its steps to `rank3.1.steps.jsonl`, and the guard of its machine writes
# the state of the machine to `machine.1.jsonl`.
RANK_FILE = re.compile(r"rank([0-9]{1,9})\.([0-9]{1,9})\.steps\.jsonl")
MACHINE_FILE = re.compile(r"machine\.([0-9]{1,9})\.jsonl")


class RankKey(NamedTuple):
    """Identifies a RankRecord, and sorts records by attempt, then by rank."""

    attempt: int
    rank: int
    host: str


class Reader:
    """Reads a run's folder, once or repeatedly; repeated calls read only what is new."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[Path, Growing] = {}
        self._ranks: dict[RankKey, RankRecord] = {}
        self._machines: dict[str, Machine] = {}
        self._exits: dict[tuple[str, int], run_files.GuardEnd] = {}
        self._faults: dict[str, str] = {}  # host -> a sentence on records that cannot be read
        self._lines_per_rank = MOST_STEPS  # over all attempts
        self._ignored: set[RankKey] = set()  # ranks and attempts beyond MOST_RECORDS

    def read(self, recent: bool = False) -> RunRecord:
        """Return all that is recorded so far. Raises UserError if the folder holds no run.
        `recent`: also collect the newest lines of each machine."""
        folder, nodes = self.folder, self.folder / "nodes"
        # A missing folder and one without a run need different remedies.
        if not folder.is_dir():
            raise UserError(f"There is no run at {folder}: `ls runs` lists the runs.")
        missing: list[str] = []
        plan = read_object(folder / "plan.json", missing)
        attempts = read_object(folder / "attempts.json", missing)
        if not plan and not attempts and not nodes.is_dir():
            raise UserError(
                f"{folder} is not a run directory: it has neither plan.json nor nodes/. Type "
                "the folder of one run."
            )
        run_end = convert_what_fits(attempts, run_files.RunEnd)
        files = files_of_hosts(nodes)
        # All ranks share MOST_STEPS lines, so a new rank leaves fewer lines for the other ranks.
        names = [(host, path.name) for host, paths in files.items() for path in paths]
        ranks = {(host, match[1]) for host, name in names if (match := RANK_FILE.fullmatch(name))}
        lines_per_rank = MOST_STEPS // max(1, len(ranks))
        if lines_per_rank != self._lines_per_rank:
            self._lines_per_rank = lines_per_rank
            self._thin(self._ranks.values())
        for host, paths in files.items():
            with skip_damaged_records(host, partial(self._faults.__setitem__, host)):
                for path in paths:
                    if match := RANK_FILE.fullmatch(path.name):
                        rank, attempt = map(int, match.groups())
                        if rank < MOST_RANKS:
                            self._read_rank(host, rank, attempt, path)
                    elif match := MACHINE_FILE.fullmatch(path.name):
                        self._read_machine(host, int(match[1]), path, recent)
        run = RunRecord(
            folder=folder,
            plan=convert_what_fits(plan, run_files.RunPlan),
            attempts=run_end.attempts,
            status=run_end.status,
            ranks=[self._ranks[key] for key in sorted(self._ranks)],
            exits=self._exits,
            machines=self._machines,
            missing=missing,
        )
        if run.program.times_steps and not run.ranks:
            missing.append(
                "No rank wrote its timings (nodes/<host>/rank<k>.<attempt>.steps.jsonl)."
            )
        missing += self._faults.values()
        for path, file in self._files.items():
            if file.bad:
                name = "/".join(path.parts[-2:])  # node1/rank0.1.steps.jsonl
                missing.append(f"{name}: {file.bad:,} lines are not records and were skipped.")
        if self._ignored:
            ignored = len(self._ignored)
            missing.append(f"{ignored:,} ranks and attempts beyond {MOST_RECORDS:,} are not read.")
        return run

    def _read_rank(self, host: str, rank: int, attempt: int, path: Path) -> None:
        """Fold the new lines of a rank into its record."""
        modified_unix = path.stat().st_mtime
        key = RankKey(attempt, rank, host)
        for line in self._files.setdefault(path, Growing(path)).lines():
            if key not in self._ranks:
                # A hostile machine could name any number of ranks and attempts.
                if len(self._ranks) == MOST_RECORDS:
                    self._ignored.add(key)
                    return
                self._ranks[key] = RankRecord(host, rank, attempt)
                # A new attempt leaves fewer lines for the earlier attempts of this rank.
                records = self._ranks.values()
                self._thin(r for r in records if (r.rank, r.host) == (rank, host))
            self._ranks[key].fold(line)
            # The file may have grown after `stat`; an older time makes a rank look more silent.
            self._ranks[key].unix = modified_unix

    def _thin(self, records: Iterable[RankRecord]) -> None:
        """Limit each record to its share of a rank's lines."""
        attempts = len({key.attempt for key in self._ranks})
        for record in records:
            record.steps.thin(max(LEAST_LINES, self._lines_per_rank // attempts))

    def _read_machine(self, host: str, attempt: int, path: Path, recent: bool) -> None:
        """Note a machine's file and how its guard ended. Collect its newest lines only if `recent`:
        an iteration over the Machine reads all of them."""
        machine = self._machines.setdefault(host, Machine(host))
        if path not in self._files:
            self._files[path] = Growing(path)
            machine.files.append((path, attempt))
        # Unless a guard was killed, the last line of its file is an `exit` line.
        end = read_last_object(path) if (host, attempt) not in self._exits else None
        if end and end.get("kind") == "exit":
            self._exits[host, attempt] = convert_what_fits(end, run_files.GuardEnd)
        machine.unix = max(machine.unix, path.stat().st_mtime)
        if recent:
            for line in lines_of(self._files[path], attempt):
                if line.get("kind") == "sample":
                    machine.recent.append(line)
                elif line.get("kind") == "stacks":
                    machine.stacks = line
