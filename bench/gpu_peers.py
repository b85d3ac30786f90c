"""The training loops that `make bench-gpu` compares, with the same model, optimizer, batch and
precision. Those of torchvision and timm are written against public interfaces.

A contender has a `name`. `synthetic` gives it the batch of all its steps, and `step` makes one.
"""

import contextlib
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torchvision
from torch import nn

from contract.options import Options
from tandem.clock import Clock
from trainer.build import build_job, build_materials
from trainer.data.batch import MEAN, STD, Batch
from trainer.data.folder import ImageFolder
from trainer.decide import decide
from trainer.step import rebuild_buckets, train_step
from trainer.world import start

LR = 0.01
AUTOCAST = {"bf16": torch.bfloat16, "O1": torch.float16}


@dataclass(frozen=True)
class Setting:
    """One row's model and how it is computed. `data`: the folder of generated images; `size`:
    pixels of a side."""

    device: torch.device
    data: ImageFolder
    model: str
    size: int
    batch: int
    precision: str
    channels_last: bool
    compiled: bool

    def __str__(self):
        shape = "channels last" if self.channels_last else "contiguous"
        compiled = ", compiled" if self.compiled else ""
        model = f"{self.model} {self.size} px, batch {self.batch}"
        return f"{model}, {self.precision}, {shape}{compiled}"

    def pixels(self):
        """Return (images, targets) as our loader does: uint8 (n, 3, size, size), channels last,
        and int64 (n); in pinned memory for a GPU."""
        draw = torch.Generator().manual_seed(0)
        shape = (self.batch, self.size, self.size, 3)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw).permute(0, 3, 1, 2)
        targets = torch.randint(0, len(self.data.classes), (self.batch,), generator=draw)
        on_gpu = self.device.type == "cuda"
        return (images.pin_memory(), targets.pin_memory()) if on_gpu else (images, targets)


class Tandem:
    """The trainer's own step."""

    name = "Tandem"

    def __init__(self, setting):
        options = Options(
            data=str(setting.data.root), model=setting.model, image_size=setting.size, lr=LR,
            per_node_batch_size=setting.batch, precision=setting.precision, momentum=0.9,
            channels_last=setting.channels_last, compile=setting.compiled, emulate=True,
            device=setting.device.type, progress="plain", augment="crop",
        )  # fmt: skip
        world = start(options)
        options, world = decide(options, world)
        self.job = build_job(options, world, build_materials(options, world), Clock(world.device))
        rebuild_buckets(self.job)
        self.batch, self.number = None, 0

    def synthetic(self, images, targets):
        self.batch = Batch(images, targets, torch.arange(len(images)), [len(images)])

    def step(self):
        train_step(self.job, self.batch, self.number, LR)
        self.number += 1


class Bare:
    """The shortest loop in plain torch: it measures nothing, and catches no errors."""

    name = "bare torch"

    def __init__(self, setting):
        device = setting.device
        model = getattr(torchvision.models, setting.model)(num_classes=len(setting.data.classes))
        shape = torch.channels_last if setting.channels_last else torch.contiguous_format
        self.shape, self.device = shape, device
        self.model = model.to(device, memory_format=shape)
        self.optimizer = torch.optim.SGD(
            model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4,
            **({"fused": True} if device.type == "cuda" else {}),
        )  # fmt: skip
        self.loss = nn.CrossEntropyLoss()
        self.net = torch.compile(self.model) if setting.compiled else self.model
        self.autocast = AUTOCAST.get(setting.precision)
        self.scaler = torch.amp.GradScaler(device.type, enabled=setting.precision == "O1")
        self.mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1) * 255
        self.scale = torch.tensor(STD, device=device).view(1, 3, 1, 1) * 255

    def synthetic(self, images, targets):
        self.images, self.targets = images, targets

    def inputs(self):
        images = self.images.to(self.device, non_blocking=True)
        floats = images.to(torch.float32, memory_format=self.shape).sub_(self.mean)
        return floats.div_(self.scale), self.targets.to(self.device, non_blocking=True)

    def forward(self, images, targets):
        cast = contextlib.nullcontext()
        if self.autocast is not None:
            cast = torch.autocast(self.device.type, dtype=self.autocast)
        with cast:
            outputs = self.net(images)
            return outputs, self.loss(outputs, targets)

    def update(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self):
        self.update(self.forward(*self.inputs())[1])


class TorchvisionLike(Bare):
    """As torchvision's reference script for classification: images come from the loader as
    normalised floats, and each step reads its loss and accuracy."""

    name = "torchvision's reference loop"

    def synthetic(self, images, targets):
        normalise = torchvision.transforms.Normalize(MEAN, STD)
        floats = normalise(images.float().div(255)).contiguous()
        self.images = floats.pin_memory() if self.device.type == "cuda" else floats
        self.targets = targets

    def inputs(self):
        images = self.images.to(self.device, non_blocking=True)
        return images.contiguous(memory_format=self.shape), self.targets.to(self.device)

    def step(self):
        images, targets = self.inputs()
        outputs, loss = self.forward(images, targets)
        self.update(loss)
        with torch.inference_mode():
            best = outputs.topk(min(5, outputs.shape[1]), 1).indices
            hits = best == targets[:, None]
            self.seen = loss.item(), hits[:, 0].sum().item(), hits.sum().item()


class TimmLike(Bare):
    """With timm's optimizer and scaler, as its training script combines them."""

    name = "timm's loop"

    def __init__(self, setting):
        super().__init__(setting)
        import timm.optim
        import timm.utils

        model = timm.create_model(setting.model, num_classes=len(setting.data.classes))
        self.model = model.to(self.device, memory_format=self.shape)
        self.net = torch.compile(self.model) if setting.compiled else self.model
        self.optimizer = timm.optim.create_optimizer_v2(
            self.model, opt="momentum", lr=LR, momentum=0.9, weight_decay=1e-4
        )
        self.native = timm.utils.NativeScaler() if setting.precision == "O1" else None

    def update(self, loss):
        self.optimizer.zero_grad()
        if self.native is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.native(loss, self.optimizer, parameters=self.model.parameters())


def contenders():
    """Return the classes, ours first. timm's is left out where timm is not installed."""
    return [Tandem, Bare, TorchvisionLike, *([TimmLike] if find_spec("timm") else [])]
