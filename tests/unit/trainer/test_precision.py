"""Precision levels mean what apex's mean: types of weights, norms and masters, loss scale, also
where it is the device's, without a wait for it; and what a step reads of a model's state."""

import pytest
import torch
from torch import nn

from contract.errors import UserError
from contract.options import Options
from tandem import compat
from tandem.compat import unscale
from trainer.ema import Ema
from trainer.optim import load_state
from trainer.precision import DeviceScale, LossScale, Precision, refuse_other_apex

CPU = torch.device("cpu")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def prepared(level, kind=torch.optim.SGD, **settings):
    net, precision = model(), Precision(level, CPU)
    optimizer = kind(net.parameters(), lr=0.1, **settings)
    precision.cast_weights(net, optimizer)
    return net, precision, optimizer


@pytest.mark.parametrize(
    "level, weights, norms, masters",
    [
        ("O0", torch.float32, torch.float32, None),
        ("O1", torch.float32, torch.float32, None),
        ("O2", torch.float16, torch.float32, torch.float32),
        ("O3", torch.float16, torch.float16, None),
        ("bf16", torch.float32, torch.float32, None),
        ("fp64", torch.float64, torch.float64, None),
    ],
)
def test_types(level, weights, norms, masters):
    net, precision, optimizer = prepared(level)
    assert {net[0].weight.dtype, net[2].bias.dtype} == {weights}
    assert {net[1].weight.dtype, net[1].running_var.dtype} == {norms}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(list(net.parameters()))
    if masters is not None:
        assert {p.dtype for p in held} == {masters}
    assert (precision.scale is not None) == (level in ("O1", "O2"))


def with_gradients(net, precision, value):
    """As after backward of a scaled loss."""
    scale = precision.scale.value
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, value * scale if value else float("inf"))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_scale_halves_on_overflow_and_doubles_after_2000_steps(level):
    """Pitfall 18: values overflow when stored as half."""
    net, precision, optimizer = prepared(level)
    assert precision.scale.value == 2.0**16
    before = [p.detach().clone() for p in net.parameters()]
    with_gradients(net, precision, None)
    assert precision.step(optimizer, clip=1.0) is True
    assert precision.scale.value == 2.0**15
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    for _ in range(2000):
        with_gradients(net, precision, 2**-14)
        assert precision.step(optimizer, clip=0) is False
    assert precision.scale.value == 2.0**16


def test_a_scaled_backward_and_clipping_give_the_unscaled_gradients():
    """Clipping sees true gradients: a scale of 65,536 must not shrink them."""
    steps = {}
    for level in ("O0", "O1"):
        net, precision, optimizer = prepared(level)
        before = net[0].weight.detach().clone()
        loss = net(torch.arange(8.0).view(2, 4)).pow(2).sum()
        precision.backward(loss)
        assert precision.step(optimizer, clip=0.5) is False
        steps[level] = net[0].weight.detach() - before
    assert steps["O0"].abs().max() > 0
    assert torch.allclose(steps["O0"], steps["O1"], rtol=1e-6, atol=0)


def test_state_returns_scale_and_masters():
    """Else the first step would bring the random initial weights back."""
    net, precision, optimizer = prepared("O2")
    with_gradients(net, precision, None)
    precision.step(optimizer, 0)
    precision.masters[0][1].data.add_(1e-7)
    other_net, other, _ = prepared("O2")
    other.load_state_dict(precision.state_dict())
    full = precision.full_state(net)
    other_net.load_state_dict(full)
    other.renew_masters(other_net, full)
    assert other.scale == LossScale(2.0**15, 0)
    for (_, ours), (_, theirs) in zip(precision.masters, other.masters):
        assert torch.equal(ours, theirs)
    assert not torch.equal(other.masters[0][1], other.masters[0][1].half().float())


def test_the_average_of_o2_is_that_of_its_masters():
    """Half weights do not move by what one step changes; the average of them would not either."""
    net, precision, optimizer = prepared("O2")
    ema = Ema(precision.full_state(net), decay=0.5)
    master = precision.masters[0][1]
    before, half = master.detach().clone(), net[0].weight.detach().clone()
    for update in (1, 2):
        with_gradients(net, precision, 2**-14)
        precision.step(optimizer, clip=0)
        ema.update(precision.full_state(net))
        decay = (1 + update) / (10 + update)
        before = decay * before + (1 - decay) * master.detach()
        assert torch.equal(net[0].weight, master.half())
    assert (net[0].weight == half).float().mean() > 0.5
    assert torch.allclose(ema.average["0.weight"], before, rtol=0, atol=1e-7)
    assert not torch.equal(ema.average["0.weight"].half().float(), ema.average["0.weight"])
    assert {value.dtype for value in ema.average.values()} == {torch.float32, torch.int64}
    assert ema.average.keys() == net.state_dict().keys()


@pytest.mark.parametrize("folder, refused", [("apex/normalization", False), ("apex", True)])
def test_the_other_apex_is_named(tmp_path, monkeypatch, folder, refused):
    """Pitfall 25: `pip install apex` installs another project."""
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "apex/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    if not refused:
        refuse_other_apex()
        return
    with pytest.raises(UserError, match="pip uninstall apex"):
        refuse_other_apex()


# The scale on the device


def by_itself(level="O2", kind=torch.optim.SGD, **settings):
    """A net, its precision and an optimizer that can leave a step out by itself, on the CPU."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4):
        pytest.skip("this torch has no fused optimizer for the CPU")
    return prepared(level, kind, fused=True, **settings)


def one_step(net, precision, optimizer, factor=1.0):
    net.zero_grad(set_to_none=True)
    weights = [weight.float() for weight in net.parameters()]
    precision.backward(sum((weight * weight).sum() for weight in weights) * factor)
    return precision.step(optimizer, clip=0.5)


OVERFLOWS = (True, False, False, True, False)


@pytest.mark.parametrize(
    "kind, settings", [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})]
)
def test_what_overflows_is_left_out_by_the_device_as_by_the_host(kind, settings):
    """The first step too: fused SGD's momentum would begin with what memory happened to hold."""
    net, precision, optimizer = by_itself(kind=kind, **settings)
    assert isinstance(precision.scale, DeviceScale)
    other, host, theirs = by_itself(kind=kind, **settings)
    host.scale = LossScale()
    for overflows in OVERFLOWS:
        before = [value.clone() for value in precision.full_state(net).values()]
        skipped = [
            one_step(*one, float("inf") if overflows else 2.0**-6)
            for one in ((net, precision, optimizer), (other, host, theirs))
        ]
        assert [bool(one) for one in skipped] == [overflows] * 2
        states = precision.full_state(net), host.full_state(other)
        assert all(torch.equal(*pair) for pair in zip(*(state.values() for state in states)))
        same = [torch.equal(*pair) for pair in zip(before, states[0].values())]
        assert all(same) is overflows
        assert precision.state_dict() == host.state_dict()
    assert (precision.scale.value, precision.scale.good_steps) == (2.0**14, 1)
    again = by_itself()[1]
    again.load_state_dict(host.state_dict())
    assert again.state_dict() == host.state_dict()


def test_a_checkpoint_without_fused_leaves_the_optimizer_fused():
    """torch before 2.3 saves none, and torch's own loading takes that for switched off: then the
    optimizer could no longer leave a step out, and an assertion of torch's ended the run."""
    net, precision, optimizer = by_itself(momentum=0.9)
    one_step(net, precision, optimizer)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["fused"]
    load_state(optimizer, state, Options())
    assert optimizer.param_groups[0]["fused"]
    assert not one_step(net, precision, optimizer, 2.0**-6)
    optimizer.load_state_dict(state)
    with pytest.raises(AssertionError):
        one_step(net, precision, optimizer, 2.0**-6)


def test_the_scale_of_the_device_doubles_as_the_host_s():
    ours, theirs = DeviceScale(CPU, LossScale().state_dict()), LossScale()
    for scale in (ours, theirs):
        scale.load_state_dict({"value": 2.0**23, "good_steps": 1999})
    for overflow in (False, False, True, False):
        ours.update(torch.tensor(overflow))
        theirs.update(overflow)
        assert ours.state_dict() == theirs.state_dict()
    for scale, overflow in ((ours, torch.tensor(False)), (theirs, False)):
        scale.load_state_dict({"value": 2.0**24, "good_steps": 1999})
        scale.update(overflow)
        assert (scale.value, scale.good_steps) == (2.0**24, 0)  # apex's limit


@pytest.mark.parametrize("level", ["fp32", "O2", "O3"])
def test_the_state_of_each_step_is_found_where_it_lies(level):
    net, precision, _ = prepared(level)
    for _ in range(2):
        ours, theirs = precision.live_state(net), precision.full_state(net)
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        for value in theirs.values():
            value.data.add_(1)  # in place, as an optimizer does
        # As torch 1.12's batch normalisation does with its counter.
        net[1].num_batches_tracked = net[1].num_batches_tracked + 1


def test_a_model_with_a_state_of_its_own_is_asked_each_time():
    class Own(nn.Linear):
        def get_extra_state(self):
            return torch.tensor(7)

        def set_extra_state(self, state):
            pass

    precision, net = Precision("fp32", CPU), Own(2, 2)
    assert precision.live_state(net).keys() == net.state_dict().keys() | {"_extra_state"}


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_found_by_an_older_torch_on_a_cpu_too(monkeypatch, bad):
    for version in ((1, 12), compat.TORCH_VERSION):
        monkeypatch.setattr(compat, "TORCH_VERSION", version)
        factor = torch.full((), 0.5)
        good = [torch.ones(2), torch.ones(3)]
        assert float(unscale(good, factor)) == 0.0
        assert [one.tolist() for one in good] == [[0.5] * 2, [0.5] * 3]
        assert float(unscale([torch.ones(2), torch.tensor([1.0, bad])], factor)) == 1.0
        assert float(unscale([], factor)) == 0.0


def test_statistics_over_ranks_are_not_counted_in_fp16():
    """torch counts the samples of all ranks in the type of the running mean, and fp16 ends at
    65,504: 21 images of 56 x 56 pixels."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), nn.BatchNorm2d(4))
    Precision("O3", CPU).cast_weights(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert net[1].running_mean.dtype is net[1].weight.dtype is torch.float32
    assert net[0].weight.dtype is net[2].weight.dtype is torch.float16
