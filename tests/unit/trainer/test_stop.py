"""All ranks stop at the same step, although hosts run ahead of their devices."""

import os
import signal
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist

from trainer.stop import STOP_MEETING, Stop
from trainer.world import World

LOG_EVERY = 10  # steps between two waits for the device in the training loop


class Devices:
    """Stand-in for GPUs: no rank's device ends a step in which the ranks meet (each `every`
    steps) before all ranks have begun it. Hosts only enqueue."""

    def __init__(self, ranks, every=1):
        self.changed, self.every = threading.Condition(), every
        self.begun = [0] * ranks

    def enqueue(self, rank):
        with self.changed:
            self.begun[rank] += 1
            self.changed.notify_all()

    def wait(self, count):
        """Until `count` steps are done: all those that end with a meeting need all ranks."""
        needed = count // self.every * self.every
        with self.changed:
            assert self.changed.wait_for(lambda: min(self.begun) >= needed, 30)


class Mark:
    """What torch.cuda.Event does, of a rank's steps begun so far."""

    def __init__(self, devices, rank):
        self.devices, self.count = devices, devices.begun[rank]

    def synchronize(self):
        self.devices.wait(self.count)


def leave(rank, requested_at, devices, store, left):
    """One rank's loop; the rank 1 is slow, so that the others run ahead as far as they may."""
    world = World(rank=rank, size=len(left), device=torch.device("cuda"), store=store)
    stop = Stop(world)
    stop._mark = lambda: Mark(devices, rank)
    for step in range(200):
        if rank == 1:
            time.sleep(0.002)
            if step == requested_at:
                # The others go as far as they can before this rank looks.
                time.sleep(0.05)
                stop.requested = True
        if step % devices.every == 0 and stop.should_stop():
            left[rank] = step
            return
        devices.enqueue(rank)
        if (step + 1) % LOG_EVERY == 0:
            devices.wait(step + 1)  # the loss is read


@pytest.mark.parametrize(("every", "requested_at"), [(1, 21), (8, 24)])
def test_all_ranks_leave_at_one_step(monkeypatch, every, requested_at):
    monkeypatch.setattr("trainer.stop.signal.signal", lambda *_: None)  # of the main thread alone
    devices, left, store = Devices(3, every), [None] * 3, dist.HashStore()

    ranks = [
        threading.Thread(target=leave, args=(rank, requested_at, devices, store, left), daemon=True)
        for rank in range(3)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert left == [(store.add(STOP_MEETING, 0) - 1) * every] * 3
    assert requested_at < left[0] <= requested_at + 4 * every


@pytest.fixture
def stops():
    """Those of three ranks, whose store is in this process."""
    before, store = signal.getsignal(signal.SIGTERM), dist.HashStore()
    yield [Stop(World(store=store)) for _ in range(3)]
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("at_once", [False, True])
def test_two_that_are_asked_write_one_step(stops, at_once):
    """Also where both have read that nobody was asked, before either writes."""
    first, second, third = stops
    store = second.world.store
    if at_once:
        late = types.SimpleNamespace(add=lambda name, n: store.add(name, n) if n else 0)
        second.world = World(store=late)
    first.requested = second.requested = True
    assert [stop.should_stop() for stop in stops] == [False] * 3
    second.world = third.world
    assert [stop.should_stop() for stop in stops] == [True] * 3


def test_sigterm_requests_a_stop_and_one_process_leaves_at_once(stops):
    stop = Stop(World())
    assert not stop.should_stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.should_stop()
