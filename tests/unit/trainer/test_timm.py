"""Models of timm by name, and more arguments for any model. timm itself is no part of the tests'
environment: a stand-in has as much of it as the trainer calls."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from contract.options import Options
from contract.precisions import Device
from tests.trainer_models import normed
from tests.trainer_ranks import newest_checkpoint, run_ranks, said, trainer
from trainer import build
from trainer.data.batch import Normalise
from trainer.decide import decide
from trainer.world import World

SIZE = 16


def create_model(name, pretrained, num_classes, img_size, drop_rate=0.1):
    assert name.startswith("tiny") and not pretrained and img_size == SIZE
    model = normed(num_classes)
    model[7].p = drop_rate
    model.get_classifier = lambda: model[8]
    return model


def get_pretrained_cfg(name):
    if name == "tiny.gone":
        raise RuntimeError("Invalid pretrained tag (gone) for tiny.")
    return SimpleNamespace(
        input_size=(3, SIZE, SIZE),
        crop_pct=0.8,
        mean=(0.5, 0.4, 0.3),
        std=(0.5, 0.25, 0.125),
        fixed_input_size=True,
    )


STANDIN = SimpleNamespace(
    __version__="stand-in",
    is_model=lambda name: name.partition(".")[0] == "tiny",
    list_models=lambda: ["tiny", "large"],
    list_pretrained=lambda pattern: [pattern.replace("*", "a1")],
    get_pretrained_cfg=get_pretrained_cfg,
    create_model=create_model,
)


def with_standin(call, *argv):
    sys.modules["timm"] = STANDIN
    return call(*argv)


def test_inputs_are_as_timm_says_unless_others_are_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", STANDIN)
    options, _ = decide(Options(model="timm:tiny"), World(devices=(Device("node1", "cpu", ""),)))
    assert (options.image_size, options.eval_size, options.eval_resize) == (16, None, 20)
    larger = Options(model="timm:tiny", image_size=32)
    other, _ = decide(larger, World(devices=(Device("node1", "cpu", ""),)))
    assert (other.image_size, other.eval_resize) == (32, 40)
    shape = torch.device("cpu"), torch.float32, torch.contiguous_format
    white = Normalise(*shape, *build.read_color_statistics(options))(
        torch.full((1, 3, 1, 1), 255).byte()
    )
    assert white.flatten().tolist() == pytest.approx([1, 2.4, 5.6])
    assert build.read_color_statistics(Options()) != build.read_color_statistics(options)


def test_a_run_of_one_saves_resumes_and_takes_its_weights(images, tmp_path):
    """Its head is what timm calls it; frozen behind it all stays. An argument reaches it."""
    argv = [trainer, "--data", images, "--model", "timm:tiny", "--workers", 0, "--epochs", 1]
    argv += ["--per_node_batch_size", 4, "--model_args", json.dumps({"drop_rate": 0.5})]
    assert run_ranks([1, 1], with_standin, *argv, "--output", tmp_path / "a") == [0, 0]
    weights = next((tmp_path / "a").glob("checkpoints/*/best.pt"))
    more = ["--output", tmp_path / "b", "--weights", weights, "--freeze", "backbone"]
    assert run_ranks([1, 1], with_standin, *argv, *more) == [0, 0]
    first, then = newest_checkpoint(tmp_path / "a"), newest_checkpoint(tmp_path / "b")
    assert then["options"]["image_size"] == "16"
    differing = {k for k in first["model"] if not torch.equal(first["model"][k], then["model"][k])}
    assert differing == {"8.weight", "8.bias"}


@pytest.mark.parametrize(
    "model, given, why",
    [
        ("timm:tiny", '{"width": 2}', "width"),
        ("timm:tny", "{}", "nearest: tiny"),
        ("timm:tiny.gone", "{}", "tiny.a1"),
        ("resnet18", '{"width": 2}', "width"),
        ("tests.trainer_models:plain", '{"width": 2}', "width"),
        ("tests.trainer_models:plain", "{", "no object in JSON"),
    ],
)
def test_names_and_arguments_that_are_none_are_a_sentence_on_all_ranks(images, model, given, why):
    argv = ["--data", images, "--workers", 0, "--model", model, "--model_args", given]
    for code, text in run_ranks([1, 1], with_standin, said, *argv):
        assert code == 2 and why in text and "Traceback" not in text
