"""Several ranks of the trainer on this machine, forked from a server (tests/trainer_preload.py)."""

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import socket
import struct
import sys
import tempfile
import time
import traceback

import numpy as np
from PIL import Image

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.trainer_preload"])


BLOCK = 100  # ports


@functools.cache
def own_ports():
    """(mark, ports without end) of this process alone, while it lives, among those that the kernel
    gives nobody by itself: one that it gave, and that was closed again, goes to the next who asks.
    """
    mark = socket.socket(socket.AF_UNIX)
    for begin in range(10000, 29000, BLOCK):
        with contextlib.suppress(OSError):
            mark.bind(f"\0tandem-test-ports-{begin}")  # gone with the process; of this network
            return mark, itertools.cycle(range(begin, begin + BLOCK))
    raise RuntimeError("all blocks of ports have a process")


def free_port():
    for port in own_ports()[1]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def start_ranks(nodes, function, *args, env=None, quiet=False):
    """Starts `function(*args)` on each rank; `nodes[i]` is the number of ranks on node i."""
    port, rank, started = free_port(), 0, []
    for node, count in enumerate(nodes):
        for local in range(count):
            own = {
                "RANK": rank, "WORLD_SIZE": sum(nodes), "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": count, "GROUP_RANK": node, "TANDEM_NODE": f"node{node + 1}",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
                "TANDEM_PROGRESS": "plain", **(env or {}),
            }  # fmt: skip
            ours, theirs = CONTEXT.Pipe()
            child = CONTEXT.Process(target=_child, args=(theirs, own, quiet, function, args))
            child.start()
            theirs.close()
            started.append((child, ours))
            rank += 1
    return started


def run_ranks(nodes, function, *args, **settings):
    """The ranks' results, in rank order; the first rank's exception as an AssertionError."""
    results = []
    for child, pipe in start_ranks(nodes, function, *args, **settings):
        try:
            results.append(pipe.recv())
        except EOFError:
            results.append((False, "ended without a result"))
        child.join(30)
    failed = [text for good, text in results if not good]
    assert not failed, failed[0]
    return [value for _, value in results]


def _child(pipe, env, quiet, function, args):
    os.environ.update({name: str(value) for name, value in env.items()})
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    # Without destroying process groups, since their peers may be gone.
    os._exit(0)


def snapshot(**known):
    """What a checkpoint holds, as far as it matters."""
    return {
        "model": {}, "optimizer": {}, "precision": {"scale": None}, "ema": None, "sync": None,
        "epoch": 0, "sample": 4, "step": 1, "best_top1": 0.0, "run": "r", "samples": 4,
        "train_images": 99, "classes": [], "options": {}, **known,
    }  # fmt: skip


def steps_done(output):
    """By the first node's ranks; a line may be of several."""
    lines = (
        line
        for path in output.glob("nodes/node1/rank*.jsonl")
        for line in path.read_text().splitlines(keepends=True)
    )
    told = (json.loads(line) for line in lines if '"kind": "step"' in line and line.endswith("\n"))
    return sum(line["steps"] for line in told)


def lines(output, kind=""):
    """By rank: its lines, or those of a kind."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    found = []
    for path in sorted(output.glob("nodes/*/rank*.steps.jsonl")):
        every = [json.loads(one, parse_constant=refuse) for one in path.read_text().splitlines()]
        found.append([line for line in every if kind in ("", line["kind"])])
    assert found
    return found


def wait_for_steps(output, count, started):
    while steps_done(output) < count and all(child.is_alive() for child, _ in started):
        time.sleep(0.002)


def end(started, number):
    for child, _ in started:
        if child.is_alive():
            os.kill(child.pid, number)
    for child, _ in started:
        child.join()


def most_memory():
    """The most memory that this process has taken so far, in MiB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def newest_checkpoint(output, host="node1"):
    """The newest checkpoint of a machine."""
    from tandem.pickles import load_tensors

    with sorted((output / "checkpoints" / host).glob("step-*.pt"))[-1].open("rb") as file:
        return load_tensors(file)


def trainer(*argv):
    """The trainer's exit code, as a rank."""
    from trainer.__main__ import main

    return main([str(word) for word in argv])


def said(*argv):
    """(exit code, what the rank wrote to its real stderr)."""
    with tempfile.TemporaryFile("w+") as text:
        os.dup2(text.fileno(), 2)
        code = trainer(*argv)
        sys.stderr.flush()
        text.seek(0)
        return code, text.read()


def make_images(root, per_class, classes=4, size=16, val=3):
    """A small data set: noise whose brightness tells the class."""
    random = np.random.default_rng(0)
    for split, count in (("train", per_class), ("val", val)):
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                noise = random.integers(0, 255, (size, size, 3)) / 4 + 48 * label
                Image.fromarray(noise.astype(np.uint8)).save(folder / f"{number}.png")
    return root


def as_safetensors(tensors):
    """As the format's page has it, without its package."""
    import torch

    header, data = {"__metadata__": {"format": "pt"}}, b""
    names = {torch.float32: "F32", torch.int64: "I64"}
    for name, tensor in tensors.items():
        raw = tensor.contiguous().numpy().tobytes()
        place = [len(data), len(data) + len(raw)]
        shape = list(tensor.shape)
        header[name] = {"dtype": names[tensor.dtype], "shape": shape, "data_offsets": place}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
