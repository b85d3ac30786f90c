"""Gradients of weight matrices as products of two thin matrices, with error feedback.

Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019: one step of power iteration, starting from
the last step's result; what the product leaves out is kept and added to the next gradient. Tensors
that would not shrink to half (biases, normalisation, thin matrices) travel whole, together with the
first factor. Each bucket takes two sums.

All ranks compute the product from the same factors. Machines of different kinds may round it
differently, in the last bit of fp32.

On a GPU each operation is a kernel, so what is done to the factors of one side is done to all of a
bucket at once: they are pages of one tensor, filled up with zeros, which change no norm and no dot
product.
"""

import dataclasses
import functools
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
import torch.distributed as dist

from contract.strategies import Strategy, is_factorised

from ..compat import copy_all
from .carrier import Flag, Stage, to_host
from .feedback import BucketState, Feedback


@dataclasses.dataclass
class Bucket:
    """One bucket while it is exchanged: its tensors and both factors of the matrices to factorise.
    The tensors hold the gradients plus what was left out before; in the end, they hold what is left
    out now, for the next step."""

    buffer: torch.Tensor  # DDP's; receives the result
    index: int
    kept: BucketState
    matrices: List[torch.Tensor]
    whole: List[torch.Tensor]
    pages: torch.Tensor
    left: List[torch.Tensor]  # P (rows, R), orthonormal; parts of pages
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
        matrices = [sides(shape) for shape in self.shapes[index] if self._is_factorised(shape)]
        return [buffer.numel(), sum(columns for _, columns in matrices) * self.rank]

    def _is_factorised(self, shape: torch.Size) -> bool:
        return len(shape) > 1 and is_factorised(*sides(shape), self.rank)

    def _left(self, job: Any) -> Bucket:
        """Compute the first factor: this rank's M Q."""
        buffer, _, kept = job
        flat = kept.coming[0].copy_(kept.now[0]).add_(buffer)
        bucket = self._bucket(job, flat, kept.coming[1])
        last = guess(factors(kept.now[1], bucket.matrices, self.rank))
        for matrix, left, right in zip(bucket.matrices, bucket.left, last):
            torch.mm(matrix, right, out=left)
        return bucket

    def _sum_left(self, bucket: Bucket, group: Any) -> Bucket:
        sum_all([*bucket.left, *bucket.whole], group)
        return bucket

    def _right(self, bucket: Bucket) -> Bucket:
        """Make the columns of the first factor P orthonormal, and compute the second one: this
        rank's M' P. The difference M - P P' M is kept."""
        if bucket.matrices:
            orthonormalise(bucket.pages)
        for matrix, left, right in zip(bucket.matrices, bucket.left, bucket.right):
            torch.mm(matrix.t(), left, out=right)
            matrix.addmm_(left, right.t(), alpha=-1)
        return bucket

    def _sum_right(self, bucket: Bucket, group: Any) -> Bucket:
        sum_all(bucket.right, group)
        return bucket

    def _product(self, bucket: Bucket) -> torch.Tensor:
        total = bucket.buffer.new_empty(bucket.buffer.numel(), dtype=torch.float32)
        matrices, whole = self._split(total, bucket.index)
        for matrix, left, right in zip(matrices, bucket.left, bucket.right):
            torch.mm(left, right.t(), out=matrix)
        copy_all(whole, bucket.whole)
        torch._foreach_zero_(bucket.whole)  # sent whole, so nothing is left out
        result = bucket.buffer.copy_(total)
        bucket.kept.finite = Flag(result.abs().max(), torch.finfo(result.dtype).max)
        return result

    def blank(self, job: Any) -> Bucket:
        buffer, index, _ = job
        flat, right = (
            torch.empty(size, device=buffer.device) for size in self.sizes(buffer, index)
        )
        return self._bucket(job, flat, right)

    def wire(self, bucket: Bucket) -> List[torch.Tensor]:
        return [*bucket.left, *bucket.right, *bucket.whole]

    def _bucket(self, job: Any, flat: torch.Tensor, right: torch.Tensor) -> Bucket:
        """`flat`: the values of its tensors; `right`: where to put the second factors."""
        buffer, index, kept = job
        matrices, whole = self._split(flat, index)
        pages, left = blank_pages([(len(matrix), self.rank) for matrix in matrices], flat.device)
        second = factors(right, matrices, self.rank)
        return Bucket(buffer, index, kept, matrices, whole, pages, left, second)

    def _split(
        self, flat: torch.Tensor, index: int
    ) -> Tuple[List[torch.Tensor], List[torch.Tensor]]:
        """The bucket's matrices to factorise, and its other tensors, as parts of their values."""
        matrices, whole, shapes = [], [], self.shapes[index]
        for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes):
            if self._is_factorised(shape):
                matrices.append(part.view(sides(shape)))
            else:
                whole.append(part)
        return matrices, whole


def sides(shape: torch.Size) -> Tuple[int, int]:
    """Rows and columns, where all dimensions but the first are flattened into one."""
    return shape[0], shape.numel() // shape[0]


def factors(flat: torch.Tensor, matrices: List[torch.Tensor], rank: int) -> List[torch.Tensor]:
    """Views (columns, R) into one tensor, one for each matrix."""
    parts = flat.split([matrix.shape[1] * rank for matrix in matrices])
    return [part.view(-1, rank) for part in parts]


Shape = Tuple[int, ...]


def blank_pages(
    shapes: Sequence[Shape], device: torch.device
) -> Tuple[torch.Tensor, List[torch.Tensor]]:
    """Zeros (n, longest, R) for n factors of these shapes (length, R), and each one's part."""
    longest, columns = (max((shape[side] for shape in shapes), default=0) for side in (0, 1))
    pages = torch.zeros(len(shapes), longest, columns, device=device)
    return pages, [page[: shape[0]] for page, shape in zip(pages, shapes)]


def guess(last: List[torch.Tensor]) -> List[torch.Tensor]:
    """The last step's right factors with normalised columns. A column of zeros, which could never
    become anything else, is replaced by noise that is equal on all ranks."""
    if not last:
        return []
    shapes = tuple(tuple(factor.shape) for factor in last)
    pages, parts = blank_pages(shapes, last[0].device)
    copy_all(parts, last)
    norms = pages.norm(dim=1, keepdim=True)
    pages.copy_(torch.where(norms > 0, pages / norms, noise(shapes, pages.device)))
    return parts


@functools.cache
def noise(shapes: Tuple[Shape, ...], device: torch.device) -> torch.Tensor:
    """Pages of noise, cached after the first step. It is drawn on the host, where all ranks draw
    the same numbers, and copying it to a GPU in each step would mean waiting."""
    pages, parts = blank_pages(shapes, torch.device("cpu"))
    for part, shape in zip(parts, shapes):
        generator = torch.Generator().manual_seed(part.numel())
        part.copy_(torch.randn(shape, generator=generator))
    return pages.to(device)


def orthonormalise(pages: torch.Tensor) -> None:
    """Gram-Schmidt of each page's columns, in place. LAPACK is not used, because it refuses infs
    and NaNs, which here only mean that this step will be skipped. A column that is nothing but
    rounding error becomes zeros."""
    before = pages.norm(dim=1)
    for column in range(pages.shape[2]):
        own = pages[:, :, column]
        norm = own.norm(dim=1)
        nothing = norm <= 1e-5 * before[:, column]
        own.mul_(norm.reciprocal().masked_fill_(nothing, 0)[:, None])
        rest = pages[:, :, column + 1 :]
        rest.sub_(own[:, :, None] * torch.bmm(own[:, None], rest))


def sum_all(tensors: List[torch.Tensor], group: Any) -> None:
    """Sum tensors over all ranks, in place, by one all-reduce."""
    if not tensors:
        return
    flat = to_host(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    dist.all_reduce(flat, group=group)
    flat = flat.to(tensors[0].device, non_blocking=True)
    parts = flat.split([tensor.numel() for tensor in tensors])
    copy_all(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors)])
