"""Quantisation to a few levels a value, whose distance is sent for each block of values.

By the *peak*: the outermost level is the block's largest magnitude. By scales of the values' *own*:
each value is divided by its scale before, and multiplied by it after; a step between two levels is
a part of the block's root mean square, and what lies beyond the outermost level is clipped.

Plain torch operations on whole tensors, the same on a CPU and a GPU, and few of them: on a GPU each
is a kernel, and the link waits for them (`bench/codec.py` counts kernels and bytes); `kernels` does
the same by three of Triton's where a card takes them. What all ranks
must compute alike, to the bit, on unlike processors and cards, is made of single operations that
IEEE 754 rounds correctly (no sums over a block, whose order differs, nothing fused).
"""

import dataclasses
import functools
from typing import Dict, Optional, Tuple

import torch

from contract.strategies import BLOCK, PACKED, coded_bytes

KEPT = 0.95  # what a step keeps of the running mean of squares
LEAST = 0.01  # an own scale, relative to the largest one of its block


@dataclasses.dataclass(frozen=True)
class Codec:
    """`levels` on each side of zero. A code is from -`levels` to `levels`, and `packed` of them,
    neighbours, are the digits of a signed byte in base `radix`: whole values in each byte, so that
    an entropy coder sees them. `step`: with own scales, in root mean squares of a block.

    A block with an inf or a NaN decodes to NaNs and infs only, so that its sum shows that the
    gradients overflowed.
    """

    levels: int
    packed: int
    radix: int
    step: float

    def coded_bytes(self, values: int) -> int:
        """Bytes of a row of `values` numbers, a multiple of BLOCK and of `packed`."""
        return int(coded_bytes(values, 2 * self.levels + 1))

    def head_bytes(self, values: int) -> int:
        """Those of them that are sizes of blocks, in bf16; the codes follow."""
        return values // BLOCK * 2

    def part(self, own: bool) -> float:
        """The distance of two levels, in what is sent of a block."""
        return self.step / BLOCK**0.5 if own else 1 / self.levels

    @torch.no_grad()
    def encode(self, rows: torch.Tensor, own: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Rows of fp32 (R, V) as bytes (R, coded_bytes(V)); the rows become what is left out.
        `own`: the scales of the values, alike."""
        count, values = rows.shape
        blocks = rows.view(-1, BLOCK)
        scaled = blocks if own is None else blocks / own.reshape(-1, BLOCK)
        coded = torch.empty(count, self.coded_bytes(values), dtype=torch.uint8, device=rows.device)
        sizes, body = self._parts(coded, values)
        self._write_sizes(scaled.view(count, -1, BLOCK), sizes, own is not None)
        step = self._step(sizes, own is not None)
        levels = self._levels(scaled, step, own is not None)
        codes = levels.to(torch.int8)
        # (torch 1.12 mixes no types here)
        if own is None:
            blocks.addcmul_(levels, step, value=-1)
        else:
            blocks.addcmul_(levels.mul_(step), own.reshape(-1, BLOCK), value=-1)
        self._write_codes(codes, body)
        return coded

    def _write_codes(self, codes: torch.Tensor, body: torch.Tensor) -> None:
        digits = codes.view(-1, self.packed)
        packed = digits[:, 0]
        for place in range(1, self.packed):
            packed = torch.add(packed, digits[:, place], alpha=self.radix**place)
        body.copy_(packed.view(len(body), -1).view(torch.uint8))

    def _parts(self, coded: torch.Tensor, values: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Of rows of so many values the sizes of their blocks, in bf16, and the codes."""
        head = self.head_bytes(values)
        return coded[:, :head].view(torch.bfloat16), coded[:, head:]

    def _write_sizes(self, scaled: torch.Tensor, sizes: torch.Tensor, own: bool) -> None:
        """Of each block what is sent: its norm or its largest magnitude."""
        if own:
            sizes.copy_(torch.linalg.vector_norm(scaled, dim=2))
        else:
            # Not abs().amax(), which would make a copy.
            torch.maximum(scaled.amax(2), scaled.amin(2).neg_(), out=sizes)

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

    def _read_codes(self, body: torch.Tensor) -> torch.Tensor:
        if self.packed == 1:
            return body.view(torch.int8)
        return _table(self, body.device).index_select(0, body.reshape(-1).int())

    def _step(self, size: torch.Tensor, own: bool) -> torch.Tensor:
        """The distance of two levels in each block."""
        part = _in_fp32(self.part(own), size.device)
        return torch.mul(size[..., None], part).view(-1, 1)

    @torch.no_grad()
    def decode(
        self,
        coded: torch.Tensor,
        values: int,
        own: Optional[torch.Tensor] = None,
        out: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """The inverse of `encode` for rows of `values` numbers: fp32 (R, V). `own`: their scales,
        or those that all rows have; with them `out`, if given, receives as many as it has room for.
        """
        sizes, body = self._parts(coded, values)
        codes = self._read_codes(body)
        found = torch.mul(codes.reshape(-1, BLOCK), self._step(sizes, own is not None))
        found = found.view(len(coded), values)
        if own is None:
            return found
        if out is None:
            return found.mul_(own)
        first = slice(out.numel())
        return torch.mul(found.view(-1)[first], own.reshape(-1)[first], out=out)


@functools.cache
def _in_fp32(value: float, device: torch.device) -> torch.Tensor:
    """A factor that makes fp32 of bf16 in the same operation."""
    return torch.tensor([value], device=device)


@functools.cache
def _table(codec: Codec, device: torch.device) -> torch.Tensor:
    """The codes in each byte: int8 (256, packed)."""
    codes, rest = [], torch.arange(256).to(torch.int8).int()
    for _ in range(codec.packed):
        codes.append((rest + codec.levels) % codec.radix - codec.levels)
        rest = (rest - codes[-1]).div(codec.radix, rounding_mode="floor")
    return torch.stack(codes, 1).to(device, torch.int8)


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
    parts = blocks / most
    # On a CPU torch's roots of fp32 are MKL's, a fifth of which are rounded wrongly, by each kind
    # of processor in its own way. Those of fp64 are near enough to give the right fp32.
    roots = parts.double().sqrt_().float() if parts.device.type == "cpu" else parts.sqrt_()
    return roots.clamp_(min=LEAST).view(squares.shape)


@torch.no_grad()
def learn(squares: torch.Tensor, sums: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write what the mean squares become with these sums; returns the largest square of a sum.

    Their running mean v is 0.95 v + 0.05 s^2; only its ratios count, so 20 v is kept, which takes
    an operation less."""
    values = sums.float()
    most = torch.mul(values, values, out=out).amax()
    out.add_(squares * KEPT)
    return most


@dataclasses.dataclass(frozen=True)
class Operations:
    """The stages of a bucket by plain operations, on any device.

    `known`, `left`: what the step before left out, and where to write what this one does. `own`:
    what `scales` makes of the mean squares of values with scales of their own, else None.
    """

    codec: Codec

    def scales(self, squares: torch.Tensor) -> torch.Tensor:
        return own_scales(squares)

    def code(
        self,
        buffer: torch.Tensor,
        known: torch.Tensor,
        left: torch.Tensor,
        own: Optional[torch.Tensor],
        ranks: int,
    ) -> torch.Tensor:
        """A bucket's values and what was left out of them before as bytes for each of so many
        owners: uint8 (N, coded_bytes)."""
        values = buffer.numel()
        torch.add(known[:values], buffer, out=left[:values])  # zeros fill it up
        return self.codec.encode(left.view(ranks, -1), own)

    def sum(
        self,
        came: torch.Tensor,
        known: torch.Tensor,
        left: torch.Tensor,
        own: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """Of the rows (N, coded_bytes) that came for one shard the bytes of their sum."""
        decoded = self.codec.decode(came, len(left), None if own is None else own.view(1, -1))
        torch.add(known, decoded.sum(0), out=left)
        return self.codec.encode(left.view(1, -1), own)[0]

    def take(
        self,
        coded: torch.Tensor,
        shard: int,
        buffer: torch.Tensor,
        own: Optional[torch.Tensor],
        squares: Optional[torch.Tensor],
        learned: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """Write the sums (N, coded_bytes) of all owners into a bucket, and what its mean squares
        become. Returns the largest size of a block or, of mean squares, the largest square."""
        values = buffer.numel()
        if own is None or squares is None or learned is None:
            buffer.copy_(self.codec.decode(coded, shard).view(-1)[:values])
            return self.codec.sizes(coded, shard).max()
        sums = buffer
        if buffer.dtype != torch.float32:
            sums = torch.empty_like(buffer, dtype=torch.float32)
        self.codec.decode(coded, shard, own, sums)
        most = learn(squares[:values], sums, learned[:values])
        if sums is not buffer:
            buffer.copy_(sums)
        return most
