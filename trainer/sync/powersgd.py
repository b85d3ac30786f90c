"""Gradients of weight matrices as products of two thin matrices, with error feedback.

Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019: one step of power iteration, starting from
the last step's result; what the product leaves out is kept and added to the next gradient. Tensors
that would not shrink to half (biases, normalisation, thin matrices) travel whole, together with the
first factor. Each bucket takes two sums.

All ranks compute the product from the same factors. Machines of different kinds may round it
differently, in the last bit of fp32.
"""

import dataclasses
import functools
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist

from contract.strategies import Strategy, is_thinned

from .carrier import Stage, to_host
from .feedback import Feedback


@dataclasses.dataclass
class Bucket:
    """One bucket while it is exchanged: its tensors and both factors of the matrices to factorise.
    The tensors hold the gradients plus what was left out before; in the end, they hold what is left
    out now, for the next step."""

    buffer: torch.Tensor  # DDP's; receives the result
    tensors: List[torch.Tensor]
    thin: List[torch.Tensor]
    whole: List[torch.Tensor]
    left: List[torch.Tensor]  # P (rows, R), orthonormal
    right: List[torch.Tensor]  # Q (columns, R)


class PowerSGD(Feedback):
    """Keeps what was left out of each bucket, and the right factors of the last step."""

    def __init__(
        self, strategy: Strategy, last_bucket: Callable[[], None], patience: float = 120.0
    ) -> None:
        super().__init__(strategy, last_bucket, patience)
        self.rank = int(strategy.arguments[0])
        self.shapes: Dict[int, List[torch.Size]] = {}

    def stages(self) -> List[Stage]:
        first, second = Stage(self._sum_left, sends=True), Stage(self._sum_right, sends=True)
        return [Stage(self._left), first, Stage(self._right), second, Stage(self._product)]

    def hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.shapes[bucket.index()] = [gradient.shape for gradient in bucket.gradients()]
        return super().hook(state, bucket)

    def sizes(self, buffer: torch.Tensor, index: int) -> List[int]:
        thin = [sides(shape) for shape in self.shapes[index] if self._is_thin(shape)]
        return [buffer.numel(), sum(columns for _, columns in thin) * self.rank]

    def _is_thin(self, shape: torch.Size) -> bool:
        return len(shape) > 1 and is_thinned(*sides(shape), self.rank)

    def _left(self, job: Any) -> Bucket:
        """Compute the first factor: this rank's M Q."""
        buffer, index, kept = job
        flat = kept.coming[0].copy_(kept.now[0]).add_(buffer)
        bucket = self._bucket(buffer, index, flat, kept.coming[1])
        last = factors(kept.now[1], bucket.thin, self.rank)
        bucket.left = [m @ guess(q) for m, q in zip(bucket.thin, last)]
        return bucket

    def _sum_left(self, bucket: Bucket, group: Any) -> Bucket:
        sum_all([*bucket.left, *bucket.whole], group)
        return bucket

    def _right(self, bucket: Bucket) -> Bucket:
        """Make the columns of the first factor P orthonormal, and compute the second one: this
        rank's M' P. The difference M - P P' M is kept."""
        for factor in bucket.left:
            orthonormalise(factor)
        for matrix, left, right in zip(bucket.thin, bucket.left, bucket.right):
            torch.mm(matrix.t(), left, out=right)
            matrix.sub_(left @ right.t())
        return bucket

    def _sum_right(self, bucket: Bucket, group: Any) -> Bucket:
        sum_all(bucket.right, group)
        return bucket

    def _product(self, bucket: Bucket) -> torch.Tensor:
        products = iter([left @ right.t() for left, right in zip(bucket.left, bucket.right)])
        thin = {id(matrix) for matrix in bucket.thin}
        ordered = [next(products) if id(one) in thin else one.clone() for one in bucket.tensors]
        torch._foreach_zero_(bucket.whole)  # sent whole, so nothing is left out
        return bucket.buffer.copy_(torch.cat([one.reshape(-1) for one in ordered]))

    def blank(self, job: Any) -> Bucket:
        buffer, index, _ = job
        flat, right = (
            torch.empty(size, device=buffer.device) for size in self.sizes(buffer, index)
        )
        bucket = self._bucket(buffer, index, flat, right)
        bucket.left = [m.new_empty(len(m), self.rank) for m in bucket.thin]
        return bucket

    def wire(self, bucket: Bucket) -> List[torch.Tensor]:
        return [*bucket.left, *bucket.right, *bucket.whole]

    def _bucket(
        self, buffer: torch.Tensor, index: int, flat: torch.Tensor, right: torch.Tensor
    ) -> Bucket:
        """`flat`: the values of its tensors; `right`: where to put the second factors."""
        shapes = self.shapes[index]
        parts = flat.split([shape.numel() for shape in shapes])
        tensors = [
            part.view(sides(shape)) if self._is_thin(shape) else part
            for part, shape in zip(parts, shapes)
        ]
        thin = [tensor for tensor in tensors if tensor.dim() == 2]
        whole = [tensor for tensor in tensors if tensor.dim() == 1]
        return Bucket(buffer, tensors, thin, whole, [], factors(right, thin, self.rank))


def sides(shape: torch.Size) -> Tuple[int, int]:
    """Rows and columns, where all dimensions but the first are flattened into one."""
    return shape[0], shape.numel() // shape[0]


def factors(flat: torch.Tensor, matrices: List[torch.Tensor], rank: int) -> List[torch.Tensor]:
    """Views (columns, R) into one tensor, one for each matrix."""
    parts = flat.split([matrix.shape[1] * rank for matrix in matrices])
    return [part.view(-1, rank) for part in parts]


def guess(factor: torch.Tensor) -> torch.Tensor:
    """The last step's right factor with normalised columns. A column of zeros, which could never
    become anything else, is replaced by noise that is equal on all ranks."""
    norms = factor.norm(dim=0)
    return torch.where(norms > 0, factor / norms, noise(factor.shape, factor.device))


@functools.cache
def noise(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """The noise for one shape, cached after the first step. It is drawn on the host, where all
    ranks draw the same numbers, and copying it to a GPU in each step would mean waiting."""
    generator = torch.Generator().manual_seed(shape.numel())
    return torch.randn(shape, generator=generator).to(device)


def orthonormalise(matrix: torch.Tensor) -> None:
    """Gram-Schmidt, in place. LAPACK is not used, because it refuses infs and NaNs, which here only
    mean that this step will be skipped. A column that is nothing but rounding error becomes zeros.
    """
    before = matrix.norm(dim=0)
    for column in range(matrix.shape[1]):
        own = matrix[:, column]
        norm = own.norm()
        own.mul_(torch.where(norm > 1e-5 * before[column], 1 / norm, torch.zeros_like(norm)))
        rest = matrix[:, column + 1 :]
        rest.sub_(own[:, None] * (own @ rest))


def sum_all(tensors: List[torch.Tensor], group: Any) -> None:
    """Sum tensors over all ranks, in place, by one all-reduce."""
    if not tensors:
        return
    flat = to_host(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    dist.all_reduce(flat, group=group)
    flat = flat.to(tensors[0].device, non_blocking=True)
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(values.view_as(tensor))
