"""The loss scale without a wait for the device, and what a step reads of a model's state."""

import pytest
import torch
from torch import nn

from contract.options import Options
from tandem.compat import unscale
from trainer.optim import load_state
from trainer.precision import DeviceScale, LossScale, Precision

CPU = torch.device("cpu")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def by_itself(level="O2", kind=torch.optim.SGD, **settings):
    """A net, its precision and an optimizer that can leave a step out by itself, on the CPU."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4):
        pytest.skip("this torch has no fused optimizer for the CPU")
    net, precision = model(), Precision(level, CPU)
    optimizer = kind(net.parameters(), lr=0.1, fused=True, **settings)
    precision.cast_weights(net, optimizer)
    return net, precision, optimizer


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
    ours, theirs = DeviceScale(CPU), LossScale()
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
    net, precision = model(), Precision(level, CPU)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    precision.cast_weights(net, optimizer)
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
    for version in ("1.12.1", torch.__version__):
        monkeypatch.setattr(torch, "__version__", version)
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
