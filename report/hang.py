"""Detect that a running run makes no steps any more. Find the rank for which the other ranks wait,
and the sum that this rank did not enter. Describe where silent ranks are in their code.

Ranks meet in each step's sum of gradients. A rank that is stopped, waits for a disk or computes for
ever does not arrive, and the other ranks wait in `sync_exposed`. Each rank records its category in
a `stall` line. If a rank cannot record anything, its machine still records the state of the rank's
process. Runs with Gloo showed this. With NCCL the host of a rank runs ahead of its device, so that
waiting ranks may record another category; no run with NCCL has been tried. The places in the code
are the ranks' answers to their guards (launcher/node/stacks.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from boundary.run_files import MOST_RANKS, SilentRank, Threads
from boundary.schema import LENGTH, convert_what_fits
from contract.text import seconds
from report.files import time_of
from report.read import BETWEEN, Machine, RankRecord

# A run hangs after SHORTEST seconds without a step, or STEPS median steps if they take longer.
SHORTEST, STEPS = 15.0, 5
STEADY = 10  # lines of a machine, one a second, in which a process must not change its state
BUSY = 0.5  # a process that uses or waits for this fraction of a processor computes
LONG = ("evaluate", "checkpoint")  # categories that may take any time
WAITS = "sync_exposed"  # the category of a rank that waits in the sum


@dataclass(frozen=True)
class Hang:
    """A run without steps. `make status JSON=1` prints these fields."""

    seconds: float  # since the last step
    # Host and rank of each rank that has not entered the sum in which the other ranks wait. Empty
    # if all ranks wait in the sum.
    ranks: list[tuple[str, int]]
    why: str  # a clause: `waits for a disk`
    text: str = ""  # sentences on the missed sum, if the ranks count their sums

    @property
    def sentence(self) -> str:
        ranks = [f"rank {rank} ({host})" for host, rank in self.ranks[:3]]
        if len(self.ranks) > 3:
            ranks.append(f"{len(self.ranks) - 3} more")
        verb = "have" if len(self.ranks) > 1 else "has"
        problem = f"{', '.join(ranks)} {verb} not arrived ({self.why})" if ranks else self.why
        return f"no step for {seconds(self.seconds)}: {problem}"


class ProcessState(NamedTuple):
    """A rank's processes in the last STEADY seconds."""

    state: str = ""  # a letter of /proc/PID/stat, such as D; "" if it changed
    busy: float = 0.0  # processors that they used or waited for


def find_hang(
    records: Sequence[RankRecord],
    machines: Mapping[str, Machine],
    now: float,
    missed: Hang | None = None,
) -> Hang | None:
    """Return the hang; None while ranks make steps, and if a rank starts, evaluates or saves.
    `records`: of all ranks of the attempt. `now`: Unix time. `missed`: the result of
    find_missed_sum."""
    if any(record.end for record in records):
        return None
    # Without timed steps only the counters of sums show a hang.
    if not records or not all(len(record.steps) for record in records):
        return missed
    # While one rank still works, the other ranks may rightly wait for that rank.
    silent = min(silence(record, now) for record in records)
    if silent < max(SHORTEST, STEPS * max(median_step(record) for record in records)):
        return None
    processes = {
        (record.host, record.rank): read_process_state(machines.get(record.host), record.rank)
        for record in records
    }
    # A stopped process (T) explains the hang, whatever the ranks recorded last.
    stopped = [rank for rank, process in processes.items() if process.state == "T"]
    if stopped:
        return Hang(silent, stopped, "its process is stopped")
    # If a rank evaluates or saves, the other ranks wait for that rank, and that is no hang.
    if any(record.stall.category in LONG for record in records):
        return None
    absent = [record for record in records if record.stall.category != WAITS]
    # If no rank waits in the sum, each rank is busy with its own step, however long that takes.
    if len(absent) == len(records):
        return None
    if not absent:
        why = "all ranks wait for each other, as if the network had stopped"
        return missed or Hang(silent, [], why)
    ranks = [(record.host, record.rank) for record in absent]
    # Hang has a single clause, which explains the first absent rank.
    return Hang(silent, ranks, explain_absence(absent[0], processes[ranks[0]]))


def explain_absence(record: RankRecord, process: ProcessState) -> str:
    """Return a clause on why a rank does not arrive at the sum."""
    category = record.stall.category
    if category == "data":
        return "waits for its data"
    if category == BETWEEN:
        return "is between two epochs"
    if process.state == "D":
        return "waits for a disk"
    if process.busy >= BUSY:
        return "computes"
    return f"stands in `{category}`" if category else "says nothing"


def silence(record: RankRecord, now: float) -> float:
    """Return the seconds since a rank last did anything. When a rank writes its `stall` line, it
    has been idle for `stall.idle` seconds."""
    return max(0.0, now - record.unix) + record.stall.idle


def median_step(record: RankRecord) -> float:
    """Return the median seconds of a step, without the first line, which warms up."""
    means = [spent / count for spent, count in zip(record.steps.total, record.steps.count)]
    return statistics.median(means[1:] or means)


def read_process_state(machine: Machine | None, rank: int) -> ProcessState:
    """Return the state of a rank's processes by the last STEADY lines of its machine. It is blank
    if there are fewer lines."""
    lines = [line for line in machine.recent if "mono" in line][-STEADY:] if machine else []
    # Fewer lines may show a state that is just about to change.
    if len(lines) < STEADY:
        return ProcessState()
    # Example of a line: {"mono": 93.0, "ranks": {"3": {"ran": 9.1, "waited": 0.2, "state": "S"}}}
    samples: list[Threads] = []
    for line in lines:
        ranks = line.get("ranks")
        entry = ranks.get(str(rank)) if isinstance(ranks, dict) else None
        samples.append(convert_what_fits(entry, Threads) or Threads())
    start, end = samples[0], samples[-1]
    passed = (time_of(lines[-1]["mono"]) or 0.0) - (time_of(lines[0]["mono"]) or 0.0)
    busy = end.ran - start.ran + end.waited - start.waited
    states = {sample.state for sample in samples}
    state = str(states.pop() or "") if len(states) == 1 else ""
    return ProcessState(state, busy / max(1e-3, passed))


# Seconds of silence. A guard also asks its ranks when a rank fails, and a rank that was silent for
# less than this time may then be anywhere in its code.
ASKED_AFTER = 5.0
# Parts of the paths of files that are not the user's code.
LIBRARIES = (
    *("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "/library/"),
    *("/tandem/sync/", "/tandem/timings.py"),
)


@dataclass(frozen=True)
class Standing:
    """A silent rank and where it is. `make status JSON=1` prints these fields."""

    host: str
    rank: int
    seconds: float  # of silence, until its machine's last line
    place: str  # the result of describe_place
    sums: int | None = None  # how many sums it has entered; None if it does not count them
    bucket: int | None = None  # the index of the newest sum's bucket
    pass_seconds: float = 0.0  # the mean time between two backward passes


def standings(machines: Iterable[Machine], attempt: int) -> list[Standing]:
    """Return the newest answers of the silent ranks of all machines, sorted by rank."""
    # Example of a machine's `stacks` line, whose times are seconds since boot:
    # {"kind": "stacks", "mono": 93.0, "attempt": 1, "ranks": {"3": {"last": 31.5, ...}}}
    silent_ranks = []
    for machine in machines:
        line = machine.stacks
        ranks = line.get("ranks")
        if line.get("attempt") != attempt or not isinstance(ranks, dict):
            continue
        newest_mono = max(time_of(line.get("mono")) or 0.0, machine.mono)
        # Names and entries come from the machine, so each of them is checked. A rank has at most
        # nine digits, as in the names of its files (read.RANK_FILE).
        for name, entry in list(ranks.items())[:MOST_RANKS]:
            last_mono = time_of(entry.get("last")) if isinstance(entry, dict) else None
            is_rank = name.isdecimal() and len(name) < 10
            if last_mono is None or not is_rank or newest_mono - last_mono < ASKED_AFTER:
                continue
            rank: SilentRank = convert_what_fits(entry, SilentRank)
            sums = rank.sums
            # The counters have times in nanoseconds (contract/records.py).
            pass_seconds = max(0, sums.newest - sums.first) / 1e9 / max(1, sums.passes - 1)
            silent_ranks.append(
                Standing(
                    host=machine.host,
                    rank=int(name),
                    seconds=newest_mono - last_mono,
                    place=describe_place(rank, machine.host),
                    sums=sums.entered,
                    bucket=sums.bucket,
                    pass_seconds=pass_seconds,
                )
            )
    return sorted(silent_ranks, key=lambda standing: standing.rank)


def find_missed_sum(silent_ranks: Sequence[Standing], world_size: int) -> Hang | None:
    """Return the wait in the first sum that not all ranks entered. Return None if the wait is
    short, if all ranks entered equally many sums, or if a rank is not silent or counts no sums."""
    counts = {s.rank: s.sums for s in silent_ranks if s.sums is not None}
    if not world_size or len(counts) < world_size or min(counts.values()) == max(counts.values()):
        return None
    # Sums are numbered from 1, so the first missed sum follows the smallest count.
    number = min(counts.values()) + 1
    waiting = [s for s in silent_ranks if counts.get(s.rank, 0) >= number]
    waited = min(standing.seconds for standing in waiting)
    # Ranks may rightly wait long for a rank that accumulates gradients, or evaluates.
    if waited < STEPS * max(standing.pass_seconds for standing in waiting):
        return None
    # A rank without a count is neither in `waiting` nor in `behind`.
    behind = [s for s in silent_ranks if counts.get(s.rank, number) < number]
    # A rank that waits in a collective of the script itself may wait for one of the other ranks.
    missing = [s for s in behind if not s.place.startswith(WAITS_IN)] or behind
    # Of the waiting ranks, the one that has entered most sums.
    newest = max(waiting, key=lambda standing: counts[standing.rank])
    # A rank enters the sums of all buckets of a backward pass before it waits for the first sum. If
    # it has entered two more sums, the missed sum is that of the bucket two before its newest one.
    bucket = -1 if newest.bucket is None else newest.bucket - (counts[newest.rank] - number)
    name = f"sum {number:,}" + (f" (bucket {bucket})" if bucket >= 0 else "")
    # The text: `node2, rank 1 did not enter sum 812 (bucket 3). It is at train.py:40, in step.
    # Ranks 0 and 2 have waited in this sum for 95 s`
    shown = missing[:3]
    names = [f"{standing.host}, rank {standing.rank}" for standing in shown]
    names += [f"{len(missing) - 3} more"] if len(missing) > 3 else []
    places = [f"Rank {standing.rank} {standing.place}" for standing in shown]
    places = places if len(missing) > 1 else [f"It {missing[0].place}"]
    # Up to five ranks are listed, of more ranks the first four.
    ranks = [f"{standing.rank}" for standing in waiting]
    ranks = ranks if len(ranks) < 6 else [*ranks[:4], f"{len(ranks) - 4} more"]
    subject = f"Ranks {join_words(ranks)} have" if len(ranks) > 1 else f"Rank {ranks[0]} has"
    sentences = [f"{join_words(names)} did not enter {name}", *places]
    text = ". ".join([*sentences, f"{subject} waited in this sum for {seconds(waited)}"])
    return Hang(waited, [(s.host, s.rank) for s in missing], f"did not enter {name}", text)


def join_words(words: Sequence[str]) -> str:
    """Join words as in `1, 2 and 3`. There is at least one word."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


# A rank's place, if Python waits for the threads of a script that has ended.
SHUTDOWN = "is in threading._shutdown: a thread of the script is not a daemon"
WAITS_IN = "waits in "  # begins the place of a rank in a collective
# A rank's place without frames, by the state of its process.
STATES = {
    "T": "is stopped (SIGSTOP, or a debugger)",
    "D": "cannot answer: it is in uninterruptible I/O (state D)",
    "": "ended before it answered where it is",
}
# torch's functions that start a collective and wait for it.
COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/torch/nn/parallel/distributed.py")


class StackFrame(NamedTuple):
    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        return self.file.startswith("<") or any(folder in self.file for folder in LIBRARIES)


def describe_place(rank: SilentRank, host: str) -> str:
    """Describe the deepest frame of the user's code in the main thread, or why there is none, and
    what NCCL has done."""
    # A thread is a list of frames, the deepest first: [["/home/anna/train.py", 40, "step"], ...].
    main_thread: list[Any] = rank.threads[0] if rank.threads else []
    frames = [
        StackFrame(frame[0][:LENGTH], frame[1], frame[2][:LENGTH])
        for frame in main_thread
        if isinstance(frame, list) and list(map(type, frame)) == [str, int, str] and frame[1] >= 0
    ]
    # At its end Python joins all threads, so its frames say nothing about the user's code.
    if any(f.file.endswith("/threading.py") and f.function == "_shutdown" for f in frames):
        return SHUTDOWN
    place = STATES.get(str(rank.state), "did not answer where it is")
    if frames:
        frame = next((frame for frame in frames if not frame.is_library), frames[0])
        # Only the last folder of the path is shown. A script runs in a folder with the machine's
        # name, which would make equal places of several machines look different. Example: the
        # parts of /home/anna/train.py are /, home, anna (`folder`) and train.py (`name`).
        *_, folder, name = ("", *PurePosixPath(frame.file).parts)
        name = name if folder in ("", "/", host) else f"{folder}/{name}"
        collective = frames[0].function if frames[0].file.endswith(COLLECTIVES) else ""
        action = f"{WAITS_IN}{collective.lstrip('_')}" if collective else "is"
        place = f"{action} at {name}:{frame.line}, in {frame.function}"
    # `wait` is the kernel function in which the process sleeps.
    elif rank.state == "D" and rank.wait:
        place += f"; the kernel waits in {rank.wait}"
    sums = rank.sums
    if sums.queued is not None and sums.completed is not None:
        place += f"; NCCL completed {sums.completed:,} of {sums.queued:,} queued collectives"
    return place


def describe_silent_ranks(
    silent_ranks: Sequence[Standing], world_size: int, is_script: bool
) -> dict[str, str]:
    """Return a line for the missed sum, and a line for each place with its silent ranks. A line's
    key is the missed sum, or the place. `is_script`: the program may not count its sums."""
    missed = find_missed_sum(silent_ranks, world_size)
    lines = {missed.why: missed.text} if missed is not None else {}
    # The first line already says where these ranks are.
    described = set(missed.ranks) if missed is not None else set()
    places: dict[str, list[Standing]] = {}
    for standing in silent_ranks:
        if (standing.host, standing.rank) not in described:
            places.setdefault(standing.place, []).append(standing)
    for place, ranks in places.items():
        names = name_ranks([(standing.host, standing.rank) for standing in ranks])
        silent = seconds(max(standing.seconds for standing in ranks))
        lines[place] = f"{names}, silent for {silent}: {place}"
    is_counted = any(standing.sums is not None for standing in silent_ranks)
    if lines and is_script and world_size > 1 and not is_counted:
        lines[UNCOUNTED] = UNCOUNTED
    return lines


UNCOUNTED = (
    "Tandem cannot tell which rank is missing, because the script calls neither "
    "tandem.timings nor tandem.sync.attach"
)


def name_ranks(ranks: Sequence[tuple[str, int]]) -> str:
    """List the first four ranks with their hosts, and count the others."""
    names = ", ".join(f"{rank} ({host})" for host, rank in ranks[:4])
    count = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' * (len(ranks) > 1)} {names}{count}"


def finished_text(finished: Sequence[tuple[str, int]]) -> str:
    """Return a clause on the ranks that ended. `finished`: host and rank of each of them."""
    return f"{name_ranks(finished)} ended with exit code 0"
