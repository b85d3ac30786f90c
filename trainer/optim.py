"""The optimizer and its learning rate."""

import inspect
import math
from typing import Any, Dict, List

import torch
from torch import nn

from .options import Options

NORMALISATIONS = (
    nn.modules.batchnorm._NormBase,  # batch and instance norm, SyncBatchNorm
    nn.LayerNorm,
    nn.GroupNorm,
    *([nn.RMSNorm] if hasattr(nn, "RMSNorm") else []),
)


def parameter_groups(model: nn.Module, options: Options) -> List[Dict[str, Any]]:
    """Two groups: weights, which decay by `weight_decay`, and normalisation layers (by their type)
    and biases (vectors), which decay by `norm_weight_decay`. A shared parameter belongs to the
    group of the first module that has it."""
    weights: List[nn.Parameter] = []
    others: List[nn.Parameter] = []
    seen = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            vector = isinstance(module, NORMALISATIONS) or parameter.ndim <= 1
            (others if vector else weights).append(parameter)
    groups = [
        {"params": weights, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": options.norm_weight_decay},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, options: Options, global_batch: int) -> torch.optim.Optimizer:
    """SGD or AdamW over `parameter_groups`; where all parameters are on CUDA, it is fused, or at
    least uses only a few kernels for all weights."""
    groups = parameter_groups(model, options)
    settings: Dict[str, Any] = {"lr": peak_lr(options, global_batch)}
    if options.optimizer == "sgd":
        kind: Any = torch.optim.SGD
        settings["momentum"] = options.momentum
    else:
        kind = torch.optim.AdamW
        settings.update(betas=(options.momentum, options.beta2))
    on_cuda = all(p.is_cuda for group in groups for p in group["params"])
    if on_cuda and "fused" in inspect.signature(kind).parameters:
        settings["fused"] = True
    elif on_cuda and "foreach" in inspect.signature(kind).parameters:
        settings["foreach"] = True  # torch 1.12 loops over the weights by default
    return kind(groups, **settings)


def peak_lr(options: Options, global_batch: int) -> float:
    """`lr`, or, where `lr_batch` is given, `lr` * global batch / `lr_batch` (Goyal et al.,
    "Accurate, Large Minibatch SGD", 2017)."""
    scale = global_batch / options.lr_batch if options.lr_batch else 1.0
    return options.lr * scale


def learning_rate(options: Options, step: float, steps_per_epoch: int, global_batch: int) -> float:
    """The learning rate of optimizer step `step` (from 0): linear warm-up, then the schedule."""
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
