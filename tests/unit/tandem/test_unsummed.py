"""Steps whose gradients nobody summed are said and recorded; those that were are not."""

import contextlib
import importlib
import io
import os

import pytest
import torch
import torch.distributed as dist

from tandem import sync, timings
from tests.trainer_ranks import lines, run_ranks
from tests.unit.tandem import loop

HOOKS = "register_optimizer_step_post_hook"
pytestmark = pytest.mark.skipif(
    not hasattr(importlib.import_module("torch.optim.optimizer"), HOOKS),
    reason="torch before 2.0 does not tell of steps",
)


def apart(ddp, batch):
    return ddp.module(batch)


def all_in_no_sync(ddp, batch):
    with ddp.no_sync():
        return ddp(batch)


def accumulated(ddp, batch):
    with ddp.no_sync():
        ddp(batch).sum().backward()
    return ddp(batch)


def by_forward(ddp, batch):
    return ddp.forward(batch)  # which no hook sees


def summed(ddp, batch):
    return ddp(batch)


UNSUMMED, SUMMED = (apart, all_in_no_sync), (summed, accumulated, by_forward)


def loops(output):
    """What is said and recorded of each loop, and whether its ranks came to the same weights."""
    rank, world = loop.joined()
    results = {}
    for by in ("timed", "attached"):
        for forward in (*UNSUMMED, *SUMMED):
            os.environ["TANDEM_OUTPUT"] = f"{output}/{forward.__name__}"
            torch.manual_seed(0)
            ddp = loop.wrapped(torch.nn.Linear(4, 2))
            torch.manual_seed(rank)
            optimizers = [torch.optim.SGD([p], 0.1) for p in ddp.parameters()]
            batches = [torch.randn(3, 4) for _ in range(8)]
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                if by == "attached":
                    sync.attach(ddp, "fp16")
                for batch in timings.timed(batches, ddp) if by == "timed" else batches:
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    forward(ddp, batch).sum().backward()
                    for optimizer in optimizers:
                        optimizer.step()
                    if by == "timed":
                        timings.step()
            if by == "timed":
                timings._current._end()
                timings._current = None  # the next loop has a folder of its own
            everywhere = [None] * world
            dist.all_gather_object(everywhere, ddp.module.weight.sum().item())
            results[by, forward.__name__] = said.getvalue(), len(set(everywhere)) == 1
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    output = tmp_path_factory.mktemp("loops")
    return output, run_ranks([1, 1], loops, str(output))


@pytest.mark.parametrize("by", ["timed", "attached"])
@pytest.mark.parametrize("forward", [*UNSUMMED, *SUMMED])
def test_rank_0_says_once_that_steps_were_not_summed(results, by, forward):
    """Several optimizers make one step, and what no hook sees counts as summed."""
    output, ranks = results
    said, same = zip(*(rank[by, forward.__name__] for rank in ranks))
    assert same == (forward in SUMMED,) * 2
    assert [line.count("DDP did not sum") for line in said] == [forward in UNSUMMED, 0]
    if by == "timed":
        for _, *steps, _ in lines(output / forward.__name__):
            most = max(step.get("unsummed", 0) for step in steps)
            assert most == (8 if forward in UNSUMMED else 0)
