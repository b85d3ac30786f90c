"""What digests cost, by processor time and bytes: a guard, the controller of 4 and of 64 guards,
and the live screen. No clock on the wall: the figures hold whatever else this machine does."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from launcher.background import Spool
from launcher.node.digest import Digest
from launcher.node.frames import FrameWriter
from launcher.node.recorder import Recorder
from launcher.node.task import read_task
from launcher.node.vitals import Vitals
from launcher.progress import Follower
from launcher.status import lines
from launcher.watch.digests import Digests, Ruling
from launcher.watch.guards import Frames

RUN, SECONDS = "20260101T000000Z-resnet50-64n", 60
GPU = {"index": 0, "utilization": 98.0, "memory_used": 9663676416, "temperature": 71.0}
GPU.update(power=240.15, clock_sm=1725.0)
RAN = {"0": {"ran": 12345.6, "waited": 123.4}}
SPENT = {"data": 0.0123, "h2d": 0.0012, "forward": 0.1123, "backward": 0.2234, "other": 0.0005}


def task_of(rank):
    given = {"type": "start", "run": RUN, "attempt": 1, "host": f"node{rank + 1}", "ranks": [rank]}
    return read_task({**given, "argv": ["x"], "output": "o", "digest": 1.0, "interface": "lo"})


class Guard:
    """What a guard does for digests, its frames in a pipe."""

    def __init__(self, folder, rank, rate):
        self.path, self.rank, self.rate = folder / f"rank{rank}.steps.jsonl", rank, rate
        folder.mkdir(parents=True, exist_ok=True)
        self.digest = Digest(task_of(rank), folder, Vitals("lo", "", lambda: [GPU], lambda: RAN))
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.frames, self.step = FrameWriter(writer), 0

    def second(self):
        """One second of steps. Returns the frame's bytes and the processor time that it took."""
        with self.path.open("a") as file:
            for _ in range(self.rate):
                self.step += 1
                seconds = {**SPENT, "sync_exposed": 0.1 + self.step % 7 / 1000}
                line = {"kind": "step", "attempt": 1, "step": self.step, "epoch": 3, "samples": 64}
                file.write(
                    json.dumps({**line, "loss": 0.53, "top1": 0.81, "seconds": seconds}) + "\n"
                )
        before = time.process_time()
        self.digest.send(self.frames)
        spent = time.process_time() - before
        return os.read(self.reader, 1 << 16), spent


@pytest.mark.parametrize("rate", [1, 10, 50])
def test_a_guard(tmp_path, figure, rate):
    guard = Guard(tmp_path / "nodes/node1", 0, rate)
    seconds = [guard.second() for _ in range(SECONDS)]
    sizes = [len(data) for data, _ in seconds]
    assert max(sizes) <= 500
    what = f"a digest, {rate} steps a second"
    figure(what, sum(sizes) / SECONDS, "bytes", "500")
    figure(f"{what}: the guard's processor", 1e3 * sum(s for _, s in seconds) / SECONDS, "ms")


def test_recorders_beside_it(tmp_path, figure):
    """What the guard did before: the same second by the recorders."""
    recorder = Recorder(task_of(0), tmp_path, lambda *trouble: None)
    recorder.start()
    before = time.process_time()
    for _ in range(SECONDS):
        recorder.sample()
    spent = time.process_time() - before
    recorder.stop()
    assert (tmp_path / "net.jsonl").read_text().count("\n") >= SECONDS
    figure("all recorders, a second", 1e3 * spent / SECONDS, "ms")


@pytest.mark.parametrize("count", [4, 64])
def test_a_controller(tmp_path, figure, count):
    hosts = [SimpleNamespace(host=f"node{rank + 1}") for rank in range(count)]
    plan = SimpleNamespace(attempt=1, world_size=count, nodes=hosts)
    guards = [Guard(tmp_path / "there" / f"node{r + 1}", r, 2) for r in range(count)]
    readers = [Frames((rank,), RUN) for rank in range(count)]
    for reader in readers:
        hello = {"type": "hello", "protocol": 1, "way": "service"}
        list(reader.feed(json.dumps(hello).encode() + b"\n"))
    spool = Spool()
    kept, ruling = Digests(plan, tmp_path / "run", spool), Ruling(lambda text: None)
    spent = arrived = 0.0
    for second in range(SECONDS):
        sent = [guard.second()[0] for guard in guards]
        before = time.process_time()
        for rank, data in enumerate(sent):
            arrived += len(data)
            for frame, _ in readers[rank].feed(data):
                kept.take(f"node{rank + 1}", frame)
        for node in hosts:
            kept.write(node.host)
        ruling.look(float(second), kept.sums)
        spool.drain()
        spent += time.process_time() - before
    assert [kept.sums.ranks[rank].steps for rank in range(count)] == [2 * SECONDS] * count
    written = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*.jsonl"))
    what = f"{count} guards"
    figure(f"{what}: digests that arrive", arrived / SECONDS / 1000, "kB/s")
    figure(f"{what}: the controller's processor", 100 * spent / SECONDS, "% of a core")
    figure(f"{what}: what it writes", written / SECONDS / 1000, "kB/s")
    follower = Follower(tmp_path / "run")
    begun = time.process_time()
    lines(follower.look(), True)
    figure(f"{what}: the first look of status", 1e3 * (time.process_time() - begun), "ms")
    spent = 0.0
    for _ in range(10):
        for rank, guard in enumerate(guards):
            for frame, _ in readers[rank].feed(guard.second()[0]):
                kept.take(f"node{rank + 1}", frame)
        for node in hosts:
            kept.write(node.host)
        spool.drain()
        begun = time.process_time()
        lines(follower.look(), True)
        spent += time.process_time() - begun
    figure(f"{what}: top, a second", 1e3 * spent / 10, "ms")


def test_a_machine_that_runs_nothing(figure):
    vitals = Vitals("lo", "", lambda: [GPU])
    before = time.process_time()
    told = [vitals.read() for _ in range(SECONDS)]
    sizes = [len(json.dumps(one, separators=(",", ":"))) + 1 for one in told]
    spent = time.process_time() - before
    assert all(one["gpus"] and one["memory"] for one in told)
    figure("top between runs, of a machine", sum(sizes) / SECONDS / 1000, "kB/s", "5")
    figure("top between runs: that machine's processor", 1e3 * spent / SECONDS, "ms a second")
