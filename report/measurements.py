"""What a prediction starts from: the newest run of the model, or what `make plan` measured."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from boundary.run_files import RankStart
from contract import runs, verbs
from contract.errors import UserError
from contract.options import DEFAULT_MODEL, OPTIMIZERS, option
from contract.precisions import BITS
from contract.split import node_batches, weights_of
from contract.strategies import EXACT, WARMUP_EPOCHS
from contract.text import millions, seconds, size
from report.cli import NothingMeasured
from report.links import link_rates, links_sentences, read_links
from report.measure import Step, measure_step, own_speeds
from report.predict import Basis
from report.progress import learning_curve
from report.published_speeds import BATCH, MODEL, images_per_second, level_of, paper_step
from report.read import Run, read_run
from report.reading import reading_of, without_reading
from report.usage import usage_of


def on_paper(gpu: str, model: str, precision: str | None) -> Basis:
    """A machine that nobody measured. Raises UserError where nothing says how fast it is."""
    level = level_of(gpu) if precision in (None, "auto") else str(precision)
    speed, source = images_per_second(gpu, model, level)
    step = paper_step(gpu, model, level)
    about = (f"One {gpu} on paper: {speed:.0f} images/s, {source}.",)
    return Basis(f"{gpu} on paper", model, 224, BATCH, (step,), None, 0.0, level, about)


@dataclass(frozen=True)
class Question:
    """What `python -m report plan` is asked."""

    # fmt: off
    nodes: int = option(4, "up to how many machines (4)", least=1)
    model: str = option("",
        f"as in make train ({DEFAULT_MODEL}, or with --gpu {MODEL})")
    gpu: str | None = option(None,
        "predict on paper, by its published or estimated speed: 2080ti, 3090")
    image_size: int | None = option(None, "only from a run at this size")
    link: str | None = option(None,
        "of the network, like 1gbit or 2.5gbit (as measured, else 1gbit)")
    epochs: float = option(90.0, "of a whole run (90, as is usual on ImageNet)", least=1)
    warmup: float = option(WARMUP_EPOCHS,
        "epochs of exact sums before a strategy that leaves bits out (1, where it needs some)")
    warmup_chosen: bool = option(False, "with all of them, as --sync_warmup has it")
    sync: str = option(EXACT, "as in make train (allreduce)")
    optimizer: str = option("sgd", "as in make train (sgd)", tuple(OPTIMIZERS))
    batch: int | None = option(None, "only from a run with so many images a node")
    precision: str | None = option(None, "only from a run in this one", ("auto", *BITS))
    machines: str | None = option(None,
        "of this cluster: what was measured of others is not used")
    run: str | None = option(None, "the run to start from (the newest of that model)")
    runs: str = option(runs.RUNS, "where runs are (runs)")
    all: bool = option(False, "each strategy and number of machines")
    # fmt: on


def find_basis(options: Question) -> Basis:
    """The run that was named, else the newest one that fits. Raises UserError."""
    if options.run:
        basis = read_basis(Path(options.run))
        if basis is None:
            raise UserError(f"{options.run} has no measured step: choose a run that trained.")
        return basis
    for folder in folders(Path(options.runs), options.model):
        basis = read_basis(folder)
        if basis is not None and fits(basis, options):
            return basis
    raise NothingMeasured(
        f"Nothing of {options.model}{conditions(options)} was measured yet, and a prediction needs "
        f"its computing time: `{measure_command(options)}` takes the machines for a minute and "
        "measures it; for other machines than yours `make plan MODEL=resnet50 GPU=2080ti "
        "LINK=1gbit` answers on paper."
    )


def measure_command(options: Question) -> str:
    """The command that measures what `make plan` asks about."""
    size = f"--image_size {options.image_size}" if options.image_size else None
    words = {"BATCH": options.batch, "PRECISION": options.precision, "ARGS": size}
    return verbs.line("plan", NODES=options.nodes, MODEL=options.model, **words)


def conditions(options: Question) -> str:
    """` at 224 pixels in O1`: what restricts the prediction besides the model."""
    return "".join(
        (
            f" at {options.image_size} pixels" if options.image_size else "",
            f" with {options.batch} images a step" if options.batch else "",
            f" in {options.precision}" if options.precision not in (None, "auto") else "",
        )
    )


def folders(root: Path, model: str) -> Iterator[Path]:
    """The folders of runs and measurements of a model of this name, the newest first."""
    places = [place for place in (root, root / runs.MEASURED) if place.is_dir()]
    candidates = [path for place in places for path in place.iterdir()]
    for path in sorted(candidates, key=lambda path: path.name, reverse=True):
        if runs.may_be_of(path.name, model) and path.is_dir():
            yield path


def fits(basis: Basis, options: Question) -> bool:
    machines = tuple(options.machines.split(",")) if options.machines else ()
    setting = runs.Setting(
        options.model, options.batch, options.image_size, options.precision, machines
    )
    fresh = not basis.machines or runs.is_fresh(basis.unix)
    return fresh and runs.still_applies(basis.setting, setting, options.nodes)


MOST = 12  # of the newest runs and measurements, which are read for speeds


def newest_speeds(root: Path, setting: runs.Setting) -> dict[str, float]:
    """Images/s of each of these machines by itself, by the newest run or measurement that has it.
    Only their proportions count: those of an older one are scaled by the machines that both have.
    So another batch serves, too, after all that were measured with this one."""
    alike, bases = replace(setting, batch=None, machines=()), []
    for folder in islice(folders(root, setting.model), MOST):
        basis = None
        with contextlib.suppress(UserError):  # a damaged folder
            basis = read_basis(folder) if runs.is_fresh(runs.begun(folder.name)) else None
        if (
            basis
            and basis.own_speeds
            and runs.still_applies(replace(basis.setting, machines=()), alike, 0)
        ):
            bases.append(basis)
    speeds: dict[str, float] = {}
    for basis in sorted(bases, key=lambda item: item.batch != setting.batch):
        ratios = [speeds[name] / own for name, own in basis.own_speeds.items() if name in speeds]
        if ratios or not speeds or basis.batch == setting.batch:
            scale = statistics.fmean(ratios) if ratios else 1.0
            speeds = {**{name: scale * own for name, own in basis.own_speeds.items()}, **speeds}
    return {name: speeds[name] for name in setting.machines if name in speeds}


def read_basis(folder: Path) -> Basis | None:
    """The basis of a folder; None where it measured no step, or its gradients' size is unknown."""
    run = read_run(folder)
    measured = folder.resolve().parent.name == runs.MEASURED
    return read_measured(run) if measured else read_trained(run)


def read_trained(run: Run) -> Basis | None:
    """All machines of a run have one step in common."""
    uses = usage_of(run)
    step = measure_step(run, uses.networks)
    if step is None or not step.payload.bytes:
        return None
    reading = None if step.shared_machine else reading_of(step, uses.in_attempt(step.attempt))
    records = [r for r in run.ranks if r.attempt == step.attempt]
    evaluated = max(1, len(learning_curve(run)))
    spent = sum(record.seconds.get("evaluate", 0.0) for record in records) / len(records)
    name = run.folder.resolve().name
    steps = (without_reading(step, reading) if reading else step,)
    basis = basis_of(run, name, steps, spent / evaluated, run_sentences(name, step))
    return replace(basis, own_speeds=own_speeds(step), reading=reading)


def basis_of(
    run: Run, name: str, steps: tuple[Step, ...], evaluate: float, about: tuple[str, ...]
) -> Basis:
    start = next((record.start for record in run.ranks if record.start), RankStart())
    images, pixels = start.train_images, start.image_size
    return Basis(
        run=name,
        model=start.model or "unknown",
        image_size=int(pixels) if pixels else None,
        batch=node_batch(start, steps[0]),
        steps=steps,
        train_images=int(images) if images else None,
        evaluate_seconds=evaluate,
        precision=start.precision,
        about=about,
    )


def run_sentences(name: str, step: Step) -> tuple[str, ...]:
    sentence = f"In {name} a step without waiting for other ranks took {seconds(step.work)}."
    return (sentence, SHARED) if step.shared_machine else (sentence,)


SHARED = (
    "They were processes of one PC, where more of them gain nothing. What follows is of so many "
    "PCs like it with a link between them; with its cores to itself each is faster."
)


def node_batch(start: RankStart, step: Step) -> int:
    """BATCH of that run: its global batch divided evenly among its machines."""
    images = start.global_batch or step.images
    return round(images / step.nodes)


def read_measured(run: Run) -> Basis | None:
    """Each machine was a run of its own. For n machines the slowest of the first n counts, or the
    step that all of these do in parts by their speeds."""
    nodes = run.plan.nodes
    hosts = tuple(str(node.host) for node in nodes)
    shared = sum(node.connection == "local" for node in nodes) > 1
    records = [[record for record in run.ranks if record.host == host] for host in hosts]
    own = [measure_step(replace(run, ranks=ranks), []) for ranks in records]
    known = [step for step in own if step is not None and step.payload.bytes]
    if run.status != "finished" or not known or len(known) < len(hosts):
        return None
    known = [replace(step, shared_machine=shared) for step in known]
    steps = tuple(in_parts(known[:n]) for n in range(1, len(known) + 1))
    unix = run.plan.created_unix or 0.0
    links = read_links(run, hosts)
    start = run.ranks[0].start
    data, parameters = bool(run.plan.data), start.parameters or 0.0
    about = (
        *steps_sentences(hosts, known, unix, data, parameters),
        *(() if shared else parts_sentences(hosts, known)),
        *links_sentences(links),
    )
    forward = known[0].data + known[0].h2d + known[0].forward
    evaluate = (start.eval_images or 0.0) / known[0].images * forward
    name = run.folder.resolve().name
    basis = basis_of(run, name, steps, evaluate, (*about, SHARED) if shared else about)
    images = basis.train_images if data else None
    return replace(
        basis,
        machines=hosts,
        unix=unix,
        rates=link_rates(links),
        links=links,
        train_images=images,
        own_speeds={} if shared else dict(zip(hosts, map(speed_of, known))),
    )


def speed_of(step: Step) -> float:
    """Images/s of one machine that was measured by itself."""
    return step.images / step.work


def in_parts(steps: list[Step]) -> Step:
    """The step of these machines together, each of which was measured with a whole batch: that of
    the slowest, or where they differ enough (BALANCE=auto), as long as it takes with parts in
    proportion to their speeds. (A part's loading and computing is taken to last as long as its
    images are many; the optimizer takes as long as ever.)"""
    slowest = max(steps, key=lambda step: step.work)
    if slowest.shared_machine or not weights_of(list(map(speed_of, steps))):
        return slowest
    part = len(steps) * slowest.images / sum(map(speed_of, steps)) / slowest.work
    return replace(
        slowest,
        data=part * slowest.data,
        h2d=part * slowest.h2d,
        forward=part * slowest.forward,
        backward=part * slowest.backward,
        other=part * slowest.other,
    )


def parts_sentences(hosts: tuple[str, ...], steps: list[Step]) -> tuple[str, ...]:
    """A sentence on each machine's images, where speeds differ enough for unequal parts."""
    weights = weights_of(list(map(speed_of, steps)))
    if not weights:
        return ()
    parts = node_batches(round(steps[0].images), [step.world for step in steps], weights)
    named = ", ".join(f"{host} {part}" for host, part in zip(hosts, parts))
    equal, unequal = max(step.work for step in steps), in_parts(steps).work
    return (
        f"In parts by their speeds (BALANCE=auto) the images of a step are {named}: a step of all "
        f"takes {seconds(unequal)} without the network, and with equal parts {seconds(equal)}.",
    )


def steps_sentences(
    hosts: tuple[str, ...], steps: list[Step], unix: float, data: bool, parameters: float
) -> tuple[str, str]:
    """How long steps took, on which machines and when, and what the slowest machine's steps consist
    of."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
    by_work = sorted(zip([step.work for step in steps], hosts))
    (least, first), (most, last) = by_work[0], by_work[-1]
    alone = len(hosts) == 1
    each = "by itself" if alone else "by themselves"
    what = "" if data else ", on noise in the place of images"
    took = seconds(least) if alone else f"{seconds(least)} ({first}) to {seconds(most)} ({last})"
    slow = steps[hosts.index(last)]
    parts = (("forward", slow.forward), ("backward", slow.backward), ("optimizer", slow.optimizer))
    spent = ", ".join(f"{name} {seconds(value)}" for name, value in parts)
    on = "" if alone else f" on {last}"
    return (
        f"Measured at {when} on {', '.join(hosts)} {each}{what}: a step took {took}.",
        f"Of it{on}: {spent}. {millions(parameters)} parameters, {size(slow.payload.bytes)} of "
        "gradients.",
    )
