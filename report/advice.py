"""Advise what to change, and predict what that gives.

All predictions use one model: a step is the sum of its parts (Situation), each remedy changes one
part, and remedies of different parts add up. Nothing is predicted that the run did not measure.
bench/verdict.md explains the formulas (formulas.py).
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
from report.bottleneck import find_slow_link, has_straggler, late_hosts, step_shares
from report.figures import CORES, CPU
from report.measure import Step, machine_speeds, slowest
from report.reading import CACHE, LARGE_PIXELS, SHRUNK, Reading, gradient_bytes, reading_of
from report.usage import ResourceUsage

# Smaller predicted gains are within the noise of a measurement.
WORTH = 1.03
# The model ignores saving, and work between epochs, below this fraction of the time.
SAVING = 0.1
# One core decodes 660 images/s of 500x375 JPEG and 1018/s of a copy with a short side of 256
# (docs/report.md).
SMALL_COPY_DECODES = 1018 / 660
# An image of that copy has 27 KB instead of 65 KB.
SMALL_COPY_READS = 65 / 27
LINKS = ((2500, "2.5 Gbit/s"), (10000, "10 Gbit/s"))  # that can be bought, in Mbit/s


@dataclass(frozen=True)
class Situation:
    """The mean step as its parts, in seconds."""

    images: float
    work: float
    # If training waits for the loader, its time for the images of a step, and `data` is 0; else it
    # is 0, and `data` is the wait.
    data: float
    loader: float
    network: float
    peers: float
    saving: float
    rank_work: float  # of one rank between epochs

    @property
    def seconds(self) -> float:
        # Loader processes work while the ranks train, so the longer of both counts.
        step = max(self.work + self.data + self.network + self.peers, self.loader)
        return step + self.saving + self.rank_work

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


Change = Callable[[Situation], Situation]


@dataclass(frozen=True)
class Remedy:
    """One thing to change, and its predicted images/s."""

    change: str
    # The name of the part of the step that `apply` changes; "" if the remedy adds up with no other.
    step_part: str
    predicted: float
    apply: Change | None = None
    # make's variables and the trainer's options that a user types for it.
    words: dict[str, object] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    money: bool = False  # True if it costs some


@dataclass(frozen=True)
class Advice:
    """The remedies, free ones first and the largest gain first."""

    images_per_second: float  # of the run, by the same model
    remedies: tuple[Remedy, ...] = ()
    counted: tuple[str, ...] = ()  # what the model counts besides steps
    combined: Remedy | None = None  # the best free remedies of several parts, together


NONE = Advice(0.0)


@dataclass(frozen=True)
class Case:
    """The measurements of a run that advisers look at."""

    step: Step
    situation: Situation
    cause: str
    start: RankStart  # a rank's start line
    evidence: ResourceUsage
    options: Mapping[str, object]  # the run's, by their names in plan.json

    @property
    def small_copy(self) -> str:
        shrink = verbs.line("shrink", DATA=self.options.get("data"), SIZE=256)
        return f"`{shrink}`: {self.step.samples} with a short side of 256 pixels"

    @property
    def is_large(self) -> bool:
        """True if smaller copies of the images make sense."""
        return (self.start.image_size or 0) >= LARGE_PIXELS

    def propose(
        self,
        change: str,
        step_part: str,
        apply: Change,
        words: dict[str, object] | None = None,
        args: tuple[str, ...] = (),
        money: bool = False,
    ) -> Remedy:
        predicted = apply(self.situation).images_per_second
        return Remedy(change, step_part, predicted, apply, words or {}, args, money)


Adviser = Callable[[Case], "list[Remedy]"]
ADVISERS: list[tuple[Adviser, bool]] = []  # with True if it is about several machines


def adviser(several_machines: bool) -> Callable[[Adviser], Adviser]:
    """Register a function that returns its remedies, or none if they do not fit the case."""

    def register(advise_on: Adviser) -> Adviser:
        ADVISERS.append((advise_on, several_machines))
        return advise_on

    return register


def advise(
    step: Step | None,
    cause: str,
    start: RankStart,
    evidence: ResourceUsage,
    options: Mapping[str, object] = MappingProxyType({}),
) -> Advice:
    """Return the remedies that gain enough. `cause`: the bottleneck; see Case for the others."""
    # Without steps or counted images there is no speed to compare with.
    if step is None or step.seconds <= 0 or not step.images:
        return NONE
    late, shares = cause.startswith("data"), step_shares(step)
    situation = Situation(
        images=step.images,
        work=step.work - step.data,
        data=0.0 if late else step.data,
        loader=step.seconds if late else 0.0,
        network=step.network,
        # If the images of one machine are late, the others wait for it, not for slow work.
        peers=0.0 if late and step.peers > step.data else step.peers,
        saving=step.checkpoint if shares["checkpoint"] >= SAVING else 0.0,
        rank_work=step.rank_work if shares["rank_work"] >= SAVING else 0.0,
    )
    case = Case(step, situation, cause, start, evidence, options)
    is_cluster = step.world > 1 and not step.shared_machine
    remedies = [
        remedy
        for advise_on, several_machines in ADVISERS
        if is_cluster or not several_machines
        for remedy in advise_on(case)
        if remedy.predicted > WORTH * situation.images_per_second
    ]
    if not step.program.adjustable:
        # A program without these options; NODES is the launcher's.
        remedies = [
            replace(r, words={n: v for n, v in r.words.items() if n == "NODES"}, args=())
            for r in remedies
        ]
    # Free remedies come first, because a user tries them first.
    remedies.sort(key=lambda remedy: (remedy.money, -remedy.predicted))
    extra = {"saving": situation.saving, "work between epochs": situation.rank_work}
    counted = tuple(name for name, spent in extra.items() if spent)
    combined = combine_remedies(remedies, situation)
    return Advice(situation.images_per_second, tuple(remedies), counted, combined)


def combine_remedies(remedies: list[Remedy], situation: Situation) -> Remedy | None:
    """Combine the best free remedy of each part; None if that gains little over a single one."""
    best: dict[str, int] = {}  # index by part
    for index, remedy in enumerate(remedies):
        if remedy.apply is not None and not remedy.money:
            best.setdefault(remedy.step_part, index)
    chosen = [remedies[index] for index in best.values()]
    words: dict[str, object] = {}
    args: tuple[str, ...] = ()
    for remedy in chosen:
        assert remedy.apply is not None
        situation = remedy.apply(situation)
        words.update(remedy.words)
        args += remedy.args
    single = max((remedy.predicted for remedy in chosen), default=0.0)
    if len(chosen) < 2 or situation.images_per_second < WORTH * single:
        return None
    # A command that makes only some of the changes would not reach the prediction.
    if not all(remedy.words or remedy.args for remedy in chosen):
        words, args = {}, ()
    numbers = [str(index + 1) for index in best.values()]
    change = f"{', '.join(numbers[:-1])} and {numbers[-1]} together"
    return Remedy(change, "", situation.images_per_second, words=words, args=args)


def becoming(**seconds: float) -> Change:
    """Return a change that gives parts of a step other times."""
    return lambda situation: replace(situation, **seconds)


def calibrate(step: Step, wait: float) -> float:
    """Scale a wait by formula by the measured wait over the formula's wait for this run."""
    # They differ because the rate behind the formula is bounded by what the link can carry.
    if step.strategy is None or not step.rate:
        return wait
    formula = step.wait(step.strategy, step.nodes, step.rate)
    return wait * step.network / formula if formula else wait


@adviser(several_machines=True)
def advise_on_exchange(case: Case) -> list[Remedy]:
    """Advise another strategy, a faster link, or a larger batch between two exchanges."""
    step = case.step
    if step.network <= 0 or not step.payload.bytes or step.strategy is None:
        return []
    remedies: list[Remedy] = []
    if step.rate and not step.one_machine:
        remedies += recommend_strategy(case, step.rate)
        for mbit, name in LINKS:
            rate = formulas.goodput(mbit)
            # A link that the run nearly reached already is not worth its price.
            if rate > 1.5 * step.rate:
                faster = becoming(
                    network=calibrate(step, step.wait(step.strategy, step.nodes, rate))
                )
                change = f"network cards and switch of {name}"
                remedies.append(case.propose(change, "network", faster, money=True))
    # The last bucket is never hidden behind backward (formulas.exposed).
    bucket = min(1.0, step.payload.bucket / step.payload.bytes)
    hidden = step.backward * (1 - bucket)

    def double_batch(situation: Situation) -> Situation:
        """Double all but the exchange. If that takes longer than backward, twice as much of it is
        hidden, except the last bucket's part."""
        network = situation.network
        if network > step.backward * bucket:
            network = max(network - hidden, (network + hidden) * bucket)
        doubled = {name: 2 * value for name, value in vars(situation).items()}
        return Situation(**{**doubled, "network": network})

    # Steps that a script did not describe are counted from their samples.
    batch = round((case.start.global_batch or step.images) / step.nodes)
    change = f"{step.program.phrases.batch}: half as many exchanges"
    remedies.append(case.propose(change, "batch", double_batch, words={"BATCH": 2 * batch}))
    return remedies


def recommend_strategy(case: Case, rate: float) -> list[Remedy]:
    """Recommend the most exact safe strategy whose time is within 5 % of the fastest."""
    # The time is that of a run of the same length, with its warm-up; if this run was all warm-up,
    # of the steps after it. Returns nothing if the run used that strategy. A label's length is only
    # printed, because the next run may be longer.
    step, family = case.step, case.step.family
    without_network = step.seconds - step.network
    phases = step.phases
    exact = calibrate(step, step.wait(strategies.parse(strategies.EXACT), step.nodes, rate))
    if step.pending is not None:
        phases, exact = replace(step.phases, warmup=0), 0.0
    seconds = {
        strategy: phases.mean(
            strategy,
            without_network + calibrate(step, step.wait(strategy, step.nodes, rate)),
            without_network + exact,
        )
        for strategy in strategies.usual()
        if prices.is_acceptable(strategy, family or prices.SGD)
    }
    best = prices.most_exact(seconds, lambda strategy: strategy)
    fastest = min(seconds, key=seconds.__getitem__)
    # The run has the recommended strategy already.
    if best == step.strategy:
        return []
    phrase = step.program.phrases.sync.replace("{}", best.spec)
    args: tuple[str, ...] = ()
    # A run that was all warm-up would be all warm-up again with another strategy.
    if step.pending is not None and best.rule.warms:
        phrase += f" {step.program.phrases.warmed_up}"
        args = ("--sync_warmup", "0")
    label = prices.label_of(best, family or prices.SGD)
    if not prices.is_acceptable(best, family or prices.SGD, step.length):
        label += f" in runs of {prices.measured_steps():,} steps or more"
    # A script does not record its optimizer, so its user has to know about Adam.
    if family is None and not prices.is_acceptable(best, prices.ADAM):
        label += f" with SGD; with Adam {prices.with_adam(best)}"
    # A user who sees a faster one in the plan should know why it is not recommended.
    if fastest != best:
        label += f"; {fastest.spec} is less exact, and saves at most 5 % of the time"
    change = f"{phrase}: {best.rule.text} (accuracy: {label})"
    wait = becoming(network=seconds[best] - without_network)
    return [case.propose(change, "network", wait, words={"SYNC": best.spec}, args=args)]


@adviser(several_machines=True)
def advise_link_repair(case: Case) -> list[Remedy]:
    """Advise to repair one slow link, so that it is as fast as the others."""
    step, link = case.step, find_slow_link(case.evidence.networks)
    if link is None or step.strategy is None:
        return []
    # With the link repaired, all machines send at the rate of the others.
    wait = step.wait(step.strategy, step.nodes, link.others_rate)
    change = f"repair the link of {link.host} (cable, port of the switch, card)"
    return [case.propose(change, "network", becoming(network=min(wait, step.network)))]


@adviser(several_machines=True)
def advise_fewer_machines(case: Case) -> list[Remedy]:
    """Advise the best smaller number of machines, each with the same batch."""
    step = case.step
    if not step.rate or step.strategy is None:
        return []
    speeds = {}
    for nodes in range(1, step.nodes):
        world = max(1, round(step.world * nodes / step.nodes))
        wait = calibrate(step, step.wait(step.strategy, nodes, step.rate)) if nodes > 1 else 0.0
        images = case.situation.images * world / step.world
        # The fewer machines are taken to be equally fast, so none waits for another.
        fewer = replace(case.situation, images=images, network=wait, peers=0.0)
        speeds[nodes] = fewer.images_per_second
    if not speeds:
        return []
    nodes = max(speeds, key=lambda nodes: (speeds[nodes], nodes))
    name = "one machine alone" if nodes == 1 else f"{nodes} machines"
    change = f"NODES={nodes}: {name} instead of {step.nodes}"
    return [Remedy(change, "", speeds[nodes], words={"NODES": nodes})]


REMEDY_TEXT = {
    "cpu_contention": "without the other programs",
    "memory_pressure": "with enough memory (see above)",
}


@adviser(several_machines=True)
def advise_on_straggler(case: Case) -> list[Remedy]:
    """Advise to make the slowest machine as fast as the others, or to train without it."""
    step, situation = case.step, case.situation
    slow = slowest(step)
    host = slow.rank.host
    if not has_straggler(step) or case.cause == "rank_work":
        return []
    remedies: list[Remedy] = []
    if not case.cause.startswith("data"):
        repair = REMEDY_TEXT.get(case.cause, "repaired or upgraded")
        equal = becoming(work=slow.median, data=0.0, peers=0.0)
        remedies.append(
            case.propose(f"{slow.place} {repair}: as fast as the other ranks", "peers", equal)
        )
    other_ranks = [rank for rank in step.ranks if rank.host != host]
    world = step.world - (len(step.ranks) - len(other_ranks))
    # Two machines without one are a single machine: advise_fewer_machines covers that.
    if step.nodes < 3 or world <= 0:
        return remedies
    work = max(rank.work_seconds for rank in other_ranks)
    images = situation.images * world / step.world
    fewer = replace(situation, images=images, work=work, data=0.0, loader=0.0, peers=0.0)
    return [*remedies, Remedy(f"train without {host}", "", fewer.images_per_second)]


@adviser(several_machines=True)
def advise_balance(case: Case) -> list[Remedy]:
    """Advise shares of the images in proportion to the machines' speeds."""
    step, speeds = case.step, machine_speeds(case.step)
    # These causes may be gone in the next run, and then the measured speeds are wrong.
    passing = case.cause in ("cpu_contention", "rank_work") or case.cause.startswith("data")
    if (
        not step.program.adjustable
        or passing
        or not len(speeds) == step.nodes > 1
        or not weights_of(list(speeds.values()))
    ):
        return []
    change, words = "BALANCE=auto", {"BALANCE": "auto"}
    if case.options and case.options.get("balance", "auto") == "auto":
        # That run could not know these speeds yet; the next one does.
        change, words = "start it again", {}
    change += f": each machine's {step.samples} in proportion to its speed in this run"
    work = case.situation.images / sum(speeds.values())
    balanced = becoming(work=work, data=0.0, loader=0.0, peers=0.0)
    return [case.propose(change, "peers", balanced, words=dict(words))]


@adviser(several_machines=False)
def advise_on_loading(case: Case) -> list[Remedy]:
    """Advise smaller copies of large images, more loaders, or a faster disk."""
    cause = case.cause
    if not cause.startswith("data"):
        return []
    remedies: list[Remedy] = []
    # For a share, advise_on_share knows the bytes of an image.
    if case.is_large and cause != "data_share":
        factor = SMALL_COPY_DECODES if cause == "data_decode" else SMALL_COPY_READS
        change = f"{case.small_copy} (taken to be 500x375 now)"
        remedies.append(case.propose(change, "data", speed_up_loader(factor)))
    if cause == "data_decode":
        remedies += advise_more_loaders(case)
    if cause == "data_disk":
        change = "an SSD instead of a hard disk, if the disk is one and the SSD is fast enough"
        remedies.append(case.propose(change, "data", becoming(loader=0.0), money=True))
    return remedies


def speed_up_loader(factor: float) -> Change:
    return lambda situation: replace(situation, loader=situation.loader / factor)


def advise_more_loaders(case: Case) -> list[Remedy]:
    """Advise more loader processes if there are idle processors for them, or nothing is known."""
    step, workers, hosts = case.step, case.start.workers, late_hosts(case.step)
    machines = [use for use in case.evidence.machines if use.host in hosts]
    idle_cores = [use.maximum(CORES) * (1 - use.mean(CPU)) for use in machines]
    # Without loader processes training itself loads, and `data` is all of that time.
    if workers == 0:
        added = min(4, int(min(idle_cores, default=1.0)))
        if not added:
            return []
        change = f"loader processes beside training (--workers {added})"
        loader = becoming(loader=step.data / added)
        return [case.propose(change, "data", loader, args=("--workers", f"{added}"))]
    # Twice as many loaders need as many idle processors again.
    if min(idle_cores, default=math.inf) < max(1.0, workers or 1.0):
        return []
    args = ("--workers", f"{2 * workers:.0f}") if workers else ()
    condition = "" if idle_cores else ", if that many cores are idle"
    change = f"{step.program.phrases.workers}{condition}"
    return [case.propose(change, "data", speed_up_loader(2), args=args)]


@adviser(several_machines=False)
def advise_on_share(case: Case) -> list[Remedy]:
    """Advise to send fewer bytes of images over the cables, if training waits for images of a share
    or for the gradients on the same cables."""
    step = case.step
    reading = reading_of(step, case.evidence)
    if reading is None or case.cause not in ("data_share", "network"):
        return []
    image_words, sent = f"{size(reading.image_bytes)} each now", gradient_bytes(step)
    # Training that waits for images waits for the machine that has them, not for other cables.
    late = case.cause == "data_share"
    measure = Reading.server_bytes if late else Reading.cable_bytes
    carried = measure(reading, step.nodes, step.images, sent)

    def fewer_bytes(change: str, image_bytes: float) -> Remedy:
        smaller = replace(reading, image_bytes=image_bytes)
        remaining = measure(smaller, step.nodes, step.images, sent) / carried
        if late:
            loader = case.situation.loader * remaining
            return case.propose(change, "data", becoming(loader=loader))
        wait = step.network
        if step.strategy is not None and step.rate:
            wait = calibrate(step, step.wait(step.strategy, step.nodes, step.rate / remaining))
        return case.propose(change, "network", becoming(network=wait))

    # After the first epoch each machine reads from its own disk.
    cache = (
        f"set {CACHE} in group_vars/all.yml: each machine then reads each {step.sample} from "
        "the share only once"
    )
    remedies = [fewer_bytes(f"{cache} ({image_words})", 0)]
    # Images that are small already would not shrink.
    if case.is_large and reading.image_bytes > SHRUNK:
        change = f"{case.small_copy}, {size(SHRUNK)} each ({image_words})"
        remedies.append(fewer_bytes(change, SHRUNK))
    if late:
        change = (
            f"{step.samples} on each machine's own disk instead of the share, if the disk is "
            "fast enough"
        )
        remedies.append(fewer_bytes(change, 0))
    return remedies


@adviser(several_machines=False)
def advise_on_saving(case: Case) -> list[Remedy]:
    """Advise to save half as often."""
    step, options = case.step, case.start.options
    saving = case.situation.saving
    if not saving:
        return []
    chosen = options.get("checkpoint_every")
    steps = chosen if isinstance(chosen, (int, float)) else 0
    every = steps or case.start.steps_per_epoch
    args = ("--checkpoint_every", f"{2 * every:.0f}") if every else ()

    def save_half_as_often(situation: Situation) -> Situation:
        remaining = 1.0
        if every and "checkpoint_every" in options:
            # The trainer writes a file while it trains, and waits for it when it begins the next:
            # each stall is shorter by the additional steps in between, too.
            stall = every * saving
            copying = min(stall, step.least_save)
            between = stall / situation.saving * (situation.seconds - situation.saving)
            remaining = (copying + max(0.0, stall - copying - between)) / stall
        return replace(situation, saving=situation.saving * remaining / 2)

    return [case.propose(step.program.phrases.saving, "saving", save_half_as_often, args=args)]


@adviser(several_machines=False)
def advise_on_rank_work(case: Case) -> list[Remedy]:
    """Advise that all ranks share the work of one rank between epochs."""
    rank_work = case.situation.rank_work
    if not rank_work:
        return []
    change = "do the work of one rank between epochs on all ranks, or less often"
    shared = becoming(rank_work=rank_work / case.step.world)
    return [case.propose(change, "rank_work", shared)]
