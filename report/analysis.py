"""Read and interpret a run: `analyse` calls all rules, and the text and the page show its result.

The Analysis holds the content of summary.json, the verdict and the advice, and the figures from
which run_view.py makes the report. compare.py uses it, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs, to_builtins

from boundary.run_files import AttemptRecord, FirstCause, RankStart
from report import measure, progress
from report.accounting import Accounting, account, attempt_numbers
from report.advice import NO_ADVICE, Advice, Remedy, advise
from report.bottleneck import find_bottleneck
from report.coverage import add_basis
from report.files import Entry, last_of
from report.measure import Step
from report.read import RankRecord, RunRecord, first_start, read_run
from report.rerun import TooShort, advised_lines, check_length, find_tried_advice
from report.usage import MemoryUsage, ResourceUsage, Usage, gpu_joules, memory_usage, usage_of
from report.verdict import UNTIMED, Verdict, explain, headline_of
from report.windows import Points

# The report shows so many lines of a failed rank's log, and searches them in so many bytes.
LAST_LINES, LAST_LOG_BYTES = 12, 8192
# Grows if a stable field of summary.json (docs/run-directory.md) disappears or changes its meaning.
SUMMARY_VERSION = 1


@dataclass(frozen=True)
class Analysis:
    """The records of a run, and all conclusions from them."""

    run: RunRecord
    summary: Entry  # the content of summary.json
    start: RankStart  # the first of the longest attempt
    accounting: Accounting
    step: Step | None  # None if no rank finished two steps
    verdict: Verdict | None  # None if the run was too short
    failure: str | None  # the sentence before the verdict if the run did not finish
    to_resume: str | None  # how to continue a run that did not finish
    silent_ranks: list[str]  # a line for each place where ranks of such a run were silent
    too_short: TooShort | None  # instead of the verdict of a run that is too short
    advice: Advice
    uses: ResourceUsage  # of all attempts; no networks if all ranks are on one machine
    evidence: ResourceUsage  # of the attempt whose steps were measured
    memory: list[MemoryUsage]
    curve: list[progress.Epoch]
    scalars: dict[str, Points]  # of a script: name -> (seconds of the loop, value) pairs
    time_line: list[progress.TimePoint]
    spans: list[progress.Span]
    hundred_epochs: float | None  # seconds
    notes: list[str]  # sentences on what is missing


def analyse(folder: Path) -> Analysis:
    """Read and interpret a run directory. Raises UserError if the folder is not one."""
    run = read_run(folder)
    uses = usage_of(run)
    step = measure.measure_step(run, uses.networks)
    # Counters of an interface that no gradient used would be misleading.
    if run.on_one_machine:
        uses = replace(uses, networks=[])
    records = measure.longest_attempt(run.ranks) or run.ranks
    start = first_start(records)
    accounting, curve = account(run), progress.learning_curve(run)
    summary = summarise(run, accounting, step, start, curve)
    # Other attempts may have had other machines or a faster network.
    evidence = uses.in_attempt(step.attempt if step else None)
    short = check_length(run, step, summary["epochs"])
    if short and step and has_settled_bottleneck(records, step, run, evidence):
        short = None
    # A run that is too short has neither a bottleneck nor advice.
    cause = "none" if short else find_bottleneck(step, evidence)
    advice = NO_ADVICE if short else advise(step, cause, start, evidence, run.plan.options or {})
    verdict = UNTIMED if run.untimed else None if short else explain(cause, step, evidence)
    # These fields stay null in a run without a verdict, or without the step that it rests on.
    summary |= dict.fromkeys(("bottleneck_fraction", "runner_up", "undecided", "coverage"))
    if verdict and step:
        verdict, basis_fields = add_basis(verdict, run, step, evidence, cause)
        summary |= basis_fields
    summary["bottleneck"] = cause
    remedies = [*advice.remedies, *([advice.combined] if advice.combined else [])]
    summary["advice"] = [remedy_entry(run, remedy) for remedy in remedies]
    summary["tried"] = None if short else find_tried_advice(run, summary["images_per_second"])
    summary["predicted"] = to_builtins(start.decided.predicted)  # by `make plan`
    # An earlier attempt may have trained most epochs, so energy and images are those of all.
    joules, images = gpu_joules(run, uses.gpus), measure.training_totals(run.ranks).images
    summary["gpu_joules"] = None if joules is None else round(joules)
    per_image = joules / images if joules is not None and images else None
    summary["gpu_joules_per_image"] = None if per_image is None else round(per_image, 4)
    failure = headline_of(summary["status"], summary["first_cause"], run.unix)
    newest = run.attempts[-1] if run.attempts else AttemptRecord()
    return Analysis(
        run=run,
        summary=summary,
        start=start,
        accounting=accounting,
        step=step,
        verdict=verdict,
        failure=failure,
        to_resume=newest.to_resume if failure else None,
        silent_ranks=newest.silent_ranks if summary["status"] != "finished" else [],
        too_short=short,
        advice=advice,
        uses=uses,
        evidence=evidence,
        memory=memory_usage(run),
        curve=curve,
        scalars=progress.scalar_lines(run),
        time_line=progress.time_line(run),
        spans=progress.step_spans(run),
        hundred_epochs=progress.hundred_epochs(run, accounting),
        notes=missing_notes(run, uses.gpus, step),
    )


def remedy_entry(run: RunRecord, remedy: Remedy) -> Entry:
    """Return a remedy's object in summary.json."""
    line, trial = advised_lines(run, remedy.words, remedy.args)
    return {
        "change": remedy.change,
        "predicted_images_per_second": round(remedy.predicted, 1),
        "command": line,
        "trial": None if remedy.money else trial,
        "costs_money": remedy.money,
    }


def summarise(
    run: RunRecord,
    accounting: Accounting,
    step: Step | None,
    start: RankStart,
    curve: list[progress.Epoch],
) -> Entry:
    """Return the content of summary.json without the fields that `analyse` adds. `start`: the first
    start line of the longest attempt; it is blank if no rank wrote one."""
    scores = [epoch.top1 for epoch in curve if epoch.top1 is not None]
    steps = max((max(r.steps.step) for r in run.ranks if len(r.steps)), default=0)
    per_epoch = start.steps_per_epoch
    speed = measure.images_per_second(run.ranks)
    bytes_sent = step.bytes_sent if step else None
    if run.attempts:
        keys = ("nodes", "reason", "status", "wall_seconds", "resumed_samples", "first_cause")
        attempts = [{k: to_builtins(getattr(entry, k)) for k in keys} for entry in run.attempts]
    # Only the launcher records attempts.
    else:
        attempts = [
            {"nodes": hosts_in_attempt(run, attempt), "reason": "started by hand"}
            for attempt in attempt_numbers(run)
        ]
    return {
        "version": SUMMARY_VERSION,
        "status": status_of(run),
        "nodes": len(last_hosts(run)),
        "world_size": world_size(run),
        "attempts": attempts,
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


def status_of(run: RunRecord) -> str:
    """Return the status that the launcher recorded. If a run was started by hand, return the status
    that the last lines of its ranks imply."""
    if run.status in ("finished", "failed", "stopped", "running"):
        return run.status
    ends = [record.end.status for record in run.ranks_in(run.newest_attempt)]
    # All ranks must agree: a single rank that died makes the status `failed`.
    for status in ("finished", "stopped"):
        if ends and all(end == status for end in ends):
            return status
    return "failed"


def hosts_in_attempt(run: RunRecord, attempt: int | None) -> list[str]:
    return sorted({record.host for record in run.ranks_in(attempt)})


def has_settled_bottleneck(
    records: list[RankRecord], step: Step, run: RunRecord, evidence: ResourceUsage
) -> bool:
    """Return whether a run whose steps still change has one bottleneck all the same: the last steps
    agree with each other, and have the bottleneck of the mean step."""
    # Loaders that read ahead shorten the first steps, and a device may need time to warm up. Both
    # change the length of steps without changing what limits them.
    newest_records = [record.cut_to_last(0.0, measure.LEAST_STEPS) for record in records]
    last_step = measure.step_of_ranks(newest_records, run.program)
    if last_step.missing_for_verdict:
        return False
    return find_bottleneck(last_step, evidence) == find_bottleneck(step, evidence)


def last_hosts(run: RunRecord) -> list[str]:
    """Return the hosts of the last attempt."""
    if run.attempts and run.attempts[-1].nodes:
        return run.attempts[-1].nodes
    return hosts_in_attempt(run, run.newest_attempt) or run.hosts


def world_size(run: RunRecord) -> int:
    """Return the number of ranks of the last attempt."""
    # The launcher's number first: a rank that died early left no file.
    sizes = [entry.world_size for entry in reversed(run.attempts)]
    sizes += [run.plan.world_size, *(record.start.world_size for record in reversed(run.ranks))]
    return next(filter(None, sizes), len({record.rank for record in run.ranks}))


def first_cause(run: RunRecord) -> Entry | None:
    """Return why the run failed, if a file says why, with the end of the rank's log."""
    status = status_of(run)
    # A run that finished has recovered from the failures of earlier attempts. In its last attempt a
    # rank may still have printed an exception.
    attempts = run.attempts[-1:] if status == "finished" else run.attempts
    causes = [entry.first_cause for entry in attempts if entry.first_cause is not None]
    if status == "running" or (status == "finished" and not causes):
        return None
    # Without a launcher, the first rank whose end is `failed` is the cause.
    if not causes:
        failed = [record for record in run.ranks if record.end.status == "failed"]
        causes = [FirstCause(host=record.host, rank=record.rank) for record in failed[:1]]
    if not causes:
        return None
    cause = causes[-1]
    path = run.folder / "nodes" / str(cause.host) / f"rank{cause.rank}.log"
    lines = cause.last_lines or last_of(path, LAST_LOG_BYTES).splitlines()[-LAST_LINES:]
    return structs.asdict(structs.replace(cause, last_lines=lines))


def missing_notes(run: RunRecord, gpus: list[Usage], step: Step | None) -> list[str]:
    """Return sentences on what was not recorded, or cannot be true. `gpus`: the usage of all GPUs
    in all attempts."""
    notes = list(run.missing)
    for attempt in attempt_numbers(run):
        present = {record.rank for record in run.ranks_in(attempt)}
        entry = next((e for e in run.attempts if e.attempt == attempt), AttemptRecord())
        world = entry.world_size or world_size(run)
        # No mean is taken over an attempt without any timings.
        if present and len(present) < world:
            absent = sorted(set(range(world)) - present)
            notes.append(
                f"Attempt {attempt}: no timings of rank {', '.join(map(str, absent))}; "
                "the means are over the other ranks."
            )

    if any(record.is_uncounted for record in run.ranks):
        notes.append(
            "The speed is unknown, because the number of samples in a batch is unknown. End "
            "each step of the script with timings.step(samples=N)."
        )
    unrecorded = [host for host in run.hosts if host not in run.machines]
    if unrecorded:
        notes.append(f"Disks and network card were not recorded on {', '.join(unrecorded)}.")
    # Only a rank with a GPU shows that records of GPUs are missing.
    device = next((r.start.device for r in run.ranks if r.start.device), "")
    if not gpus and device.startswith(("NVIDIA", "cuda", "Tesla", "GeForce")):
        notes.append("The GPUs were not recorded: nvidia-smi was not found.")
    if step and step.contradiction:
        notes.append(step.contradiction)
    return notes
