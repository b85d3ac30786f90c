"""What to change, and what that would give. Formulas: formulas.py and docs/report.md.

Every prediction takes the measured step and replaces only the part that the change affects. Nothing
is predicted from what the run did not measure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

from contract import prices, strategies
from report import formulas
from report.bottleneck import WAIT, parts
from report.files import Entry
from report.measure import Step, slowest

# Predicted gains below this are within the noise of a measurement.
WORTH = 1.03
# One core decodes 660 images/s of 500x375 JPEG and 1018/s of a copy with a short side of 256
# (docs/report.md).
SMALL_COPY_DECODES = 1018 / 660
# An image of that copy has 27 KB instead of 65 KB.
SMALL_COPY_READS = 65 / 27
LINKS = ((2500, "2.5 Gbit/s"), (10000, "10 Gbit/s"))
# What to change, the images/s predicted for it, and the images/s to compare with (None: today's).
Change = tuple[str, float, Optional[float]]


def advise(step: Step | None, cause: str, image_size: float | None) -> list[Entry]:
    """List of {change, predicted_images_per_second}, best first; empty when nothing would help."""
    if step is None or step.seconds <= 0:
        return []
    found: list[Change] = []
    if step.world > 1:
        found += network_advice(step) + fewer_nodes(step) + straggler_advice(step)
    found += data_advice(step, cause, image_size) + checkpoint_advice(step)
    now = step.images_per_second
    gains = sorted(
        (predicted / (base or now), change, predicted) for change, predicted, base in found
    )
    return [
        {"change": change, "predicted_images_per_second": round(predicted, 1)}
        for gain, change, predicted in reversed(gains)
        if gain > WORTH
    ]


def network_advice(step: Step) -> list[Change]:
    """Another strategy, a faster link, a larger batch between two exchanges."""
    if step.network <= 0 or not step.payload.bytes or step.strategy is None:
        return []
    found: list[Change] = []
    rest = step.seconds - step.network
    if step.rate and not step.one_machine:
        found += strategy_advice(step, rest)
        for mbit, name in LINKS:
            rate = formulas.goodput(mbit)
            if rate > 1.5 * step.rate:
                found.append(
                    (
                        f"network cards and switch of {name}",
                        step.images / (rest + (step.wait(step.strategy, step.nodes, rate) or 0.0)),
                        None,
                    )
                )
    twice = 2 * step.work + 2 * step.peers + step.network
    found.append(
        (
            "twice the BATCH per node (--accumulate 2 if memory is short): half as many exchanges",
            2 * step.images / twice,
            None,
        )
    )
    return found


def strategy_advice(step: Step, rest: float) -> list[Change]:
    """Of the strategies not used, the fastest over a run of as many epochs, its warm-up included,
    or where this one was all warm-up after it; `rest`: a step without waiting."""
    rate = step.rate
    if rate is None:
        return []
    waits = [
        (waited, strategy)
        for strategy in prices.advised()
        if strategy != step.strategy
        and (waited := step.wait(strategy, step.nodes, rate)) is not None
    ]
    if not waits:
        return []
    if step.asked is None:
        phases, exact = step.phases, step.wait(strategies.parse(strategies.EXACT), step.nodes, rate)
    else:
        phases, exact = replace(step.phases, warmup=0), 0.0
    means = [
        (phases.mean(strategy, rest + waited, rest + (exact or 0.0)), strategy)
        for waited, strategy in waits
    ]
    seconds, best = min(means, key=lambda pair: pair[0])
    how = f"SYNC={best.spec}"
    if step.asked is not None and best.rule.warms:
        how += " with more EPOCHS, or with ARGS='--sync_warmup 0'"
    change = f"{how}: {best.rule.text} (accuracy: {prices.label_of(best)})"
    return [(change, step.images / seconds, None)]


def fewer_nodes(step: Step) -> list[Change]:
    """The best of all smaller numbers of nodes, where one would be faster."""
    if step.shared_machine or not step.rate or step.strategy is None:
        return []
    best = max(((nodes_rate(step, nodes), nodes) for nodes in range(1, step.nodes)), default=None)
    if best is None:
        return []
    predicted, nodes = best
    name = "one machine alone" if nodes == 1 else f"{nodes} machines"
    return [(f"NODES={nodes}: {name} instead of {step.nodes}", predicted, None)]


def nodes_rate(step: Step, nodes: int) -> float:
    """Images per second of `nodes` of these machines with the same batch per node."""
    world = max(1, round(step.world * nodes / step.nodes))
    waited = 0.0
    if nodes > 1 and step.strategy is not None and step.rate is not None:
        waited = step.wait(step.strategy, nodes, step.rate) or 0.0
    return step.images * world / step.world / (step.work + waited)


def straggler_advice(step: Step) -> list[Change]:
    """Leaving out the machine that the others wait for."""
    last, others = slowest(step)
    if step.nodes < 3 or step.shared_machine or last.own < (1 + WAIT) * others:
        return []
    kept = step.world - sum(rank.host == last.host for rank in step.ranks)
    if kept <= 0:
        return []
    own = max(rank.own for rank in step.ranks if rank.host != last.host)
    predicted = step.images * kept / step.world / (own + step.network)
    return [(f"train without {last.host}, or repair it", predicted, None)]


def data_advice(step: Step, cause: str, image_size: float | None) -> list[Change]:
    """Smaller copies of large images; images on each node's own disk."""
    if not cause.startswith("data"):
        return []
    found: list[Change] = []
    if image_size and image_size >= 128:
        factor = SMALL_COPY_DECODES if cause == "data_decode" else SMALL_COPY_READS
        seconds = formulas.faster_loading(step.seconds, step.data, factor)
        found.append(
            (
                "copy the images once with a short side of 256 pixels (taken to be 500x375 now)",
                step.images / seconds,
                None,
            )
        )
    if cause == "data_decode":
        seconds = formulas.faster_loading(step.seconds, step.data, 2)
        found.append(
            (
                "twice the loader processes (--workers), if that many cores are idle",
                step.images / seconds,
                None,
            )
        )
    if cause == "data_share":
        found.append(
            (
                "images on each machine's own disk instead of the share, if that disk keeps up",
                step.images / (step.seconds - step.data),
                None,
            )
        )
    return found


def checkpoint_advice(step: Step) -> list[Change]:
    """Saving half as often. Compared with images per second that count the time for saving."""
    if parts(step)["checkpoint"] < 0.1:
        return []
    now = step.images / (step.seconds + step.checkpoint)
    predicted = step.images / (step.seconds + step.checkpoint / 2)
    return [
        (
            f"save half as often (--checkpoint_every; now {now:.1f} images/s with saving counted)",
            predicted,
            now,
        )
    ]
