"""`timed` and `step` in a loop of one's own: what is booked as what, and the report of it."""

import collections
import os
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from contract.errors import UserError
from tandem import sync, timings
from tests.trainer_ranks import lines, run_ranks
from tests.unit.tandem import loop

SECONDS = {"data": 0.02, "forward": 0.03, "backward": 0.04, "optimizer": 0.02}


class Later(torch.autograd.Function):
    """Passes on what it is given; its backward sleeps, on rank 1 twice as long."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(SECONDS["backward"] * (1 + int(os.environ["RANK"])))
        return gradient


class Slow(torch.nn.Linear):
    """Sleeps in its forward and its backward."""

    def forward(self, inputs):
        time.sleep(SECONDS["forward"])
        return {"outputs": [Later.apply(super().forward(inputs))]}


class Images(TensorDataset):
    def __getitem__(self, index):
        time.sleep(SECONDS["data"] / 4)
        return super().__getitem__(index)


def timed_loop(output):
    """Trains on four images a step; with four steps an epoch."""
    loop.joined()
    os.environ["TANDEM_OUTPUT"] = output
    torch.manual_seed(0)
    ddp = loop.wrapped(Slow(300, 40))
    sync.attach(ddp, "ef:3", warmup_steps=2)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    loader = DataLoader(Images(torch.randn(16, 300)), batch_size=4)
    for _ in range(2):
        for (batch,) in timings.timed(loader, ddp):
            optimizer.zero_grad()
            ddp(batch)["outputs"][0].pow(2).mean().backward()
            time.sleep(SECONDS["optimizer"])
            optimizer.step()
            timings.step()
        ddp.eval()
        with torch.no_grad():
            ddp(torch.randn(1, 300))  # an evaluation is no forward of a step
        ddp.train()
    timings.TIMED[ddp]._end(os.getpid())


def test_a_loop_s_time_is_booked_and_its_lines_are_the_trainer_s(tmp_path):
    run_ranks([1, 1], timed_loop, str(tmp_path))
    for rank, (start, *steps, end) in enumerate(lines(tmp_path)):
        assert (start["kind"], end["kind"], end["status"]) == ("start", "end", "finished")
        told = {name: start[name] for name in ("model", "rank_batch", "global_batch", "sync")}
        assert told == {"model": "Slow", "rank_batch": 4, "global_batch": 8, "sync": "ef:3:own"}
        assert (start["steps_per_epoch"], start["train_images"]) == (4, 16)
        assert (steps[-1]["step"], steps[-1]["epoch"]) == (8, 1)
        assert sum(one["steps"] for one in steps) == 8 == sum(one["samples"] for one in steps) / 4
        assert sum(one["steps"] for one in steps if one.get("exact")) == 2
        total = collections.Counter()
        for one in (*steps, end):
            total.update(one["seconds"])
        for name in ("data", "forward", "backward", "optimizer"):
            assert total[name] >= 8 * SECONDS[name], name
        # Each is itself and no other, the two evaluations included.
        for name in ("data", "forward", "optimizer"):
            others = sum(8 * slept for other, slept in SECONDS.items() if other != name)
            assert total[name] <= sum(total.values()) - others - 2 * SECONDS["forward"], name
        waited = [one["seconds"]["sync_exposed"] for one in steps]
        half = SECONDS["backward"] / 2
        assert max(waited) > half if rank == 0 else min(waited) < half  # for the slower one
        assert 0.9 < sum(total.values()) / (end["mono"] - start["mono"]) <= 1 + 1e-5


def test_two_models_are_timed_and_what_a_step_sums_of_each_is_counted(tmp_path, monkeypatch):
    """Of a GAN with a gradient penalty: the discriminator's gradients in three backwards."""
    monkeypatch.setenv("TANDEM_OUTPUT", str(tmp_path))
    judge, maker = torch.nn.Linear(8, 1), Slow(4, 8)
    monkeypatch.setenv("RANK", "0")
    for noise in timings.timed([torch.randn(3, 4)] * 3, judge, maker):
        made = maker(noise)["outputs"][0]
        inputs = torch.randn(3, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(judge(inputs).sum(), inputs, create_graph=True)
        (judge(inputs).mean() + slope.pow(2).mean()).backward()
        judge(made.detach()).mean().backward()
        judge(made).mean().backward()
        timings.step()
    timings.TIMED[judge]._end(os.getpid())
    ((start, *steps),) = lines(tmp_path)
    assert start["model"] == "Linear+Slow"
    assert start["gradient_bytes"] == 4 * (3 * 9 + 40)
    spent = collections.Counter()
    for one in steps:
        spent.update(one["seconds"])
    for name in ("forward", "backward"):
        assert spent[name] >= 3 * SECONDS[name], name


def test_what_a_batch_holds_is_counted_by_its_first_element():
    images = torch.zeros(6, 3, 8, 8)
    assert timings.samples_of((images, torch.zeros(6))) == 6
    assert timings.samples_of({"pixels": images, "ids": 3}) == 6
    assert timings.samples_of(([torch.zeros(3, 5, 7)] * 4, [{}] * 4)) == 4
    assert (timings.samples_of(torch.tensor(1.0)), timings.samples_of("x")) == (1, 1)
    assert timings.pixels_of({"pixels": images}) == 8
    assert timings.pixels_of(torch.zeros(6)) == 0


def test_a_plain_net_is_timed_where_there_is_an_output_and_a_process_that_fails_says_so(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TANDEM_NODE", "node1")
    monkeypatch.chdir(tmp_path)
    for output in ("", str(tmp_path)):
        monkeypatch.delenv("TANDEM_OUTPUT", raising=False)
        if output:
            monkeypatch.setenv("TANDEM_OUTPUT", output)
        net = torch.nn.Linear(2, 2)
        for batch in timings.timed([torch.zeros(3, 2)] * 2, net):
            net(batch).sum().backward()
            timings.step(samples=7)
        monkeypatch.setattr(timings, "_current", None)
        assert timings.TIMED[net]._steps == 2
        assert bool(list(tmp_path.iterdir())) == bool(output)
    monkeypatch.setattr(sys, "last_value", RuntimeError("lost"), raising=False)
    timings.TIMED[net]._end(-1)  # of a process that was forked
    timings.TIMED[net]._end(os.getpid())
    ((start, *kinds),) = lines(tmp_path)
    assert start["sync"] == "allreduce"
    kinds = [(one["kind"], one.get("samples"), one.get("status")) for one in kinds]
    assert kinds == [("step", 7, None), ("step", 7, None), ("end", None, "failed")]
    with pytest.raises(UserError, match="nothing is timed: for batch in timed"):
        timings.step()
