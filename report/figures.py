"""Define the figures of a machine in one table.

A row names a figure and gives its key in the guard's records, its unit, its warning limit, and the
views that show it. To add a figure, add a row. `make status`, `make top`, the report's text and
page, series.csv and JSON read the tables; other code uses a figure by its name. usage.py sums up
the figures of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from boundary.run_files import MOST_DEVICES, MOST_RANKS
from contract.text import percent, size, three_digits
from report.files import Entry, number

MACHINE, DISK, INTERFACE, GPU, SHARE = "machine", "disk", "interface", "gpu", "share"
Values = Mapping[str, float]  # the numbers of a thing, by their keys in the guard's records


class Interval(NamedTuple):
    """The recorded values of one thing, at both ends of an interval. `start` may be empty."""

    start: Values
    end: Values
    seconds: float


class Ratio(NamedTuple):
    """A figure in an interval, as `amount` divided by `base`. The mean over several intervals is
    the sum of their amounts divided by the sum of their bases."""

    amount: float
    base: float | None = None  # None: the interval's seconds


# A Read computes a figure from an interval. A Read returns None if the figure was not recorded. The
# functions from `level` to `growth_share` make Reads; their arguments are keys of Values.
Read = Callable[[Interval], Ratio | None]


def level(key: str) -> Read:
    """Read a value as it is recorded. With the base 1.0, the mean over intervals is the mean of
    their values, however long they are."""
    return lambda i: Ratio(i.end[key], 1.0) if key in i.end else None


def rate(key: str, factor: float = 1.0) -> Read:
    """Read a value, times `factor`, that is recorded as a rate since the previous line. The amount
    is rate times seconds, so that longer intervals weigh more in a mean."""
    return lambda i: Ratio(i.end[key] * factor * i.seconds) if key in i.end else None


def growth(*keys: str) -> Read:
    """Read the growth of counters, summed over `keys`. The value is the growth per second, and
    TOTAL is the whole growth."""

    def read(interval: Interval) -> Ratio | None:
        start, end = interval.start, interval.end
        grown = [max(0.0, end[key] - start[key]) for key in keys if key in start and key in end]
        return Ratio(sum(grown)) if grown else None

    return read


def increase(start: float | None, end: float | None) -> float:
    """Return the growth of a counter; 0 if it is absent or was reset."""
    return 0.0 if start is None or end is None else max(0.0, end - start)


def counter_growth(interval: Interval, key: str) -> float:
    return increase(interval.start.get(key), interval.end.get(key))


def share_of_processors(key: str) -> Read:
    """Read seconds of processors as a fraction of the time of all processors."""

    def read(interval: Interval) -> Ratio | None:
        cores = interval.end.get("cores", 0.0)
        recorded = key in interval.start and key in interval.end and cores > 0
        return Ratio(counter_growth(interval, key) / cores) if recorded else None

    return read


def growth_share(key: str, *total: str) -> Read:
    """Read the growth of a counter as a fraction of the growth of the counters `total`."""

    def read(interval: Interval) -> Ratio | None:
        base = sum(counter_growth(interval, name) for name in total)
        return Ratio(counter_growth(interval, key), base) if base > 0 else None

    return read


def read_memory_used(interval: Interval) -> Ratio | None:
    """Read the fraction of the memory that is in use."""
    total = interval.end.get("memory_total", 0.0)
    available = interval.end.get("memory_available")
    if total <= 0 or available is None:
        return None
    return Ratio(1 - min(1.0, available / total), 1.0)


def read_request_time(interval: Interval) -> Ratio | None:
    """Read the milliseconds of a request, with reads and writes weighted by their number."""
    # The keys of reads and of writes: requests per second, and the mean milliseconds of a request.
    pairs = (("r/s", "r_await"), ("w/s", "w_await"))
    requests = [(interval.end.get(n, 0.0), interval.end.get(wait, 0.0)) for n, wait in pairs]
    # Without requests the figure is unknown.
    total = sum(count for count, _ in requests)
    mean = sum(count * wait for count, wait in requests) / total if total else 0.0
    return Ratio(mean, 1.0) if mean > 0 else None


@dataclass(frozen=True)
class Unit:
    """The functions and factors by which the values of a figure are shown."""

    words: Callable[[float], str]  # in a report
    cell: Callable[[float], str]  # in the narrow columns of status and top
    symbol: str = ""  # of the values in charts and series.csv
    drawn: float = 1.0  # the factor of values in charts and series.csv
    maximum: float = math.inf  # replaces larger values
    json: float = 1.0  # the factor of values in JSON


def rounded(value: float) -> str:
    return f"{value:.0f}"


# A FRACTION is recorded between 0 and 1, a PERCENT between 0 and 100.
FRACTION = Unit(
    words=percent,
    cell=lambda value: f"{100 * value:.0f}",
    symbol="%",
    drawn=100.0,
    maximum=1.0,
    json=100.0,
)
PERCENT = Unit(words=lambda value: f"{value:.0f} %", cell=rounded, symbol="%")
BYTES = Unit(words=size, cell=lambda value: size(value).replace(" ", "") if value else "0")
BYTES_PER_SECOND = Unit(
    words=lambda value: three_digits(value / 1e6),
    cell=lambda value: f"{value / 1e6:.1f}",
    symbol="MB/s",
    drawn=1e-6,
)
COUNT = Unit(words=lambda value: f"{value:,.0f}", cell=rounded)
SECONDS = Unit(words=three_digits, cell=rounded, symbol="s")
MILLISECONDS = Unit(words=lambda value: f"{three_digits(value)} ms", cell=rounded, symbol="ms")
CELSIUS = Unit(words=lambda value: f"{value:.0f} C", cell=rounded, symbol="C")
WATTS = Unit(words=lambda value: f"{value:.0f} W", cell=rounded, symbol="W")
MEGAHERTZ = Unit(words=lambda value: f"{value:.0f} MHz", cell=rounded, symbol="MHz")


class Condition(NamedTuple):
    """Holds if a figure has at least this value."""

    figure: Figure
    least: float


class Limit(NamedTuple):
    """Values of a figure that deserve a warning: at least `least`, and smaller than `below`."""

    sentence: str  # {} is the value
    least: float = -math.inf
    below: float = math.inf
    also: Condition | None = None  # another figure must also have a value


# What a column of the report shows of a figure.
MEAN, MOST, LEAST, TOTAL = "mean", "most", "least", "total"


@dataclass(frozen=True, eq=False)
class Figure:
    """A row of the tables below."""

    name: str  # in JSON
    read: Read
    unit: Unit
    report: Mapping[str, str] | None = None  # its columns: {MEAN: heading, MOST: heading}
    # The heading of its column in `make status` and `make top`. The column shows the value of the
    # busiest disk, or the largest value of the GPUs.
    status: str = ""
    priority: int = 9  # a narrow terminal omits the columns with the highest numbers first
    chart: str = ""  # the title of its chart
    note: str = ""  # below the chart
    drawn_at_zero: bool = True  # False: no chart if all values are 0
    limit: Limit | None = None

    def value(self, interval: Interval) -> float | None:
        """Return the value in one interval; None (not 0) if it was not recorded."""
        ratio = self.read(interval)
        return None if ratio is None else self.divide(ratio, interval.seconds)

    def divide(self, ratio: Ratio, seconds: float) -> float | None:
        """Return the value of a ratio over so many seconds; None if its base is 0."""
        base = seconds if ratio.base is None else ratio.base
        return min(self.unit.maximum, ratio.amount / base) if base > 0 else None

    def warning(self, values: Mapping[Figure, float]) -> str | None:
        """Return a warning about these values of a machine, if one is due."""
        value, limit = values.get(self), self.limit
        if value is None or limit is None or not limit.least <= value < limit.below:
            return None
        if limit.also and values.get(limit.also.figure, 0.0) < limit.also.least:
            return None
        return limit.sentence.format(self.unit.words(value))


# The figures of each kind of thing have the order of the report's columns. The positional arguments
# are name, read and unit.
CORES = Figure("cores", level("cores"), COUNT, report={MOST: "CPUs"})
CPU = Figure(
    "cpu",
    share_of_processors("cpu_busy"),
    FRACTION,
    report={MEAN: "busy"},
    status="CPU%",
    priority=2,
    chart="Processors, busy",
)
# `ran`, `waited`, `loaders` and `loaders_busy` are sums over the run's ranks, which `intervals`
# adds to the machine's values.
RANKS_CPU = Figure("ranks_cpu", share_of_processors("ran"), FRACTION)  # by this run's processes
# The fraction of the time in which this run's threads wanted a processor and had none.
QUEUED = Figure(
    "queued",
    growth_share("waited", "ran", "waited"),
    FRACTION,
    report={MEAN: "queued"},
    status="queue%",
    priority=2,
    chart="Waits for a processor",
    note="The share of the time in which this run's threads wanted one.",
)
WAITED = Figure("waited", growth("waited"), SECONDS)  # per second, all threads of this run together
# How busy the active loaders are. `loaders`: the seconds in which loaders ran or waited for a
# processor. `loaders_busy`: the same seconds, each weighted by how busy its loader was (CpuTimes in
# launcher/node/records.py).
LOADERS_BUSY = Figure("loaders_busy", growth_share("loaders_busy", "loaders"), FRACTION)
MEMORY_TOTAL = Figure("memory_total", level("memory_total"), BYTES, report={MOST: "memory"})
MEMORY = Figure(
    "memory",
    read_memory_used,
    FRACTION,
    report={MOST: "used"},
    status="mem%",
    priority=2,
    chart="Memory, used",
)
SWAP = Figure(
    "swap",
    lambda i: (
        Ratio(i.end["swap_total"] - i.end["swap_free"], 1.0)
        if {"swap_total", "swap_free"} <= i.end.keys()
        else None
    ),
    BYTES,
    status="swap",
    priority=2,
    limit=Limit(
        "short of memory: {} swapped; fewer loaders (--workers) need less",
        least=256e6,
        also=Condition(MEMORY, least=0.9),
    ),
)
SWAPPED = Figure(
    "swapped",
    growth("swapped_in", "swapped_out"),
    BYTES_PER_SECOND,
    report={MEAN: "swap MB/s"},
    chart="Swap, in and out",
    drawn_at_zero=False,
)
SWAPPED_IN = Figure("swapped_in", growth("swapped_in"), BYTES_PER_SECOND)
# The fraction of the time in which some process waited for memory.
MEMORY_PRESSURE = Figure(
    "memory_pressure",
    growth("pressure_memory"),
    FRACTION,
    report={MEAN: "pressure"},
    chart="Memory, pressure",
    drawn_at_zero=False,
)
TEMPERATURE = Figure(
    "temperature",  # of the hottest processor
    level("temperature"),
    CELSIUS,
    status="CPU C",
    priority=4,
    limit=Limit("its processor has {} and may slow down", least=90),
)
DISK_FREE = Figure(
    "disk_free",  # on the disk of the run's folder
    level("disk_free"),
    BYTES,
    status="free",
    priority=4,
    limit=Limit("{} free on its disk: remove old runs on that machine", below=5e9),
)
DISKS = Figure("disks", level("disks"), COUNT)  # how many disks had requests

DISK_READ = Figure(
    "disk_read",
    rate("rkB/s", 1024),
    BYTES_PER_SECOND,
    report={MEAN: "MB/s read", MOST: "peak"},
    status="MB/s read",
    priority=3,
    chart="Disk, read",
)
DISK_WRITTEN = Figure(
    "disk_written", rate("wkB/s", 1024), BYTES_PER_SECOND, report={MEAN: "MB/s written"}
)
DISK_BUSY = Figure(
    "disk_busy",
    rate("util"),
    PERCENT,
    report={MEAN: "busy"},
    status="disk%",
    priority=2,
    chart="Disk, busy",
)
DISK_REQUEST = Figure("disk_request", read_request_time, MILLISECONDS, report={MEAN: "a request"})

SENT = Figure(
    "sent",
    growth("tx_bytes"),
    BYTES_PER_SECOND,
    report={MEAN: "MB/s", MOST: "peak"},
    status="sent",
    priority=3,
    chart="Network card, sent",
)
RECEIVED = Figure("received", growth("rx_bytes"), BYTES_PER_SECOND, status="got", priority=3)
RETRANSMITS = Figure(
    "again",
    growth("tcp_retransmits"),
    COUNT,
    report={TOTAL: "retransmits"},
    status="resent/s",
    priority=5,
)
DROPPED = Figure(
    "dropped",
    growth("tx_dropped", "rx_dropped"),
    COUNT,
    report={TOTAL: "drops"},
    status="drops/s",
    priority=5,
    limit=Limit("its network card drops {} packets a second", least=1),
)

# The utilization only says that some kernel was resident, and NCCL's waiting kernel is resident,
# too. The report shows this figure, but no rule uses it.
GPU_UTILIZATION = Figure(
    "utilization",
    level("utilization"),
    PERCENT,
    report={MEAN: "resident"},
    status="GPU%",
    priority=1,
    chart="GPU, resident",
    note="A GPU that waits for gradients also shows 100 %, so this value proves nothing.",
)
GPU_MEMORY = Figure(
    "memory_used",
    level("memory_used"),
    BYTES,
    report={MOST: "memory"},
    status="GPU mem",
    priority=5,
)
GPU_POWER = Figure(
    "power",
    level("power"),
    WATTS,
    report={MEAN: "power"},
    status="GPU W",
    priority=5,
    chart="GPU, power",
)
GPU_TEMPERATURE = Figure(
    "temperature",
    level("temperature"),
    CELSIUS,
    report={MOST: "hottest"},
    status="GPU C",
    priority=1,
    chart="GPU, temperature",
    limit=Limit("a GPU has {} and may slow down: clean fans, give it air", least=85),
)
GPU_CLOCK = Figure(
    "clock_sm",
    level("clock_sm"),
    MEGAHERTZ,
    report={LEAST: "slowest clock"},
    status="GPU MHz",
    priority=5,
    chart="GPU, clock",
)

# Of a network share (`mounts` in a record).
SHARE_READ = Figure("share_read", growth("read_bytes"), BYTES_PER_SECOND)

FIGURES: dict[str, tuple[Figure, ...]] = {
    MACHINE: (
        *(CORES, CPU, RANKS_CPU, QUEUED, WAITED, LOADERS_BUSY, MEMORY_TOTAL, MEMORY, SWAP),
        *(SWAPPED, SWAPPED_IN, MEMORY_PRESSURE, TEMPERATURE, DISK_FREE, DISKS),
    ),
    DISK: (DISK_READ, DISK_WRITTEN, DISK_BUSY, DISK_REQUEST),
    INTERFACE: (SENT, RECEIVED, RETRANSMITS, DROPPED),
    GPU: (GPU_UTILIZATION, GPU_MEMORY, GPU_POWER, GPU_TEMPERATURE, GPU_CLOCK),
    SHARE: (SHARE_READ,),
}


class Thing(NamedTuple):
    """A part of a machine with figures: its kind (a key of FIGURES) and its name, such as `sda`.
    The machine itself, and its only network interface, have the name ""."""

    kind: str
    name: str


THE_MACHINE = Thing(MACHINE, "")
RANK_TIMES = ("ran", "waited", "loaders", "loaders_busy")  # seconds (docs/run-directory.md)


@dataclass(frozen=True)
class Sample:
    """The valid part of a line of a machine's records."""

    things: Mapping[Thing, Values]
    ranks: Mapping[str, Values]  # rank -> its RANK_TIMES since it started


def sample_of(line: Entry) -> Sample:
    """Take the numbers from a line of a machine's records."""
    # Example of a line, without most of its keys: {"cores": 8, "cpu_busy": 81.2, "card":
    # {"tx_bytes": 5e6}, "disks": {"sda": {"util": 7}}, "mounts": {"/data": {"read_bytes": 0}},
    # "gpus": [{"index": 0, "power": 250}], "ranks": {"3": {"ran": 9.1, "waited": 0.2}}}
    disks = line.get("disks")
    # The recorder omits disks without any requests. An empty `disks` shows that all were idle.
    disk_count = {"disks": float(len(disks))} if isinstance(disks, dict) else {}
    things: dict[Thing, Values] = {THE_MACHINE: {**numbers(line), **disk_count}}
    if isinstance(interface := line.get("card"), dict):
        things[Thing(INTERFACE, "")] = numbers(interface)
    for kind, key in ((DISK, "disks"), (SHARE, "mounts")):
        values_by_name = numbers_by_name(line.get(key))
        things |= {Thing(kind, name): values for name, values in values_by_name.items()}
    gpus = line.get("gpus")
    valid = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    for gpu in valid[:MOST_DEVICES]:
        index = number(gpu.get("index"))
        # A GPU without a valid index counts as the first one: most machines have only one.
        index = 0 if index is None or index < 0 else int(index)
        if index < MOST_DEVICES:
            things[Thing(GPU, str(index))] = numbers(gpu)
    ranks = numbers_by_name(line.get("ranks"), MOST_RANKS)
    return Sample(
        things, {rank: times for rank, times in ranks.items() if {"ran", "waited"} <= times.keys()}
    )


def numbers_by_name(value: object, limit: int = MOST_DEVICES) -> dict[str, Values]:
    """Map the first `limit` names of a JSON object to the numbers of their objects."""
    items = list(value.items())[:limit] if isinstance(value, dict) else []
    return {name: numbers(entry) for name, entry in items if isinstance(entry, dict)}


def numbers(entry: Entry) -> Values:
    return {key: value for key, value in entry.items() if number(value) is not None}


def intervals(
    earlier: Sample | None, later: Sample, seconds: float
) -> Iterator[tuple[Thing, Interval]]:
    """Yield the interval between two samples for each thing of the later one."""
    for thing, values in later.things.items():
        start = earlier.things.get(thing, {}) if earlier is not None else {}
        if thing == THE_MACHINE and earlier is not None:
            # The machine's RANK_TIMES are the sums over the ranks that are in both samples. A rank
            # that is only in the later sample is left out: its times may have begun before the
            # interval. The sums are growths already, so the machine's start is 0. A growth needs no
            # seconds (0.0).
            ranks = [
                Interval(earlier.ranks[rank], times, 0.0)
                for rank, times in later.ranks.items()
                if rank in earlier.ranks
            ]
            if ranks:
                start = {**start, **dict.fromkeys(RANK_TIMES, 0.0)}
                values = {
                    **values,
                    **{k: sum(counter_growth(r, k) for r in ranks) for k in RANK_TIMES},
                }
        yield thing, Interval(start, values, seconds)


# FULL: a fraction of the processors. QUEUED_LONG: a fraction of the time in which the run's threads
# want a processor. Threads that wait for half of that time wait as long as they run.
FULL, QUEUED_LONG = 0.9, 0.5


def is_oversubscribed(busy: float, queued: float) -> bool:
    """Return True if all processors are in use, and threads wait for them longer than they run.
    `busy`: the value of CPU; `queued`: the value of QUEUED."""
    return busy >= FULL and queued >= QUEUED_LONG
