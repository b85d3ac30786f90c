"""The one reader of a run's folder, while the run goes on and afterwards: status, top, the report,
comparisons and sweeps have their figures from here. The layout is docs/run-directory.md.

Each record is read as boundary/run_files.py has it; a line that is no record is
counted, and named in `Run.missing`. A Reader that is used again reads only what is new.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from boundary.run_files import (
    MOST_ATTEMPTS,
    MOST_RANKS,
    AttemptRecord,
    Evaluation,
    GuardEnd,
    PlannedProgram,
    RankEnd,
    RankStart,
    RunEnd,
    RunPlan,
    Stall,
)
from boundary.schema import convert_what_fits
from contract.errors import UserError
from contract.records import CATEGORIES
from report.files import (
    Entry,
    Growing,
    count,
    files_of_hosts,
    natural,
    natural_number,
    number,
    positive,
    read_object,
    time_of,
)

# Of all ranks together, lines of steps (116 bytes each): of more, neighbours are joined; of each
# rank in an attempt FEWEST are left in any case. Of each, lines beside its steps: the newest.
MOST_STEPS, FEWEST, MOST_BESIDE, MOST_RECORDS = 1_000_000, 8, 4000, 4096
FARTHEST = 1 << 60  # a multiple of steps beyond those of any run
RECENT_LINES = 100  # of a machine, for whoever asks how it is now
BETWEEN = "between_epochs"
TIMED = tuple(name for name in CATEGORIES if name not in ("start_stop", BETWEEN))  # in the loop


def doubles() -> array[float]:
    return array("d")


def newest() -> deque[Any]:
    return deque(maxlen=MOST_BESIDE)


def join(values: array[Any], spans: list[slice], by: Callable[..., Any]) -> None:
    """Put one value for those of each span."""
    values[:] = array(values.typecode, [by(values[span]) for span in spans])


def last_number(values: array[Any]) -> Any:
    return next((value for value in reversed(values) if value == value), math.nan)


@dataclass
class StepColumns:
    """Lines of steps of one rank in one attempt, in the order written: how many steps each is of,
    the number of the last, and the sums of their figures. The first step has a line to itself. Of
    more than `most` lines neighbours are joined: sums stay those of all steps."""

    count: array[int] = field(default_factory=lambda: array("q"))
    step: array[int] = field(default_factory=lambda: array("q"))
    samples: array[float] = field(default_factory=doubles)
    clock: array[float] = field(default_factory=doubles)  # of the loop, at its end
    longest: array[float] = field(default_factory=doubles)  # seconds of one step
    loss: array[float] = field(default_factory=doubles)  # NaN between log points
    exact: array[int] = field(default_factory=lambda: array("b"))  # 1 in the warm-up of a strategy
    between: array[float] = field(default_factory=doubles)  # seconds between epochs, before a step
    seconds: dict[str, array[float]] = field(
        default_factory=lambda: {name: doubles() for name in TIMED}
    )
    most: int = MOST_STEPS
    stride: int = 1  # a joined line ends at a multiple of so many steps

    def __len__(self) -> int:
        return len(self.count)

    @property
    def total(self) -> list[float]:
        """Seconds of each line."""
        return [sum(of_line) for of_line in zip(*self.seconds.values())]

    def since(self, place: int) -> StepColumns:
        """The lines from there on."""
        plain = ("count", "step", "samples", "clock", "longest", "loss", "exact", "between")
        seconds = {name: values[place:] for name, values in self.seconds.items()}
        return replace(
            self, **{name: getattr(self, name)[place:] for name in plain}, seconds=seconds
        )

    def thin(self, most: int) -> None:
        """Keep at most so many lines; of more, half as many, so that this is rare. Those of all
        ranks go on ending at the same steps, so that waits can be matched."""
        self.most = most
        if len(self) <= most:
            return
        self._join()
        while len(self) > most // 2 and self.stride < FARTHEST:
            self.stride *= 2
            self._join()

    def _join(self) -> None:
        """Make one line of all between two multiples of `stride` whose sums are alike exact."""
        alike = self.stride < FARTHEST  # else numbers are none of steps
        keys = [
            ((step - 1) // self.stride, exact) if alike else (0, 0)
            for step, exact in zip(self.step, self.exact)
        ]
        final = len(keys) - 1
        ends = [at for at in range(len(keys)) if at in (0, final) or keys[at] != keys[at + 1]]
        spans = [slice(begin, end + 1) for begin, end in zip([0, *(e + 1 for e in ends)], ends)]
        summed: list[array[Any]] = [self.count, self.samples, self.between]
        summed += self.seconds.values()
        for values in summed:
            join(values, spans, sum)
        join(self.longest, spans, max)
        join(self.exact, spans, max)
        join(self.step, spans, last_number)
        join(self.clock, spans, last_number)
        join(self.loss, spans, last_number)


@dataclass
class RankRecord:
    """The records of one rank in one attempt."""

    host: str
    rank: int
    attempt: int
    start: RankStart = field(default_factory=RankStart)
    end: RankEnd = field(default_factory=RankEnd)
    seconds: dict[str, float] = field(default_factory=dict)  # by category, over all lines
    steps: StepColumns = field(default_factory=StepColumns)
    evaluations: list[tuple[float, Evaluation]] = field(default_factory=list)
    # Lines that are no steps: the loop's clock at their end, seconds by category.
    beside: deque[tuple[float, dict[str, float]]] = field(default_factory=newest)
    stall: Stall = field(default_factory=Stall)  # where it stands, if that is its last line
    stands: bool = False  # its time has not come yet
    stalls: deque[tuple[float, float]] = field(default_factory=newest)  # since when, how long
    unix: float = field(default=0.0, repr=False)  # when the file here grew, by this machine's clock
    epoch: int | None = None  # of the last step, from 0
    loss: float | None = None  # of the last log point, and its top-1
    top1: float | None = None
    epochs_begun: int = 0  # after the first one
    unsummed: int = 0  # steps in a row whose gradients no sum was made of, at most
    is_uncounted: bool = False  # it was not known how many samples some step had

    @property
    def clock(self) -> float:
        """Seconds of the loop so far."""
        return sum(self.seconds.values())

    def last(self, seconds: float, least: int = 0) -> RankRecord:
        """The steps of its last seconds, at least the `least` last ones, as a record of its own. As
        its first line, which whoever measures leaves out, it has one that ended before."""
        since = self.clock - seconds
        place = max(0, sum(clock < since for clock in self.steps.clock) - 1)
        while place and sum(self.steps.count[place + 1 :]) < least:
            place -= 1
        since = min(since, self.steps.clock[place]) if len(self.steps) else since
        beside = deque((clock, spent) for clock, spent in self.beside if clock >= since)
        steps = self.steps.since(place)
        spent: dict[str, float] = {name: sum(values) for name, values in steps.seconds.items()}
        for _, part in beside:
            add(spent, part)
        return replace(self, steps=steps, beside=beside, seconds=spent)


@dataclass
class Machine:
    """The records of one machine, in the order written. Lines are read while they are iterated:
    weeks of them are hundreds of megabytes. `recent`: the newest of them."""

    host: str
    parts: list[Callable[[], Iterator[Entry]]] = field(default_factory=list)
    recent: deque[Entry] = field(default_factory=lambda: deque(maxlen=RECENT_LINES))
    stacks: Entry = field(default_factory=dict)  # the newest line on where silent ranks stand
    unix: float = 0.0  # when the file here grew last, by this machine's clock

    @property
    def mono(self) -> float:
        """Its own clock at its newest line."""
        return time_of(self.recent[-1].get("mono")) or 0.0 if self.recent else 0.0

    def __iter__(self) -> Iterator[Entry]:
        for part in self.parts:
            yield from part()


@dataclass
class Run:
    """The files of one run. Hosts are inventory names."""

    folder: Path
    plan: RunPlan
    attempts: list[AttemptRecord]
    status: str | None
    ranks: list[RankRecord]
    exits: dict[tuple[str, int], GuardEnd]  # (host, attempt) -> how the guard ended
    machines: dict[str, Machine]
    missing: list[str]  # sentences

    @property
    def program(self) -> PlannedProgram:
        return self.plan.program

    @property
    def sample(self) -> str:
        """What one of the things that it trains on is called in sentences about it."""
        return self.program.sample

    @property
    def samples(self) -> str:
        return f"{self.sample}s"

    @property
    def untimed(self) -> bool:
        """Whether no step was timed, which is as it should be for this program."""
        return not self.program.times_steps and not self.ranks

    @property
    def hosts(self) -> list[str]:
        """All hosts that were planned or left a trace, by node rank where it is known."""
        planned = [node.host for node in self.plan.nodes if node.host is not None]
        recorded = {record.host for record in self.ranks} | {host for host, _ in self.exits}
        recorded |= set(self.machines)
        return planned + sorted(recorded - set(planned), key=natural)

    @property
    def nodes_per_machine(self) -> dict[str, int]:
        """Host -> how many nodes are processes of its machine (connection `local`)."""
        nodes = [node for node in self.plan.nodes if node.connection == "local"]
        local = [node.host for node in nodes if node.host is not None]
        return {host: len(local) for host in local}

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks are processes of one machine, so that no network is between them."""
        return len(self.hosts) == 1 or self.nodes_per_machine.keys() >= set(self.hosts)

    @property
    def unix(self) -> float | None:
        """When the last of its records came here."""
        return max((machine.unix for machine in self.machines.values()), default=None)


def attempt_of(entry: Entry) -> int:
    """The attempt that a line or an entry belongs to; the first, where it does not say."""
    return count(entry.get("attempt"), MOST_ATTEMPTS) or 1


def read_run(folder: Path) -> Run:
    """Reads `folder` once. Raises UserError when it holds nothing of a run."""
    return Reader(folder).read()


RANK_FILE = re.compile(r"rank([0-9]{1,9})\.([0-9]{1,9})\.steps\.jsonl")
MACHINE_FILE = re.compile(r"machine\.([0-9]{1,9})\.jsonl")


class Reader:
    """Reads a run's folder, again and again where it is kept."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[Path, Growing] = {}
        self._ranks: dict[tuple[int, int, str], RankRecord] = {}
        self._machines: dict[str, Machine] = {}
        self._exits: dict[tuple[str, int], GuardEnd] = {}
        self._faults: dict[str, str] = {}  # what could not be read of whom, a sentence each
        self._share = MOST_STEPS  # of a rank in all attempts
        self._more: set[tuple[int, int, str]] = set()  # ranks and attempts beyond MOST_RECORDS

    def read(self, recent: bool = False) -> Run:
        """All that is there by now. `recent`: the newest lines of machines are kept, too. Raises
        UserError when the folder holds nothing of a run."""
        folder, nodes = self.folder, self.folder / "nodes"
        if not folder.is_dir():
            raise UserError(f"There is no run at {folder}: `ls runs` shows the runs there are.")
        missing: list[str] = []
        plan, ended = (
            read_object(folder / name, missing) for name in ("plan.json", "attempts.json")
        )
        if not plan and not ended and not nodes.is_dir():
            raise UserError(
                f"{folder} is not a run directory: it has neither plan.json nor nodes/. "
                "Give the folder of one run."
            )
        known = convert_what_fits(plan, RunPlan)
        end = convert_what_fits(ended, RunEnd)
        files = files_of_hosts(nodes)
        share = MOST_STEPS // max(1, len(ranks_of(files)))
        if share != self._share:
            self._share = share
            self._thin(self._ranks.values())
        for host, paths in files.items():
            try:
                self._of_host(host, paths, recent)
            except (UserError, MemoryError):  # a limit of the report's own
                raise
            except Exception as error:  # one machine's lies are that machine's
                kind = type(error).__name__
                self._faults[host] = f"{host}: its records cannot be read ({kind}: {error})."
        run = Run(
            folder=folder,
            plan=known,
            attempts=end.attempts,
            status=end.status,
            ranks=[self._ranks[key] for key in sorted(self._ranks)],
            exits=self._exits,
            machines=self._machines,
            missing=missing,
        )
        if run.program.times_steps and not run.ranks:
            missing.append(
                "No rank wrote its timings (nodes/<host>/rank<k>.<attempt>.steps.jsonl)."
            )
        missing += [*self._faults.values(), *self._omissions()]
        return run

    def _of_host(self, host: str, paths: list[Path], recent: bool) -> None:
        for path in paths:
            if match := RANK_FILE.fullmatch(path.name):
                if int(match[1]) < MOST_RANKS:
                    self._steps(host, int(match[1]), int(match[2]), path)
            elif match := MACHINE_FILE.fullmatch(path.name):
                self._machine(host, int(match[1]), path, recent)

    def _steps(self, host: str, rank: int, attempt: int, path: Path) -> None:
        """The new lines of a rank."""
        grown = path.stat().st_mtime
        key = attempt, rank, host
        for line in self._files.setdefault(path, Growing(path)).lines():
            if key not in self._ranks:
                if len(self._ranks) == MOST_RECORDS:
                    self._more.add(key)
                    return
                self._ranks[key] = RankRecord(host, rank, attempt)
                self._thin(r for (_, *own), r in self._ranks.items() if own == [rank, host])
            fold(self._ranks[key], line)
            self._ranks[key].unix = grown

    def _thin(self, records: Iterable[RankRecord]) -> None:
        """Give each record its part of a rank's share of lines."""
        attempts = len({attempt for attempt, *_ in self._ranks})
        for record in records:
            record.steps.thin(max(FEWEST, self._share // attempts))

    def _machine(self, host: str, attempt: int, path: Path, recent: bool) -> None:
        machine = self._machines.setdefault(host, Machine(host))
        if path not in self._files:
            self._files[path] = Growing(path)
            machine.parts.append(lambda: of_attempt(Growing(path), attempt))
        last = Growing(path).last() if (host, attempt) not in self._exits else None
        if last and last.get("kind") == "exit":
            self._exits[host, attempt] = convert_what_fits(last, GuardEnd)
        machine.unix = max(machine.unix, path.stat().st_mtime)
        if recent:
            for line in of_attempt(self._files[path], attempt):
                if line.get("kind") == "sample":
                    machine.recent.append(line)
                elif line.get("kind") == "stacks":
                    machine.stacks = line

    def _omissions(self) -> Iterator[str]:
        """Sentences on what was left out, file by file."""
        for path, file in self._files.items():
            if file.bad:
                name = "/".join(path.parts[-2:])
                yield f"{name}: {file.bad:,} lines are no records and were left out."
        if self._more:
            yield (f"{len(self._more):,} ranks and attempts beyond {MOST_RECORDS:,} are left out.")


def ranks_of(files: Mapping[str, list[Path]]) -> set[tuple[str, str]]:
    """Host and number of each rank that has a file."""
    names = [(host, path.name) for host, paths in files.items() for path in paths]
    return {(host, match[1]) for host, name in names if (match := RANK_FILE.fullmatch(name))}


def of_attempt(file: Growing, attempt: int) -> Iterator[Entry]:
    """A machine's lines, each with its attempt."""
    for line in file.lines():
        yield {**line, "attempt": attempt}


def fold(record: RankRecord, line: Entry) -> None:
    """Adds one line of a rank to its record."""
    kind = line.get("kind")
    record.stall = convert_what_fits(line, Stall) if kind == "stall" else Stall()
    if kind == "stall":
        record.stands = True
        return
    if kind == "start":
        record.start = convert_what_fits(line, RankStart)
        return
    seconds = clean_seconds(line.get("seconds"))
    add(record.seconds, seconds)
    if record.stands:
        fold_stall(record, kind, time_of(line.get("longest")), sum(seconds.values()))
    if kind == "step":
        fold_step(record, line, seconds)
        return
    record.beside.append((record.clock, seconds))
    if kind == "evaluate":
        scores = convert_what_fits(line, Evaluation)
        if scores.samples == 0:  # older records have an accuracy of no images
            scores.top1 = scores.top5 = scores.loss = None
        if scores.epoch is not None:
            del record.evaluations[MOST_BESIDE - 1 :]  # of too many the last one is kept, too
            record.evaluations.append((record.clock, scores))
    if kind == "end":
        record.end = convert_what_fits(line, RankEnd)


def fold_stall(record: RankRecord, kind: object, longest: float | None, spent: float) -> None:
    """Adds a stall once a line has its time: steps that ended before it may come first."""
    length = spent if longest is None else longest
    if length >= STALLED and kind in ("step", "end"):
        record.stalls.append((record.clock - length, length))
    record.stands = length < STALLED and kind == "step"


STALLED = 5.0  # seconds, after which a rank writes where it stands


def fold_step(record: RankRecord, line: Entry, seconds: dict[str, float]) -> None:
    """Adds a line of steps to the columns."""
    columns, loss, top1 = record.steps, number(line.get("loss")), number(line.get("top1"))
    record.loss = record.loss if loss is None else loss
    record.top1 = record.top1 if top1 is None else top1
    epoch = natural_number(line.get("epoch"))
    if record.epoch is not None and epoch is not None:
        record.epochs_begun += max(0, epoch - record.epoch)
    record.epoch = epoch
    record.unsummed = max(record.unsummed, count(line.get("unsummed"), MOST_STEPS) or 0)
    record.is_uncounted |= line.get("samples", 0) is None
    steps = count(line.get("steps"), MOST_STEPS) or 1
    columns.count.append(steps)
    columns.step.append(natural_number(line.get("step")) or 0)
    columns.samples.append(positive(line.get("samples")) or 0.0)
    columns.clock.append(record.clock)
    longest = time_of(line.get("longest"))
    columns.longest.append(sum(seconds.values()) / steps if longest is None else longest)
    columns.loss.append(math.nan if loss is None else loss)
    columns.exact.append(int(line.get("exact") is True))
    columns.between.append(seconds.get(BETWEEN, 0.0))
    for name, values in columns.seconds.items():
        values.append(seconds.get(name, 0.0))
    columns.thin(columns.most)


def clean_seconds(value: object) -> dict[str, float]:
    """The known categories that carry a number."""
    if not isinstance(value, dict):
        return {}
    return {key: time_of(value[key]) or 0.0 for key in CATEGORIES if key in value}


def add(total: dict[str, float], part: dict[str, float]) -> None:
    """Adds `part` to `total`, key by key."""
    for key, value in part.items():
        total[key] = total.get(key, 0.0) + value
