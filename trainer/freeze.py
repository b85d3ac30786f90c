"""What of a model stays as it is while the rest is trained (`--freeze`)."""

import fnmatch
from typing import List, Set

from torch import nn

from contract.errors import UserError

from .models import head


def freeze(model: nn.Module, pattern: str, classes: int) -> List[nn.Module]:
    """Leave what `pattern` names as it is: its parameters get no gradients, and the modules that
    are returned, now in evaluation mode, keep their statistics. Raises UserError."""
    tensors = dict(model.named_parameters())
    names = [*tensors, *(name for name, _ in model.named_buffers())]
    frozen: Set[str] = set()
    for part in map(str.strip, pattern.split(",")):
        matched = {name for name in names if _matches(name, part)}
        if part == "backbone" and not matched:
            matched = set(names) - {*named_head(model, classes, f"--freeze {pattern}")}
        if not matched:
            own = ", ".join(name for name, _ in model.named_children())
            raise UserError(
                f"--freeze {pattern}: {part!r} is the name of no module or parameter of the model; "
                f"it has {own}."
            )
        frozen |= matched
    if not set(tensors) - frozen:
        raise UserError(f"--freeze {pattern}: then nothing is left to train: name less.")
    for name in frozen & set(tensors):
        tensors[name].requires_grad_(False)
    return _still(model, "", frozen)


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern names a tensor, or a module that it is in."""
    parts = name.split(".")
    whole = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(part, pattern) for part in whole)


def _still(module: nn.Module, prefix: str, frozen: Set[str]) -> List[nn.Module]:
    """Put the outermost modules that are wholly frozen into evaluation mode; returns them."""
    names = {prefix + n for n, _ in [*module.named_parameters(), *module.named_buffers()]}
    if names and names <= frozen:
        return [module.eval()]
    children = module.named_children()
    return [one for name, child in children for one in _still(child, f"{prefix}{name}.", frozen)]


def named_head(model: nn.Module, classes: int, asked: str) -> List[str]:
    """The names of the head's tensors. Raises UserError where the model has none."""
    names = head(model, classes)
    if not names:
        raise UserError(
            f"{asked}: the model has no linear layer with {classes} outputs as its head: name the "
            "modules by --freeze, and leave --head_lr out."
        )
    return names
