"""Round values to a few levels, and send the size of each block of values with their codes.

With scale `peak`, a block's size is its largest magnitude, which is also the outermost level. With
scale `own`, each value has a scale: the value is divided by its scale before rounding, and
multiplied by its scale after decoding. A block's size is then its norm. The distance of two levels
is a fixed part of the block's root mean square, and values beyond the outermost level are clipped.

The code uses plain torch operations on whole tensors, the same on a CPU and a GPU. It uses few of
them: on a GPU each operation is a kernel, and the link waits for the kernels (`bench/codec.py`
counts kernels and bytes). `kernels.py` does the same in three Triton kernels. feedback.py calls
`Operations`, or the kernels.

All ranks must decode bit for bit alike, on different processors and GPUs. Decoding therefore uses
only single operations that IEEE 754 rounds correctly: no sums over a block, whose order differs,
and nothing fused.
"""

import dataclasses
import functools
from typing import Dict, Optional, Tuple

import torch

from contract.strategies import BLOCK, PACKED, coded_bytes

KEPT = 0.95  # the weight of the running mean of squares; the new square weighs 1 - KEPT
# The least scale of a value, relative to the largest in its block. A value whose mean square is
# zero would otherwise be divided by zero.
MIN_SCALE = 0.01


@dataclasses.dataclass(frozen=True)
class Codec:
    """Encodes rows of fp32 as bytes. A code is a level, a whole number from -`levels` to `levels`.

    `packed` neighbouring codes are the digits of a signed byte in base `radix`: with five levels a
    byte is code 0 + 5 * code 1 + 25 * code 2. Each byte holds whole codes, so that an entropy coder
    sees them. `step`: with per-value scales, the distance of two levels divided by the root mean
    square of the block.

    A block with an inf or a NaN decodes to infs and NaNs only, so the sum shows that gradients
    overflowed.
    """

    levels: int
    packed: int
    radix: int
    step: float

    def coded_bytes(self, values: int) -> int:
        """Return the bytes of a row. `values`: its numbers, a multiple of BLOCK and of `packed`."""
        return int(coded_bytes(values, 2 * self.levels + 1))

    def head_bytes(self, values: int) -> int:
        """Return the bytes of the blocks' sizes, in bf16, which precede the codes."""
        return values // BLOCK * 2

    def level_distance(self, has_scales: bool) -> float:
        """Return the distance of two levels, relative to the block's size."""
        # With scales, the size is the norm of BLOCK values: their root mean square * BLOCK**0.5.
        return self.step / BLOCK**0.5 if has_scales else 1 / self.levels

    @torch.no_grad()
    def encode(self, rows: torch.Tensor, scales: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return rows of fp32 (R, V) as uint8 (R, coded_bytes(V)), and replace the rows by their
        rounding errors. `scales`: fp32, one for each value (R, V); None with scale `peak`."""
        count, values = rows.shape
        blocks = rows.view(-1, BLOCK)
        scaled = blocks if scales is None else blocks / scales.reshape(-1, BLOCK)
        coded = torch.empty(count, self.coded_bytes(values), dtype=torch.uint8, device=rows.device)
        # Writing into these views fills `coded`.
        sizes, code_bytes = self._split_rows(coded, values)
        scaled_rows = scaled.view(count, -1, BLOCK)
        if scales is not None:
            sizes.copy_(torch.linalg.vector_norm(scaled_rows, dim=2))
        else:
            # Not abs().amax(), which would make a copy.
            torch.maximum(scaled_rows.amax(2), scaled_rows.amin(2).neg_(), out=sizes)
        distances = self._level_distances(sizes, scales is not None)
        # In a block of almost zeros 1/distance is infinite, and all levels become 0. In a block
        # with an inf or a NaN the levels may be anything, because its size shows the overflow.
        factors = distances.reciprocal().nan_to_num_(0.0, 0.0, 0.0)
        levels = (scaled * factors).round_()  # a half goes to the even level
        # The peak needs no clipping: rounding it to bf16 moves it by less than half a level.
        if scales is not None:
            levels.clamp_(-self.levels, self.levels)
        codes = levels.to(torch.int8)
        # The errors: the values minus what `decode` will make of their codes. They are computed
        # from `levels` and not from `codes`, because torch 1.12 cannot mix types here.
        if scales is None:
            blocks.addcmul_(levels, distances, value=-1)
        else:
            blocks.addcmul_(levels.mul_(distances), scales.reshape(-1, BLOCK), value=-1)
        digits = codes.view(-1, self.packed)
        packed = digits[:, 0]
        for place in range(1, self.packed):
            packed = torch.add(packed, digits[:, place], alpha=self.radix**place)
        code_bytes.copy_(packed.view(count, -1).view(torch.uint8))
        return coded

    def _split_rows(self, coded: torch.Tensor, values: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return two views of coded rows of `values` numbers: of the blocks' sizes, in bf16, and of
        the bytes with codes."""
        head = self.head_bytes(values)
        return coded[:, :head].view(torch.bfloat16), coded[:, head:]

    def sizes(self, coded: torch.Tensor, values: int) -> torch.Tensor:
        """Return the sizes of the blocks of rows of `values` numbers: bf16 (R, V / BLOCK). A size
        is NaN or infinite if the block has such a value."""
        return self._split_rows(coded, values)[0]

    def _level_distances(self, sizes: torch.Tensor, has_scales: bool) -> torch.Tensor:
        """Return the distance of two levels in each block: fp32 (blocks, 1)."""
        factor = _make_factor(self.level_distance(has_scales), sizes.device)
        return torch.mul(sizes[..., None], factor).view(-1, 1)

    @torch.no_grad()
    def decode(
        self,
        coded: torch.Tensor,
        values: int,
        scales: Optional[torch.Tensor] = None,
        out: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Return rows of `values` numbers as fp32 (R, V), from uint8 (R, coded_bytes(V)). `scales`:
        those of `encode`, or one row for all rows. `out`, only with scales: receives the first
        values, as many as it has, and is returned."""
        sizes, code_bytes = self._split_rows(coded, values)
        if self.packed == 1:
            codes = code_bytes.view(torch.int8)
        else:
            table = _make_table(self, code_bytes.device)
            codes = table.index_select(0, code_bytes.reshape(-1).int())
        distances = self._level_distances(sizes, scales is not None)
        # Each value is one or two products in fp32, and all processors round a product alike.
        decoded = torch.mul(codes.reshape(-1, BLOCK), distances).view(len(coded), values)
        if scales is None:
            return decoded
        if out is None:
            return decoded.mul_(scales)
        filled = slice(out.numel())
        return torch.mul(decoded.view(-1)[filled], scales.reshape(-1)[filled], out=out)


@functools.cache
def _make_factor(value: float, device: torch.device) -> torch.Tensor:
    """Return a factor as fp32 of shape (1). A product of bf16 and this tensor is fp32; a product of
    bf16 and a number would be bf16."""
    return torch.tensor([value], device=device)


@functools.cache
def _make_table(codec: Codec, device: torch.device) -> torch.Tensor:
    """Return the codes in each byte: int8 (256, packed)."""
    codes, quotients = [], torch.arange(256).to(torch.int8).int()  # 0 to 127, then -128 to -1
    for _ in range(codec.packed):
        # The digits are balanced: from -levels to levels, and not from 0 to radix - 1.
        digits = (quotients + codec.levels) % codec.radix - codec.levels
        codes.append(digits)
        quotients = (quotients - digits).div(codec.radix, rounding_mode="floor")
    return torch.stack(codes, 1).to(device, torch.int8)


# `Codec.step` by the number of levels. The steps of 3 and 5 levels were chosen by trials with both
# families of optimizers. The steps of 15 and 255 levels make the smallest errors for normally
# distributed values (Max, "Quantizing for minimum distortion", 1960).
STEPS = {3: 1.4, 5: 0.8, 15: 0.35, 255: 0.03}
RADIX = {1: 256, 2: 16, 3: 5, 5: 3}  # by the number of codes in a byte; not below the levels
# By the number of levels. Codec.levels counts only those above zero.
CODECS: Dict[int, Codec] = {
    levels: Codec(levels // 2, packed, RADIX[packed], STEPS[levels])
    for levels, packed in PACKED.items()
}


@torch.no_grad()
def make_scales(squares: torch.Tensor) -> torch.Tensor:
    """Return each value's root mean square, relative to the largest in its block and at least
    MIN_SCALE. `squares`: fp32 mean squares, block after block. The result has their shape."""
    blocks = squares.view(-1, BLOCK)
    largest = blocks.amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    ratios = blocks / largest
    # On a CPU torch uses MKL's roots, which round a fifth of fp32 numbers wrongly, and differently
    # on each kind of processor. A root in fp64, rounded to fp32, is always right.
    roots = ratios.double().sqrt_().float() if ratios.device.type == "cpu" else ratios.sqrt_()
    return roots.clamp_(min=MIN_SCALE).view(squares.shape)


@torch.no_grad()
def learn(squares: torch.Tensor, sums: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the mean squares after these sums to `out`, and return the largest square of a sum. All
    tensors have the same number of values; `squares` and `out` are fp32, and `sums` have any type.

    A sum s changes the running mean v to 0.95 v + 0.05 s^2. Only ratios of means count, so the
    tensors hold 20 v, which saves an operation."""
    values = sums.float()
    largest_square = torch.mul(values, values, out=out).amax()
    out.add_(squares * KEPT)
    return largest_square


@dataclasses.dataclass(frozen=True)
class Operations:
    """The stages of a bucket as plain operations, on any device.

    `errors`: the rounding errors of the last step. `new_errors`: receives the errors of this step.
    `scales`: the result of the method `scales`, or None with scale `peak`. All are fp32, padded
    with zeros to whole shards.
    """

    codec: Codec

    def scales(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the argument `scales` of the other methods, from a bucket's mean squares."""
        return make_scales(squares)

    def code(
        self,
        buffer: torch.Tensor,
        errors: torch.Tensor,
        new_errors: torch.Tensor,
        scales: Optional[torch.Tensor],
        ranks: int,
    ) -> torch.Tensor:
        """Encode a bucket's values plus their errors: uint8 (ranks, coded_bytes). Each row is the
        shard that one rank will sum."""
        values = buffer.numel()  # the padding behind them stays zero
        torch.add(errors[:values], buffer, out=new_errors[:values])
        return self.codec.encode(new_errors.view(ranks, -1), scales)

    def sum(
        self,
        coded: torch.Tensor,
        errors: torch.Tensor,
        new_errors: torch.Tensor,
        scales: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """Add up the rows (ranks, coded_bytes) of one shard, and encode the sum: uint8
        (coded_bytes)."""
        row_scales = None if scales is None else scales.view(1, -1)
        decoded = self.codec.decode(coded, len(errors), row_scales)
        torch.add(errors, decoded.sum(0), out=new_errors)
        return self.codec.encode(new_errors.view(1, -1), scales)[0]

    def take(
        self,
        coded: torch.Tensor,
        shard: int,
        buffer: torch.Tensor,
        scales: Optional[torch.Tensor],
        squares: Optional[torch.Tensor],
        new_squares: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """Decode the sums (ranks, coded_bytes) of shards of `shard` values into a bucket, and write
        its new mean squares, unless the scale is `peak`. Return the largest square of a sum or,
        with `peak`, the largest size of a block, as a tensor of one number. Either is infinite or
        NaN if a sum overflowed."""
        values = buffer.numel()
        if scales is None or squares is None or new_squares is None:
            buffer.copy_(self.codec.decode(coded, shard).view(-1)[:values])
            return self.codec.sizes(coded, shard).max()
        # Mean squares are learned from fp32 sums, whatever the gradients' type.
        sums = buffer
        if buffer.dtype != torch.float32:
            sums = torch.empty_like(buffer, dtype=torch.float32)
        self.codec.decode(coded, shard, scales, sums)
        largest_square = learn(squares[:values], sums, new_squares[:values])
        if sums is not buffer:
            buffer.copy_(sums)
        return largest_square
