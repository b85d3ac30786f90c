"""mixup and CutMix: an image is blended with its neighbour in the batch, or gets a rectangle of it.

The neighbour is found by rolling the batch by one: the order is random already, and a roll needs no
index tensor on the device.
"""

import dataclasses
import math
from random import Random
from typing import Callable, Optional, Sequence, Tuple

import torch

from contract.options import Options

from .order import derive_seed

Pair = Sequence[torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of outputs and targets


@dataclasses.dataclass(frozen=True)
class Mix:
    """`weight` is that of the image's own target. `box` (top, bottom, left, right) comes from the
    neighbour; where it is None, the whole image is blended."""

    weight: float
    box: Optional[Tuple[int, int, int, int]] = None


def plan_mix(options: Options, size: int, step: int, rank: int) -> Optional[Mix]:
    """How to mix a rank's batch of images of `size` pixels a side, drawn from (seed, global step,
    rank); None where neither is on.

    Zhang et al., "mixup", 2017; Yun et al., "CutMix", 2019. Where both are on, one is drawn.
    """
    rng = Random(derive_seed("mix", options.seed, step, rank))
    kinds = [kind for kind in ("mixup", "cutmix") if getattr(options, kind) > 0]
    if not kinds:
        return None
    kind = kinds[int(rng.random() * len(kinds))]
    alpha = getattr(options, kind)
    weight = rng.betavariate(alpha, alpha)
    if kind == "mixup":
        return Mix(weight)
    half = 0.5 * math.sqrt(1 - weight) * size
    row, column = rng.random() * size, rng.random() * size
    edges = (row - half, row + half, column - half, column + half)
    top, bottom, left, right = (min(size, max(0, round(edge))) for edge in edges)
    return Mix(1 - (bottom - top) * (right - left) / size**2, (top, bottom, left, right))


def mix_images(images: torch.Tensor, neighbours: torch.Tensor, mix: Mix) -> torch.Tensor:
    """Apply `mix` to floating-point images and their neighbours (n, 3, size, size), neither of
    which is changed. The result has the memory format of `images`."""
    if mix.box is None:
        # `images` comes first, since the result takes the first argument's format.
        return torch.lerp(images, neighbours, 1 - mix.weight)
    top, bottom, left, right = mix.box
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = neighbours[:, :, top:bottom, left:right]
    return mixed


def mixed_loss(
    loss: Loss, outputs: torch.Tensor, targets: Pair, mix: Optional[Mix]
) -> torch.Tensor:
    """`loss` against both targets, weighted. `targets` are the batch's own targets and the same
    rolled by one; the roll is done before a batch is split into micro-batches."""
    own = loss(outputs, targets[0])
    return own if mix is None else mix.weight * own + (1 - mix.weight) * loss(outputs, targets[1])
