"""Models of the GPU's cases, given as --model tests.gpu.models:NAME."""

from torch import nn

from tests.trainer_models import Unused, plain


def fixed(num_classes):
    """No dropout, whose chance is another on each device."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 9, num_classes),
    )  # fmt: skip


def plain_unused(num_classes):
    return Unused(plain(num_classes))


def fixed_unused(num_classes):
    return Unused(fixed(num_classes))
