"""What a run starts from: somebody's weights of the same net, perhaps for other classes.

People's files hold them in many ways: below a key, with the prefixes of DDP, torch.compile or the
net that a backbone was part of, as torch's or safetensors'. What fits by name and shape is loaded;
what does not is said.
"""

import itertools
import logging
import math
import pathlib
import re
from collections import Counter
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional

from contract.errors import UserError
from contract.text import pluralize
from tandem.compat import is_plain

from . import safetensors
from .build import Job
from .checkpoint import class_changes, load, refuse_not_finite
from .models import head
from .snapshots import SNAPSHOT, tensors_in

log = logging.getLogger(__name__)

# Below which key a file may have its state dict: ours, torchvision's and timm's, Lightning's. Each
# is part of the prefix of the tensors below it.
KEYS = ("model", "state_dict", "model_state_dict", "model_ema", "state_dict_ema")
DEEPEST = 3  # of such keys below each other
LONGEST_NAME = 1000  # with the keys above it: each tensor below a long key would repeat it
LONGEST_PREFIX = 20  # parts of a name, each of which is tried
AVERAGE = re.compile(r"(^|[._])(ema|averaged?|avg|swa)([._]|$)")  # in the prefix of one
SHOWN = 4  # names of tensors in a sentence
POSITIONS = ("pos_embed", "pos_embedding")


class TrainedModel(NamedTuple):
    """What is used of a checkpoint, or of a file of weights alone, which names no classes."""

    tensors: Dict[str, torch.Tensor]
    classes: Optional[List[str]]


def read_weights(file: str, average: bool = False) -> TrainedModel:
    """Read --weights, an exported state dict or a checkpoint: all tensors by their names with the
    keys above them, or with `average` the model that a run evaluates, which is our checkpoint's
    average if it has one. Raises UserError."""
    name = f"--weights {file}"
    try:
        with pathlib.Path(file).open("rb") as content:
            if safetensors.is_such(content):
                return TrainedModel(safetensors.read(name, content), None)
            state = load(name, content)
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}.") from error
    # Of a checkpoint of another version no more is asked than is used.
    classes = state.get("classes")
    known = classes if classes and SNAPSHOT["classes"](classes) else None
    if not average:
        tensors = dict(_flat(state))
        return TrainedModel(tensors_in(name, tensors or None), known)
    ema = state.get("ema")
    if isinstance(ema, dict):
        return TrainedModel(tensors_in(name, ema.get("average")), known)
    key = next((key for key in KEYS if isinstance(state.get(key), dict)), None)
    return TrainedModel(tensors_in(name, state[key] if key else state), known)


def _flat(state: Dict[Any, Any], prefix: str = "", depth: int = 0) -> Iterable[Tuple[str, Any]]:
    """Yield the tensors of a file by their names, with the keys above them."""
    for key, value in state.items():
        if not isinstance(key, str) or len(prefix) + len(key) > LONGEST_NAME:
            continue
        if is_plain(value):
            yield prefix + key, value
        elif isinstance(value, dict) and depth < DEEPEST:
            yield from _flat(value, f"{prefix}{key}.", depth + 1)


def start_from_weights(job: Job) -> None:
    """Start from the model of --weights. Collective."""
    name, now, changes = f"--weights {job.options.weights}", job.train_set.classes, ""
    with job.world.raise_on_all_ranks():
        trained = read_weights(job.options.weights or "")
        fit = fitting(job.model, trained.tensors, len(now), job.options.weights_prefix)
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
    `new`, and why; and how many of the file's have no place. `prefixes`: of all networks that fit
    equally well, the chosen one's first; `is_settled`: the others are averages of it."""

    tensors: Dict[str, torch.Tensor]
    new: Dict[str, str]
    left: int
    share: float  # of the parameters of the backbone
    prefixes: List[str]
    is_settled: bool

    def refuse_another_net(self, name: str, model: str) -> List[str]:
        """Say what was loaded. Raises UserError where less than half of the backbone is there, or
        where several networks are."""
        all_of_it = len(self.tensors) + len(self.new)
        found = f"{len(self.tensors)} of the {pluralize(all_of_it, 'tensor')} of --model {model}"
        if self.share < 0.5:
            raise UserError(
                f"{name}: only {found} are in it, {100 * self.share:.0f} % of the backbone's "
                f"parameters ({_listed(self.new)}): they are weights of another net: give the "
                "model that they were trained in, or weights of this one."
            )
        chosen, *others = (repr(prefix) if prefix else "no prefix" for prefix in self.prefixes)
        if not self.is_settled:
            raise UserError(
                f"{name}: several networks in it fit --model {model} equally well. Their prefixes: "
                f"{_listed([chosen, *others])}. Choose one with --weights_prefix, like "
                f"WEIGHTS_PREFIX={self.prefixes[0] or self.prefixes[1]}"
            )
        left = f"; {self.left} of the file have no place in it" if self.left else ""
        lines = [
            f"loaded {found}, {100 * self.share:.4g} % of the backbone's parameters{left}. Prefix "
            f"in the file: {chosen}{', and not its average ' * bool(others)}{_listed(others)}"
        ]
        named = _listed([f"{key} ({why})" for key, why in self.new.items()])
        return lines + ([f"not loaded, so new: {named}"] if self.new else [])


def fitting(
    model: nn.Module,
    tensors: Dict[str, torch.Tensor],
    classes: int,
    typed_prefix: Optional[str] = None,
) -> Fit:
    """Find what of a file's tensors the model takes. Raises UserError for a prefix that fits
    nothing."""
    state, theirs = model.state_dict(), set(head(model, classes))
    plain = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
    backbone = {name: tensor for name, tensor in state.items() if name not in theirs}
    fits = _count_fits(plain, backbone)
    if typed_prefix is not None:
        fits = _with_prefix(fits, typed_prefix)
    # Of networks that fit equally well the one is taken of which the others are averages.
    best = max(fits.values())
    equal = sorted(way for way, count in fits.items() if count == best)
    if 2 * best < len(backbone):
        del equal[1:]  # it is another net, and refused as that
    trained = [way for way in equal if not AVERAGE.search(way[0])] or equal
    ways = trained + [way for way in equal if way not in trained]
    cut, added = ways[0]
    aligned = {name: tensor for name, tensor in plain.items() if not name.startswith(cut)}
    for name, tensor in plain.items():
        if name.startswith(cut):
            aligned[added + name[len(cut) :]] = tensor
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
    left = sum(name not in state for name in aligned)
    return Fit(loaded, new, left, share, [cut for cut, _ in ways], len(trained) == 1)


Way = Tuple[str, str]  # to the model's names: a prefix that is cut off, and one that is added


def _count_fits(
    tensors: Dict[str, torch.Tensor], backbone: Dict[str, torch.Tensor]
) -> "Counter[Way]":
    """Count how many tensors of the backbone each way finds, by name and shape."""
    fits: Counter[Way] = Counter({("", ""): 0})
    parts = Counter(name[: dot.end()] for name in backbone for dot in re.finditer("[.]", name))
    # Most of the model may be in a module that the file's network is.
    added = ["", *(part for part, count in parts.items() if 2 * count > len(backbone))]
    for name, tensor in tensors.items():
        dots = itertools.islice(re.finditer("[.]", name), LONGEST_PREFIX)
        for end in (0, *(dot.end() for dot in dots)):
            cut, rest = name[:end], name[end:]
            for more in added:
                ours = backbone.get(more + rest)
                # What is cut off and added again changes nothing.
                if ours is None or (more and cut.endswith(more)):
                    continue
                fits[cut, more] += ours.shape == tensor.shape or rest.split(".")[-1] in POSITIONS
    return fits


def _with_prefix(fits: "Counter[Way]", typed: str) -> "Counter[Way]":
    """Keep the ways of one prefix, which may lack the keys above it. Raises UserError."""
    whole = f"{typed.rstrip('.')}." if typed else ""
    cuts = {cut for cut, _ in fits if f".{cut}".endswith(f".{whole}")} if whole else {""}
    if not cuts:
        known = ", ".join(repr(cut) for (cut, _), _ in fits.most_common(SHOWN) if cut)
        raise UserError(
            f"--weights_prefix {typed}: no tensor behind it fits the model. Of the file these do: "
            f"{known or 'none'}."
        )
    return Counter({way: n for way, n in fits.items() if way[0] == min(cuts, key=len)})


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
