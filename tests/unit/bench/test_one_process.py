"""The accuracy study's ranks of one process do what processes over Gloo do."""

import hashlib

import torch
import torch.distributed as dist

from bench.accuracy import one_process
from contract.options import Options
from tests.trainer_ranks import run_ranks
from trainer.world import start

WORLD, SPEC = 3, "ef:1.6"


def trained(rank):
    """A digest of the weights that this rank ends with."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8)
    classes = torch.arange(60) % 5
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 30, 3, bias=False), torch.nn.BatchNorm2d(30), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(30 * 36, 5),
    )  # fmt: skip
    options = Options(
        sync=SPEC, epochs=2, warmup_epochs=0.0, per_node_batch_size=4, lr=0.1, seed=3, ema=0.9
    )
    data = one_process.Images(images, classes, images, classes)
    mine = one_process.Rank(options, data, net, WORLD, steps_per_epoch=8)
    mine.train()
    weights = torch.cat([weight.detach().reshape(-1) for weight in net.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def as_process():
    start(Options(sync=SPEC))
    one_process.own.rank = dist.get_rank()
    return trained(dist.get_rank())


def test_threads_train_to_the_same_bits_as_processes():
    processes = run_ranks([1] * WORLD, as_process)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as each process has
    try:
        with one_process.wired():
            assert one_process.run_ranks(WORLD, trained) == processes
    finally:
        torch.set_num_threads(before)
