"""Train one model on many devices: with DDP over ranks, or with DataParallel in one process."""

from typing import Any, List, Optional, Tuple

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from contract.errors import UserError
from contract.options import Options
from contract.split import even_parts
from tandem.compat import ddp_buffers, static_graph_accumulates
from tandem.sync import Attached

from .precision import Precision
from .world import World


class BalancedDataParallel(DataParallel):  # type: ignore[type-arg]
    """DataParallel that gives fewer samples to GPU 0, which also holds the optimizer's state."""

    def __init__(self, model: nn.Module, gpu0_batch: int) -> None:
        super().__init__(model)
        self.gpu0_batch = gpu0_batch

    def scatter(self, inputs: Tuple[Any, ...], kwargs: Any, device_ids: Any) -> Any:
        # The parent class calls this method, and would split evenly.
        sizes = balanced_sizes(len(inputs[0]), len(device_ids), self.gpu0_batch)
        batches = inputs[0].split(sizes)
        scattered = [
            (batch.to(torch.device("cuda", gpu), non_blocking=True),)
            for batch, gpu in zip(batches, device_ids)
        ]
        return scattered, [kwargs] * len(scattered)


def balanced_sizes(count: int, gpus: int, gpu0_batch: int) -> List[int]:
    """Split `count` samples: `gpu0_batch` for GPU 0, and the remaining samples evenly over the
    other GPUs. Return only the numbers that are not zero."""
    gpu0_size = min(gpu0_batch, count) if gpus > 1 else count
    other_sizes = even_parts(count - gpu0_size, gpus - 1) if gpus > 1 else []
    return [size for size in [gpu0_size, *other_sizes] if size]


def check(options: Options, world: World) -> None:
    """Raise UserError for options that --parallel cannot combine."""
    if (options.gpu0_batch is None) == (options.parallel == "balanced-dp"):
        raise UserError(
            "--parallel balanced-dp needs --gpu0_batch N (images for GPU 0), and --gpu0_batch "
            "needs --parallel balanced-dp."
        )
    if options.parallel == "ddp":
        return
    for name in ("sync_bn", "compile", "checkpoint_activations"):
        if getattr(options, name):
            raise UserError(
                f"--{name} does not work with --parallel {options.parallel}, whose copies of the "
                "model share no statistics and no rewritten layers: use --parallel ddp."
            )
    gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if world.size > 1:
        raise UserError(
            f"--parallel {options.parallel} is one process for all GPUs of one machine, and "
            f"{world.size} were started: use --parallel ddp."
        )
    if gpus < 1:
        raise UserError(f"--parallel {options.parallel} needs GPUs, and this machine has none.")
    # Each GPU needs at least one image of a micro-batch.
    if options.per_node_batch_size // options.accumulate < gpus:
        raise UserError(
            f"a micro-batch of {options.per_node_batch_size // options.accumulate} is smaller "
            f"than {gpus} GPUs: use --per_node_batch_size {gpus * options.accumulate} or more."
        )


class Computing(nn.Module):
    """A model whose forward runs within `precision.computing()`, whichever thread calls it.

    DataParallel's threads inherit that autocast is on, but not its dtype: bf16 would become fp16.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with self.precision.computing():
            return self.model(images)


def check_micro_batches(options: Options, world: World, count: int) -> None:
    """Raise UserError if DDP of this torch cannot run a step of `count` micro-batches."""
    if options.static_graph and count > 1 and world.size > 1 and not static_graph_accumulates():
        raise UserError(
            f"--static_graph does not work with micro-batches ({count} a step) in torch "
            f"{torch.__version__}: leave --static_graph out, or use torch 2."
        )


def wrap(
    model: nn.Module, options: Options, world: World, attached: Optional[Attached]
) -> nn.Module:
    """Return `model` in the wrapper that training steps call, with the same parameters."""
    if options.parallel == "balanced-dp":
        return BalancedDataParallel(model, int(options.gpu0_batch or 1))
    if options.parallel == "dp":
        return DataParallel(model)
    if attached is None:
        return model
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        bucket_cap_mb=options.bucket_size,
        # Gradients are views of the buckets, and take no more memory.
        gradient_as_bucket_view=True,
        **ddp_buffers(options.broadcast_buffers),
    )
    attached.register(ddp)
    return ddp
