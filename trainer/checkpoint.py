"""Checkpoints: copy a run's state, and load a state into a run.

A checkpoint is one file of tensors and plain containers: model, optimizer, loss scale, average, the
position in the data, and a strategy's state that is equal on all ranks. State that a strategy keeps
for a single machine is in another file, on that machine: this state is as large as the gradients,
which is too much to send to the other machines. A checkpoint loads with `weights_only=True`, and on
any number of ranks, because order, augmentation and dropout are functions of the position.

resume.py chooses the checkpoint to load, snapshots.py checks its fields, and writer.py writes it.
"""

import dataclasses
import logging
import pathlib
import time
import uuid
from typing import Any, BinaryIO, Callable, Dict, Iterable, Iterator, Optional, Sequence, Tuple

import torch

from contract.errors import UserError
from contract.layout import printable
from contract.options import TRAINER_OPTIONS, Options
from tandem.pickles import RejectedContent, load_tensors

from . import optim
from .build import Job
from .finite import not_finite
from .snapshots import NodeState, Snapshot
from .world import World
from .writer import is_complete

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Position:
    """The position of a run in its training."""

    epoch: int = 0  # epochs that are complete
    sample: int = 0  # images of the next epoch that all ranks together have trained on
    step: int = 0
    best_top1: float = 0.0  # of the evaluations so far, 0 to 1
    run: str = ""  # the run's name

    @classmethod
    def of_new_run(cls, world: World) -> "Position":
        """Return the position at which a new run begins. Runs sort by their names. Collective."""
        # All ranks use rank 0's name, since the machines' clocks differ.
        name = time.strftime("%Y%m%dT%H%M%SZ-", time.gmtime()) + uuid.uuid4().hex[:8]
        return cls(run=world.gather(name)[0])

    def samples(self, per_epoch: int) -> int:
        """Count the images since the run began, with `per_epoch` images an epoch."""
        return self.epoch * per_epoch + self.sample


def snapshot(job: Job, position: Position) -> Snapshot:
    """Copy this rank's state to the CPU, so that training may continue while the copy is written.
    Copies from CUDA are complete when the function that `make_copy_waiter` returns has returned."""
    return Snapshot(
        model=_copy(job.precision.full_state(job.model)),
        optimizer=_copy(job.optimizer.state_dict()),
        precision=job.precision.state_dict(),
        ema=_copy(job.ema.state_dict()) if job.ema is not None else None,
        sync=_copy(job.sync.common_state(job.model)) if job.sync is not None else None,
        epoch=position.epoch,
        sample=position.sample,
        step=position.step,
        best_top1=position.best_top1,
        run=position.run,
        samples=position.samples(len(job.train_set)),
        train_images=len(job.train_set),
        classes=list(job.train_set.classes),
        options={**fixed_options(job.options), "epochs": repr(job.options.epochs)},
    )


def make_copy_waiter(device: torch.device) -> Callable[[], None]:
    """Return a function for another thread that waits for all copies begun so far from `device`."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()

    def wait_for_copies() -> None:
        torch.cuda.set_device(device)  # else torch makes a context on GPU 0, too
        event.synchronize()

    return wait_for_copies


def _copy(value: Any) -> Any:
    """Copy the tensors in a value to the CPU; tuples become lists."""
    if isinstance(value, torch.Tensor) and value.is_cuda:
        # Into pinned memory: the device makes the copy asynchronously, before its next step.
        pinned = torch.empty_like(value, device="cpu", pin_memory=True)
        return pinned.copy_(value.detach(), non_blocking=True)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(inner) for inner in value]
    return value


def restore(job: Job, state: Snapshot) -> Position:
    """Load a snapshot and return its position. Raises UserError for a snapshot of another model,
    optimizer or data set."""
    # The data set has shrunk since the checkpoint, or the file is damaged.
    if state["sample"] >= max(1, len(job.train_set)):
        raise UserError(f"the checkpoint is at image {state['sample']} of {len(job.train_set)}.")
    # The values are copied into the job's tensors, since DDP and the optimizer hold these tensors.
    job.precision.renew_masters(job.model, load_weights(job.model, state["model"]))
    optim.load_state(job.optimizer, state["optimizer"], job.options)
    job.precision.load_state_dict(state["precision"])
    if job.ema is not None and state["ema"] is not None:
        job.ema.load_state_dict(state["ema"])
    if job.sync is not None and state["sync"] is not None:
        try:
            job.sync.load_common_state(job.model, state["sync"])
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"the checkpoint's state of --sync {job.options.sync} is damaged or belongs "
                f"to another model ({error}): use another checkpoint."
            ) from error
    return Position(
        epoch=state["epoch"],
        sample=state["sample"],
        step=state["step"],
        best_top1=state["best_top1"],
        run=state["run"],
    )


def copy_node_state(job: Job, position: Position) -> Optional[NodeState]:
    """Copy the state that the strategy keeps for this machine. Returns None if there is none, and
    on all ranks of a machine except the first."""
    # Each rank calls `state_dict`, because it also closes the rank's last step.
    state = job.sync.state_dict() if job.sync is not None else None
    if job.sync is None or state is None or not job.sync.topology.is_leader:
        return None
    # Resuming compares the nodes: a file is of use only with the same ranks on each machine.
    nodes = list(job.world.nodes)
    return NodeState(sync=_copy(state), run=position.run, step=position.step, nodes=nodes)


class Damaged(UserError):
    """The file is not as it was written."""


def load(name: str, content: BinaryIO) -> Dict[Any, Any]:
    """Read a file's dict of tensors and plain values, without running code from the file. Messages
    call the file `name`. Raises UserError if the file has other content, Damaged if its bytes are
    not those of a torch file, and OSError if it cannot be read."""
    try:
        state = load_tensors(content)
    except RejectedContent as error:
        raise UserError(
            f"{name} was not loaded: it is not a torch file, or it contains more than tensors "
            f"and plain values ({printable(str(error))[:100]}), which could run code or fill "
            "the memory. Remove it, or save only its state dict."
        ) from error
    except OSError:
        raise  # the disk or the share is at fault, and not the file
    except Exception as error:  # of damaged files torch raises many kinds, KeyError among them
        raise Damaged(
            f"{name} is empty, damaged or not a torch file: copy or save it again, or remove it."
        ) from error
    if not isinstance(state, dict):
        raise UserError(f"{name} contains no named tensors: use a checkpoint or a state dict.")
    return state


def read_complete(files: Iterable[pathlib.Path]) -> Iterator[Tuple[pathlib.Path, Dict[Any, Any]]]:
    """Yield each complete file with its contents, and warn about damaged files."""
    # A machine that lost power, or a disk that fails, leaves incomplete files.
    for file in files:
        if not is_complete(file):
            continue
        try:
            with file.open("rb") as content:
                state = load(str(file), content)
        except Damaged as error:
            log.warning("%s", error)
        else:
            yield file, state


def load_weights(
    model: torch.nn.Module, weights: Dict[str, torch.Tensor]
) -> Dict[str, torch.Tensor]:
    """Load a state dict, whether its keys have DDP's prefix (`module.`) or not; returns it without
    the prefix. Raises UserError, also for weights that are not finite."""
    prefix = "module."  # of a file that was saved from DDP's wrapper
    plain = {
        key[len(prefix) :] if key.startswith(prefix) else key: tensor
        for key, tensor in weights.items()
    }
    try:
        model.load_state_dict(plain)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"these weights do not belong to this model: {reason}") from error
    refuse_not_finite(model, plain)
    return plain


def refuse_not_finite(model: torch.nn.Module, state: Dict[str, torch.Tensor]) -> None:
    """Raise UserError if a model's state has a NaN, or an infinity among its parameters."""
    broken = not_finite(state, {name for name, _ in model.named_parameters()})
    if broken:
        raise UserError(
            f"these weights are not finite ({broken[0]} and {len(broken) - 1} more contain "
            "NaN or infinity), so the run that saved them had diverged. Use an earlier "
            "checkpoint, or its best.pt."
        )


def class_changes(saved_names: Sequence[str], names: Sequence[str]) -> str:
    """Describe in a clause how the names of the classes differ from a checkpoint's `saved_names`;
    "" if they do not differ."""
    saved, current = set(saved_names), set(names)  # a file may name a million
    missing = [name for name in saved_names if name not in current]
    added = [name for name in names if name not in saved]
    clauses = [("is not in --data", missing), ("is new there", added)]
    return ", ".join(f"{list_some(changed)} {change}" for change, changed in clauses if changed)


def list_some(names: Sequence[str]) -> str:
    """Join the first three names, and count the others."""
    ending = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "/".join(map(printable, names[:3])) + ending


def fixed_options(options: Options) -> Dict[str, str]:
    """Return the repr of each option that a resumed run must share with the run it continues."""
    names = [name for name, entry in TRAINER_OPTIONS.items() if not entry.changeable_on_resume]
    return {name: repr(getattr(options, name)) for name in names}
