"""Models of the GPU's cases, given as --model tests.gpu.models:NAME."""

from torch import nn

from tests.trainer_models import Unused, plain
from tests.trainer_models import normed_alone as fixed


def plain_unused(num_classes):
    return Unused(plain(num_classes))


def fixed_unused(num_classes):
    return Unused(fixed(num_classes))


class Hungry(nn.Module):
    """Takes 16 MiB an image of 16 pixels; in evaluation so much more as is said."""

    def __init__(self, num_classes, in_evaluation=1):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8192, 3, padding=1, bias=False), nn.ReLU())
        self.fc = nn.Linear(8192, num_classes)
        self.in_evaluation = in_evaluation

    def forward(self, images):
        count = len(images)
        if not self.training and count > 1:  # one image is what the model is tried with
            images = images.repeat(self.in_evaluation, 1, 1, 1)
        return self.fc(self.stem(images).mean((2, 3)))[:count]


def hungry(num_classes):
    return Hungry(num_classes)


def hungry_in_evaluation(num_classes):
    return Hungry(num_classes, 64)


def pooled(num_classes):
    """Whose pooling has no deterministic backward on a GPU."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(5), nn.Flatten(), nn.Linear(200, num_classes)
    )
