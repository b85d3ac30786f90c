"""Quantisation to a few levels a value, whose distance is sent for each block of values.

By the *peak*: the outermost level is the block's largest magnitude. By scales of the values' *own*:
each value is divided by its scale before, and multiplied by it after; a step between two levels is
a part of the block's root mean square, and what lies beyond the outermost level is clipped.

Plain torch operations on whole tensors, the same on a CPU and a GPU, and few of them: on a GPU each
is a kernel, and the link waits for them (`bench/codec.py` counts kernels and bytes). What all ranks
must compute alike, to the bit, on unlike processors and cards, is made of single operations that
IEEE 754 rounds correctly (no sums over a block, whose order differs, nothing fused).
"""

import dataclasses
import functools
from typing import Dict, Optional, Tuple

import torch

from contract.strategies import BLOCK, PACKED, coded_bytes, dense

KEPT = 0.95  # what a step keeps of the running mean of squares
LEAST = 0.01  # an own scale, relative to the largest one of its block


@dataclasses.dataclass(frozen=True)
class Codec:
    """`levels` on each side of zero. A code is from -`levels` to `levels`, and `packed` of them,
    neighbours, are the digits of a signed byte in base `radix`; where `dense`, eight such bytes are
    sent as seven. `step`: with own scales, in root mean squares of a block.

    A block with an inf or a NaN decodes to NaNs and infs only, so that its sum shows that the
    gradients overflowed.
    """

    levels: int
    packed: int
    radix: int
    step: float

    @property
    def dense(self) -> bool:
        return dense(2 * self.levels + 1)

    def coded_bytes(self, values: int) -> int:
        """Bytes of a row of `values` numbers, a multiple of BLOCK and of `packed`."""
        return int(coded_bytes(values, 2 * self.levels + 1))

    @torch.no_grad()
    def encode(self, rows: torch.Tensor, own: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Rows of fp32 (R, V) as bytes (R, coded_bytes(V)); the rows become what is left out.
        `own`: the scales of the values, alike."""
        count, values = rows.shape
        blocks = rows.view(-1, BLOCK)
        scaled = blocks if own is None else blocks / own.reshape(-1, BLOCK)
        size = self._size(scaled, own is not None).bfloat16()
        step = self._step(size, own is not None)
        levels = self._levels(scaled, step, own is not None)
        codes = levels.to(torch.int8)
        # (torch 1.12 mixes no types here)
        if own is None:
            blocks.addcmul_(levels, step, value=-1)
        else:
            blocks.addcmul_(levels.mul_(step), own.reshape(-1, BLOCK), value=-1)
        coded = torch.empty(count, self.coded_bytes(values), dtype=torch.uint8, device=rows.device)
        sizes, body = self._parts(coded, values)
        digits = codes.view(-1, self.packed)
        packed = digits[:, 0]
        for place in range(1, self.packed):
            packed = packed.add(digits[:, place], alpha=self.radix**place)
        packed = packed.view(count, -1).view(torch.uint8)
        if self.dense:
            _lay_over(packed, body)
        else:
            body.copy_(packed)
        sizes.copy_(size.view(count, -1))
        return coded

    def _parts(self, coded: torch.Tensor, values: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Of rows of so many values the sizes of their blocks, in bf16, and the codes."""
        head = values // BLOCK * 2
        return coded[:, :head].view(torch.bfloat16), coded[:, head:]

    def _size(self, scaled: torch.Tensor, own: bool) -> torch.Tensor:
        """Of each block what is sent: its norm or its largest magnitude."""
        if own:
            return torch.linalg.vector_norm(scaled, dim=1)
        # Not abs().amax(), which would make a copy.
        return torch.maximum(scaled.amax(1), scaled.amin(1).neg_())

    def _levels(self, scaled: torch.Tensor, step: torch.Tensor, own: bool) -> torch.Tensor:
        """The level of each value, from -`levels` to `levels`, in fp32. In a block with infs or
        NaNs, which its size alone marks as such, they may be any."""
        factor = step.reciprocal().nan_to_num_(0.0, 0.0, 0.0)  # next to nothing: 0
        levels = (scaled * factor).round_()
        # By the peak none is beyond: rounded to bf16, it loses less than half a level.
        return levels.clamp_(-self.levels, self.levels) if own else levels

    def sizes(self, coded: torch.Tensor, values: int) -> torch.Tensor:
        """What was sent of each block of rows of so many values: bf16 (R, V / BLOCK). NaN or
        infinity where the block has such a value."""
        return self._parts(coded, values)[0]

    def _lift_off(self, codes: torch.Tensor) -> torch.Tensor:
        """The inverse of `_lay_over`, of rows of the table: the codes of each row."""
        bits = codes[:, :, -1].view(len(codes), 7, -1)
        last = (bits * _weights(codes.device)).sum(1, dtype=torch.int32)
        found = _table(self, codes.device).index_select(0, last.view(-1))
        found = found.view(len(codes), -1, codes.shape[2])
        return torch.cat([codes[:, :, :-1], found[:, :, :-1]], 1)

    def _step(self, size: torch.Tensor, own: bool) -> torch.Tensor:
        """The distance of two levels in each block."""
        part = self.step / BLOCK**0.5 if own else 1 / self.levels
        return torch.mul(size[..., None], _in_fp32(part, size.device)).view(-1, 1)

    @torch.no_grad()
    def decode(
        self,
        coded: torch.Tensor,
        values: int,
        own: Optional[torch.Tensor] = None,
        sizes: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """The inverse of `encode` for rows of `values` numbers: fp32 (R, V). `own`: their scales,
        or those that all rows have; `sizes`: of the blocks, where they are at hand."""
        _, body = self._parts(coded, values)
        step = self._step(self.sizes(coded, values) if sizes is None else sizes, own is not None)
        if self.packed == 1:
            codes = body.view(torch.int8)
        else:
            codes = _table(self, coded.device).index_select(0, body.int().view(-1))
            if self.dense:
                codes = self._lift_off(codes.view(len(coded), -1, self.packed + 1))
        found = torch.mul(codes.reshape(-1, BLOCK), step).view(len(coded), values)
        return found if own is None else found.mul_(own)


@functools.cache
def _in_fp32(value: float, device: torch.device) -> torch.Tensor:
    """A factor that makes fp32 of bf16 in the same operation."""
    return torch.tensor([value], device=device)


def _lay_over(packed: torch.Tensor, body: torch.Tensor) -> None:
    """Eight bytes whose values are from -64 to 63 as seven. Each has two equal upper bits, so that
    the last eighth of a row can be laid over the uppermost ones of the others, bit by bit."""
    rows, last = len(packed), packed.shape[1] // 8
    over = packed[:, None, -last:].bitwise_left_shift(_shifts(packed.device)).bitwise_and_(128)
    parts = packed[:, :-last].view(rows, 7, last)
    torch.bitwise_xor(parts, over, out=body.view(rows, 7, last))


@functools.cache
def _shifts(device: torch.device) -> torch.Tensor:
    """By which bit k of a byte becomes its uppermost: uint8 (7, 1)."""
    return torch.arange(7, 0, -1, dtype=torch.uint8, device=device).view(7, 1)


@functools.cache
def _table(codec: Codec, device: torch.device) -> torch.Tensor:
    """The codes in each byte: int8 (256, packed). Where bytes are laid over one another, of the
    lower seven bits, and in one more column what was laid over the uppermost."""
    bits, codes = torch.arange(256), []
    rest = (bits + 64) % 128 - 64 if codec.dense else bits.to(torch.int8).int()
    for _ in range(codec.packed):
        codes.append((rest + codec.levels) % codec.radix - codec.levels)
        rest = (rest - codes[-1]).div(codec.radix, rounding_mode="floor")
    codes += [((bits >> 7) + (bits >> 6)) % 2] if codec.dense else []
    return torch.stack(codes, 1).to(device, torch.int8)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Of the bits of a byte: int8 (7, 1)."""
    return torch.tensor([1 << bit for bit in range(7)], dtype=torch.int8, device=device).view(7, 1)


# Steps: of three and five levels by trials on both families of optimizers, of more those that lose
# least of a normal distribution (Max, "Quantizing for minimum distortion", 1960).
STEPS = {3: 1.4, 5: 0.8, 15: 0.35, 255: 0.03}
RADIX = {1: 256, 2: 16, 3: 5, 5: 3}  # by how many are in a byte
CODECS: Dict[int, Codec] = {
    levels: Codec(levels // 2, packed, RADIX[packed], STEPS[levels])
    for levels, packed in PACKED.items()
}


@torch.no_grad()
def own_scales(squares: torch.Tensor) -> torch.Tensor:
    """Of the values whose mean squares these are, blocks after blocks: their roots relative to the
    largest one of each block, and not below LEAST."""
    blocks = squares.view(-1, BLOCK)
    most = blocks.amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    return (blocks / most).sqrt_().clamp_(min=LEAST).view(squares.shape)


@torch.no_grad()
def learn(squares: torch.Tensor, sums: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write what the mean squares become with these sums; returns the largest square of a sum.

    Their running mean v is 0.95 v + 0.05 s^2; only its ratios count, so 20 v is kept, which takes
    an operation less."""
    values = sums.float()
    most = torch.mul(values, values, out=out).amax()
    out.add_(squares * KEPT)
    return most
