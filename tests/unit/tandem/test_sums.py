"""What a rank counts of its collective sums, as its guard reads it from outside."""

import os
import struct
import time
from types import SimpleNamespace

import pytest
import torch

from contract.records import SUM_BYTES, SUM_COUNTERS
from tandem import sums as module
from tandem import sync, timings
from tests.trainer_ranks import run_ranks
from tests.unit.tandem import loop


def shared_memory():
    """A file as a guard makes it for this process, and a function that reads the counters."""
    descriptor = os.memfd_create("sums")
    os.truncate(descriptor, SUM_BYTES)
    os.environ["TANDEM_SUMS"] = f"/proc/{os.getpid()}/fd/{descriptor}"

    def read():
        values = struct.unpack(f"={len(SUM_COUNTERS)}q", os.pread(descriptor, SUM_BYTES, 0))
        return dict(zip(SUM_COUNTERS, values))

    return read


def count_in_a_loop(*tools):
    """Make five steps of a model with two buckets, or one before DDP has ordered them; the third
    also has a pass in no_sync."""
    loop.joined()
    read, begin = shared_memory(), time.monotonic_ns()
    layers = [torch.nn.Linear(600, 600) for _ in range(2)]
    model = loop.wrapped(torch.nn.Sequential(*layers))
    if "attach" in tools:
        sync.attach(model, "allreduce")
    batches = [torch.ones(2, 600)] * 5
    for number, batch in enumerate(
        timings.timed(batches, model) if "timings" in tools else batches
    ):
        if number == 2:
            with model.no_sync():
                model(batch).sum().backward()
        model(batch).sum().backward()
        if "timings" in tools:
            timings.step()
    counts = read()
    assert counts["pid"] == os.getpid()
    assert begin < counts["first"] < counts["newest"] < time.monotonic_ns()
    return counts["passes"], counts["bucket"], counts["entered"]


@pytest.mark.parametrize(
    ("tools", "bucket", "sums"),
    [(("timings",), -1, {5}), (("attach", "timings"), 1, {9, 10})],
    ids=str,
)
def test_sums_are_counted_by_bucket_with_attach_and_else_by_backward_pass(tools, bucket, sums):
    for *place, entered in run_ranks([1, 1], count_in_a_loop, *tools):
        assert place == [5, bucket] and entered in sums


# By Gloo's recorder in torch 2.15, which has NCCL's format.
RECORDED = b"""{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{"":{"desc":"","name":"",
"ranks":"[0, 1]"}},"pg_status":{"0":{"last_completed_collective":"1","last_enqueued_collective":"2",
"last_started_collective":"-1"}},"version":"2.10"}"""


@pytest.mark.parametrize(("recorded", "counts"), [(RECORDED, (2, 1)), (b"", (-1, -1))])
def test_a_silent_rank_on_a_gpu_asks_the_flight_recorder_once(monkeypatch, recorded, counts):
    asked = []

    def dump(includeCollectives):
        asked.append(includeCollectives)
        return recorded

    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    read, counters = shared_memory(), module.SumCounters()
    counters.share(SimpleNamespace(type="cuda"))
    for number in (1, 2):
        counters.enter()
        limit = time.monotonic() + 10
        while len(asked) < number or (read()["queued"], read()["completed"]) != counts:
            assert time.monotonic() < limit
    assert asked == [False, False]
