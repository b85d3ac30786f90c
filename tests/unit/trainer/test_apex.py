"""apex's amp behind our interface, against a stand-in: the real one needs CUDA, never ran."""

import sys
from unittest import mock

import pytest
import torch

from contract.errors import UserError
from contract.options import Options
from tests import standin_apex
from trainer.apex_amp import ApexAmp, choose_precision
from trainer.precision import Precision
from trainer.train import Run

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def prepared(level):
    standin_apex.calls.clear()
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    precision = ApexAmp(standin_apex, level, CPU)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    precision.cast_weights(net, optimizer)
    return net, precision, optimizer


def step(net, precision, optimizer, factor=1.0, clip=0.0):
    net.zero_grad(set_to_none=True)
    for last in (False, True):
        precision.backward((net.weight.float().sum() + net.bias.float().sum()) * factor, last)
    return precision.step(optimizer, clip)


def test_only_the_last_micro_step_unscales():
    net, precision, optimizer = prepared("O1")
    before = net.weight.detach().clone()
    # Clipping sees unscaled gradients: ten of 1/8 have a norm of sqrt(10) / 8, which becomes 0.1.
    assert step(net, precision, optimizer, 2**-4, clip=0.1) is False
    assert standin_apex.calls[0] == ("initialize", "O1", 0, "Linear")
    assert standin_apex.calls[1:] == [("scale_loss", True), ("scale_loss", False), ("step", False)]
    moved = torch.full((2, 4), 0.1 * 0.1 / 10**0.5)
    assert torch.allclose(before - net.weight, moved, rtol=1e-4)


def test_operations_are_counted_before_apex_sees_the_model():
    """Its O1 would keep that forward's cast weights, and the first step would use them."""
    order = []
    with (
        mock.patch.multiple(
            "trainer.train",
            build_materials=lambda *_: mock.Mock(),
            measure_cost=lambda *_: order.append("measure_cost"),
            build_job=mock.Mock(side_effect=lambda *_: order.append("job") or 1 / 0),
        ),
        pytest.raises(ZeroDivisionError),
    ):
        Run(Options(), mock.Mock(device=CPU))
    assert order == ["measure_cost", "job"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_state_goes_to_ours_and_back(level):
    net, precision, optimizer = prepared(level)
    assert step(net, precision, optimizer, float("inf")) is True
    state = precision.state_dict()
    assert len(precision.masters) == (2 if level == "O2" else 0)
    ours = Precision(level, CPU)
    other = torch.nn.Linear(4, 2)
    ours.cast_weights(other, torch.optim.SGD(other.parameters(), lr=0.1))
    ours.load_state_dict(state)
    assert (ours.scale.value, ours.scale.good_steps) == (2.0**15, 0)
    ours.scale.good_steps = 7
    _, again, _ = prepared(level)
    again.load_state_dict(ours.state_dict())
    assert standin_apex.scaler == {"loss_scale": 2.0**15, "unskipped": 7}


@pytest.fixture
def apex(monkeypatch):
    """As if it were installed, its kernels too."""
    monkeypatch.setitem(sys.modules, "apex", mock.Mock())
    monkeypatch.setitem(sys.modules, "apex.amp", standin_apex)
    monkeypatch.setitem(sys.modules, "amp_C", mock.Mock())


def rank(device=CUDA, other=""):
    """A rank whose peer says `other` of apex."""
    return mock.Mock(device=device, host="node1", size=2, gather=lambda own: [own, other])


@pytest.mark.parametrize(
    "settings, device, other, serves",
    [
        ({"precision": "O2"}, CUDA, "", True),
        ({"precision": "O2"}, CUDA, "apex is gone on node2", False),
        ({"precision": "O2", "compile": True}, CUDA, "", False),
        ({"precision": "O1", "amp": "torch"}, CUDA, "", False),
        ({"precision": "O2"}, CPU, "", False),
    ],
)
def test_apex_serves_where_all_ranks_can(apex, settings, device, other, serves):
    chosen = choose_precision(Options(**settings), rank(device, other))
    assert type(chosen) is (ApexAmp if serves else Precision)
    because = settings.get("amp") != "torch" and not serves
    assert chosen.backend == ("apex" if serves else "torch")
    assert bool(chosen.fallback_reason) == because


def test_apex_without_its_kernels_is_left_alone_unless_asked_for(apex, monkeypatch):
    """It would read each gradient on the host."""
    monkeypatch.setitem(sys.modules, "amp_C", None)
    chosen = choose_precision(Options(precision="O2"), rank())
    assert type(chosen) is Precision
    assert "without amp_C" in chosen.fallback_reason and "--amp apex" in chosen.fallback_reason
    assert type(choose_precision(Options(precision="O2", amp="apex"), rank())) is ApexAmp
    monkeypatch.setitem(sys.modules, "apex.amp", None)
    assert (
        choose_precision(Options(precision="O1"), rank()).fallback_reason
        == "apex is not installed on node1"
    )
    with pytest.raises(UserError, match="--amp apex: apex is not installed on node1"):
        choose_precision(Options(precision="O1", amp="apex"), rank())
