"""What to change, and what that would give. Formulas: formulas.py and bench/verdict/README.md.

All predictions are of one model: a step is the sum of its parts (Situation), each remedy changes
one part, and remedies of different parts add up. Nothing is predicted from what the run did not
measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from boundary.run_files import RankStart
from contract import prices, strategies, verbs
from contract.split import weights_of
from contract.text import size
from report import formulas
from report.bottleneck import has_straggler, late_hosts, parts, slow_link
from report.figures import CORES, CPU
from report.files import number
from report.measure import Step, own_speeds, slow_place, slowest
from report.reading import CACHE, LARGE_PIXELS, SHRUNK, Reading, gradient_bytes, reading_of
from report.usage import ResourceUsage

# Predicted gains below this are within the noise of a measurement.
WORTH = 1.03
# Saving that takes less of the time is left out of the model.
SAVING = 0.1
# One core decodes 660 images/s of 500x375 JPEG and 1018/s of a copy with a short side of 256
# (docs/report.md).
SMALL_COPY_DECODES = 1018 / 660
# An image of that copy has 27 KB instead of 65 KB.
SMALL_COPY_READS = 65 / 27
SMALL_COPY = "`{}`: {} with a short side of 256 pixels"
LINKS = ((2500, "2.5 Gbit/s"), (10000, "10 Gbit/s"))


@dataclass(frozen=True)
class Situation:
    """The mean step as its parts, in seconds. `loader`: what the loader needs for the images of a
    step, where it is what training waits for; else it is 0, and `data` is waited for."""

    images: float
    work: float
    data: float
    loader: float
    network: float
    peers: float
    saving: float
    rank_work: float  # of one rank between epochs

    @property
    def seconds(self) -> float:
        step = max(self.work + self.data + self.network + self.peers, self.loader)
        return step + self.saving + self.rank_work

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


Changed = Callable[[Situation], Situation]


@dataclass(frozen=True)
class Remedy:
    """`part`: the part of the step that `changed` changes; "" for a remedy that adds up with no
    other. `words` and `args`: make's variables and the trainer's options for it, where it is typed.
    `money`: whether it costs some."""

    change: str
    part: str
    predicted: float
    changed: Changed | None = None
    words: dict[str, object] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    money: bool = False


@dataclass(frozen=True)
class Advice:
    """`now`: images/s by the same model. The remedies: free ones first, the largest gain first;
    `together`: what the best free ones of several parts give at once."""

    now: float
    remedies: tuple[Remedy, ...] = ()
    counted: tuple[str, ...] = ()  # what `now` counts besides steps
    together: Remedy | None = None


NONE = Advice(0.0)


def advise(
    step: Step | None,
    cause: str,
    start: RankStart,
    evidence: ResourceUsage,
    options: Mapping[str, object] = MappingProxyType({}),
) -> Advice:
    """`start`: a rank's start line; `options`: the run's, by their names in plan.json."""
    if step is None or step.seconds <= 0 or not step.images:
        return NONE
    now = situation(step, cause)
    remedies: list[Remedy] = []
    if step.world > 1 and not step.shared_machine:
        remedies += network_advice(step, now, start)
        remedies += link_advice(step, now, evidence)
        remedies += fewer_nodes(step, now) + straggler_advice(step, now, cause)
        remedies += balance_advice(step, now, cause, options.get("balance"))
    shrink = verbs.line("shrink", DATA=options.get("data"), SIZE=256)
    small_copy = SMALL_COPY.format(shrink, step.samples)
    remedies += data_advice(step, now, cause, start, evidence, small_copy)
    remedies += reading_advice(step, now, cause, start, evidence, small_copy)
    remedies += checkpoint_advice(step, now, start) + rank_work_advice(step, now)
    worthwhile = [remedy for remedy in remedies if remedy.predicted > WORTH * now.images_per_second]
    if not step.program.adjustable:
        worthwhile = [without_options(remedy) for remedy in worthwhile]
    ranked = sorted(worthwhile, key=lambda remedy: (remedy.money, -remedy.predicted))
    beside = {"saving": now.saving, "work between epochs": now.rank_work}
    counted = tuple(what for what, spent in beside.items() if spent)
    return with_combined_remedy(Advice(now.images_per_second, tuple(ranked), counted), now)


def without_options(remedy: Remedy) -> Remedy:
    """The remedy without options, for a program that has none of these; NODES is the launcher's."""
    words = {name: value for name, value in remedy.words.items() if name == "NODES"}
    return replace(remedy, words=words, args=())


def situation(step: Step, cause: str) -> Situation:
    late = cause.startswith("data")
    # Where the images of one machine are late, the others wait for it.
    of_one = late and step.peers > step.data
    return Situation(
        images=step.images,
        work=step.work - step.data,
        data=0.0 if late else step.data,
        loader=step.seconds if late else 0.0,
        network=step.network,
        peers=0.0 if of_one else step.peers,
        saving=step.checkpoint if parts(step)["checkpoint"] >= SAVING else 0.0,
        rank_work=step.rank_work if parts(step)["rank_work"] >= SAVING else 0.0,
    )


def with_combined_remedy(advice: Advice, now: Situation) -> Advice:
    """The advice with `together`: the best free remedy of each part, where two or more add up."""
    best: dict[str, tuple[int, Remedy]] = {}
    for place, remedy in enumerate(advice.remedies, 1):
        if remedy.changed is not None and not remedy.money:
            best.setdefault(remedy.part, (place, remedy))
    words: dict[str, object]
    args: tuple[str, ...]
    then, words, args = now, {}, ()
    for _, remedy in best.values():
        assert remedy.changed is not None
        then = remedy.changed(then)
        words.update(remedy.words)
        args += remedy.args
    most = max((remedy.predicted for _, remedy in best.values()), default=0.0)
    if len(best) < 2 or then.images_per_second < WORTH * most:
        return advice
    places = tuple(place for place, _ in best.values())
    typed = all(remedy.words or remedy.args for _, remedy in best.values())
    change = f"{', '.join(map(str, places[:-1]))} and {places[-1]} together"
    if not typed:
        words, args = {}, ()
    sum_of = Remedy(change, "", then.images_per_second, words=words, args=args)
    return replace(advice, together=sum_of)


def becoming(**parts: float) -> Changed:
    """A step some of whose parts take another time."""
    return lambda then: replace(then, **parts)


def propose(now: Situation, change: str, part: str, changed: Changed, **more: object) -> Remedy:
    predicted = changed(now).images_per_second
    return Remedy(change, part, predicted, changed, **more)  # type: ignore[arg-type]


def network_advice(step: Step, now: Situation, start: RankStart) -> list[Remedy]:
    """Another strategy, a faster link, a larger batch between two exchanges."""
    if step.network <= 0 or not step.payload.bytes or step.strategy is None:
        return []
    remedies: list[Remedy] = []
    if step.rate and not step.one_machine:
        remedies += strategy_advice(step, now, step.family)
        for mbit, name in LINKS:
            rate = formulas.goodput(mbit)
            if rate > 1.5 * step.rate:
                wait = calibrate(step, step.wait(step.strategy, step.nodes, rate))
                change = f"network cards and switch of {name}"
                remedies.append(propose(now, change, "network", becoming(network=wait), money=True))
    batch = round((start.global_batch or step.images) / step.nodes)
    change = f"{step.program.phrases.batch}: half as many exchanges"
    twice = twice_the_batch(step)
    remedies.append(propose(now, change, "batch", twice, words={"BATCH": 2 * batch}))
    return remedies


def twice_the_batch(step: Step) -> Changed:
    """All but the exchange is of twice the images. Where it takes longer than backward, of which it
    lacks a bucket's part, twice as much of it goes on meanwhile."""
    bucket = min(1.0, step.payload.bucket / step.payload.bytes)
    beside = step.backward * (1 - bucket)

    def twice(then: Situation) -> Situation:
        network = then.network
        if network > step.backward * bucket:
            network = max(network - beside, (network + beside) * bucket)
        double = {name: 2 * value for name, value in vars(then).items()}
        return Situation(**{**double, "network": network})

    return twice


def calibrate(step: Step, wait: float) -> float:
    """A wait by formula, where the formula's own for this run may differ from what was measured:
    the rate that follows from the wait is bounded by what the card can do and was seen to do."""
    if step.strategy is None or not step.rate:
        return wait
    formula = step.wait(step.strategy, step.nodes, step.rate)
    return wait * step.network / formula if formula else wait


def strategy_advice(step: Step, now: Situation, family: str | None) -> list[Remedy]:
    """Of the strategies that are safe, the most exact that is nearly the fastest over a run of as
    many epochs, its warm-up included, or where this one was all warm-up after it; nothing where it
    is the run's own. (The next run may be longer: a label's length is said, and does not forbid.)
    """
    rate, rest = step.rate, step.seconds - step.network
    if rate is None:
        return []
    waits = [
        (calibrate(step, step.wait(strategy, step.nodes, rate)), strategy)
        for strategy in strategies.usual()
        if prices.is_acceptable(strategy, family or prices.SGD)
    ]
    if step.pending is None:
        phases, exact = step.phases, step.wait(strategies.parse(strategies.EXACT), step.nodes, rate)
    else:
        phases, exact = replace(step.phases, warmup=0), 0.0
    exact = calibrate(step, exact)
    taken = {
        strategy: phases.mean(strategy, rest + waited, rest + exact) for waited, strategy in waits
    }
    best, fastest = (
        prices.most_exact(taken, lambda strategy: strategy),
        min(taken, key=taken.__getitem__),
    )
    if best == step.strategy:
        return []
    how = step.program.phrases.sync.replace("{}", best.spec)
    args: tuple[str, ...] = ()
    if step.pending is not None and best.rule.warms:
        how += f" {step.program.phrases.warmed_up}"
        args = ("--sync_warmup", "0")
    label = prices.label_of(best, family or prices.SGD)
    if not prices.is_acceptable(best, family or prices.SGD, step.length):
        label += f" in runs of {prices.measured_steps():,} steps or more"
    if family is None and not prices.is_acceptable(best, prices.ADAM):
        label += f" with SGD; with Adam {prices.with_adam(best)}"
    if fastest != best:
        label += f"; {fastest.spec} leaves out more for at most 5 % less time"
    change = f"{how}: {best.rule.text} (accuracy: {label})"
    wait = becoming(network=taken[best] - rest)
    return [propose(now, change, "network", wait, words={"SYNC": best.spec}, args=args)]


def fewer_nodes(step: Step, now: Situation) -> list[Remedy]:
    """The best of all smaller numbers of nodes, where one would be faster."""
    if step.shared_machine or not step.rate or step.strategy is None:
        return []
    best = max(((nodes_rate(step, now, n), n) for n in range(1, step.nodes)), default=None)
    if best is None:
        return []
    predicted, nodes = best
    name = "one machine alone" if nodes == 1 else f"{nodes} machines"
    change = f"NODES={nodes}: {name} instead of {step.nodes}"
    return [Remedy(change, "", predicted, words={"NODES": nodes})]


def nodes_rate(step: Step, now: Situation, nodes: int) -> float:
    """Images per second of `nodes` of these machines with the same batch per node."""
    world = max(1, round(step.world * nodes / step.nodes))
    waited = 0.0
    if nodes > 1 and step.strategy is not None and step.rate is not None:
        waited = calibrate(step, step.wait(step.strategy, nodes, step.rate))
    images = now.images * world / step.world
    return replace(now, images=images, network=waited, peers=0.0).images_per_second


def link_advice(step: Step, now: Situation, evidence: ResourceUsage) -> list[Remedy]:
    """One slow link as fast as the others."""
    slow = slow_link(evidence.networks)
    if slow is None or step.strategy is None:
        return []
    host, _, rate = slow
    wait = step.wait(step.strategy, step.nodes, rate)
    change = f"repair the link of {host} (cable, port of the switch, card)"
    return [propose(now, change, "network", becoming(network=min(wait, step.network)))]


def balance_advice(step: Step, now: Situation, cause: str, balance: object) -> list[Remedy]:
    """Parts of the images by the machines' speeds, where it is they that differ. A run that had
    asked for them did not know these speeds yet; the next one does."""
    speeds = own_speeds(step)
    passing = cause in ("cpu_contention", "rank_work") or cause.startswith("data")
    if (
        not step.program.adjustable
        or passing
        or not len(speeds) == step.nodes > 1
        or not weights_of(list(speeds.values()))
    ):
        return []
    spent = now.images / sum(speeds.values())
    change, words = "BALANCE=auto", {"BALANCE": "auto"}
    if balance == "auto":
        change, words = "start it again", {}
    change += f": each machine's {step.samples} in proportion to its speed in this run"
    shared = becoming(work=spent, data=0.0, loader=0.0, peers=0.0)
    return [propose(now, change, "peers", shared, words=words)]


REMEDY_TEXT = {
    "cpu_contention": "without the other programs",
    "memory_pressure": "with memory enough (see above)",
}


def straggler_advice(step: Step, now: Situation, cause: str) -> list[Remedy]:
    """The machine that the others wait for as fast as they are, or left out."""
    last, others = slowest(step)
    if step.shared_machine or not has_straggler(step) or cause == "rank_work":
        return []
    remedies: list[Remedy] = []
    if not cause.startswith("data"):
        cure = REMEDY_TEXT.get(cause, "repaired or upgraded")
        change = f"{slow_place(step, last)} {cure}: as fast as the others"
        remedies.append(propose(now, change, "peers", becoming(work=others, data=0.0, peers=0.0)))
    world = step.world - sum(rank.host == last.host for rank in step.ranks)
    if step.nodes < 3 or world <= 0:
        return remedies
    own = max(rank.own for rank in step.ranks if rank.host != last.host)
    images = now.images * world / step.world
    then = replace(now, images=images, work=own, data=0.0, loader=0.0, peers=0.0)
    return [*remedies, Remedy(f"train without {last.host}", "", then.images_per_second)]


def data_advice(
    step: Step,
    now: Situation,
    cause: str,
    start: RankStart,
    evidence: ResourceUsage,
    small_copy: str,
) -> list[Remedy]:
    """Smaller copies of large images; more loaders; images on each node's own disk."""
    if not cause.startswith("data"):
        return []
    remedies: list[Remedy] = []
    # Of a share the bytes of an image were counted (reading_advice).
    if (start.image_size or 0) >= LARGE_PIXELS and cause != "data_share":
        factor = SMALL_COPY_DECODES if cause == "data_decode" else SMALL_COPY_READS
        change = f"{small_copy} (taken to be 500x375 now)"
        remedies.append(propose(now, change, "data", loading(factor)))
    if cause == "data_decode":
        remedies += loader_advice(step, now, start.workers, evidence)
    if cause == "data_disk":
        change = "an SSD in the place of a hard disk, if that is what it is, and it keeps up"
        remedies.append(propose(now, change, "data", becoming(loader=0.0), money=True))
    return remedies


def reading_advice(
    step: Step,
    now: Situation,
    cause: str,
    start: RankStart,
    evidence: ResourceUsage,
    small_copy: str,
) -> list[Remedy]:
    """Fewer bytes of images through the cable of the machine that shares them, where training waits
    for these or for the gradients beside them."""
    reading = reading_of(step, evidence)
    if reading is None or cause not in ("data_share", "network"):
        return []
    each, sent = f"{size(reading.image_bytes)} each now", gradient_bytes(step)
    # Who waits for images waits for the machine that has them, whatever other cables carry.
    late = cause == "data_share"
    measure = Reading.server_bytes if late else Reading.cable_bytes
    before = measure(reading, step.nodes, step.images, sent)

    def fewer_bytes(change: str, image_bytes: float) -> Remedy:
        then = replace(reading, image_bytes=image_bytes)
        left = measure(then, step.nodes, step.images, sent) / before
        if late:
            return propose(now, change, "data", becoming(loader=now.loader * left))
        return propose(now, change, "network", becoming(network=wait_beside(step, left)))

    remedies = [
        fewer_bytes(
            f"{CACHE} in group_vars/all.yml: each machine reads each {step.sample} once ({each})", 0
        )
    ]
    if (start.image_size or 0) >= LARGE_PIXELS and reading.image_bytes > SHRUNK:
        remedies.append(fewer_bytes(f"{small_copy}, {size(SHRUNK)} each ({each})", SHRUNK))
    if late:
        change = (
            f"{step.samples} on each machine's own disk instead of the share, if that disk keeps up"
        )
        remedies.append(fewer_bytes(change, 0))
    return remedies


def wait_beside(step: Step, left: float) -> float:
    """Seconds per step of waiting for gradients over a cable of whose bytes this part is left."""
    if step.strategy is None or not step.rate:
        return step.network
    return calibrate(step, step.wait(step.strategy, step.nodes, step.rate / left))


def loader_advice(
    step: Step, now: Situation, workers: float | None, evidence: ResourceUsage
) -> list[Remedy]:
    """More loader processes, where processors are idle that they could take, or nobody says so."""
    hosts = late_hosts(step)
    idle = [use.most(CORES) * (1 - use.mean(CPU)) for use in evidence.machines if use.host in hosts]
    if workers == 0:
        more = min(4, int(min(idle, default=1.0)))
        change = f"loader processes beside training (--workers {more})"
        if not more:
            return []
        args = ("--workers", f"{more}")
        return [propose(now, change, "data", becoming(loader=step.data / more), args=args)]
    if min(idle, default=math.inf) < max(1.0, workers or 1.0):
        return []
    typed = ("--workers", f"{2 * workers:.0f}") if workers else ()
    sure = "" if idle else ", if that many cores are idle"
    return [propose(now, f"{step.program.phrases.workers}{sure}", "data", loading(2), args=typed)]


def loading(factor: float) -> Changed:
    """A loader that is so many times as fast."""
    return lambda then: replace(then, loader=then.loader / factor)


def checkpoint_advice(step: Step, now: Situation, start: RankStart) -> list[Remedy]:
    """Saving half as often."""
    if not now.saving:
        return []
    options = start.options
    every = number(options.get("checkpoint_every")) or start.steps_per_epoch
    args = ("--checkpoint_every", f"{2 * every:.0f}") if every else ()

    def half(then: Situation) -> Situation:
        """The trainer writes a file while it trains, and waits for it as it begins the next: each
        stall is shorter by the steps that come between, too."""
        left = 1.0
        if every and "checkpoint_every" in options:
            stall = every * now.saving
            own = min(stall, step.least_save)
            between = stall / then.saving * (then.seconds - then.saving)
            left = (own + max(0.0, stall - own - between)) / stall
        return replace(then, saving=then.saving * left / 2)

    return [propose(now, step.program.phrases.saving, "saving", half, args=args)]


def rank_work_advice(step: Step, now: Situation) -> list[Remedy]:
    """The work of one rank between epochs done by all of them."""
    if not now.rank_work:
        return []
    change = "what one rank does between epochs done by all ranks, or less often"
    spread = becoming(rank_work=now.rank_work / step.world)
    return [propose(now, change, "rank_work", spread)]
