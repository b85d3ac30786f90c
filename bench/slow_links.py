"""Steps of the real trainer over the lab's shaped links: what one measurement does.

Ranks are processes of this machine, each in the network namespace of one of the lab's machines, so
that what they send goes over that machine's card and cable. Links are unshaped while ranks start
(imports, the first copy of the model, DDP's first backward) and shaped for the steps.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from contract import strategies
from lab import network
from lab.plan import Lab

CHECKOUT = Path(__file__).resolve().parents[1]
FORWARD, BACKWARD = 0.04, 0.08  # seconds of an RTX 2080 Ti's step, batch 32, as a stand-in
ALONE = "none"  # the baseline: the same machines, each for itself
PORT = 29500
START_SECONDS, STEP_SECONDS = 300, 1200


@dataclass(frozen=True)
class Case:
    """One cell: so many machines with this strategy on links of `mbit`; `dilation`: by how much
    all is slower than it would be. `steps`: how many are measured, after so many `skipped`.
    `warmup`: the first of the `epochs`, whose sums are exact."""

    nodes: int
    sync: str
    mbit: float
    dilation: int
    steps: int = 3
    skipped: int = 2
    epochs: int = 1
    warmup: float = 0.0
    optimizer: str = "sgd"

    @property
    def begun(self):
        """Marks before the first step: two passes that only prepare DDP, and before them, where
        there are several ranks, one of each by itself (trainer/step.py, rebuild_buckets)."""
        return 2 if self.sync == ALONE else 3

    @property
    def first(self):
        """The mark at which measuring begins."""
        return self.begun + self.skipped


@dataclass(frozen=True)
class Seen:
    """What was seen of a Case, per step and without dilation; `busy`: share of this machine's
    cores that the ranks kept busy; `sent`: bytes of each card."""

    seconds: float
    sent: float
    busy: float


def measure(lab: Lab, case: Case, folder: Path) -> Seen:
    """Runs the trainer on the lab's first machines until enough steps are done, then ends it."""
    folder.mkdir(parents=True)
    nodes = lab.nodes[: case.nodes]
    shape(lab, nodes, None)
    ranks = [start(case, folder, node, rank) for rank, node in enumerate(nodes)]
    try:
        wait(ranks, folder, case.begun + 1, START_SECONDS)
        if case.sync != ALONE:
            shape(lab, nodes, case.mbit / case.dilation)
        wait(ranks, folder, case.first + case.steps + 1, STEP_SECONDS * case.dilation)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
    return summary(case, [marks(folder, rank) for rank in range(case.nodes)])


def without_bbr(lab: Lab) -> None:
    """Reno on all links, as near in a LAN to cubic as a namespace may have it. A machine of a cloud
    may have BBR for a default, which goes on by the rate that it saw before links were shaped."""
    for node in lab.nodes:
        line = ["sysctl", "-q", "-w", "net.ipv4.tcp_congestion_control=reno"]
        subprocess.run(["ip", "netns", "exec", node.netns, *line], check=True)


def shape(lab, nodes, mbit):
    rate = None if mbit is None else f"{mbit * 1000:.0f}kbit"
    for node in nodes:
        network.carry_out(network.shaping(lab, node, rate))


def start(case: Case, folder: Path, node, rank: int) -> subprocess.Popen:
    """One rank, in the network namespace of `node`."""
    world = 1 if case.sync == ALONE else case.nodes
    env = {
        **os.environ,
        "RANK": str(rank if world > 1 else 0),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank if world > 1 else 0),
        "MASTER_ADDR": "192.168.56.111",
        "MASTER_PORT": str(PORT),
        "TANDEM_NODE": node.name,
        "OMP_NUM_THREADS": "1",
        "BENCH_FORWARD": str(FORWARD * case.dilation),
        "BENCH_BACKWARD": str(BACKWARD * case.dilation),
        "BENCH_MARKS": str(folder / f"rank{rank}.marks"),
    }
    sync = strategies.EXACT if case.sync == ALONE else case.sync
    argv = [sys.executable, "-m", "trainer", "--model", "bench.timed_model:resnet50"]
    argv += ["--data", str(folder.parent / "images"), "--per_node_batch_size", "2"]
    argv += ["--precision", "fp32", "--device", "cpu", "--augment", "none", "--workers", "0"]
    argv += ["--epochs", str(case.epochs), "--sync_warmup", str(case.warmup)]
    argv += ["--evaluate_every", "999", "--warmup_epochs", "0", "--lr", "0.0001", "--momentum", "0"]
    argv += ["--weight_decay", "0", "--timeout", "3600", "--sync", sync]
    argv += ["--optimizer", case.optimizer]
    said = (folder / f"rank{rank}.log").open("w")
    enter = ["ip", "netns", "exec", node.netns]
    return subprocess.Popen([*enter, *argv], cwd=CHECKOUT, env=env, stdout=said, stderr=said)


def marks(folder: Path, rank: int):
    path = folder / f"rank{rank}.marks"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait(ranks, folder, count, seconds):
    """Until all ranks have written so many marks. Raises AssertionError."""
    until = time.monotonic() + seconds
    for rank, process in enumerate(ranks):
        while len(marks(folder, rank)) < count:
            said = folder / f"rank{rank}.log"
            assert process.poll() is None, f"rank {rank} ended: {said.read_text()[-2000:]}"
            assert time.monotonic() < until, f"rank {rank} is not at mark {count}: {said}"
            time.sleep(0.02)


def summary(case: Case, ranks) -> Seen:
    first, last = case.first, case.first + case.steps
    took = [(own[last]["at"] - own[first]["at"]) / case.steps for own in ranks]
    sent = [(own[last]["sent"] - own[first]["sent"]) / case.steps for own in ranks]
    busy = sum(own[last]["busy"] - own[first]["busy"] for own in ranks) / case.steps
    seconds = sum(took) / len(took)
    return Seen(
        seconds / case.dilation, sum(sent) / len(sent), busy / seconds / (os.cpu_count() or 1)
    )


def make_images(folder: Path, steps: int, nodes: int) -> None:
    """As many images as so many steps take; all but one are links to it."""
    from PIL import Image

    for split, count in (("train", 2 * nodes * steps), ("val", 2)):
        for label in range(2):
            own = folder / "images" / split / str(label)
            own.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(own / "0.png")
            for number in range(1, count // 2):
                os.link(own / "0.png", own / f"{number}.png")
