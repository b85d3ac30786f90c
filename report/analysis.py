"""Everything that is known about a run, put together once; the text and the page only show it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs, to_builtins

from boundary.run_files import AttemptRecord, FirstCause, RankStart
from report.accounting import Accounting, account, attempt_numbers
from report.advice import NONE, Advice, Remedy, advise
from report.bottleneck import bottleneck
from report.files import Entry, last_of
from report.measure import Step, images_per_second, longest_attempt, measure_step, training_totals
from report.progress import (
    Epoch,
    Span,
    TimePoint,
    hundred_epochs,
    learning_curve,
    step_spans,
    time_line,
)
from report.read import Run, read_run
from report.rerun import TooShort, too_short, train_line
from report.usage import MemoryUsage, ResourceUsage, Usage, gpu_joules, memory_usage, usage_of
from report.verdict import UNTIMED, Verdict, headline_of, verdict

LAST_LINES = 12


@dataclass(frozen=True)
class Analysis:
    """One run, understood. `summary` is the content of summary.json."""

    run: Run
    summary: Entry
    start: RankStart  # the first of the longest attempt
    accounting: Accounting
    step: Step | None
    verdict: Verdict | None  # None where the run was too short
    failure: str | None  # the sentence before the verdict when the run did not finish
    to_resume: str | None  # how it goes on then
    silent_ranks: list[str]  # where they stood then, a line each place
    too_short: TooShort | None  # in place of the verdict
    advice: Advice
    uses: ResourceUsage  # of all attempts; no networks where all ranks are on one machine
    evidence: ResourceUsage  # those of the attempt whose steps were measured
    memory: list[MemoryUsage]
    curve: list[Epoch]
    line: list[TimePoint]
    spans: list[Span]
    hundred_epochs: float | None
    notes: list[str]  # what is missing, in sentences


def analyse(folder: Path) -> Analysis:
    """Reads and interprets a run directory. Raises UserError when the folder is not one."""
    run = read_run(folder)
    uses = usage_of(run)
    step = measure_step(run, uses.networks)
    if run.on_one_machine:
        uses = replace(uses, networks=[])
    records = longest_attempt(run.ranks) or run.ranks
    start = next((record.start for record in records if record.start), RankStart())
    accounting = account(run)
    summary = summarise(run, accounting, step, start)
    evidence = uses.in_attempt(step.attempt if step else None)
    cause = bottleneck(step, evidence)
    short = too_short(run, step, summary["epochs"])
    cause = "none" if short else cause
    summary["bottleneck"] = cause
    advice = NONE if short else advise(step, cause, start, evidence, run.plan.options or {})
    remedies = filter(None, (*advice.remedies, advice.together))
    summary["advice"] = [remedy_entry(run, remedy) for remedy in remedies]
    summary["predicted"] = plain(start.decided.predicted)  # by `make plan`
    joules, (images, _) = gpu_joules(run, uses.gpus), training_totals(run.ranks)
    summary["gpu_joules"] = None if joules is None else round(joules)
    per_image = joules / images if joules is not None and images else None
    summary["gpu_joules_per_image"] = None if per_image is None else round(per_image, 4)
    failure = headline_of(summary["status"], summary["first_cause"], run.unix)
    last = run.attempts[-1] if run.attempts else AttemptRecord()
    return Analysis(
        run=run,
        summary=summary,
        start=start,
        accounting=accounting,
        step=step,
        verdict=UNTIMED if run.untimed else None if short else verdict(cause, step, evidence),
        failure=failure,
        to_resume=last.to_resume if failure else None,
        silent_ranks=last.silent_ranks if summary["status"] != "finished" else [],
        too_short=short,
        advice=advice,
        uses=uses,
        evidence=evidence,
        memory=memory_usage(run),
        curve=learning_curve(run),
        line=time_line(run),
        spans=step_spans(run),
        hundred_epochs=hundred_epochs(run, accounting),
        notes=[
            *missing_notes(run, uses.gpus),
            *([step.contradiction] if step and step.contradiction else []),
        ],
    )


def remedy_entry(run: Run, remedy: Remedy) -> Entry:
    """A remedy in summary.json."""
    typed = remedy.words or remedy.args
    line = train_line(run, remedy.words, [*run.plan.trainer_words, *remedy.args]) if typed else None
    return {
        "change": remedy.change,
        "predicted_images_per_second": round(remedy.predicted, 1),
        "command": line,
        "costs_money": remedy.money,
    }


def summarise(run: Run, accounting: Accounting, step: Step | None, start: RankStart) -> Entry:
    """summary.json without the conclusions (bottleneck, advice, predicted)."""
    curve = learning_curve(run)
    scores = [epoch.top1 for epoch in curve if epoch.top1 is not None]
    steps = max((max(r.steps.step) for r in run.ranks if len(r.steps)), default=0)
    per_epoch = start.steps_per_epoch
    speed = images_per_second(run.ranks)
    hosts = last_hosts(run)
    bytes_sent = step.bytes_sent if step else None
    return {
        "status": status_of(run),
        "nodes": len(hosts),
        "world_size": world_size(run),
        "attempts": attempts_of(run),
        "first_cause": first_cause(run),
        "best_top1": max(scores, default=None),
        "final_top1": scores[-1] if scores else None,
        "epochs": int(steps // per_epoch) if per_epoch else len(curve),
        "steps": steps,
        "images_per_second": None if speed is None else round(speed, 2),
        "wall_seconds": round(accounting.wall, 3),
        "seconds": {name: round(value, 4) for name, value in accounting.seconds.items()},
        "bytes_sent_per_step": None if bytes_sent is None else round(bytes_sent),
        "sync": start.sync,
    }


def plain(value: Any) -> Any:
    """What was read, for JSON: without what lacked."""
    return to_builtins(value)


def status_of(run: Run) -> str:
    """The status that the launcher recorded; without it (in a run started by hand) the one that the
    ranks' last lines imply."""
    if run.status in ("finished", "failed", "stopped", "running"):
        return run.status
    newest = max((record.attempt for record in run.ranks), default=None)
    ends = [record.end.status for record in run.ranks if record.attempt == newest]
    for status in ("finished", "stopped"):
        if ends and all(end == status for end in ends):
            return status
    return "failed"


def last_hosts(run: Run) -> list[str]:
    """The machines of the last attempt."""
    if run.attempts and run.attempts[-1].nodes:
        return run.attempts[-1].nodes
    newest = max((record.attempt for record in run.ranks), default=None)
    return sorted({r.host for r in run.ranks if r.attempt == newest}) or run.hosts


def world_size(run: Run) -> int:
    """Ranks of the last attempt."""
    sizes = [entry.world_size for entry in reversed(run.attempts)]
    sizes += [run.plan.world_size, *(record.start.world_size for record in reversed(run.ranks))]
    return next(filter(None, sizes), len({record.rank for record in run.ranks}))


def attempts_of(run: Run) -> list[Entry]:
    """`nodes`, `reason`, `status` and `wall_seconds` of each attempt."""
    if run.attempts:
        keys = ("nodes", "reason", "status", "wall_seconds", "resumed_samples", "first_cause")
        return [{key: plain(getattr(entry, key)) for key in keys} for entry in run.attempts]
    return [
        {
            "nodes": sorted({r.host for r in run.ranks if r.attempt == attempt}),
            "reason": "started by hand",
        }
        for attempt in attempt_numbers(run)
    ]


def first_cause(run: Run) -> Entry | None:
    """The cause of the last attempt; in a run without a launcher, the first rank that failed. In a
    run that finished, the rank that printed an exception as its last words."""
    status = status_of(run)
    attempts = run.attempts[-1:] if status == "finished" else run.attempts
    causes = [entry.first_cause for entry in attempts if entry.first_cause is not None]
    if status == "running" or (status == "finished" and not causes):
        return None
    if causes:
        cause = causes[-1]
        lines = cause.last_lines or log_tail(run, cause.host, cause.rank)
        return structs.asdict(structs.replace(cause, last_lines=lines))
    for record in run.ranks:
        if record.end.status == "failed":
            lines = log_tail(run, record.host, record.rank)
            return structs.asdict(FirstCause(host=record.host, rank=record.rank, last_lines=lines))
    return None


def log_tail(run: Run, host: object, rank: object) -> list[str]:
    """The last lines of a rank's log; [] where there is none."""
    path = run.folder / "nodes" / str(host) / f"rank{rank}.log"
    return last_of(path, 8192).splitlines()[-LAST_LINES:]


def missing_notes(run: Run, gpus: list[Usage]) -> list[str]:
    """Sentences on what was not recorded."""
    notes = list(run.missing)
    hosts = run.hosts
    world = world_size(run)
    for attempt in attempt_numbers(run):
        present = {record.rank for record in run.ranks if record.attempt == attempt}
        entry = next((e for e in run.attempts if e.attempt == attempt), AttemptRecord())
        wanted = entry.world_size or world
        if present and len(present) < wanted:
            absent = sorted(set(range(wanted)) - present)
            notes.append(
                f"Attempt {attempt}: no timings of rank {', '.join(map(str, absent))}; "
                "the means are over the others."
            )
    if any(record.is_uncounted for record in run.ranks):
        notes.append(
            "No speed: a batch does not say how many samples it holds. End each step of the script "
            "with timings.step(samples=N)."
        )
    lost = [host for host in hosts if host not in run.machines]
    if lost:
        notes.append(f"No record of the machine (disks, network card) on {', '.join(lost)}.")
    device = next((r.start.device for r in run.ranks if r.start.device), "")
    if not gpus and device.startswith(("NVIDIA", "cuda", "Tesla", "GeForce")):
        notes.append("No record of the GPUs: nvidia-smi was not found.")
    return notes
