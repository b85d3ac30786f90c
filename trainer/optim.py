"""Build the optimizer, load its state from a checkpoint, and compute its learning rate."""

import importlib
import inspect
import math
from typing import Any, Collection, Dict, List, Tuple

import torch
from torch import nn

from contract.errors import UserError
from contract.options import OPTIMIZERS, Options
from tandem.compat import is_plain

NORMALISATIONS = (
    nn.modules.batchnorm._NormBase,  # batch and instance norm, SyncBatchNorm
    nn.LayerNorm,
    nn.GroupNorm,
    *([nn.RMSNorm] if hasattr(nn, "RMSNorm") else []),
)


def parameter_groups(
    model: nn.Module, options: Options, head: Collection[str] = ()
) -> List[Dict[str, Any]]:
    """Make two groups for torch's optimizers: weights, which decay by `weight_decay`, and biases
    and normalisation layers, which decay by `norm_weight_decay`. The parameters named in `head`
    make two more groups, whose learning rate is `head_lr` times as high. A parameter that modules
    share belongs to the group of the first of these modules."""
    heads = {parameter for name, parameter in model.named_parameters() if name in head}
    groups: Dict[Tuple[bool, bool], List[nn.Parameter]] = {}
    grouped = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter in grouped or not parameter.requires_grad:
                continue
            grouped.add(parameter)
            is_vector = isinstance(module, NORMALISATIONS) or parameter.ndim <= 1
            groups.setdefault((parameter in heads, is_vector), []).append(parameter)
    return [
        {
            "params": groups[in_head, is_vector],
            "weight_decay": options.norm_weight_decay if is_vector else options.weight_decay,
            "lr_factor": options.head_lr if in_head else 1.0,
        }
        for in_head, is_vector in sorted(groups)
    ]


def build_optimizer(
    model: nn.Module, options: Options, global_batch: int, head: Collection[str] = ()
) -> torch.optim.Optimizer:
    """Build the options' optimizer over `parameter_groups`."""
    groups = parameter_groups(model, options, head)
    row = OPTIMIZERS[options.optimizer]
    module, _, name = row.maker.partition(":")  # such as torch.optim:SGD
    optimizer_class: Any = getattr(importlib.import_module(module), name)
    settings = {"lr": peak_lr(options, global_batch), **row.arguments(options)}
    # On CUDA few kernels step all weights. torch 1.12 would loop over the weights by default.
    parameters = inspect.signature(optimizer_class).parameters
    if all(weight.is_cuda for group in groups for weight in group["params"]):
        if "fused" in parameters:
            settings["fused"] = True
        elif "foreach" in parameters:
            settings["foreach"] = True
    return optimizer_class(groups, **settings)


def load_state(optimizer: torch.optim.Optimizer, state: Dict[str, Any], options: Options) -> None:
    """Load the tensors of each weight, such as momenta, from the `state_dict` of an optimizer of
    the same class. Raises UserError for a state that does not fit."""
    # The settings of `optimizer` stay. They follow from the options, and `fused` from device and
    # torch, which may differ from those that saved the state.
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    saved = state.get("state")
    if _group_sizes(state) != _group_sizes(optimizer.state_dict()) or not isinstance(saved, dict):
        raise UserError("the checkpoint's optimizer belongs to a model with other weights.")
    row, entries = OPTIMIZERS[options.optimizer], {}
    for place, entry in saved.items():
        if type(place) is not int or not 0 <= place < len(weights) or not isinstance(entry, dict):
            raise _invalid_state(place)
        # Only the tensors that OPTIMIZERS names are loaded.
        tensors: Dict[str, torch.Tensor] = {}
        for name in row.keeps(options):
            value: Any = entry.get(name)
            if value is None and not row.counts:
                continue  # the optimizer makes this tensor in the weight's first step
            if not is_plain(value):
                raise _invalid_state(place)
            if value.shape != weights[place].shape or not value.is_floating_point():
                raise _invalid_state(place)
            tensors[name] = value
        if row.counts:
            # torch before 1.12 keeps a number, newer versions a tensor of one.
            count: Any = entry.get("step")
            if is_plain(count) and count.numel() == 1:
                count = count.item()
            if type(count) not in (int, float) or not 0 <= count < 2**53:
                raise _invalid_state(place)
            tensors["step"] = torch.tensor(float(count))
        entries[place] = tensors
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _group_sizes(state: Dict[str, Any]) -> List[int]:
    """Count the weights in each group; [] for a damaged state."""
    groups = state.get("param_groups")
    if not isinstance(groups, list):
        return []
    lists = [group.get("params") if isinstance(group, dict) else None for group in groups]
    return [len(group) for group in lists if isinstance(group, list)]


def _invalid_state(place: object) -> UserError:
    return UserError(
        f"the checkpoint's optimizer state of weight {str(place)[:20]} is missing or invalid. "
        "Use an older checkpoint, or --weights to load only its model."
    )


def peak_lr(options: Options, global_batch: int) -> float:
    """Return `lr`, times global batch / `lr_batch` if `lr_batch` is given (Goyal et al., "Accurate,
    Large Minibatch SGD", 2017)."""
    scale = global_batch / options.lr_batch if options.lr_batch else 1.0
    return options.lr * scale


def learning_rate(options: Options, step: float, steps_per_epoch: int, global_batch: int) -> float:
    """Return the learning rate of step `step`, from 0: linear warm-up, then the schedule."""
    peak, epoch = peak_lr(options, global_batch), step / steps_per_epoch
    warmup = min(options.warmup_epochs, options.epochs)
    if epoch < warmup:
        return peak * (options.warmup_factor + (1 - options.warmup_factor) * epoch / warmup)
    if options.schedule == "constant":
        return peak
    if options.schedule == "step":
        return peak * options.step_gamma ** sum(epoch >= drop for drop in options.step_epochs)
    progress = min(1.0, (epoch - warmup) / max(options.epochs - warmup, 1e-9))
    return options.min_lr + (peak - options.min_lr) * (1 + math.cos(math.pi * progress)) / 2
