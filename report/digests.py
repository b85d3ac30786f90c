"""A run that goes on, from what its guards told (nodes/<host>/digest.jsonl): its steps and its
machines as if it had recorded them, for attempts of which no records are here yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contract import digests
from contract.digests import STEPS, RankSums
from report.files import Entry, count, found_in, only, read_lines, time_of
from report.records import (
    EVALUATION,
    MOST_EVALUATIONS,
    MOST_RECORDS,
    MOST_STEPS,
    START,
    RankRecord,
    Run,
    Samples,
    StepColumns,
    attempt_of,
    positive,
)

MOST_LINES = 100_000  # of a file; the launcher keeps fewer


def with_digests(run: Run) -> Run:
    """The same run with what was told of attempts whose ranks left no records here."""
    recorded = {record.attempt for record in run.ranks}
    for path in found_in(run.folder / "nodes", digests.NAME):
        lines = [line for line in _lines(path) if line["attempt"] not in recorded]
        starts = [line for line in read_lines(path) if isinstance(line.get("start"), dict)]
        if lines:
            _add_machine(run, path.parent.name, lines, starts)
        _add_ranks(run, path.parent.name, lines, starts)
    run.ranks.sort(key=lambda record: (record.attempt, record.rank, record.host))
    if run.told:
        run.missing[:] = [one for one in run.missing if not one.startswith("No rank wrote")]
    return run


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of sums, checked."""
    found: list[dict[str, Any]] = []
    for line in read_lines(path):
        sums = None if "start" in line else digests.checked(line)
        if sums is not None and len(found) < MOST_LINES:
            found.append({**sums, "attempt": attempt_of(sums)})
    return found


def _add_ranks(run: Run, host: str, lines: list[dict[str, Any]], starts: list[Entry]) -> None:
    records: dict[tuple[int, int], Told] = {}
    for line in lines:
        for name, told in line["ranks"].items():
            if name.isdecimal() and len(name) <= 4 and len(records) < MOST_RECORDS:
                key = line["attempt"], int(name)
                one = records.setdefault(key, Told(RankRecord(host, int(name), line["attempt"])))
                one.add(RankSums.of(told), line["least"])
        for score in line["evaluated"] or []:
            if (line["attempt"], score["rank"]) in records:
                records[line["attempt"], score["rank"]].evaluate(score)
        run.told_until = max(run.told_until or 0.0, time_of(line["unix"]) or 0.0)
    for start in starts:
        rank = start.get("rank")
        if type(rank) is int and (attempt_of(start), rank) in records:
            records[attempt_of(start), rank].record.start = only(START, start["start"])
    run.ranks += [one.record for one in records.values()]


class Told:
    """One rank's record, made of its sums: the steps between two lines are alike."""

    def __init__(self, record: RankRecord):
        self.record, self._before = record, RankSums()
        record.steps = StepColumns(most=MOST_STEPS // 64)

    def add(self, now: RankSums, least: dict[str, Any]) -> None:
        record, new = self.record, now.since(self._before)
        place = now.step - new.steps
        if min([place, new.seconds, *(one.steps for one in new.phases.values())]) < 0:
            return
        for kind in ("exact", "steady"):
            if least[kind][0]:
                record.least_wait = least[kind][1] / least[kind][0]
        self._steps(new, place)
        self._before = now
        first, exact = now.phases["first"], now.phases["exact"]
        if exact.steps and record.steps.exact:
            record.steps.exact[0] = 1  # a warm-up begins with the first step
        record.first_step, record.warm_seconds = dict(first.seconds), dict(exact.seconds)
        record.step_seconds = _sum(now, STEPS)
        record.seconds = _sum(now, (*STEPS, "beside"))

    def _steps(self, new: RankSums, place: int) -> None:
        """The steps after `place`, and after the last line."""
        columns, clock = self.record.steps, self._before.seconds
        for kind in STEPS:
            one = new.phases[kind]
            counted = max(0, min(one.steps, columns.most - len(columns)))
            if one.steps > counted:
                columns.beyond += one.total * (one.steps - counted) / one.steps
            for _ in range(counted):
                place, clock = place + 1, clock + new.seconds / new.steps
                columns.exact.append(int(kind == "exact"))
                columns.step.append(place)
                columns.samples.append(new.samples / new.steps)
                columns.clock.append(clock)
                columns.total.append(one.total / one.steps)
                columns.data.append(one.seconds.get("data", 0.0) / one.steps)
                columns.sync.append(one.seconds.get("sync_exposed", 0.0) / one.steps)

    def evaluate(self, score: Entry) -> None:
        if len(self.record.evaluations) < MOST_EVALUATIONS:
            known = only(EVALUATION, score)
            self.record.evaluations.append({**known, "clock": self._before.seconds})


def _sum(sums: RankSums, kinds: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in kinds:
        for name, seconds in sums.phases[kind].seconds.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def _add_machine(run: Run, host: str, lines: list[dict[str, Any]], starts: list[Entry]) -> None:
    """The machine's lines, each as its recorders would have written it."""
    run.told[host] = lines
    interface = next(
        (n.get("interface") for n in run.plan.get("nodes", []) if n.get("host") == host), None
    )
    card, gpus, mounts = [], [], []
    for line in lines:
        sums, head = line["sums"], {"attempt": line["attempt"], "mono": line["mono"]}
        if sums["sent"] is not None:
            counted = {"rx_bytes": sums["received"], "tx_bytes": sums["sent"]}
            lost = {"rx_dropped": sums["dropped"], "tx_dropped": 0}
            again = {"tcp_retransmits": sums["again"], "interface": interface or "card"}
            card.append({**head, **counted, **lost, **again})
        if sums["share"] is not None:
            share = {"mount": "all shares", "type": "share", "read_bytes": sums["share"]}
            mounts.append({**head, **share})
        for one in line["machine"]["gpus"] or []:
            names = ("index", "utilization", "memory_used", "temperature", "power", "clock_sm")
            gpus.append({**head, **dict(zip(names, one))})
    sizes = [only(SIZE, one["machine"]) for one in starts if isinstance(one.get("machine"), dict)]
    whole = (
        [_processors(line, sizes[-1]) for line in lines] if sizes and len(sizes[-1]) == 2 else []
    )
    kinds = ((run.net, card), (run.gpu, gpus), (run.mounts, mounts), (run.machines, whole))
    for files, told in kinds:
        if told:
            path = files[host].path if host in files else None
            files[host] = Samples(path, told)


SIZE = {"cores": count, "memory": positive}


def _processors(line: dict[str, Any], size: Entry) -> Entry:
    """A line of machine.jsonl."""
    sums, levels = line["sums"], line["machine"]
    told = {"attempt": line["attempt"], "mono": line["mono"], "cores": size["cores"]}
    told["cpu_busy"] = (sums["cpu"] or 0.0) * size["cores"]
    told["memory_total"] = size["memory"]
    told["memory_available"] = size["memory"] * (1 - (levels["memory"] or 0.0) / 100)
    told.update({name: sums[name] for name in ("swapped_in", "swapped_out")})
    told["pressure_memory"] = sums["stalled"]
    threads = levels["threads"] or {}
    told["ranks"] = {rank: {"ran": one[0], "waited": one[1]} for rank, one in threads.items()}
    return told
