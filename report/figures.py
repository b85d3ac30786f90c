"""The figures of a machine: one table. A row says what a figure is called, where it is read in the
guard's records, in what it is counted, when it deserves a warning, and in which views it is shown.

To add one, add its row to the table of what it is a figure of. `make status`, `make top`, the
report's text and page, series.csv and JSON read the tables, and other code a figure by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from boundary.run_files import MOST_RANKS, MOST_THINGS
from contract.text import percent, size, three_digits
from report.files import Entry, dicts, natural_number, number

MACHINE, DISK, INTERFACE, GPU, SHARE = "machine", "disk", "interface", "gpu", "share"
Values = Mapping[str, float]


class Interval(NamedTuple):
    """What the records say of one thing now, and said of it so many seconds before; `before` is
    empty where they said nothing."""

    before: Values
    now: Values
    seconds: float


class Ratio(NamedTuple):
    """What a figure is in an interval: so much, of so much. Over several intervals both are summed,
    so that a mean is right whatever their lengths. `of` is None where it is their seconds."""

    amount: float
    of: float | None = None


Reader = Callable[[Interval], Ratio | None]


def level(key: str) -> Reader:
    """What stands in the record."""
    return lambda i: Ratio(i.now[key], 1.0) if key in i.now else None


def rate(key: str, factor: float = 1.0) -> Reader:
    """What stands in the record as a rate since the line before."""
    return lambda i: Ratio(i.now.get(key, 0.0) * factor * i.seconds)


def growth(*keys: str) -> Reader:
    """By how much counters grew."""

    def read(interval: Interval) -> Ratio | None:
        before, now = interval.before, interval.now
        known = [max(0.0, now[key] - before[key]) for key in keys if key in before and key in now]
        return Ratio(sum(known)) if known else None

    return read


def grown(interval: Interval, key: str) -> float:
    """By how much a counter grew; 0 where it is absent or was reset."""
    return increase(interval.before.get(key), interval.now.get(key))


def increase(before: float | None, now: float | None) -> float:
    return 0.0 if before is None or now is None else max(0.0, now - before)


def of_processors(key: str) -> Reader:
    """Of the time that all processors have, the part that these seconds are."""

    def read(interval: Interval) -> Ratio | None:
        cores = interval.now.get("cores", 0.0)
        known = key in interval.before and key in interval.now and cores > 0
        return Ratio(grown(interval, key) / cores) if known else None

    return read


def queued(interval: Interval) -> Ratio | None:
    waited, ran = grown(interval, "waited"), grown(interval, "ran")
    return Ratio(waited, ran + waited) if ran + waited > 0 else None


def loaders_busy(interval: Interval) -> Ratio | None:
    seconds = grown(interval, "loaders")
    return Ratio(grown(interval, "loaders_busy"), seconds) if seconds > 0 else None


def memory_used(interval: Interval) -> Ratio | None:
    total = interval.now.get("memory_total", 0.0)
    available = interval.now.get("memory_available")
    if total <= 0 or available is None:
        return None
    return Ratio(1 - min(1.0, available / total), 1.0)


def swap_used(interval: Interval) -> Ratio | None:
    now = interval.now
    if not {"swap_total", "swap_free"} <= now.keys():
        return None
    return Ratio(now["swap_total"] - now["swap_free"], 1.0)


def request_time(interval: Interval) -> Ratio | None:
    """Milliseconds of a request, reads and writes weighted by their number."""
    pairs = (("r/s", "r_await"), ("w/s", "w_await"))
    requests = [(interval.now.get(n, 0.0), interval.now.get(wait, 0.0)) for n, wait in pairs]
    total = sum(count for count, _ in requests)
    mean = sum(count * wait for count, wait in requests) / total if total else 0.0
    return Ratio(mean, 1.0) if mean > 0 else None


@dataclass(frozen=True)
class Unit:
    """`words`: a value in a report; `cell`: in status and top, where columns are narrow; in charts,
    series.csv and JSON it is multiplied by `drawn`, and has the `symbol`."""

    words: Callable[[float], str]
    cell: Callable[[float], str]
    symbol: str = ""
    drawn: float = 1.0
    most: float = math.inf  # no value is more
    json: float = 1.0


def whole(value: float) -> str:
    return f"{value:.0f}"


def short_size(value: float) -> str:
    return size(value).replace(" ", "") if value else "0"


PART = Unit(percent, lambda value: f"{100 * value:.0f}", "%", 100.0, most=1.0, json=100.0)
PERCENT = Unit(lambda value: f"{value:.0f} %", whole, "%")
BYTES = Unit(size, short_size)
BYTES_PER_SECOND = Unit(
    lambda value: three_digits(value / 1e6), lambda value: f"{value / 1e6:.1f}", "MB/s", 1e-6
)
COUNT = Unit(lambda value: f"{value:,.0f}", whole)
SECONDS = Unit(three_digits, whole, "s")
MILLISECONDS = Unit(lambda value: f"{three_digits(value)} ms", whole, "ms")
CELSIUS, WATTS, MEGAHERTZ = (
    Unit(lambda value, symbol=symbol: f"{value:.0f} {symbol}", whole, symbol)  # type: ignore[misc]
    for symbol in ("C", "W", "MHz")
)


class Limit(NamedTuple):
    """From (or below) which value on a machine deserves a warning, where `beside` has its own
    limit; `{}` in the sentence is the value."""

    sentence: str
    least: float = -math.inf
    below: float = math.inf
    beside: tuple[Figure, float] | None = None


MEAN, MOST, LEAST, TOTAL = "mean", "most", "least", "total"


@dataclass(frozen=True, eq=False)
class Figure:
    """`name`: in JSON. `report`: its columns there, each a heading and what of the run's seconds it
    shows (MEAN, ...). `status`: its column in `make status` and `make top`; of several disks it is
    the busiest one's, of several GPUs the largest. `place`: those of the highest are left out first
    where a terminal has too few columns. `chart`: its title."""

    name: str
    read: Reader
    unit: Unit
    report: Mapping[str, str] | None = None
    status: str = ""
    place: int = 9
    chart: str = ""
    note: str = ""  # below the chart
    drawn_at_zero: bool = True  # else no chart where it never is above 0
    limit: Limit | None = None

    def value(self, interval: Interval) -> float | None:
        """In one interval."""
        ratio = self.read(interval)
        return None if ratio is None else self.of(ratio, interval.seconds)

    def of(self, ratio: Ratio, seconds: float) -> float | None:
        whole = seconds if ratio.of is None else ratio.of
        return min(self.unit.most, ratio.amount / whole) if whole > 0 else None

    def warning(self, values: Mapping[Figure, float]) -> str | None:
        """What deserves one, where something does."""
        value, limit = values.get(self), self.limit
        if value is None or limit is None or not limit.least <= value < limit.below:
            return None
        if limit.beside and values.get(limit.beside[0], 0.0) < limit.beside[1]:
            return None
        return limit.sentence.format(self.unit.words(value))


# In each table in the order of the report's columns.
CORES = Figure("cores", level("cores"), COUNT, {MOST: "CPUs"})
CPU = Figure("cpu", of_processors("cpu_busy"), PART, {MEAN: "busy"}, "CPU%", 2, "Processors, busy")
RANKS_CPU = Figure("ranks_cpu", of_processors("ran"), PART)  # by this run's own processes
# Of the time in which this run's threads wanted a processor, the part in which they had none.
QUEUED = Figure(
    "queued",
    queued,
    PART,
    {MEAN: "queued"},
    "queue%",
    2,
    "Waits for a processor",
    "Of the time in which this run's threads wanted one.",
)
WAITED = Figure("waited", growth("waited"), SECONDS)  # by these threads together, in a second
# The part of the time in which loaders that do something run or wait for a processor.
LOADERS_BUSY = Figure("loaders_busy", loaders_busy, PART)
MEMORY_TOTAL = Figure("memory_total", level("memory_total"), BYTES, {MOST: "memory"})
MEMORY = Figure("memory", memory_used, PART, {MOST: "used"}, "mem%", 2, "Memory, used")
SWAP = Figure(
    "swap",
    swap_used,
    BYTES,
    status="swap",
    place=2,
    limit=Limit(
        "short of memory: {} swapped; fewer loaders (--workers) need less",
        least=256e6,
        beside=(MEMORY, 0.9),
    ),
)
SWAPPED = Figure(
    "swapped",
    growth("swapped_in", "swapped_out"),
    BYTES_PER_SECOND,
    {MEAN: "swap MB/s"},
    chart="Swap, in and out",
    drawn_at_zero=False,
)
SWAPPED_IN = Figure("swapped_in", growth("swapped_in"), BYTES_PER_SECOND)
# Of the time, the part in which some process waited for memory.
MEMORY_PRESSURE = Figure(
    "memory_pressure",
    growth("pressure_memory"),
    PART,
    {MEAN: "pressure"},
    chart="Memory, pressure",
    drawn_at_zero=False,
)
TEMPERATURE = Figure(
    "temperature",  # of the hottest processor
    level("temperature"),
    CELSIUS,
    status="CPU C",
    place=4,
    limit=Limit("its processor has {} and may slow down", least=90),
)
DISK_FREE = Figure(
    "disk_free",  # where the run's folder lies
    level("disk_free"),
    BYTES,
    status="free",
    place=4,
    limit=Limit("{} free on its disk: remove old runs there", below=5e9),
)

DISK_READ = Figure(
    "disk_read",
    rate("rkB/s", 1024),
    BYTES_PER_SECOND,
    {MEAN: "MB/s read", MOST: "peak"},
    "MB/s read",
    3,
    "Disk, read",
)
DISK_WRITTEN = Figure("disk_written", rate("wkB/s", 1024), BYTES_PER_SECOND, {MEAN: "MB/s written"})
DISK_BUSY = Figure("disk_busy", rate("util"), PERCENT, {MEAN: "busy"}, "disk%", 2, "Disk, busy")
DISK_REQUEST = Figure("disk_request", request_time, MILLISECONDS, {MEAN: "a request"})

SENT = Figure(
    "sent",
    growth("tx_bytes"),
    BYTES_PER_SECOND,
    {MEAN: "MB/s", MOST: "peak"},
    "sent",
    3,
    "Network card, sent",
)
RECEIVED = Figure("received", growth("rx_bytes"), BYTES_PER_SECOND, status="got", place=3)
RETRANSMITS = Figure(
    "again", growth("tcp_retransmits"), COUNT, {TOTAL: "retransmits"}, "again/s", 5
)
DROPPED = Figure(
    "dropped",
    growth("tx_dropped", "rx_dropped"),
    COUNT,
    {TOTAL: "drops"},
    "drops/s",
    5,
    limit=Limit("its network card drops {} packets a second", least=1),
)

# Says only that a kernel was resident, and NCCL's waiting kernel is one, too: it is shown, and
# nothing is concluded from it.
GPU_UTILIZATION = Figure(
    "utilization",
    level("utilization"),
    PERCENT,
    {MEAN: "resident"},
    "GPU%",
    1,
    "GPU, resident",
    "A GPU that waits for gradients reads 100 %, too: no evidence.",
)
GPU_MEMORY = Figure("memory_used", level("memory_used"), BYTES, {MOST: "memory"}, "GPU mem", 5)
GPU_POWER = Figure("power", level("power"), WATTS, {MEAN: "power"}, "GPU W", 5, "GPU, power")
GPU_TEMPERATURE = Figure(
    "temperature",
    level("temperature"),
    CELSIUS,
    {MOST: "hottest"},
    "GPU C",
    1,
    "GPU, temperature",
    limit=Limit("a GPU has {} and may slow down: clean fans, give it air", least=85),
)
GPU_CLOCK = Figure(
    "clock_sm", level("clock_sm"), MEGAHERTZ, {LEAST: "slowest clock"}, "GPU MHz", 5, "GPU, clock"
)

SHARE_READ = Figure("share_read", growth("read_bytes"), BYTES_PER_SECOND)

FIGURES: dict[str, tuple[Figure, ...]] = {
    MACHINE: (
        *(CORES, CPU, RANKS_CPU, QUEUED, WAITED, LOADERS_BUSY, MEMORY_TOTAL, MEMORY, SWAP),
        *(SWAPPED, SWAPPED_IN, MEMORY_PRESSURE, TEMPERATURE, DISK_FREE),
    ),
    DISK: (DISK_READ, DISK_WRITTEN, DISK_BUSY, DISK_REQUEST),
    INTERFACE: (SENT, RECEIVED, RETRANSMITS, DROPPED),
    GPU: (GPU_UTILIZATION, GPU_MEMORY, GPU_POWER, GPU_TEMPERATURE, GPU_CLOCK),
    SHARE: (SHARE_READ,),
}
Thing = tuple[str, str]  # its kind, and its name


RANK_TIMES = ("ran", "waited", "loaders", "loaders_busy")  # seconds (docs/run-directory.md)


@dataclass(frozen=True)
class Sample:
    """A line of a machine's records, as far as it is what it should be."""

    things: Mapping[Thing, Values]
    ranks: Mapping[str, Values]  # RANK_TIMES of each


def sample_of(line: Entry) -> Sample:
    things: dict[Thing, Values] = {(MACHINE, ""): numbers(line)}
    if isinstance(card := line.get("card"), dict):
        things[INTERFACE, ""] = numbers(card)
    for kind, key in ((DISK, "disks"), (SHARE, "mounts")):
        things |= {(kind, name): values for name, values in by_name(line.get(key)).items()}
    for gpu in dicts(line.get("gpus"))[:MOST_THINGS]:
        index = natural_number(gpu.get("index")) or 0
        if index < MOST_THINGS:
            things[GPU, str(index)] = numbers(gpu)
    return Sample(things, ranks_of(line.get("ranks")))


def ranks_of(value: object) -> dict[str, Values]:
    ranks = by_name(value, MOST_RANKS)
    return {rank: times for rank, times in ranks.items() if {"ran", "waited"} <= times.keys()}


def by_name(value: object, most: int = MOST_THINGS) -> dict[str, Values]:
    """Name -> numbers."""
    named = list(value.items())[:most] if isinstance(value, dict) else []
    return {name: numbers(entry) for name, entry in named if isinstance(entry, dict)}


def numbers(entry: Entry) -> Values:
    return {key: value for key, value in entry.items() if number(value) is not None}


def intervals(
    before: Sample | None, now: Sample, seconds: float
) -> Iterator[tuple[Thing, Interval]]:
    """What came between two samples, of each thing that is in the later one."""
    for thing, values in now.things.items():
        earlier = before.things.get(thing, {}) if before is not None else {}
        if thing == (MACHINE, "") and before is not None:
            earlier, values = with_ranks(before, now)
        yield thing, Interval(earlier, values, seconds)


def with_ranks(before: Sample, now: Sample) -> tuple[Values, Values]:
    """A machine's numbers with the seconds of its ranks in between. A rank that was not there
    before counts as nothing: its threads may be older."""
    known = [Interval(before.ranks[r], now.ranks[r], 0.0) for r in now.ranks if r in before.ranks]
    came = {key: sum(grown(rank, key) for rank in known) for key in RANK_TIMES}
    machine = MACHINE, ""
    if not known:
        return before.things[machine], now.things[machine]
    zero = dict.fromkeys(RANK_TIMES, 0.0)
    return {**before.things[machine], **zero}, {**now.things[machine], **came}


# All processors are taken, and threads wait for one longer than they have one.
FULL, QUEUED_LONG = 0.9, 0.5


def is_oversubscribed(busy: float, queued: float) -> bool:
    return busy >= FULL and queued >= QUEUED_LONG
