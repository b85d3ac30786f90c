"""Batch normalisation whose statistics are those of the whole batch of all ranks.

torch's own on CUDA; on the CPU, where torch has none, this small one over Gloo. Sums are kept in
float64, so that mean and variance are as exact as those of one big batch. Formulas: Ioffe and
Szegedy, Batch Normalization, 2015, algorithm 1 and section 3.
"""

from typing import Any, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def convert(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with each batch normalisation replaced; parameters and buffers stay."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # A group of its own: DDP's gradients may be under way while statistics are summed.
    return _replace(model, dist.new_group())


def _replace(module: nn.Module, group: Any) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return GlooBatchNorm(module, group)
    for name, child in module.named_children():
        setattr(module, name, _replace(child, group))
    return module


class GlooBatchNorm(_BatchNorm):
    """Takes over the parameters, buffers and mode of `source`. Input (n, channels, ...)."""

    def __init__(self, source: _BatchNorm, group: Any) -> None:
        super().__init__(source.num_features, source.eps, source.momentum, source.affine)
        self.track_running_stats, self.training = source.track_running_stats, source.training
        self.weight, self.bias = source.weight, source.bias
        self.running_mean, self.running_var = source.running_mean, source.running_var
        self.num_batches_tracked = source.num_batches_tracked
        self.group = group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        output, mean, variance, count = _Normalize.apply(
            input, self.weight, self.bias, self.eps, self.group
        )
        self._track(mean, variance, count)
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32 if like.dtype != torch.float64 else like.dtype).view(
        1, -1, *[1] * (like.dim() - 2)
    )


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Optional[torch.Tensor],
        bias: Optional[torch.Tensor],
        eps: float,
        group: Any,
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide = x.double()
        count = torch.full((1,), x.numel() / x.shape[1], dtype=torch.float64)
        sums = torch.cat([wide.sum(axes), (wide * wide).sum(axes), count])
        dist.all_reduce(sums, group=group)
        channels, count = x.shape[1], sums[-1]
        mean = sums[:channels] / count
        variance = (sums[channels:-1] / count - mean * mean).clamp_(min=0)
        inverse = (variance + eps).rsqrt()
        normal = (x - _per_channel(mean, x)) * _per_channel(inverse, x)
        ctx.save_for_backward(normal, inverse, weight, count)
        ctx.axes, ctx.group, ctx.kind = axes, group, x.dtype
        output = normal
        if weight is not None and bias is not None:
            output = normal * _per_channel(weight, x) + _per_channel(bias, x)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> Tuple[Any, ...]:
        normal, inverse, weight, count = ctx.saved_tensors
        grad = grad.to(normal.dtype)
        local = torch.cat([grad.double().sum(ctx.axes), (grad * normal).double().sum(ctx.axes)])
        # The parameters' gradients stay this rank's own: DDP sums them.
        channels = local.numel() // 2
        grad_bias, grad_weight = local[:channels].clone(), local[channels:].clone()
        dist.all_reduce(local, group=ctx.group)
        mean_grad = _per_channel(local[:channels] / count, normal)
        mean_product = _per_channel(local[channels:] / count, normal)
        scale = inverse if weight is None else inverse * weight.double()
        grad_x = (grad - mean_grad - normal * mean_product) * _per_channel(scale, normal)
        if weight is None:
            return grad_x.to(ctx.kind), None, None, None, None
        kind = weight.dtype
        return grad_x.to(ctx.kind), grad_weight.to(kind), grad_bias.to(kind), None, None
