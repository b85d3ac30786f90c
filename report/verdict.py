"""Explain the bottleneck: a headline names the bottleneck, and sentences give figures and a remedy.

bottleneck.py finds the cause, and `explain` chooses its explanation; analysis.py calls both.
coverage.py adds which signals were measured. advice.py, not this module, predicts what a change
gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from contract.text import link_speed, percent, pluralize, seconds, size
from report import bottleneck, figures, formulas
from report.bottleneck import late_hosts, step_shares
from report.files import Entry
from report.measure import NOTICEABLE, Step, find_slowest_rank
from report.read import BETWEEN
from report.reading import gradient_bytes, reading_of
from report.usage import ResourceUsage
from report.view import LEAST_SHOWN_SECONDS

READ_FROM_DISK = 5e6  # bytes/s; if disks read less, images come from memory
# The gradients are much slower than the link if they reach less than SLOWER_THAN_LINK of its rate.
# A step that sends fewer than EVIDENT_BYTES is no evidence: the transfer takes hardly any time.
SLOWER_THAN_LINK, EVIDENT_BYTES = 0.6, 1e6
# Below this fraction of the processors, other programs do not explain that threads wait.
NOTEWORTHY = 0.05
# A run that waits for images for this fraction of training time has reason to suspect its disks.
SUSPICIOUS_WAIT = 0.1


class Verdict(NamedTuple):
    """`headline` is one sentence; `because` has the sentences with figures and a remedy."""

    headline: str
    because: tuple[str, ...]


Explainer = Callable[[Step, ResourceUsage], Verdict]
EXPLAINERS: dict[str, Explainer] = {}  # by the value of `bottleneck` in summary.json


def explains(cause: str) -> Callable[[Explainer], Explainer]:
    """Register a function that explains a bottleneck."""

    def register(explainer: Explainer) -> Explainer:
        EXPLAINERS[cause] = explainer
        return explainer

    return register


def explain(cause: str, step: Step | None, evidence: ResourceUsage) -> Verdict:
    """Explain the bottleneck `cause`, and say what a reader must know before its figures. `cause`:
    the result of find_bottleneck."""
    if step is None:
        return Verdict(
            "Unknown: no two training steps were recorded, so nothing can be said about speed.", ()
        )
    verdict = EXPLAINERS[cause](step, evidence)
    context = []
    if step.shared_machine:
        context.append(
            f"The {step.nodes} nodes of this run are processes on one PC that share its cores "
            "and memory, so these numbers say nothing about a network or about the speed of "
            "more machines."
        )
    # This is how the report counts the exact steps with which a compressing strategy begins.
    if step.pending is not None:
        context.append(
            f"Every step was warm-up with exact sums, like allreduce: {step.pending.spec} "
            f"never started. It starts {step.program.phrases.warmed_up}."
        )
    # Without steps after the warm-up there are no seconds to compare with.
    elif step.warm_steps and step.strategy is not None and step.warm_seconds:
        warm_up_seconds = step.warm_steps * step.warm_seconds
        other_seconds = (step.steps - step.warm_steps) * step.seconds
        fraction = warm_up_seconds / (warm_up_seconds + other_seconds)
        context.append(
            f"The first {step.warm_steps} of {step.steps} steps were the warm-up of "
            f"{step.strategy.spec}, with exact sums: {seconds(step.warm_seconds)} each, "
            f"{percent(fraction)} of the time. All other numbers of this report describe the other "
            "steps."
        )
    because = (*context, *verdict.because, *explain_idle_disk(cause, step, evidence))
    return Verdict(verdict.headline, because)


# The verdict on a script that records no step times.
UNTIMED = Verdict(
    "Unknown: nobody timed the steps of this script, so nothing can be said about its speed.",
    (
        "Two lines time the steps (`from tandem.timings import timed, step`), and the report "
        "then shows where the time went: docs/own-script.md.",
    ),
)


def explain_idle_disk(cause: str, step: Step, evidence: ResourceUsage) -> list[str]:
    """Say that idle disks are not the bottleneck, or that they may become the bottleneck. Return []
    if the disks are busy or training waits for images."""
    rate = max((use.mean(figures.DISK_READ) for use in evidence.disks), default=0.0)
    waits = cause.startswith("data") or step_shares(step)["data"] >= SUSPICIOUS_WAIT
    if waits or rate > READ_FROM_DISK:
        return []
    if step.before_one_pass:
        return [
            "So far the disk may look faster than it is: the run has not read all data once, "
            f"and {step.samples} that are still in memory hide a slow disk."
        ]
    # Without records of disks nothing can be said about them.
    if not evidence.disks:
        return []
    return [
        f"The disks read only {figures.DISK_READ.unit.words(rate)} MB/s, because "
        f"{step.samples} already read come from memory (page cache). Waiting for "
        f"{step.samples} takes {share_words(step, step.data)} of a step, so the disk is not "
        "the bottleneck."
    ]


def share_words(step: Step, spent: float) -> str:
    """Write the seconds `spent` as a percentage of training time, as in `step_shares`."""
    return percent(spent / step.training_seconds)


def step_words(step: Step) -> str:
    """Write the mean step: `1.33 s a step, plus 12 ms for saving, plus 5 ms between epochs`."""
    saving = between = ""
    if step.checkpoint >= LEAST_SHOWN_SECONDS:
        saving = f", plus {seconds(step.checkpoint)} for saving"
    if step.between >= LEAST_SHOWN_SECONDS:
        between = f", plus {seconds(step.between)} between epochs"
    return f"{seconds(step.seconds)} a step{saving}{between}"


def wait_words(step: Step, wait: str) -> str:
    """Write a wait by its name in `step_shares`: `1.2 s of 1.33 s a step (90 %)`."""
    share = step_shares(step)[wait]
    return f"{seconds(share * step.training_seconds)} of {step_words(step)} ({percent(share)})"


def rate_words(rate: float) -> str:
    """Write bytes per second as the speed of a link, in three digits: `940 Mbit/s`."""
    return link_speed(float(f"{rate * 8 / 1e6:.3g}"))


@explains("network")
def explain_network(step: Step, evidence: ResourceUsage) -> Verdict:
    place = "Exchanging gradients inside the machine" if step.one_machine else "The network"
    waits = share_words(step, step.network)
    headline = f"{place} is the bottleneck: {waits} of each step waits for gradients."
    because = describe_traffic(step)
    if not step.one_machine and step.rate and step.link_mbit and step.bytes_sent:
        is_slow = step.rate <= SLOWER_THAN_LINK * formulas.line_rate(step.link_mbit)
        if is_slow and step.bytes_sent >= EVIDENT_BYTES:
            because.append(
                f"The network card reports {link_speed(step.link_mbit)}, but the gradients "
                f"moved at about {rate_words(step.rate)}: look for a slower switch port, "
                "cable or machine, and for retransmits below."
            )
    return Verdict(headline, tuple(because))


def describe_traffic(step: Step) -> list[str]:
    """Return a sentence on how much a node sent per step, and the least time that its link needs
    for it."""
    if step.one_machine:
        return [
            "All ranks are on one machine, so no cable is involved. Each has "
            f"{size(step.payload.bytes)} of gradients per step."
        ]
    # The counters are missing, or measure_step rejected their bytes as impossible. In the second
    # case `contradiction` has a sentence on these bytes.
    if step.bytes_sent is None:
        sent = step.computed_bytes
        by_formula = f" By formula each node sends {size(sent)} per step." if sent else ""
        missing = step.contradiction or "The network card's counters are missing."
        return [missing + by_formula]
    sentence = f"Each node sent {size(step.bytes_sent)} per step"
    if step.link_mbit is None:
        return [f"{sentence}; the link's speed is not known."]
    least_seconds = step.bytes_sent / formulas.line_rate(step.link_mbit)
    comparison = f"of the step's {seconds(step.seconds)}"
    # The counters cover the whole loop with evaluation, so their bytes may need more than a step.
    if least_seconds > step.seconds:
        comparison = f"and a step {seconds(step.seconds)}: some of it was sent beside steps"
    speed = link_speed(step.link_mbit)
    return [f"{sentence}; at {speed} this takes at least {seconds(least_seconds)} {comparison}."]


@explains("slow_link")
def explain_slow_link(step: Step, evidence: ResourceUsage) -> Verdict:
    link = bottleneck.find_slow_link(evidence.networks)
    assert link is not None  # because find_bottleneck returned `slow_link`
    return Verdict(
        f"The link of {link.host} is the bottleneck: {share_words(step, step.network)} of each "
        "step waits for gradients.",
        (
            f"{link.host} sends and receives at {rate_words(link.rate)}; the other machines "
            f"reach {rate_words(link.others_rate)} with each other.",
            "First try another cable and another switch port, then another network card: "
            "`ethtool` on that machine shows the speed of the link.",
            *describe_traffic(step),
        ),
    )


@explains("compute")
def explain_compute(step: Step, evidence: ResourceUsage) -> Verdict:
    return Verdict(
        f"Computing is the bottleneck, as it should be: {share_words(step, step.compute)} of each "
        "step is forward, backward and optimizer.",
        (),
    )


def data_wait_clause(step: Step) -> str:
    """Return a clause on how long ranks wait for images, or for a rank that waits for images."""
    # The clause has the longer of both waits, because a user notices that wait.
    if step.peers <= step.data:
        return f"{share_words(step, step.data)} of each step waits for {step.samples}"
    slow = find_slowest_rank(step)
    # No rank is always late, so each rank waits for its own images or for another rank's images.
    if not slow.is_straggler:
        waits = share_words(step, step.peers + step.data)
        return f"{waits} of each step waits for {step.samples}, on different machines"
    waits = share_words(step, step.peers)
    host = slow.rank.host
    return f"the others wait {waits} of each step for {host}, which waits for {step.samples}"


@explains("data_disk")
def explain_disk(step: Step, evidence: ResourceUsage) -> Verdict:
    disk = bottleneck.data_disk(evidence.disks, late_hosts(step))
    assert disk is not None  # because bottleneck.data_cause returned `data_disk`
    return Verdict(
        f"The disk is the bottleneck: {data_wait_clause(step)}.",
        (
            f"{disk.name} on {disk.host} was busy {disk.words(figures.DISK_BUSY)} of the time, "
            f"reading {disk.words(figures.DISK_READ)} MB/s at "
            f"{disk.words(figures.DISK_REQUEST)} a request.",
        ),
    )


@explains("data_share")
def explain_share(step: Step, evidence: ResourceUsage) -> Verdict:
    hosts, figure = late_hosts(step), figures.SHARE_READ
    # There is such a share, because bottleneck.data_cause returned `data_share`.
    shares = [use for use in evidence.shares if use.host in hosts]
    busiest = max(shares, key=lambda use: use.mean(figure))
    total = sum(use.mean(figure) for use in evidence.shares)
    because = [
        f"{busiest.host} read {busiest.words(figure)} MB/s from {busiest.name} "
        f"({busiest.kind}); all machines together read {figure.unit.words(total)} MB/s."
    ]
    reading = reading_of(step, evidence)
    if reading is not None and step.link_mbit is not None and not step.one_machine:
        step_bytes = reading.cable_bytes(step.nodes, step.images, gradient_bytes(step))
        because.append(
            f"Together, {step.samples} and gradients used "
            f"{size(step_bytes / step.training_seconds)} per second of the "
            f"busiest cable, which carries at most {size(formulas.goodput(step.link_mbit))} "
            f"({link_speed(step.link_mbit)})."
        )
    return Verdict(f"The data share is the bottleneck: {data_wait_clause(step)}.", tuple(because))


@explains("data_decode")
def explain_decoding(step: Step, evidence: ResourceUsage) -> Verdict:
    """Explain a late loader that neither a disk nor a share holds up."""
    hosts = late_hosts(step)
    loaders = bottleneck.busiest_loaders(evidence, hosts)
    headline = f"Decoding {step.samples} is the bottleneck: {data_wait_clause(step)}."
    # Busy loaders prove that decoding takes the time.
    if loaders is not None and loaders.mean(figures.LOADERS_BUSY) >= bottleneck.DECODES:
        return Verdict(
            headline,
            (
                f"The loaders on {loaders.host} ran, or waited for a processor, "
                f"{loaders.words(figures.LOADERS_BUSY)} of the time: they cannot decode and "
                f"augment {step.samples} as fast as training takes them.",
            ),
        )
    disk, disk_sentence = bottleneck.data_disk(evidence.disks, hosts), ""
    if disk:
        disk_sentence = (
            f"No disk explains this: the busiest, {disk.name} on {disk.host}, was busy "
            f"{disk.words(figures.DISK_BUSY)}."
        )
    # Records omit idle disks. If all late machines recorded disks, training read from no disk.
    elif hosts <= {use.host for use in evidence.machines if use.knows(figures.DISKS)}:
        disk_sentence = "No disk explains this: training read from no disk."
    # If the loaders and the disk are idle, something that no machine records holds up the loaders.
    if loaders is not None:
        headline = f"Loading {step.samples} is the bottleneck: {data_wait_clause(step)}."
        reason = (
            f"The loaders on {loaders.host} ran only {loaders.words(figures.LOADERS_BUSY)} of "
            "the time: they wait for something that Tandem does not record, such as a "
            "download or a lock."
        )
        return Verdict(headline, tuple(filter(None, (disk_sentence, reason))))
    reason = (
        f"The processors cannot decode and augment {step.samples} as fast as training takes them."
    )
    # Without records of the disks, a slow disk is also possible, so the verdict gives no reason.
    # The report then says that the cause is undecided (coverage.find_rival).
    return Verdict(headline, (disk_sentence, reason) if disk_sentence else ())


@explains("h2d")
def explain_copies(step: Step, evidence: ResourceUsage) -> Verdict:
    waits = share_words(step, step.h2d)
    return Verdict(
        f"Copying batches to the device is the bottleneck: {waits} of each step.",
        (
            f"Copying a batch takes {seconds(step.h2d)}, computing on it {seconds(step.compute)}.",
            "A GPU in a slot with few lanes copies slowly: `nvidia-smi -q` shows its current "
            "and maximum PCIe link. Try another slot.",
        ),
    )


@explains("straggler")
def explain_straggler(step: Step, evidence: ResourceUsage) -> Verdict:
    slow, waits = find_slowest_rank(step), share_words(step, step.peers)
    rank = slow.rank
    # The slowest rank needs hardly longer than the other ranks, so the verdict blames no machine.
    if rank.work_seconds < NOTICEABLE * slow.median:
        return Verdict(
            f"The ranks wait for each other: {waits} of each step, and no single rank is "
            "always last.",
            (
                "Different ranks are slow at different times: look for other programs, or for "
                "ranks that share cores.",
            ),
        )
    kind = "machine" if slow.location == rank.host else "device"
    return Verdict(
        f"One {'process' if step.shared_machine else kind} holds up the others: they wait "
        f"{waits} of each step for {rank.host} (rank {rank.rank}).",
        (
            f"{slow.location} needs {seconds(rank.work_seconds)} for a step, without waiting; "
            f"the median of the other ranks is {seconds(slow.median)}. Most of the difference "
            f"is `{bottleneck.slow_category(step)}`.",
        ),
    )


@explains("cpu_contention")
def explain_contention(step: Step, evidence: ResourceUsage) -> Verdict:
    slow = find_slowest_rank(step)
    host = slow.rank.host
    use, waits = evidence.machine(host), bottleneck.excess_queueing(step, evidence)
    assert use is not None and waits is not None  # because straggler_cause compared both
    busy = use.others_busy
    note = "" if busy is None else f" Other programs kept {percent(busy)} of the processors busy."
    return Verdict(
        f"Other programs use the processors of {host}: the other ranks wait "
        f"{share_words(step, step.peers)} of each step for it.",
        (
            f"{host} needs {seconds(slow.rank.work_seconds)} for a step, without waiting; the "
            f"median of the other ranks is {seconds(slow.median)}. Added up, its threads "
            f"wait {seconds(waits)} per step longer for a processor than those of other machines."
            f"{note}",
            f"`top` on {host} shows them: end them, or start them when no run is active.",
        ),
    )


@explains("cpu_oversubscribed")
def explain_oversubscription(step: Step, evidence: ResourceUsage) -> Verdict:
    use = bottleneck.most_oversubscribed(evidence)
    assert use is not None  # because find_bottleneck returned `cpu_oversubscribed`
    busy, cores = use.others_busy or 0.0, round(use.maximum(figures.CORES))
    note = f"; other programs used {percent(busy)} of the processors" if busy >= NOTEWORTHY else ""
    remedy = (
        f"More processes than processors do not help: type NODES={cores}."
        if step.shared_machine and step.nodes > cores
        else f"Use fewer processes on {use.host}, for example fewer loaders (--workers); `top` on "
        "that machine shows other programs."
    )
    return Verdict(
        "Processors are the bottleneck: the run's threads had to wait "
        f"{percent(use.mean(figures.QUEUED))} of the time in which they wanted a processor "
        f"({pluralize(cores, 'core')} on {use.host}).",
        (f"The processors were busy {percent(use.mean(figures.CPU))} of the time{note}.", remedy),
    )


@explains("memory_pressure")
def explain_swapping(step: Step, evidence: ResourceUsage) -> Verdict:
    # There is such a machine, because find_bottleneck returned `memory_pressure`.
    worst, *swapping = bottleneck.swapping_machines(evidence)
    also = f", and so are {', '.join(use.host for use in swapping)}" if swapping else ""
    waited = ""
    if worst.knows(figures.MEMORY_PRESSURE):
        pressure = worst.words(figures.MEMORY_PRESSURE)
        waited = f", and waited for memory {pressure} of the time"
    return Verdict(
        f"{worst.host} is short of memory{also}: during training it reads "
        f"{worst.words(figures.SWAPPED_IN)} MB/s from its swap.",
        (
            "Training and other programs used up to "
            f"{worst.words(figures.MEMORY, figures.MOST)} of its "
            f"{worst.words(figures.MEMORY_TOTAL, figures.MOST)}{waited}.",
            f"{step.program.phrases.memory} needs less memory. Ending other programs on that "
            "machine also frees memory.",
        ),
    )


@explains("checkpoint")
def explain_saving(step: Step, evidence: ResourceUsage) -> Verdict:
    share = percent(step_shares(step)["checkpoint"])
    return Verdict(
        f"Saving checkpoints is the bottleneck: {share} of training time.",
        (
            f"Per step, {seconds(step.checkpoint)} of saving against {seconds(step.seconds)} of "
            "training.",
        ),
    )


@explains("rank_work")
def explain_rank_work(step: Step, evidence: ResourceUsage) -> Verdict:
    """Explain that one rank works between epochs, or between steps, while the others wait."""
    # The ranks wait longer for one rank's work between epochs than for slow steps. `rank.seconds`
    # are means per step, but the headline has the seconds of one break between epochs.
    if step.rank_work > step.peers:
        rank = max(step.ranks, key=lambda rank: rank.seconds[BETWEEN])
        spent = rank.seconds[BETWEEN] * step.measured_steps / max(1, step.epochs_begun)
        place, wait = "epochs", step.rank_work
    # The headline has the seconds of `other` per step. In older records, `other` also has a rank's
    # work between two epochs.
    else:
        rank = find_slowest_rank(step).rank
        place, wait, spent = "steps", step.peers, rank.seconds["other"]
    return Verdict(
        f"Rank {rank.rank} spends {seconds(spent)} between {place} while the others wait: "
        f"{share_words(step, wait)} of the time.",
        ("Validate or save on all ranks, or less often. The machines are fine.",),
    )


@explains("none")
def explain_several_waits(step: Step, evidence: ResourceUsage) -> Verdict:
    shares = sorted(step_shares(step).items(), key=lambda item: -item[1])[:3]
    largest = ", ".join(f"{name} {percent(value)}" for name, value in shares)
    return Verdict(
        "There is no single bottleneck: several waits take similar time.",
        (f"The largest parts: {largest}.",),
    )


# The remedy for ranks that train separate models.
ONE_MODEL = (
    "Call the DDP model, not model.module, and run the last forward pass of a step outside "
    "no_sync()."
)


def describe_unsummed_steps(steps: int) -> str:
    """Warn that each rank trained a separate model. `steps`: how many consecutive steps had no
    sum."""
    return (
        f"DDP summed no gradients in {steps:,} consecutive steps: unless the script sums "
        f"gradients itself, each rank trained its own model. {ONE_MODEL}"
    )


def describe_missing_gradients(received_bytes: float) -> str:
    """Warn that a machine's ranks received gradients, but sent nothing of a model's size."""
    return (
        f"its ranks received {size(received_bytes)} from other ranks, but sent no gradients: "
        f"unless the script sums gradients later, each machine trains its own model. {ONE_MODEL}"
    )


def headline_of(status: str, first_cause: Entry | None, until: float | None = None) -> str | None:
    """Return the sentence before the verdict if the run did not finish, or if a rank of a finished
    run printed an exception. `until`: Unix time of the newest record."""
    if status == "finished":
        # A rank may print an exception and still exit with code 0.
        message = first_cause and first_cause.get("message")
        return f"The run finished, but {message}" if message else None
    if status == "stopped":
        return "The run was stopped before its end; the report covers the run until then."
    if status == "running":
        clock = time.strftime("%H:%M:%S", time.localtime(until)) if until else "now"
        return (
            "The run is still active, or the program that started it has ended; the report "
            f"covers the run until {clock}."
        )
    # No file has a cause, for example because the launcher was killed.
    if not first_cause:
        return "The run failed; no file says why."
    # The launcher writes a message. A run without a launcher has only what its rank recorded.
    if first_cause.get("message"):
        return f"The run failed: {first_cause['message']}"
    reason = first_cause.get("exception") or "it left no message"
    rank = "" if first_cause.get("rank") is None else f", rank {first_cause['rank']}"
    return f"The run failed on {first_cause.get('host', 'a node')}{rank}: {reason}"
