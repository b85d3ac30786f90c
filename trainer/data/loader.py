"""Batches for one rank: its share of each step in training, of all images in evaluation."""

import dataclasses
import os
from functools import partial
from random import Random
from typing import Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..errors import RankError
from ..options import Options
from ..world import World
from .augment import Evaluate, Train
from .decode import BadImage, open_picture
from .folder import SMALL, ImageFolder
from .kept import Kept, fits
from .order import derive_seed, epoch_order, rank_slice, step_size
from .quarantine import Bad

FEW = 4096  # images: decoding so many small ones takes less time than starting processes
TRIALS = 16  # replacements in a row that may be bad too before the data set is given up


@dataclasses.dataclass(frozen=True)
class Batch:
    """`images` uint8 (n, 3, size, size), channels last; `targets` and `indices` int64 (n).

    `indices` are positions in the data set; a bad image's pixels and target are its
    replacement's. `global_count`: samples of all ranks in this step (evaluation: n).
    """

    images: torch.Tensor
    targets: torch.Tensor
    indices: torch.Tensor
    global_count: int

    def on(self, device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
        """Images and targets, on their way to the device."""
        return self.images.to(device, non_blocking=True), self.targets.to(device, non_blocking=True)


class Sample(NamedTuple):
    pixels: Optional[np.ndarray]
    target: int
    number: int  # its place in the data set
    bad: List[Bad]


@dataclasses.dataclass
class Samples(Dataset):  # type: ignore[type-arg]
    """What a worker process needs to make a sample of an index."""

    folder: ImageFolder
    transform: Union[Train, Evaluate]
    seed: int
    epoch: Optional[int]

    def __getitem__(self, index: int) -> Sample:
        """In training (`epoch` is given) a bad image is replaced by others, drawn by (seed, epoch,
        index); in evaluation, and after TRIALS replacements, `pixels` is None."""
        rng = self.chance(index)
        paths, targets = self.folder.paths, self.folder.targets
        bad: List[Bad] = []
        chosen = index
        for _ in range(1 if self.epoch is None else 1 + TRIALS):
            try:
                picture = open_picture(self.folder.root / paths[chosen])
                return Sample(self.transform(picture, rng), targets[chosen], index, bad)
            except BadImage as error:
                bad.append(Bad(paths[chosen], str(error)))
                chosen = int(rng.random() * len(paths))
        return Sample(None, targets[index], index, bad)

    def chance(self, index: int) -> Random:
        return Random(derive_seed("augment", self.seed, self.epoch, index))


@dataclasses.dataclass
class Bases(Dataset):  # type: ignore[type-arg]
    """What a worker process needs to decode a small image that is to be kept."""

    folder: ImageFolder
    transform: Union[Train, Evaluate]

    def __getitem__(self, index: int) -> Tuple[int, Optional[np.ndarray]]:
        """None in the place of a bad image."""
        try:
            picture = open_picture(self.folder.root / self.folder.paths[index])
            return index, self.transform.base(picture)
        except BadImage:
            return index, None


Collated = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, List[Bad]]


def train_batches(
    dataset: ImageFolder, options: Options, world: World, epoch: int, start: int = 0
) -> Iterator[Batch]:
    """This rank's share of each step from position `start` of the epoch on; it may be empty.

    Raises RankError when there are too many bad images.
    """
    scaled = bool(options.jpeg_scaling)
    transform = Train(options.augment, dataset.sizes, options.random_erase, scaled)
    samples = Samples(dataset, transform, options.seed, epoch)
    order = epoch_order(len(dataset), options.seed, epoch)
    steps, counts = [], []
    while start < len(order):
        counts.append(step_size(start, len(order), world.global_batch, world.smallest))
        mine = rank_slice(world.rank_samples(counts[-1]), world.rank)
        steps.append(order[start : start + counts[-1]][mine].tolist())
        start += counts[-1]
    loader = _loader(samples, steps, dataset.sizes.train, options, world)
    for (images, targets, indices, bad), count in zip(loader, counts):
        dataset.quarantine.add(bad)
        if len(images) < len(indices):
            raise RankError(
                f"{1 + TRIALS} images drawn one after another cannot be used, "
                f"the last is {bad[-1].path}: {bad[-1].reason}."
            )
        yield Batch(images, targets, indices, count)


def eval_batches(
    dataset: ImageFolder, options: Options, world: World, size: int
) -> Iterator[Batch]:
    """Every image exactly once over all ranks, in order within a rank, `size` at a time; bad ones
    are left out."""
    samples = Samples(dataset, Evaluate(dataset.sizes), options.seed, None)
    mine = list(range(world.rank, len(dataset), world.size))
    steps = [mine[begin : begin + size] for begin in range(0, len(mine), size)]
    loader = _loader(samples, steps, dataset.sizes.evaluate, options, world)
    for images, targets, indices, bad in loader:
        dataset.quarantine.add(bad)
        lost = {path for path, _ in bad}
        kept = [i for i, index in enumerate(indices.tolist()) if dataset.paths[index] not in lost]
        if kept:
            yield Batch(images, targets[kept], indices[kept], len(kept))


def worker_count(options: Options, world: World, size: int, images: int) -> int:
    """Loader processes of this rank: the option, else none for a few small images, else its share
    of the machine's cores, one of which trains."""
    if options.workers is not None:
        return options.workers
    if size <= SMALL and images <= FEW:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(16, max(1, ((cores or 1) - 1) // world.local_size))


def _loader(
    samples: Samples, steps: List[List[int]], size: int, options: Options, world: World
) -> Iterable[Collated]:
    transform, folder = samples.transform, samples.folder
    small = transform.keeps and size <= SMALL
    if small and fits(len(folder), transform.side, world.local_size):
        return _kept(samples, steps, size, options, world)
    return DataLoader(
        samples,
        batch_sampler=steps,
        collate_fn=partial(_collate, size),
        num_workers=worker_count(options, world, size, sum(map(len, steps))) if steps else 0,
        pin_memory=world.device.type == "cuda",
        # A generator of its own: without one, each epoch would draw from the global one.
        generator=torch.Generator(),
    )


def _kept(
    samples: Samples, steps: List[List[int]], size: int, options: Options, world: World
) -> Iterator[Collated]:
    """Small images, of which only those are decoded that this rank has not seen yet."""
    folder, transform = samples.folder, samples.transform
    if folder.kept is None or folder.kept.pixels.shape[1] != transform.side:
        folder.kept = Kept(len(folder), transform.side)
    kept = folder.kept
    missing = [kept.unseen(share) for share in steps]
    unseen = sum(map(len, missing))
    decoded = iter(
        DataLoader(
            Bases(folder, transform),
            batch_sampler=[share for share in missing if share],
            collate_fn=list,
            num_workers=worker_count(options, world, size, unseen) if unseen else 0,
            generator=torch.Generator(),
        )
    )
    for share, wanted in zip(steps, missing):
        for index, base in next(decoded) if wanted else []:
            kept.put(index, base)
        images, targets, indices, bad = _collate(size, [_again(samples, kept, i) for i in share])
        if world.device.type == "cuda":
            images, targets = images.pin_memory(), targets.pin_memory()
        yield images, targets, indices, bad


def _again(samples: Samples, kept: Kept, index: int) -> Sample:
    """What `samples[index]` is, without decoding it."""
    base = kept.get(index)
    if base is None:
        return samples[index]
    pixels = samples.transform.chance(base, samples.chance(index))
    return Sample(pixels, samples.folder.targets[index], index, [])


def _collate(
    size: int, samples: Sequence[Sample]
) -> Collated:
    """Images (those that could be read), targets, indices (of all), what was bad."""
    pixels = [sample.pixels for sample in samples if sample.pixels is not None]
    images = torch.from_numpy(np.stack(pixels)) if pixels else torch.empty(0, size, size, 3)
    targets = torch.tensor([sample.target for sample in samples], dtype=torch.int64)
    indices = torch.tensor([sample.number for sample in samples], dtype=torch.int64)
    bad = [one for sample in samples for one in sample.bad]
    return images.to(torch.uint8).permute(0, 3, 1, 2), targets, indices, bad
