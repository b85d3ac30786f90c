"""--sync allreduce is what DistributedDataParallel does by itself, to the bit."""

import copy

import torch
from torch.nn.parallel import DistributedDataParallel

from contract.options import Options
from tandem.sync import make
from tests.trainer_ranks import run_ranks
from tests.unit.trainer.sync_ranks import flat, net
from trainer.parallel import wrap
from trainer.world import start


def both_ways():
    """Three steps of each: the last gradients' bytes, summed by ours, by ours over Gloo, and
    averaged by theirs."""
    options = Options(bucket_mb=1)
    world, own = start(options), net()
    nets = [own, copy.deepcopy(own), copy.deepcopy(own)]
    ours = [
        wrap(one, options, world, make(spec, lambda: None))
        for one, spec in zip(nets, ("allreduce", "allreduce:gloo"))
    ]
    theirs = DistributedDataParallel(nets[2], bucket_cap_mb=1, gradient_as_bucket_view=True)
    for step in range(3):
        torch.manual_seed(10 * step + world.rank)
        images = torch.randn(8, 3)
        for model, count in ((ours[0], 8 * world.size), (ours[1], 8 * world.size), (theirs, 8)):
            model.zero_grad()
            (model(images).pow(2).sum() / count).backward()
    return [flat(model).numpy().tobytes() for model in nets]


def test_sums_are_those_of_plain_ddp_to_the_bit():
    """Over four ranks, by which plain DDP divides without rounding."""
    results = run_ranks([1, 1, 1, 1], both_ways)
    for ours, gloos, theirs in results:
        assert ours == gloos == theirs == results[0][0]
        assert any(ours)
