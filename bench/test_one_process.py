"""The accuracy study's ranks of one process do what processes over Gloo do."""

import functools
import hashlib

import pytest
import torch
import torch.distributed as dist

from bench.accuracy import one_process, study
from contract.options import Options
from tandem.sync import feedback
from tests.trainer_ranks import run_ranks
from trainer.world import start

WORLD = 3


def trained(spec, warmup, rank):
    """A digest of the weights that this rank ends with, and the weights."""
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
    mine = one_process.Rank(options, data, net, WORLD, steps_per_epoch=8)
    mine.train()
    weights = torch.cat([weight.detach().reshape(-1) for weight in net.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest(), weights.tolist()


def as_process(spec, warmup):
    start(Options(sync=spec))
    one_process.own.rank = dist.get_rank()
    return trained(spec, warmup, dist.get_rank())


def both(spec, warmup):
    """(digest, weights) of each rank, as processes and as threads."""
    processes = run_ranks([1] * WORLD, as_process, spec, warmup)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as each process has
    try:
        with one_process.wired():
            function = functools.partial(trained, spec, warmup)
            return processes, one_process.run_ranks(WORLD, function)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("spec", ["ef:3", "ef:5:own"])
def test_threads_train_to_the_same_bits_as_processes(spec):
    processes, threads = both(spec, 0.0)
    assert [digest for digest, _ in threads] == [digest for digest, _ in processes]


def test_sums_in_another_order_are_as_near_as_they_round():
    """Gloo's ring adds in the order of its own; so it does in warm-up."""
    for (_, own), (_, other) in zip(*both("fp16", 0.25)):
        own, other = torch.tensor(own), torch.tensor(other)
        assert float((own - other).norm() / other.norm()) < 0.01


def test_a_rank_that_fails_ends_the_others():
    def rank_main(rank):
        if rank == 1:
            raise ValueError("rank 1 has enough")
        dist.all_reduce(torch.zeros(1))

    with one_process.wired(), pytest.raises(ValueError, match="enough"):
        one_process.run_ranks(WORLD, rank_main)


def exact_steps(monkeypatch, **more):
    """Of 8 steps of `ef:5`, which were summed exactly."""
    told = []
    before = feedback.ErrorFeedback.begin

    def told_before(self, scale, exact):
        told.append(exact)
        before(self, scale, exact)

    monkeypatch.setattr(feedback.ErrorFeedback, "begin", told_before)
    options = Options(sync="ef:5", epochs=1, per_node_batch_size=4, **more)
    images, classes = torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.arange(8) % 5
    data = one_process.Images(images, classes, images, classes)

    def rank_main(rank):
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5))
        mine = one_process.Rank(options, data, net, 2, steps_per_epoch=8)
        mine.train()

    with one_process.wired():
        one_process.run_ranks(2, rank_main)
    return told[::2]


@pytest.mark.parametrize(("sync_warmup", "count"), [(None, 0), (0.0, 0), (0.25, 2), (0.75, 6)])
def test_as_many_steps_are_exact_as_sync_warmup_says(monkeypatch, sync_warmup, count):
    told = exact_steps(monkeypatch, warmup_epochs=0.5, sync_warmup=sync_warmup)
    assert told == [True] * count + [False] * (8 - count)


def test_a_line_that_was_broken_off_is_run_again_and_spoils_none(tmp_path):
    lines = tmp_path / "lines.jsonl"
    whole = '{"sync": "ef:5", "seed": 7, "epochs": 4, "lr": 0.2, "task": 3, "top1": 0.5}'
    lines.write_text(f'{whole}\n{{"sync": "ef:5", "se')
    assert study.Case("ef:5", 7, 4) in study.results(study.known(lines))
    assert not study.ends_whole(lines)
    lines.write_text(f"{whole}\n")
    assert study.ends_whole(lines)
