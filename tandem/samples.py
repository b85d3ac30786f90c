"""How many samples a batch holds, and the tensors in it.

No type tells the number: the first dimension of a tensor may be time, and a list may have samples
or fields. So the sizes of all parts of a loader's first batch are compared with each other, and
with the batch size that the loader states. If they settle nothing, the number is not known.
"""

import contextlib
import dataclasses
import zlib
from collections import Counter
from collections.abc import Mapping
from operator import attrgetter, itemgetter
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch.nn.utils.rnn import PackedSequence

Take = Callable[[Any], Any]
# The sizes of a part that may be the number of samples, and how to take each from another batch.
Sizes = List[Tuple[int, Take]]


class SampleCounter:
    """Counts the samples in a loader's batches by the part that its first batch settled on."""

    def __init__(self, loader: Any) -> None:
        size = getattr(loader, "batch_size", None)  # torch's and DALI's loaders state one
        self._stated: Optional[int] = size if isinstance(size, int) else None
        if self._stated is not None:
            with contextlib.suppress(AttributeError, TypeError):  # of no known length
                self._stated = min(self._stated, len(loader.sampler))
        self._measure: Optional[Take] = None
        self._is_first = True

    def count(self, batch: Any) -> Optional[int]:
        """Return None if the number is not known."""
        try:
            if self._is_first:
                self._is_first = False
                self._measure = _choose_measure(batch, self._stated)
            number: Optional[int] = self._measure(batch) if self._measure else None
        except Exception:  # another structure than before, or a property of somebody's class
            return None
        # More than the loader states are not samples: a sequence was as long by chance.
        return None if number and self._stated and number > self._stated else number


def _choose_measure(batch: Any, stated: Optional[int]) -> Optional[Take]:
    """Find how to count the samples of batches like this one; None if that is not known."""
    parts = list(_parts(batch, lambda whole: whole, is_whole=True))
    sizes = [size for part in parts for size in part]
    if stated is not None:
        sizes += [(len(batch), len)] if isinstance(batch, (list, tuple)) else []
        return next((measure for number, measure in sizes if number == stated), None)
    # All parts agree on a number, or else most of them do.
    votes = Counter(number for part in parts for number in dict(part))
    for needed in (len(parts), len(parts) // 2 + 1):
        agreed = {number: measure for number, measure in sizes if votes[number] >= needed}
        if agreed:
            return next(iter(agreed.values())) if len(agreed) == 1 else None
    return None


def _parts(value: Any, take: Take, is_whole: bool = False) -> Iterator[Sizes]:
    """Yield the sizes of each part of a value, which `take` gets from a batch; `is_whole`: it is
    the batch."""
    fields: Dict[Any, Take] = {}
    size = _size(value)
    if size is not None:
        yield [(size, lambda batch: _size(take(batch)))]
    elif isinstance(value, Mapping):
        fields = {name: itemgetter(name) for name in value}
    elif isinstance(value, (list, tuple)) and value:
        kinds = {(type(one), getattr(one, "dtype", 0), getattr(one, "ndim", 0)) for one in value}
        if is_whole and (isinstance(value, tuple) or len(kinds) > 1):
            fields = {place: itemgetter(place) for place in range(len(value))}
        else:
            yield _sizes_of_list(value, take, is_whole)
    elif is_whole or dataclasses.is_dataclass(value):
        fields = {name: attrgetter(name) for name in getattr(value, "__dict__", ())}
    for get in fields.values():
        yield from _parts(get(value), lambda batch, get=get: get(take(batch)))  # type: ignore[misc]


def _sizes_of_list(value: Any, take: Take, is_whole: bool) -> Sizes:
    """Return the sizes of a list whose elements are alike: samples, or parts with all samples, such
    as two views of each image."""
    sizes: Sizes = [(len(value), lambda batch: len(take(batch)))]
    inner = [size for part in _parts(value[0], lambda batch: take(batch)[0]) for size in part]
    if isinstance(value[0], Mapping):
        # Dicts are samples. DALI has one dict, of tensors of the same length.
        is_dali = len(value) == 1 and len(inner) == len(value[0]) and len(dict(inner)) == 1
        return (inner if len(inner) > 1 else sizes + inner) if is_dali else sizes
    are_parts = len({_size(one) for one in value}) == 1 and (is_whole or _size(value[0]))
    return sizes + inner if are_parts else sizes


def _size(value: Any) -> Optional[int]:
    """Return the size that a value has itself: a tensor, an array, a packed sequence, or what has
    one of the names by which PyTorch Geometric and tensordict state it."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    for name in ("shape", "num_graphs", "batch_size"):
        size = getattr(value, name, None)
        if isinstance(size, int):
            return size
        if isinstance(size, tuple):
            return int(size[0]) if size else None
    return None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's outputs or of a batch, in whatever containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif dataclasses.is_dataclass(value):
        yield from tensors_in(vars(value))


def checksum(batch: Any, before: int) -> int:
    """Continue a CRC over a batch's tensors; those on a device are left out, which is not read."""
    for tensor in tensors_in(batch):
        if tensor.device.type == "cpu" and not tensor.requires_grad and not tensor.is_sparse:
            content = tensor.contiguous().reshape(-1).view(torch.uint8)
            before = zlib.crc32(content.numpy().data, before)
    return before


def pixels_of(batch: Any) -> int:
    """Return the side of a batch of images (n, channels, height, width); 0 for other batches."""
    first = next(tensors_in(batch), None)
    return first.shape[-1] if first is not None and first.dim() == 4 else 0
