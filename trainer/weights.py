"""Start a run from somebody's weights of the same net, perhaps for other classes (--weights).

Files hold weights below different keys, in torch's format or in safetensors'. Names may have the
prefixes of DDP, of torch.compile, or of the net to which a backbone belonged. `fit_tensors` finds
the prefix. Tensors that fit by name and shape are loaded, and the log lists the missing tensors.
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
from .models import find_head
from .snapshots import SNAPSHOT, tensors_in

log = logging.getLogger(__name__)

# The keys of state dicts in files of Tandem, torchvision, timm and Lightning.
STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict", "model_ema", "state_dict_ema")
# Somebody else may have chosen a file's keys: these limits bound the time and memory for them.
MAX_DEPTH = 3  # of dicts in dicts
LONGEST_NAME = 1000  # characters, with the keys above: all tensors below a long key repeat the key
LONGEST_PREFIX = 20  # parts of a name that are tried as its prefix
# In the prefix of an average of weights: `ema.`, `model_ema.`, `averaged_model.`
AVERAGE = re.compile(r"(^|[._])(ema|averaged?|avg|swa)([._]|$)")
SHOWN = 4  # names of tensors in a sentence
POSITIONS = ("pos_embed", "pos_embedding")  # the last part of the name of a transformer's positions


class TrainedModel(NamedTuple):
    """Tensors and classes of a checkpoint. A file that has only weights names no classes."""

    tensors: Dict[str, torch.Tensor]
    classes: Optional[List[str]]


def read_weights(file: str, average: bool = False) -> TrainedModel:
    """Read --weights, an exported state dict or a checkpoint. Return all tensors by their names
    with the keys above them, such as `model.fc.weight`. With `average`, return instead only the
    model that a run evaluates, by its own names: the average if there is one. Raises UserError."""
    name = f"--weights {file}"
    try:
        with pathlib.Path(file).open("rb") as content:
            # A file of safetensors begins with 8 bytes, its header's length. The header begins
            # with {.
            content.seek(8)
            if content.read(1) == b"{":
                return TrainedModel(safetensors.read(name, content), None)
            state = load(name, content)
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}.") from error
    # Check only the fields that are used: the checkpoint may be of another version. SNAPSHOT holds
    # a function that checks each field.
    classes = state.get("classes")
    class_names = classes if classes and SNAPSHOT["classes"](classes) else None
    if not average:
        tensors = dict(_iterate_tensors(state))
        return TrainedModel(tensors_in(name, tensors or None), class_names)
    ema = state.get("ema")
    if isinstance(ema, dict):
        return TrainedModel(tensors_in(name, ema.get("average")), class_names)
    key = next((key for key in STATE_DICT_KEYS if isinstance(state.get(key), dict)), None)
    return TrainedModel(tensors_in(name, state[key] if key else state), class_names)


def _iterate_tensors(
    state: Dict[Any, Any], prefix: str = "", depth: int = 0
) -> Iterable[Tuple[str, Any]]:
    """Yield the tensors of a file by their names, with the keys above them."""
    for key, value in state.items():
        if not isinstance(key, str) or len(prefix) + len(key) > LONGEST_NAME:
            continue
        if is_plain(value):
            yield prefix + key, value
        elif isinstance(value, dict) and depth < MAX_DEPTH:
            yield from _iterate_tensors(value, f"{prefix}{key}.", depth + 1)


def start_from_weights(job: Job) -> None:
    """Start from the model of --weights. Collective."""
    name, class_names = f"--weights {job.options.weights}", job.train_set.classes
    with job.world.raise_on_all_ranks():
        trained = read_weights(job.options.weights or "")
        typed_prefix = job.options.weights_prefix
        fit = fit_tensors(job.model, trained.tensors, len(class_names), typed_prefix)
        lines = fit.accept(name, job.options.model)
        refuse_not_finite(job.model, fit.tensors)
        job.model.load_state_dict(fit.tensors, strict=False)
        # Masters and average were made of the random weights that have just been replaced.
        job.precision.renew_masters(job.model, fit.tensors)
        if job.ema is not None:
            job.ema.begin(job.precision.full_state(job.model))
    for line in lines:
        log.info(f"{name}: {line}")
    if trained.classes is not None and (changes := class_changes(trained.classes, class_names)):
        log.info(f"{name}: its model was trained on other classes ({changes})")


class Renaming(NamedTuple):
    """Turns a file's names into a model's: cuts one prefix off, and adds another prefix. With
    ("model.", "backbone.") the file's `model.conv1.weight` becomes `backbone.conv1.weight`."""

    cut: str
    added: str


class Fit(NamedTuple):
    """The tensors of a file that fit a model."""

    tensors: Dict[str, torch.Tensor]  # by the model's names
    missing: Dict[str, str]  # each tensor of the model that the file lacks -> the reason
    unplaced_count: int  # tensors of the file that the model lacks
    backbone_share: float  # the loaded part of the backbone's parameters, 0 to 1
    prefixes: List[str]  # of all networks in the file that fit equally well, the chosen first
    is_settled: bool  # all networks except the chosen network are averages

    def accept(self, name: str, model: str) -> List[str]:
        """Return lines that say what will be loaded. `name`: what messages call the file. `model`:
        the value of --model. Raises UserError if the file has less than half of the backbone, or
        several networks that fit equally well."""
        total = len(self.tensors) + len(self.missing)
        loaded = f"{len(self.tensors)} of the {pluralize(total, 'tensor')} of --model {model}"
        if self.backbone_share < 0.5:
            raise UserError(
                f"{name} contains only {loaded}, {100 * self.backbone_share:.0f} % of the "
                f"backbone's parameters ({_list_names(self.missing)}), so it belongs to "
                "another model. Use the model of these weights, or weights of this model."
            )
        chosen, *other_prefixes = (
            repr(prefix) if prefix else "no prefix" for prefix in self.prefixes
        )
        if not self.is_settled:
            raise UserError(
                f"{name} contains several models that fit --model {model} equally well. Their "
                f"prefixes: {_list_names([chosen, *other_prefixes])}. Choose one with "
                "--weights_prefix, such as "
                f"WEIGHTS_PREFIX={self.prefixes[0] or self.prefixes[1]}"
            )
        count = self.unplaced_count
        unplaced = f"; the model has no place for {count} of the file" if count else ""
        averages = f", and not its average {_list_names(other_prefixes)}" if other_prefixes else ""
        lines = [
            f"loaded {loaded}, {100 * self.backbone_share:.4g} % of the backbone's parameters"
            f"{unplaced}. Prefix in the file: {chosen}{averages}"
        ]
        if self.missing:
            missing = _list_names([f"{key} ({reason})" for key, reason in self.missing.items()])
            lines.append(f"not loaded, but initialized: {missing}")
        return lines


def fit_tensors(
    model: nn.Module,
    tensors: Dict[str, torch.Tensor],
    classes: int,
    typed_prefix: Optional[str] = None,
) -> Fit:
    """Match a file's `tensors` with `model`, a net for `classes` classes, by name and shape.
    `typed_prefix`: the user's choice among the file's networks. Raises UserError for a prefix that
    fits nothing."""
    state, head_names = model.state_dict(), set(find_head(model, classes))
    # torch.compile puts this part into the names of the modules that it has wrapped.
    plain = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
    backbone = {name: tensor for name, tensor in state.items() if name not in head_names}
    fits = _count_fits(plain, backbone)
    if typed_prefix is not None:
        fits = _keep_prefix(fits, typed_prefix)
    best_count = max(fits.values())
    best_renamings = sorted(renaming for renaming, count in fits.items() if count == best_count)
    # The file has another net, which `Fit.accept` will refuse whatever the prefix is.
    if 2 * best_count < len(backbone):
        del best_renamings[1:]
    # Among networks that fit equally well, choose the network that is no average.
    candidates = [renaming for renaming in best_renamings if not AVERAGE.search(renaming.cut)]
    candidates = candidates or best_renamings
    renamings = candidates + [r for r in best_renamings if r not in candidates]
    cut, added = renamings[0]
    # Tensors outside the chosen network keep their names, and count as unplaced below.
    aligned = {name: tensor for name, tensor in plain.items() if not name.startswith(cut)}
    for name, tensor in plain.items():
        if name.startswith(cut):
            aligned[added + name[len(cut) :]] = tensor
    loaded: Dict[str, torch.Tensor] = {}
    missing: Dict[str, str] = {}
    for name, expected in state.items():
        value = aligned.get(name)
        # A transformer for another image size differs only in the number of its positions.
        if value is not None and value.shape != expected.shape and name.split(".")[-1] in POSITIONS:
            value = _resize_positions(value, expected)
        if value is None and name.endswith("num_batches_tracked"):
            value = expected  # a counter: not in old files, and used only without a momentum
        if value is None:
            missing[name] = "not there"
        elif value.shape != expected.shape:
            missing[name] = f"{_describe_shape(value)} there, {_describe_shape(expected)} here"
        else:
            loaded[name] = value
    parameters = model.named_parameters()
    sizes = {name: weight.numel() for name, weight in parameters if name not in head_names}
    total = sum(sizes.values())
    # A net that is all head has no backbone to lack.
    backbone_share = sum(sizes.get(name, 0) for name in loaded) / total if total else 1.0
    return Fit(
        tensors=loaded,
        missing=missing,
        unplaced_count=sum(name not in state for name in aligned),
        backbone_share=backbone_share,
        prefixes=[renaming.cut for renaming in renamings],
        is_settled=len(candidates) == 1,
    )


def _count_fits(
    tensors: Dict[str, torch.Tensor], backbone: Dict[str, torch.Tensor]
) -> "Counter[Renaming]":
    """Count how many tensors of the backbone each renaming finds, by name and shape. A renaming
    that finds only names has the count 0."""
    fits: Counter[Renaming] = Counter({Renaming("", ""): 0})
    # Count each module's tensors: `layer1.0.conv1.weight` is one of `layer1.`, `layer1.0.` and so
    # on.
    modules = Counter(name[: dot.end()] for name in backbone for dot in re.finditer("[.]", name))
    # The file may hold only one module of the model, if this module has most of the tensors: a
    # backbone, for example. Its names in the file lack the module's prefix.
    large_modules = [module for module, count in modules.items() if 2 * count > len(backbone)]
    added_prefixes = ["", *large_modules]
    for name, tensor in tensors.items():
        dots = itertools.islice(re.finditer("[.]", name), LONGEST_PREFIX)
        for end in (0, *(dot.end() for dot in dots)):
            cut, suffix = name[:end], name[end:]
            for added in added_prefixes:
                expected = backbone.get(added + suffix)
                # A prefix that is cut off and added again changes nothing.
                if expected is None or (added and cut.endswith(added)):
                    continue
                is_fitting = expected.shape == tensor.shape or suffix.split(".")[-1] in POSITIONS
                fits[Renaming(cut, added)] += is_fitting
    return fits


def _keep_prefix(fits: "Counter[Renaming]", typed: str) -> "Counter[Renaming]":
    """Keep the renamings that cut off the prefix `typed`. Raises UserError if there are none."""
    # The user may omit the file's keys above the net: `encoder` also means `state_dict.encoder.`
    ending = f"{typed.rstrip('.')}." if typed else ""
    cuts = {cut for cut, _ in fits if f".{cut}".endswith(f".{ending}")} if ending else {""}
    if not cuts:
        examples = ", ".join(repr(cut) for (cut, _), _ in fits.most_common(SHOWN) if cut)
        raise UserError(
            f"--weights_prefix {typed}: no tensor with this prefix fits the model. These "
            f"tensors of the file fit: {examples or 'none'}."
        )
    # Several cuts may end with the prefix: keep the shortest cut.
    shortest = min(cuts, key=len)
    return Counter({renaming: n for renaming, n in fits.items() if renaming.cut == shortest})


def _resize_positions(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Scale a transformer's positions (1, tokens, width) to the image size of `target`. Return
    `value` unchanged unless both consist of the same number of extra tokens and a square."""
    if value.ndim != 3 or target.ndim != 3 or value.shape[2] != target.shape[2]:
        return value
    source_side, target_side = math.isqrt(value.shape[1]), math.isqrt(target.shape[1])
    extra_tokens = value.shape[1] - source_side**2
    if extra_tokens != target.shape[1] - target_side**2 or len(value) != 1:
        return value
    # The extra tokens (class, registers) come first and have no place in the image.
    grid = value[:, extra_tokens:].float().reshape(1, source_side, source_side, -1)
    grid = grid.permute(0, 3, 1, 2)
    grid = functional.interpolate(grid, (target_side, target_side), mode="bicubic", antialias=True)
    flat = grid.permute(0, 2, 3, 1).flatten(1, 2).to(value.dtype)
    return torch.cat([value[:, :extra_tokens], flat], 1)


def _describe_shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def _list_names(names: Iterable[str]) -> str:
    listed = list(names)
    ending = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + ending
