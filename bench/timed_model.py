"""A stand-in for ResNet-50 on a GPU: its parameters, and sleep in the place of computing.

For the bench of slow links alone, as --model bench.timed_model:resnet50. What it takes is
told by the environment: BENCH_FORWARD and BENCH_BACKWARD seconds. Each convolution, and the last
layer, takes an equal share, for a ResNet's blocks have about equally many operations. A layer ends
at its moment of the pass, not so long after the one before, so that what this machine's cores do
for it in the meantime (copies of gradients) is part of its time, as on a GPU.

Gradients are normal numbers, others at each step and on each rank, since codes are compressed: the
same ones again and again would be more even than those of a training.

At the beginning of each training step a line goes to the file BENCH_MARKS: the moment, bytes that
this machine's card has sent without headers, and seconds that this process kept a core busy.
"""

import json
import os
import random
import time
from pathlib import Path

import torch
import torchvision
from torch import nn

# Of Ethernet, IP and TCP with time stamps, one for each packet that the card counts.
HEADERS = 14 + 20 + 32


def sent_bytes():
    """Payload that the card has sent, by /proc/net/dev of this network namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            size, packets = map(int, counts.split()[8:10])
            return size - HEADERS * packets
    return 0


class Pass:
    """Sleeps until the moments at which the layers of one forward or backward end."""

    def __init__(self, seconds, layers):
        self.seconds, self.layers = seconds, layers
        self.began = 0.0

    def wait(self, done):
        if done == 1:
            self.began = time.monotonic()
        time.sleep(max(0.0, self.began + self.seconds * done / self.layers - time.monotonic()))


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images, place, number, *weights):
        ctx.place, ctx.number = place, number
        place.there.wait(number + 1)
        return images.clone()

    @staticmethod
    def backward(ctx, gradient):
        place, number = ctx.place, ctx.number
        place.back.wait(len(place.shapes) - number)
        return (gradient, None, None, *place.draw_gradients(number))


class Timed(nn.Module):
    """`shapes[i]`: those of layer i's parameters."""

    def __init__(self, shapes, num_classes):
        super().__init__()
        self.shapes, self.num_classes = shapes, num_classes
        make = torch.Generator().manual_seed(0)
        drawn = [[torch.randn(shape, generator=make) * 0.01 for shape in own] for own in shapes]
        self.layers = nn.ModuleList(nn.ParameterList(map(nn.Parameter, own)) for own in drawn)
        largest = max(shape.numel() for own in shapes for shape in own)
        seeded = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))
        self.numbers = torch.randn(2 * largest, generator=seeded) * 1e-4
        self.drawn = [[] for _ in shapes]
        self.random = random.Random(int(os.environ.get("RANK", "0")))
        self.there = Pass(float(os.environ["BENCH_FORWARD"]), len(shapes))
        self.back = Pass(float(os.environ["BENCH_BACKWARD"]), len(shapes))
        self.marks = Path(os.environ["BENCH_MARKS"])

    def draw_gradients(self, number):
        """Those of a layer's parameters: parts of a stock of numbers, which cost no time."""
        begins = [self.random.randrange(len(self.numbers) // 2) for _ in self.shapes[number]]
        # Kept, since autograd would write into what nobody else holds.
        self.drawn[number] = [
            self.numbers[begin : begin + shape.numel()].view(shape)
            for begin, shape in zip(begins, self.shapes[number])
        ]
        return self.drawn[number]

    def forward(self, images):
        values = images.mean((1, 2, 3))
        if self.training:
            mark = {"at": time.monotonic(), "sent": sent_bytes(), "busy": time.process_time()}
            with self.marks.open("a") as marks:
                marks.write(json.dumps(mark) + "\n")
            values = values.requires_grad_()
            for number, weights in enumerate(self.layers):
                values = Layer.apply(values, self, number, *weights)
        return values[:, None].expand(-1, self.num_classes) * 1.0


def resnet50(num_classes):
    """25,557,032 parameters, whatever the number of classes is."""
    shapes = []
    for parameter in torchvision.models.resnet50().parameters():
        if parameter.dim() > 1:
            shapes.append([])
        shapes[-1].append(parameter.shape)  # a normalisation's, or a bias
    return Timed(shapes, num_classes)
