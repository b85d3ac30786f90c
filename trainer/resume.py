"""Resume a run: find the newest complete checkpoint on any machine, and each machine's own files,
and check that this run may continue from the checkpoint.

train.py and predict.py call this file. checkpoint.py loads a checkpoint into a job.
"""

import dataclasses
import io
import logging
import pathlib
from typing import Any, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Tuple

from contract.errors import RankError, UserError
from contract.layout import printable
from contract.options import Options

from .build import Job
from .checkpoint import Position, class_changes, fixed_options, load, read_complete
from .data.folder import ImageFolder
from .optim import learning_rate
from .snapshots import NodeState, Snapshot, node_state_in, snapshot_in
from .world import World
from .writer import checkpoints

log = logging.getLogger(__name__)


class Candidate(NamedTuple):
    """The best checkpoint on a rank's machine. `key` is (the run's name, whether all machines have
    their own files for the checkpoint, samples trained on), and checkpoints are compared by it."""

    key: Tuple[str, bool, int]
    differences: List[str]


def find(job: Job) -> Optional[Snapshot]:
    """Return the checkpoint from which this job resumes; see `find_newest`. Collective."""
    # If the strategy keeps state on each machine, a checkpoint for which all machines have their
    # own files is better than a newer checkpoint.
    with_node_state: FrozenSet[Tuple[str, int]] = frozenset()
    if job.options.resume != "none" and job.sync is not None and job.sync.state_dict() is not None:
        with job.world.raise_on_all_ranks():
            local_keys = [key for key, _ in _node_files(job)]
        keys = job.world.gather(local_keys)
        sets = (frozenset(map(tuple, rank_keys)) for rank_keys in keys)  # JSON has made lists
        with_node_state = frozenset.intersection(*sets)
    return find_newest(job.options, job.world, with_node_state, job.train_set)


def find_newest(
    options: Options,
    world: World,
    with_node_state: FrozenSet[Tuple[str, int]] = frozenset(),
    train_set: Optional[ImageFolder] = None,
) -> Optional[Snapshot]:
    """Return on every rank the newest complete checkpoint on any node that `--resume` allows, or
    None with `--resume none`, and with `--resume auto` if there is none. Collective.

    `with_node_state`: the (run, step) pairs for which every machine has its own file. `train_set`:
    None if only the model is used; then the options and the images may differ. Raises UserError if
    this run cannot continue from the checkpoint."""
    if options.resume == "none":
        return None
    # The first rank of each machine reads its folder.
    content = b""
    local_best: Optional[Candidate] = None
    with world.raise_on_all_ranks():
        newest: Optional[pathlib.Path] = None
        for file, state in _allowed_on_node(options) if world.local_rank == 0 else ():
            differences = find_differences(state, options, train_set) if train_set else []
            has_node_state = (state["run"], state["step"]) in with_node_state
            key = (state["run"], has_node_state, state["samples"])
            if local_best is None or key > local_best.key:
                newest, local_best = file, Candidate(key, differences)
        content = newest.read_bytes() if newest else b""
    # `gather` turns tuples into lists.
    candidates = [row and Candidate(tuple(row[0]), row[1]) for row in world.gather(local_best)]
    # A rank without a checkpoint has the smallest key.
    keys: List[Tuple[Any, ...]] = [
        candidate.key if candidate else ("",) for candidate in candidates
    ]
    source = max(range(world.size), key=keys.__getitem__)  # the lowest of ranks with equal keys
    best = candidates[source]
    if best is None:
        if options.resume == "auto":
            return None
        raise UserError(f"--resume {options.resume}: no complete checkpoint on any node.")
    if train_set and best.differences:
        raise UserError(
            f"a resumed run keeps its options: omit {', '.join(best.differences)}, or start a "
            "new run."
        )
    # Perhaps no other machine has this file, so its bytes are sent.
    if world.exchange is not None:
        content = world.exchange.bytes_from(source, content)
    name = f"the checkpoint of rank {source}"
    return snapshot_in(name, load(name, io.BytesIO(content)))


def _allowed_on_node(options: Options) -> Iterator[Tuple[pathlib.Path, Snapshot]]:
    """Yield path and contents of each complete checkpoint on this machine that `--resume`
    allows: auto means those of this run's output, and a path means the file or folder."""
    source = options.output if options.resume == "auto" else options.resume
    if source is None or options.resume == "none":
        return
    path = pathlib.Path(source)
    for file, state in read_complete([path] if path.is_file() else checkpoints(path)):
        if "run" in state:  # otherwise it is only weights, or another program's file
            yield file, snapshot_in(str(file), state)


def options_of_newest(options: Options, world: World) -> Dict[str, str]:
    """Return the options of the newest checkpoint that this run would resume from, by their repr;
    {} if there is none. Collective."""
    # --predict, --extract and --evaluate use only the model, so their options may differ.
    if options.resume == "none" or options.results:
        return {}
    newest = None
    with world.raise_on_all_ranks():
        if world.local_rank == 0:
            states = ((s["run"], s["samples"], s["options"]) for _, s in _allowed_on_node(options))
            newest = max(states, key=lambda state: state[:2], default=None)
    # A candidate is (run, samples, options). The first two say which is the newest.
    candidates = [candidate for candidate in world.gather(newest) if candidate]
    return max(candidates, key=lambda candidate: candidate[:2])[2] if candidates else {}


def find_differences(state: Snapshot, options: Options, train_set: ImageFolder) -> List[str]:
    """List the options, and the data set, that differ from the run that made this checkpoint."""
    saved_options = state["options"]
    names = [
        f"--{name} {getattr(options, name)} (it has "
        f"{printable(saved_options.get(name, 'none'))[:80]})"
        for name, value in fixed_options(options).items()
        if saved_options.get(name) != value
    ]
    # Class numbers follow the sorted names, so another name may change the meaning of all numbers.
    if changes := class_changes(state["classes"], train_set.classes):
        return [*names, f"data set ({changes})"]
    return names + (["data set"] if state["train_images"] != len(train_set) else [])


# The screen prints this if the machines' own files are incomplete or do not fit.
NODE_STATE_LOST = (
    "--sync {}: each machine stores its own state, which is missing on some machines or "
    "belongs to other ranks: this state starts from zero"
)
# The screen prints this if the checkpoint lacks the strategy's state that is equal on all ranks.
COMMON_STATE_LOST = (
    "--sync {}: the checkpoint comes from a run on one machine and has no scales: the run "
    "learns them again"
)


def describe_epochs_change(job: Job, state: Snapshot) -> str:
    """Describe how a change of --epochs since the checkpoint affects a resumed run; "" if --epochs
    is the same. Raises UserError if the checkpoint has more epochs than --epochs."""
    options, saved_epochs = job.options, state["options"].get("epochs", "")
    if (state["epoch"], state["sample"]) > (options.epochs, 0):
        raise UserError(
            f"the checkpoint is beyond epoch {options.epochs}: type --epochs {saved_epochs} "
            "or more to continue."
        )
    if not saved_epochs.isdecimal() or int(saved_epochs) == options.epochs:
        return ""
    text = f"--epochs {options.epochs}, which was {saved_epochs}"
    if options.schedule != "cosine":
        return f"{text}: the {options.schedule} schedule continues unchanged"
    steps, images = job.steps_per_epoch, len(job.train_set)
    step = (state["epoch"] + state["sample"] / images) * steps
    old_rate, new_rate = (
        learning_rate(
            dataclasses.replace(options, epochs=epochs), step, steps, job.world.global_batch
        )
        for epochs in (int(saved_epochs), options.epochs)
    )
    return (
        f"{text}: the cosine schedule now has {options.epochs} epochs, which changes the "
        f"learning rate at this step from {old_rate:.3g} to {new_rate:.3g}"
    )


def restore_node_state(job: Job, position: Position) -> bool:
    """Load each machine's own state at this position. Returns False if a machine has lost its state
    or the ranks were on other machines: then all states start from zero. Raises RankError if a
    state is damaged. Collective."""
    if job.sync is None or job.sync.state_dict() is None:
        return True
    position_key = (position.run, position.step)
    state = next((candidate for key, candidate in _node_files(job) if key == position_key), None)
    if not all(job.world.gather(state is not None)) or state is None:
        return False
    try:
        job.sync.load_state_dict(state["sync"])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise RankError(
            f"this machine's state of --sync {job.options.sync} is damaged: remove its files "
            f"checkpoints/{job.world.host}/rank*. The state then starts from zero."
        ) from error
    return True


def _node_files(job: Job) -> Iterator[Tuple[Tuple[str, int], NodeState]]:
    """Yield (run, step) and contents of each complete file of this rank's machine, from a run with
    the same ranks on each machine."""
    options, world = job.options, job.world
    # The first rank of this machine writes for all of its ranks.
    writer = world.nodes.index(world.node_rank)
    path = pathlib.Path((options.output if options.resume == "auto" else options.resume) or ".")
    # A checkpoint's path is <output>/checkpoints/<host>/<file>.
    folder = path.parent.parent.parent if path.is_file() else path
    for file, content in read_complete(
        sorted(folder.glob(f"checkpoints/*/rank{writer}/step-*.pt"))
    ):
        state = node_state_in(str(file), content)
        if state["nodes"] == list(world.nodes):
            yield (state["run"], state["step"]), state
