"""Precision levels mean what apex's mean: types of weights, norms and masters, loss scale."""

import pytest
import torch
from torch import nn

from contract.errors import UserError
from trainer.ema import Ema
from trainer.precision import LossScale, Precision, refuse_other_apex

CPU = torch.device("cpu")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def prepared(level):
    net, precision = model(), Precision(level, CPU)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
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
