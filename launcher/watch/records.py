"""The copies of the nodes' records, which grow while a run goes on: status, top and the report read
them. Nothing here waits for a disk or looks into what it copies."""

from __future__ import annotations

import os
import time
from pathlib import Path

from boundary.frames import Record
from boundary.schema import Invalid
from contract import records
from contract.records import PIECE
from launcher.background import MIB, Spool
from launcher.plan.plan import Plan

# A guard sends a piece of a file a second. So much may come besides: the rest at its end, and what
# waited in the network. A piece counts as LEAST, so that tiny ones are few, too.
BESIDE, LEAST = 4 * MIB, 1024


class Copy:
    """One file of one node."""

    def __init__(self, path: Path, limit: int):
        self.path, self.limit = path, limit
        self.end = 0  # bytes that were sent of it
        self.cost = 0  # the same, as they count

    def append(self, offset: int, data: bytes) -> None:
        """Write a piece where it belongs, at the file's end, whole or not at all: what a full disk
        takes nothing of is fetched at the end, from where the file ends then."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o644)
            try:
                whole = os.fstat(descriptor).st_size
                if whole == offset and os.write(descriptor, data) < len(data):
                    os.ftruncate(descriptor, whole)
            finally:
                os.close(descriptor)
        except OSError:
            return


class Records:
    """Those of an attempt, each of at most so many bytes."""

    def __init__(self, plan: Plan, folder: Path, spool: Spool, most: int):
        self._spool, self._begun = spool, time.monotonic()
        self._copies = {
            (node.host, name): Copy(folder / "nodes" / node.host / name, most)
            for node in plan.nodes
            for name in records.names(plan.attempt, node.ranks)
        }

    def take(self, host: str, frame: Record, payload: bytes) -> None:
        """A piece of a file. Raises Invalid for one that its guard does not have, that does not
        follow the last, or that comes sooner than a guard sends it. Beyond the file's limit pieces
        are counted and left out."""
        copy = self._copies.get((host, frame.file))
        if copy is None:
            raise Invalid(f"a record {frame.file!r}, which is none of its own")
        offset = copy.end
        if frame.offset != offset:
            raise Invalid(f"byte {frame.offset} of {frame.file} after byte {offset}")
        copy.end += len(payload)
        copy.cost += max(len(payload), LEAST)
        seconds = time.monotonic() - self._begun
        if copy.cost > BESIDE + PIECE * seconds:
            raise Invalid(f"more of {frame.file} than a guard sends in {int(seconds) + 1} s")
        if copy.end <= copy.limit:
            self._spool.add(lambda: copy.append(offset, payload), len(payload))
