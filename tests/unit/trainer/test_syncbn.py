"""SyncBN over ranks with different numbers of samples against one big batch, in fp64. Also on torch
1.12, where tests/gpu does not run."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tandem.clock import Clock
from tests.trainer_ranks import run_ranks

SIZES = [5, 2, 3]


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh()).double()


def one_pass(net, images):
    images = images.clone().requires_grad_()
    output = net(images)
    (output**3 / 10).sum().backward()
    buffers = [net[1].running_mean, net[1].running_var, net[1].num_batches_tracked]
    return output.detach(), images.grad, [p.grad for p in net.parameters()], buffers


def everything():
    return torch.randn(
        sum(SIZES), 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def as_rank():
    from contract.options import Options
    from trainer.syncbn import convert
    from trainer.world import start

    world = start(Options())
    mine = everything().split(SIZES)[world.rank]
    net = convert(network(), torch.device("cpu"), Clock(torch.device("cpu")), 60)
    assert type(net[1]).__name__ == "GlooBatchNorm"
    output, grad, weights, buffers = one_pass(net, mine)
    for weight in weights:
        dist.all_reduce(weight)
    net.eval()
    return [t.tolist() for t in (output, grad, *weights, *buffers, net(mine).detach())]


@pytest.fixture(scope="module")
def big():
    net = network()
    output, grad, weights, buffers = one_pass(net, everything())
    buffers = [b.clone() for b in buffers]
    return output, grad, weights, buffers, net.eval()(everything()).detach()


def test_equals_one_big_batch(big):
    output, grad, weights, buffers, evaluated = big
    parts = zip(output.split(SIZES), grad.split(SIZES), evaluated.split(SIZES))
    for ours, (o, g, e) in zip(run_ranks([1, 1, 1], as_rank), parts):
        for mine, theirs in zip(ours, [o, g, *weights, *buffers, e]):
            mine = torch.tensor(mine, dtype=theirs.dtype)
            assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-10)
