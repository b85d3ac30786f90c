"""Which part of training holds it up, decided by rules on the measured step and nothing else; then
in words: one sentence that names it, and the figures behind it.

GPU utilisation is no evidence: it is 100 % while NCCL waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from report import formulas
from report.disk import DiskUse, ShareUse
from report.files import Entry
from report.layout import link, percent, seconds, size, three_digits
from report.measure import RankWork, Step, slowest

# A wait is the bottleneck from a quarter of training time: without it the run would be at least a
# third faster.
WAIT = 0.25
# Computing is called the bottleneck when it takes at least half.
WORK = 0.5
# A disk with requests outstanding for this fraction of the time is what a late loader waits for.
DISK_BUSY = 60.0
# A file share that moves less than this (MB/s) is not where images come from.
SHARE_READS = 0.5


def parts(step: Step) -> dict[str, float]:
    """The fraction of training time (steps and saving) that each possible bottleneck takes."""
    total = step.seconds + step.checkpoint
    seconds = {
        "data": step.data,
        "h2d": step.h2d,
        "compute": step.compute,
        "network": step.network,
        "straggler": step.peers,
        "checkpoint": step.checkpoint,
    }
    return {name: value / total if total > 0 else 0.0 for name, value in seconds.items()}


def bottleneck(step: Step | None, disks: list[DiskUse], shares: list[ShareUse]) -> str:
    """The value of `bottleneck` in summary.json.

    It is the largest wait when that takes a quarter of training time; else `compute` when computing
    takes half; else `none`: no step was measured, or the time is spread over several causes.
    """
    if step is None:
        return "none"
    fractions = parts(step)
    compute = fractions.pop("compute")
    largest = max(fractions, key=lambda part: fractions[part])
    if fractions[largest] >= WAIT:
        return data_cause(disks, shares) if largest == "data" else largest
    return "compute" if compute >= WORK else "none"


def data_cause(disks: list[DiskUse], shares: list[ShareUse]) -> str:
    """Why the loader is late: the file share, a busy disk, else the processors that decode."""
    disk = data_disk(disks)
    read = disk.read if disk else 0.0
    if any(use.read >= SHARE_READS and use.read > read for use in shares):
        return "data_share"
    if disk and disk.util >= DISK_BUSY:
        return "data_disk"
    return "data_decode"


def data_disk(disks: list[DiskUse]) -> DiskUse | None:
    """The busiest disk that holds the data; where that is unknown, the busiest one read from."""
    known = [use for use in disks if use.holds_data]
    read = [use for use in disks if use.holds_data is None and use.read > 0]
    return max(known or read, key=lambda use: use.util, default=None)


# A headline, and the sentences that give its reasons.
Finding = tuple[str, list[str]]


@dataclass(frozen=True)
class Verdict:
    """`headline` is one sentence; `because` holds the sentences with its figures."""

    headline: str
    because: tuple[str, ...]


def verdict(cause: str, step: Step | None, disks: list[DiskUse], shares: list[ShareUse]) -> Verdict:
    """Words for a value of `bottleneck`."""
    if step is None:
        return Verdict(
            "No two training steps were recorded, so nothing can be said about speed.", ()
        )
    writers = {
        "network": network,
        "compute": compute,
        "data_disk": disk,
        "data_share": share,
        "data_decode": decode,
        "h2d": h2d,
        "straggler": straggler,
        "checkpoint": checkpoint,
        "none": spread,
    }
    headline, because = writers[cause](step, disks, shares)
    said = (*demo(step), *warm_up(step), *because, *page_cache(cause, step, disks))
    return Verdict(headline, said)


def demo(step: Step) -> list[str]:
    """What machines that are none are good for."""
    if not step.shared_machine:
        return []
    return [
        f"The {step.nodes} machines of this run are processes of one PC and share its cores and "
        "its memory: nothing of it holds for a network, or for how much faster more machines are."
    ]


def warm_up(step: Step) -> list[str]:
    """What the exact steps with which a strategy begins did to the figures."""
    if step.asked is not None:
        return [
            f"Every step was warm-up: SYNC={step.asked.spec} never began, and what is "
            "said here is of exact sums, as allreduce's are. It begins with more EPOCHS, or with "
            "ARGS='--sync_warmup 0'."
        ]
    if not step.warm_steps or step.strategy is None:
        return []
    share = step.warm_steps * step.warm_seconds
    share /= share + (step.steps - step.warm_steps) * step.seconds
    return [
        f"The first {step.warm_steps} of {step.steps} steps were the warm-up of "
        f"SYNC={step.strategy.spec}: exact sums of {seconds(step.warm_seconds)} each, "
        f"{percent(share)} of the time. What is said here is of the others."
    ]


def network(step: Step, disks: list[DiskUse], shares: list[ShareUse]) -> Finding:
    """Most of the wait is for gradients that even the last rank waits for."""
    what = "Exchanging gradients within the machine" if step.one_machine else "The network"
    waits = part(step, step.network)
    headline = f"{what} is the bottleneck: {waits} of each step waits for gradients."
    return headline, [*traffic(step), *link_differs(step)]


def part(step: Step, value: float) -> str:
    """Seconds as a fraction of the mean step."""
    return percent(value / step.seconds)


def traffic(step: Step) -> list[str]:
    """What a node sent per step, and how long the link needs for that at least."""
    if step.one_machine:
        return [
            f"No cable is involved: {step.world} processes of one machine have "
            f"{size(step.payload.bytes)} of gradients each per step."
        ]
    if step.bytes_sent is None:
        moved = step.strategy and step.strategy.bytes_per_step(step.nodes, step.payload, step.gpus)
        by_formula = f"; by formula each node sends {size(moved)} per step" if moved else ""
        return [f"The card's counters are missing{by_formula}."]
    sentence = f"Each node sent {size(step.bytes_sent)} per step"
    if step.link_mbit is None:
        return [f"{sentence}; the link's speed is not known."]
    floor = step.bytes_sent / formulas.line_rate(step.link_mbit)
    return [
        f"{sentence}; at {link(step.link_mbit)} that alone takes {seconds(floor)} "
        f"of the step's {seconds(step.seconds)}."
    ]


def link_differs(step: Step) -> list[str]:
    """A link that carries much less than its card says."""
    if step.one_machine or not (step.rate and step.link_mbit and step.bytes_sent):
        return []
    if step.bytes_sent < 1e6 or step.rate > 0.6 * formulas.line_rate(step.link_mbit):
        return []
    return [
        f"The card says {link(step.link_mbit)}, but the gradients moved at about "
        f"{link(three_figures(step.rate * 8 / 1e6))}: look for a slower switch port, cable or "
        "machine on the way, and for retransmits below."
    ]


def three_figures(value: float) -> float:
    """Rounded to three significant digits."""
    return float(f"{value:.3g}")


def compute(step: Step, disks: list[DiskUse], shares: list[ShareUse]) -> Finding:
    """Forward, backward and optimizer dominate: the healthy case."""
    waits = {
        "gradients": step.network,
        "slower ranks": step.peers,
        "images": step.data,
        "copies to the device": step.h2d,
    }
    if step.world == 1:
        waits = {name: waits[name] for name in ("images", "copies to the device")}
    most = sorted(waits, key=lambda name: waits[name], reverse=True)[:2]
    named = ", ".join(f"{part(step, waits[name])} for {name}" for name in most)
    return (
        f"Computing is the bottleneck, as it should be: {part(step, step.compute)} of each step "
        "is forward, backward and optimizer.",
        [f"Waiting takes little: {named}."],
    )


def disk(step: Step, disks: list[DiskUse], shares: list[ShareUse]) -> Finding:
    """A busy disk keeps the loader waiting."""
    busy = data_disk(disks)
    assert busy is not None  # without one the cause would be different (bottleneck.data_cause)
    return (
        f"The disk is the bottleneck: {part(step, step.data)} of each step waits for images.",
        [
            f"{busy.device} on {busy.host} was busy {busy.util:.0f} % of the time, reading "
            f"{three_digits(busy.read)} MB/s at {three_digits(busy.await_ms)} ms a request."
        ],
    )


def share(step: Step, disks: list[DiskUse], shares: list[ShareUse]) -> Finding:
    """The images come over NFS or SMB, too slowly."""
    most = max(shares, key=lambda use: use.read)
    return (
        f"The data share is the bottleneck: {part(step, step.data)} of each step waits for images.",
        [
            f"{most.host} read {three_digits(most.read)} MB/s from {most.mount} ({most.kind}), "
            f"{three_digits(sum(use.read for use in shares))} MB/s over all machines."
        ],
    )


def decode(step: Step, disks: list[DiskUse], shares: list[ShareUse]) -> Finding:
    """The loader is late although nothing that it reads from is busy."""
    busy = data_disk(disks)
    idle = (
        f"No disk explains it: {busy.device} on {busy.host}, the busiest, was "
        f"busy {busy.util:.0f} %."
        if busy
        else "No disk explains it: none was read from while training ran."
        if disks
        else "The disks were not recorded, so a slow disk is not excluded."
    )
    return (
        f"Decoding images is the bottleneck: {part(step, step.data)} of each step waits "
        "for the loader.",
        [idle, "The processors cannot decode and augment images as fast as training takes them."],
    )


def h2d(step: Step, disks: list[DiskUse], shares: list[ShareUse]) -> Finding:
    """Copies to the device dominate."""
    return (
        f"Copying batches to the device is the bottleneck: {part(step, step.h2d)} of each step.",
        [f"A batch takes {seconds(step.h2d)}; computing on it {seconds(step.compute)}."],
    )


def straggler(step: Step, disks: list[DiskUse], shares: list[ShareUse]) -> Finding:
    """Ranks wait for a slower one, or for each other in turn."""
    last, others = slowest(step)
    waits = part(step, step.peers)
    if last.own < 1.1 * others:
        return (
            f"The ranks wait for each other: {waits} of each step, "
            "and no one of them is always last.",
            ["Something takes turns in slowing them: other programs, or ranks that share cores."],
        )
    why = max(last.seconds, key=lambda name: excess(step, last, name))
    return (
        f"One {'process' if step.shared_machine else 'machine'} holds up the others: they wait "
        f"{waits} of each step for {last.host} (rank {last.rank}).",
        [
            f"{last.host} needs {seconds(last.own)} of its own for a step, the median of the "
            f"others {seconds(others)}; most of the difference is `{why}`."
        ],
    )


def excess(step: Step, last: RankWork, category: str) -> float:
    """By how much a rank's category exceeds the mean of all; waiting for peers never counts."""
    if category == "sync_exposed":
        return float("-inf")
    mean = sum(rank.seconds.get(category, 0.0) for rank in step.ranks) / len(step.ranks)
    return last.seconds.get(category, 0.0) - mean


def checkpoint(step: Step, disks: list[DiskUse], shares: list[ShareUse]) -> Finding:
    """Saving stalls training."""
    return (
        f"Saving checkpoints is the bottleneck: {percent(parts(step)['checkpoint'])} of "
        "training time.",
        [
            f"Per step, {seconds(step.checkpoint)} of saving against "
            f"{seconds(step.seconds)} of training."
        ],
    )


def spread(step: Step, disks: list[DiskUse], shares: list[ShareUse]) -> Finding:
    """No part is large enough to be called the bottleneck."""
    fractions = sorted(parts(step).items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {percent(value)}" for name, value in fractions)
    return "There is no single bottleneck: the time is spread.", [f"The largest parts: {named}."]


def page_cache(cause: str, step: Step, disks: list[DiskUse]) -> list[str]:
    """What an idle disk means, since it is often taken for a sign of trouble."""
    if cause.startswith("data") or not disks:
        return []
    read = max(use.read for use in disks)
    if read > 5 or parts(step)["data"] >= 0.1:
        return []
    return [
        f"The disks read only {three_digits(read)} MB/s, and that is no fault: images that were "
        "read once come from memory (page cache). Waiting for images takes "
        f"{part(step, step.data)} of a step, so the disk is not the problem."
    ]


def headline_of(status: str, first_cause: Entry | None) -> str | None:
    """A sentence that comes before the verdict when the run did not finish."""
    if status == "finished":
        return None
    if status == "stopped":
        return "The run was stopped before its end; what it did until then is below."
    if status == "running":
        return "The run has not ended, or what started it is gone; this is what it did so far."
    if not first_cause:
        return "The run failed; no file says why."
    if first_cause.get("message"):
        return f"The run failed: {first_cause['message']}"
    what = first_cause.get("exception") or "it left no message"
    rank = "" if first_cause.get("rank") is None else f", rank {first_cause['rank']}"
    return f"The run failed on {first_cause.get('host', 'a node')}{rank}: {what}"
