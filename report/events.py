"""A run's figures for TensorBoard: `python -m report tensorboard RUN`.

A file of events is a sequence of records (tensorflow/core/lib/io/record_writer.h): the length, a
masked CRC-32C of the length, an Event, a masked CRC-32C of that. An Event (event.proto) has the
wall time (1), the step (2) and a file version (3) or a Summary (5), of which each value (1) has a
tag (1) and a number (2): summary.proto.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from contract import verbs
from contract.command_line import verb_words
from contract.errors import UserError
from report.analysis import Analysis, analyse
from report.cli import find_run, write_bytes
from report.measure import longest_attempt
from report.overtime import gpu_charts, machine_charts
from report.read import RankRecord
from report.text import printable
from report.windows import thin

FOLDER = "tensorboard"  # of a run
MOST_LOSSES = 1000  # of a rank


class Scalar(NamedTuple):
    """`unix`: seconds."""

    tag: str
    step: int
    unix: float
    value: float


def tensorboard_main(argv: list[str]) -> int:
    """Writes the events of a run and prints their folder."""
    run = verb_words("tensorboard", argv, "make tensorboard").get("run", verbs.RUN.default)
    print(printable(str(write_events(analyse(find_run(run))))))
    return 0


def write_events(analysis: Analysis) -> Path:
    """Replaces the events of a run. Returns their folder. Raises UserError."""
    folder = analysis.run.folder / FOLDER
    if folder.is_symlink():  # a run's folder may be somebody else's
        raise UserError(f"{folder} is a link, through which nothing is written: remove it.")
    points = sorted(scalars(analysis), key=lambda point: point.unix)
    began = points[0].unix if points else 0.0
    data = record(event(began, version=b"brain.Event:2"))
    data += b"".join(
        record(event(point.unix, point.step, point.tag, point.value)) for point in points
    )
    for older in folder.glob("events.out.tfevents.*.tandem"):  # of a run that began anew
        older.unlink()
    write_bytes(folder / f"events.out.tfevents.{began:.0f}.tandem", data)
    return folder


def scalars(analysis: Analysis) -> Iterator[Scalar]:
    """Training by step, evaluation by step, machines by seconds since the loop began."""
    records = longest_attempt(analysis.run.ranks)
    if not records:
        return
    began = records[0].start.get("unix") or 0.0
    columns, speed = records[0].steps, analysis.summary["images_per_second"]
    if speed is not None:
        end = began + columns.clock[-1]
        yield Scalar("training/images per second of the run", columns.step[-1], end, speed)
    yield from training_scalars(analysis, records, began)
    per_epoch = records[0].start.get("steps_per_epoch") or 1
    for epoch in analysis.curve:
        step = round(epoch.epoch * per_epoch)
        scores = {"top-1": epoch.top1, "loss": epoch.loss, "loss in training": epoch.train_loss}
        for name, score in scores.items():
            if score is not None:
                yield Scalar(f"evaluation/{name}", step, began + epoch.seconds, score)
    for chart in (*machine_charts(analysis), *gpu_charts(analysis)):
        for host, _, points in chart.lines:
            unit = f", {chart.unit}" if chart.unit else ""
            for seconds, value in points:
                yield Scalar(f"{chart.title}{unit}/{host}", int(seconds), began + seconds, value)


def training_scalars(
    analysis: Analysis, records: list[RankRecord], began: float
) -> Iterator[Scalar]:
    """Losses of log points, mean over the ranks; rates and waits of slices of the loop."""
    columns = records[0].steps

    def step_at(seconds: float) -> int:
        place = bisect.bisect_left(columns.clock, seconds)
        return columns.step[min(place, len(columns) - 1)]

    losses: dict[int, list[float]] = {}
    for rank in records:
        pairs = zip(map(float, rank.steps.step), rank.steps.loss)
        logged = [pair for pair in pairs if not math.isnan(pair[1])]
        for step, loss in thin(logged, MOST_LOSSES):
            losses.setdefault(int(step), []).append(loss)
    for step, values in losses.items():
        place = min(bisect.bisect_left(columns.step, step), len(columns) - 1)
        unix = began + columns.clock[place]
        yield Scalar("training/loss", step, unix, sum(values) / len(values))
    for point in analysis.line:
        for name, value in (
            ("images per second", point.images_per_second),
            ("waits for images, %", 100 * point.data_share),
            ("waits for gradients, %", 100 * point.sync_share),
        ):
            at = point.seconds
            yield Scalar(f"training/{name}", step_at(at), began + at, value)
    for span in analysis.spans:
        for name, value in (("p50", span.half), ("p95", span.most)):
            step = step_at(span.seconds)
            yield Scalar(f"training/a step, ms/{name}", step, began + span.seconds, 1000 * value)


def event(
    unix: float, step: int = 0, tag: str = "", value: float = 0.0, version: bytes = b""
) -> bytes:
    """An Event as a protocol buffer: of the file's version, or of one number."""
    head = b"\x09" + struct.pack("<d", unix)
    if version:
        return head + field(3, version)
    number = field(1, tag.encode(errors="replace")) + b"\x15" + single(value)
    # A negative int64 is its two's complement.
    return head + b"\x10" + varint(step % 2**64) + field(5, field(1, number))


def single(value: float) -> bytes:
    """A float of four bytes; one that is too large for it is infinite."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def field(place: int, data: bytes) -> bytes:
    """Text, bytes or a message within another."""
    return bytes([place << 3 | 2]) + varint(len(data)) + data


def varint(value: int) -> bytes:
    """A whole number that is not negative, seven bits a byte."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + mask_crc(length) + data + mask_crc(data)


def mask_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """Castagnoli's CRC-32 (RFC 3720, B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def row(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


TABLE = [row(byte) for byte in range(256)]
