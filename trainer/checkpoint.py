"""What a checkpoint holds, and which one a run resumes from.

A checkpoint is one file of tensors and plain containers: model, optimizer, loss scale, average,
and the position in the data. State that a strategy keeps for a single machine lies beside it, in a
file on that machine: it is as large as the gradients, which is too much to send to the others.
A checkpoint loads with `weights_only=True`, and on any number of ranks, because order, augmentation
and dropout are functions of the position.
"""

import dataclasses
import io
import pathlib
import pickle
import time
import uuid
from typing import (
    Any,
    BinaryIO,
    Callable,
    Dict,
    FrozenSet,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    cast,
)

import torch

from .build import Job
from .compat import load_tensors
from .errors import UserError
from .options import Options
from .snapshots import OwnState, Snapshot
from .writer import checkpoints, is_whole


@dataclasses.dataclass
class Position:
    """How far a run has come. `sample`: images of this epoch that all ranks have trained on."""

    epoch: int = 0
    sample: int = 0
    step: int = 0
    best_top1: float = 0.0
    run: str = ""

    def samples(self, per_epoch: int) -> int:
        return self.epoch * per_epoch + self.sample


def snapshot(job: Job, position: Position) -> Snapshot:
    """A copy of all state of the rank that saves it, on the CPU, so that training may go on. Copies
    from CUDA are complete once the function that `arrival` returns has returned."""
    return Snapshot(
        model=_copied(job.precision.full_state(job.model)),
        optimizer=_copied(job.optimizer.state_dict()),
        precision=job.precision.state_dict(),
        ema=_copied(job.ema.state_dict()) if job.ema is not None else None,
        epoch=position.epoch,
        sample=position.sample,
        step=position.step,
        best_top1=position.best_top1,
        run=position.run,
        samples=position.samples(len(job.train_set)),
        train_images=len(job.train_set),
        classes=list(job.train_set.classes),
        options=decisive(job.options),
    )


def arrival(device: torch.device) -> Callable[[], None]:
    """A function that waits until all copies begun so far from the device are complete."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_cuda:
        # Into pinned memory: the device makes the copy asynchronously, before its next step.
        there = torch.empty_like(value, device="cpu", pin_memory=True)
        return there.copy_(value.detach(), non_blocking=True)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(inner) for inner in value]
    return value


def restore(job: Job, state: Snapshot) -> Position:
    """Load a snapshot in place, since DDP and the optimizer hold these tensors."""
    job.precision.renew_masters(job.model, load_weights(job.model, state["model"]))
    job.optimizer.load_state_dict(state["optimizer"])
    job.precision.load_state_dict(state["precision"])
    if job.ema is not None and state["ema"] is not None:
        job.ema.load_state_dict(state["ema"])
    return Position(
        state["epoch"], state["sample"], state["step"], state["best_top1"], state["run"]
    )


# What the screen says where the machines' own files are incomplete or do not fit.
ANEW = (
    "--sync {}: what each machine keeps for itself is not there for all of them, or the run then "
    "had other ranks on each: it begins anew"
)


def own_state(job: Job, position: Position) -> Optional[OwnState]:
    """A copy of this machine's own state; None where there is none, and on all its ranks but the
    first."""
    own = job.sync.state_dict() if job.sync is not None else None
    if job.sync is None or own is None or not job.sync.machines.leads:
        return None
    nodes = list(job.world.nodes)
    state = OwnState(sync=_copied(own), run=position.run, step=position.step, nodes=nodes)
    if job.sync.strategy.local:
        # Machines that train by themselves have no step in common.
        state["optimizer"] = _copied(job.optimizer.state_dict())
        state["precision"] = job.precision.state_dict()
    return state


def restore_own(job: Job, position: Position) -> bool:
    """Load what the machines kept for themselves at this position. False where one has lost it or
    the run had other ranks: then all begin anew. Collective."""
    if job.sync is None or job.sync.state_dict() is None:
        return True
    wanted = (position.run, position.step)
    own = next((state for key, state in _own_files(job) if key == wanted), None)
    if not all(job.world.gather(own is not None)) or own is None:
        return False
    job.sync.load_state_dict(own["sync"])
    if "optimizer" in own:
        job.optimizer.load_state_dict(own["optimizer"])
        job.precision.load_state_dict(own["precision"])
    return True


def _own_files(job: Job) -> Iterator[Tuple[Tuple[str, int], OwnState]]:
    """(run, step) and contents of each complete file of this rank's machine, from a run with the
    same ranks on each machine."""
    options, world = job.options, job.world
    writer = world.nodes.index(world.node_rank)
    path = pathlib.Path((options.output if options.resume == "auto" else options.resume) or ".")
    folder = path.parent.parent.parent if path.is_file() else path
    for file in filter(is_whole, folder.glob(f"checkpoints/*/rank{writer}/step-*.pt")):
        with file.open("rb") as content:
            state = cast(OwnState, loaded(str(file), content))
        if state.get("nodes") == list(world.nodes):
            yield (state["run"], state["step"]), state


def _complete(job: Job) -> FrozenSet[Tuple[str, int]]:
    """The (run, step) pairs for which all machines have their own files. Collective."""
    if job.sync is None or job.sync.state_dict() is None:
        return frozenset()
    with job.world.agreed():
        here = [key for key, _ in _own_files(job)]
    keys = job.world.gather(here)
    return frozenset.intersection(*(frozenset(map(tuple, theirs)) for theirs in keys))


def loaded(name: str, content: BinaryIO) -> Any:
    """The dict of tensors and plain values that a file holds; messages call the file `name`. Raises
    UserError for anything else, and executes nothing of it."""
    try:
        state = load_tensors(content)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{name} is no torch file, or holds objects that could run as code: it was not loaded. "
            "Take it away, or save its state dict anew, as tensors by name."
        ) from error
    if not isinstance(state, dict):
        raise UserError(f"{name} holds no tensors by name: give a checkpoint or a state dict.")
    return state


def load_weights(
    model: torch.nn.Module, weights: Dict[str, torch.Tensor]
) -> Dict[str, torch.Tensor]:
    """Load a state dict, whether its keys have DDP's prefix (`module.`) or not; returns it without
    the prefix. Raises UserError."""
    plain = {key[7:] if key.startswith("module.") else key: v for key, v in weights.items()}
    try:
        model.load_state_dict(plain)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"these weights do not belong to this model: {reason}") from error
    return plain


def read_weights(job: Job) -> None:
    """Start from the model of --weights: an exported state dict or a checkpoint. Collective."""
    path = pathlib.Path(job.options.weights or "")
    with job.world.agreed():
        try:
            with path.open("rb") as file:
                state = loaded(f"--weights {path}", file)
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            raise UserError(f"--weights {path}: {str(error).splitlines()[0]}.") from error
        job.precision.renew_masters(job.model, load_weights(job.model, state.get("model", state)))
        if job.ema is not None:
            job.ema.begin(job.precision.full_state(job.model))


class Found(NamedTuple):
    """The best checkpoint on a rank's machine. `key` orders by run, then by whether all machines
    have their own files for it, then by samples seen."""

    key: Tuple[str, bool, int]
    other_options: List[str]


def find(job: Job, same_options: bool = True) -> Optional[Snapshot]:
    """The newest complete checkpoint on any node that `--resume` allows, on every rank; its owner
    sends the bytes. None with `--resume none`, or with `--resume auto` if there is none.
    Collective."""
    options, world = job.options, job.world
    if options.resume == "none":
        return None
    content, mine = b"", None
    complete = _complete(job)
    with world.agreed():
        if world.local_rank == 0:
            content, mine = _newest_here(job, complete)
    told = [one and Found(tuple(one[0]), one[1]) for one in world.gather(mine)]
    # Among equal ones, the lowest rank's is taken.
    source = max(range(world.size), key=lambda rank: told[rank].key if told[rank] else ("",))
    best = told[source]
    if best is None:
        if options.resume == "auto":
            return None
        raise UserError(f"--resume {options.resume}: no whole checkpoint on any node.")
    if same_options and best.other_options:
        raise UserError(
            f"the checkpoint was made with another {', '.join(best.other_options)}: give the same "
            "options, or --resume none to start afresh."
        )
    if world.exchange is not None:
        content = world.exchange.bytes_from(source, content)
    return cast(Snapshot, loaded(f"the checkpoint of rank {source}", io.BytesIO(content)))


def _newest_here(job: Job, complete: FrozenSet[Tuple[str, int]]) -> Tuple[bytes, Optional[Found]]:
    best: Tuple[bytes, Optional[Found]] = (b"", None)
    for content, state in _allowed_here(job.options):
        other = differing(state, job.options, len(job.train_set))
        key = (state["run"], (state["run"], state["step"]) in complete, state["samples"])
        found = Found(key, other)
        if best[1] is None or found.key > best[1].key:
            best = content, found
    return best


def _allowed_here(options: Options) -> Iterator[Tuple[bytes, Snapshot]]:
    """Bytes and contents of each complete checkpoint on this machine that `--resume` allows."""
    wanted = options.output if options.resume == "auto" else options.resume
    if wanted is None or options.resume == "none":
        return
    path = pathlib.Path(wanted)
    for file in filter(is_whole, [path] if path.is_file() else checkpoints(path)):
        content = file.read_bytes()
        state = loaded(str(file), io.BytesIO(content))
        if "run" in state:  # otherwise it is only weights, or another program's file
            yield content, state


def settled_here(
    options: Options, names: Sequence[str]
) -> Optional[Tuple[str, int, Dict[str, str]]]:
    """The run, the samples seen and the options called `names` of the newest checkpoint on this
    machine; None where there is none. Values that an option cannot have are left out."""
    fields = [field for field in dataclasses.fields(options) if field.name in names]
    found = []
    for _, state in _allowed_here(options):
        then = {field.name: state["options"].get(field.name) for field in fields}
        own = {
            field.name: value
            for field in fields
            for value in field.metadata["choices"] or (True, False)
            if repr(value) == (then[field.name] or repr(field.metadata["was"]))
        }
        found.append((state["run"], state["samples"], {k: str(v) for k, v in own.items()}))
    return max(found, key=lambda one: one[:2], default=None)


def decisive(options: Options) -> Dict[str, str]:
    """The options that a resumed run must share with the run that it continues, by their repr."""
    fields = [field for field in dataclasses.fields(options) if not field.metadata["free"]]
    return {field.name: repr(getattr(options, field.name)) for field in fields}


def differing(state: Snapshot, options: Options, train_images: int) -> List[str]:
    """The names of what was different in the run that made this checkpoint."""
    before = {field.name: repr(field.metadata["was"]) for field in dataclasses.fields(options)}
    then = {**before, **state["options"]}
    names = [name for name, value in decisive(options).items() if then[name] != value]
    return names + (["data set"] if state["train_images"] != train_images else [])


def new_run(job: Job) -> Position:
    """The position at which a new run begins. Names of runs sort by when they began. Collective."""
    name = time.strftime("%Y%m%dT%H%M%SZ-", time.gmtime()) + uuid.uuid4().hex[:8]
    return Position(run=job.world.gather(name)[0])
