"""Codes in fewer bytes on the wire, without loss: most of them are zero, and zstd sees that.

A row of bytes becomes a message: eight bytes that say how many follow, then a frame of zstd's, or
the row itself where a frame would be no shorter. Both ends know how long the row is, so no message
is longer than the row and its head, whatever a peer sends, and nothing is unpacked beyond it.

It takes time of a processor and saves time of a link. Which is more is measured in the first steps;
then all ranks go on with it, or none.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from contract.errors import RankError

try:
    import zstandard
except ImportError:  # an environment that was made before this needed it
    zstandard: Any = None  # type: ignore[no-redef]

UNABLE = (
    "codes are sent as they are, since not every machine's environment has zstandard: `make "
    "provision` installs it."
)
TRIAL = 10  # steps, after which all ranks decide
HEAD = 8  # bytes before a frame
LEVEL = 1  # higher ones are slower and save nothing here
LEAST_WINDOW = 1 << 10  # zstd's


def can_compress() -> bool:
    return zstandard is not None


class EntropyCoder:
    """Compresses and expands rows; a thread of its own expands while a transfer goes on.

    So far: `coding`: seconds of a processor (about: three threads add to it); `sending`: seconds of
    transfers; `sent`, `saved`: bytes that they took, and that rows would have taken beyond it.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "tandem-expand")
        self.coding = self.sending = 0.0
        self.saved = self.sent = 0

    @property
    def gain(self) -> float:
        """Seconds of transfers that were saved, less those of a processor that it took."""
        return self.saved / max(self.sent, 1) * self.sending - self.coding

    def describe(self, steps: int, pays: bool) -> str:
        """What came of it in so many steps, and what follows."""
        share = self.sent / max(self.sent + self.saved, 1)
        milliseconds = self.coding / steps * 1e3
        cost = f"zstd leaves {share:.0%} of their bytes, for {milliseconds:.1f} ms of a processor"
        if pays:
            return f"codes are compressed: {cost} a step."
        return f"codes are sent as they are: {cost} a step, more than transfers gain."

    def compress(self, row: torch.Tensor) -> torch.Tensor:
        """The message for a row of bytes in host memory, uint8 (B)."""
        begin = time.thread_time()
        frame = zstandard.ZstdCompressor(level=LEVEL).compress(row.numpy().data)
        if len(frame) >= len(row):
            frame = row.numpy().tobytes()
        message = bytearray(len(frame).to_bytes(HEAD, "little") + frame)
        self.coding += time.thread_time() - begin
        return torch.frombuffer(message, dtype=torch.uint8)

    def count(self, message: torch.Tensor, row: torch.Tensor, seconds: float) -> None:
        """A message was sent instead of such a row, in so many seconds."""
        self.sent += len(message)
        self.saved += len(row) - len(message)
        self.sending += seconds

    def room(self, row: torch.Tensor) -> torch.Tensor:
        """Where the longest message for a row like this fits."""
        return torch.empty(HEAD + len(row), dtype=torch.uint8)

    def begin_expand(self, message: torch.Tensor, row: torch.Tensor) -> "Future[None]":
        """Fill a row with what a message holds; the future raises RankError for one that is not as
        `compress` makes it."""
        return self._pool.submit(self._expand, message, row)

    def _expand(self, message: torch.Tensor, row: torch.Tensor) -> None:
        begin = time.thread_time()
        content, out = message.numpy().data, row.numpy().data
        length = int.from_bytes(content[:HEAD], "little")
        if length > len(row):
            raise RankError(f"a rank sent {length} bytes of codes, where {len(row)} are the most.")
        frame = content[HEAD : HEAD + length]
        if length == len(row):
            out[:] = frame
        else:
            # A frame says how much memory its reader needs: no more than the row has.
            window = max(len(row), LEAST_WINDOW)
            reader = zstandard.ZstdDecompressor(max_window_size=window).stream_reader(frame)
            try:
                came = reader.readinto(out)
            except zstandard.ZstdError as error:
                raise RankError(f"a rank sent codes that are not zstd's: {error}.") from error
            if came < len(out):
                raise RankError(f"a rank sent {came} bytes of codes, where {len(out)} belong.")
        self.coding += time.thread_time() - begin

    def end(self) -> None:
        """Give back the thread."""
        self._pool.shutdown(wait=False)
