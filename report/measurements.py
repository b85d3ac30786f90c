"""Find the Basis of a prediction: a run of the same model, a measurement of `make plan`, or a GPU's
published speed.

plan.py calls `find_basis` and `basis_on_paper`, and predict.py predicts from the Basis. The
launcher calls `newest_speeds` and `script_speeds` to divide a batch among machines.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from contract import runs, verbs
from contract.errors import UserError
from contract.options import DEFAULT_MODEL, OPTIMIZERS, option
from contract.precisions import BITS
from contract.split import node_batches, weights_of
from contract.strategies import EXACT, WARMUP_EPOCHS
from contract.text import millions, seconds, size
from report import published_speeds
from report.cli import NothingMeasured
from report.links import link_rates, links_sentences, read_links
from report.measure import LEAST_STEPS, Step, machine_speeds, measure_step
from report.predict import Basis
from report.progress import learning_curve
from report.read import RunRecord, first_start, read_run
from report.reading import reading_of, without_reading
from report.usage import usage_of


def basis_on_paper(gpu: str, model: str, precision: str | None) -> Basis:
    """Return the basis of a GPU that nobody measured. Raises UserError if its speed is unknown."""
    automatic = precision in (None, "auto")
    used_precision = published_speeds.best_precision(gpu) if automatic else str(precision)
    speed, source = published_speeds.images_per_second(gpu, model, used_precision)
    step = published_speeds.paper_step(gpu, model, used_precision)
    about = (f"One {gpu}: {speed:.0f} images/s, {source}. Nobody measured it on your PCs.",)
    return Basis(
        run=f"{gpu} on paper",
        model=model,
        image_size=published_speeds.IMAGE_SIZE,
        batch=published_speeds.BATCH,
        steps=(step,),
        # The number of images is unknown, so the prediction has no seconds of a run.
        train_images=None,
        evaluate_seconds=0.0,
        precision=used_precision,
        about=about,
    )


@dataclass(frozen=True)
class Question:
    """The options of `python -m report plan`."""

    # fmt: off
    nodes: int = option(4, "up to how many machines (4)", least=1)
    model: str = option("",
        f"as in make train ({DEFAULT_MODEL}, or with --gpu {published_speeds.MODEL})")
    gpu: str | None = option(None,
        "predict from the GPU's published or estimated speed: 2080ti, 3090")
    image_size: int | None = option(None, "only from a run at this size")
    link: str | None = option(None,
        "of the network, like 1gbit or 2.5gbit (as measured, else 1gbit)")
    epochs: float = option(90.0, "of a whole run (90, as is usual on ImageNet)", least=1)
    warmup: float = option(WARMUP_EPOCHS,
        "epochs of exact sums before an inexact strategy (1, if the strategy needs some)")
    warmup_chosen: bool = option(False, "with all of them, as --sync_warmup has it")
    sync: str = option(EXACT, "as in make train (allreduce)")
    optimizer: str = option("sgd", "as in make train (sgd)", tuple(OPTIMIZERS))
    batch: int | None = option(None, "only from a run with this number of images per node")
    precision: str | None = option(None, "only from a run in this one", ("auto", *BITS))
    machines: str | None = option(None,
        "of this cluster: measurements of other clusters are not used")
    run: str | None = option(None, "the run to start from (the newest of that model)")
    runs: str = option(runs.RUNS, "where runs are (runs)")
    all: bool = option(False, "each strategy and number of machines")
    # fmt: on


def find_basis(options: Question) -> Basis:
    """Return the basis of the run that the user named, else of the newest run or measurement that
    fits the options. Raises UserError, and NothingMeasured if nothing fits."""
    if options.run:
        basis = read_basis(Path(options.run))
        if basis is None:
            raise UserError(f"{options.run} has no measured step: choose a run that trained.")
        return basis
    machines = tuple(options.machines.split(",")) if options.machines else ()
    setting = runs.Setting(
        options.model, options.batch, options.image_size, options.precision, machines
    )
    for folder in folders_of(Path(options.runs), options.model):
        basis = read_basis(folder)
        # A run stays valid. A measurement (with machines) may be of other cables and drivers.
        if basis is None or (basis.machines and not runs.is_fresh(basis.unix)):
            continue
        if runs.still_applies(basis.setting, setting, options.nodes):
            return basis
    conditions = (
        f" at {options.image_size} pixels" if options.image_size else "",
        f" with {options.batch} images a step" if options.batch else "",
        f" in {options.precision}" if options.precision not in (None, "auto") else "",
    )
    measure = verbs.format_command(
        "plan",
        NODES=options.nodes,
        MODEL=options.model,
        BATCH=options.batch,
        PRECISION=options.precision,
        ARGS=f"--image_size {options.image_size}" if options.image_size else None,
    )
    raise NothingMeasured(
        f"{options.model}{''.join(conditions)} has not been measured yet, and a prediction "
        f"needs its computing time: `{measure}` measures it on the machines for a minute. For "
        "other machines than yours, `make plan MODEL=resnet50 GPU=2080ti LINK=1gbit` "
        "predicts from published speeds."
    )


def folders_of(root: Path, model: str) -> Iterator[Path]:
    """Yield the folders of runs and measurements of a model, the newest first."""
    parents = [parent for parent in (root, root / runs.MEASURED) if parent.is_dir()]
    candidates = [path for parent in parents for path in parent.iterdir()]
    for path in sorted(candidates, key=lambda path: path.name, reverse=True):
        if runs.may_have_trained(path.name, model) and path.is_dir():
            yield path


MOST_FOLDERS = 12  # the newest runs and measurements are searched for speeds


def newest_speeds(root: Path, setting: runs.Setting) -> dict[str, float]:
    """Return the images/s of the machines of `setting`, each without the other machines, by their
    newest runs or measurements. Machines without a speed are absent."""
    # Bases of any batch and of any machines fit, so no machines (0) are compared.
    bases = []
    any_batch = replace(setting, batch=None, machines=())
    for folder in islice(folders_of(root, setting.model), MOST_FOLDERS):
        basis = None
        with contextlib.suppress(UserError):  # a damaged folder
            basis = read_basis(folder) if runs.is_fresh(runs.begin_unix(folder.name)) else None
        if (
            basis
            and basis.machine_speeds
            and runs.still_applies(replace(basis.setting, machines=()), any_batch, 0)
        ):
            bases.append(basis)
    # Only the ratios of speeds matter, so another batch size will do. Bases with the batch size of
    # `setting` come first, then all other bases; within both groups the newest come first.
    speeds: dict[str, float] = {}
    for basis in sorted(bases, key=lambda basis: basis.batch != setting.batch):
        # At the same batch size, speeds need no scaling, and therefore no common machine.
        if basis.batch == setting.batch and not speeds.keys() & basis.machine_speeds.keys():
            speeds = {**basis.machine_speeds, **speeds}
        speeds = merge_speeds(speeds, basis.machine_speeds)
    return {name: speeds[name] for name in setting.machines if name in speeds}


def script_speeds(root: Path, name: str, options: Mapping[str, object]) -> dict[str, float]:
    """Return the samples/s of each machine, without the other machines, by the newest timed run of
    a script. `name`: of the program. `options`: values that the plan.json of such a run must
    have."""
    speeds: dict[str, float] = {}
    for folder in islice(folders_of(root, name), MOST_FOLDERS):
        with contextlib.suppress(UserError):  # a damaged folder
            run = read_run(folder)
            planned = run.plan.options or {}
            has_options = all(planned.get(key) == value for key, value in options.items())
            step = measure_step(run, usage_of(run).networks) if has_options else None
            is_fresh = runs.is_fresh(runs.begin_unix(folder.name), runs.SCRIPT_DAYS)
            if step and is_fresh and step.measured_steps >= LEAST_STEPS:
                speeds = merge_speeds(speeds, machine_speeds(step))
    return speeds


def merge_speeds(speeds: dict[str, float], older: dict[str, float]) -> dict[str, float]:
    """Return `speeds` and the speeds of machines that only `older` has. The older speeds are
    scaled by the mean ratio of the machines in both. If no machine is in both, return `speeds`
    unchanged, or `older` if `speeds` is empty."""
    # The older run may have had another batch or model, but only the ratios of speeds matter.
    ratios = [speeds[name] / speed for name, speed in older.items() if name in speeds]
    if speeds and not ratios:
        return speeds
    scale = statistics.fmean(ratios) if ratios else 1.0
    return {**{name: scale * speed for name, speed in older.items()}, **speeds}


# What a user must know about a basis whose nodes were processes of one PC.
ONE_PC = (
    "They were processes of one PC, on which more of them gain nothing. The rest of this page is "
    "about as many PCs like it with a link between them; with all of its cores each is faster."
)


def read_basis(folder: Path) -> Basis | None:
    """Return the basis of a run or a measurement; None if it has no step, or no size of
    gradients."""
    run = read_run(folder)
    if folder.resolve().parent.name == runs.MEASURED:
        return read_measured(run)
    uses = usage_of(run)
    step = measure_step(run, uses.networks)
    if step is None or not step.payload.bytes:
        return None
    reading = None if step.shared_machine else reading_of(step, uses.in_attempt(step.attempt))
    records = run.ranks_in(step.attempt)
    evaluations = max(1, len(learning_curve(run)))
    # The seconds of all evaluations, as a mean over the ranks.
    evaluate_seconds = sum(r.seconds.get("evaluate", 0.0) for r in records) / len(records)
    name = run.folder.resolve().name
    about = [f"In run {name}, a step took {seconds(step.work)} without waiting for other ranks."]
    about += [ONE_PC] if step.shared_machine else []
    # A run has a single step, which stands for any number of its machines.
    steps = (without_reading(step, reading) if reading else step,)
    basis = basis_of(run, steps, evaluate_seconds / evaluations, tuple(about))
    return replace(basis, machine_speeds=machine_speeds(step), reading=reading)


def basis_of(
    run: RunRecord, steps: tuple[Step, ...], evaluate_seconds: float, about: tuple[str, ...]
) -> Basis:
    """Return the basis of a run or measurement; the arguments are fields of Basis."""
    start = first_start(run.ranks)
    images, pixels = start.train_images, start.image_size
    return Basis(
        run=run.folder.resolve().name,
        model=start.model or "unknown",
        image_size=int(pixels) if pixels else None,
        # The machines are taken to have equal batches.
        batch=round((start.global_batch or steps[0].images) / steps[0].nodes),
        steps=steps,
        train_images=int(images) if images else None,
        evaluate_seconds=evaluate_seconds,
        precision=start.precision,
        about=about,
    )


def read_measured(run: RunRecord) -> Basis | None:
    """Return the basis of a measurement, in which each machine trained without the other machines.
    Return None if a machine is missing, because it may be the slowest."""
    nodes = run.plan.nodes
    hosts = tuple(str(node.host) for node in nodes)
    on_one_pc = sum(node.connection == "local" for node in nodes) > 1
    steps = []
    for host in hosts:
        # Each machine trained without the other machines, so its ranks are measured as a run.
        ranks = [record for record in run.ranks if record.host == host]
        step = measure_step(replace(run, ranks=ranks), [])
        if step is not None and step.payload.bytes:
            steps.append(replace(step, shared_machine=on_one_pc))
    if run.status != "finished" or not steps or len(steps) < len(hosts):
        return None
    unix, links = run.plan.created_unix or 0.0, read_links(run, hosts)
    start, data = run.ranks[0].start, bool(run.plan.data)
    about = [*steps_sentences(hosts, steps, unix, data, start.parameters or 0.0)]
    # There are no weights if the speeds are too equal for BALANCE. Processes of one PC slow each
    # other down, so their speeds say nothing.
    weights = () if on_one_pc else weights_of(list(map(speed_of, steps)))
    if weights:
        batches = node_batches(round(steps[0].images), [step.world for step in steps], weights)
        shares = ", ".join(f"{host} {batch}" for host, batch in zip(hosts, batches))
        equal, unequal = max(step.work for step in steps), balanced_step(steps).work
        about.append(
            f"With BALANCE=auto, each machine gets images in proportion to its speed, {shares}. A "
            f"step then takes {seconds(unequal)} without the network, and {seconds(equal)} with "
            "equal batches."
        )
    about += [*links_sentences(links), *([ONE_PC] if on_one_pc else [])]
    # A run on n machines uses the first n machines.
    joint_steps = tuple(balanced_step(steps[:n]) for n in range(1, len(steps) + 1))
    # Evaluation loads images and computes forward.
    batch_count = (start.eval_images or 0.0) / steps[0].images
    evaluate_seconds = batch_count * (steps[0].data + steps[0].h2d + steps[0].forward)
    basis = basis_of(run, joint_steps, evaluate_seconds, tuple(about))
    return replace(
        basis,
        machines=hosts,
        unix=unix,
        rates=link_rates(links),
        links=links,
        train_images=basis.train_images if data else None,  # noise has no epochs
        machine_speeds={} if on_one_pc else dict(zip(hosts, map(speed_of, steps))),
    )


def speed_of(step: Step) -> float:
    """Return the images/s of one machine that trained without the other machines."""
    return step.images / step.work


def balanced_step(steps: list[Step]) -> Step:
    """Return the joint step of machines that were each measured with a batch of the same size. It
    is the step of the slowest machine, with its share of the images."""
    # With equal batches all machines wait for the slowest machine.
    slowest = max(steps, key=lambda step: step.work)
    if slowest.shared_machine or not weights_of(list(map(speed_of, steps))):
        return slowest
    # If speeds differ enough, BALANCE=auto gives batches in proportion to the speeds: all images
    # divided by the sum of the speeds are the seconds of a step. The slowest machine then loads and
    # computes this fraction of its batch; its optimizer takes as long as before.
    share = len(steps) * slowest.images / sum(map(speed_of, steps)) / slowest.work
    scaled = ("data", "h2d", "forward", "backward", "other")
    return replace(slowest, **{name: share * getattr(slowest, name) for name in scaled})


def steps_sentences(
    hosts: tuple[str, ...], steps: list[Step], unix: float, data: bool, parameters: float
) -> tuple[str, str]:
    """Say how long steps took, on which machines and when, and the parts of the slowest step.
    `data`: False if the machines trained on noise."""
    clock = time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
    step_by_host = dict(zip(hosts, steps))
    by_work = sorted(hosts, key=lambda host: (step_by_host[host].work, host))
    fast_host, slow_host = by_work[0], by_work[-1]
    step = step_by_host[slow_host]
    shortest, longest = step_by_host[fast_host].work, step.work
    images = "" if data else ", with noise instead of images"
    if len(hosts) == 1:
        themselves, took, place = "by itself", seconds(shortest), ""
    else:
        took = f"{seconds(shortest)} ({fast_host}) to {seconds(longest)} ({slow_host})"
        themselves, place = "by themselves", f" on {slow_host}"
    parts = ("forward", "backward", "optimizer")
    spent = ", ".join(f"{name} {seconds(getattr(step, name))}" for name in parts)
    return (
        f"Measured at {clock} on {', '.join(hosts)} {themselves}{images}: a step took {took}.",
        f"The largest parts{place}: {spent}. {millions(parameters)} parameters, "
        f"{size(step.payload.bytes)} of gradients.",
    )
