"""Count the samples in a batch, and find its tensors.

The types in a batch do not show the number: a tensor's first dimension may be time, and a list may
contain samples or fields. `SampleCounter` therefore compares the sizes of all fields of a loader's
first batch with each other, and with the loader's batch size. If they differ, the number is
unknown. timings.py calls this file.
"""

import contextlib
import dataclasses
import zlib
from collections import Counter
from collections.abc import Mapping
from operator import attrgetter, itemgetter
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
from torch.nn.utils.rnn import PackedSequence

Getter = Callable[[Any], Any]
# The sizes of a field that may be the number of samples, each with a getter for other batches.
Sizes = List[Tuple[int, Getter]]


class SampleCounter:
    """Counts the samples in a loader's batches by one field, which its first batch determines."""

    def __init__(self, loader: Any) -> None:
        size = getattr(loader, "batch_size", None)  # torch's and DALI's loaders state one
        self._stated: Optional[int] = size if isinstance(size, int) else None
        if self._stated is not None:
            # The sampler may have fewer samples, or no length.
            with contextlib.suppress(AttributeError, TypeError):
                self._stated = min(self._stated, len(loader.sampler))
        self._measure: Optional[Getter] = None
        self._is_first = True

    def count(self, batch: Any) -> Optional[int]:
        """Return the number of samples in a batch, or None if it is unknown."""
        try:
            if self._is_first:
                self._is_first = False
                self._measure = _choose_measure(batch, self._stated)
            number: Optional[int] = self._measure(batch) if self._measure else None
        except Exception:  # a batch of another structure, or a class whose property raises
            return None
        # A number above the stated one is no number of samples: in the first batch, a sequence
        # had this length by chance.
        return None if number and self._stated and number > self._stated else number


def _choose_measure(batch: Any, stated: Optional[int]) -> Optional[Getter]:
    """Find a getter of the number of samples for batches like this one; None if it is unknown."""
    fields = list(_find_sizes(batch, lambda batch: batch, is_batch=True))
    sizes = [size for field in fields for size in field]
    if stated is not None:
        sizes += [(len(batch), len)] if isinstance(batch, (list, tuple)) else []
        return next((measure for number, measure in sizes if number == stated), None)
    # Prefer a number that all fields have, and otherwise take one that most of them have.
    votes = Counter(number for field in fields for number in dict(field))
    for min_votes in (len(fields), len(fields) // 2 + 1):
        winners = {number: measure for number, measure in sizes if votes[number] >= min_votes}
        if winners:
            return next(iter(winners.values())) if len(winners) == 1 else None
    return None


def _find_sizes(value: Any, get_value: Getter, is_batch: bool = False) -> Iterator[Sizes]:
    """Yield the sizes of each field of a value, nested ones included. `get_value` returns the same
    value of another batch; `is_batch`: the value is the batch itself."""
    getters: List[Getter] = []
    size = _read_size(value)
    if size is not None:
        yield [(size, lambda batch: _read_size(get_value(batch)))]
    elif isinstance(value, Mapping):
        getters = [itemgetter(name) for name in value]
    elif isinstance(value, (list, tuple)) and value:
        # A batch is a tuple of fields, or a list of unlike fields; other lists may hold samples.
        kinds = {(type(e), getattr(e, "dtype", 0), getattr(e, "ndim", 0)) for e in value}
        if is_batch and (isinstance(value, tuple) or len(kinds) > 1):
            getters = [itemgetter(index) for index in range(len(value))]
        else:
            yield _find_list_sizes(value, get_value, is_batch)
    elif is_batch or dataclasses.is_dataclass(value):
        getters = [attrgetter(name) for name in getattr(value, "__dict__", ())]
    for get in getters:
        yield from _find_sizes(get(value), lambda batch, get=get: get(get_value(batch)))  # type: ignore[misc]


def _find_list_sizes(value: Any, get_value: Getter, is_batch: bool) -> Sizes:
    """Return the sizes of a list of like elements: samples, or fields that hold all samples, such
    as two views of each image."""
    sizes: Sizes = [(len(value), lambda batch: len(get_value(batch)))]
    inner_fields = _find_sizes(value[0], lambda batch: get_value(batch)[0])
    inner_sizes = [size for field in inner_fields for size in field]
    if isinstance(value[0], Mapping):
        # Dicts are samples. But DALI has a list with one dict, of tensors of the same length.
        is_dali = (
            len(value) == 1 and len(inner_sizes) == len(value[0]) and len(dict(inner_sizes)) == 1
        )
        if not is_dali:
            return sizes
        return inner_sizes if len(inner_sizes) > 1 else sizes + inner_sizes
    are_fields = len({_read_size(e) for e in value}) == 1 and (is_batch or _read_size(value[0]))
    return sizes + inner_sizes if are_fields else sizes


def _read_size(value: Any) -> Optional[int]:
    """Return the size of a tensor, array or packed sequence, or the size that an object of PyTorch
    Geometric or tensordict has as an attribute. Returns None for other values."""
    # A packed sequence has a row for each time step of each sequence. The first count is that of
    # the sequences.
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
    """Yield the tensors of a model's outputs or of a batch, in any containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from tensors_in(element)
    elif dataclasses.is_dataclass(value):
        yield from tensors_in(vars(value))


def checksum(batch: Any, crc: int) -> int:
    """Continue a CRC over a batch's tensors on the CPU. (To read a GPU, a rank would wait.)"""
    for tensor in tensors_in(batch):
        # A sparse tensor has no plain bytes, and one with a gradient no numpy array.
        if tensor.device.type == "cpu" and not tensor.requires_grad and not tensor.is_sparse:
            content = tensor.contiguous().reshape(-1).view(torch.uint8)
            crc = zlib.crc32(content.numpy().data, crc)
    return crc


def pixels_of(batch: Any) -> int:
    """Return the side of a batch of images (n, channels, height, width); 0 for other batches."""
    tensor = next(tensors_in(batch), None)
    return tensor.shape[-1] if tensor is not None and tensor.dim() == 4 else 0
