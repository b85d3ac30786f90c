"""What records cost, by processor time and bytes: a guard, the controller of 4 and of 64 guards,
and the live screen. No clock on the wall: the figures hold whatever else this machine does."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from boundary.frames import Frames
from launcher.background import Spool
from launcher.node.link import FrameWriter, read_task
from launcher.node.records import Recorder, Sampler, Tail
from launcher.watch.guards import Records
from report.status import Follower, section_of
from report.text import section_lines
from tandem.step_lines import Block

RUN, SECONDS = "20260101T000000Z-resnet50-64n", 60
SPENT = {"data": 0.0123, "h2d": 0.0012, "forward": 0.1123, "backward": 0.2234, "other": 0.0005}


def task_of(rank):
    start = {"type": "start", "run": RUN, "attempt": 1, "host": f"node{rank + 1}", "ranks": [rank]}
    return read_task({**start, "argv": ["x"], "output": "o", "interface": "lo"})


class Guard:
    """What a guard does for records, its frames in a pipe."""

    def __init__(self, folder, rank, rate):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.rate = folder / f"rank{rank}.1.steps.jsonl", rate
        self.recorder = Recorder(task_of(rank), folder, lambda *trouble: None)
        self.tail = Tail(folder, task_of(rank))
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.frames, self.step, self.block = FrameWriter(writer), 0, Block()

    def second(self):
        """One second of steps. Returns the frames' bytes and the processor time that they took."""
        with self.path.open("a") as file:
            for _ in range(self.rate):
                self.step += 1
                part = sum(SPENT.values()) * self.rate
                seconds = {name: value / part for name, value in SPENT.items()}
                line = {"kind": "step", "step": self.step, "epoch": 3, "samples": 64}
                if done := self.block.add({**line, "loss": 0.53, "top1": 0.81, "seconds": seconds}):
                    file.write(json.dumps(done) + "\n")
        before = time.process_time()
        self.recorder.tick()
        self.tail.send(self.frames)
        spent = time.process_time() - before
        return os.read(self.reader, 1 << 16), spent


@pytest.mark.parametrize("rate", [1, 10, 300])
def test_a_guard(tmp_path, figure, rate):
    guard = Guard(tmp_path / "nodes/node1", 0, rate)
    seconds = [guard.second() for _ in range(SECONDS)]
    what = f"records, {rate} steps a second"
    figure(what, sum(len(data) for data, _ in seconds) / SECONDS, "bytes", "1500")
    figure(f"{what}: the guard's processor", 1e3 * sum(s for _, s in seconds) / SECONDS, "ms")
    written = guard.path.read_text().count("\n")
    assert written <= 2 * SECONDS + 20
    figure(f"{what}: lines of steps", written / SECONDS, "a second", "2")


@pytest.mark.parametrize("count", [4, 64])
def test_a_controller(tmp_path, figure, count):
    nodes = [SimpleNamespace(host=f"node{rank + 1}", ranks=(rank,)) for rank in range(count)]
    plan = SimpleNamespace(attempt=1, world_size=count, nodes=nodes)
    guards = [Guard(tmp_path / "there" / f"node{r + 1}", r, 2) for r in range(count)]
    readers = [Frames((rank,)) for rank in range(count)]
    for reader in readers:
        hello = {"type": "hello", "protocol": 2, "way": "service"}
        list(reader.feed(json.dumps(hello).encode() + b"\n"))
    spool, folder = Spool(), tmp_path / "run"
    copies = Records(plan, folder, spool, 1 << 30)
    spent = arrived = 0.0

    def second():
        nonlocal spent, arrived
        sent = [guard.second()[0] for guard in guards]
        before = time.process_time()
        for rank, data in enumerate(sent):
            arrived += len(data)
            for frame, payload in readers[rank].feed(data):
                copies.take(f"node{rank + 1}", frame, payload)
        spool.drain()
        spent += time.process_time() - before

    for _ in range(SECONDS):
        second()
    for rank in range(count):
        name = f"nodes/node{rank + 1}/machine.1.jsonl"
        assert (folder / name).read_text().count("\n") == SECONDS
    what = f"{count} guards"
    figure(f"{what}: records that arrive", arrived / SECONDS / 1000, "kB/s")
    figure(f"{what}: the controller's processor", 100 * spent / SECONDS, "% of a core", "2")
    follower = Follower(folder)
    start = time.process_time()
    section_lines(section_of(follower.look(), True))
    figure(f"{what}: the first look of status", 1e3 * (time.process_time() - start), "ms")
    looks = 0.0
    for _ in range(10):
        second()
        start = time.process_time()
        section_lines(section_of(follower.look(), True))
        looks += time.process_time() - start
    figure(f"{what}: top, a second", 1e3 * looks / 10, "ms")


def test_a_machine_that_runs_nothing(figure):
    sampler = Sampler("lo")
    before = time.process_time()
    samples = [sampler.sample() for _ in range(SECONDS)]
    sizes = [len(json.dumps(sample, separators=(",", ":"))) + 1 for sample in samples]
    spent = time.process_time() - before
    figure("top between runs, of a machine", sum(sizes) / SECONDS / 1000, "kB/s", "5")
    figure("top between runs: that machine's processor", 1e3 * spent / SECONDS, "ms a second")
