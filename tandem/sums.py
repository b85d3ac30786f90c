"""Count the collective sums that this rank enters. If a run hangs, the counters show which rank did
not enter a sum.

A rank that hangs cannot report anything. Each rank therefore counts in memory that its guard shares
and reads (contract/records.py). To count a sum takes a microsecond. Without a guard nobody reads
the counters.

With NCCL a host enters sums long before its device gets there. NCCL's Flight Recorder (torch 2.5)
knows what the device has done. A thread asks the recorder once in each long silence, and for JSON,
because the recorder's dump files are pickles.
"""

import contextlib
import json
import mmap
import os
import threading
import time
from typing import Any, Callable

import torch

from contract.records import SUM_BYTES, SUM_COUNTERS

# The indices of the counters; contract/records.py says what each counter holds.
PID, ENTERED, BUCKET, PASSES, FIRST, NEWEST, QUEUED, COMPLETED = range(len(SUM_COUNTERS))
LOOK_SECONDS, SILENT_SECONDS = 1.0, 10.0


class SumCounters:
    """The counters of this process."""

    def __init__(self) -> None:
        self._values = memoryview(bytearray(SUM_BYTES)).cast("q")

    def share(self, device: torch.device) -> None:
        """Count in the guard's memory from now on, if there is a guard. `device`: of the sums."""
        path = os.environ.pop("TANDEM_SUMS", "")
        if not path:
            return
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            shared = mmap.mmap(descriptor, SUM_BYTES)
            os.close(descriptor)
        except (OSError, ValueError):  # a rank that cannot count still trains
            return
        self._values = memoryview(shared).cast("q")
        self._values[PID], self._values[QUEUED], self._values[COMPLETED] = os.getpid(), -1, -1
        # torch's newer `_dump_fr_trace_json` asks for Gloo's recorder by default.
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
        if dump is not None and device.type == "cuda":
            threading.Thread(target=self._ask_recorder, args=(dump,), daemon=True).start()

    def enter(self, bucket: int = -1) -> None:
        """Count a sum as it is entered. `bucket`: its index in its backward pass; -1 for a sum of
        the whole pass."""
        values, entered_ns = self._values, time.monotonic_ns()
        values[ENTERED] += 1
        values[BUCKET], values[NEWEST] = bucket, entered_ns
        # A backward pass begins with its bucket 0, or has one sum only.
        if bucket <= 0:
            values[PASSES] += 1
        if not values[FIRST]:
            values[FIRST] = entered_ns

    def _ask_recorder(self, dump: Callable[..., Any]) -> None:
        """Ask once after each sum that no other sum follows for SILENT_SECONDS; a thread."""
        asked_about = 0
        while True:
            time.sleep(LOOK_SECONDS)
            newest = self._values[NEWEST]
            if newest == asked_about or time.monotonic_ns() - newest <= SILENT_SECONDS * 1e9:
                continue
            asked_about = newest
            with contextlib.suppress(Exception):  # the answers of other torches may differ
                # Group "0" is the default group, which sums gradients.
                status = json.loads(dump(includeCollectives=False))["pg_status"]["0"]
                queued = int(status["last_enqueued_collective"])
                completed = int(status["last_completed_collective"])
                self._values[QUEUED], self._values[COMPLETED] = queued, completed


SUMS = SumCounters()
