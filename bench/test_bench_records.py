"""What records of steps and machines cost: processor time and bytes of a guard, of a controller of
4 and of 64 guards, and of the live screen. Neither depends on what else this machine does."""

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
STEP = {"data": 0.0123, "h2d": 0.0012, "forward": 0.1123, "backward": 0.2234, "other": 0.0005}


class Guard:
    """What a guard does for the records of one rank. Its frames go into a pipe."""

    def __init__(self, folder, rank, rate):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.rate = folder / f"rank{rank}.1.steps.jsonl", rate
        names = {"run": RUN, "attempt": 1, "host": f"node{rank + 1}", "ranks": [rank]}
        words = {"argv": ["x"], "output": "o", "interface": "lo"}
        task = read_task({"type": "start", **names, **words})
        self.recorder = Recorder(task, folder, lambda *trouble: None)
        self.tail = Tail(folder, task)
        self.pipe, writer = os.pipe()
        os.set_blocking(self.pipe, False)
        self.frames, self.step, self.block = FrameWriter(writer), 0, Block()

    def run_second(self):
        """Record one second of steps. Return (the frames' bytes, the guard's processor seconds)."""
        with self.path.open("a") as file:
            for _ in range(self.rate):
                self.step += 1
                scale = 1 / (sum(STEP.values()) * self.rate)
                seconds = {name: value * scale for name, value in STEP.items()}
                line = {"kind": "step", "step": self.step, "epoch": 3, "samples": 64}
                # Several fast steps become one line.
                if done := self.block.add({**line, "loss": 0.53, "top1": 0.81, "seconds": seconds}):
                    file.write(json.dumps(done) + "\n")
        begin = time.process_time()
        self.recorder.tick()
        self.tail.send(self.frames)
        spent = time.process_time() - begin
        return os.read(self.pipe, 1 << 16), spent


@pytest.mark.parametrize("rate", [1, 10, 300])
def test_a_guard(tmp_path, figure, rate):
    guard = Guard(tmp_path / "nodes/node1", 0, rate)
    seconds = [guard.run_second() for _ in range(SECONDS)]
    name = f"records, {rate} steps a second"
    figure(name, sum(len(data) for data, _ in seconds) / SECONDS, "bytes", "1500")
    figure(f"{name}: the guard's processor", 1e3 * sum(s for _, s in seconds) / SECONDS, "ms")
    lines = guard.path.read_text().count("\n")
    assert lines <= 2 * SECONDS + 20
    figure(f"{name}: lines of steps", lines / SECONDS, "a second", "2")


@pytest.mark.parametrize("count", [4, 64])
def test_a_controller(tmp_path, figure, count):
    hosts = [f"node{rank + 1}" for rank in range(count)]
    nodes = [SimpleNamespace(host=host, ranks=(rank,)) for rank, host in enumerate(hosts)]
    plan = SimpleNamespace(attempt=1, world_size=count, nodes=nodes)
    guards = [Guard(tmp_path / "there" / host, rank, 2) for rank, host in enumerate(hosts)]
    readers = [Frames((rank,)) for rank in range(count)]
    for reader in readers:
        hello = {"type": "hello", "protocol": 2, "way": "service"}
        list(reader.feed(json.dumps(hello).encode() + b"\n"))
    spool, folder = Spool(), tmp_path / "run"
    copies = Records(plan, folder, spool, 1 << 30)
    spent = received = 0.0

    def run_second():
        nonlocal spent, received
        sent = [guard.run_second()[0] for guard in guards]
        begin = time.process_time()
        for host, reader, data in zip(hosts, readers, sent):
            received += len(data)
            for frame, payload in reader.feed(data):
                copies.take(host, frame, payload)
        spool.drain()
        spent += time.process_time() - begin

    def time_screen():
        begin = time.process_time()
        section_lines(section_of(follower.look(), True))
        return time.process_time() - begin

    for _ in range(SECONDS):
        run_second()
    for host in hosts:
        records = (folder / f"nodes/{host}/machine.1.jsonl").read_text()
        assert records.count("\n") == SECONDS
    name = f"{count} guards"
    figure(f"{name}: records that arrive", received / SECONDS / 1000, "kB/s")
    figure(f"{name}: the controller's processor", 100 * spent / SECONDS, "% of a core", "2")
    follower = Follower(folder)
    figure(f"{name}: the first look of status", 1e3 * time_screen(), "ms")
    looks = 0.0
    for _ in range(10):
        run_second()
        looks += time_screen()
    figure(f"{name}: top, a second", 1e3 * looks / 10, "ms")


def test_a_machine_that_runs_nothing(figure):
    sampler = Sampler("lo")
    begin = time.process_time()
    samples = [sampler.sample() for _ in range(SECONDS)]
    sizes = [len(json.dumps(sample, separators=(",", ":"))) + 1 for sample in samples]
    spent = time.process_time() - begin
    figure("top between runs, of a machine", sum(sizes) / SECONDS / 1000, "kB/s", "5")
    figure("top between runs: that machine's processor", 1e3 * spent / SECONDS, "ms a second")
