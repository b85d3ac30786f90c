"""The coding of a bucket in three kernels of Triton's, one a stage, instead of some fifty.

Each does what `feedback` does by plain operations on whole tensors: code, sum and take. What all
ranks must compute alike is the same to the bit: divisions and roots are rounded as IEEE 754 says,
and no multiplication is fused with an addition. Only the norm of a block, which its sender alone
computes, may differ by the order of its sum.

A program works on a tile: as many neighbours as make whole blocks and whole bytes. `try_out` looks
whether a card takes sums as the plain operations do; where it does not, or there is no Triton, they
do it all. (So far these kernels have run in Triton's interpreter alone, on no card.)
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# (kernels are written in Triton's language, whose values have no types here)

import dataclasses
import math
from typing import Any, Dict, Optional

import torch
import triton
import triton.language as tl

from contract.strategies import BLOCK, UNIT

from .codec import KEPT, LEAST, Codec, Operations

TINY = torch.finfo(torch.float32).tiny
TO_WHOLE = 1.5 * 2.0**23  # added and taken away again, it rounds a small number to a whole one
# Constants that kernels read (Triton takes no plain global).
_BLOCK, _KEPT, _LEAST = tl.constexpr(BLOCK), tl.constexpr(KEPT), tl.constexpr(LEAST)
_TINY, _TO_WHOLE = tl.constexpr(TINY), tl.constexpr(TO_WHOLE)


@triton.jit
def _tile(PACKED: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr):
    """Of each value of a tile: its byte, its place in there, where it is, and whether it exists
    (a kernel's shapes are powers of two)."""
    lane = tl.arange(0, LANES)[None, :]
    place = tl.arange(0, PLACES)[:, None]
    return lane, place, lane * PACKED + place, (place < PACKED) & (lane >= 0)


@triton.jit
def _most(x, block, inside, BLOCKS: tl.constexpr):
    """For each value the largest one of its block; none is below zero."""
    most = tl.zeros_like(x)
    for number in tl.static_range(BLOCKS):
        here = block == number
        largest = tl.max(tl.max(tl.where(inside & here, x, 0.0), 1), 0)
        most = tl.where(here, largest, most)
    return most


@triton.jit
def _scales(squares, at, index, inside, BLOCKS: tl.constexpr):
    """As codec.own_scales."""
    known = tl.load(squares + at, mask=inside, other=0.0)
    most = tl.maximum(_most(known, index // _BLOCK, inside, BLOCKS), _TINY)
    return tl.maximum(tl.sqrt_rn(tl.div_rn(known, most)), _LEAST)


@triton.jit
def _as_bf16(x):
    """The bits of the next bf16, the even one of two; NaN for each NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0)


@triton.jit
def _from_bf16(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _encode(
    x, scale, coded, sizes, lane, place, index, inside,
    OWN: tl.constexpr, LEVELS: tl.constexpr, PART: tl.constexpr, PACKED: tl.constexpr,
    RADIX: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write the bytes and the sizes of one tile; returns what they leave out."""
    scaled = tl.div_rn(x, scale) if OWN else x
    step = tl.zeros_like(x)
    for number in tl.static_range(BLOCKS):
        here = inside & (index // _BLOCK == number)
        values = tl.where(here, scaled, 0.0)
        if OWN:
            size = tl.sqrt_rn(tl.sum(tl.sum(values * values, 1), 0))
        else:
            size = tl.max(tl.max(tl.abs(values), 1), 0)
        spoilt = tl.max(tl.max((values != values).to(tl.int32), 1), 0)  # max passes over a NaN
        bits = tl.where(spoilt > 0, 0x7FC0, _as_bf16(size))
        tl.store(sizes + number, bits.to(tl.int16))
        step = tl.where(here, _from_bf16(bits) * PART, step)
    factor = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    factor = tl.where(factor < float("inf"), factor, 0.0)  # next to nothing, or a NaN
    level = scaled * factor
    if OWN:
        level = tl.minimum(tl.maximum(level, -LEVELS), LEVELS)
    level = (level + _TO_WHOLE) - _TO_WHOLE
    worth = tl.full(place.shape, 1, tl.int32)
    for higher in tl.static_range(1, PLACES):
        worth = tl.where(place >= higher, worth * RADIX, worth)
    packed = tl.sum(tl.where(inside, level.to(tl.int32) * worth, 0), 0)
    tl.store(coded + lane, packed[None, :].to(tl.uint8))
    return x - (level * step) * scale if OWN else x - level * step


@triton.jit
def _decode(
    coded, sizes, scale, lane, place, index, inside,
    OWN: tl.constexpr, LEVELS: tl.constexpr, PART: tl.constexpr, PACKED: tl.constexpr,
    RADIX: tl.constexpr,
):  # fmt: skip
    """The values of one tile."""
    rest = tl.load(coded + lane).to(tl.int8, bitcast=True).to(tl.int32)
    code = tl.zeros_like(index)
    for digit in tl.static_range(PACKED):
        now = rest
        if PACKED > 1:
            now = (rest + LEVELS + 256 * RADIX) % RADIX - LEVELS
            rest = (rest - now) // RADIX  # which leaves no remainder
        code = tl.where(place == digit, now, code)
    bits = tl.load(sizes + index // _BLOCK, mask=inside, other=0)
    value = code.to(tl.float32) * (_from_bf16(bits) * PART)
    return value * scale if OWN else value


@triton.jit
def _code_kernel(
    buffer, known, left, squares, coded, sizes, values, tiles, row, head,
    OWN: tl.constexpr, LEVELS: tl.constexpr, PART: tl.constexpr, PACKED: tl.constexpr,
    RADIX: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """A tile of a bucket and of what was left out before as codes; what they leave out, now."""
    number, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    lane, place, index, inside = _tile(PACKED, LANES, PLACES)
    at = tl.program_id(0) * (LANES * PACKED) + index
    there = inside & (at < values)  # zeros fill it up
    x = tl.load(known + at, mask=there, other=0.0)
    x = x + tl.load(buffer + at, mask=there, other=0.0).to(tl.float32)
    scale = _scales(squares, at, index, inside, BLOCKS) if OWN else x
    rest = _encode(
        x, scale, coded + number * row + head + tile * LANES,
        sizes + number * (row // 2) + tile * BLOCKS, lane, place, index, inside,
        OWN, LEVELS, PART, PACKED, RADIX, BLOCKS, PLACES,
    )  # fmt: skip
    tl.store(left + at, rest, mask=inside)


@triton.jit
def _sum_kernel(
    came, came_sizes, ranks, known, left, squares, coded, sizes, row, head,
    OWN: tl.constexpr, LEVELS: tl.constexpr, PART: tl.constexpr, PACKED: tl.constexpr,
    RADIX: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """A tile of all ranks' codes of one shard, and of what its sum left out, as codes again."""
    tile = tl.program_id(0)
    lane, place, index, inside = _tile(PACKED, LANES, PLACES)
    at = tile * (LANES * PACKED) + index
    scale = _scales(squares, at, index, inside, BLOCKS) if OWN else index
    total = tl.zeros(index.shape, tl.float32)
    for rank in range(ranks):
        total = total + _decode(
            came + rank * row + head + tile * LANES, came_sizes + rank * (row // 2) + tile * BLOCKS,
            scale, lane, place, index, inside, OWN, LEVELS, PART, PACKED, RADIX,
        )  # fmt: skip
    x = tl.load(known + at, mask=inside, other=0.0) + total
    rest = _encode(
        x, scale, coded + head + tile * LANES, sizes + tile * BLOCKS, lane, place, index, inside,
        OWN, LEVELS, PART, PACKED, RADIX, BLOCKS, PLACES,
    )  # fmt: skip
    tl.store(left + at, rest, mask=inside)


@triton.jit
def _take_kernel(
    coded, sizes, buffer, squares, learned, largest, values, tiles, row, head,
    OWN: tl.constexpr, LEVELS: tl.constexpr, PART: tl.constexpr, PACKED: tl.constexpr,
    RADIX: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """A tile of the sums; where scales are own, what its mean squares become, and its largest
    square."""
    number, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    lane, place, index, inside = _tile(PACKED, LANES, PLACES)
    at = tl.program_id(0) * (LANES * PACKED) + index
    scale = _scales(squares, at, index, inside, BLOCKS) if OWN else index
    value = _decode(
        coded + number * row + head + tile * LANES, sizes + number * (row // 2) + tile * BLOCKS,
        scale, lane, place, index, inside, OWN, LEVELS, PART, PACKED, RADIX,
    )  # fmt: skip
    there = inside & (at < values)
    result = value
    if buffer.dtype.element_ty == tl.bfloat16:
        result = _from_bf16(_as_bf16(value))  # as each machine rounds it
    tl.store(buffer + at, result.to(buffer.dtype.element_ty), mask=there)
    if OWN:
        square = tl.where(there, value * value, 0.0)
        known = tl.load(squares + at, mask=there, other=0.0)
        tl.store(learned + at, square + known * _KEPT, mask=there)
        spoilt = tl.max(tl.max((square != square).to(tl.int32), 1), 0)
        most = tl.max(tl.max(square, 1), 0)
        tl.store(largest + tl.program_id(0), tl.where(spoilt > 0, float("nan"), most))


@dataclasses.dataclass(frozen=True)
class Kernels:
    """As codec.Operations, whose arguments they take; `own` are the mean squares themselves."""

    codec: Codec

    def scales(self, squares: torch.Tensor) -> torch.Tensor:
        return squares

    def _constants(self, squares: Optional[torch.Tensor]) -> Dict[str, Any]:
        codec, own = self.codec, squares is not None
        lanes = math.lcm(BLOCK, codec.packed) // codec.packed
        return {
            "OWN": own,
            "LEVELS": codec.levels,
            "PART": codec.part(own),
            "PACKED": codec.packed,
            "RADIX": codec.radix,
            "LANES": lanes,
            "BLOCKS": lanes * codec.packed // BLOCK,
            "PLACES": triton.next_power_of_2(codec.packed),
            "enable_fp_fusion": False,
        }

    def _tiles(self, values: int) -> int:
        return values // math.lcm(BLOCK, self.codec.packed)

    def code(
        self,
        buffer: torch.Tensor,
        known: torch.Tensor,
        left: torch.Tensor,
        own: Optional[torch.Tensor],
        ranks: int,
    ) -> torch.Tensor:
        shard = len(left) // ranks
        row, head = self.codec.coded_bytes(shard), self.codec.head_bytes(shard)
        coded = torch.empty(ranks, row, dtype=torch.uint8, device=buffer.device)
        tiles = self._tiles(shard)
        _code_kernel[(ranks * tiles,)](
            buffer, known, left, left if own is None else own, coded, coded.view(torch.int16),
            buffer.numel(), tiles, row, head, **self._constants(own),
        )  # fmt: skip
        return coded

    def sum(
        self,
        came: torch.Tensor,
        known: torch.Tensor,
        left: torch.Tensor,
        own: Optional[torch.Tensor],
    ) -> torch.Tensor:
        row, head = self.codec.coded_bytes(len(left)), self.codec.head_bytes(len(left))
        coded = torch.empty(row, dtype=torch.uint8, device=came.device)
        _sum_kernel[(self._tiles(len(left)),)](
            came, came.view(torch.int16), len(came), known, left, left if own is None else own,
            coded, coded.view(torch.int16), row, head, **self._constants(own),
        )  # fmt: skip
        return coded

    def take(
        self,
        coded: torch.Tensor,
        shard: int,
        buffer: torch.Tensor,
        own: Optional[torch.Tensor],
        squares: Optional[torch.Tensor],
        learned: Optional[torch.Tensor],
    ) -> torch.Tensor:
        tiles = len(coded) * self._tiles(shard)
        most = buffer if own is None else torch.empty(tiles, device=buffer.device)
        _take_kernel[(tiles,)](
            coded, coded.view(torch.int16), buffer, buffer if own is None else own,
            buffer if learned is None else learned, most, buffer.numel(), self._tiles(shard),
            self.codec.coded_bytes(shard), self.codec.head_bytes(shard), **self._constants(own),
        )  # fmt: skip
        return self.codec.sizes(coded, shard).max() if own is None else most.amax()


def try_out(codec: Codec, learns: bool, device: torch.device) -> Kernels:
    """The kernels of a codec, compiled. Raises ArithmeticError where they do on this device not
    what plain operations do, or whatever Triton does where it cannot make them."""
    kernels, plain, ranks = Kernels(codec), Operations(codec), 2
    chance = torch.Generator().manual_seed(0)
    first, *known = torch.randn(3, ranks * UNIT, generator=chance).to(device)
    squares = torch.rand(ranks * UNIT, generator=chance).to(device) if learns else None
    left, scales, part, part_scales = torch.empty_like(first), None, None, None
    if squares is not None:
        scales, part = plain.scales(squares), squares[:UNIT]
        part_scales = scales[:UNIT]

    def check(coded: torch.Tensor, own: Optional[torch.Tensor], whole: torch.Tensor) -> None:
        rows = codec.decode(coded, UNIT, None if own is None else own.view(len(coded), -1))
        wrong = rows.view(-1) + left[: rows.numel()] - whole
        if not float(wrong.abs().max()) < 1e-5:
            raise ArithmeticError("what is sent and what is left out are not the whole")

    coded = kernels.code(first, known[0], left, squares, ranks)
    check(coded, scales, first + known[0])
    total = kernels.sum(coded, known[1][:UNIT], left[:UNIT], part)
    came = codec.decode(coded, UNIT, None if part_scales is None else part_scales.view(1, -1))
    check(total[None], part_scales, known[1][:UNIT] + came.sum(0))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        results = []
        for coding, own in ((kernels, squares), (plain, scales)):
            buffer, learned = first.to(dtype), torch.zeros_like(first)
            most = coding.take(coded, UNIT, buffer, own, squares, learned)
            results.append([buffer, learned, most])
        if not all(map(torch.equal, *results)):
            raise ArithmeticError("sums are not those of plain operations to the bit")
    return kernels
