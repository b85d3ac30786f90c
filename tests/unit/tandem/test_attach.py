"""`tandem.sync.attach` in a loop of one's own: what the trainer makes, and what it refuses."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from contract.errors import UserError
from tandem import sync
from tests.trainer_ranks import make_images, newest_checkpoint, run_ranks, trainer
from tests.unit.tandem import loop

SPEC = "ef:3:peak"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), per_class=16)


def trainers(images, output, nodes, epochs, model, batch, *more, spec=SPEC):
    """The weights that the trainer ends with."""
    argv = ["--data", images, "--output", output, "--model", f"tests.trainer_models:{model}"]
    argv += ["--augment", "none", "--per_node_batch_size", batch]
    argv += ["--workers", 0, "--epochs", epochs, "--lr", 0.05, "--sync", spec, "--bucket_mb", 1]
    argv += ["--warmup_epochs", 0, "--sync_warmup", 0, *more]
    argv += [] if "--precision" in more else ["--precision", "fp32"]
    argv += ["--evaluate_every", 1000, "--checkpoint_every", 1000]
    assert run_ranks(nodes, trainer, *argv, quiet=True) == [0] * sum(nodes)
    state = newest_checkpoint(output)
    return state["step"], {name: value.numpy() for name, value in state["model"].items()}


def apart(ours, theirs):
    """The greatest difference of two sets of weights."""
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)


def rarely(*values):
    return pytest.param(*values, marks=pytest.mark.long)


# Ranks of each machine, micro-batches, strategy.
LOOPS = [
    ([1, 1], 2, SPEC),
    ([2, 2], 1, "ef:5:own"),
    rarely([2, 2], 1, SPEC),
    rarely([1], 1, SPEC),
    rarely([1] * 4, 1, SPEC),
    rarely([1, 1], 1, "fp16"),
    rarely([1, 1], 1, "allreduce"),
]


@pytest.mark.parametrize(("nodes", "accumulate", "spec"), LOOPS, ids=str)
def test_the_weights_are_the_trainer_s_to_the_bit(images, tmp_path, nodes, accumulate, spec):
    epochs = 2 * sum(nodes)
    asked = ("several", 8 * max(nodes), "--accumulate", accumulate)
    steps, theirs = trainers(images, tmp_path, nodes, epochs, *asked, spec=spec)
    assert steps == 16
    asked = (str(images), "several", spec, 8, epochs, steps, accumulate)
    for ours in run_ranks(nodes, loop.trained, *asked):
        assert apart(ours, theirs) == 0


def test_so_they_are_after_a_resume(images, tmp_path):
    nodes, spec = [1, 1], "ef:5:own"
    steps, theirs = trainers(images, tmp_path, nodes, 4, "several", 8, spec=spec)
    asked = (str(images), "several", spec, 8, 4)
    run_ranks(nodes, loop.half, *asked, 0, 7, str(tmp_path))
    for ours in run_ranks(nodes, loop.half, *asked, 7, steps, str(tmp_path)):
        assert apart(ours, theirs) == 0


@pytest.mark.parametrize(
    ("spec", "precision"),
    [(SPEC, "fp64"), rarely("allreduce", "fp32")],
)
def test_of_three_ranks_they_are_the_same_but_for_rounding(tmp_path, spec, precision):
    """24 images are divided by 24 there, by 8 and by 3 here. `ef` has weights in fp64: where a
    value lies between two levels, the last bit of fp32 may decide which one is sent."""
    images, nodes = make_images(tmp_path / "images", per_class=12), [1] * 3
    more = ("--precision", precision)
    steps, theirs = trainers(images, tmp_path, nodes, 8, "plain", 8, *more, spec=spec)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    found = run_ranks(nodes, loop.trained, str(images), "plain", spec, 8, 8, steps, 1, dtype)
    assert all(apart(ours, theirs) <= 1e-6 for ours in found)
    assert apart(found[0], found[1]) == apart(found[0], found[2]) == 0


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch before 2.3: CUDA's alone")
def test_an_overflow_under_a_grad_scaler_leaves_no_trace(images):
    """To the bit what the same loop makes that leaves the step out."""
    asked = (str(images), "several", "ef:5:own", 8, 13, 9)
    hit = run_ranks([1, 1], loop.scaled, *asked, {"overflows": 5})
    skipped = run_ranks([1, 1], loop.scaled, *asked, {"leaves_out": 5})
    for (ours, left, scale), (theirs, left_there, _) in zip(hit, skipped):
        assert apart(ours, theirs) == 0
        assert scale == 512.0
        for index, tensors in left_there.items():
            for one, other in zip(left[index], tensors):
                assert np.array_equal(one, other) and np.isfinite(one).all()
        assert any(np.abs(tensors[0]).max() > 0 for tensors in left.values())


def said_of_losses_that_are_nan(counts):
    loop.joined()
    return [said_of_a_loss_that_is_nan(steps) for steps in counts]


def said_of_a_loss_that_is_nan(steps):
    ddp, said = loop.wrapped(torch.nn.Linear(300, 40)), []
    optimizer = torch.optim.SGD(ddp.parameters(), 0.0)
    sync.attach(ddp, SPEC).say = said.append
    for step in range(30):
        loss = ddp(torch.ones(4, 300)).pow(2).mean() * (float("nan") if step < steps else 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            ddp.module.weight.nan_to_num_()
            ddp.module.bias.nan_to_num_()
    return [line for line in said if "not finite" in line]


def test_a_loss_that_stays_nan_is_told():
    """A GradScaler that begins too high overflows a few times."""
    few, many = zip(*run_ranks([1, 1], said_of_losses_that_are_nan, (10, 30)))
    assert ([*map(len, few)], [*map(len, many)]) == ([0, 0], [1, 0])


def first_sums():
    """Whether each of four steps was the exact average, without `warm_up_buckets` and with two
    exact steps of warm-up."""
    rank, world = loop.joined()
    found = {}
    for warmup in (0, 2):
        torch.manual_seed(0)
        net = torch.nn.Linear(300, 40)
        ddp = loop.wrapped(net)
        attached = sync.attach(ddp, SPEC, warmup_steps=warmup)
        exact = []
        for step in range(4):
            net.zero_grad()
            torch.manual_seed(10 * step + rank)
            images = torch.randn(4, 300)
            ddp(images).pow(2).mean().backward()
            torch.optim.SGD(net.parameters(), 0.0).step()
            ours = net.weight.grad.clone()
            net.zero_grad()
            net(images).pow(2).mean().backward()
            dist.all_reduce(net.weight.grad)
            exact.append(bool(torch.allclose(ours, net.weight.grad / world, rtol=1e-5, atol=1e-8)))
        found[warmup] = exact, attached.steps
    return found


def test_the_first_backward_and_the_warm_up_are_exact():
    for found in run_ranks([1, 1], first_sums):
        assert found[0] == ([True, False, False, False], 4)
        assert found[2] == ([True, True, False, False], 4)


def refused(function):
    try:
        function()
    except UserError as error:
        return str(error)
    return None


def refusals():
    """What only several ranks can ask for, which tests/messages/trainer.py cannot."""
    rank, _ = loop.joined()
    own = [dist.new_group([number]) for number in (0, 1)][rank]
    net = torch.nn.Linear(2, 2)
    spec, group = "ef:5" if rank else "ef:15", loop.wrapped(net, process_group=own)
    cases = [lambda: sync.attach(group, SPEC), lambda: sync.attach(loop.wrapped(net), spec)]
    return [refused(case) for case in cases]


def states_that_do_not_fit(spec):
    """How many damaged states were loaded, and refused; a refused one changes nothing."""
    from hypothesis import given

    from tests.fuzz import many, odd

    loop.joined()
    net = torch.nn.Linear(300, 40)
    ddp = loop.wrapped(net)
    attached = sync.attach(ddp, spec)
    attached.load_state_dict(attached.state_dict())  # as it was saved before any step
    for _ in range(3):
        ddp(torch.randn(4, 300)).pow(2).mean().backward()
        torch.optim.SGD(net.parameters(), 0.0).step()
    state, ends = attached.state_dict(), Counter()
    tensors = [torch.full((2,), float("nan")), torch.ones(3, 3), torch.ones(2, dtype=torch.int64)]

    @many(300)
    @given(odd(state, tensors))
    def each(changed):
        before = repr(attached.state_dict())
        try:
            attached.load_state_dict(changed)
        except UserError as error:
            assert repr(attached.state_dict()) == before
            assert str(error).startswith("tandem.sync.attach: ") and str(error).endswith(".")
            ends["refused"] += 1
        else:
            attached.load_state_dict(state)
            ends["loaded"] += 1

    each()
    ddp(torch.randn(4, 300)).pow(2).mean().backward()
    return ends["loaded"], ends["refused"]


def test_a_damaged_state_is_refused_in_a_sentence_and_changes_nothing():
    pytest.importorskip("hypothesis")  # where the newest torch is tested
    for loaded, refused in run_ranks([1, 1], states_that_do_not_fit, "ef:5:own"):
        assert loaded >= 0 and refused > 10, (loaded, refused)


def patience_and_machines():
    """The seconds that the exchange waits, and the strategy that is carried out, with ranks where
    they run and as machines of their own."""
    loop.joined()  # with 60 s
    found = []
    for machines in (None, [0, 1]):
        ddp = loop.wrapped(torch.nn.Linear(2, 2))
        attached = sync.attach(ddp, SPEC, machines=machines)
        found.append((attached.sync.patience, attached.effective_spec))
    return found


def test_it_waits_as_long_as_ddp_and_on_one_machine_sums_exactly_but_for_a_trial():
    for found in run_ranks([2], patience_and_machines):
        assert found == [(60.0, "allreduce"), (60.0, SPEC)]


def test_ranks_that_ask_for_different_things_are_refused():
    for group, ranks in run_ranks([1, 1], refusals):
        assert "has 1 of 2 ranks" in group
        assert "'ef:15:own' after 0 exact steps, 'ef:5:own' after 0" in ranks
