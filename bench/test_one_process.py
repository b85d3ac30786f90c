"""Test that the accuracy study's threads train as processes over Gloo do."""

import functools
import hashlib

import pytest
import torch
import torch.distributed as dist

from bench.accuracy import one_process
from contract.options import Options
from tandem.sync import feedback
from tests.trainer_ranks import run_ranks
from trainer.world import start

WORLD = 3


def train_rank(spec, warmup, rank):
    """Train. Return (a digest of the weights that this rank ends with, the weights)."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8)
    classes = torch.arange(60) % 5
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 30, 3, bias=False), torch.nn.BatchNorm2d(30), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(30 * 36, 5),
    )  # fmt: skip
    options = Options(
        sync=spec, epochs=2, warmup_epochs=warmup, per_node_batch_size=4, lr=0.1, seed=3, ema=0.9
    )
    data = one_process.Images(images, classes, images, classes)
    one_process.Rank(options, data, net, WORLD, steps_per_epoch=8).train()
    weights = torch.cat([weight.detach().reshape(-1) for weight in net.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest(), weights.tolist()


def process_main(spec, warmup):
    start(Options(sync=spec))
    one_process.current.rank = dist.get_rank()
    return train_rank(spec, warmup, dist.get_rank())


def train_both_ways(spec, warmup):
    """Return what train_rank returned for each rank: (of processes, of threads)."""
    processes = run_ranks([1] * WORLD, process_main, spec, warmup)
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)  # as each process has
    try:
        with one_process.wired():
            function = functools.partial(train_rank, spec, warmup)
            return processes, one_process.run_ranks(WORLD, function)
    finally:
        torch.set_num_threads(thread_count)


@pytest.mark.parametrize("spec", ["ef:3", "ef:5:own"])
def test_threads_train_to_the_same_bits_as_processes(spec):
    processes, threads = train_both_ways(spec, 0.0)
    assert [digest for digest, _ in threads] == [digest for digest, _ in processes]


def test_sums_in_another_order_are_as_near_as_they_round():
    """Gloo's ring sums fp16, and the exact steps of a warm-up, in its own order."""
    for (_, weights), (_, others) in zip(*train_both_ways("fp16", 0.25)):
        weights, others = torch.tensor(weights), torch.tensor(others)
        assert float((weights - others).norm() / others.norm()) < 0.01


def test_a_rank_that_fails_ends_the_others():
    def rank_main(rank):
        if rank == 1:
            raise ValueError("rank 1 has enough")
        dist.all_reduce(torch.zeros(1))

    with one_process.wired(), pytest.raises(ValueError, match="enough"):
        one_process.run_ranks(WORLD, rank_main)


@pytest.mark.parametrize(("sync_warmup", "count"), [(None, 0), (0.0, 0), (0.25, 2), (0.75, 6)])
def test_as_many_steps_are_exact_as_sync_warmup_says(monkeypatch, sync_warmup, count):
    exact_steps = []
    begin = feedback.ErrorFeedback.begin

    def recording_begin(self, scale, exact):
        exact_steps.append(exact)
        begin(self, scale, exact)

    monkeypatch.setattr(feedback.ErrorFeedback, "begin", recording_begin)
    lengths = {"epochs": 1, "warmup_epochs": 0.5, "sync_warmup": sync_warmup}
    options = Options(sync="ef:5", per_node_batch_size=4, **lengths)
    images, classes = torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.arange(8) % 5
    data = one_process.Images(images, classes, images, classes)

    def rank_main(rank):
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5))
        one_process.Rank(options, data, net, 2, steps_per_epoch=8).train()

    with one_process.wired():
        one_process.run_ranks(2, rank_main)
    # Both ranks record each step, one after the other.
    assert exact_steps[::2] == [True] * count + [False] * (8 - count)
