"""Two ranks that share a GPU, over Gloo: NCCL would refuse them."""

import dataclasses

import torch

from tests.gpu.jobs import batches, distance, options_of, prepared, train, weights
from tests.trainer_ranks import run_ranks
from trainer.step import rebuild_buckets

TWO = [1, 1]  # nodes of one rank each, so that both are the first of their node, on cuda:0


def on_one_device(function, *args):
    """In a rank: `function(*args)`, with Gloo whatever the device is."""
    from trainer import world

    world._backend = lambda device: "gloo"
    return function(*args)


def run_two(function, *args, **settings):
    """Both ranks' results."""
    return run_ranks(TWO, on_one_device, function, *args, **settings)


def compared(images, device, rows):
    """In a rank: for each row (batches of both ranks, options), how far two ranks end from one
    that is given the same batches whole."""
    from trainer.world import start

    world = start(options_of(images, device))
    return [distances(images, device, world, *row) for row in rows]


def distances(images, device, world, shares, given):
    """(of the weights, of the average, way of the weights): the greatest difference of any tensor,
    as a share of how far the one rank's has come; how far that is, as a share of where it began."""
    two_world = dataclasses.replace(world, batches=shares)
    two = prepared(images, device, two_world, **given)
    rebuild_buckets(two)
    one_world = dataclasses.replace(
        world, rank=0, size=1, batches=(sum(shares),), store=None, exchange=None
    )
    plain = {"sync": "allreduce", "sync_bn": False, "static_graph": False}
    one = prepared(images, device, one_world, **{**given, **plain, "find_unused_parameters": False})
    begin = weights(one)
    for job in (two, one):
        train_epochs(job)
    averages = [
        {k: v.cpu() for k, v in job.ema.average.items()} if job.ema else {} for job in (two, one)
    ]
    ends = weights(two), weights(one)
    names = [name for name, value in begin.items() if value.dim() > 1]
    way = distance(*({name: state[name] for name in names} for state in (ends[1], begin)))
    return off(*ends, begin), off(*averages, begin), way


def train_epochs(job, epochs=2):
    for epoch in range(epochs):
        fed = batches(job, epoch + 1)[epoch * job.steps_per_epoch :]
        train(job, fed, begin=epoch * job.steps_per_epoch)
    if job.world.device.type == "cuda":
        torch.cuda.synchronize()


def off(ours, theirs, begin):
    """Greatest difference of a tensor of `ours` and `theirs`, by the way that any has come."""
    worst = 0.0
    for name, value in theirs.items():
        way = float((value.double() - begin[name].double()).abs().max())
        gap = float((ours[name].double() - value.double()).abs().max())
        worst = max(worst, gap / way if way else gap)
    return worst
