"""Batch normalisation with the statistics of the whole batch of all ranks (--sync_bn).

On CUDA, torch's SyncBatchNorm does this. On the CPU, `GlooBatchNorm` does. Its sums are in fp64, so
that mean and variance are as exact as those of one large batch. Formulas: Ioffe and Szegedy, "Batch
Normalization", 2015, algorithm 1 and section 3.
"""

from datetime import timedelta
from typing import Any, NamedTuple, Tuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tandem.clock import Clock


def convert(model: nn.Module, device: torch.device, clock: Clock, timeout: int) -> nn.Module:
    """Make each batch normalisation of the model sum over all ranks. Its parameters and buffers
    stay. `timeout`: seconds. Collective."""
    # In DDP's group, statistics would wait behind buckets of 25 MiB that are being sent.
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            # Only the computation changes: the module stays the same object with the same contents.
            module.__class__ = GlooBatchNorm
            cast(GlooBatchNorm, module).group = Group(group, clock)
    return model


class Group(NamedTuple):
    """The process group over which statistics are summed, and the clock that times the wait."""

    group: Any
    clock: Clock

    def sum(self, values: torch.Tensor) -> None:
        """Sum `values` in place, over all ranks."""
        with self.clock.within("sync_exposed"):
            dist.all_reduce(values, group=self.group)


class GlooBatchNorm(_BatchNorm):
    """Batch normalisation over all ranks by Gloo. Input (n, channels, ...)."""

    group: Group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass  # any number of dimensions: this stands for BatchNorm1d, 2d and 3d

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        output, mean, variance, count = _Normalize.apply(
            input, self.weight, self.bias, self.eps, self.group
        )
        if self.running_mean is None or self.running_var is None:
            return output
        # Update the running statistics as torch does.
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            weight = self.momentum
            if weight is None:  # the plain mean over all batches, whose number torch then counts
                weight = 1.0 / float(cast(torch.Tensor, self.num_batches_tracked))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
            unbiased = variance * (count / (count - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
        return output


def _wide(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shape per-channel fp64 `values` to multiply `like` by, in fp32 at least."""
    kind = torch.promote_types(like.dtype, torch.float32)
    return values.to(kind).view(1, -1, *[1] * (like.dim() - 2))


class _Normalize(torch.autograd.Function):
    """Normalises with the statistics of all ranks, and returns (output, mean, variance, count)."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, eps: float, group: Any
    ) -> Tuple[Any, ...]:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide, channels = x.double(), x.shape[1]
        size = wide.new_tensor([x.numel() / channels])
        sums = torch.cat([wide.sum(axes), (wide * wide).sum(axes), size])
        group.sum(sums)
        count = sums[-1]
        mean = sums[:channels] / count
        # Rounding may make a variance slightly negative.
        variance = (sums[channels:-1] / count - mean * mean).clamp_(min=0)
        inverse = (variance + eps).rsqrt()
        normal = (x - _wide(mean, x)) * _wide(inverse, x)
        ctx.save_for_backward(normal, inverse, weight, count)
        ctx.axes, ctx.group, ctx.kind = axes, group, x.dtype
        output = normal if weight is None else normal * _wide(weight, x) + _wide(bias, x)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Any, *_: Any) -> Tuple[Any, ...]:
        normal, inverse, weight, count = ctx.saved_tensors
        grad = grad.to(normal.dtype)
        # The parameters' gradients are of this rank only: DDP sums them.
        local_sums = torch.stack(
            [(grad * normal).double().sum(ctx.axes), grad.double().sum(ctx.axes)]
        )
        total = local_sums.clone()
        ctx.group.sum(total)
        # The statistics depend on every input of all ranks, and so does each input's gradient.
        mean_product, mean_grad = (_wide(sums / count, normal) for sums in total)
        scale = inverse if weight is None else inverse * weight
        grad_x = (grad - mean_grad - normal * mean_product) * _wide(scale, normal)
        grad_weight, grad_bias = (None, None) if weight is None else local_sums.to(weight.dtype)
        return grad_x.to(ctx.kind), grad_weight, grad_bias, None, None
