"""Where the wall time went: each second of a rank belongs to one category; the rest is the gap."""

from __future__ import annotations

from dataclasses import dataclass

from boundary.run_files import GuardEnd
from contract.records import CATEGORIES
from report.measure import waits_between
from report.read import BETWEEN, RankRecord, Run


@dataclass(frozen=True)
class RankTime:
    """One rank in one attempt. `seconds` has all categories; `gap` is the wall time beyond them."""

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
    """`seconds`: mean over ranks; both `seconds` and `wall` are summed over attempts."""

    ranks: list[RankTime]
    seconds: dict[str, float]
    wall: float

    @property
    def gap(self) -> float:
        """Wall time that no category explains."""
        return self.wall - sum(self.seconds.values())

    @property
    def contradictions(self) -> list[RankTime]:
        """The ranks whose categories exceed the time that passed, by more than clocks differ."""
        return [time for time in self.ranks if time.gap < -0.02 * time.wall]


def account(run: Run) -> Accounting:
    """Adds up the run. An attempt in which no rank left a line is all gap."""
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    ranks, wall = [], 0.0
    by_attempt: dict[int, list[RankRecord]] = {}
    for record in run.ranks:
        by_attempt.setdefault(record.attempt, []).append(record)
    for attempt in attempt_numbers(run):
        records = by_attempt.get(attempt, [])
        attempt_wall = wall_seconds(run, attempt, records)
        wall += attempt_wall
        times = []
        for record, wait in zip(records, waits_between(records)[0]):
            spent = rank_seconds(run, record)
            spent[BETWEEN] += wait
            spent["sync_exposed"] -= wait
            times.append(RankTime(attempt, record.host, record.rank, spent, attempt_wall))
        times += unstarted_ranks(run, attempt, {time.rank for time in times}, attempt_wall)
        for time in times:
            for category in CATEGORIES:
                seconds[category] += time.seconds[category] / len(times)
        ranks += times
    return Accounting(ranks, seconds, wall)


def attempt_numbers(run: Run) -> list[int]:
    """The attempts that any file mentions."""
    numbers = {entry.attempt for entry in run.attempts}
    numbers |= {record.attempt for record in run.ranks} | {attempt for _, attempt in run.exits}
    return sorted(numbers)


def wall_seconds(run: Run, attempt: int, records: list[RankRecord]) -> float:
    """Seconds from the first start to the last exit of an attempt, by the launcher's clock, else
    the guards', else the ranks'. (A launcher that died in it recorded 0.)"""
    for entry in run.attempts:
        if entry.attempt == attempt and entry.wall_seconds:
            return float(entry.wall_seconds)
    spans = [span(entry) for (_, which), entry in run.exits.items() if which == attempt]
    guards = [seconds for seconds in spans if seconds is not None]
    if guards:
        return max(guards)
    return max((sum(rank_seconds(run, record).values()) for record in records), default=0.0)


def span(entry: GuardEnd) -> float | None:
    """Seconds from a guard's start to its end."""
    start, end = entry.mono_start, entry.mono_end
    return None if start is None or end is None else max(0.0, end - start)


def rank_seconds(run: Run, record: RankRecord) -> dict[str, float]:
    """All categories of one rank in one attempt.

    `start_stop` is measured by the clock of the rank's own machine: from the guard's start to the
    beginning of the loop, and from the end of the loop to the guard's exit. A rank that died leaves
    no end: the time from its last line to the guard's exit belongs to no category and so to the
    gap, but for one that stood, and had said in which category.
    """
    seconds = {category: record.seconds.get(category, 0.0) for category in CATEGORIES}
    began, loop = record.start.mono_process, record.start.mono
    if began is not None and loop is not None:
        seconds["start_stop"] += max(0.0, loop - began)
    ended = record.end.mono
    exit_time = run.exits.get((record.host, record.attempt), GuardEnd()).mono_end
    if ended is not None and exit_time is not None:
        seconds["start_stop"] += max(0.0, exit_time - ended)
    stood = record.stall.category
    if stood is not None and exit_time is not None and loop is not None:
        seconds[stood] += max(0.0, exit_time - loop - sum(record.seconds.values()))
    return seconds


def unstarted_ranks(run: Run, attempt: int, started: set[int], wall: float) -> list[RankTime]:
    """Ranks that never reached the loop: all that their guard saw counts as start and stop."""
    ranks = []
    for (host, which), entry in sorted(run.exits.items(), key=str):
        seconds = span(entry)
        if which != attempt or seconds is None:
            continue
        for rank in ranks_of(run, host, entry):
            if rank not in started:
                times = dict.fromkeys(CATEGORIES, 0.0) | {"start_stop": seconds}
                ranks.append(RankTime(attempt, host, rank, times, wall))
    return ranks


def ranks_of(run: Run, host: str, entry: GuardEnd) -> list[int]:
    """The ranks that a node had in an attempt, as its guard says, else as the plan says."""
    planned = [node.ranks for node in run.plan.nodes if node.host == host]
    return entry.ranks or next((ranks for ranks in planned if ranks), [])
