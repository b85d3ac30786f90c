"""A stand-in for a GPU: a net that sleeps for each image instead of computing. Its 6.7 million
gradients keep a link busy."""

import time

from torch import nn

SECONDS = 0.004  # an image


class Sleeper(nn.Module):
    def __init__(self, net: nn.Module, seconds: float):
        super().__init__()
        self.net = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), net)
        self.seconds = seconds

    def forward(self, images):
        if self.training:
            time.sleep(len(images) * self.seconds)
        return self.net(images)


def heavy_sleeper(num_classes):
    wide = 2560
    layers = [nn.Linear(48, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU()]
    return Sleeper(nn.Sequential(*layers, nn.Linear(wide, num_classes)), SECONDS)
