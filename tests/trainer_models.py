"""Small models for the trainer's tests, given as --model tests.trainer_models:NAME."""

import math
import os
import weakref
from typing import ClassVar

import torch
from torch import nn


def plain(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 49, num_classes)
    )


def several(num_classes):
    """Of several buckets of 1 MiB, for images of 16 pixels."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(768, 400), nn.Tanh(), nn.Linear(400, 700), nn.Tanh(),
        nn.Linear(700, num_classes),
    )  # fmt: skip


def normed(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 9, num_classes),
    )  # fmt: skip


def normed_alone(num_classes):
    """Without dropout, whose draws are a rank's own."""
    return nn.Sequential(
        *(layer for layer in normed(num_classes) if not isinstance(layer, nn.Dropout))
    )


class _OutOfMemory(nn.Module):
    """Runs out of memory at forwards of more than `limit` samples, as a small device would."""

    def __init__(self, inner, limit, always=False):
        super().__init__()
        self.inner, self.limit, self.always = inner, limit, always

    def forward(self, images):
        training = self.training and torch.is_grad_enabled()
        if (training or self.always) and len(images) > self.limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate more than there is")
        return self.inner(images)


def small_device(num_classes):
    return _OutOfMemory(plain(num_classes), 4)


def small_device_always(num_classes):
    return _OutOfMemory(plain(num_classes), 4, always=True)


def small_device_late(num_classes):
    """Runs out of memory after its batch normalisation has been computed."""
    return nn.Sequential(nn.BatchNorm2d(3), _OutOfMemory(plain(num_classes), 4))


class Watched(_OutOfMemory):
    """Notes at each pass that does not fit whether what the last one had computed still lives."""

    alive: ClassVar = []
    last = staticmethod(lambda: None)

    def forward(self, images):
        if len(images) > self.limit and self.training:
            Watched.alive.append(Watched.last() is not None)
            computed = images * 2
            Watched.last = weakref.ref(computed)
        return super().forward(images)


def watched(num_classes):
    return Watched(plain(num_classes), 4)


class Unused(nn.Module):
    """Has a layer that no output depends on."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.idle = inner, nn.Linear(2, 2)

    def forward(self, images):
        return self.inner(images)


def unused(num_classes):
    return Unused(plain(num_classes))


class _Spoiled(nn.Module):
    """Counts the passes of training, from 1, without the blank ones before the first; what it
    returns in a pass among `bad`, or in an evaluation after one of them, is NaN. On all ranks, or
    only on `rank`."""

    def __init__(self, inner, bad, rank=None, evaluation=False):
        super().__init__()
        self.inner, self.bad, self.evaluation, self.passes = inner, bad, evaluation, 0
        self.here = rank in (None, int(os.environ.get("RANK", "0")))

    def forward(self, images):
        self.passes += self.training and bool(images[0, 0].std() > 0)
        outputs = self.inner(images)
        is_bad = self.passes in self.bad and self.training is not self.evaluation
        return outputs * math.nan if is_bad and self.here else outputs


def nan_from_pass_6(num_classes):
    return _Spoiled(plain(num_classes), range(6, 1000))


def nan_once_on_rank_1(num_classes):
    return _Spoiled(plain(num_classes), [6], rank=1)


def nan_in_two_passes(num_classes):
    return _Spoiled(plain(num_classes), [4, 5])


def nan_in_first_evaluation(num_classes):
    """With five passes an epoch."""
    return _Spoiled(plain(num_classes), [5], evaluation=True)


def nan_in_every_evaluation(num_classes):
    return _Spoiled(plain(num_classes), range(1000), evaluation=True)


class _Overflowing(nn.Module):
    """The gradients of its first 12 passes are infinite, the losses are not."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.passes = inner, 0

    def forward(self, images):
        self.passes += 1
        outputs = self.inner(images)
        if self.passes <= 12 and outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradient * math.inf)
        return outputs


def overflowing(num_classes):
    return _Overflowing(plain(num_classes))
