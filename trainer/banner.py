"""Describe a run at its start, for the report (the `start` line) and for the screen."""

import dataclasses
from typing import Any, Dict

from contract import prices
from contract.strategies import parse
from contract.text import pluralize
from tandem.process_facts import describe_gradients, describe_process
from tandem.sync import effective_spec

from .build import Job
from .data.workers import worker_count
from .models import Cost


def start_line(job: Job, cost: Cost, resumed_samples: int) -> Dict[str, Any]:
    """Return the fields of the `start` line, described in docs/run-directory.md."""
    world, options = job.world, job.options
    images = len(job.train_set) // world.size
    workers = worker_count(options, world, job.image_size, images)
    return {
        **describe_process(world, world.host, world.device, job.clock.started),
        "node_rank": world.node_rank,
        "options": dataclasses.asdict(options),
        "decided": dict(world.decided),
        **{name: getattr(options, name) for name in ("model", "epochs", "precision", "sync")},
        "parameters": cost.parameters,
        **describe_gradients(job.model),
        "bucket_mb": options.bucket_size,
        "flops_per_image": cost.flops,
        "global_batch": world.global_batch,
        "rank_batch": world.batches[world.rank],
        "accumulate": job.micro_batches,
        "workers": 0 if options.trains_on_noise else workers,  # noise needs no loader
        "train_images": len(job.train_set),
        "eval_images": len(job.eval_set),
        "steps_per_epoch": job.steps_per_epoch,
        "warmup": options.phases.warmup,
        "image_size": job.image_size,
        "resumed_samples": resumed_samples,
    }


def describe_run(job: Job, cost: Cost) -> str:
    """Describe for the user what the run trains, and how."""
    world, options, size = job.world, job.options, job.image_size
    work = "FLOPs unknown"
    if cost.flops is not None:
        work = format_amount(cost.flops, "FLOP") + " an image"
    ranks = pluralize(world.size, "rank")
    level = options.precision
    if level.startswith("O"):
        reason = job.precision.fallback_reason
        level += f" by {job.precision.backend}" + (f" ({reason})" if reason else "")
    level += ", channels last" if options.channels_last else ""
    details = f" ({' + '.join(map(str, world.batches))})" if options.balance else ""
    details += f" in {job.micro_batches} micro-batches" if job.micro_batches > 1 else ""
    if world.size > 1:
        # The effective strategy may differ from the typed strategy. A single rank has none.
        strategy = parse(effective_spec(options.sync, world.nodes, options.family))
        if strategy.rule is not parse(options.sync).rule:
            details += (
                f"\n--sync {options.sync} has an effect only between machines: on one machine all "
                "sums are exact"
            )
        elif strategy != parse(options.sync):
            details += (
                f"\n--sync {options.sync} is {strategy.spec} with --optimizer {options.optimizer}"
            )
        steps = options.epochs * job.steps_per_epoch
        warm_up = options.phases.warn_if_all_warm_up(strategy)
        for note in [warm_up, *prices.caveats(strategy, options.family, steps)]:
            details += f"\n{note}" if note else ""
    saved = "" if options.output else "; nothing is saved: no --output"
    return (
        f"{options.model}: {format_amount(cost.parameters, ' parameters')}, {work} of {size} px, "
        f"{level}\n{pluralize(len(job.train_set), 'image')} of "
        f"{pluralize(len(job.train_set.classes), 'class')}{saved}\n"
        f"{pluralize(job.steps_per_epoch, 'step')} an epoch; "
        f"batch {world.global_batch} over {ranks}{details}"
    )


def format_amount(number: int, unit: str) -> str:
    """Format a number with three digits and a unit: " parameters" gives 25.6 M parameters, and FLOP
    gives 3.65 GFLOP."""
    for letter, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {letter}{unit}"
    return f"{number} {unit.strip()}"
