"""Models by name, and what they cost."""

import logging
import sys
import types

import pytest
import torch
import torchvision
from torch import nn

from contract.errors import BAD_INPUT, UserError
from contract.options import Options
from trainer import models
from trainer.check import check
from trainer.classifiers import classifier_names
from trainer.models import WithHead, build, measure_cost


def test_all_of_torchvisions_classifiers_are_known():
    known = classifier_names()
    assert {"resnet50", "vit_b_16", "googlenet", "convnext_tiny", "squeezenet1_0"} <= set(known)
    assert not {"get_weight", "get_model", "list_models", "fasterrcnn_resnet50_fpn"} & set(known)
    if hasattr(torchvision.models, "list_models"):
        assert known == sorted(torchvision.models.list_models(module=torchvision.models))


@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet18", 32), ("googlenet", 64), ("examples.small_cnn:small_cnn", 8)],
)
def test_models_have_the_classes_asked_for(name, size):
    assert build(name, 7, size)(torch.zeros(2, 3, size, size)).shape == (2, 7)


@pytest.fixture
def own():
    module = types.ModuleType("own_models")
    sys.modules["own_models"] = module
    yield module
    del sys.modules["own_models"]


def test_features_get_a_head(own, caplog):
    """Even if they are as many as the classes; and it is said."""
    own.conv = lambda **settings: nn.Sequential(nn.Conv2d(3, 6, 3, **settings), nn.BatchNorm2d(6))
    model, images = build("own_models:conv", 4, 16), torch.rand(2, 3, 16, 16)
    pooled = nn.Flatten()(nn.AdaptiveAvgPool2d(1)(model.backbone(images)))
    torch.testing.assert_close(model(images), model.fc(pooled))
    own.flat = lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4))
    with caplog.at_level(logging.INFO):
        assert isinstance(build("own_models:flat", 4, 8), WithHead)
    assert "a linear layer from its 4 outputs to 4 classes" in caplog.text


def test_a_function_that_takes_num_classes_is_given_them_and_gets_no_head(own):
    """Behind keywords too, as timm's: a head of 1000 outputs under another one was built."""

    def timms(pretrained=False, **kwargs):
        return own.whole(kwargs.get("num_classes", 1000))

    def broken(**settings):
        raise TypeError("something else")

    own.whole = lambda num_classes: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, num_classes))
    own.timms, own.broken = timms, broken
    for name in ("whole", "timms"):
        model = build(f"own_models:{name}", 4, 8)
        assert isinstance(model, nn.Sequential) and model[1].out_features == 4
    with pytest.raises(TypeError, match="something else"):
        build("own_models:broken", 4, 16)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet81", "resnet81: .*nearest: resnet"),
        ("alexnet", "alexnet: does not take images of 8 x 8"),
        ("no_such_module:f", "cannot import no_such_module"),
        ("own_models:absent", "has no function 'absent'; it has "),
        ("own_models:text", "returned str"),
        ("own_models:frozen", "no parameters to train"),
        ("own_models:tokens", r"returns \(1, 3, 64\) for one image"),
        ("own_models:tuples", "returns tuple, not one tensor"),
    ],
)
def test_what_is_wrong_with_an_own_backbone_is_said(own, name, words):
    class Pair(nn.Module):
        def forward(self, images):
            return images, images

    own.tokens = lambda: nn.Flatten(2)
    own.tuples = lambda: Pair()
    own.text = lambda: "model"
    own.flat = lambda count: nn.Sequential(nn.Flatten(), nn.Linear(192, count))
    own.frozen = lambda num_classes: own.flat(num_classes).requires_grad_(False)
    with pytest.raises(UserError, match=words):
        build(name, 4, 8)


def test_resnet50_costs_what_is_published():
    cost = measure_cost(build("resnet50", 1000, 224), 224)
    assert cost == (25_557_032, pytest.approx(2 * 4.089e9, rel=1e-3))


def test_what_cannot_be_counted_is_admitted():
    """As Swin's attention, which takes the weights of its linear layers and does not call them."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    net[1].forward = lambda images: images @ net[1].weight.t()
    net.unused = nn.Linear(2, 2)
    net.forward = lambda images: net[1](net[0](images))
    assert measure_cost(net, 8)[1] is None


@pytest.mark.parametrize("name", ["mobilenet_v2", "vit_b_32"])
def test_operations_are_those_that_torch_counts(name):
    model, images = build(name, 10, 64).eval(), torch.zeros(1, 3, 64, 64)
    assert model(images).shape == (1, 10)
    counter = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode(display=False)
    with counter:
        model(images)
    assert measure_cost(model, 64)[1] == counter.get_total_flops()


OWN = """
import torch
from torch import nn
from blocks import body


def good(num_classes):
    return body(num_classes)


def scores():
    return body(10)


def features():
    return nn.Conv2d(3, 8, 3)


def small(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))


class Pair(nn.Module):
    def forward(self, images):
        return (images, images) if self.training else images


def pair_in_training():
    return nn.Sequential(body(10), Pair())


def unused(num_classes):
    model = body(num_classes)
    model.idle = nn.Linear(2, 2)
    model.forward = lambda images: model[2](model[1](model[0](images)))
    return model


def wrong(num_classes):
    return body(num_classes, depth=3)
"""
BLOCKS = """
from torch import nn


def body(count):
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, count))
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The path of a file of models that imports the one beside it."""
    (tmp_path / "net.py").write_text(OWN)
    (tmp_path / "blocks.py").write_text(BLOCKS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield f"{tmp_path}/net.py"
    for name in ("net", "net_of_model", "blocks"):
        sys.modules.pop(name, None)


def checked(name, capsys, monkeypatch, ranks=2, **options):
    """(exit code, what is printed) of the check that runs before any rank starts."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    code = check(Options(model=name, check=True, **options))
    captured = capsys.readouterr()
    return code, (captured.out + captured.err).strip()


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        ("features", 0, ""),
        ("small", 0, ""),  # it takes images of one size alone
        ("scores", 0, "its 10 outputs. If the outputs already are class scores"),
        ("pair_in_training", BAD_INPUT, "returns tuple, not one tensor"),
        ("unused", BAD_INPUT, "the output does not depend on idle.weight (2 of 4 parameters)"),
        ("wrong", BAD_INPUT, "TypeError: body() got an unexpected keyword argument 'depth' ("),
    ],
)
def test_a_model_of_the_user_s_is_tried_before_any_rank_starts(
    mine, capsys, monkeypatch, function, code, said
):
    ended, printed = checked(f"{mine}:{function}", capsys, monkeypatch)
    assert (ended, said in printed) == (code, True), printed
    assert bool(printed) == bool(said)
    assert len(printed.splitlines()) <= 1
    if function == "unused":
        name = f"{mine}:unused"
        assert checked(name, capsys, monkeypatch, find_unused_parameters=True) == (0, "")
        assert checked(name, capsys, monkeypatch, ranks=1) == (0, "")


def test_the_check_finds_an_unknown_name_and_weights_of_another_net(tmp_path, capsys, monkeypatch):
    code, printed = checked("resnet9", capsys, monkeypatch)
    assert code == BAD_INPUT and "resnet18" in printed
    torch.save(build("resnet18", 10, 32).state_dict(), tmp_path / "net.pt")
    weights = str(tmp_path / "net.pt")
    assert checked("resnet18", capsys, monkeypatch, weights=weights)[0] == 0
    assert checked("squeezenet1_1", capsys, monkeypatch, weights=weights)[0] == BAD_INPUT
    assert checked("resnet18", capsys, monkeypatch, weights="/nowhere")[0] == BAD_INPUT


def test_a_folder_that_was_sent_takes_the_place_of_the_path(mine, monkeypatch, tmp_path):
    monkeypatch.setenv("TANDEM_MODEL_FOLDER", str(tmp_path))
    assert models.build("/nowhere/net.py:good", 3, 32)(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    with pytest.raises(UserError, match="there is no file"):
        models.build("/nowhere/other.py:good", 3, 32)
