"""Small models for the trainer's tests, given as --model tests.trainer_models:NAME."""

import weakref
from typing import ClassVar

import torch
from torch import nn


def plain(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 49, num_classes)
    )


def normed(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 9, num_classes),
    )  # fmt: skip


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
