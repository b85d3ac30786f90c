"""Whether a run that goes on makes no step any more, which rank the others wait for, and where
silent ranks stand.

Ranks meet in each step's sum of gradients. One that is stopped, that waits for a disk or that
computes for ever is not there, and the others wait in `sync_exposed`: all of them say so themselves
(`stall` lines), but for a rank that cannot say anything, whose machine says how its process is.
Seen over Gloo. Over NCCL the host of a rank goes on ahead of its device, so that ranks that wait
may stand in another category: never seen. Where a rank stands in its code is what it answered
its guard (launcher/node/stacks.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from boundary.run_files import MOST_RANKS, Threads
from boundary.schema import convert_what_fits
from contract.text import seconds
from report.files import Entry, natural_number, number, text, time_of
from report.read import BETWEEN, Machine, RankRecord

SHORTEST, STEPS = 15.0, 5  # seconds, median steps without one, before it is a hang
STEADY = 10  # samples, one a second, for which a process has to be as it is
BUSY = 0.5  # of a processor, had or waited for: it computes
LONG = ("evaluate", "checkpoint")  # categories that may take as long as they want
WAITS = "sync_exposed"


@dataclass(frozen=True)
class Hang:
    """No step for so many seconds. `ranks`: those that have not come to the sum in which the others
    wait; none where all of them wait there."""

    seconds: float
    ranks: list[tuple[str, int]]  # host, rank
    why: str

    @property
    def sentence(self) -> str:
        some = [f"rank {rank} ({host})" for host, rank in self.ranks[:3]]
        more = len(self.ranks) - len(some)
        who = ", ".join([*some, f"{more} more"] if more else some)
        verb = "have" if len(self.ranks) > 1 else "has"
        what = f"{who} {verb} not arrived ({self.why})" if who else self.why
        return f"no step for {seconds(self.seconds)}: {what}"


@dataclass(frozen=True)
class Process:
    """A rank's processes, as their machine saw them in its last seconds: the state in which they
    stayed ("" where it changed) and what they wanted of a processor."""

    state: str = ""
    busy: float = 0.0


def hang_of(
    records: Sequence[RankRecord], machines: Mapping[str, Machine], now: float
) -> Hang | None:
    """None while steps come, and where a rank starts, evaluates or saves. `records`: of all ranks
    of the attempt; `now`: this machine's clock, as the times at which their files grew are."""
    if not records or any(record.end or not len(record.steps) for record in records):
        return None
    silent = min(silence(record, now) for record in records)
    if silent < max(SHORTEST, STEPS * max(median_step(record) for record in records)):
        return None
    processes = {
        (record.host, record.rank): process_of(machines.get(record.host), record.rank)
        for record in records
    }
    stopped = [whose for whose, process in processes.items() if process.state == "T"]
    if stopped:
        return Hang(silent, stopped, "its process is stopped")
    if any(record.stall.category in LONG for record in records):
        return None
    late = [record for record in records if record.stall.category != WAITS]
    if len(late) == len(records):
        return None
    whose = [(record.host, record.rank) for record in late]
    return Hang(silent, whose, why(late[0], processes[whose[0]]) if late else ALL_WAIT)


ALL_WAIT = "all ranks wait for each other, as if the network stood still"


def why(record: RankRecord, process: Process) -> str:
    """Why a rank does not come to the sum."""
    if record.stall.category == "data":
        return "waits for its data"
    if record.stall.category == BETWEEN:
        return "is between two epochs"
    if process.state == "D":
        return "waits for a disk"
    if process.busy >= BUSY:
        return "computes"
    where = record.stall.category
    return f"stands in `{where}`" if where else "says nothing"


def silence(record: RankRecord, now: float) -> float:
    """Seconds since it did anything."""
    return max(0.0, now - record.unix) + record.stall.idle


def median_step(record: RankRecord) -> float:
    """Seconds of a step, in the median of its lines but the first, which warms up."""
    each = [spent / count for spent, count in zip(record.steps.total, record.steps.count)]
    return statistics.median(each[1:] or each)


def process_of(machine: Machine | None, rank: int) -> Process:
    looks = [line for line in machine.recent if "mono" in line] if machine else []
    samples = [(number(line["mono"]) or 0.0, look(line, rank)) for line in looks[-STEADY:]]
    if len(samples) < STEADY:
        return Process()
    (since, first), (until, last) = samples[0], samples[-1]
    states = {sample.state for _, sample in samples}
    wanted = last.ran - first.ran + last.waited - first.waited
    return Process(
        state=str(states.pop() or "") if len(states) == 1 else "",
        busy=wanted / max(1e-3, until - since),
    )


def look(line: Entry, rank: int) -> Threads:
    """What a machine's line says of a rank."""
    ranks = line.get("ranks")
    entry = ranks.get(str(rank)) if isinstance(ranks, dict) else None
    return convert_what_fits(entry, Threads) or Threads()


ASKED_AFTER = 5.0  # seconds of silence: those who were asked for another's failure stand anywhere
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "/library/")


@dataclass(frozen=True)
class Standing:
    """A silent rank; `seconds` of silence by the last line of its machine."""

    host: str
    rank: int
    seconds: float
    place: str


def standings(machines: Iterable[Machine], attempt: int) -> list[Standing]:
    """Of all machines' newest answers, by rank."""
    found = []
    for machine in machines:
        line = machine.stacks
        ranks = line.get("ranks")
        if line.get("attempt") != attempt or not isinstance(ranks, dict):
            continue
        now = max(time_of(line.get("mono")) or 0.0, machine.mono)
        for name, entry in list(ranks.items())[:MOST_RANKS]:
            last = time_of(entry.get("last")) if isinstance(entry, dict) else None
            if (
                last is not None
                and name.isdecimal()
                and len(name) < 10
                and now - last >= ASKED_AFTER
            ):
                found.append(
                    Standing(machine.host, int(name), now - last, place_of(entry, machine.host))
                )
    return sorted(found, key=lambda standing: standing.rank)


SHUTDOWN = "stands in threading._shutdown: a thread of the script is not a daemon"


def place_of(entry: Entry, host: str) -> str:
    """The deepest frame of the user's own code in the main thread, or why there is none."""
    threads = entry.get("threads")
    main = threads[0] if isinstance(threads, list) and threads else []
    frames = [frame for frame in map(frame_of, main) if frame] if isinstance(main, list) else []
    if any(file.endswith("/threading.py") and name == "_shutdown" for file, _, name in frames):
        return SHUTDOWN
    if frames:
        own = [frame for frame in frames if is_own(frame[0])]
        file, line, function = (own or frames)[0]
        *_, folder, name = ("", *PurePosixPath(file).parts)
        # A script runs in a folder with the machine's name.
        name = name if folder in ("", "/", host) else f"{folder}/{name}"
        return f"stands at {name}:{line}, in {function}"
    return STATES.get(str(text(entry.get("state"))), "did not answer where it stands")


STATES = {
    "T": "its process is stopped (SIGSTOP, or a debugger)",
    "D": "waits for a disk or a share, and did not answer where it stands",
    "": "ended before it answered where it stands",
}


def frame_of(value: object) -> tuple[str, int, str] | None:
    """File, line and function; None for what is no frame."""
    if not isinstance(value, list) or len(value) != 3:
        return None
    file, line, function = text(value[0]), natural_number(value[1]), text(value[2])
    return None if file is None or line is None or function is None else (file, line, function)


def is_own(file: str) -> bool:
    return not file.startswith("<") and not any(part in file for part in LIBRARIES)


def by_place(found: Sequence[Standing]) -> dict[str, str]:
    """A line for each place, with the ranks that stand there."""
    places: dict[str, list[Standing]] = {}
    for standing in found:
        places.setdefault(standing.place, []).append(standing)
    return {place: line_of(place, some) for place, some in places.items()}


def line_of(place: str, some: Sequence[Standing]) -> str:
    named = name_ranks([(standing.host, standing.rank) for standing in some])
    silent = seconds(max(standing.seconds for standing in some))
    return f"{named}, silent for {silent}: {place}"


def name_ranks(ranks: Sequence[tuple[str, int]]) -> str:
    """The first four, with their hosts, and how many more."""
    named = ", ".join(f"{rank} ({host})" for host, rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"


def finished_text(finished: Sequence[tuple[str, int]]) -> str:
    return f"{name_ranks(finished)} ended with exit code 0"
