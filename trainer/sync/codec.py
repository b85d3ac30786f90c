"""Quantisation to a few bits a value: a level relative to the largest magnitude of the value's
block, which is sent too.

Plain torch operations on whole tensors, the same on a CPU and a GPU. A byte packs one code from
each half, quarter or fifth of a row, so that each operation runs over memory in order.
"""

import dataclasses
from typing import Dict, List, Union

import torch

from contract.strategies import BLOCK, coded_bytes


@dataclasses.dataclass(frozen=True)
class Codec:
    """`levels` on each side of zero; `packed` codes in a byte, as digits in base `radix`.

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
        """Rows of fp32 (R, V) as bytes (R, coded_bytes(V))."""
        count, values = rows.shape
        blocks = rows.view(-1, BLOCK)
        # Not abs().amax(), which would make a copy.
        peak = torch.maximum(blocks.amax(1), blocks.amin(1).neg_()).bfloat16()
        factor = self.levels / peak.float()
        # For a block of zeros, and for one with infs or NaNs, which its peak alone marks as such.
        factor.nan_to_num_(0.0, 0.0, 0.0)
        codes = (blocks * factor[:, None]).nan_to_num_(0.0).round_()
        codes = codes.clamp_(-self.levels, self.levels).add_(self.levels).to(torch.uint8)
        parts = codes.view(count, self.packed, -1)
        coded = torch.empty(count, self.coded_bytes(values), dtype=torch.uint8, device=rows.device)
        body = coded[:, : values // self.packed]
        body.copy_(parts[:, 0])
        for place in range(1, self.packed):
            body.add_(parts[:, place], alpha=self.radix**place)
        peaks = peak.view(count, -1).view(torch.uint8)
        coded[:, values // self.packed :].copy_(peaks)
        return coded

    @torch.no_grad()
    def decode(self, coded: torch.Tensor, values: int) -> torch.Tensor:
        """The inverse of `encode` for rows of `values` numbers: fp32 (R, V)."""
        count = len(coded)
        body, tail = coded[:, : values // self.packed], coded[:, values // self.packed :]
        rows = torch.empty(count, self.packed, body.shape[1], device=coded.device)
        for place, digits in enumerate(self._digits(body)):
            rows[:, place].copy_(digits)
        # bf16 is the upper half of an fp32. A contiguous copy is viewed, since the offset of the
        # tail may be odd.
        peak = tail.contiguous().view(torch.bfloat16).float().view(-1, 1)
        return rows.view(-1, BLOCK).sub_(self.levels).mul_(peak / self.levels).view(count, values)

    def _digits(self, body: torch.Tensor) -> List[torch.Tensor]:
        if self.packed == 1:
            return [body]
        if self.radix == 2 ** (8 // self.packed):
            bits = 8 // self.packed
            last = self.packed - 1
            parts = [body >> (bits * place) for place in range(self.packed)]
            return [part & (self.radix - 1) for part in parts[:last]] + [parts[last]]
        digits, rest = [], body
        for _ in range(self.packed - 1):
            # Multiplying by 171/512 and rounding down divides integers below 256 exactly by 3.
            third = ((rest.to(torch.int32) * 171) >> 9).to(torch.uint8)
            digits.append(rest - third * 3)
            rest = third
        return [*digits, rest]


@dataclasses.dataclass(frozen=True)
class Plain:
    """No quantisation: numbers are sent as they are, or rounded to another floating-point type."""

    dtype: torch.dtype

    def coded_bytes(self, values: int) -> int:
        """Bytes of a row of `values` numbers."""
        return values * torch.empty(0, dtype=self.dtype).element_size()

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of fp32 (R, V) as bytes; always a copy."""
        return rows.to(self.dtype, copy=True).view(torch.uint8)

    def decode(self, coded: torch.Tensor, values: int) -> torch.Tensor:
        return coded.contiguous().view(self.dtype).float()


# Keyed by bits per value, without the block scales; 1.6 packs five three-level values into a byte.
CODECS: Dict[str, Codec] = {
    "8": Codec(levels=127, packed=1, radix=256),
    "4": Codec(levels=7, packed=2, radix=16),
    "2": Codec(levels=1, packed=4, radix=4),
    "1.6": Codec(levels=1, packed=5, radix=3),
}
# Keyed by the WIRE of a strategy that averages parameters.
WIRES: Dict[str, Union[Codec, Plain]] = {
    "fp32": Plain(torch.float32),
    "bf16": Plain(torch.bfloat16),
    "int8": CODECS["8"],
    "4bit": CODECS["4"],
}
