"""Make the batches of one rank: its share of each training step, and of all images in evaluation.

A step's samples are drawn from the epoch's order, decoded and augmented in loader processes
(workers.py), and collated. `GeneratedBatches` makes noise instead, for a trial without data.
`SampleLog` writes which samples were trained on. train.py, evaluate.py and predict.py call this
file; batch.py does the work on the device.
"""

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
from .folder import SMALL_PX, USUAL_PX, Bad, ImageCache, ImageFolder, Quarantine, fits_into_memory
from .workers import data_loader, start_loader, worker_count

RETRY_AFTER = 60.0  # seconds after a disk or share failed, before it is waited for again
TRIALS = 16  # how many replacements in a row may be bad, too, before the run gives up


class Draw(NamedTuple):
    """A sample to make, in a training epoch, or in evaluation if `epoch` is None."""

    epoch: Optional[int]
    # With --repeat_augment an epoch has copies of an image. Of n images, copy k of image i has the
    # number i + k * n.
    number: int


class Sample(NamedTuple):
    """The image that a loader process makes of a draw, and the bad images that it met."""

    pixels: Optional[np.ndarray]  # uint8 (size, size, 3); None if no image can be used
    target: int
    # The drawn image's index in the data set. A replacement brings its own pixels and target.
    drawn_index: int
    bad: List[Bad]


@dataclasses.dataclass
class Samples(Dataset):  # type: ignore[type-arg]
    """Samples by draw, made in a loader process."""

    folder: ImageFolder
    transform: Union[Train, Evaluate]
    seed: int
    # Paths of images whose disk failed: this process does not wait for them again.
    given_up: Set[str] = dataclasses.field(default_factory=set)
    # Name of a mount -> the time.monotonic() from which this process may wait for its images again,
    # after it waited in vain. Infinite if the mount delivers no images: this ends the run.
    retry_times: Dict[str, float] = dataclasses.field(default_factory=dict)

    def __getitem__(self, draw: Draw) -> Sample:
        """Make the sample of a draw. In training, random images replace a bad image; they follow
        from seed, epoch and number. `pixels` is None for a bad image in evaluation, after TRIALS
        replacements, and if a mount delivers no images any more."""
        paths, targets = self.folder.paths, self.folder.targets
        rng, drawn_index = self.sample_rng(draw), draw.number % len(paths)
        bad: List[Bad] = []
        index = drawn_index
        # In evaluation, no other image may stand for a bad one.
        for trial in range(1 if draw.epoch is None else 1 + TRIALS):
            path = paths[index]
            try:
                # Wait for a disk that fails, but not twice for an image, and not soon after this
                # process waited in vain for another image of the disk.
                retry_time = 0.0
                if self.retry_times:  # finding a path's mount is slow
                    retry_time = self.retry_times.get(self.folder.mount_of(path), 0.0)
                if retry_time == math.inf:
                    raise Unreadable("cannot be read any more")
                may_wait = path not in self.given_up and time.monotonic() >= retry_time
                picture = open_picture(self.folder.root / path, may_wait)
                return Sample(self.transform(picture, rng), targets[index], drawn_index, bad)
            except BadImage as error:
                bad.append(self._record_failure(path, error))
                # Draw an image of the same class, and later of any: all of a class may be bad.
                candidates = range(len(paths))
                if trial < TRIALS // 2:
                    candidates = self.folder.images_of(targets[drawn_index])
                index = candidates[int(rng.random() * len(candidates))]
            if not bad[-1].mount_works:  # other images cannot be read either, so the run ends
                break
        return Sample(None, targets[drawn_index], drawn_index, bad)

    def _record_failure(self, path: str, error: BadImage) -> Bad:
        """Note how long this process must not wait for the image's mount, and describe why the
        image cannot be used."""
        if not isinstance(error, Unreadable):
            return Bad(path, str(error))
        mount = self.folder.mount_of(path)
        has_given_up = self.retry_times.get(mount) == math.inf
        mount_works = not has_given_up and self.folder.can_read_neighbours(path)
        if not mount_works:
            self.retry_times[mount] = math.inf
        elif isinstance(error, Missing):
            return Bad(path, str(error))  # somebody deleted the file, and the mount is not at fault
        elif path not in self.given_up:
            self.retry_times[mount] = time.monotonic() + RETRY_AFTER
        self.given_up.add(path)
        return Bad(path, str(error), mount, mount_works)

    def sample_rng(self, draw: Draw) -> Random:
        """Make the random generator of a draw, which depends only on seed, epoch and number."""
        return Random(derive_seed("augment", self.seed, draw.epoch, draw.number))


@dataclasses.dataclass
class Bases(Dataset):  # type: ignore[type-arg]
    """Bases of small images (augment.py) by index, decoded in a loader process to be cached."""

    folder: ImageFolder
    transform: Union[Train, Evaluate]

    def __getitem__(self, index: int) -> Tuple[int, Optional[np.ndarray]]:
        """Return the index and its base, which is None for a bad image."""
        try:
            # Never waits for a disk that fails: `Samples` tries this image again, and waits.
            picture = open_picture(self.folder.root / self.folder.paths[index], retry=False)
            return index, self.transform.base(picture)
        except BadImage:
            return index, None


class Collated(NamedTuple):
    """The stacked samples of a step."""

    images: torch.Tensor  # uint8 (up to n, 3, size, size): samples without pixels are left out
    targets: torch.Tensor  # int64 (n)
    indices: torch.Tensor  # int64 (n): see Sample.drawn_index
    bad: List[Bad]


class TrainBatches:
    """Makes one rank's training steps, epoch by epoch. Loader processes live on between epochs."""

    def __init__(self, dataset: ImageFolder, options: Options, world: World) -> None:
        self.dataset, self.options, self.world = dataset, options, world
        scaled = bool(options.jpeg_scaling)
        transform = Train(options.augment, dataset.sizes, options.random_erase, scaled)
        self._source = Source(
            Samples(dataset, transform, options.seed), options, world, persistent=True
        )

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's samples of each step from position `start` of the epoch on. A step may
        have no samples for this rank. Raises RankError if there are too many bad images."""
        repeats = self.options.repeat_augment
        order = epoch_order(len(self.dataset), self.options.seed, epoch, repeats)
        rank_steps: List[List[int]] = []  # the numbers of this rank's draws in each step
        step_sizes: List[List[int]] = []  # the samples of each rank in each step
        position = start
        while position < len(order):
            count = step_size(position, len(order), self.world.global_batch, self.world.smallest)
            step_sizes.append(self.world.rank_samples(count))
            # In `order` the copies of an image follow one another: a a b b. In the step they do
            # not: a b a b. So a rank has different images, and mixup blends different images.
            step = order[position : position + count]
            step = torch.cat([step[copy::repeats] for copy in range(repeats)])
            rank_steps.append(step[rank_slice(step_sizes[-1], self.world.rank)].tolist())
            position += count
        for collated, sizes in zip(self._source.batches(rank_steps, epoch), step_sizes):
            self.dataset.quarantine.add(collated.bad)
            # `images` lacks the samples whose replacements were all bad.
            if len(collated.images) < len(collated.indices):
                bad = collated.bad[-1]
                raise RankError(
                    f"{1 + TRIALS} images drawn one after another cannot be used, "
                    f"the last is {bad.path}: {bad.reason}."
                )
            yield Batch(collated.images, collated.targets, collated.indices, sizes)


def eval_batches(
    dataset: ImageFolder, options: Options, world: World, size: int
) -> Iterator[Batch]:
    """Yield every image exactly once over all ranks, in batches of `size`, without bad images."""
    # The batches are the same on any number of ranks, because the last bits of an image's outputs
    # depend on the other images of its batch.
    samples = Samples(dataset, Evaluate(dataset.sizes), options.seed)
    # With k ranks, rank r takes the batches r, r + k, r + 2 k and so on.
    begins = range(world.rank * size, len(dataset), world.size * size)
    steps = [list(range(begin, min(begin + size, len(dataset)))) for begin in begins]
    for collated in Source(samples, options, world).batches(steps):
        dataset.quarantine.add(collated.bad)
        targets, indices = collated.targets, collated.indices
        if collated.bad:
            # `images` has no rows of bad images, but `targets` and `indices` have them.
            bad_paths = {image.path for image in collated.bad}
            paths = [dataset.paths[index] for index in indices.tolist()]
            good_rows = [row for row, path in enumerate(paths) if path not in bad_paths]
            targets, indices = targets[good_rows], indices[good_rows]
        if len(indices):
            yield Batch(collated.images, targets, indices, [len(indices)])


@dataclasses.dataclass
class Steps:
    """The draws of each step. The loader's processes live on between epochs and keep their copy of
    `Samples`, so each draw brings its epoch."""

    epoch: Optional[int] = None
    numbers: Sequence[List[int]] = ()  # of the draws of each step

    def __iter__(self) -> Iterator[List[Draw]]:
        for step in self.numbers:
            yield [Draw(self.epoch, number) for number in step]


class Source:
    """Collates the samples of a split by step. It decodes images on demand, and small images once:
    then it caches them. `persistent`: loader processes wait for the next call of `batches`."""

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
        """Iterate over collated steps. `steps`: the numbers of each step's draws. `epoch`: None in
        evaluation. The caller must not use two of these iterators at the same time."""
        folder, transform = self.samples.folder, self.samples.transform
        # Small images are decoded once and cached if the caches of all ranks fit into memory.
        # `keeps`: each epoch can use the same decoded pixels, which a random crop cannot.
        is_small = transform.keeps and self.size <= SMALL_PX
        if is_small and fits_into_memory(len(folder), transform.side, self.world.local_size):
            return self._from_cache(steps, epoch)
        if not steps:
            return iter(())
        # The loader of earlier epochs keeps the object `_steps`, so the object is changed in place.
        self._steps.epoch, self._steps.numbers = epoch, steps
        if self._loader is None:
            self._loader = data_loader(
                self.samples,
                self._steps,
                partial(_collate, self.size),
                self._workers(len(folder) // self.world.size),
                pinned=self.world.device.type == "cuda",
                persistent=self.persistent,
            )
        return start_loader(self._loader)

    def _workers(self, images: int) -> int:
        return worker_count(self.options, self.world, self.size, images)

    def _from_cache(self, steps: Sequence[List[int]], epoch: Optional[int]) -> Iterator[Collated]:
        """Yield steps of small images, and decode only images that this rank has not seen yet."""
        folder, side = self.samples.folder, self.samples.transform.side
        if folder.cache is None or folder.cache.pixels.shape[1] != side:
            folder.cache = ImageCache(len(folder), side)
        step_images = [[number % len(folder) for number in numbers] for numbers in steps]
        # The images to decode for each step. A step may have copies of an image: decode it once.
        missing = [folder.cache.missing([*dict.fromkeys(indices)]) for indices in step_images]
        count = sum(map(len, missing))
        workers = self._workers(count) if count else 0
        steps_to_decode = [indices for indices in missing if indices]
        bases = Bases(folder, self.samples.transform)
        decoded = start_loader(data_loader(bases, steps_to_decode, list, workers))
        for numbers, missing_indices in zip(steps, missing):
            # `decoded` has an item for each step that lacks images.
            for index, base in next(decoded) if missing_indices else []:
                folder.cache.put(index, base)
            samples = []
            for draw in (Draw(epoch, number) for number in numbers):
                index = draw.number % len(folder)
                base = folder.cache.get(index)
                if base is None:  # a bad image, which `Samples` replaces
                    samples.append(self.samples[draw])
                    continue
                pixels = self.samples.transform.augment(base, self.samples.sample_rng(draw))
                samples.append(Sample(pixels, folder.targets[index], index, []))
            step = _collate(self.size, samples)
            if self.world.device.type == "cuda":
                images, targets = step.images.pin_memory(), step.targets.pin_memory()
                step = step._replace(images=images, targets=targets)
            yield step


def _collate(size: int, samples: Sequence[Sample]) -> Collated:
    """Stack samples of `size` pixels a side."""
    pixels = [sample.pixels for sample in samples if sample.pixels is not None]
    images = torch.from_numpy(np.stack(pixels)) if pixels else torch.empty(0, size, size, 3)
    targets = torch.tensor([sample.target for sample in samples], dtype=torch.int64)
    indices = torch.tensor([sample.drawn_index for sample in samples], dtype=torch.int64)
    bad = [image for sample in samples for image in sample.bad]
    # A view with the shape of torch's images: in memory, channels stay last.
    return Collated(images.to(torch.uint8).permute(0, 3, 1, 2), targets, indices, bad)


def epoch_order(count: int, seed: int, epoch: int, repeats: int = 1) -> torch.Tensor:
    """Draw the order of an epoch from seed and epoch: the numbers (`Draw.number`) of `count` draws
    as int64. With `repeats`, so many copies of an image follow one another, and the epoch has fewer
    images (Berman et al., "MultiGrain", 2019)."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    images = torch.randperm(count, generator=generator).repeat_interleave(repeats)[:count]
    return images + torch.arange(count) % repeats * count


# As in ImageNet. The number of classes matters, because the last layer's gradients are sent, too.
IMAGES, CLASSES = 1_281_167, 1000


class Generated(ImageFolder):
    """Noise instead of a data set, for `--trial` without `--data`: as many images and classes as in
    ImageNet, of `--image_size` or the usual size."""

    def __init__(self, options: Options) -> None:
        self.options, self.quarantine = options, Quarantine(options.bad_images)
        self.classes = [str(number) for number in range(CLASSES)]

    def __len__(self) -> int:
        return IMAGES

    def natural_size(self) -> int:
        return USUAL_PX


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
        images = pixels.permute(0, 3, 1, 2)
        self._batch = Batch(images, targets, torch.arange(count), world.batches)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for _ in range((IMAGES - start) // self.world.global_batch):
            yield self._batch


class SampleLog:
    """Writes `samples/rank<k>.<attempt>.csv`: epoch, position in the epoch's order, and index of
    each sample, after the rank has trained on the sample."""

    def __init__(self, options: Options, world: World) -> None:
        name = f"samples/rank{world.rank}.{attempt_number()}.csv"
        self._file = None
        if options.sample_log and options.output:
            self._file = open_output(options.output, name, "w")
            self._file.write("epoch,position,index\n")

    def add(self, epoch: int, begin: int, indices: List[int]) -> None:
        """Append the samples of a step, from position `begin` of the epoch's order on."""
        if self._file is not None:
            rows = (f"{epoch},{begin + offset},{index}\n" for offset, index in enumerate(indices))
            self._file.writelines(rows)
            # If the run is killed, the file must have the samples of its last step.
            self._file.flush()
