"""What a run starts from: somebody's weights of the same net, perhaps for other classes.

People's files hold them in many ways: below a key, with the prefixes of DDP, torch.compile or the
net that a backbone was part of, as torch's or safetensors'. What fits by name and shape is loaded;
what does not is said.
"""

import io
import logging
import math
import pathlib
from typing import Dict, Iterable, List, NamedTuple, Optional, Set

import torch
from torch import nn
from torch.nn import functional

from contract.errors import UserError
from contract.text import pluralize

from . import safetensors
from .build import Job
from .checkpoint import class_changes, load, refuse_not_finite
from .models import head
from .snapshots import SNAPSHOT, tensors_in

log = logging.getLogger(__name__)

# Below which key a file may have its state dict: ours, torchvision's and timm's, Lightning's; the
# average is taken only where there is nothing else.
KEYS = ("model", "state_dict", "model_state_dict", "model_ema", "state_dict_ema")
SHOWN = 4  # names of tensors in a sentence
POSITIONS = ("pos_embed", "pos_embedding")


class TrainedModel(NamedTuple):
    """What is used of a checkpoint, or of a file of weights alone, which names no classes."""

    tensors: Dict[str, torch.Tensor]
    classes: Optional[List[str]]


def read_weights(file: str, average: bool = False) -> TrainedModel:
    """The model of --weights, an exported state dict or a checkpoint; `average`: of our checkpoint
    the average where it has one, which a run evaluates. Raises UserError."""
    name = f"--weights {file}"
    try:
        content = pathlib.Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}.") from error
    if safetensors.is_such(content):
        return TrainedModel(safetensors.read(name, content), None)
    state = load(name, io.BytesIO(content))
    # Of a checkpoint of another version no more is asked than is used.
    classes = state.get("classes")
    known = classes if classes and SNAPSHOT["classes"](classes) else None
    ema = state.get("ema")
    if average and isinstance(ema, dict):
        return TrainedModel(tensors_in(name, ema.get("average")), known)
    key = next((key for key in KEYS if isinstance(state.get(key), dict)), None)
    return TrainedModel(tensors_in(name, state[key] if key else state), known)


def start_from_weights(job: Job) -> None:
    """Start from the model of --weights. Collective."""
    name, now, changes = f"--weights {job.options.weights}", job.train_set.classes, ""
    with job.world.raise_on_all_ranks():
        trained = read_weights(job.options.weights or "")
        fit = fitting(job.model, trained.tensors, len(now))
        said = fit.refuse_another_net(name, job.options.model)
        refuse_not_finite(job.model, fit.tensors)
        job.model.load_state_dict(fit.tensors, strict=False)
        job.precision.renew_masters(job.model, fit.tensors)
        if job.ema is not None:
            job.ema.begin(job.precision.full_state(job.model))
    if trained.classes is not None:
        changes = class_changes(trained.classes, now)
    for line in said:
        log.info(f"{name}: {line}")
    if changes:
        log.info(f"{name}: its model was trained on other classes ({changes})")


class Fit(NamedTuple):
    """What a file has for a model: `tensors` by the model's names; of the model those that are
    `new`, and why; and how many of the file's have no place."""

    tensors: Dict[str, torch.Tensor]
    new: Dict[str, str]
    left: int
    share: float  # of the parameters of the backbone

    def refuse_another_net(self, name: str, model: str) -> List[str]:
        """What is worth saying. Raises UserError where less than half of the backbone is there."""
        all_of_it = len(self.tensors) + len(self.new)
        found = f"{len(self.tensors)} of the {pluralize(all_of_it, 'tensor')} of --model {model}"
        if self.share < 0.5:
            raise UserError(
                f"{name}: only {found} are in it, {100 * self.share:.0f} % of the backbone's "
                f"parameters ({_listed(self.new)}): they are weights of another net: give the "
                "model that they were trained in, or weights of this one."
            )
        left = f"; {self.left} of the file have no place in it" if self.left else ""
        lines = [f"loaded {found}, {100 * self.share:.4g} % of the backbone's parameters{left}"]
        named = _listed([f"{key} ({why})" for key, why in self.new.items()])
        return lines + ([f"not loaded, so new: {named}"] if self.new else [])


def fitting(model: nn.Module, tensors: Dict[str, torch.Tensor], classes: int) -> Fit:
    """What of a file's tensors the model takes."""
    state, theirs = model.state_dict(), set(head(model, classes))
    aligned = _aligned(tensors, state)
    loaded: Dict[str, torch.Tensor] = {}
    new: Dict[str, str] = {}
    for name, own in state.items():
        value = aligned.get(name)
        if value is not None and value.shape != own.shape and name.split(".")[-1] in POSITIONS:
            value = _resized(value, own)
        if value is None and name.endswith("num_batches_tracked"):
            value = own  # older files have none, and it counts only without a momentum
        if value is None:
            new[name] = "not there"
        elif value.shape != own.shape:
            new[name] = f"{_shape(value)} there, {_shape(own)} here"
        else:
            loaded[name] = value
    counts = {k: p.numel() for k, p in model.named_parameters() if k not in theirs}
    total = sum(counts.values())
    share = sum(counts.get(name, 0) for name in loaded) / total if total else 1.0
    return Fit(loaded, new, sum(name not in state for name in aligned), share)


def _aligned(tensors: Dict[str, torch.Tensor], wanted: Iterable[str]) -> Dict[str, torch.Tensor]:
    """The tensors by the model's names, as far as one prefix, of all names of the file or of the
    model, makes the difference: module., backbone. and the like."""
    plain = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
    names, best, most = set(wanted), plain, len(set(wanted) & set(plain))
    for prefix in sorted(_prefixes(plain)):
        cut = {name[len(prefix) :]: t for name, t in plain.items() if name.startswith(prefix)}
        if len(names & set(cut)) > most:
            rest = {name: t for name, t in plain.items() if not name.startswith(prefix)}
            best, most = {**rest, **cut}, len(names & set(cut))
    for prefix in sorted(_prefixes(names)):
        more = {prefix + name: tensor for name, tensor in plain.items()}
        if len(names & set(more)) > most:
            best, most = more, len(names & set(more))
    return best


def _prefixes(names: Iterable[str]) -> Set[str]:
    parts = [name.split(".") for name in names]
    return {".".join(p[:end]) + "." for p in parts for end in range(1, len(p))}


def _resized(value: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A transformer's positions (1, tokens, width) for images of another size; as they are where
    the tokens are no square with the same ones before it."""
    if value.ndim != 3 or own.ndim != 3 or value.shape[2] != own.shape[2]:
        return value
    then, now = math.isqrt(value.shape[1]), math.isqrt(own.shape[1])
    first = value.shape[1] - then**2
    if first != own.shape[1] - now**2 or len(value) != 1:
        return value
    grid = value[:, first:].float().reshape(1, then, then, -1).permute(0, 3, 1, 2)
    grid = functional.interpolate(grid, (now, now), mode="bicubic", antialias=True)
    flat = grid.permute(0, 2, 3, 1).flatten(1, 2).to(value.dtype)
    return torch.cat([value[:, :first], flat], 1)


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
