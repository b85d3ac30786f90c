"""Freezing a part of a model while the remaining parts are trained (`--freeze`)."""

import fnmatch
from typing import Dict, List, Set

from torch import nn

from contract.errors import UserError

from .models import find_head


def freeze(model: nn.Module, pattern: str, classes: int) -> List[nn.Module]:
    """Freeze the modules and parameters that `pattern` names, such as "conv1,layer*": their
    parameters get no gradients. Return the outermost modules that are wholly frozen. They are now
    in evaluation mode, and so keep their statistics. Raises UserError."""
    tensors = dict(model.named_parameters())
    # Buffers count, too: frozen normalisation keeps its statistics.
    names = [*tensors, *(name for name, _ in model.named_buffers())]
    # A pattern names a tensor or a module: for a.b.weight the paths are a, a.b and a.b.weight.
    paths: Dict[str, List[str]] = {}
    for name in names:
        words = name.split(".")
        paths[name] = [".".join(words[:end]) for end in range(1, len(words) + 1)]
    frozen: Set[str] = set()
    for entry in map(str.strip, pattern.split(",")):
        matched = {name for name in names if fnmatch.filter(paths[name], entry)}
        # `backbone` means everything but the head, unless a module has that name.
        if entry == "backbone" and not matched:
            matched = set(names) - {*named_head(model, classes, f"--freeze {pattern}")}
        if not matched:
            modules = ", ".join(name for name, _ in model.named_children())
            raise UserError(
                f"--freeze {pattern}: the model has no module or parameter {entry!r}; it has "
                f"{modules}."
            )
        frozen |= matched
    if not set(tensors) - frozen:
        raise UserError(
            f"--freeze {pattern} freezes all parameters, so nothing would be trained: freeze "
            "fewer modules."
        )
    for name in frozen & set(tensors):
        tensors[name].requires_grad_(False)
    return _freeze_modules(model, "", frozen)


def _freeze_modules(module: nn.Module, prefix: str, frozen: Set[str]) -> List[nn.Module]:
    """Put the outermost modules that are wholly frozen into evaluation mode; return them."""
    names = {prefix + n for n, _ in [*module.named_parameters(), *module.named_buffers()]}
    if names and names <= frozen:
        return [module.eval()]
    modules: List[nn.Module] = []
    for name, child in module.named_children():
        modules += _freeze_modules(child, f"{prefix}{name}.", frozen)
    return modules


def named_head(model: nn.Module, classes: int, flag: str) -> List[str]:
    """Return the names of the head's tensors. Raises UserError if the model has no head; `flag`:
    the user's option that needs one."""
    names = find_head(model, classes)
    if not names:
        raise UserError(
            f"{flag}: the model has no linear layer with {classes} outputs as its head: name the "
            "modules by --freeze, and leave --head_lr out."
        )
    return names
