"""Build models by name, from torchvision, timm or a user's function; count parameters and FLOPs.

build.py calls `build`, and check.py calls `try_out` before a run. ResNets keep torchvision's stem
(stride 4) for small images too: 32-pixel digits reach 98 % with this stem, and weights stay
compatible with torchvision's. examples/own_backbone.py shows another stem.
"""

import difflib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import pathlib
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, cast

import torch
import torchvision
from torch import nn
from torch.nn import functional

from contract.errors import UserError
from contract.options import TIMM

from . import timm_models
from .classifiers import classifier_names

log = logging.getLogger(__name__)

# With auxiliary classifiers, these models return tuples in training. Without an explicit
# `init_weights`, they warn.
WITH_AUXILIARY = ("googlenet", "inception_v3")
NO_AUXILIARY = {"aux_logits": False, "init_weights": True}


class WithHead(nn.Module):
    """A backbone with features (n, c, h, w) or (n, c), and a linear classifier on their mean."""

    def __init__(self, backbone: nn.Module, features: int, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.fc = nn.Linear(features, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.backbone(images)
        return self.fc(features.mean((2, 3)) if features.ndim == 4 else features)


def build(
    name: str, num_classes: int, image_size: int, arguments: Optional[Dict[str, Any]] = None
) -> nn.Module:
    """Build an untrained model with `num_classes` outputs for images of `image_size` pixels a side.

    `name`: "resnet50" of torchvision, "timm:resnet50d", or a user's "package.module:function".
    `arguments`: more arguments for the model's function. Raises UserError for an unknown name, for
    arguments that the function does not take, and for a model that does not take such images."""
    if name.startswith(TIMM):
        make = timm_models.build
    else:
        make = _build_user_model if ":" in name else _build_torchvision_model
    try:
        model = make(name, num_classes, image_size, arguments or {})
        shape = _read_output_shape(model, name, image_size)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        # The author of a model's function needs the whole traceback, and not only its last line.
        if not arguments and make is _build_user_model:
            raise
        clause = f" with --model_args {json.dumps(arguments)}" if arguments else ""
        raise UserError(f"--model {name}: cannot be built{clause}: {error}") from error
    if shape != (1, num_classes):
        raise UserError(f"--model {name}: gives {shape} for one image, not (1, {num_classes}).")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError(f"--model {name}: it has no parameters to train.")
    return model


def _build_torchvision_model(
    name: str, num_classes: int, image_size: int, arguments: Dict[str, Any]
) -> nn.Module:
    """Build a classifier of torchvision. Raises UserError for an unknown name, and what torchvision
    raises for `arguments`."""
    names = classifier_names()
    if name not in names:
        nearest = difflib.get_close_matches(name, names, 3) or names[:3]
        raise UserError(
            f"--model {name}: torchvision {torchvision.__version__} has no such classifier; "
            f"nearest: {', '.join(nearest)}. Your own: package.module:function."
        )
    settings: Dict[str, Any] = dict(NO_AUXILIARY if name in WITH_AUXILIARY else {})
    # These transformers have positions for one image size.
    if name.startswith("vit_"):
        settings["image_size"] = image_size
    if name.startswith("maxvit"):
        settings["input_size"] = (image_size, image_size)
    keywords = {"weights": None, "num_classes": num_classes, **settings, **arguments}
    return getattr(torchvision.models, name)(**keywords)


def _build_user_model(
    name: str, num_classes: int, image_size: int, arguments: Dict[str, Any]
) -> nn.Module:
    """Build a user's classifier, or the user's backbone with a linear classifier on its features.
    Raises UserError, and what the user's function raises."""
    function = _find_function(name)
    parameters = inspect.signature(function).parameters
    # Like timm's functions, the user's function may take `num_classes` through **kwargs.
    has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_classes = has_kwargs or "num_classes" in parameters
    model: Any = None
    if takes_classes:
        try:
            model = function(num_classes=num_classes, **arguments)
        except TypeError as error:
            # The function may pass **kwargs to another function, which has no `num_classes`.
            if not has_kwargs or "num_classes" not in str(error):
                raise
            takes_classes = False
    if not takes_classes:
        model = function(**arguments)
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {name}: returned {type(model).__name__}, not a torch.nn.Module.")
    shape = _read_output_shape(model, name, image_size)
    # A function that took `num_classes` and returns as many scores has built a classifier.
    if takes_classes and shape == (1, num_classes):
        return model
    if len(shape) not in (2, 4):
        raise UserError(
            f"--model {name}: returns {shape} for one image; features must be (n, channels) or "
            "(n, channels, height, width)."
        )
    log.info(
        f"{name}: Tandem adds a linear layer from its {shape[1]} outputs to {num_classes} classes"
    )
    return WithHead(model, shape[1], num_classes)


def _find_function(name: str) -> Callable[..., Any]:
    """Import "package.module:function" or "path/file.py:function". Raises UserError."""
    module_name, _, function_name = name.rpartition(":")
    try:
        if module_name.endswith(".py"):
            # The launcher copies the file's folder to this machine, and names the copy here.
            path = pathlib.Path(module_name)
            folder = os.environ.get("TANDEM_MODEL_FOLDER", path.parent)
            file = pathlib.Path(folder, path.name).resolve()
            # Like a script, the file may import the modules in its folder.
            if str(file.parent) not in sys.path:
                sys.path.insert(0, str(file.parent))
            # The file may have the name of a module that is loaded already.
            new_name = file.stem if file.stem not in sys.modules else f"{file.stem}_of_model"
            spec = cast(ModuleSpec, importlib.util.spec_from_file_location(new_name, file))
            module = sys.modules[new_name] = importlib.util.module_from_spec(spec)
            cast(Loader, spec.loader).exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except FileNotFoundError as error:
        raise UserError(f"--model {name}: there is no file {error.filename}.") from error
    except ImportError as error:
        raise UserError(f"--model {name}: cannot import {module_name}: {error}.") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"--model {name}: {module_name} has no function {function_name!r}; "
            f"it has {', '.join(functions) or 'none'}."
        )
    return function


def _run_one_image(model: nn.Module, image_size: int) -> Any:
    """Return the output for one blank image."""
    # In evaluation mode no buffer changes, and no random numbers are drawn.
    model.eval()
    with torch.no_grad():
        output = model(torch.zeros(1, 3, image_size, image_size))
    model.train()
    return output


def _read_output_shape(model: nn.Module, name: str, image_size: int) -> Tuple[int, ...]:
    """Return the shape of the output for one blank image. Raises UserError if there is none."""
    try:
        output = _run_one_image(model, image_size)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(
            f"--model {name}: does not take images of {image_size} x {image_size} pixels "
            f"(--image_size): {str(error).splitlines()[0]}"
        ) from error
    return tuple(_check_tensor(output, name).shape)


def _check_tensor(output: Any, name: str) -> torch.Tensor:
    """Return a model's output. Raises UserError if it is not one tensor."""
    if not isinstance(output, torch.Tensor):
        raise UserError(
            f"--model {name}: returns {type(output).__name__}, not one tensor: return only the "
            "scores of the classes."
        )
    return output


class Cost(NamedTuple):
    """The size of a model, and its work for an image."""

    parameters: int
    flops: Optional[int]  # floating-point operations of one image's forward; None if unknown


def measure_cost(model: nn.Module, image_size: int) -> Cost:
    """Count a model's parameters, and the floating-point operations of one image's forward.

    The function counts convolutions, linear layers and nn.MultiheadAttention; a multiplication and
    an addition count as two. The operations are None if a layer was not called as a module: Swin
    uses only the weights of its layers, so most operations would be missing. The model and the
    random generators stay unchanged.
    """
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    operations: Dict[nn.Module, int] = dict.fromkeys(layers, 0)

    def count(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(module, nn.MultiheadAttention):
            _, length, width = output[0].shape  # (1, tokens, width)
            # The module uses the weights of `out_proj`, but does not call `out_proj`.
            # Four projections of each token; attention scores, and weighted sums, over all tokens.
            operations[module.out_proj] += 2 * length * width * (4 * width + 2 * length)
        else:
            # `weight[0]` holds the numbers that make one output element.
            operations[module] += 2 * output.numel() * cast(torch.Tensor, module.weight)[0].numel()

    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    hooks = [module.register_forward_hook(count) for module in layers + attentions]
    _run_one_image(model, image_size)
    for hook in hooks:
        hook.remove()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, sum(operations.values()) if all(operations.values()) else None)


def last_linear(model: nn.Module) -> Optional[nn.Module]:
    """Return the classifier, whose input is an image's embedding, or None if there is none."""
    linear = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    return linear[-1] if linear else None


def find_head(model: nn.Module, classes: int) -> List[str]:
    """Return the names of the tensors that turn features into the classes' scores, such as
    ["fc.weight", "fc.bias"]; [] if there are none. The tensors belong to the last layer with
    `classes` outputs, or to the classifier that a model of timm names."""
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    scoring_layers = [m for m in layers if len(m.weight) == classes][-1:]  # the last, or none
    if hasattr(model, "get_classifier"):
        classifier = cast(Any, model).get_classifier()  # a tuple for a distilled model
        classifiers = classifier if isinstance(classifier, tuple) else (classifier,)
        scoring_layers = [m for m in classifiers if m in layers]
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    return [prefixes[module] + key for module in scoring_layers for key in module.state_dict()]


# Image sizes for `try_out` if the user gives none: a user's model may take only one of them.
TRIAL_SIZES = (224, 32, 64, 128)
TRIAL_CLASSES = 10


def try_out(
    name: str, image_size: Optional[int], unused_allowed: bool, arguments: Dict[str, Any]
) -> Tuple[nn.Module, List[str]]:
    """Build a model and compute one step's gradients. Return the model, and notes for the user.
    `unused_allowed`: a parameter without a gradient is no error. Raises UserError."""
    if image_size is None and name.startswith(TIMM):
        image_size = timm_models.read_inputs(name).size
    sizes = (image_size,) if image_size else TRIAL_SIZES
    for size in sizes:
        try:
            model = build(name, TRIAL_CLASSES, size, arguments)
            break
        except UserError as error:
            # `_read_output_shape` says so. Any other error would be the same with another size.
            if "does not take images" not in str(error) or size == sizes[-1]:
                raise
    images = torch.rand(2, 3, size, size)
    # Some models return more in training than in evaluation, and `build` has tried evaluation.
    _check_tensor((model.backbone if isinstance(model, WithHead) else model)(images), name)
    functional.cross_entropy(model(images), torch.tensor([0, 1])).backward()
    weights = [(key, weight) for key, weight in model.named_parameters() if weight.requires_grad]
    unused = [key for key, weight in weights if weight.grad is None]
    if unused and not unused_allowed:
        raise UserError(
            f"--model {name}: the output does not depend on {unused[0]} ({len(unused)} of "
            f"{len(weights)} parameters), so the ranks would wait for its gradient forever: "
            "remove it, or add --find_unused_parameters"
        )
    if not isinstance(model, WithHead):
        return model, []
    # A backbone that ends in a linear layer may be a classifier already.
    count, classifier = model.fc.in_features, last_linear(model.backbone)
    if not isinstance(classifier, nn.Linear) or classifier.out_features != count:
        return model, []
    return model, [
        f"--model {name}: Tandem adds a linear layer after its {count} outputs. If the "
        "outputs already are class scores, give the function a parameter num_classes"
    ]
