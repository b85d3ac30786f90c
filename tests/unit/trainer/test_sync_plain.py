"""--sync allreduce is what DistributedDataParallel does by itself, to the bit."""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from contract.options import Options
from tandem.sync import make
from tests.trainer_ranks import run_ranks
from tests.unit.trainer.sync_ranks import flat, net
from trainer.parallel import wrap
from trainer.world import start


def both_ways(spec):
    """Three steps of either; the last gradients' bytes, summed by ours and averaged by theirs."""
    options = Options(bucket_mb=1)
    world, own = start(options), net()
    plain = copy.deepcopy(own)
    ours = wrap(own, options, world, make(spec, lambda: None))
    theirs = DistributedDataParallel(plain, bucket_cap_mb=1, gradient_as_bucket_view=True)
    for step in range(3):
        torch.manual_seed(10 * step + world.rank)
        images = torch.randn(8, 3)
        for model, count in ((ours, 8 * world.size), (theirs, 8)):
            model.zero_grad()
            (model(images).pow(2).sum() / count).backward()
    return [flat(model).numpy().tobytes() for model in (own, plain)]


@pytest.mark.parametrize("spec", ["allreduce", "allreduce:gloo"])
def test_sums_are_those_of_plain_ddp_to_the_bit(spec):
    """Over four ranks, by which plain DDP divides without rounding."""
    results = run_ranks([1, 1, 1, 1], both_ways, spec)
    for ours, theirs in results:
        assert ours == theirs == results[0][0]
        assert any(ours)
