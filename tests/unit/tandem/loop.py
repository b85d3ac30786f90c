"""A loop as a script has it, by DDP and `tandem.sync.attach`, on the trainer's images."""

import contextlib
import dataclasses
import datetime

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from contract.options import Options
from tandem import sync
from tandem.compat import ddp_buffers
from tests import trainer_models
from trainer.data.batch import Normalise, derive_seed
from trainer.data.folder import ImageFolder
from trainer.data.loader import TrainBatches
from trainer.optim import build_optimizer, learning_rate
from trainer.world import World

CPU = torch.device("cpu")


def joined():
    """This rank's process group, as a script makes it."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    return dist.get_rank(), dist.get_world_size()


def wrapped(model, **more):
    return DistributedDataParallel(model, bucket_cap_mb=1, **ddp_buffers(False), **more)


@dataclasses.dataclass
class Script:
    """Trains `trainer_models.<model>` on these images; DDP averages means of `batch` images."""

    images: str
    model: str
    spec: str
    batch: int
    epochs: int
    accumulate: int = 1
    dtype: torch.dtype = torch.float32
    scaler: object = None
    overflows: int = -1  # the step in which rank 0's loss is infinite
    leaves_out: int = -1  # the step that is not made; the scale is halved, as by an overflow

    def __post_init__(self):
        self.rank, self.world = joined()
        self.options = Options(
            data=self.images, augment="none", lr=0.05, workers=0, epochs=self.epochs,
            warmup_epochs=0, per_node_batch_size=self.batch,
        )  # fmt: skip
        place = World(self.rank, self.world, batches=(self.batch,) * self.world)
        self.folder = ImageFolder(self.images, "train", self.options)
        self.batches = TrainBatches(self.folder, self.options, place)
        torch.manual_seed(derive_seed("weights", self.options.seed))
        self.net = getattr(trainer_models, self.model)(len(self.folder.classes)).to(self.dtype)
        self.optimizer = build_optimizer(self.net, self.options, self.batch * self.world)
        self.ddp = wrapped(self.net, gradient_as_bucket_view=True)
        self.attached = sync.attach(self.ddp, self.spec, scaler=self.scaler)
        self.normalise = Normalise(CPU, self.dtype, torch.contiguous_format)
        blank = torch.zeros((2, 3, *[self.folder.sizes.train] * 2), dtype=self.dtype)
        self.attached.warm_up_buckets(lambda: (self.ddp(blank).sum() * 0).backward())

    def steps(self, begin, end):
        each = len(self.folder) // (self.batch * self.world)
        epoch = None
        for step in range(begin, end):
            if epoch is None or step % each == 0:
                epoch = self.batches.epoch(step // each, step % each * self.batch * self.world)
            batch = next(epoch)
            if step == self.leaves_out:
                self.scaler.update(self.scaler.get_scale() / 2)
                continue
            lr = learning_rate(self.options, step, each, self.batch * self.world)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.one(batch, step == self.overflows and self.rank == 0)

    def one(self, batch, overflow):
        self.optimizer.zero_grad(set_to_none=True)
        sizes = [self.batch // self.accumulate] * self.accumulate
        for number, (part, classes) in enumerate(
            zip(batch.images.split(sizes), batch.targets.split(sizes))
        ):
            last = number == self.accumulate - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                loss = cross_entropy(self.ddp(self.normalise(part)), classes) / self.accumulate
                loss = loss * float("inf") if overflow else loss
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def weights(self):
        return {name: value.clone().numpy() for name, value in self.net.state_dict().items()}


def trained(images, model, spec, batch, epochs, steps, accumulate=1, dtype=torch.float32):
    script = Script(images, model, spec, batch, epochs, accumulate, dtype)
    script.steps(0, steps)
    return script.weights()


def half(images, model, spec, batch, epochs, begin, end, folder):
    """The steps from `begin` to `end`, from and to a file of each rank's own."""
    script = Script(images, model, spec, batch, epochs)
    file = f"{folder}/rank{script.rank}.pt"
    if begin:
        saved = torch.load(file)
        script.net.load_state_dict(saved["net"])
        script.optimizer.load_state_dict(saved["optimizer"])
        script.attached.load_state_dict(saved["sync"])
    script.steps(begin, end)
    saved = {"net": script.net.state_dict(), "optimizer": script.optimizer.state_dict()}
    torch.save({**saved, "sync": script.attached.state_dict()}, file)
    return script.weights()


def scaled(images, model, spec, batch, epochs, steps, event):
    """The weights, what is left out of the sums, and the scale after a loop with a GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    script = Script(images, model, spec, batch, epochs, scaler=scaler, **event)
    script.steps(0, steps)
    kept = script.attached.state_dict()["sync"]["kept"]
    left = {name: [one.clone().numpy() for one in tensors] for name, tensors in kept.items()}
    return script.weights(), left, scaler.get_scale()
