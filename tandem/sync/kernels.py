"""Code a bucket with three Triton kernels, one per stage, instead of some fifty of torch's.

The kernels do what `codec.Operations` does on whole tensors: code, sum and take; read codec.py
first. Results that all ranks must compute alike are bit for bit equal: divisions and roots are
rounded as IEEE 754 demands, and no multiplication is fused with an addition. The norm of a block
may differ by the order of its sum. That is harmless, because only the block's sender computes it.

A program, Triton's unit of work, computes one tile: the smallest number of neighbouring values that
fills whole blocks and whole bytes. A tile has BLOCKS blocks and LANES bytes, and each byte has
PACKED codes, its digits in base RADIX. A code is a whole number from -LEVELS to LEVELS. DISTANCE:
the distance of two levels, relative to the block's size (Codec.level_distance). HAS_SCALES: each
value has a scale (`own`). A tile's arrays are (PLACES, LANES). Value `lane * PACKED + place` of the
tile is at [place, lane].

feedback.py calls `try_out`, which checks that a GPU decodes sums as the plain operations do. If the
GPU does not, or without Triton, the plain operations do the work. (So far these kernels have run
only in Triton's interpreter, on no GPU.)
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Kernels are written in Triton's language, whose values have no types here.

import dataclasses
import math
from typing import Any, Dict, Optional

import torch
import triton
import triton.language as tl

from contract.strategies import BLOCK, UNIT

from .codec import KEPT, MIN_SCALE, Codec, Operations

TINY = torch.finfo(torch.float32).tiny
# Added to a small number and subtracted again, this constant leaves the nearest whole number, and
# of two the even one, as torch.round does: fp32 has no fractions at this size.
TO_WHOLE = 1.5 * 2.0**23
# Kernels cannot read plain global variables.
_BLOCK, _KEPT, _MIN_SCALE = tl.constexpr(BLOCK), tl.constexpr(KEPT), tl.constexpr(MIN_SCALE)
_TINY, _TO_WHOLE = tl.constexpr(TINY), tl.constexpr(TO_WHOLE)


@triton.jit
def _locate_values(PACKED: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr):
    """Return for each value of a tile: its byte, its digit in the byte, its index in the tile, and
    whether it exists. Triton's arrays need powers of two: PLACES is 4 if PACKED is 3, and no value
    exists at place 3."""
    lane = tl.arange(0, LANES)[None, :]
    place = tl.arange(0, PLACES)[:, None]
    # `lane >= 0` is always true, and gives the last array the shape (PLACES, LANES).
    return lane, place, lane * PACKED + place, (place < PACKED) & (lane >= 0)


@triton.jit
def _make_scales(squares, offsets, index, inside, BLOCKS: tl.constexpr):
    """Compute a tile's scales from its mean squares, as codec.make_scales does."""
    square = tl.load(squares + offsets, mask=inside, other=0.0)
    largest = tl.zeros_like(square)  # for each value the largest square of its block
    for number in tl.static_range(BLOCKS):
        in_block = index // _BLOCK == number
        block_largest = tl.max(tl.max(tl.where(inside & in_block, square, 0.0), 1), 0)
        largest = tl.where(in_block, block_largest, largest)
    return tl.maximum(tl.sqrt_rn(tl.div_rn(square, tl.maximum(largest, _TINY))), _MIN_SCALE)


@triton.jit
def _as_bf16(x):
    """Return the bits of the nearest bf16, of two the even one; 0x7FC0 for every NaN."""
    bits = x.to(tl.int32, bitcast=True)
    # bf16 is the upper half of fp32. Adding 0x7FFF, or 0x8000 to an odd half, rounds to even.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0)


@triton.jit
def _from_bf16(bits):
    """Return the fp32 numbers with these bits of bf16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _encode(
    x, scale, coded, sizes, lane, place, index, inside,
    HAS_SCALES: tl.constexpr, LEVELS: tl.constexpr, DISTANCE: tl.constexpr, PACKED: tl.constexpr,
    RADIX: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write the bytes and the sizes of one tile, and return the rounding errors: Codec.encode."""
    scaled = tl.div_rn(x, scale) if HAS_SCALES else x
    distance = tl.zeros_like(x)  # for each value, the distance of two levels in its block
    for number in tl.static_range(BLOCKS):
        in_block = inside & (index // _BLOCK == number)
        values = tl.where(in_block, scaled, 0.0)
        if HAS_SCALES:
            size = tl.sqrt_rn(tl.sum(tl.sum(values * values, 1), 0))
        else:
            size = tl.max(tl.max(tl.abs(values), 1), 0)
        # Triton's max ignores NaNs. Only a NaN differs from itself.
        has_nan = tl.max(tl.max((values != values).to(tl.int32), 1), 0)
        bits = tl.where(has_nan > 0, 0x7FC0, _as_bf16(size))
        tl.store(sizes + number, bits.to(tl.int16))
        distance = tl.where(in_block, _from_bf16(bits) * DISTANCE, distance)
    factor = tl.div_rn(tl.full(distance.shape, 1.0, tl.float32), distance)
    # All levels become 0 in a block of almost zeros, and in a block with a NaN.
    factor = tl.where(factor < float("inf"), factor, 0.0)
    level = scaled * factor
    if HAS_SCALES:
        level = tl.minimum(tl.maximum(level, -LEVELS), LEVELS)
    level = (level + _TO_WHOLE) - _TO_WHOLE
    # The codes of a byte are its digits in base RADIX: code 0 + RADIX * code 1 + ...
    power = tl.full(place.shape, 1, tl.int32)
    for digit in tl.static_range(1, PLACES):
        power = tl.where(place >= digit, power * RADIX, power)
    packed = tl.sum(tl.where(inside, level.to(tl.int32) * power, 0), 0)
    tl.store(coded + lane, packed[None, :].to(tl.uint8))
    return x - (level * distance) * scale if HAS_SCALES else x - level * distance


@triton.jit
def _decode(
    coded, sizes, scale, lane, place, index, inside,
    HAS_SCALES: tl.constexpr, LEVELS: tl.constexpr, DISTANCE: tl.constexpr, PACKED: tl.constexpr,
    RADIX: tl.constexpr,
):  # fmt: skip
    """Return the values of one tile: Codec.decode."""
    quotient = tl.load(coded + lane).to(tl.int8, bitcast=True).to(tl.int32)
    code = tl.zeros_like(index)
    for digit in tl.static_range(PACKED):
        digit_code = quotient
        if PACKED > 1:
            # Triton's % has the dividend's sign, as in C, so the dividend is made positive.
            digit_code = (quotient + LEVELS + 256 * RADIX) % RADIX - LEVELS
            quotient = (quotient - digit_code) // RADIX  # without a remainder
        code = tl.where(place == digit, digit_code, code)
    bits = tl.load(sizes + index // _BLOCK, mask=inside, other=0)
    value = code.to(tl.float32) * (_from_bf16(bits) * DISTANCE)
    return value * scale if HAS_SCALES else value


@triton.jit
def _code_kernel(
    buffer, errors, new_errors, squares, coded, sizes, values, tiles, row, head,
    HAS_SCALES: tl.constexpr, LEVELS: tl.constexpr, DISTANCE: tl.constexpr, PACKED: tl.constexpr,
    RADIX: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Encode a tile of a bucket plus its errors, and write the new errors. `row`: bytes of a coded
    shard; `head`: bytes of its blocks' sizes, which come first; `values`: those of the bucket."""
    number, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles  # the shard; its tile
    lane, place, index, inside = _locate_values(PACKED, LANES, PLACES)
    offsets = tl.program_id(0) * (LANES * PACKED) + index
    in_buffer = inside & (offsets < values)  # behind the buffer's end there is padding
    x = tl.load(errors + offsets, mask=in_buffer, other=0.0)
    x = x + tl.load(buffer + offsets, mask=in_buffer, other=0.0).to(tl.float32)
    # Without scales, `_encode` and `_decode` do not read `scale`: any array takes its place.
    scale = _make_scales(squares, offsets, index, inside, BLOCKS) if HAS_SCALES else x
    # `sizes` is the same memory as `coded`, as numbers of two bytes.
    error = _encode(
        x, scale, coded + number * row + head + tile * LANES,
        sizes + number * (row // 2) + tile * BLOCKS, lane, place, index, inside,
        HAS_SCALES, LEVELS, DISTANCE, PACKED, RADIX, BLOCKS, PLACES,
    )  # fmt: skip
    tl.store(new_errors + offsets, error, mask=inside)


@triton.jit
def _sum_kernel(
    received, received_sizes, ranks, errors, new_errors, squares, coded, sizes, row, head,
    HAS_SCALES: tl.constexpr, LEVELS: tl.constexpr, DISTANCE: tl.constexpr, PACKED: tl.constexpr,
    RADIX: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Add up a tile of all ranks' codes of one shard plus its errors, and encode the sum."""
    tile = tl.program_id(0)
    lane, place, index, inside = _locate_values(PACKED, LANES, PLACES)
    offsets = tile * (LANES * PACKED) + index
    scale = _make_scales(squares, offsets, index, inside, BLOCKS) if HAS_SCALES else index
    total = tl.zeros(index.shape, tl.float32)
    for rank in range(ranks):
        total = total + _decode(
            received + rank * row + head + tile * LANES,
            received_sizes + rank * (row // 2) + tile * BLOCKS,
            scale, lane, place, index, inside, HAS_SCALES, LEVELS, DISTANCE, PACKED, RADIX,
        )  # fmt: skip
    x = tl.load(errors + offsets, mask=inside, other=0.0) + total
    error = _encode(
        x, scale, coded + head + tile * LANES, sizes + tile * BLOCKS, lane, place, index, inside,
        HAS_SCALES, LEVELS, DISTANCE, PACKED, RADIX, BLOCKS, PLACES,
    )  # fmt: skip
    tl.store(new_errors + offsets, error, mask=inside)


@triton.jit
def _take_kernel(
    coded, sizes, buffer, squares, new_squares, largest_squares, values, tiles, row, head,
    HAS_SCALES: tl.constexpr, LEVELS: tl.constexpr, DISTANCE: tl.constexpr, PACKED: tl.constexpr,
    RADIX: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Decode a tile of the sums; with scales, write new mean squares and the largest square."""
    number, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    lane, place, index, inside = _locate_values(PACKED, LANES, PLACES)
    offsets = tl.program_id(0) * (LANES * PACKED) + index
    scale = _make_scales(squares, offsets, index, inside, BLOCKS) if HAS_SCALES else index
    value = _decode(
        coded + number * row + head + tile * LANES, sizes + number * (row // 2) + tile * BLOCKS,
        scale, lane, place, index, inside, HAS_SCALES, LEVELS, DISTANCE, PACKED, RADIX,
    )  # fmt: skip
    in_buffer = inside & (offsets < values)
    result = value
    if buffer.dtype.element_ty == tl.bfloat16:
        # Written out, so that every GPU rounds to bf16 alike.
        result = _from_bf16(_as_bf16(value))
    tl.store(buffer + offsets, result.to(buffer.dtype.element_ty), mask=in_buffer)
    if HAS_SCALES:
        square = tl.where(in_buffer, value * value, 0.0)
        mean_square = tl.load(squares + offsets, mask=in_buffer, other=0.0)
        tl.store(new_squares + offsets, square + mean_square * _KEPT, mask=in_buffer)
        has_nan = tl.max(tl.max((square != square).to(tl.int32), 1), 0)
        largest = tl.max(tl.max(square, 1), 0)
        largest = tl.where(has_nan > 0, float("nan"), largest)
        tl.store(largest_squares + tl.program_id(0), largest)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Does what codec.Operations does, with the same arguments. `scales` are the mean squares
    themselves here: kernels make scales of them as they go."""

    codec: Codec

    def scales(self, squares: torch.Tensor) -> torch.Tensor:
        return squares

    @property
    def _tile_values(self) -> int:
        """Return the number of values of a tile."""
        return math.lcm(BLOCK, self.codec.packed)

    def _make_constants(self, squares: Optional[torch.Tensor]) -> Dict[str, Any]:
        """Return the constants with which Triton compiles a kernel. The head of this file explains
        them."""
        codec = self.codec
        return {
            "HAS_SCALES": squares is not None,
            "LEVELS": codec.levels,
            "DISTANCE": codec.level_distance(squares is not None),
            "PACKED": codec.packed,
            "RADIX": codec.radix,
            "LANES": self._tile_values // codec.packed,
            "BLOCKS": self._tile_values // BLOCK,
            "PLACES": triton.next_power_of_2(codec.packed),
            "enable_fp_fusion": False,  # fused, a multiplication and an addition round only once
        }

    def _count_tiles(self, values: int) -> int:
        """Return the number of tiles of a shard with this number of values."""
        return values // self._tile_values

    # The following methods have the shapes and results of those of codec.Operations. A kernel that
    # gets no scales does not read the tensor in their place, but needs some tensor.

    def code(
        self,
        buffer: torch.Tensor,
        errors: torch.Tensor,
        new_errors: torch.Tensor,
        scales: Optional[torch.Tensor],
        ranks: int,
    ) -> torch.Tensor:
        shard = len(new_errors) // ranks
        row, head = self.codec.coded_bytes(shard), self.codec.head_bytes(shard)
        coded = torch.empty(ranks, row, dtype=torch.uint8, device=buffer.device)
        tiles = self._count_tiles(shard)
        _code_kernel[(ranks * tiles,)](
            buffer, errors, new_errors, new_errors if scales is None else scales,
            coded, coded.view(torch.int16),
            buffer.numel(), tiles, row, head, **self._make_constants(scales),
        )  # fmt: skip
        return coded

    def sum(
        self,
        coded: torch.Tensor,
        errors: torch.Tensor,
        new_errors: torch.Tensor,
        scales: Optional[torch.Tensor],
    ) -> torch.Tensor:
        shard = len(new_errors)
        row, head = self.codec.coded_bytes(shard), self.codec.head_bytes(shard)
        total = torch.empty(row, dtype=torch.uint8, device=coded.device)
        _sum_kernel[(self._count_tiles(shard),)](
            coded, coded.view(torch.int16), len(coded),
            errors, new_errors, new_errors if scales is None else scales,
            total, total.view(torch.int16), row, head, **self._make_constants(scales),
        )  # fmt: skip
        return total

    def take(
        self,
        coded: torch.Tensor,
        shard: int,
        buffer: torch.Tensor,
        scales: Optional[torch.Tensor],
        squares: Optional[torch.Tensor],
        new_squares: Optional[torch.Tensor],
    ) -> torch.Tensor:
        tiles = len(coded) * self._count_tiles(shard)
        largest = buffer if scales is None else torch.empty(tiles, device=buffer.device)
        _take_kernel[(tiles,)](
            coded, coded.view(torch.int16), buffer, buffer if scales is None else scales,
            buffer if new_squares is None else new_squares, largest,
            buffer.numel(), self._count_tiles(shard), self.codec.coded_bytes(shard),
            self.codec.head_bytes(shard), **self._make_constants(scales),
        )  # fmt: skip
        return self.codec.sizes(coded, shard).max() if scales is None else largest.amax()


def try_out(codec: Codec, learns: bool, device: torch.device) -> Kernels:
    """Compile a codec's kernels and compare them with plain operations on random values. Raises
    ArithmeticError if results differ, or Triton's exceptions if they cannot be compiled."""
    kernels, plain, ranks = Kernels(codec), Operations(codec), 2
    # Two ranks with a shard of UNIT values each. `code_errors` and `sum_errors`: the earlier errors
    # of these two stages.
    generator = torch.Generator().manual_seed(0)
    random_rows = torch.randn(3, ranks * UNIT, generator=generator).to(device)
    gradients, code_errors, sum_errors = random_rows
    squares = torch.rand(ranks * UNIT, generator=generator).to(device) if learns else None
    new_errors = torch.empty_like(gradients)
    scales = None if squares is None else plain.scales(squares)

    def check_sum(coded: torch.Tensor, values: torch.Tensor) -> None:
        """Check that codes plus new errors give `values`, which begin with the first shard."""
        row_scales = None if scales is None else scales[: values.numel()].view(len(coded), -1)
        rows = codec.decode(coded, UNIT, row_scales)
        difference = rows.view(-1) + new_errors[: rows.numel()] - values
        # 1e-5 is far more than fp32 loses, and far less than the distance of two levels. `not <`
        # also finds NaN.
        if not float(difference.abs().max()) < 1e-5:
            raise ArithmeticError("codes plus rounding errors differ from the values")

    coded = kernels.code(gradients, code_errors, new_errors, squares, ranks)
    check_sum(coded, gradients + code_errors)
    shard_squares = None if squares is None else squares[:UNIT]
    shard_scales = None if scales is None else scales[:UNIT].view(1, -1)
    total = kernels.sum(coded, sum_errors[:UNIT], new_errors[:UNIT], shard_squares)
    decoded = codec.decode(coded, UNIT, shard_scales)
    check_sum(total[None], sum_errors[:UNIT] + decoded.sum(0))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        results = []
        for coding, coding_scales in ((kernels, squares), (plain, scales)):
            buffer, new_squares = gradients.to(dtype), torch.zeros_like(gradients)
            largest = coding.take(coded, UNIT, buffer, coding_scales, squares, new_squares)
            results.append([buffer, new_squares, largest])
        # All ranks must decode alike, so these may not even differ in the last bit.
        if not all(map(torch.equal, *results)):
            raise ArithmeticError("decoded sums differ from those of plain operations")
    return kernels
