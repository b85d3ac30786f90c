"""A stand-in for a network on a GPU whose times can be changed while it trains: 22 MB of parameters
that are summed for real, sleep and a little real computing in the place of the rest.

The file TRIAL_FAULTS (JSON) has seconds: {"forward", "backward", "burn"}, the last of real
computing in each backward pass. It is read again at each step.
"""

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

LAYERS, WIDTH = 8, 700_000  # parameters: 5.6 million, in 22 MB
USUAL = {"forward": 0.08, "backward": 0.28, "burn": 0.05}


def faults():
    """What the file says, and what is usual for the rest, or where there is no file."""
    path = Path(os.environ.get("TRIAL_FAULTS", "/none"))
    return {**USUAL, **(json.loads(path.read_text()) if path.exists() else {})}


def burn(seconds):
    """Keep a processor busy for so long, however long others have it meanwhile."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Layer(torch.autograd.Function):
    """`seconds`: of its forward, its backward, and its real computing in the latter."""

    @staticmethod
    def forward(ctx, values, weight, seconds):
        ctx.seconds, ctx.size = seconds, weight.shape
        time.sleep(seconds[0])
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds[1])
        burn(ctx.seconds[2])
        return gradient, torch.full(ctx.size, 1e-6), None


class Timed(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.num_classes = num_classes
        make = torch.Generator().manual_seed(0)
        drawn = (torch.randn(WIDTH, generator=make) * 0.01 for _ in range(LAYERS))
        self.layers = nn.ParameterList(map(nn.Parameter, drawn))

    def forward(self, images):
        values = images.mean((1, 2, 3))
        if self.training:
            said = faults()
            seconds = [said[name] / LAYERS for name in ("forward", "backward", "burn")]
            values = values.requires_grad_()
            for weight in self.layers:
                values = Layer.apply(values, weight, seconds)
        return values[:, None].expand(-1, self.num_classes) * 1.0


def timed(num_classes):
    return Timed(num_classes)
