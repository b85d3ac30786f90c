"""Counts the collective sums that this rank enters, so that a run that hangs can say which rank did
not enter which sum.

A rank that hangs cannot tell anybody. So it counts in memory that its guard shares and reads from
outside (contract/records.py). A sum costs a microsecond; without a guard nobody reads the counters.

With NCCL a host enters sums long before its device gets there. NCCL's Flight Recorder knows what
the device has done, so a thread asks it once in each long silence: since torch 2.5, and for JSON,
since its dump files are pickles.
"""

import contextlib
import json
import mmap
import os
import threading
import time
from typing import Any, Callable, Tuple

import torch

from contract.records import SUM_BYTES, SUM_COUNTERS

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
        values, now = self._values, time.monotonic_ns()
        values[ENTERED] += 1
        values[BUCKET], values[NEWEST] = bucket, now
        if bucket <= 0:
            values[PASSES] += 1
        if not values[FIRST]:
            values[FIRST] = now

    def _ask_recorder(self, dump: Callable[..., Any]) -> None:
        asked_about = 0
        while True:
            time.sleep(LOOK_SECONDS)
            newest = self._values[NEWEST]
            if newest != asked_about and time.monotonic_ns() - newest > SILENT_SECONDS * 1e9:
                asked_about = newest
                with contextlib.suppress(Exception):  # whatever another torch answers
                    self._values[QUEUED], self._values[COMPLETED] = read_recorder(dump)


def read_recorder(dump: Callable[..., Any]) -> Tuple[int, int]:
    """Return how many collectives of the default group were queued, and completed by the device.
    Raises KeyError, TypeError or ValueError if the recorder does not know."""
    status = json.loads(dump(includeCollectives=False))["pg_status"]["0"]
    return int(status["last_enqueued_collective"]), int(status["last_completed_collective"])


SUMS = SumCounters()
