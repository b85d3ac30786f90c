"""Advise what to change after a run, and predict the speed that each change gives.

A step is modelled as the sum of its parts (Situation). Each remedy changes one part, so that
remedies of different parts add up. No part is predicted that the run did not measure. analysis.py
calls `advise`; bench/verdict.md explains the formulas (formulas.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from boundary.run_files import RankStart
from contract import prices, strategies, verbs
from contract.split import weights_of
from contract.text import size
from report import formulas
from report.bottleneck import find_slow_link, late_hosts, step_shares
from report.figures import CORES, CPU
from report.measure import Step, find_slowest_rank, machine_speeds
from report.reading import CACHE, LARGE_PIXELS, SHRUNK, Reading, gradient_bytes, reading_of
from report.usage import ResourceUsage

# A smaller factor of speed is within the noise of a measurement, so the remedy is not listed.
MIN_GAIN = 1.03
# The model ignores saving, and work between epochs, below this fraction of training time.
MIN_EXTRA_SHARE = 0.1
# One core decodes 660 images/s of 500x375 JPEG and 1018/s of a copy with a short side of 256
# (docs/report.md).
SMALL_COPY_DECODES = 1018 / 660
# An image of that copy has 27 KB instead of 65 KB.
SMALL_COPY_READS = 65 / 27
FASTER_LINKS = ((2500, "2.5 Gbit/s"), (10000, "10 Gbit/s"))  # that can be bought, in Mbit/s
MIN_LINK_GAIN = 1.5  # a link that carries less than this many times the achieved rate gains little


@dataclass(frozen=True)
class Situation:
    """The mean step as its parts, in seconds."""

    images: float  # per step, all ranks
    work: float  # of a rank, without `data`
    # If the loader is the bottleneck, `loader` is its time for the images of a step, and `data` is
    # 0. Otherwise `loader` is 0, and `data` is the wait for images.
    data: float
    loader: float
    network: float
    peers: float
    # Seconds of saving, and of one rank's work between epochs; 0 if below MIN_EXTRA_SHARE.
    saving: float
    rank_work: float

    @property
    def seconds(self) -> float:
        # Loader processes work while the ranks train, so only the longer time counts.
        step = max(self.work + self.data + self.network + self.peers, self.loader)
        return step + self.saving + self.rank_work

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


Change = Callable[[Situation], Situation]  # returns the step that a remedy would give


@dataclass(frozen=True)
class Remedy:
    """One thing to change, and its predicted images/s."""

    change: str
    # The name of the part of the step that `apply` changes; "" if the remedy is never combined with
    # other remedies.
    step_part: str
    predicted: float
    apply: Change | None = None
    # To apply the remedy, a user types these variables of make and these options of the trainer.
    words: dict[str, object] = field(default_factory=dict)  # {"BATCH": 64}
    args: tuple[str, ...] = ()  # ("--workers", "4")
    money: bool = False  # True if the remedy costs money


@dataclass(frozen=True)
class Advice:
    """The remedies, free ones first and the largest gain first."""

    # The run's speed by the model of Situation, so that its errors cancel out in a remedy's gain.
    images_per_second: float
    remedies: tuple[Remedy, ...] = ()
    # `saving` and `work between epochs`, if the model counts them besides the step itself.
    counted: tuple[str, ...] = ()
    combined: Remedy | None = None  # the best free remedy of each part, all at once


NO_ADVICE = Advice(0.0)


@dataclass(frozen=True)
class Case:
    """The measurements of a run that advisers look at."""

    step: Step
    situation: Situation
    cause: str  # the bottleneck, as in summary.json
    start: RankStart  # a rank's start line
    evidence: ResourceUsage
    options: Mapping[str, object]  # the run's, by their names in plan.json

    @property
    def small_copy(self) -> str:
        shrink = verbs.format_command("shrink", DATA=self.options.get("data"), SIZE=256)
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
        """Return the remedy with the speed that its change gives in this case."""
        predicted = apply(self.situation).images_per_second
        return Remedy(change, step_part, predicted, apply, words or {}, args, money)


Adviser = Callable[[Case], "list[Remedy]"]


class RegisteredAdviser(NamedTuple):
    advise_on: Adviser
    several_machines: bool  # True if its remedies make sense only for several machines


ADVISERS: list[RegisteredAdviser] = []


def adviser(several_machines: bool) -> Callable[[Adviser], Adviser]:
    """Register a function that returns remedies, or [] if its remedies do not fit the case."""

    def register(advise_on: Adviser) -> Adviser:
        ADVISERS.append(RegisteredAdviser(advise_on, several_machines))
        return advise_on

    return register


def advise(
    step: Step | None,
    cause: str,
    start: RankStart,
    evidence: ResourceUsage,
    options: Mapping[str, object] = MappingProxyType({}),
) -> Advice:
    """Return the remedies that gain enough. `cause`: the bottleneck; Case has all arguments."""
    # Without steps or counted images there is no speed to compare with.
    if step is None or step.seconds <= 0 or not step.images:
        return NO_ADVICE
    # The causes `data_decode`, `data_share` and `data_disk` delay the loader.
    loader_is_late, shares = cause.startswith("data"), step_shares(step)
    situation = Situation(
        images=step.images,
        work=step.work - step.data,
        data=0.0 if loader_is_late else step.data,
        loader=step.seconds if loader_is_late else 0.0,
        network=step.network,
        # If one machine waits for images, the other machines' waits for that machine are part of
        # `loader`.
        peers=0.0 if loader_is_late and step.peers > step.data else step.peers,
        saving=step.checkpoint if shares["checkpoint"] >= MIN_EXTRA_SHARE else 0.0,
        rank_work=step.rank_work if shares["rank_work"] >= MIN_EXTRA_SHARE else 0.0,
    )
    case = Case(step, situation, cause, start, evidence, options)
    # Several ranks on one machine count as a cluster, too, but not several nodes on one machine.
    is_cluster = step.world > 1 and not step.shared_machine
    remedies = [
        remedy
        for registered in ADVISERS
        if is_cluster or not registered.several_machines
        for remedy in registered.advise_on(case)
        if remedy.predicted > MIN_GAIN * situation.images_per_second
    ]
    if not step.program.adjustable:
        # Such a program lacks the trainer's options. NODES is an option of the launcher.
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
    """Combine the best free remedy of each part of the step. Return None if the combination gains
    little over its best remedy. `remedies` are sorted by their gain."""
    # Two remedies of one part would both shorten the same seconds.
    best_indices: dict[str, int] = {}  # by part
    for index, remedy in enumerate(remedies):
        if remedy.apply is not None and not remedy.money:
            best_indices.setdefault(remedy.step_part, index)
    chosen = [remedies[index] for index in best_indices.values()]
    words: dict[str, object] = {}
    args: tuple[str, ...] = ()
    for remedy in chosen:
        assert remedy.apply is not None  # because of the loop above
        situation = remedy.apply(situation)
        words.update(remedy.words)
        args += remedy.args
    best_alone = max((remedy.predicted for remedy in chosen), default=0.0)
    if len(chosen) < 2 or situation.images_per_second < MIN_GAIN * best_alone:
        return None
    # A command that makes only some of the changes would not reach the prediction.
    if not all(remedy.words or remedy.args for remedy in chosen):
        words, args = {}, ()
    # The list of remedies in the report is numbered from 1.
    numbers = [str(index + 1) for index in best_indices.values()]
    change = f"{', '.join(numbers[:-1])} and {numbers[-1]} together"
    return Remedy(change, "", situation.images_per_second, words=words, args=args)


def set_seconds(**seconds: float) -> Change:
    """Return a change that sets the seconds of parts of a step."""
    return lambda situation: replace(situation, **seconds)


def calibrate(step: Step, wait: float) -> float:
    """Scale a wait from a formula by the ratio of the run's measured wait to its computed wait."""
    # The formula errs because its rate is at most what the link can carry (achieved_rate).
    if step.strategy is None or not step.rate:
        return wait
    own_wait = step.wait(step.strategy, step.nodes, step.rate)
    return wait * step.network / own_wait if own_wait else wait


@adviser(several_machines=True)
def advise_on_exchange(case: Case) -> list[Remedy]:
    """Advise another strategy, a faster link, or a larger batch between two exchanges."""
    step = case.step
    if step.network <= 0 or not step.payload.bytes or step.strategy is None:
        return []
    remedies: list[Remedy] = []
    if step.rate and not step.one_machine:
        remedies += recommend_strategy(case, step.rate)
        for mbit, name in FASTER_LINKS:
            # If all cards have that speed already, something else limits the rate, which
            # verdict.py names.
            if step.link_mbit is not None and step.link_mbit >= mbit:
                continue
            rate = formulas.goodput(mbit)
            if rate > MIN_LINK_GAIN * step.rate:
                wait = calibrate(step, step.wait(step.strategy, step.nodes, rate))
                change = f"network cards and switch of {name}"
                faster = set_seconds(network=wait)
                remedies.append(case.propose(change, "network", faster, money=True))
    last_bucket = formulas.last_bucket(step.payload)
    # Seconds of the exchange that backward hides with today's batch (bench/verdict.md).
    hidden = step.backward * (1 - last_bucket)

    def double_batch(situation: Situation) -> Situation:
        """Double all parts of a step except the exchange, which sends as many bytes as before."""
        network = situation.network
        # Backward then takes twice as long, and hides `hidden` seconds more of the exchange. The
        # transfer of the last bucket is never hidden (formulas.exposed). A shorter wait is that
        # transfer only, and stays.
        if network > step.backward * last_bucket:
            network = max(network - hidden, (network + hidden) * last_bucket)
        doubled = {name: 2 * value for name, value in vars(situation).items()}
        return Situation(**{**doubled, "network": network})

    # A script may not record its batch; its steps have counted images.
    batch = round((case.start.global_batch or step.images) / step.nodes)
    change = f"{step.program.phrases.batch}: half as many exchanges"
    remedies.append(case.propose(change, "batch", double_batch, words={"BATCH": 2 * batch}))
    return remedies


def recommend_strategy(case: Case, rate: float) -> list[Remedy]:
    """Recommend the most exact safe strategy whose time is within 5 % of the fastest. Return [] if
    the run used that strategy. `rate`: bytes per second of the link."""
    step, family = case.step, case.step.family
    without_network = step.seconds - step.network
    # A strategy's time is its mean step in a run of the same length, warm-up included. If this run
    # was all warm-up, only the steps after a warm-up count.
    phases = step.phases
    exact_wait = calibrate(step, step.wait(strategies.parse(strategies.EXACT), step.nodes, rate))
    if step.pending is not None:
        phases, exact_wait = replace(step.phases, warmup=0), 0.0
    # A strategy that is safe only in long runs is compared, too, because the next run may be
    # longer. The label below then names the necessary length.
    seconds = {
        strategy: phases.mean(
            strategy,
            without_network + calibrate(step, step.wait(strategy, step.nodes, rate)),
            without_network + exact_wait,
        )
        for strategy in strategies.list_usual()
        if prices.is_acceptable(strategy, family or prices.SGD)
    }
    # `most_exact` allows 5 % more time than that of the fastest strategy.
    best = prices.most_exact(seconds, lambda strategy: strategy)
    fastest = min(seconds, key=seconds.__getitem__)
    if best == step.strategy:
        return []
    phrase = step.program.phrases.sync.replace("{}", best.spec)
    args: tuple[str, ...] = ()
    # A run that was all warm-up would be all warm-up again with another strategy.
    if step.pending is not None and best.rule.warms:
        phrase += f" {step.program.phrases.warmed_up}"
        args = ("--sync_warmup", "0")
    # A strategy that is not exact is labelled safe here.
    accuracy = "exact" if best.exact else "no loss was measured"
    if not prices.is_acceptable(best, family or prices.SGD, step.planned_steps):
        accuracy += f" in runs of {prices.measured_steps():,} steps or more"
    # A script does not record its optimizer, so its user has to know about Adam.
    if family is None and not prices.is_acceptable(best, prices.ADAM):
        accuracy = f"with SGD, {accuracy}; with Adam, {prices.with_adam(best)}"
    change = f"{phrase}: {best.rule.text} (accuracy: {accuracy})"
    # A user who sees a faster strategy in the plan should know why it is not recommended.
    if fastest != best:
        change += f". {fastest.spec} would be at most 5 % faster, but is less exact"
    apply = set_seconds(network=seconds[best] - without_network)
    return [case.propose(change, "network", apply, words={"SYNC": best.spec}, args=args)]


@adviser(several_machines=True)
def advise_link_repair(case: Case) -> list[Remedy]:
    """Advise to repair one slow link, so that it is as fast as the others."""
    step, link = case.step, find_slow_link(case.evidence.networks)
    if link is None or step.strategy is None:
        return []
    # With the link repaired, all machines send at the rate of the other machines.
    wait = step.wait(step.strategy, step.nodes, link.others_rate)
    change = f"repair the link of {link.host} (cable, port of the switch, card)"
    return [case.propose(change, "network", set_seconds(network=min(wait, step.network)))]


@adviser(several_machines=True)
def advise_fewer_machines(case: Case) -> list[Remedy]:
    """Advise the best smaller number of machines, each with the same batch."""
    step = case.step
    if not step.rate or step.strategy is None:
        return []
    speeds = {}  # by the number of machines
    for nodes in range(1, step.nodes):
        world = max(1, round(step.world * nodes / step.nodes))
        wait = calibrate(step, step.wait(step.strategy, nodes, step.rate)) if nodes > 1 else 0.0
        images = case.situation.images * world / step.world
        # The remaining machines are taken to be equally fast, so they do not wait for each other.
        fewer = replace(case.situation, images=images, network=wait, peers=0.0)
        speeds[nodes] = fewer.images_per_second
    if not speeds:
        return []
    # Among equally fast numbers of machines, take the largest.
    nodes = max(speeds, key=lambda nodes: (speeds[nodes], nodes))
    name = "one machine alone" if nodes == 1 else f"{nodes} machines"
    change = f"NODES={nodes}: {name} instead of {step.nodes}"
    return [Remedy(change, "", speeds[nodes], words={"NODES": nodes})]


# Words for a straggler that a known cause slows down.
REMEDY_TEXT = {
    "cpu_contention": "without the other programs",
    "memory_pressure": "with enough memory (see above)",
}


@adviser(several_machines=True)
def advise_on_straggler(case: Case) -> list[Remedy]:
    """Advise to make the slowest machine as fast as the others, or to train without it."""
    step, situation = case.step, case.situation
    slow = find_slowest_rank(step)
    host = slow.rank.host
    # The cause `rank_work`: one rank has more work, on a machine as fast as the other machines.
    if not slow.is_straggler or case.cause == "rank_work":
        return []
    remedies: list[Remedy] = []
    # If images are late, advise_on_loading and advise_on_share have the remedies.
    if not case.cause.startswith("data"):
        repair = REMEDY_TEXT.get(case.cause, "repaired or upgraded")
        # The work of a rank includes its wait for images, so `data` becomes 0.
        equal = set_seconds(work=slow.median, data=0.0, peers=0.0)
        remedies.append(
            case.propose(f"{slow.location} {repair}: as fast as the other ranks", "peers", equal)
        )
    other_ranks = [rank for rank in step.ranks if rank.host != host]
    # Ranks without records count in `step.world`, but are not in `step.ranks`.
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
    may_pass = case.cause in ("cpu_contention", "rank_work") or case.cause.startswith("data")
    # A share needs the speed of every machine.
    is_measured = len(speeds) == step.nodes and step.nodes > 1
    if not step.program.adjustable or may_pass or not is_measured:
        return []
    # Without weights the speeds are nearly equal.
    if not weights_of(list(speeds.values())):
        return []
    change, words = "BALANCE=auto", {"BALANCE": "auto"}
    # A run with BALANCE=auto could not know these speeds at its start, but the next run does.
    if case.options and case.options.get("balance", "auto") == "auto":
        change, words = "start the run again", {}
    change += f": each machine gets {step.samples} in proportion to its speed in this run"
    # With such shares all machines finish a step at the same time.
    work = case.situation.images / sum(speeds.values())
    balanced = set_seconds(work=work, data=0.0, loader=0.0, peers=0.0)
    return [case.propose(change, "peers", balanced, words=dict(words))]


@adviser(several_machines=False)
def advise_on_loading(case: Case) -> list[Remedy]:
    """Advise smaller copies of large images, more loaders, or a faster disk."""
    cause = case.cause
    if not cause.startswith("data"):
        return []
    remedies: list[Remedy] = []
    # For a share, advise_on_share advises smaller copies, because it measures the bytes of images.
    if case.is_large and cause != "data_share":
        factor = SMALL_COPY_DECODES if cause == "data_decode" else SMALL_COPY_READS
        change = f"{case.small_copy} (assumed to be 500x375 now)"
        remedies.append(case.propose(change, "data", speed_up_loader(factor)))
    if cause == "data_decode":
        remedies += advise_more_loaders(case)
    if cause == "data_disk":
        change = "an SSD, if the data is on a hard disk now and the SSD is fast enough"
        remedies.append(case.propose(change, "data", set_seconds(loader=0.0), money=True))
    return remedies


def speed_up_loader(factor: float) -> Change:
    """Return a change after which the loader needs 1 / `factor` of its time."""
    return lambda situation: replace(situation, loader=situation.loader / factor)


def advise_more_loaders(case: Case) -> list[Remedy]:
    """Advise more loader processes if processors are idle, or if it is unknown whether they are."""
    step, workers, hosts = case.step, case.start.workers, late_hosts(case.step)
    machines = [use for use in case.evidence.machines if use.host in hosts]
    idle_cores = [use.maximum(CORES) * (1 - use.mean(CPU)) for use in machines]
    # Without loader processes each rank loads its images itself, and `data` is all of that time.
    if workers == 0:
        # Advise a loader for each idle core, at most four; one if the idle cores are unknown.
        added = min(4, int(min(idle_cores, default=1.0)))
        if not added:
            return []
        change = f"loader processes beside training (--workers {added})"
        divided = set_seconds(loader=step.data / added)
        return [case.propose(change, "data", divided, args=("--workers", f"{added}"))]
    # Twice as many loaders need `workers` more processors; None: their number is not recorded.
    if min(idle_cores, default=math.inf) < max(1.0, workers or 1.0):
        return []
    args = ("--workers", f"{2 * workers:.0f}") if workers else ()
    condition = "" if idle_cores else ", if that many cores are idle"
    change = f"{step.program.phrases.workers}{condition}"
    return [case.propose(change, "data", speed_up_loader(2), args=args)]


@adviser(several_machines=False)
def advise_on_share(case: Case) -> list[Remedy]:
    """Advise to send fewer bytes of images over the cables. The advice fits if training waits for
    images of a share, or for gradients on the same cables."""
    step = case.step
    reading = reading_of(step, case.evidence)
    if reading is None or case.cause not in ("data_share", "network"):
        return []
    image_words, sent = f"{size(reading.image_bytes)} each now", gradient_bytes(step)
    # If images are late, the cable of the share's machine counts, otherwise the fullest cable.
    images_are_late = case.cause == "data_share"
    count_bytes = Reading.server_bytes if images_are_late else Reading.cable_bytes
    current_bytes = count_bytes(reading, step.nodes, step.images, sent)

    def shrink_images(change: str, image_bytes: float) -> Remedy:
        """Return the remedy by which an image has `image_bytes` on the cable."""
        smaller = replace(reading, image_bytes=image_bytes)
        remaining = count_bytes(smaller, step.nodes, step.images, sent) / current_bytes
        if images_are_late:
            loader = case.situation.loader * remaining
            return case.propose(change, "data", set_seconds(loader=loader))
        # The gradients are taken to be faster by the factor by which the cable carries less.
        wait = step.network
        if step.strategy is not None and step.rate and remaining:
            wait = calibrate(step, step.wait(step.strategy, step.nodes, step.rate / remaining))
        return case.propose(change, "network", set_seconds(network=wait))

    # With a cache each machine reads from its own disk after the first epoch: 0 bytes on the cable.
    cache = (
        f"set {CACHE} in group_vars/all.yml: each machine then reads each {step.sample} from "
        "the share only once"
    )
    remedies = [shrink_images(cache, 0)]
    # Images that are small already would not shrink.
    if case.is_large and reading.image_bytes > SHRUNK:
        change = f"{case.small_copy}, {size(SHRUNK)} each ({image_words})"
        remedies.append(shrink_images(change, SHRUNK))
    if images_are_late:
        change = (
            f"{step.samples} on each machine's own disk instead of the share, if the disk is "
            "fast enough"
        )
        remedies.append(shrink_images(change, 0))
    return remedies


@adviser(several_machines=False)
def advise_on_saving(case: Case) -> list[Remedy]:
    """Advise to save half as often."""
    step, options = case.step, case.start.options
    saving = case.situation.saving
    if not saving:
        return []
    recorded = options.get("checkpoint_every")
    # By default the trainer saves after each epoch.
    chosen_steps = recorded if isinstance(recorded, (int, float)) else 0
    interval = chosen_steps or case.start.steps_per_epoch
    args = ("--checkpoint_every", f"{2 * interval:.0f}") if interval else ()

    def save_half_as_often(situation: Situation) -> Situation:
        remaining = 1.0  # of the length of a stall
        if interval and "checkpoint_every" in options:
            # A stall of the trainer copies the state, and first waits until the previous file is
            # written. With twice as many steps between two stalls, that wait is shorter by the
            # seconds of the added steps. `stall / situation.saving` is the number of these steps:
            # it is `interval`, or less if another remedy (a larger batch) changed `saving`.
            stall = interval * saving
            copying = min(stall, step.least_save)
            added_seconds = stall / situation.saving * (situation.seconds - situation.saving)
            remaining = (copying + max(0.0, stall - copying - added_seconds)) / stall
        return replace(situation, saving=situation.saving * remaining / 2)

    return [case.propose(step.program.phrases.saving, "saving", save_half_as_often, args=args)]


@adviser(several_machines=False)
def advise_on_rank_work(case: Case) -> list[Remedy]:
    """Advise that all ranks share the work of one rank between epochs."""
    rank_work = case.situation.rank_work
    if not rank_work:
        return []
    change = "do the work of one rank between epochs on all ranks, or less often"
    shared = set_seconds(rank_work=rank_work / case.step.world)
    return [case.propose(change, "rank_work", shared)]
