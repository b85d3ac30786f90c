"""Move a rank's batch from the loader to the model: copy, normalise and mix it; choose its loss.

mixup blends an image with its neighbour in the batch. CutMix copies a rectangle of the neighbour.
The neighbour is the image before: `images.roll(1, 0)`. The order of a batch is random already, and
a roll needs no index tensor on the device. step.py calls these functions.
"""

import dataclasses
import hashlib
import math
from functools import partial
from random import Random
from typing import Callable, Optional, Sequence, Tuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from contract.options import Options

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as torchvision's models

Pair = Sequence[torch.Tensor]


def derive_seed(*values: object) -> int:
    """Derive a 63-bit seed from values and their order: (1, 2) and (2, 1) give different ones."""
    text = "/".join(map(str, values)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclasses.dataclass(frozen=True)
class Batch:
    """`images` are uint8 (n, 3, size, size), channels last; `targets` and `indices` are int64 (n).

    `indices` are positions in the data set. For a bad image, the pixels and the target belong to
    its replacement. `sizes`: the samples of each rank in this step; in evaluation, of this rank.
    """

    images: torch.Tensor
    targets: torch.Tensor
    indices: torch.Tensor
    sizes: Sequence[int]

    @property
    def global_count(self) -> int:
        return sum(self.sizes)

    def copy_to(self, device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
        """Copy images and targets to the device asynchronously; return both."""
        return self.images.to(device, non_blocking=True), self.targets.to(device, non_blocking=True)


class Normalise:
    """Turns uint8 pixels into the inputs that the models were designed for.

    The device normalises, and not a loader process: a uint8 batch has a quarter of the bytes to
    copy, and the loader processes are busier than the device.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        memory_format: torch.memory_format,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
    ) -> None:
        # Computed in fp32 at least, as in apex. The result is then cast to `dtype`.
        wide = torch.promote_types(dtype, torch.float32)
        # Made once, because a tensor made from Python numbers would wait for the GPU in each step.
        self.mean = torch.tensor(mean, device=device, dtype=wide).view(1, 3, 1, 1) * 255
        self.scale = 1 / (255 * torch.tensor(std, device=device, dtype=wide).view(1, 3, 1, 1))
        self.dtype, self.format = dtype, memory_format

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        floats = images.to(self.mean.dtype, memory_format=self.format)
        return floats.sub_(self.mean).mul_(self.scale).to(self.dtype)


@dataclasses.dataclass(frozen=True)
class Mix:
    """Says how to mix images with neighbours. `weight`: the weight of an image's target, 0 to 1;
    the neighbour's target has the rest. `box`: (top, bottom, left, right), the pixels that CutMix
    copies from the neighbour; None for mixup, which blends whole images."""

    weight: float
    box: Optional[Tuple[int, int, int, int]] = None


def plan_mix(options: Options, size: int, step: int, rank: int) -> Optional[Mix]:
    """Draw how to mix a rank's batch, of images of `size` pixels a side, from (seed, global step,
    rank). Returns None if neither mixup nor CutMix is on. If both are on, each batch draws one.

    Zhang et al., "mixup", 2017; Yun et al., "CutMix", 2019.
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
    # The image's border may have cut the box, so the weight follows from the remaining area.
    return Mix(1 - (bottom - top) * (right - left) / size**2, (top, bottom, left, right))


def mix_images(images: torch.Tensor, neighbours: torch.Tensor, mix: Mix) -> torch.Tensor:
    """Mix floating-point images with their neighbours, (n, 3, size, size); keep their format."""
    if mix.box is None:
        # The result gets the memory format of the first argument.
        return torch.lerp(images, neighbours, 1 - mix.weight)
    top, bottom, left, right = mix.box
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = neighbours[:, :, top:bottom, left:right]
    return mixed


# A loss takes outputs (n, classes), a pair of targets (n) of the images and of their neighbours,
# and the mix. It returns the sum over samples.
Loss = Callable[[torch.Tensor, Pair, Optional[Mix]], torch.Tensor]


def build_loss(options: Options) -> Loss:
    """Choose the loss of the options."""
    if options.loss == "bce":
        return partial(binary_loss, options.label_smoothing, options.bce_threshold)
    return partial(mixed_loss, options.label_smoothing)


def mixed_loss(
    smoothing: float, outputs: torch.Tensor, targets: Pair, mix: Optional[Mix]
) -> torch.Tensor:
    """Compute the cross-entropy with both targets, weighted by the mix, summed over samples."""
    image_loss, neighbour_loss = (
        partial(cross_entropy, outputs, target, reduction="sum", label_smoothing=smoothing)
        for target in targets
    )
    if mix is None:
        return image_loss()
    return mix.weight * image_loss() + (1 - mix.weight) * neighbour_loss()


def binary_loss(
    smoothing: float, threshold: float, outputs: torch.Tensor, targets: Pair, mix: Optional[Mix]
) -> torch.Tensor:
    """Compute the binary cross-entropy of each class, summed over samples. A mixed image belongs to
    both classes: a class counts in full if its part is above `threshold`, or by its part if
    `threshold` is 0 (Wightman et al., "ResNet strikes back", 2021)."""
    count, weight = outputs.shape[1], 1.0 if mix is None else mix.weight
    numbers = torch.arange(count, device=outputs.device)
    image_classes, neighbour_classes = (
        (target[:, None] == numbers).to(outputs.dtype) for target in targets
    )
    blend = weight * image_classes + (1 - weight) * neighbour_classes
    class_targets = (1 - smoothing) * blend + smoothing / count
    if threshold:
        class_targets = (class_targets > threshold).to(outputs.dtype)
    return binary_cross_entropy_with_logits(outputs, class_targets, reduction="sum") / count
