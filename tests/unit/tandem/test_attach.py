"""`tandem.sync.attach` in a loop of one's own: what the trainer makes, and what it refuses."""

from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from contract.errors import UserError
from tandem import sync
from tandem.compat import load_tensors
from tests.trainer_ranks import make_images, run_ranks, trainer
from tests.unit.tandem import loop

SPEC = "ef:1.6"


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
    file = sorted((output / "checkpoints/node1").glob("step-*.pt"))[-1]
    with file.open("rb") as content:
        saved = load_tensors(content)
    return saved["step"], {name: value.numpy() for name, value in saved["model"].items()}


def apart(ours, theirs):
    """The greatest difference of two sets of weights."""
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)


def whole(nodes):
    """Epochs and steps of at least 50 steps of these ranks with 8 images each, of 64."""
    per_epoch = 64 // (8 * sum(nodes))
    epochs = -(-50 // per_epoch)
    return epochs, epochs * per_epoch


NODES = [([1], 1), ([1, 1], 1), ([1, 1], 2), ([1] * 4, 1), ([2, 2], 1)]


@pytest.mark.parametrize(("nodes", "accumulate"), NODES, ids=str)
def test_the_weights_are_the_trainer_s_to_the_bit(images, tmp_path, nodes, accumulate):
    epochs, steps = whole(nodes)
    asked = ("several", 8 * max(nodes), "--accumulate", accumulate)
    made, theirs = trainers(images, tmp_path, nodes, epochs, *asked)
    assert made == steps >= 50
    asked = (str(images), "several", SPEC, 8, epochs, steps, accumulate)
    for ours in run_ranks(nodes, loop.trained, *asked):
        assert apart(ours, theirs) == 0


@pytest.mark.parametrize("spec", ["powersgd:2", "fp16", "allreduce"])
def test_so_they_are_with_other_strategies(images, tmp_path, spec):
    nodes, (epochs, steps) = [1, 1], whole([1, 1])
    _, theirs = trainers(images, tmp_path, nodes, epochs, "several", 8, spec=spec)
    for ours in run_ranks(nodes, loop.trained, str(images), "several", spec, 8, epochs, steps):
        assert apart(ours, theirs) == 0


def test_so_they_are_after_a_resume(images, tmp_path):
    nodes, (epochs, steps) = [1, 1], whole([1, 1])
    _, theirs = trainers(images, tmp_path, nodes, epochs, "several", 8)
    asked = (str(images), "several", SPEC, 8, epochs)
    run_ranks(nodes, loop.half, *asked, 0, 23, str(tmp_path))
    for ours in run_ranks(nodes, loop.half, *asked, 23, steps, str(tmp_path)):
        assert apart(ours, theirs) == 0


@pytest.mark.parametrize(
    ("spec", "precision"), [("allreduce", "fp32"), ("powersgd:2", "fp32"), (SPEC, "fp64")], ids=str
)
def test_of_three_ranks_they_are_the_same_but_for_rounding(tmp_path, spec, precision):
    """24 images are divided by 24 there, by 8 and by 3 here. `ef` has weights in fp64: where a
    value lies between two levels, the last bit of fp32 may decide which one is sent."""
    images, nodes = make_images(tmp_path / "images", per_class=12), [1] * 3
    more = ("--precision", precision)
    _, theirs = trainers(images, tmp_path, nodes, 25, "plain", 8, *more, spec=spec)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    found = run_ranks(nodes, loop.trained, str(images), "plain", spec, 8, 25, 50, 1, dtype)
    assert all(apart(ours, theirs) <= 1e-6 for ours in found)
    assert apart(found[0], found[1]) == apart(found[0], found[2]) == 0


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch before 2.3: CUDA's alone")
@pytest.mark.parametrize("spec", [SPEC, "powersgd:2"])
def test_an_overflow_under_a_grad_scaler_leaves_no_trace(images, spec):
    """To the bit what the same loop makes that leaves the step out."""
    asked = (str(images), "several", spec, 8, 13, 12)
    hit = run_ranks([1, 1], loop.scaled, *asked, {"overflows": 5})
    skipped = run_ranks([1, 1], loop.scaled, *asked, {"leaves_out": 5})
    for (ours, left, scale), (theirs, left_there, _) in zip(hit, skipped):
        assert apart(ours, theirs) == 0
        assert scale == 512.0
        for index, tensors in left_there.items():
            for one, other in zip(left[index], tensors):
                assert np.array_equal(one, other) and np.isfinite(one).all()
        assert any(np.abs(tensors[0]).max() > 0 for tensors in left.values())


def first_sums():
    """Whether each of four steps was the exact average, without `settle` and with two exact steps
    of warm-up."""
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


class Branches(torch.nn.Module):
    """Without `both` it leaves a branch out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, inputs, both=True):
        return self.left(inputs) + (self.right(inputs) if both else 0)


def branches(static):
    """The weights after steps of which some leave a branch out, or of a static graph."""
    rank, _ = loop.joined()
    net = Branches()
    more = {"static_graph": True} if static else {"find_unused_parameters": True}
    ddp = loop.wrapped(net, **more)
    attached = sync.attach(ddp, SPEC)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        ddp(torch.randn(4, 64), both=static or step % 2 == 0).pow(2).mean().backward()
        optimizer.step()
    kept = attached.state_dict()["sync"]["kept"]
    return [p.detach().numpy() for p in net.parameters()], len(kept)


@pytest.mark.parametrize("static", [False, True], ids=["unused", "static"])
def test_unused_parameters_and_static_graphs_work_as_in_ddp(static):
    (ours, kept), (theirs, _) = run_ranks([1, 1], branches, static)
    assert all(np.array_equal(one, other) for one, other in zip(ours, theirs))
    assert all(np.isfinite(one).all() for one in ours) and kept > 0


def refused(function):
    try:
        function()
    except UserError as error:
        return str(error)
    return None


class FSDPModule(torch.nn.Module):
    """A stand-in: what torch's fully_shard makes a model's class inherit from."""


def hooked():
    ddp = loop.wrapped(torch.nn.Linear(2, 2))
    ddp.register_comm_hook(None, lambda _, bucket: None)
    return ddp


def run_before():
    ddp = loop.wrapped(torch.nn.Linear(2, 2))
    ddp(torch.ones(1, 2))
    return ddp


def refusals():
    rank, _ = loop.joined()
    own = [dist.new_group([number]) for number in (0, 1)][rank]
    net = torch.nn.Linear(2, 2)
    ddp = loop.wrapped(net)
    cases = {
        "no DDP": (net, SPEC),
        "FSDP": (FSDPModule(), SPEC),
        "averages": (ddp, "localsgd:8"),
        "auto": (ddp, "auto"),
        "unknown": (ddp, "ef:3"),
        "warmup": (ddp, SPEC, -1),
        "group": (loop.wrapped(net, process_group=own), SPEC),
        "ranks": (ddp, "ef:2" if rank else "ef:4"),
        "run": (run_before(), SPEC),
    }
    found = {name: refused(lambda case=case: sync.attach(*case)) for name, case in cases.items()}
    found["hook"] = refused(lambda: sync.attach(hooked(), SPEC))
    attached = sync.attach(loop.wrapped(net), SPEC)
    found["closure"] = refused(lambda: attached.settle(lambda: None))
    state = attached.state_dict()
    odd = {"spec": "ef:2", "nodes": [0, 0], "steps": True, "sync": {"scale": -1}}
    for name, value in odd.items():
        changed = {**state, name: value}
        found[name] = refused(lambda changed=changed: attached.load_state_dict(changed))
    return found


def odd_values(random):
    """A value that a damaged file may hold in the place of another."""
    tensors = [torch.full((2,), float("nan")), torch.ones(3, 3), torch.ones(2, dtype=torch.int64)]
    plain = [None, True, -1, 0, 2**70, 1.5, float("nan"), float("inf"), "", "x", b"", (), object()]
    nested = [{"scale": 1.0}, {1: [None]}, {"0": 3}, {"x": []}, {"0": tensors}, [[0], [1]]]
    return random.choice([*plain, *tensors, *nested])


def damaged(value, random):
    """A copy in which one thing, at any depth, is odd, missing or added."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        changed, name = dict(value), random.choice(list(value))
        way = random.random()
        if way < 0.2:
            del changed[name]
        elif way < 0.3:
            changed[random.choice(["", "99999999999999999999", 7, None, ("a", 1)])] = 1
        else:
            changed[name] = damaged(value[name], random)
        return changed
    if isinstance(value, list) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        return [damaged(v, random) if n == place else v for n, v in enumerate(value)]
    return odd_values(random)


def states_that_do_not_fit(spec):
    """What is said of 600 damaged states; then whether the state is as before, and trains."""
    loop.joined()
    net = torch.nn.Linear(300, 40)
    ddp = loop.wrapped(net)
    attached = sync.attach(ddp, spec)
    for _ in range(3):
        ddp(torch.randn(4, 300)).pow(2).mean().backward()
    state, said = attached.state_dict(), Counter()
    random = Random(0)
    for _ in range(600):
        before = repr(attached.state_dict())
        try:
            refusal = refused(lambda: attached.load_state_dict(damaged(state, random)))
        except Exception as error:
            said[f"{type(error).__name__}: {error}"] += 1
            continue
        if refusal is None:
            attached.load_state_dict(state)
        elif repr(attached.state_dict()) != before:
            refusal = "it was refused, and had changed something"
        said[refusal or "fits"] += 1
    ddp(torch.randn(4, 300)).pow(2).mean().backward()
    return dict(said)


@pytest.mark.parametrize("spec", [SPEC, "powersgd:2", "allreduce"])
def test_a_damaged_state_is_refused_in_a_sentence_and_changes_nothing(spec):
    for said in run_ranks([1, 1], states_that_do_not_fit, spec):
        odd = [one for one in said if one != "fits" and not one.startswith("tandem.sync.attach: ")]
        assert odd == []
        assert sum(said.values()) == 600 and sum(said.values()) - said.get("fits", 0) >= 300
        assert all(one == "fits" or one.endswith(".") for one in said)


WORDS = {
    "no DDP": "this model is a Linear: wrap it first",
    "FSDP": "this model is FSDP's",
    "averages": "tandem.sync.attach localsgd:8: localsgd is no longer there: use ef:1.6",
    "auto": "tandem.sync.attach auto:",
    "unknown": "tandem.sync.attach ef:BITS: BITS is one of 8, 4, 2, 1.6",
    "warmup": "warmup_steps is a whole number from 0, not -1",
    "group": "has 1 of 2 ranks",
    "ranks": "the ranks ask for different things: 'ef:2' after 0 exact steps, 'ef:4' after 0",
    "run": "has run already: attach before its first forward",
    "hook": "has a communication hook already",
    "closure": "made no backward that communicates",
    "spec": "the state is of 'ef:2'",
    "nodes": "with ranks on machines [0, 0]",
    "steps": "number of steps is missing or odd",
    "sync": "the state is damaged (no loss scale)",
}


def test_what_cannot_work_is_refused_in_a_sentence():
    for found in run_ranks([1, 1], refusals):
        assert found.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert words in str(found[name]), name
