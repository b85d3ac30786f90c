"""Strategies whose ranks train by themselves and meet every H steps."""

import pytest
import torch

from contract.errors import UserError
from contract.options import Options
from contract.strategies import parse, parse_rule, round_length
from tests.trainer_ranks import make_images, run_ranks, trainer
from tests.unit.trainer.sync_ranks import Counted, Steps
from trainer.compat import load_tensors
from trainer.sync import StepInfo

RANK_SAMPLES = (6, 2)


def moved(spec, steps, epoch=100):
    """The first weight of each rank after each step, where rank r moves by r + 1; and whether all
    ranks have met there. `epoch`: its steps."""
    made = Steps(spec)
    sync, weights = made.sync, list(made.model.parameters())
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
    found = []
    for number in range(steps):
        sync.before_step(StepInfo(number, epoch - number % epoch, 0.1, RANK_SAMPLES))
        with torch.no_grad():
            for weight in weights:
                weight.add_(made.world.rank + 1)
        sync.after_step(False)
        bounds = [one.detach() for one in [*map(torch.min, weights), *map(torch.max, weights)]]
        same = len(set(map(float, bounds))) == 1
        found.append((round(float(bounds[0]), 4), sync.meets, same))
    return found


def values(found):
    return [value for value, _, _ in found]


def test_localsgd_takes_the_average_by_samples_every_h_steps():
    first, second = run_ranks([1, 1], moved, "localsgd:3", 6)
    # (6 x 3 x 1 + 2 x 3 x 2) / 8
    assert values(first) == [1, 2, 3.75, 4.75, 5.75, 7.5]
    assert values(second) == [2, 4, 3.75, 5.75, 7.75, 7.5]
    assert [meets for _, meets, _ in first] == [False, False, True] * 2
    assert all(same for _, _, same in first + second)


def test_a_round_ends_with_its_epoch():
    for found in run_ranks([1, 1], moved, "localsgd:4", 6, 6):
        assert [meets for _, meets, _ in found] == [False, False, False, True, False, True]


def test_overlap_applies_the_average_d_steps_later_and_keeps_what_was_learned_since():
    first, second = run_ranks([1, 1], moved, "overlap:3:2", 9)
    # Begun after step 3 at 3 and 6, on average 3.75; two steps later each adds its own two.
    assert values(first) == [1, 2, 3, 4, 5.75, 6.75, 7.75, 3.75 + 3.75 + 2, 10.5]
    assert values(second) == [2, 4, 6, 8, 7.75, 9.75, 11.75, 3.75 + 3.75 + 4, 13.5]
    assert [meets for _, meets, _ in first] == [False] * 4 + [True, False, False, True, False]


def test_overlap_has_nothing_under_way_at_the_end_of_an_epoch():
    for found in run_ranks([1, 1], moved, "overlap:3", 5, 5):
        assert [meets for _, meets, _ in found] == [False] * 4 + [True]


def test_overlap_with_epochs_shorter_than_its_rounds_meets_at_the_end_of_all_but_the_first():
    first, second = run_ranks([1, 1], moved, "overlap:9", 6, 2)
    assert [meets for _, meets, _ in first] == [False] * 3 + [True, False, True]
    # The average of an epoch is applied at the next one's end.
    assert values(first) == [1, 2, 3, 2.5 + 2, 5.5, 2.5 + 2.5 + 2]
    assert values(second) == [2, 4, 6, 2.5 + 4, 8.5, 2.5 + 2.5 + 4]


def test_diloco_makes_an_outer_step_with_nesterovs_momentum():
    first, second = run_ranks([1, 1], moved, "diloco:2", 4)
    once = 0.7 * (2.5 + 0.9 * 2.5)
    twice = once + 0.7 * (2.5 + 0.9 * (0.9 * 2.5 + 2.5))
    assert values(first)[1::2] == pytest.approx([once, twice], abs=1e-3)
    assert values(first)[1::2] == values(second)[1::2]


def sent(specs):
    found, world, counted = {}, None, None
    for spec in specs:
        made = Steps(spec, world)
        world = made.world
        counted = counted or Counted()
        strategy = made.strategy
        before = {}
        for number in range(4 * strategy.every):
            before.setdefault(number // strategy.every, counted.sent)
            made.sync.before_step(StepInfo(number, 100, 0.1, (1, 1, 1)))
            made.sync.after_step(False)
        counts = (before[3] - before[2]) / strategy.every
        found[spec] = counts, strategy.bytes_per_step(world.size, made.payload)
    return found


def test_bytes_of_a_round_are_those_that_the_registry_declares():
    specs = ["localsgd:2", "localsgd:3:bf16", "overlap:3:1:int8", "diloco:2:4bit"]
    for found in run_ranks([1, 1, 1], sent, specs):
        for spec, (counted, declared) in found.items():
            assert abs(counted - declared) <= max(0.02 * declared, 2**16), spec


ARGV = [
    "--model", "tests.trainer_models:normed", "--precision", "fp32", "--augment", "none",
    "--per_node_batch_size", 8, "--workers", 0, "--epochs", 2, "--lr", 0.05,
]  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), per_class=14)


def train(images, output, *more, nodes=(1, 1)):
    argv = ["--data", images, "--output", output, *ARGV, *more]
    assert run_ranks(list(nodes), trainer, *argv, quiet=True) == [0] * sum(nodes)
    models = []
    for host in range(1, len(nodes) + 1):
        file = sorted((output / f"checkpoints/node{host}").glob("step-*.pt"))[-1]
        with file.open("rb") as content:
            models.append(load_tensors(content))
    return models


def weights(state):
    return {k: v for k, v in state["model"].items() if "running" not in k and "num_" not in k}


def test_meeting_in_each_step_is_the_gradient_of_the_whole_batch(images, tmp_path):
    """With SGD, whose momentum is linear; ranks of different size, a tail, two micro-batches."""
    more = ("--weight_decay", 0.01, "--sync_warmup", 0, "--accumulate", 2)
    exact = train(images, tmp_path / "a", *more, nodes=[1, 1])[0]
    ours = train(images, tmp_path / "b", *more, "--sync", "localsgd:1", nodes=[1, 1])[0]
    for name, value in weights(exact).items():
        assert torch.allclose(value, weights(ours)[name], atol=1e-4), name


@pytest.mark.parametrize("spec", ["localsgd:3:4bit", "overlap:3:int8", "diloco:2:bf16"])
def test_all_nodes_save_the_same_model_and_average(images, tmp_path, spec):
    states = train(images, tmp_path, "--sync", spec, "--ema", 0.9)
    for name, value in weights(states[0]).items():
        assert torch.equal(value, weights(states[1])[name])
        assert torch.equal(states[0]["ema"]["average"][name], states[1]["ema"]["average"][name])
    assert states[0]["ema"]["updates"] == states[0]["step"]


def test_a_machine_without_images_in_a_first_local_step_leaves_nobody_waiting(tmp_path):
    """Seven images for three machines with two each: the second step has one. DDP rebuilt its
    buckets, a collective, in the first forward of whoever had one."""
    few = make_images(tmp_path / "few", per_class=1, classes=7)
    more = ("--per_node_batch_size", 2, "--sync_warmup", 0, "--timeout", 30)
    models = train(few, tmp_path, *more, "--sync", "localsgd:2", nodes=(1, 1, 1))
    assert [model["step"] for model in models] == [4] * 3


def test_a_run_in_which_overlap_never_meets_ends_with_the_average(images, tmp_path):
    """One epoch, shorter than a round: what is saved is what all ranks have learned."""
    ours = train(images, tmp_path, "--epochs", 1, "--sync_warmup", 0, "--sync", "overlap:99")
    saved = [torch.cat([one.reshape(-1) for one in weights(state).values()]) for state in ours]
    assert torch.equal(*saved)
    apart = []
    for file in sorted(tmp_path.glob("checkpoints/node*/rank*/step-*.pt")):
        with file.open("rb") as content:
            apart.append(load_tensors(content)["sync"]["own"]["weights"])
    assert torch.allclose(saved[0], sum(apart) / 2, atol=1e-6)
    assert not torch.allclose(*apart, atol=1e-4)


@pytest.mark.parametrize("spec", ["overlap:3", "diloco:3"])
def test_when_one_evaluates_changes_no_bit(images, tmp_path, spec):
    once = train(images, tmp_path / "a", "--sync", spec, "--evaluate_every", 2)[0]
    twice = train(images, tmp_path / "b", "--sync", spec, "--evaluate_every", 1)[0]
    assert all(torch.equal(value, twice["model"][name]) for name, value in once["model"].items())


def test_rounds_grow_as_the_learning_rate_falls():
    from dataclasses import replace

    strategy = replace(parse("localsgd:4"), growth=parse_rule("qsr:0.2"))
    assert [round_length(strategy, lr, False) for lr in (0.2, 0.1, 0.05, 0.02)] == [4, 4, 16, 100]
    assert round_length(strategy, 0.02, True) == 4
    assert round_length(strategy, 0.0, False) == 4
    assert round_length(parse("localsgd:4"), 0.001, False) == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sync_rule": "qsr:0.1"}, "--sync allreduce has no rounds"),
        ({"sync": "localsgd:4", "sync_rule": "qsr:x"}, "write qsr:ALPHA"),
        ({"sync": "localsgd:4", "sync_rule": "sqr:1"}, "write qsr:ALPHA"),
        ({"sync": "diloco:4", "sync_bn": True}, "--sync_bn with --sync diloco:4"),
        ({"sync": "overlap:4", "precision": "fp64"}, "averaged in fp32"),
    ],
)
def test_what_does_not_go_together_is_refused(given, words):
    with pytest.raises(UserError, match=words):
        Options(**given)
