"""Batches for one rank: its share of each training step, and of all images in evaluation; noise in
their place where nothing is to be loaded, and a log of the samples that were trained on."""

import dataclasses
import math
import time
from functools import partial
from random import Random
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from contract.errors import RankError
from contract.options import Options
from contract.split import rank_slice, step_size
from tandem.step_lines import attempt_number, open_output

from ..world import World
from .augment import Evaluate, Train
from .batch import Batch, derive_seed
from .decode import BadImage, Missing, Unreadable, open_picture
from .folder import SMALL, USUAL, Bad, ImageCache, ImageFolder, Quarantine, fits_into_memory
from .workers import data_loader, start, worker_count

RETRY_AFTER = 60.0  # seconds in which a disk or share is waited for once
TRIALS = 16  # how many replacements in a row may be bad too before the run gives up


class Draw(NamedTuple):
    """A sample to make, in a training epoch, or in evaluation if `epoch` is None."""

    epoch: Optional[int]
    number: int  # of the copy: its place in the data set, and for each copy before it all of that


class Sample(NamedTuple):
    """The image that a loader process makes of a draw, and the bad ones that it met."""

    pixels: Optional[np.ndarray]  # uint8 (size, size, 3); None if no image can be used
    target: int
    number: int  # its place in the data set
    bad: List[Bad]


@dataclasses.dataclass
class Samples(Dataset):  # type: ignore[type-arg]
    """Samples by draw, made in a loader process."""

    folder: ImageFolder
    transform: Union[Train, Evaluate]
    seed: int
    # Images whose disk failed: this process does not wait for them again.
    given_up: Set[str] = dataclasses.field(default_factory=set)
    # Disk or share -> the monotonic time from which its images are waited for again, after a wait
    # in vain; infinite where it gives no image, which ends the run.
    patience: Dict[str, float] = dataclasses.field(default_factory=dict)

    def __getitem__(self, draw: Draw) -> Sample:
        """Make the sample of a draw. In training (where the draw has an epoch), another image of
        its class, drawn from (seed, epoch, index), replaces a bad one. `pixels` is None for a bad
        image in evaluation, after TRIALS replacements, and if a disk gives no image any more."""
        paths, targets = self.folder.paths, self.folder.targets
        rng, index = self.sample_rng(draw), draw.number % len(paths)
        bad: List[Bad] = []
        place = index
        for trial in range(1 if draw.epoch is None else 1 + TRIALS):
            path = paths[place]
            try:
                # An image whose disk fails is waited for, but neither twice nor soon after another
                # one of its disk was waited for in vain.
                until = self.patience.get(self.folder.mount_of(path), 0.0) if self.patience else 0.0
                if until == math.inf:
                    raise Unreadable("cannot be read any more")
                may_wait = path not in self.given_up and time.monotonic() >= until
                picture = open_picture(self.folder.root / path, may_wait)
                return Sample(self.transform(picture, rng), targets[place], index, bad)
            except BadImage as error:
                bad.append(self._describe_failure(path, error))
                # Replace it by one of its class, then by any, since all of a class may be bad.
                candidates = range(len(paths))
                if trial < TRIALS // 2:
                    candidates = self.folder.images_of(targets[index])
                place = candidates[int(rng.random() * len(candidates))]
            if not bad[-1].is_alone:
                break
        return Sample(None, targets[index], index, bad)

    def _describe_failure(self, path: str, error: BadImage) -> Bad:
        """Describe why an image cannot be used, and note how long to wait for its mount."""
        if not isinstance(error, Unreadable):
            return Bad(path, str(error))
        mount = self.folder.mount_of(path)
        is_alone = self.patience.get(mount) != math.inf and self.folder.can_read_neighbours(path)
        if not is_alone:
            self.patience[mount] = math.inf
        elif isinstance(error, Missing):
            return Bad(path, str(error))  # its mount is there, and no one waits for it
        elif path not in self.given_up:
            self.patience[mount] = time.monotonic() + RETRY_AFTER
        self.given_up.add(path)
        return Bad(path, str(error), mount, is_alone)

    def sample_rng(self, draw: Draw) -> Random:
        """Make the random generator of a draw: it depends on nothing but seed, epoch and number."""
        return Random(derive_seed("augment", self.seed, draw.epoch, draw.number))


@dataclasses.dataclass
class Bases(Dataset):  # type: ignore[type-arg]
    """Bases of small images by index, decoded in a loader process to be cached."""

    folder: ImageFolder
    transform: Union[Train, Evaluate]

    def __getitem__(self, index: int) -> Tuple[int, Optional[np.ndarray]]:
        """Return the index and its base, which is None for a bad image."""
        try:
            # This does not wait: `Samples` tries again what cannot be read now.
            picture = open_picture(self.folder.root / self.folder.paths[index], again=False)
            return index, self.transform.base(picture)
        except BadImage:
            return index, None


Collated = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, List[Bad]]


class TrainBatches:
    """The training steps of one rank, epoch by epoch. Its loader processes live on between
    epochs."""

    def __init__(self, dataset: ImageFolder, options: Options, world: World) -> None:
        self.dataset, self.options, self.world = dataset, options, world
        scaled = bool(options.jpeg_scaling)
        transform = Train(options.augment, dataset.sizes, options.random_erase, scaled)
        self._source = Source(
            Samples(dataset, transform, options.seed), options, world, persistent=True
        )

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's samples of each step from position `start` of the epoch on; a step may
        have none for this rank. Raises RankError if there are too many bad images."""
        repeats = self.options.repeat_augment
        order = epoch_order(len(self.dataset), self.options.seed, epoch, repeats)
        steps, shares = [], []
        while start < len(order):
            count = step_size(start, len(order), self.world.global_batch, self.world.smallest)
            shares.append(self.world.rank_samples(count))
            mine = rank_slice(shares[-1], self.world.rank)
            # One copy of each image after the other: ranks, and neighbours that mixup blends, have
            # different images.
            step = order[start : start + count]
            step = torch.cat([step[copy::repeats] for copy in range(repeats)])
            steps.append(step[mine].tolist())
            start += count
        batches = self._source.batches(steps, epoch)
        for (images, targets, indices, bad), sizes in zip(batches, shares):
            self.dataset.quarantine.add(bad)
            # A sample without pixels is one whose replacements were all bad.
            if len(images) < len(indices):
                raise RankError(
                    f"{1 + TRIALS} images drawn one after another cannot be used, "
                    f"the last is {bad[-1].path}: {bad[-1].reason}."
                )
            yield Batch(images, targets, indices, sizes)


def eval_batches(
    dataset: ImageFolder, options: Options, world: World, size: int
) -> Iterator[Batch]:
    """Yield every image exactly once over all ranks, in batches of `size`, without bad images."""
    # The batches are the same on any number of ranks: what a network computes of an image depends
    # in the last bits on the images beside it.
    samples = Samples(dataset, Evaluate(dataset.sizes), options.seed)
    # Of k ranks, rank r takes the batches r, r + k, r + 2 k and so on.
    begins = range(world.rank * size, len(dataset), world.size * size)
    steps = [list(range(begin, min(begin + size, len(dataset)))) for begin in begins]
    for images, targets, indices, bad in Source(samples, options, world).batches(steps):
        dataset.quarantine.add(bad)
        if bad:
            bad_paths = {image.path for image in bad}
            paths = [dataset.paths[index] for index in indices.tolist()]
            good = [place for place, path in enumerate(paths) if path not in bad_paths]
            targets, indices = targets[good], indices[good]
        if len(indices):
            yield Batch(images, targets, indices, [len(indices)])


@dataclasses.dataclass
class Steps:
    """The draws of each step, for loader processes, which know nothing of epochs."""

    epoch: Optional[int] = None
    indices: Sequence[List[int]] = ()

    def __iter__(self) -> Iterator[List[Draw]]:
        for step in self.indices:
            yield [Draw(self.epoch, index) for index in step]


class Source:
    """The samples of a split, collated by step. They are decoded on demand; small ones are decoded
    once and then cached. `persistent`: loader processes wait for the next call of `batches`."""

    def __init__(
        self, samples: Samples, options: Options, world: World, persistent: bool = False
    ) -> None:
        self.samples, self.options, self.world = samples, options, world
        self.persistent = persistent
        self.size, self._steps = samples.transform.size, Steps()
        self._loader: Optional[DataLoader[Collated]] = None

    def batches(
        self, steps: Sequence[List[int]], epoch: Optional[int] = None
    ) -> Iterator[Collated]:
        """Iterate over collated steps. `steps`: the numbers of each step's draws; `epoch`: None in
        evaluation. Only one such iterator may be in use at a time."""
        folder, transform = self.samples.folder, self.samples.transform
        # Small images are decoded once and kept if the caches of all ranks fit into memory.
        small = transform.keeps and self.size <= SMALL
        if small and fits_into_memory(len(folder), transform.side, self.world.local_size):
            return self._from_cache(steps, epoch)
        if not steps:
            return iter(())
        # Loader processes that live on keep the object `_steps`, so it is changed in place.
        self._steps.epoch, self._steps.indices = epoch, steps
        if self._loader is None:
            self._loader = data_loader(
                self.samples,
                self._steps,
                partial(_collate, self.size),
                self._workers(len(folder) // self.world.size),
                pinned=self.world.device.type == "cuda",
                persistent=self.persistent,
            )
        return start(self._loader)

    def _workers(self, images: int) -> int:
        return worker_count(self.options, self.world, self.size, images)

    def _from_cache(self, steps: Sequence[List[int]], epoch: Optional[int]) -> Iterator[Collated]:
        """Yield steps of small images; decode only those that this rank has not seen yet."""
        folder, side = self.samples.folder, self.samples.transform.side
        if folder.cache is None or folder.cache.pixels.shape[1] != side:
            folder.cache = ImageCache(len(folder), side)
        images_of = [[number % len(folder) for number in numbers] for numbers in steps]
        missing = [folder.cache.missing([*dict.fromkeys(indices)]) for indices in images_of]
        count = sum(map(len, missing))
        bases = Bases(folder, self.samples.transform)
        missing_steps = [indices for indices in missing if indices]
        workers = self._workers(count) if count else 0
        decoded = start(data_loader(bases, missing_steps, list, workers))
        for indices, missing_indices in zip(steps, missing):
            for index, base in next(decoded) if missing_indices else []:
                folder.cache.put(index, base)
            samples = []
            for draw in (Draw(epoch, index) for index in indices):
                base = folder.cache.get(draw.number % len(folder))
                if base is None:  # a bad image, for which `samples` finds another one
                    samples.append(self.samples[draw])
                    continue
                place = draw.number % len(folder)
                pixels = self.samples.transform.augment(base, self.samples.sample_rng(draw))
                samples.append(Sample(pixels, folder.targets[place], place, []))
            images, targets, numbers, bad = _collate(self.size, samples)
            if self.world.device.type == "cuda":
                images, targets = images.pin_memory(), targets.pin_memory()
            yield images, targets, numbers, bad


def _collate(size: int, samples: Sequence[Sample]) -> Collated:
    """Stack samples: images uint8 (n, 3, size, size) of those that could be read, targets and
    indices of all, and the bad images."""
    pixels = [sample.pixels for sample in samples if sample.pixels is not None]
    images = torch.from_numpy(np.stack(pixels)) if pixels else torch.empty(0, size, size, 3)
    targets = torch.tensor([sample.target for sample in samples], dtype=torch.int64)
    indices = torch.tensor([sample.number for sample in samples], dtype=torch.int64)
    bad = [image for sample in samples for image in sample.bad]
    # A view: in memory, channels come last.
    return images.to(torch.uint8).permute(0, 3, 1, 2), targets, indices, bad


def epoch_order(count: int, seed: int, epoch: int, repeats: int = 1) -> torch.Tensor:
    """Draw the order of an epoch from seed and epoch: the numbers of `count` draws as int64. With
    `repeats`, as many copies of an image follow one another, and the epoch has fewer images (Berman
    et al., "MultiGrain", 2019)."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    images = torch.randperm(count, generator=generator).repeat_interleave(repeats)[:count]
    return images + torch.arange(count) % repeats * count


# ImageNet has these numbers. Classes matter: the last layer's gradients are sent, too.
IMAGES, CLASSES = 1_281_167, 1000


class Generated(ImageFolder):
    """Noise in place of a data set, for `--trial` without `--data`: as many images and classes as
    in ImageNet, of `--image_size` or the usual size."""

    def __init__(self, options: Options) -> None:
        self.options, self.quarantine = options, Quarantine(options.bad_images)
        self.classes = [str(number) for number in range(CLASSES)]

    def __len__(self) -> int:
        return IMAGES

    def natural_size(self) -> int:
        return USUAL


class GeneratedBatches(TrainBatches):
    """Steps that all have the same images and targets; an epoch has full steps only."""

    def __init__(self, dataset: Generated, options: Options, world: World) -> None:
        super().__init__(dataset, options, world)
        count, size = world.batches[world.rank], dataset.sizes.train
        generator = torch.Generator().manual_seed(options.seed)
        shape = (count, size, size, 3)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        targets = torch.randint(0, CLASSES, (count,), generator=generator)
        if world.device.type == "cuda":
            pixels, targets = pixels.pin_memory(), targets.pin_memory()
        shown = pixels.permute(0, 3, 1, 2)
        self._batch = Batch(shown, targets, torch.arange(count), world.batches)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for _ in range((IMAGES - start) // self.world.global_batch):
            yield self._batch


class SampleLog:
    """`samples/rank<k>.<attempt>.csv`: epoch, position in its order, and index of each sample,
    written once the rank has trained on it."""

    def __init__(self, options: Options, world: World) -> None:
        name = f"samples/rank{world.rank}.{attempt_number()}.csv"
        self._file = None
        if options.sample_log and options.output:
            self._file = open_output(options.output, name, "w")
            self._file.write("epoch,position,index\n")

    def add(self, epoch: int, begin: int, indices: List[int]) -> None:
        """Append the samples of a step, from position `begin` of the epoch's order on."""
        if self._file is not None:
            rows = (f"{epoch},{begin + place},{index}\n" for place, index in enumerate(indices))
            self._file.writelines(rows)
            # A run that is killed must leave the samples of its last step.
            self._file.flush()
