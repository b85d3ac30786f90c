"""Builds models of timm by name (`--model timm:resnet50d`), and reads for which inputs they are
made. The stacks do not contain timm: `make train` sends it to machines that lack it."""

import difflib
import importlib
from typing import Any, Dict, NamedTuple, Tuple

from torch import nn

from contract.errors import UserError
from contract.options import TIMM


class Inputs(NamedTuple):
    """The side in pixels, the fraction of the short side that evaluation crops, and the means and
    deviations of the colours. `fixed`: the model must be built for another side."""

    size: int
    crop: float
    mean: Tuple[float, ...]
    std: Tuple[float, ...]
    fixed: bool


def read_inputs(name: str) -> Inputs:
    """Read the inputs that a model of timm is made for. Raises UserError for an unknown model."""
    _, config = _load_config(name)
    return Inputs(
        config.input_size[-1],
        config.crop_pct,
        tuple(config.mean),
        tuple(config.std),
        config.fixed_input_size,
    )


def build(name: str, num_classes: int, image_size: int, arguments: Dict[str, Any]) -> nn.Module:
    """Build an untrained model. Raises UserError, and what timm raises for `arguments`."""
    timm, config = _load_config(name)
    # Other models do not take this argument.
    size = {"img_size": image_size} if config.fixed_input_size else {}
    words = {"num_classes": num_classes, **size, **arguments}
    return timm.create_model(name[len(TIMM) :], pretrained=False, **words)


def _load_config(name: str) -> Tuple[Any, Any]:
    """Import timm; return it, and its `PretrainedCfg` of the model. Raises UserError."""
    # timm is in no stack, so that an import at the top of this file would fail.
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise UserError(
            f"--model {name}: timm is not installed here ({error}). `make train` installs it; "
            "otherwise type `pip install timm`."
        ) from error
    model = name[len(TIMM) :]
    if not timm.is_model(model):
        nearest = difflib.get_close_matches(model, timm.list_models(), 3)
        raise UserError(
            f"--model {name}: timm {timm.__version__} has no such model"
            f"{'; nearest: ' if nearest else ''}{', '.join(nearest)}."
        )
    # A model without pretrained weights has no config. A name may end in a tag of weights.
    try:
        return timm, timm.get_pretrained_cfg(model) or timm.models.PretrainedCfg()
    except RuntimeError as error:
        tags = ", ".join(timm.list_pretrained(f"{model.partition('.')[0]}.*")) or "none"
        raise UserError(f"--model {name}: timm has no such tag; it has {tags}.") from error
