"""Parts of a batch by speed: `tandem.sampler`, `batch_size` and `weigh`, and what one process with
the whole batch would have learned."""

import contextlib
import json
import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import tandem
from contract.decisions import MEASURED_VARIABLE, Measurements
from contract.errors import UserError
from tandem import balance, sync, timings
from tests.trainer_ranks import lines, run_ranks
from tests.unit.tandem import loop

HOSTS = {"node1": "a", "node2": "b"}
UNEQUAL = {"hosts": HOSTS, "ranks": {"node1": 1, "node2": 1}, "balance": {"node1": 5, "node2": 2}}


def on_nodes(monkeypatch, tmp_path, rank=0, world=2, **measured):
    """This process is a rank to which the launcher sent these measurements."""
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(Measurements(**measured).document()))
    for name, value in (
        (MEASURED_VARIABLE, path),
        ("RANK", rank),
        ("WORLD_SIZE", world),
        ("LOCAL_RANK", 0),
    ):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(balance, "_state", None)


SPEEDS = {"hosts": {**HOSTS, "node3": "c"}, "balance": "auto"}


@pytest.mark.parametrize(
    ("measured", "parts"),
    [
        ({}, [22, 21, 21]),
        ({**SPEEDS, "ranks": {"node1": 1, "node2": 1, "node3": 1}}, [21, 22, 21]),
        (
            {
                **SPEEDS,
                "ranks": {"node1": 1, "node2": 1, "node3": 1},
                "speeds": {"node1": 100.0, "node2": 50.0, "node3": 50.0},
            },
            [32, 16, 16],
        ),
        # Two ranks of a node share its part.
        ({"hosts": HOSTS, "ranks": {"node1": 2, "node2": 1}, "balance": {"node1": 1, "node2": 1}},
         [16, 16, 32]),
        # Other ranks than those that the launcher started.
        ({**UNEQUAL, "ranks": {"node1": 1, "node2": 1}}, [22, 21, 21]),
    ],
)  # fmt: skip
def test_the_ranks_parts_add_up_to_the_total(monkeypatch, tmp_path, measured, parts):
    found = []
    for rank in range(3):
        on_nodes(monkeypatch, tmp_path, rank, 3, **measured)
        found.append(tandem.batch_size(64))
    assert sum(found) == 64 and sorted(found) == sorted(parts)
    with pytest.raises(UserError, match="2 samples cannot be divided among 3 ranks"):
        tandem.batch_size(2)


@pytest.mark.parametrize(
    ("length", "size", "accumulate", "steps", "used"),
    [(100, 16, 1, 7, 100), (97, 16, 1, 6, 96), (110, 16, 2, 14, 110), (111, 32, 4, 12, 96)],
)
def test_the_ranks_get_equally_many_batches_of_all_samples(
    monkeypatch, tmp_path, length, size, accumulate, steps, used
):
    batches = []
    for rank in range(2):
        on_nodes(monkeypatch, tmp_path, rank, **UNEQUAL)
        sampler = tandem.sampler(range(length), size, seed=3, accumulate=accumulate)
        sampler.set_epoch(4)
        loader = DataLoader(range(length), batch_sampler=sampler)
        batches.append([batch.tolist() for batch in loader])
        assert len(loader) == len(batches[rank]) == steps
    wholes = [first + second for first, second in zip(*batches)]
    samples = [sample for whole in wholes for sample in whole]
    assert len(samples) == len(set(samples)) == used
    assert len(batches[0][0]) > len(batches[1][0])
    # Other machines divide the same batches.
    monkeypatch.delenv(MEASURED_VARIABLE)
    monkeypatch.setattr(balance, "_state", None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    alone = tandem.sampler(range(length), size, seed=3, accumulate=accumulate)
    alone.set_epoch(4)
    assert [sorted(batch) for batch in list(alone)[: len(wholes)]] == [*map(sorted, wholes)]


EPOCHS, SAMPLES, BATCH = 5, 156, 16  # ten steps an epoch, the last one of 12 samples


def trained(output, way, accumulate, workers):
    """The weights after 50 steps, by `sync.attach` or by `tandem.weigh` with DDP alone."""
    os.environ.update({"TANDEM_OUTPUT": output, MEASURED_VARIABLE: f"{output}/measured.json"})
    loop.joined()
    return train(way, accumulate, workers)


def train(way, accumulate, workers=0):
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :2].sin())
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
    ).double()
    net = loop.wrapped(model) if dist.is_initialized() else model
    if way == "attach":
        sync.attach(net, "allreduce")
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    sampler = tandem.sampler(data, BATCH, seed=1, accumulate=accumulate)
    # The ranks of tests come from a server, from which their loaders would else start new Pythons.
    start = "fork" if workers else None
    loader = DataLoader(
        data, batch_sampler=sampler, num_workers=workers, multiprocessing_context=start
    )
    steps = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, (batch, targets) in enumerate(timings.timed(loader, net), 1):
            is_last = number % accumulate == 0
            skips = dist.is_initialized() and not is_last
            with net.no_sync() if skips else contextlib.nullcontext():
                loss = mse_loss(net(batch), targets) / accumulate
                if way == "weigh":
                    loss = tandem.weigh(loss, len(batch))
                loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
                timings.step(loss=loss)
                steps += 1
    timings._current._end()
    assert steps == 50
    return [p.detach().clone().numpy() for p in model.parameters()]


@pytest.mark.parametrize(("way", "accumulate"), [("attach", 2), ("weigh", 1)])
def test_50_steps_are_those_of_one_process_with_the_whole_batch(
    tmp_path, monkeypatch, way, accumulate
):
    (tmp_path / "measured.json").write_text(json.dumps(Measurements(**UNEQUAL).document()))
    workers = 2 if way == "attach" else 0  # who read ahead of the loop
    ranks = run_ranks([1, 1], trained, str(tmp_path), way, accumulate, workers)
    monkeypatch.setattr(balance, "_state", None)
    monkeypatch.setattr(timings, "_current", None)
    alone = train("", accumulate)
    for weights in ranks:
        worst = max(abs(ours - theirs).max() for ours, theirs in zip(weights, alone))
        assert worst < 1e-6
    for (start,) in lines(tmp_path, "start"):
        assert start["global_batch"] == 16
        assert start["decided"]["balance"] == {"node1": 5, "node2": 2}
    records = [[line for line in rank if line["kind"] == "step"] for rank in lines(tmp_path)]
    # Equally many steps of unequal batches.
    assert [sum(line["steps"] for line in steps) for steps in records] == [50, 50]
    first, second = (sum(line["samples"] for line in steps) for steps in records)
    assert first + second == EPOCHS * SAMPLES and first > 2 * second


@pytest.mark.parametrize(
    ("asks", "measured", "warns"),
    [
        (False, {"is_typed": True}, "BALANCE= has no effect"),
        (False, {"is_typed": False}, ""),
        (True, {"is_typed": True}, "the ranks have batches of different sizes"),
    ],
)
def test_after_the_first_step_a_script_hears_what_it_forgot(
    monkeypatch, tmp_path, capsys, asks, measured, warns
):
    on_nodes(monkeypatch, tmp_path, **UNEQUAL, **measured)
    monkeypatch.setattr(timings, "_current", None)
    if asks:
        assert tandem.batch_size(7) == 5
    model = torch.nn.Linear(2, 2)
    for _ in timings.timed([torch.zeros(3, 2)] * 3, model):
        timings.step()
    errors = capsys.readouterr().err
    assert errors.count(warns or "tandem: ") == bool(warns)


def test_attach_does_not_guess_the_size_of_a_batch_that_timed_did_not_see(monkeypatch, tmp_path):
    on_nodes(monkeypatch, tmp_path, **UNEQUAL)
    next(iter(tandem.sampler(range(32), 16)))
    with pytest.raises(UserError, match="loop over timings"):
        balance.StepWeights().next()
