"""Models by name: torchvision's classifiers or your own function, and their parameters and FLOPs.

ResNets keep torchvision's stem (stride 4) for small images too: 32-pixel digits reach 98 % with
it, and weights stay compatible with torchvision's. examples/own_backbone.py shows another stem.
"""

import difflib
import importlib
import inspect
import logging
from typing import Any, Callable, Dict, Optional, Tuple, cast

import torch
import torchvision
from torch import nn

from .classifiers import names
from .errors import UserError

log = logging.getLogger(__name__)

# Their auxiliary classifiers return tuples in training; without `init_weights`, they warn.
SPECIAL = ("googlenet", "inception_v3")
WITHOUT_AUXILIARY = {"aux_logits": False, "init_weights": True}


class WithHead(nn.Module):
    """A backbone with features (n, c, h, w) or (n, c), and a linear classifier on their mean."""

    def __init__(self, backbone: nn.Module, features: int, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.fc = nn.Linear(features, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.backbone(images)
        return self.fc(features.mean((2, 3)) if features.ndim == 4 else features)


def build(name: str, num_classes: int, image_size: int) -> nn.Module:
    """An untrained model with `num_classes` outputs. Raises UserError for unknown names and for
    models that do not take images of `image_size`."""
    model = _own(name, num_classes, image_size) if ":" in name else None
    if model is None:
        model = _torchvision(name, num_classes, image_size)
    shape = _output_shape(model, name, image_size)
    if shape != (1, num_classes):
        raise UserError(f"--model {name}: gives {shape} for one image, not (1, {num_classes}).")
    return model


def _torchvision(name: str, num_classes: int, image_size: int) -> nn.Module:
    known = names(torchvision.models)
    if name not in known:
        near = difflib.get_close_matches(name, known, 3) or known[:3]
        raise UserError(
            f"--model {name}: torchvision {torchvision.__version__} has no such classifier; "
            f"nearest: {', '.join(near)}. Your own: package.module:function."
        )
    settings: Dict[str, Any] = dict(WITHOUT_AUXILIARY if name in SPECIAL else {})
    if name.startswith("vit_"):
        settings["image_size"] = image_size
    if name.startswith("maxvit"):
        settings["input_size"] = (image_size, image_size)
    try:
        return getattr(torchvision.models, name)(weights=None, num_classes=num_classes, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"--model {name}: cannot be built with {settings}: {error}") from error


def _own(name: str, num_classes: int, image_size: int) -> nn.Module:
    model, takes_classes = _called(_find(name), num_classes)
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {name}: returned {type(model).__name__}, not a torch.nn.Module.")
    shape = _output_shape(model, name, image_size)
    if takes_classes and shape == (1, num_classes):
        return model
    if len(shape) not in (2, 4):
        raise UserError(
            f"--model {name}: returns {shape} for one image; features must be (n, channels) or "
            "(n, channels, height, width)."
        )
    log.info(
        f"{name}: on top comes a linear layer from its {shape[1]} outputs to {num_classes} classes"
    )
    return WithHead(model, shape[1], num_classes)


def _called(function: Callable[..., Any], num_classes: int) -> Tuple[Any, bool]:
    """What the function returns, and whether it accepted `num_classes`; like timm's functions, it
    may accept it through **kwargs."""
    parameters = inspect.signature(function).parameters
    behind = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if "num_classes" not in parameters and not behind:
        return function(), False
    try:
        return function(num_classes=num_classes), True
    except TypeError as error:
        if not behind or "num_classes" not in str(error):
            raise
    return function(), False


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"--model {name}: cannot import {module_name}: {error}.") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"--model {name}: {module_name} has no function {function_name!r}; "
            f"it has {', '.join(own) or 'none'}."
        )
    return function


def _one_image(model: nn.Module, image_size: int) -> Any:
    """The output for one blank image, in evaluation mode: no buffer changes, and no random numbers
    are drawn."""
    model.eval()
    with torch.no_grad():
        output = model(torch.zeros(1, 3, image_size, image_size))
    model.train()
    return output


def _output_shape(model: nn.Module, name: str, image_size: int) -> Tuple[int, ...]:
    try:
        output = _one_image(model, image_size)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(
            f"--model {name}: does not take images of {image_size} x {image_size} pixels "
            f"(--image_size): {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(output, torch.Tensor):
        raise UserError(f"--model {name}: returns {type(output).__name__}, not one tensor.")
    return tuple(output.shape)


def describe(model: nn.Module, image_size: int) -> Tuple[int, Optional[int]]:
    """(number of parameters, floating-point operations of one image's forward or None).

    Convolutions, linear layers and nn.MultiheadAttention are counted; a multiplication and an
    addition count as two. None where a layer was not called as a module (Swin only uses its
    weights), since most operations would then be missing. The model and the random generators are
    left as they were.
    """
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    operations: Dict[nn.Module, int] = dict.fromkeys(layers, 0)

    def count(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(module, nn.MultiheadAttention):
            _, length, width = output[0].shape
            # Four projections of each token; attention scores, and weighted sums, over all tokens.
            operations[module.out_proj] += 2 * length * width * (4 * width + 2 * length)
        else:
            # A weight's first dimension is the output channels; the rest make one output element.
            operations[module] += 2 * output.numel() * cast(torch.Tensor, module.weight)[0].numel()

    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    hooks = [module.register_forward_hook(count) for module in layers + attentions]
    _one_image(model, image_size)
    for hook in hooks:
        hook.remove()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, sum(operations.values()) if all(operations.values()) else None


def last_linear(model: nn.Module) -> Optional[nn.Module]:
    """The classifier, whose input is an image's embedding."""
    linear = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    return linear[-1] if linear else None
