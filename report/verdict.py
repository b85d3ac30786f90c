"""The bottleneck in words: one sentence that names it, the figures behind it, and what to do."""

from __future__ import annotations

import time
from dataclasses import dataclass

from contract.text import link_speed, percent, pluralize, seconds, size
from report import formulas
from report.bottleneck import (
    DECODES,
    busiest_loaders,
    data_disk,
    excess_queueing,
    fullest,
    has_straggler,
    late_hosts,
    parts,
    slow_link,
    slowest_by,
    swapping,
)
from report.figures import (
    CORES,
    CPU,
    DISK_BUSY,
    DISK_READ,
    DISK_REQUEST,
    LOADERS_BUSY,
    MEMORY,
    MEMORY_PRESSURE,
    MEMORY_TOTAL,
    MOST,
    QUEUED,
    SHARE_READ,
    SWAPPED_IN,
)
from report.files import Entry
from report.measure import Step, slow_place, slowest
from report.read import BETWEEN
from report.reading import gradient_bytes, reading_of
from report.usage import ResourceUsage

READ_FROM_DISK = 5e6  # bytes/s; where disks read less, images come from memory
# A headline, and the sentences that give its reasons.
Finding = tuple[str, list[str]]


@dataclass(frozen=True)
class Verdict:
    """`headline` is one sentence; `because` holds the sentences with its figures."""

    headline: str
    because: tuple[str, ...]


def verdict(cause: str, step: Step | None, evidence: ResourceUsage) -> Verdict:
    """Words for a value of `bottleneck`."""
    if step is None:
        return Verdict(
            "No two training steps were recorded, so nothing can be said about speed.", ()
        )
    writers = {
        "network": network,
        "slow_link": slow_link_of,
        "compute": compute,
        "data_disk": disk,
        "data_share": share,
        "data_decode": decode,
        "h2d": h2d,
        "straggler": straggler,
        "cpu_contention": contention,
        "cpu_oversubscribed": oversubscribed,
        "memory_pressure": memory,
        "checkpoint": checkpoint,
        "rank_work": rank_work,
        "none": no_single_bottleneck,
    }
    headline, because = writers[cause](step, evidence)
    sentences = (*demo(step), *warm_up(step), *because, *page_cache(cause, step, evidence))
    return Verdict(headline, sentences)


UNTIMED = Verdict(
    "This is a script of your own, and nobody timed its steps: nothing is said of its speed.",
    (
        "Two lines in it time them (`from tandem.timings import timed, step`), and the report then "
        "says where the time went: docs/own-script.md.",
    ),
)


def demo(step: Step) -> list[str]:
    """A warning where the machines are processes of one PC."""
    if not step.shared_machine:
        return []
    return [
        f"The {step.nodes} machines of this run are processes of one PC and share its cores and "
        "its memory: nothing of it holds for a network, or for how much faster more machines are."
    ]


def warm_up(step: Step) -> list[str]:
    """A sentence on the exact steps with which a strategy begins, where the run had some."""
    if step.pending is not None:
        return [
            f"Every step was warm-up: {step.pending.spec} never began, and what is said here is of "
            f"exact sums, as allreduce's are. It begins {step.program.phrases.warmed_up}."
        ]
    if not step.warm_steps or step.strategy is None or not step.warm_seconds:
        return []
    share = step.warm_steps * step.warm_seconds
    share /= share + (step.steps - step.warm_steps) * step.seconds
    return [
        f"The first {step.warm_steps} of {step.steps} steps were the warm-up of "
        f"{step.strategy.spec}: exact sums of {seconds(step.warm_seconds)} each, "
        f"{percent(share)} of the time. What is said here is of the others."
    ]


def network(step: Step, evidence: ResourceUsage) -> Finding:
    """Most of the wait is for gradients that even the last rank waits for."""
    what = "Exchanging gradients within the machine" if step.one_machine else "The network"
    waits = part(step, step.network)
    headline = f"{what} is the bottleneck: {waits} of each step waits for gradients."
    return headline, [*traffic(step), *link_differs(step)]


def part(step: Step, value: float) -> str:
    """Seconds as a share of the mean step, saving included, as in `parts`."""
    return percent(value / step.training)


def step_words(step: Step) -> str:
    saving = f" and {seconds(step.checkpoint)} of saving" if step.checkpoint >= 0.0005 else ""
    between = f" and {seconds(step.between)} between epochs" if step.between >= 0.0005 else ""
    return f"{seconds(step.seconds)} a step{saving}{between}"


def wait_words(step: Step, kind: str) -> str:
    """Seconds and percent of a step that a part takes, by its name in `parts`."""
    share = parts(step)[kind]
    return f"{seconds(share * step.training)} of {step_words(step)} ({percent(share)})"


def traffic(step: Step) -> list[str]:
    """What a node sent per step, and the least time that its link needs for it."""
    if step.one_machine:
        return [
            f"No cable is involved: {pluralize(step.world, 'process')} of one machine, with "
            f"{size(step.payload.bytes)} of gradients each per step."
        ]
    if step.bytes_sent is None:
        moved = step.strategy and step.strategy.bytes_per_step(step.nodes, step.payload, step.gpus)
        by_formula = f"; by formula each node sends {size(moved)} per step" if moved else ""
        missing = step.contradiction or "The card's counters are missing."
        return [missing.removesuffix(".") + f"{by_formula}."]
    sentence = f"Each node sent {size(step.bytes_sent)} per step"
    if step.link_mbit is None:
        return [f"{sentence}; the link's speed is not known."]
    floor = step.bytes_sent / formulas.line_rate(step.link_mbit)
    of = f"of the step's {seconds(step.seconds)}"
    if floor > step.seconds:  # the card's counters are of the whole loop
        of = f"and a step {seconds(step.seconds)}: some of it was sent beside steps"
    return [f"{sentence}; at {link_speed(step.link_mbit)} that alone takes {seconds(floor)} {of}."]


def link_differs(step: Step) -> list[str]:
    """A link that carries much less than its card says."""
    if step.one_machine or not (step.rate and step.link_mbit and step.bytes_sent):
        return []
    if step.bytes_sent < 1e6 or step.rate > 0.6 * formulas.line_rate(step.link_mbit):
        return []
    return [
        f"The card says {link_speed(step.link_mbit)}, but the gradients moved at about "
        f"{link_speed(three_figures(step.rate * 8 / 1e6))}: look for a slower switch port, cable "
        "or machine on the way, and for retransmits below."
    ]


def three_figures(value: float) -> float:
    """Rounded to three significant digits."""
    return float(f"{value:.3g}")


def compute(step: Step, evidence: ResourceUsage) -> Finding:
    """Forward, backward and optimizer dominate: the healthy case."""
    waits = {
        "gradients": step.network,
        "slower ranks": step.peers,
        step.samples: step.data,
        "copies to the device": step.h2d,
    }
    if step.world == 1:
        waits = {name: waits[name] for name in (step.samples, "copies to the device")}
    most = sorted(waits, key=lambda name: waits[name], reverse=True)[:2]
    named = ", ".join(f"{part(step, waits[name])} for {name}" for name in most)
    return (
        f"Computing is the bottleneck, as it should be: {part(step, step.compute)} of each step "
        "is forward, backward and optimizer.",
        [f"Waiting takes little: {named}."],
    )


def data_wait_clause(step: Step) -> str:
    """Half a sentence: how long ranks wait for images, or for a rank that does."""
    if step.peers <= step.data:
        return f"{part(step, step.data)} of each step waits for {step.samples}"
    if not has_straggler(step):
        waits = part(step, step.peers + step.data)
        return f"{waits} of each step waits for {step.samples}, of this machine or that"
    last, _ = slowest(step)
    waits = part(step, step.peers)
    return f"the others wait {waits} of each step for {last.host}, which waits for {step.samples}"


def disk(step: Step, evidence: ResourceUsage) -> Finding:
    """A busy disk keeps the loader waiting."""
    busy = data_disk(evidence.disks, late_hosts(step))
    assert busy is not None  # without one the cause would be different (bottleneck.data_cause)
    return (
        f"The disk is the bottleneck: {data_wait_clause(step)}.",
        [
            f"{busy.name} on {busy.host} was busy {busy.words(DISK_BUSY)} of the time, reading "
            f"{busy.words(DISK_READ)} MB/s at {busy.words(DISK_REQUEST)} a request."
        ],
    )


def share(step: Step, evidence: ResourceUsage) -> Finding:
    """The images come over NFS or SMB, too slowly."""
    hosts = late_hosts(step)
    late = [use for use in evidence.shares if use.host in hosts]
    most = max(late, key=lambda use: use.mean(SHARE_READ))
    moved = sum(use.mean(SHARE_READ) for use in evidence.shares)
    return (
        f"The data share is the bottleneck: {data_wait_clause(step)}.",
        [
            f"{most.host} read {most.words(SHARE_READ)} MB/s from {most.name} ({most.kind}), "
            f"{SHARE_READ.unit.words(moved)} MB/s over all machines.",
            *cable_sentence(step, evidence),
        ],
    )


def cable_sentence(step: Step, evidence: ResourceUsage) -> list[str]:
    """How full the fullest cable was, where the cards say what it can carry."""
    reading = reading_of(step, evidence)
    if reading is None or step.link_mbit is None or step.one_machine:
        return []
    carried = reading.cable_bytes(step.nodes, step.images, gradient_bytes(step)) / step.training
    return [
        f"{step.samples.capitalize()} and gradients together, the fullest cable carried "
        f"{size(carried)} a second of the "
        f"{size(formulas.goodput(step.link_mbit))} that {link_speed(step.link_mbit)} lets through."
    ]


def decode(step: Step, evidence: ResourceUsage) -> Finding:
    """The loader is late although nothing that it reads from is to be blamed."""
    loaders = busiest_loaders(evidence, late_hosts(step))
    if loaders is not None and loaders.mean(LOADERS_BUSY) >= DECODES:
        return (
            f"Decoding {step.samples} is the bottleneck: {data_wait_clause(step)}.",
            [
                f"The loaders on {loaders.host} ran, or waited for a processor, "
                f"{loaders.words(LOADERS_BUSY)} of the time: they cannot decode and augment "
                f"{step.samples} as fast as training takes them."
            ],
        )
    busy = data_disk(evidence.disks, late_hosts(step))
    idle = (
        f"No disk explains it: {busy.name} on {busy.host}, the busiest, was "
        f"busy {busy.words(DISK_BUSY)}."
        if busy
        else "No disk explains it: none was read from while training ran."
        if evidence.disks
        else "The disks were not recorded, so a slow disk is not excluded."
    )
    if loaders is not None:
        what = (
            f"The loaders on {loaders.host} ran only {loaders.words(LOADERS_BUSY)} of the time: "
            "they wait for what is not recorded here, such as a download or a lock."
        )
        headline = f"Loading {step.samples} is the bottleneck: {data_wait_clause(step)}."
        return headline, [idle, what]
    return (
        f"Decoding {step.samples} is the bottleneck: {data_wait_clause(step)}.",
        [
            idle,
            f"The processors cannot decode and augment {step.samples} as fast as training takes "
            "them.",
        ],
    )


def h2d(step: Step, evidence: ResourceUsage) -> Finding:
    """Copies to the device dominate."""
    return (
        f"Copying batches to the device is the bottleneck: {part(step, step.h2d)} of each step.",
        [
            f"A batch takes {seconds(step.h2d)}; computing on it {seconds(step.compute)}.",
            "A card in a slot with few lanes copies slowly: `nvidia-smi -q` has its PCIe link, now "
            "and at most. Another slot costs nothing.",
        ],
    )


def straggler(step: Step, evidence: ResourceUsage) -> Finding:
    """Ranks wait for a slower one, or for each other in turn."""
    last, others = slowest(step)
    waits = part(step, step.peers)
    if last.own < 1.1 * others:
        return (
            f"The ranks wait for each other: {waits} of each step, "
            "and no one of them is always last.",
            ["Something takes turns in slowing them: other programs, or ranks that share cores."],
        )
    place = slow_place(step, last)
    kind = "machine" if place == last.host else "device"
    return (
        f"One {'process' if step.shared_machine else kind} holds up the others: they wait "
        f"{waits} of each step for {last.host} (rank {last.rank}).",
        [
            f"{place} needs {seconds(last.own)} of its own for a step, the median of "
            f"the others {seconds(others)}; most of the difference is `{slowest_by(step, last)}`."
        ],
    )


def contention(step: Step, evidence: ResourceUsage) -> Finding:
    """Other programs take the processors of the machine that the others wait for."""
    last, others = slowest(step)
    use, waits = evidence.machine(last.host), excess_queueing(step, evidence)
    assert use is not None and waits is not None  # bottleneck.straggler_cause
    busy = use.others_busy
    note = "" if busy is None else f" Other programs kept {percent(busy)} of them busy."
    return (
        f"Other programs take the processors of {last.host}: the others wait "
        f"{part(step, step.peers)} of each step for it.",
        [
            f"{last.host} needs {seconds(last.own)} of its own for a step, the median of the "
            f"others {seconds(others)}. Its threads wait {seconds(waits)} a step longer for a "
            f"processor than those of the others.{note}",
            f"`top` on {last.host} shows them: end them, or start them when nothing trains.",
        ],
    )


def oversubscribed(step: Step, evidence: ResourceUsage) -> Finding:
    """More threads want a processor than there are."""
    use = fullest(evidence)
    assert use is not None  # bottleneck.bottleneck
    others, cores = use.others_busy or 0.0, round(use.most(CORES))
    note = f", {percent(others)} of them by other programs" if others >= 0.05 else ""
    remedy = (
        f"More processes than processors gain nothing: NODES={cores}."
        if step.shared_machine and step.nodes > cores
        else f"Fewer processes on {use.host}, loaders (--workers) among them, wait less; `top` "
        "there shows what else computes."
    )
    return (
        "Processors are the bottleneck: the run's threads wait for one "
        f"{percent(use.mean(QUEUED))} of the time in which they want it "
        f"({pluralize(cores, 'core')} on {use.host}).",
        [f"The processors were busy {percent(use.mean(CPU))} of the time{note}.", remedy],
    )


def memory(step: Step, evidence: ResourceUsage) -> Finding:
    """A machine reads back from swap what training needs."""
    first, *more = swapping(evidence)
    also = f", and so are {', '.join(use.host for use in more)}" if more else ""
    pressed = ""
    if first.knows(MEMORY_PRESSURE):
        pressed = f", and processes waited for memory {first.words(MEMORY_PRESSURE)} of it"
    return (
        f"{first.host} is short of memory{also}: {first.words(SWAPPED_IN)} MB/s come "
        "back from its swap while it trains.",
        [
            f"Up to {first.words(MEMORY, MOST)} of its {first.words(MEMORY_TOTAL, MOST)} were "
            f"taken while training ran{pressed}.",
            f"{step.program.phrases.memory}, or an end of other programs there take less of it; "
            "more memory costs money.",
        ],
    )


def slow_link_of(step: Step, evidence: ResourceUsage) -> Finding:
    """All wait for gradients because one machine's link is slow."""
    slow = slow_link(evidence.networks)
    assert slow is not None  # bottleneck.bottleneck
    host, rate, others = slow
    there, elsewhere = (link_speed(three_figures(speed * 8 / 1e6)) for speed in (rate, others))
    return (
        f"The link of {host} is the bottleneck: {part(step, step.network)} of each step waits for "
        "gradients.",
        [
            f"What {host} sends and gets moves at {there}; the others reach {elsewhere} among "
            "themselves.",
            "Try its cable and its port of the switch first, then its card: `ethtool` on it shows "
            "the speed that they agreed on.",
            *traffic(step),
        ],
    )


def checkpoint(step: Step, evidence: ResourceUsage) -> Finding:
    """Saving stalls training."""
    return (
        f"Saving checkpoints is the bottleneck: {percent(parts(step)['checkpoint'])} of "
        "training time.",
        [
            f"Per step, {seconds(step.checkpoint)} of saving against "
            f"{seconds(step.seconds)} of training."
        ],
    )


def rank_work(step: Step, evidence: ResourceUsage) -> Finding:
    """One rank does something between epochs, or between steps, and the others wait."""
    if step.rank_work > step.peers:
        last = max(step.ranks, key=lambda rank: rank.seconds[BETWEEN])
        each = last.seconds[BETWEEN] * step.measured_steps / max(1, step.epochs_begun)
        where, share = "epochs", step.rank_work
    else:
        last, _ = slowest(step)
        where, share, each = "steps", step.peers, last.seconds["other"]
    return (
        f"Rank {last.rank} spends {seconds(each)} between {where} while the others wait: "
        f"{part(step, share)} of the time.",
        ["Validate or save on all ranks, or less often. No machine is at fault."],
    )


def no_single_bottleneck(step: Step, evidence: ResourceUsage) -> Finding:
    """No part is large enough to be called the bottleneck."""
    fractions = sorted(parts(step).items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {percent(value)}" for name, value in fractions)
    return "There is no single bottleneck: the time is spread.", [f"The largest parts: {named}."]


def not_summed(steps: int) -> str:
    """A sentence on copies of a model that trained apart."""
    return (
        f"DDP summed no gradients in {steps:,} steps in a row: unless the script sums them itself, "
        "each rank trained a model of its own. Call the DDP model and not model.module, and make "
        "the last forward of a step outside no_sync()."
    )


def only_received(received: float) -> str:
    """On a machine whose ranks sent the others nothing of a model's size."""
    return (
        f"its ranks received {size(received)} of the others, and sent them no gradients: unless "
        "these are to be summed later, each machine trains a model of its own. Call the DDP model "
        "and not model.module, and make the last forward of a step outside no_sync()."
    )


def page_cache(cause: str, step: Step, evidence: ResourceUsage) -> list[str]:
    """A sentence on an idle disk, which is often taken for the cause, or was not needed yet."""
    read = max((use.mean(DISK_READ) for use in evidence.disks), default=0.0)
    if cause.startswith("data") or read > READ_FROM_DISK or parts(step)["data"] >= 0.1:
        return []
    if step.before_one_pass:
        return [
            "So far, from memory: these steps are less than one pass over the data, and "
            f"{step.samples} that are still in memory hide a slow disk."
        ]
    if not evidence.disks:
        return []
    return [
        f"The disks read only {DISK_READ.unit.words(read)} MB/s, and that is no fault: "
        f"{step.samples} that were read once come from memory (page cache). Waiting for "
        f"{step.samples} takes "
        f"{part(step, step.data)} of a step, so the disk is not the problem."
    ]


def headline_of(status: str, first_cause: Entry | None, until: float | None = None) -> str | None:
    """A sentence that comes before the verdict when the run did not finish, or a rank of it printed
    an exception as its last words."""
    if status == "finished":
        message = first_cause and first_cause.get("message")
        return f"The run finished, but {message}" if message else None
    if status == "stopped":
        return "The run was stopped before its end; what it did until then is below."
    if status == "running":
        when = time.strftime("%H:%M:%S", time.localtime(until)) if until else "now"
        return (
            f"The run has not ended, or what started it is gone; this is what it did up to {when}."
        )
    if not first_cause:
        return "The run failed; no file says why."
    if first_cause.get("message"):
        return f"The run failed: {first_cause['message']}"
    what = first_cause.get("exception") or "it left no message"
    rank = "" if first_cause.get("rank") is None else f", rank {first_cause['rank']}"
    return f"The run failed on {first_cause.get('host', 'a node')}{rank}: {what}"
