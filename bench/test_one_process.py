"""The accuracy study's ranks of one process do what processes over Gloo do."""

import dataclasses
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


@pytest.mark.parametrize("spec", ["ef:1.6", "ef:4"])
def test_threads_train_to_the_same_bits_as_processes(spec):
    processes, threads = both(spec, 0.0)
    assert [digest for digest, _ in threads] == [digest for digest, _ in processes]


@pytest.mark.parametrize(("spec", "near"), [("powersgd:2", 1e-3), ("fp16", 0.01)])
def test_sums_in_another_order_are_as_near_as_they_round(spec, near):
    """Gloo's ring adds in the order of its own; so it does in warm-up."""
    for (_, own), (_, other) in zip(*both(spec, 0.25)):
        own, other = torch.tensor(own), torch.tensor(other)
        assert float((own - other).norm() / other.norm()) < near


def test_a_rank_that_fails_ends_the_others():
    def rank_main(rank):
        if rank == 1:
            raise ValueError("rank 1 has enough")
        dist.all_reduce(torch.zeros(1))

    with one_process.wired(), pytest.raises(ValueError, match="enough"):
        one_process.run_ranks(WORLD, rank_main)


def exact_steps(monkeypatch, **more):
    """Of 8 steps of `ef:2`, which were summed exactly, and the bits of each step's codes."""
    told = []
    before = feedback.Feedback.begin

    def told_before(self, scale, exact):
        told.append((exact, self.strategy.arguments[0]))
        before(self, scale, exact)

    monkeypatch.setattr(feedback.Feedback, "begin", told_before)
    start_spec = more.pop("start", "")
    options = Options(sync="ef:2", epochs=1, per_node_batch_size=4, **more)
    images, classes = torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.arange(8) % 5
    data = one_process.Images(images, classes, images, classes)

    def rank_main(rank):
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5))
        mine = one_process.Rank(options, data, net, 2, steps_per_epoch=8, start=start_spec)
        mine.train()
        return mine.sync

    with one_process.wired():
        syncs = one_process.run_ranks(2, rank_main)
    return told[:: len(syncs)], syncs[0]


@pytest.mark.parametrize(("sync_warmup", "count"), [(None, 4), (0.0, 0), (0.25, 2), (0.75, 6)])
def test_as_many_steps_are_exact_as_sync_warmup_says(monkeypatch, sync_warmup, count):
    told, _ = exact_steps(monkeypatch, warmup_epochs=0.5, sync_warmup=sync_warmup)
    assert [exact for exact, _ in told] == [True] * count + [False] * (8 - count)


def test_another_strategy_for_the_first_steps_hands_its_errors_over(monkeypatch):
    monkeypatch.setattr(one_process.Rank, "_end_start", end := Spy(one_process.Rank._end_start))
    told, sync = exact_steps(monkeypatch, warmup_epochs=0.5, sync_warmup=0.0, start="ef:8")
    assert [bits for _, bits in told] == ["8"] * 4 + ["2"] * 4
    assert end.calls == 2 and float(sync.kept[0].now[0].abs().sum()) > 0


class Spy:
    """A method, and how often it was called; where it ends, what was kept is there."""

    def __init__(self, method):
        self.method, self.calls = method, 0

    def __get__(self, one, _):
        def call():
            before, self.calls = one.sync.kept, self.calls + 1
            self.method(one)
            assert one.sync.kept is before and before

        return call


def carried_out(difference):
    """All runs of the protocol, if each is as good as the same one with today's start, plus
    `difference`. Those that were there before it are real, SGD's on glyphs; what was found since
    would decide in the test's place, or count beside what the protocol runs."""
    known = study.results(study.known())
    before = {"start": "", "task": study.GLYPHS, "optimizer": "sgd"}
    done = {one: known[one] for one in known if before.items() <= dataclasses.asdict(one).items()}
    while left := [one for one in study.protocol(done) if one not in done]:
        for number, one in enumerate(left):
            usual = done.get(dataclasses.replace(one, start=""), 0.86)
            done[one] = usual + difference(one) + 1e-4 * (number % 7)
    return done


def coded(done, task, **more):
    wanted = {"sync": study.CODED, "task": task, "optimizer": "sgd", **more}
    return [one for one in done if all(getattr(one, name) == told for name, told in wanted.items())]


@pytest.mark.parametrize(("chosen", "worse"), [("none", 0.0), ("", -0.05)])
def test_a_label_from_any_of_its_lengths_rests_on_24_pairs(chosen, worse):
    """Whichever start is chosen; glyphs with 1,000 steps and today's start were there before."""
    done = carried_out(lambda one: worse if one.start else 0.0)
    for task in (study.GLYPHS, study.FONTS):
        lr = study.best_rate(done, task, "sgd")
        for least in (4, 8, 16):
            runs = coded(done, task, start=chosen, lr=lr)
            assert sum(one.epochs >= least for one in runs) >= 24
        assert len(coded(done, task, optimizer="adamw")) == 8


def test_a_start_that_the_second_task_speaks_against_does_not_become_the_default():
    done = carried_out(lambda one: -0.05 if one.task == study.FONTS and one.start else 0.0)
    assert study.screened_best(done) == "none" and not study.confirmed_best(done, "none")
    assert not coded(done, study.FONTS, epochs=16, start="none")
    assert len(coded(done, study.FONTS, epochs=16, start="")) == 15


def test_a_line_that_was_broken_off_is_run_again_and_spoils_none(tmp_path):
    lines = tmp_path / "lines.jsonl"
    whole = '{"sync": "ef:2", "seed": 7, "epochs": 4, "lr": 0.2, "task": 3, "top1": 0.5}'
    lines.write_text(f'{whole}\n{{"sync": "ef:2", "se')
    assert study.Case("ef:2", 7, 4) in study.results(study.known(lines))
    assert not study.ends_whole(lines)
    lines.write_text(f"{whole}\n")
    assert study.ends_whole(lines)
