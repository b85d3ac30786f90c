"""Quantisation to a few bits a value: a level relative to the largest magnitude of the value's
block, which is sent too.

Plain torch operations on whole tensors, the same on a CPU and a GPU, and few of them: on a GPU each
is a kernel, and the link waits for them (`bench/codec.py` counts kernels and bytes).
"""

import dataclasses
import functools
from typing import Dict, Optional

import torch

from contract.strategies import BLOCK, coded_bytes


@dataclasses.dataclass(frozen=True)
class Codec:
    """`levels` on each side of zero. A code is from -`levels` to `levels`, and `packed` of them,
    neighbours, are the digits of a signed byte in base `radix`.

    A block with an inf or a NaN decodes to NaNs and infs only, so that its sum shows that the
    gradients overflowed.
    """

    levels: int
    packed: int
    radix: int

    def coded_bytes(self, values: int) -> int:
        """Bytes of a row of `values` numbers, a multiple of BLOCK and of `packed`."""
        return int(coded_bytes(values, 8 / self.packed))

    @torch.no_grad()
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of fp32 (R, V) as bytes (R, coded_bytes(V)); the rows become what is left out."""
        count, values = rows.shape
        blocks = rows.view(-1, BLOCK)
        # Not abs().amax(), which would make a copy.
        peak = torch.maximum(blocks.amax(1), blocks.amin(1).neg_()).bfloat16()
        codes = self._codes(blocks, peak.float()[:, None])
        blocks.addcmul_(codes.float(), self._step(peak), value=-1)  # torch 1.12 mixes no types here
        coded = torch.empty(count, self.coded_bytes(values), dtype=torch.uint8, device=rows.device)
        body = coded[:, : values // self.packed]
        digits = codes.view(-1, self.packed)
        packed = digits[:, 0]
        for place in range(1, self.packed):
            packed = packed.add(digits[:, place], alpha=self.radix**place)
        body.view(torch.int8).copy_(packed.view(count, -1))
        coded[:, values // self.packed :].copy_(peak.view(count, -1).view(torch.uint8))
        return coded

    def _codes(self, blocks: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
        """The level of each value, from -`levels` to `levels`. None is beyond: rounded to bf16, a
        peak loses at most a 256th, which is less than half a level. In a block with infs or NaNs,
        which its peak alone marks as such, they may be any."""
        if self.levels == 1:
            half = peak * 0.5
            return (blocks > half).view(torch.int8).sub_((blocks < -half).view(torch.int8))
        factor = (self.levels / peak).nan_to_num_(0.0, 0.0, 0.0)  # a peak of next to nothing: 0
        return (blocks * factor).round_().to(torch.int8)

    def peaks(self, coded: torch.Tensor, values: int) -> torch.Tensor:
        """Of rows of so many values the largest magnitude of each block: bf16 (R, V / BLOCK). NaN
        or infinity where the block has such a value."""
        # A contiguous copy is viewed, since the offset of the tail may be odd.
        return coded[:, values // self.packed :].contiguous().view(torch.bfloat16)

    def _step(self, peak: torch.Tensor) -> torch.Tensor:
        """The distance of two levels in each block."""
        return peak.float().div_(self.levels).view(-1, 1)

    @torch.no_grad()
    def decode(
        self, coded: torch.Tensor, values: int, peaks: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """The inverse of `encode` for rows of `values` numbers: fp32 (R, V). `peaks`, where they
        are at hand, are those of the rows."""
        body = coded[:, : values // self.packed]
        step = self._step(self.peaks(coded, values) if peaks is None else peaks)
        if self.packed == 1:
            codes = body.view(torch.int8)
        else:
            codes = _table(self, coded.device).index_select(0, body.int().view(-1))
        return torch.mul(codes.reshape(-1, BLOCK), step).view(len(coded), values)


@functools.cache
def _table(codec: Codec, device: torch.device) -> torch.Tensor:
    """The codes in each byte: int8 (256, packed)."""
    rest, codes = torch.arange(256).to(torch.int8).int(), []
    for _ in range(codec.packed):
        codes.append((rest + codec.levels) % codec.radix - codec.levels)
        rest = (rest - codes[-1]).div(codec.radix, rounding_mode="floor")
    return torch.stack(codes, 1).to(device, torch.int8)


# Keyed by bits per value, without the block scales; 1.6 packs five three-level values into a byte.
CODECS: Dict[str, Codec] = {
    "8": Codec(levels=127, packed=1, radix=256),
    "4": Codec(levels=7, packed=2, radix=16),
    "2": Codec(levels=1, packed=4, radix=4),
    "1.6": Codec(levels=1, packed=5, radix=3),
}
