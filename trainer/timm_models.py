"""Build models of timm by name (`--model timm:resnet50d`), and read for which inputs they are made.
The software stacks do not contain timm: `make train` sends timm to machines that lack it."""

import difflib
import importlib
from typing import Any, Dict, NamedTuple, Tuple

from torch import nn

from contract.errors import UserError
from contract.options import TIMM


class Inputs(NamedTuple):
    """The images for which a model is made."""

    size: int  # pixels a side
    crop: float  # the part of the short side that evaluation crops, 0 to 1
    mean: Tuple[float, ...]  # of the colours, 0 to 1
    std: Tuple[float, ...]


def read_inputs(name: str) -> Inputs:
    """Read the inputs for which a model of timm is made. Raises UserError for an unknown model."""
    _, config = _load_config(name)
    size = config.input_size[-1]  # of (channels, height, width)
    return Inputs(size, config.crop_pct, tuple(config.mean), tuple(config.std))


def build(name: str, num_classes: int, image_size: int, arguments: Dict[str, Any]) -> nn.Module:
    """Build an untrained model. Raises UserError, and what timm raises for `arguments`."""
    timm, config = _load_config(name)
    # Only models for one size of images have this argument.
    size = {"img_size": image_size} if config.fixed_input_size else {}
    keywords = {"num_classes": num_classes, **size, **arguments}
    return timm.create_model(name[len(TIMM) :], pretrained=False, **keywords)


def _load_config(name: str) -> Tuple[Any, Any]:
    """Return the module timm, and its `PretrainedCfg` of the model. Raises UserError."""
    # Not every machine has timm, so an import at the top of this file could fail.
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
