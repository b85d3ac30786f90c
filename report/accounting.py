"""Account for the wall time of a run: each second of a rank belongs to one category or to the gap.

analysis.py calls `account`. measure.py, which measures steps, does not use this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from boundary.run_files import GuardEnd
from contract.records import CATEGORIES
from report.measure import waits_between
from report.read import BETWEEN, RankRecord, RunRecord


@dataclass(frozen=True)
class RankTime:
    """The time of a rank in an attempt. `seconds` has all categories; `gap` is the other time."""

    attempt: int
    host: str
    rank: int
    seconds: dict[str, float]
    wall: float

    @property
    def gap(self) -> float:
        return self.wall - sum(self.seconds.values())


@dataclass(frozen=True)
class Accounting:
    """The wall time of a run, summed over its attempts."""

    ranks: list[RankTime]
    seconds: dict[str, float]  # by category: the mean over the ranks of an attempt
    wall: float

    @property
    def gap(self) -> float:
        """Wall time that no category explains."""
        return self.wall - sum(self.seconds.values())

    @property
    def contradictions(self) -> list[RankTime]:
        """The ranks whose categories exceed the wall time by more than clocks differ."""
        return [time for time in self.ranks if time.gap < -0.02 * time.wall]


def account(run: RunRecord) -> Accounting:
    """Add up the run. An attempt in which no rank left a line is all gap."""
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    ranks, wall = [], 0.0
    by_attempt: dict[int, list[RankRecord]] = {}
    for record in run.ranks:
        by_attempt.setdefault(record.attempt, []).append(record)
    # Attempts are added up one by one: each has its own wall time and its own ranks.
    for attempt in attempt_numbers(run):
        records = by_attempt.get(attempt, [])
        attempt_wall = wall_seconds(run, attempt, records)
        wall += attempt_wall
        times = []
        for record, wait in zip(records, waits_between(records).seconds):
            # A wait for another rank's work between epochs is shown as that work, not as waiting.
            spent = rank_seconds(run, record)
            spent[BETWEEN] += wait
            spent["sync_exposed"] -= wait
            times.append(RankTime(attempt, record.host, record.rank, spent, attempt_wall))
        # If a rank never reached the loop, all time that its guard saw is start and stop.
        started = {time.rank for time in times}
        for (host, exit_attempt), entry in sorted(run.exits.items(), key=str):
            guard_seconds = seconds_of_guard(entry)
            if exit_attempt != attempt or guard_seconds is None:
                continue
            planned = [node.ranks for node in run.plan.nodes if node.host == host]
            for rank in entry.ranks or next((numbers for numbers in planned if numbers), []):
                if rank not in started:
                    spent = dict.fromkeys(CATEGORIES, 0.0) | {"start_stop": guard_seconds}
                    times.append(RankTime(attempt, host, rank, spent, attempt_wall))
        # The mean over ranks, so that the categories of an attempt add up to its wall time.
        for time in times:
            for category in CATEGORIES:
                seconds[category] += time.seconds[category] / len(times)
        ranks += times
    return Accounting(ranks, seconds, wall)


def attempt_numbers(run: RunRecord) -> list[int]:
    """Return the attempts that any file mentions, in order."""
    numbers = {entry.attempt for entry in run.attempts}
    numbers |= {record.attempt for record in run.ranks} | {attempt for _, attempt in run.exits}
    return sorted(numbers)


def wall_seconds(run: RunRecord, attempt: int, records: list[RankRecord]) -> float:
    """Return the seconds from the first start to the last exit of an attempt."""
    for entry in run.attempts:
        # A launcher that died during the attempt recorded 0.
        if entry.attempt == attempt and entry.wall_seconds:
            return float(entry.wall_seconds)
    # Without the launcher's time the guards' clocks count, then the ranks' own seconds.
    exits = [entry for (_, number), entry in run.exits.items() if number == attempt]
    guards = [spent for entry in exits if (spent := seconds_of_guard(entry)) is not None]
    if guards:
        return max(guards)
    return max((sum(rank_seconds(run, record).values()) for record in records), default=0.0)


def seconds_of_guard(entry: GuardEnd) -> float | None:
    """Return the seconds from a guard's start to its end; None if it recorded no times."""
    start, end = entry.mono_start, entry.mono_end
    return None if start is None or end is None else max(0.0, end - start)


def rank_seconds(run: RunRecord, record: RankRecord) -> dict[str, float]:
    """Return the seconds of all categories of a rank in an attempt."""
    seconds = {category: record.seconds.get(category, 0.0) for category in CATEGORIES}
    # `start_stop` is the time from the process's start to the beginning of the loop, and from the
    # end of the loop to the guard's exit, by the clock of the rank's machine.
    process_start, loop_start = record.start.mono_process, record.start.mono
    if process_start is not None and loop_start is not None:
        seconds["start_stop"] += max(0.0, loop_start - process_start)
    loop_end = record.end.mono
    exit_time = run.exits.get((record.host, record.attempt), GuardEnd()).mono_end
    if loop_end is not None and exit_time is not None:
        seconds["start_stop"] += max(0.0, exit_time - loop_end)
    # A rank that died wrote no end. The time from its last line to the guard's exit belongs to the
    # gap, unless the rank was stalled and had recorded in which category.
    stalled = record.stall.category
    if stalled is not None and exit_time is not None and loop_start is not None:
        seconds[stalled] += max(0.0, exit_time - loop_start - sum(record.seconds.values()))
    return seconds
