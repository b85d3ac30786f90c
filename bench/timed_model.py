"""A stand-in for ResNet-50 on a GPU: it has its parameters, and sleeps instead of computing.

The bench of slow links uses it as --model bench.timed_model:resnet50. The environment says how long
a pass takes: BENCH_FORWARD and BENCH_BACKWARD seconds. Each convolution, and the last layer, takes
an equal share, since a ResNet's blocks have about equally many operations. Each layer ends at its
moment of the pass, so its time includes copies of gradients, as on a GPU. Gradients are normal
numbers that differ between steps and ranks: repeated numbers would be too easy to compress.

Each training step begins with a line in the file BENCH_MARKS: the time, the bytes that this
machine's card has sent without headers, and the seconds that this process kept a core busy.
"""

import json
import os
import random
import time
from pathlib import Path

import torch
import torchvision
from torch import nn

# Bytes of each packet for Ethernet, IP, and TCP with time stamps.
HEADERS = 14 + 20 + 32


def sent_bytes():
    """Return the bytes of payload that eth0 of this network namespace has sent; 0 without eth0."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            # Columns 8 and 9 are what was sent.
            size, packets = map(int, counts.split()[8:10])
            return size - HEADERS * packets
    return 0


class Pass:
    """One forward or backward of so many seconds."""

    def __init__(self, seconds, layers):
        self.seconds, self.layers = seconds, layers
        self.began = 0.0

    def wait(self, done):
        """Sleep until the moment at which so many layers are done. Layer 1 begins the pass."""
        if done == 1:
            self.began = time.monotonic()
        time.sleep(max(0.0, self.began + self.seconds * done / self.layers - time.monotonic()))


class Layer(torch.autograd.Function):
    """A layer that waits instead of computing, and draws its gradients."""

    @staticmethod
    def forward(ctx, images, model, number, *weights):
        ctx.model, ctx.number = model, number
        model.forward_pass.wait(number + 1)
        return images.clone()

    @staticmethod
    def backward(ctx, gradient):
        model, number = ctx.model, ctx.number
        model.backward_pass.wait(len(model.shapes) - number)
        return (gradient, None, None, *model.draw_gradients(number))


class Timed(nn.Module):
    """`shapes[i]`: the shapes of layer i's parameters."""

    def __init__(self, shapes, num_classes):
        super().__init__()
        self.shapes, self.num_classes = shapes, num_classes
        same = torch.Generator().manual_seed(0)  # all ranks have the same weights
        self.layers = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.randn(s, generator=same) * 0.01) for s in layer)
            for layer in shapes
        )
        largest = max(shape.numel() for layer in shapes for shape in layer)
        rank = int(os.environ.get("RANK", "0"))
        seeded = torch.Generator().manual_seed(1 + rank)
        self.numbers = torch.randn(2 * largest, generator=seeded) * 1e-4
        self.drawn = [[] for _ in shapes]
        self.random = random.Random(rank)
        self.forward_pass = Pass(float(os.environ["BENCH_FORWARD"]), len(shapes))
        self.backward_pass = Pass(float(os.environ["BENCH_BACKWARD"]), len(shapes))
        self.marks = Path(os.environ["BENCH_MARKS"])

    def draw_gradients(self, number):
        """Return the gradients of a layer's parameters: parts of a stock of numbers, which cost no
        time."""
        begins = [self.random.randrange(len(self.numbers) // 2) for _ in self.shapes[number]]
        # Autograd writes into gradients that nobody else holds, so this holds them.
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
    """Return a model of 25,557,032 parameters, whatever the number of classes is."""
    shapes = []
    for parameter in torchvision.models.resnet50().parameters():
        if parameter.dim() > 1:  # a convolution or the last layer
            shapes.append([])
        # Parameters of a normalisation, and the bias, belong to the layer before them.
        shapes[-1].append(parameter.shape)
    return Timed(shapes, num_classes)
