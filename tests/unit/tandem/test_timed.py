"""`timed` and `step` in a loop of one's own: what is booked as what, and the report of it."""

import collections
import contextlib
import dataclasses
import io
import os
import sys
import time

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from contract.errors import UserError
from tandem import sync, timings
from tandem.samples import SampleCounter
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
    timings._current._end()


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
        assert total["between_epochs"] >= 2 * SECONDS["forward"]  # the evaluations
        # Each is itself and no other, the two evaluations included.
        for name in ("data", "forward", "optimizer"):
            others = sum(8 * slept for other, slept in SECONDS.items() if other != name)
            assert total[name] <= sum(total.values()) - others - 2 * SECONDS["forward"], name
        waited = [one["seconds"]["sync_exposed"] for one in steps]
        half = SECONDS["backward"] / 2
        assert max(waited) > half if rank == 0 else min(waited) < half  # for the slower one
        assert 0.9 < sum(total.values()) / (end["mono"] - start["mono"]) <= 1 + 1e-5


def first_samples(is_divided):
    """What a rank prints whose loader has the other one's samples, or others."""
    rank, _ = loop.joined()
    ddp, said = loop.wrapped(torch.nn.Linear(8, 2)), io.StringIO()
    batches = [torch.full((4, 8), step + 9.0 * rank * is_divided) for step in range(6)]
    with contextlib.redirect_stderr(said):
        for batch in timings.timed(batches, ddp):
            ddp(batch).sum().backward()
            timings.step()
    return said.getvalue()


@pytest.mark.parametrize("is_divided", [False, True])
def test_ranks_that_train_on_the_same_samples_are_told_once(is_divided):
    said = run_ranks([1, 1], first_samples, is_divided)
    assert "".join(said).count("DistributedSampler") == (not is_divided), said


def test_models_that_are_trained_in_turn_share_the_seconds_of_their_process(tmp_path, monkeypatch):
    """As in a cross-validation; the first ones stay alive, or not."""
    monkeypatch.setenv("TANDEM_OUTPUT", str(tmp_path))
    monkeypatch.setattr(timings, "_current", None)
    alive = []
    for fold in range(4):
        net = Slow(4, 2)
        alive += [net] if fold % 2 else []
        monkeypatch.setenv("RANK", "0")
        for batch in timings.timed([torch.zeros(3, 4)] * 2, net):
            net(batch)["outputs"][0].sum().backward()
            timings.step()
    timings._current._end()
    ((start, *steps, end),) = lines(tmp_path)
    assert (start["kind"], end["kind"]) == ("start", "end")
    assert sum(line["steps"] for line in steps) == 8 and steps[-1]["step"] == 8
    total = sum(sum(line["seconds"].values()) for line in (*steps, end))
    assert total == pytest.approx(end["mono"] - start["mono"], rel=0.01)


def test_two_models_are_timed_and_what_a_step_sums_of_each_is_counted(tmp_path, monkeypatch):
    """Of a GAN with a gradient penalty: the discriminator's gradients in three backwards."""
    monkeypatch.setenv("TANDEM_OUTPUT", str(tmp_path))
    monkeypatch.setattr(timings, "_current", None)
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
    timings._current._end()
    ((start, *steps),) = lines(tmp_path)
    assert start["model"] == "Linear+Slow"
    assert start["gradient_bytes"] == 4 * (3 * 9 + 40)
    spent = collections.Counter()
    for one in steps:
        spent.update(one["seconds"])
    for name in ("forward", "backward"):
        assert spent[name] >= 3 * SECONDS[name], name


@dataclasses.dataclass
class Pair:
    inputs: object
    targets: object


class Graphs:  # as PyTorch Geometric's Batch
    def __init__(self, count):
        self.num_graphs, self.x = count, torch.zeros(30, 4)


def batches_of(count):
    """A batch of so many samples in each of the shapes that people have, by its name."""
    images, ids = torch.zeros(count, 3, 8, 8), torch.zeros(count)
    unlike = [torch.zeros(3, 5 + place, 7) for place in range(count)]
    packed = pack_sequence([torch.zeros(length) for length in range(count, 0, -1)])
    return {
        "tensor": images,
        "tuple": (images, ids),
        "dict": {"pixels": images, "ids": ids, "epoch": 3},
        "dicts": [{"file_name": "1.jpg", "image": torch.zeros(3, 8, 8)} for _ in range(count)],
        "dataclass": Pair(unlike, [{}] * count),
        "packed": (packed, ids),
        "graphs": Graphs(count),
        "BatchEncoding": collections.UserDict(input_ids=[[1, 2, 3]] * count, labels=ids),
        "detection": (tuple(unlike), tuple({} for _ in range(count))),
        "views": [[images, images], ids],
        "boxes": (images, torch.zeros(5, 6), ("1.jpg",) * count),
    }


@pytest.mark.parametrize("shape", batches_of(2))
def test_the_samples_of_a_batch_are_counted_in_whatever_shape_it_is(shape):
    """The last batch is smaller."""
    counter = SampleCounter([])
    assert [counter.count(batches_of(count)[shape]) for count in (8, 7)] == [8, 7]


@pytest.mark.parametrize(
    ("batch", "stated"),
    [
        (torch.zeros(()), 8),
        ((torch.zeros(8, 3), torch.zeros(30, 6)), None),  # images, or boxes of all of them?
        ([torch.zeros(3, 8, 8)] * 8, None),  # eight images, or eight parts of three samples?
        ((torch.zeros(35, 8), torch.zeros(35, 8)), 8),  # the first dimension is time
    ],
)
def test_a_number_of_samples_that_cannot_be_known_is_asked_for_once(
    tmp_path, monkeypatch, capsys, batch, stated
):
    class Loader(list):
        batch_size = stated

    monkeypatch.setenv("TANDEM_OUTPUT", str(tmp_path))
    monkeypatch.setattr(timings, "_current", None)
    model = torch.nn.Linear(1, 1)
    for _ in timings.timed(Loader([batch] * 30), model):
        timings.step()
    timings._current._end()
    assert capsys.readouterr().err.count("timings.step(samples=N)") == 1
    (steps,) = lines(tmp_path, "step")
    assert sum(step["steps"] for step in steps) == 30
    assert {step["samples"] for step in steps} == {None}


def test_a_plain_net_is_timed_where_there_is_an_output_and_a_process_that_fails_says_so(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TANDEM_NODE", "node1")
    monkeypatch.chdir(tmp_path)
    for output in ("", str(tmp_path)):
        monkeypatch.setattr(timings, "_current", None)
        monkeypatch.delenv("TANDEM_OUTPUT", raising=False)
        if output:
            monkeypatch.setenv("TANDEM_OUTPUT", output)
        net = torch.nn.Linear(2, 2)
        for batch in timings.timed([torch.zeros(3, 2)] * 2, net):
            net(batch).sum().backward()
            timings.step(samples=7)
        assert timings._current._steps == 2
        assert bool(list(tmp_path.iterdir())) == bool(output)
    monkeypatch.setattr(sys, "last_value", RuntimeError("lost"), raising=False)
    with monkeypatch.context() as forked:
        forked.setattr(timings._current, "process", -1)
        timings._current._end()
    timings._current._end()
    ((start, *kinds),) = lines(tmp_path)
    assert start["sync"] == "allreduce"
    kinds = [(one["kind"], one.get("samples"), one.get("status")) for one in kinds]
    assert kinds == [("step", 7, None), ("step", 7, None), ("end", None, "failed")]
    monkeypatch.setattr(timings, "_current", None)
    with pytest.raises(UserError, match="nothing is timed: for batch in timed"):
        timings.step()
