"""Compress codes without loss: most of them are zero, which zstd finds.

A row of bytes becomes a message: eight bytes with the length of the rest, then a zstd frame, or the
row itself if a frame would not be shorter. Both ends know the row's length, so a faulty peer can
neither send a longer message nor make this rank unpack more than one row.

Compression costs processor time and saves transfer time. The first steps measure both times. Then
feedback.py decides for all ranks whether they continue to compress; carrier.py sends the messages.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from contract.errors import RankError

try:
    import zstandard
except ImportError:  # an environment made before Tandem used it, or a script's own
    zstandard: Any = None  # type: ignore[no-redef]

UNABLE = (
    "the gradients are sent uncompressed, because not every machine's environment has zstandard: "
    "`make provision` installs it."
)
TRIAL_STEPS = 10  # steps before all ranks decide
HEAD_BYTES = 8
LEVEL = 1  # higher levels are slower and save nothing here
MIN_WINDOW = 1 << 10  # zstd accepts no smaller one


def can_compress() -> bool:
    return zstandard is not None


class EntropyCoder:
    """Compresses and expands rows. The thread of `pool` expands while the next transfer runs."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "tandem-expand")
        # Approximate, because three threads add to this number without a lock.
        self.processor_seconds = 0.0
        self.transfer_seconds = 0.0
        self.sent_bytes = self.saved_bytes = 0

    @property
    def gain(self) -> float:
        """Return the transfer seconds that compression saved, minus its processor seconds."""
        seconds_per_byte = self.transfer_seconds / max(self.sent_bytes, 1)
        return self.saved_bytes * seconds_per_byte - self.processor_seconds

    def describe(self, steps: int, pays: bool) -> str:
        """Return a note on what compression cost and saved in the first `steps`."""
        share = self.sent_bytes / max(self.sent_bytes + self.saved_bytes, 1)
        milliseconds = self.processor_seconds / steps * 1e3
        if pays:
            return (
                f"the gradients are compressed: zstd leaves {share:.0%} of the bytes and takes "
                f"{milliseconds:.1f} ms of processor time per step."
            )
        return (
            f"the gradients are sent uncompressed: zstd would leave {share:.0%} of the bytes, but "
            f"take {milliseconds:.1f} ms of processor time per step, more than the transfers gain."
        )

    def compress(self, row: torch.Tensor) -> torch.Tensor:
        """Return the message for a row of bytes in host memory, uint8 (B)."""
        # Thread time leaves out the waiting for a processor, which is busy with loading images.
        begin = time.thread_time()
        # A compressor for each row: they must not be shared by threads.
        frame = zstandard.ZstdCompressor(level=LEVEL).compress(row.numpy().data)
        if len(frame) >= len(row):
            frame = row.numpy().tobytes()
        message = bytearray(len(frame).to_bytes(HEAD_BYTES, "little") + frame)
        self.processor_seconds += time.thread_time() - begin
        return torch.frombuffer(message, dtype=torch.uint8)

    def count(self, message: torch.Tensor, row: torch.Tensor, seconds: float) -> None:
        """Count a message that was sent instead of a row."""
        self.sent_bytes += len(message)
        self.saved_bytes += len(row) - len(message)
        self.transfer_seconds += seconds

    def make_room(self, row: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor for the longest message that a row of this length can have."""
        return torch.empty(HEAD_BYTES + len(row), dtype=torch.uint8)

    def expand(self, message: torch.Tensor, row: torch.Tensor) -> None:
        """Fill a row, uint8 (bytes), with a message's content. Raises RankError for a message that
        `compress` cannot have made."""
        begin = time.thread_time()
        content, row_bytes = message.numpy().data, row.numpy().data
        length = int.from_bytes(content[:HEAD_BYTES], "little")
        if length > len(row):
            raise RankError(
                f"a rank sent a message of {length} bytes for a row of {len(row)} bytes: do all "
                "machines run the same version of Tandem?"
            )
        frame = content[HEAD_BYTES : HEAD_BYTES + length]
        if length == len(row):
            row_bytes[:] = frame
        else:
            # A frame may ask for any amount of memory; a valid one needs no more than the row.
            window = max(len(row), MIN_WINDOW)
            reader = zstandard.ZstdDecompressor(max_window_size=window).stream_reader(frame)
            try:
                expanded_bytes = reader.readinto(row_bytes)
            except zstandard.ZstdError as error:
                raise RankError(f"a rank sent gradients that zstd cannot read: {error}.") from error
            if expanded_bytes < len(row):
                raise RankError(
                    f"a rank sent {expanded_bytes} bytes of gradients for a row of {len(row)} "
                    "bytes: do all machines run the same version of Tandem?"
                )
        self.processor_seconds += time.thread_time() - begin

    def end(self) -> None:
        """End the thread."""
        # A row may still be expanding for a bucket whose exchange has failed.
        self.pool.shutdown(wait=False)
