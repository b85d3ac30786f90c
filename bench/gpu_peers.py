"""Training loops beside which `make bench-gpu` puts ours: contenders with the same model,
optimizer, batch and precision. Written against the public interfaces of torch, torchvision and
timm; nothing of theirs is copied.
"""

import contextlib
from importlib.util import find_spec

import torch
import torchvision
from torch import nn

from contract.options import Options
from tandem.clock import Clock
from trainer.build import build_job, build_materials
from trainer.data.batch import MEAN, STD, Batch
from trainer.decide import decide
from trainer.step import rebuild_buckets, train_step
from trainer.world import start

LR = 0.01
AUTOCAST = {"bf16": torch.bfloat16, "O1": torch.float16}


class Setting:
    """One row's model and how it is computed; `data`: the generated images."""

    def __init__(self, device, data, model, size, batch, precision, channels_last, compiled):
        self.device, self.data, self.model = device, data, model
        self.size, self.batch, self.precision = size, batch, precision
        self.channels_last, self.compiled = channels_last, compiled

    def __str__(self):
        shape = "channels last" if self.channels_last else "contiguous"
        return f"{self.model} {self.size} px, batch {self.batch}, {self.precision}, {shape}" + (
            ", compiled" if self.compiled else ""
        )

    def pixels(self):
        """A batch as our loader gives it: uint8 (n, 3, size, size), channels last; targets."""
        draw = torch.Generator().manual_seed(0)
        shape = (self.batch, self.size, self.size, 3)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw).permute(0, 3, 1, 2)
        targets = torch.randint(0, len(self.data.classes), (self.batch,), generator=draw)
        on_gpu = self.device.type == "cuda"
        return (images.pin_memory(), targets.pin_memory()) if on_gpu else (images, targets)


class Tandem:
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
    """The loop that one writes by hand: no figures, no loader, no rescue."""

    name = "bare torch"

    def __init__(self, setting):
        self.setting, device = setting, setting.device
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
    """As torchvision's reference for classification: floats are made by the loader's processes, and
    loss and accuracy are read in each step."""

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
    """With timm's optimizer and scaler, as its train script puts them together; written from its
    documentation."""

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
        if self.native is None:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        else:
            self.optimizer.zero_grad()
            self.native(loss, self.optimizer, parameters=self.model.parameters())


def contenders():
    """Ours first."""
    return [Tandem, Bare, TorchvisionLike, *([TimmLike] if find_spec("timm") else [])]
