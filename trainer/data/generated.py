"""Noise in place of a data set, for `--trial` without `--data`: nothing has to be loaded."""

from typing import Iterator

import torch

from contract.options import Options

from ..world import World
from .batch import Batch
from .folder import USUAL, ImageFolder, Quarantine
from .loader import TrainBatches

# The numbers of ImageNet. Classes matter: a classifier's last layer is part of what is sent.
IMAGES, CLASSES = 1_281_167, 1000


class Generated(ImageFolder):
    """As many images and classes as in ImageNet, of `--image_size` or the usual size."""

    def __init__(self, options: Options) -> None:
        self.options, self.quarantine = options, Quarantine(options.bad_images)
        self.classes = [str(number) for number in range(CLASSES)]

    def __len__(self) -> int:
        return IMAGES

    def natural_size(self) -> int:
        return USUAL


class GeneratedBatches(TrainBatches):
    """The same images and targets in each step; an epoch consists of full steps only."""

    def __init__(self, dataset: Generated, options: Options, world: World) -> None:
        super().__init__(dataset, options, world)
        count, size = world.batches[world.rank], dataset.sizes.train
        chance = torch.Generator().manual_seed(options.seed)
        pixels = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=chance)
        targets = torch.randint(0, CLASSES, (count,), generator=chance)
        if world.device.type == "cuda":
            pixels, targets = pixels.pin_memory(), targets.pin_memory()
        shown = pixels.permute(0, 3, 1, 2)
        self._batch = Batch(shown, targets, torch.arange(count), world.batches)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for _ in range((IMAGES - start) // self.world.global_batch):
            yield self._batch
