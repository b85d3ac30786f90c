"""What a run continues from: the newest complete checkpoint on any machine, the state that this
machine keeps for itself, and the settings that all ranks use.
"""

import dataclasses
import io
import logging
import pathlib
from typing import (
    Any,
    Dict,
    FrozenSet,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Tuple,
)

from contract.errors import RankError, UserError
from contract.layout import printable
from contract.options import Options

from .build import Job
from .checkpoint import Position, class_changes, complete, decisive, load
from .data.folder import ImageFolder
from .optim import learning_rate
from .snapshots import OwnState, Snapshot, own_state_in, snapshot_in
from .world import World
from .writer import checkpoints

log = logging.getLogger(__name__)


class Candidate(NamedTuple):
    """The best checkpoint on a rank's machine. `key` orders by run, then by whether all machines
    have their own files for it, then by samples seen."""

    key: Tuple[str, bool, int]
    other_options: List[str]


def find(job: Job) -> Optional[Snapshot]:
    """The newest complete checkpoint on any node that `--resume` allows and that this run can
    continue, on every rank; None with `--resume none`, or with `--resume auto` if there is none.
    Collective."""
    if job.options.resume == "none":
        return None
    return _find(job.options, job.world, _complete_steps(job), job.train_set)


def find_model(options: Options, world: World) -> Optional[Snapshot]:
    """The same to use its model alone, whatever the run's options and images were. Collective."""
    return None if options.resume == "none" else _find(options, world, frozenset(), None)


def _find(
    options: Options,
    world: World,
    steps: FrozenSet[Tuple[str, int]],
    train_set: Optional[ImageFolder],
) -> Optional[Snapshot]:
    """`steps`: those that all machines have their own files of; `train_set`: what the run that
    goes on trains on. The checkpoint's owner sends the bytes."""
    content, mine = b"", None
    with world.raise_on_all_ranks():
        if world.local_rank == 0:
            content, mine = _newest_here(options, steps, train_set)
    candidates = [row and Candidate(tuple(row[0]), row[1]) for row in world.gather(mine)]
    keys: List[Tuple[Any, ...]] = [
        candidate.key if candidate else ("",) for candidate in candidates
    ]
    source = max(range(world.size), key=keys.__getitem__)  # of equal ones the lowest rank's
    best = candidates[source]
    if best is None:
        if options.resume == "auto":
            return None
        raise UserError(f"--resume {options.resume}: no complete checkpoint on any node.")
    if train_set and best.other_options:
        raise UserError(
            f"the run continues as it began: leave out {', '.join(best.other_options)}, or start a "
            "new run."
        )
    if world.exchange is not None:
        content = world.exchange.bytes_from(source, content)
    name = f"the checkpoint of rank {source}"
    return snapshot_in(name, load(name, io.BytesIO(content)))


def _newest_here(
    options: Options, steps: FrozenSet[Tuple[str, int]], train_set: Optional[ImageFolder]
) -> Tuple[bytes, Optional[Candidate]]:
    newest: Optional[pathlib.Path] = None
    best: Optional[Candidate] = None
    for file, state in _allowed_here(options):
        other = differing(state, options, train_set) if train_set else []
        key = (state["run"], (state["run"], state["step"]) in steps, state["samples"])
        candidate = Candidate(key, other)
        if best is None or candidate.key > best.key:
            newest, best = file, candidate
    return newest.read_bytes() if newest else b"", best


def _allowed_here(options: Options) -> Iterator[Tuple[pathlib.Path, Snapshot]]:
    """Name and contents of each complete checkpoint on this machine that `--resume` allows."""
    wanted = options.output if options.resume == "auto" else options.resume
    if wanted is None or options.resume == "none":
        return
    path = pathlib.Path(wanted)
    for file, state in complete([path] if path.is_file() else checkpoints(path)):
        if "run" in state:  # otherwise it is only weights, or another program's file
            yield file, snapshot_in(str(file), state)


def options_of_newest(options: Options, world: World) -> Dict[str, str]:
    """The options of the newest checkpoint that this run would resume from, by their repr; {} if
    there is none. Collective."""
    if options.resume == "none" or options.results:
        return {}
    newest = None
    with world.raise_on_all_ranks():
        if world.local_rank == 0:
            states = ((s["run"], s["samples"], s["options"]) for _, s in _allowed_here(options))
            newest = max(states, key=lambda state: state[:2], default=None)
    candidates = [candidate for candidate in world.gather(newest) if candidate]
    return max(candidates, key=lambda candidate: candidate[:2])[2] if candidates else {}


def differing(state: Snapshot, options: Options, train_set: ImageFolder) -> List[str]:
    """Return what was different in the run that made this checkpoint, with its values."""
    then = state["options"]
    names = [
        f"--{name} {getattr(options, name)} (it has {printable(then.get(name, 'none'))[:80]})"
        for name, value in decisive(options).items()
        if then.get(name) != value
    ]
    # Class numbers follow the names: where a folder has another one, all may mean something else.
    if changes := class_changes(state["classes"], train_set.classes):
        return [*names, f"data set ({changes})"]
    return names + (["data set"] if state["train_images"] != len(train_set) else [])


# What the screen says where the machines' own files are incomplete or do not fit.
OWN_STATE_LOST = (
    "--sync {}: the state that each machine keeps for itself is missing on some of them, or the "
    "ranks were spread differently: this state starts from zero"
)


# What it says where all ranks' own part of a strategy is not in the checkpoint.
COMMON_STATE_LOST = (
    "--sync {}: the checkpoint, of a run on one machine, has no scales: they are learned anew"
)


def epochs_changed(job: Job, state: Snapshot) -> str:
    """What another number of epochs than the checkpoint's means for a run that goes on; "" for the
    same number. Raises UserError where more are trained already."""
    now, then = job.options, state["options"].get("epochs", "")
    if (state["epoch"], state["sample"]) > (now.epochs, 0):
        raise UserError(
            f"the checkpoint is beyond epoch {now.epochs}: give --epochs {then}, or more, to go on."
        )
    if not then.isdecimal() or int(then) == now.epochs:
        return ""
    text = f"--epochs {now.epochs}, which was {then}"
    if now.schedule != "cosine":
        return f"{text}: the {now.schedule} schedule goes on as it was"
    steps, images = job.steps_per_epoch, len(job.train_set)
    at = (state["epoch"] + state["sample"] / images) * steps
    rates = [
        learning_rate(dataclasses.replace(now, epochs=epochs), at, steps, job.world.global_batch)
        for epochs in (int(then), now.epochs)
    ]
    return (
        f"{text}: the cosine schedule is now that of {now.epochs} epochs, and the learning rate "
        f"goes from {rates[0]:.3g} to {rates[1]:.3g} here"
    )


def common_state_is_lost(job: Job, state: Snapshot) -> bool:
    has = job.sync is not None and job.sync.common_state(job.model) is not None
    return has and state["sync"] is None


def restore_own(job: Job, position: Position) -> bool:
    """Load each machine's own state at this position. False where a machine has lost it or the run
    had other ranks: then all begin anew. Collective."""
    if job.sync is None or job.sync.state_dict() is None:
        return True
    wanted = (position.run, position.step)
    own = next((state for key, state in _own_files(job) if key == wanted), None)
    if not all(job.world.gather(own is not None)) or own is None:
        return False
    try:
        job.sync.load_state_dict(own["sync"])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise RankError(
            f"what this machine kept for --sync {job.options.sync} is damaged: remove its "
            f"checkpoints/{job.world.host}/rank*, and this state starts from zero."
        ) from error
    return True


def _own_files(job: Job) -> Iterator[Tuple[Tuple[str, int], OwnState]]:
    """(run, step) and contents of each complete file of this rank's machine, from a run with the
    same ranks on each machine."""
    options, world = job.options, job.world
    writer = world.nodes.index(world.node_rank)
    path = pathlib.Path((options.output if options.resume == "auto" else options.resume) or ".")
    folder = path.parent.parent.parent if path.is_file() else path
    for file, content in complete(sorted(folder.glob(f"checkpoints/*/rank{writer}/step-*.pt"))):
        state = own_state_in(str(file), content)
        if state["nodes"] == list(world.nodes):
            yield (state["run"], state["step"]), state


def _complete_steps(job: Job) -> FrozenSet[Tuple[str, int]]:
    """The (run, step) pairs for which all machines have their own files. Collective."""
    if job.sync is None or job.sync.state_dict() is None:
        return frozenset()
    with job.world.raise_on_all_ranks():
        here = [key for key, _ in _own_files(job)]
    keys = job.world.gather(here)
    return frozenset.intersection(*(frozenset(map(tuple, theirs)) for theirs in keys))
