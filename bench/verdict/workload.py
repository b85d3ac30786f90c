"""The network that the trials train. It sleeps for each image instead of computing, as if it ran on
a GPU, so that four machines take little of this machine's processors. Its gradients are summed for
real.

Each step reads /srv/trial.json of its machine, whose values replace those of USUAL.
"""

import hashlib
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

LAYERS = 8
# `image`: seconds for each image, a quarter of them in forward; `times`: their factor; `copy`:
# seconds in which a batch goes to the device; `burn`: seconds of computing in each backward, in so
# many `threads`; `width`: values of a layer. The file may add `hang` (in forward) and `leave`.
USUAL = {"image": 0.0625, "times": 1.0, "copy": 0.0, "burn": 0.0, "threads": 1, "width": 125_000}
BLOCK = bytes(1 << 16)


def read_trial():
    path = Path("/srv/trial.json")
    try:
        return {**USUAL, **json.loads(path.read_text())}
    except FileNotFoundError:
        return USUAL


def burn(seconds):
    """Use so many seconds of a processor, however long that takes while others use it, too."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        hashlib.sha256(BLOCK).digest()  # large enough to release Python's lock


def burn_in_threads(seconds, count):
    if seconds:
        threads = [threading.Thread(target=burn, args=(seconds,)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def slow_copies():
    """Let batches take `copy` seconds to the device, since a CPU needs no copies."""
    copy = torch.Tensor.to

    def slow(tensor, *args, **options):
        to_device = args and isinstance(args[0], torch.device)
        if to_device and tensor.dtype == torch.uint8 and tensor.dim() == 4:
            time.sleep(read_trial()["copy"])
        return copy(tensor, *args, **options)

    torch.Tensor.to = slow


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, weight, model, number):
        ctx.model, ctx.number = model, number
        time.sleep(model.seconds / 4)
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        model = ctx.model
        time.sleep(model.seconds * 3 / 4)
        if ctx.number == 0:  # in one piece, of which other programs take their part
            burn_in_threads(model.trial["burn"], model.trial["threads"])
        return gradient, model.draw_gradient(ctx.number), None, None


class Sleeper(nn.Module):
    """`seconds`: of a layer's forward and backward in this step; `trial`: as read in this step."""

    def __init__(self, num_classes):
        super().__init__()
        self.num_classes = num_classes
        make = torch.Generator().manual_seed(0)
        self.width = read_trial()["width"]
        drawn = (torch.randn(self.width, generator=make) * 0.01 for _ in range(LAYERS))
        self.layers = nn.ParameterList(map(nn.Parameter, drawn))
        self.seconds, self.trial = 0.0, USUAL
        rank = int(os.environ.get("RANK", "0"))
        self.numbers = torch.randn(2 * self.width, generator=make.manual_seed(rank)) * 1e-4
        self.random, self.gradients = random.Random(rank), {}

    def draw_gradient(self, number):
        """Return a part of a stock of numbers, which costs no time. It differs by step and rank,
        since strategies compress it. Autograd writes into what nobody else holds, so this does."""
        begin = self.random.randrange(self.width)
        self.gradients[number] = self.numbers[begin : begin + self.width]
        return self.gradients[number]

    def forward(self, images):
        values = images.float().mean((1, 2, 3))
        if self.training:
            self.trial = read_trial()
            while "hang" in self.trial:
                time.sleep(0.2)
                self.trial = read_trial()
            if "leave" in self.trial:
                sys.exit(0)
            self.seconds = self.trial["image"] * self.trial["times"] * len(images) / LAYERS
            values = values.requires_grad_()
            for number, weight in enumerate(self.layers):
                values = Layer.apply(values, weight, self, number)
        return values[:, None].expand(-1, self.num_classes) * 1.0


def sleeper(num_classes):
    slow_copies()
    return Sleeper(num_classes)
