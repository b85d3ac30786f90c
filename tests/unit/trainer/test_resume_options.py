"""What follows from the precision is settled once, and kept by a run that goes on."""

import pytest
import torch

from contract.levels import Device
from contract.options import Options
from trainer.checkpoint import decisive
from trainer.resume import differing, resolve_options
from trainer.world import World
from trainer.writer import write_whole

AMPERE = Device("node1", "cuda", "RTX 3090", 86, torch="2.15.0", cuda="13.2")
TURING = Device("node3", "cuda", "GeForce RTX 2080 Ti", 75, torch="2.15.0", cuda="13.2")
CPU = Device("node1", "cpu", "x86_64", bf16=True, torch="2.15.0")


def settled(devices, name, **settings):
    return getattr(resolve_options(Options(**settings), World(devices=tuple(devices))), name)


@pytest.mark.parametrize(
    "devices, settings, on",
    [
        ([AMPERE, AMPERE], {}, True),
        ([TURING], {}, True),
        ([AMPERE], {"precision": "O2"}, True),
        ([AMPERE], {"precision": "fp32"}, False),
        ([AMPERE], {"precision": "O0"}, False),
        ([AMPERE], {"deterministic": True}, False),
        ([CPU], {"precision": "bf16"}, False),
    ],
)
def test_tensor_cores_get_their_memory_format_and_cudnn_s_fastest(
    monkeypatch, devices, settings, on
):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert settled(devices, "channels_last", **settings) is on
    assert torch.backends.cudnn.benchmark is on
    for asked in (True, False):
        assert settled(devices, "channels_last", channels_last=asked, **settings) is asked


@pytest.mark.parametrize("name", ["channels_last", "jpeg_scaling"])
def test_a_run_that_goes_on_keeps_what_it_began_with(monkeypatch, tmp_path, name):
    """On other machines too; and one that is older than the option does what it did."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    began = Options(precision="O1", **{name: True})
    state = {
        "model": {}, "optimizer": {}, "precision": {"scale": None}, "ema": None, "epoch": 0,
        "sample": 4, "step": 1, "best_top1": 0.0, "run": "1", "samples": 4, "train_images": 9,
        "classes": [], "options": decisive(began),
    }  # fmt: skip
    path, again = tmp_path / "checkpoints/node1/step-1.pt", {"output": str(tmp_path)}
    again["resume"] = "auto"
    write_whole(state, path)
    assert settled([TURING], "precision", **again) == "O1"
    assert settled([AMPERE], "deterministic", **again) is False
    assert settled([AMPERE], name, **again) is True
    assert settled([AMPERE], name, **again, deterministic=True) is True
    assert settled([AMPERE], name, **again, **{name: False}) is False
    del state["options"][name]
    write_whole(state, path)
    assert settled([AMPERE], name, **again) is False
    assert name in differing(state, Options(precision="O1", **{name: True}), 9)
    assert name not in differing(state, Options(precision="O1", **{name: False}), 9)
