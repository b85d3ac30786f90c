"""A stand-in for unlike GPUs: a small net that sleeps for each image, on node3 twice as long."""

import os
import time

from torch import nn

SECONDS = {"node3": 0.008}  # an image; elsewhere half of it


class Sleeper(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.net = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes))

    def forward(self, images):
        if self.training:
            time.sleep(len(images) * SECONDS.get(os.environ.get("TANDEM_NODE", ""), 0.004))
        return self.net(images)


def sleeper(num_classes):
    return Sleeper(num_classes)
