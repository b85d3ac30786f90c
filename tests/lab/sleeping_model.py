"""Stand-ins for GPUs: nets that sleep for each image instead of computing. `sleeper` is small, and
of another speed on each of three nodes. `heavy_sleeper` is as fast everywhere, and
its 6.7 million gradients keep a link busy."""

import os
import time

from torch import nn

SECONDS = 0.004  # an image
# So long that what the machines of a lab share, its processors, hardly counts.
UNLIKE = {"node1": 0.02, "node2": 0.03, "node3": 0.04}


class Sleeper(nn.Module):
    def __init__(self, net: nn.Module, seconds: float):
        super().__init__()
        self.net = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), net)
        self.seconds = seconds

    def forward(self, images):
        if self.training:
            time.sleep(len(images) * self.seconds)
        return self.net(images)


def sleeper(num_classes):
    seconds = UNLIKE.get(os.environ.get("TANDEM_NODE", ""), SECONDS)
    return Sleeper(nn.Linear(48, num_classes), seconds)


def heavy_sleeper(num_classes):
    wide = 2560
    layers = [nn.Linear(48, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU()]
    return Sleeper(nn.Sequential(*layers, nn.Linear(wide, num_classes)), SECONDS)
