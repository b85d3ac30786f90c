"""Measure steps of the real trainer over the lab's shaped links.

Ranks are processes of this machine, each in the network namespace of one of the lab's machines, so
they send over that machine's network card and cable. Links are unshaped while ranks start (imports,
the first copy of the model, DDP's first backward), and shaped for the measured steps.

bench/timed_model.py writes a mark at the beginning of each step: time, bytes sent, processor time.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from contract import strategies
from lab import network
from lab.plan import Lab

CHECKOUT = Path(__file__).resolve().parents[1]
# Seconds of an RTX 2080 Ti's step with ResNet-50 and batch 32.
FORWARD, BACKWARD = 0.04, 0.08
ALONE = "none"  # in place of a strategy: the same machines, each by itself
PORT = 29500
START_SECONDS, STEP_SECONDS = 300, 1200


@dataclass(frozen=True)
class Case:
    """What is measured: a strategy on so many machines, on links of `mbit`. `dilation`: links are
    so many times as slow, and computing takes so many times as long, as the result says. `steps`
    are measured, after `skipped` ones. The first `warmup` of the `epochs` have exact sums."""

    nodes: int
    sync: str
    mbit: float
    dilation: int
    steps: int = 3
    skipped: int = 2
    epochs: int = 1
    warmup: float = 0.0
    optimizer: str = "sgd"


@dataclass(frozen=True)
class Measurement:
    """A Case's figures per step, without dilation. `sent`: bytes of each machine's network card;
    `busy`: the share of this machine's cores that the ranks kept busy."""

    seconds: float
    sent: float
    busy: float


def measure(lab: Lab, case: Case, folder: Path) -> Measurement:
    """Run the trainer on the lab's first machines until enough steps are done, then kill it."""
    folder.mkdir(parents=True)
    nodes = lab.nodes[: case.nodes]
    # Marks before the first step: two passes prepare DDP. Where there are several ranks, each makes
    # one pass alone before (trainer/step.py, rebuild_buckets).
    start_marks = 2 if case.sync == ALONE else 3
    first = start_marks + case.skipped
    last = first + case.steps
    shape(lab, nodes, None)
    ranks = [start(case, folder, node, rank) for rank, node in enumerate(nodes)]
    try:
        wait_for_marks(ranks, folder, start_marks + 1, START_SECONDS)
        if case.sync != ALONE:
            shape(lab, nodes, case.mbit / case.dilation)
        wait_for_marks(ranks, folder, last + 1, STEP_SECONDS * case.dilation)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
    marks = [read_marks(folder, rank) for rank in range(case.nodes)]
    # The means over the ranks, for all steps together.
    seconds, sent, busy = (
        statistics.fmean(rank[last][name] - rank[first][name] for rank in marks)
        for name in ("at", "sent", "busy")
    )
    cores = case.nodes * busy / seconds / (os.cpu_count() or 1)
    return Measurement(seconds / case.steps / case.dilation, sent / case.steps, cores)


def use_reno(lab: Lab) -> None:
    """Make TCP use reno on all links: in a LAN, it is as near to cubic as a namespace may have. A
    cloud machine's default may be BBR, which goes on by the rate that it measured before links were
    shaped."""
    for node in lab.nodes:
        command = ["sysctl", "-q", "-w", "net.ipv4.tcp_congestion_control=reno"]
        subprocess.run(["ip", "netns", "exec", node.netns, *command], check=True)


def shape(lab, nodes, mbit):
    """Shape the links of these machines. `mbit`: None for unshaped links."""
    rate = None if mbit is None else f"{mbit * 1000:.0f}kbit"
    for node in nodes:
        network.carry_out(network.shaping(lab, node, rate))


def start(case: Case, folder: Path, node, rank: int) -> subprocess.Popen:
    """Start one rank in the network namespace of `node`."""
    world, rank_in_world = (1, 0) if case.sync == ALONE else (case.nodes, rank)
    variables = f"""
        RANK={rank_in_world} WORLD_SIZE={world} GROUP_RANK={rank_in_world} LOCAL_RANK=0
        LOCAL_WORLD_SIZE=1 MASTER_ADDR=192.168.56.111 MASTER_PORT={PORT} OMP_NUM_THREADS=1
        TANDEM_NODE={node.name} BENCH_FORWARD={FORWARD * case.dilation}
        BENCH_BACKWARD={BACKWARD * case.dilation}
    """
    env = {**os.environ, **dict(variable.split("=") for variable in variables.split())}
    env["BENCH_MARKS"] = str(folder / f"rank{rank}.marks")
    sync = strategies.EXACT if case.sync == ALONE else case.sync
    words = f"""
        --model bench.timed_model:resnet50 --sync {sync}
        --per_node_batch_size 2 --precision fp32 --device cpu --augment none --workers 0
        --epochs {case.epochs} --sync_warmup {case.warmup} --optimizer {case.optimizer}
        --evaluate_every 999 --warmup_epochs 0 --lr 0.0001 --momentum 0 --weight_decay 0
        --timeout 3600
    """
    argv = ["ip", "netns", "exec", node.netns, sys.executable, "-m", "trainer", *words.split()]
    argv += ["--data", str(folder.parent / "images")]
    log = (folder / f"rank{rank}.log").open("w")
    return subprocess.Popen(argv, cwd=CHECKOUT, env=env, stdout=log, stderr=log)


def read_marks(folder: Path, rank: int):
    """Return the marks that a rank has written, as dicts."""
    path = folder / f"rank{rank}.marks"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for_marks(ranks, folder, count, seconds):
    """Wait until each rank has written so many marks. Raise AssertionError after `seconds`, or if a
    rank ends."""
    until = time.monotonic() + seconds
    for rank, process in enumerate(ranks):
        while len(read_marks(folder, rank)) < count:
            log = folder / f"rank{rank}.log"
            assert process.poll() is None, f"rank {rank} ended: {log.read_text()[-2000:]}"
            assert time.monotonic() < until, f"rank {rank} is not at mark {count}: {log}"
            time.sleep(0.02)


def make_images(folder: Path, steps: int, nodes: int) -> None:
    """Make as many images as so many steps take. The images of a class are links to one file."""
    from PIL import Image

    for split, count in (("train", 2 * nodes * steps), ("val", 2)):
        for label in range(2):
            class_folder = folder / "images" / split / str(label)
            class_folder.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(class_folder / "0.png")
            for number in range(1, count // 2):
                os.link(class_folder / "0.png", class_folder / f"{number}.png")
