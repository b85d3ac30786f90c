"""Whole runs of the trainer: resumed to the bit, evaluated, carried to a CPU and back."""

import json
import shutil

import pytest
import torch

from tandem.pickles import load_tensors
from tests.gpu.jobs import HALF, distance
from tests.gpu.ranks import TWO, on_one_device
from tests.trainer_ranks import run_ranks, trainer

NEEDS_GPU = pytest.mark.needs_gpu
MIXED = ["--accumulate", 2, "--mixup", 0.2, "--per_node_batch_size", 6]


def run(output, images, device, *argv, nodes=(1,), **settings):
    """The trainer's exit codes; several ranks share the device."""
    words = ["--data", images, "--output", output, "--model", "tests.trainer_models:normed"]
    words += ["--device", device if isinstance(device, str) else device.type, "--workers", 0]
    words += ["--per_node_batch_size", 12, "--epochs", 2, *argv]
    return run_ranks(list(nodes), on_one_device, trainer, *words, quiet=True, **settings)


def state(output, name="step-*.pt"):
    newest = sorted(output.glob(f"checkpoints/*/{name}"))[-1]
    with newest.open("rb") as file:
        return load_tensors(file)


def lines(output, kind):
    every = [json.loads(line) for path in output.glob("nodes/*/*.jsonl") for line in path.open()]
    return [line for line in every if line["kind"] == kind]


def begun(whole, output, step):
    """A folder of a run that was cut off after this step."""
    files = list(whole.glob(f"checkpoints/*/step-{step:08d}.pt"))
    assert files
    for file in files:
        place = output / file.relative_to(whole)
        place.parent.mkdir(parents=True)
        shutil.copy(file, place)
    return output


@pytest.mark.parametrize(
    "precision, nodes, more",
    [
        ("fp32", [1], []),
        pytest.param("fp32", TWO, MIXED, marks=pytest.mark.quick),
        ("bf16", [1], ["--emulate", "--channels_last", "true"]),
        *(pytest.param(level, [1], [], marks=NEEDS_GPU) for level in HALF),
        pytest.param("O2", TWO, ["--sync_bn", "--per_node_batch_size", 6], marks=NEEDS_GPU),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(images, device, tmp_path, precision, nodes, more):
    argv = ["--precision", precision, "--checkpoint_every", 3, "--keep", 9, "--ema", 0.9, *more]
    argv += ["--deterministic"]
    whole = tmp_path / "whole"
    assert set(run(whole, images, device, *argv, nodes=nodes)) == {0}
    again = begun(whole, tmp_path / "again", 6)
    argv += ["--resume", "auto"]
    assert set(run(again, images, device, *argv, nodes=nodes)) == {0}
    ours, theirs = state(again), state(whole)
    assert ours["step"] == theirs["step"] == 8
    assert lines(again, "start")[0]["resumed_samples"] > 0
    for name, value in theirs["model"].items():
        assert torch.equal(ours["model"][name], value), name
    for name, value in theirs["ema"]["average"].items():
        assert torch.equal(ours["ema"]["average"][name], value), name
    assert ours["precision"] == theirs["precision"]


@NEEDS_GPU
@pytest.mark.parametrize("one, other", [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_goes_on_on_the_other_device(images, tmp_path, one, other):
    """In fp64, where both compute the same; by a model whose chance is none."""
    argv = ["--precision", "fp64", "--model", "tests.gpu.models:fixed", "--checkpoint_every", 3]
    argv += ["--keep", 9]
    whole = tmp_path / "whole"
    assert run(whole, images, one, *argv) == [0]
    again = begun(whole, tmp_path / "again", 3)
    assert run(again, images, other, *argv, "--resume", "auto") == [0]
    assert distance(state(again)["model"], state(whole)["model"]) < 1e-8


@NEEDS_GPU
def test_predictions_are_the_same_on_both_devices(images, tmp_path):
    argv = ["--precision", "fp64"]
    assert run(tmp_path, images, "cuda", *argv) == [0]
    tables = []
    for device in ("cuda", "cpu"):
        table = tmp_path / f"{device}.csv"
        assert run(tmp_path, images, device, *argv, "--resume", "auto", "--predict", table) == [0]
        tables.append(table.read_text())
    assert tables[0] == tables[1]


@NEEDS_GPU
@pytest.mark.parametrize("precision", ["fp32", "bf16", "O2"])
@pytest.mark.parametrize("kind", [["dp"], ["balanced-dp", "--gpu0_batch", 5]])
def test_dp_on_one_gpu_computes_what_one_process_does(images, tmp_path, precision, kind):
    argv = ["--precision", precision, "--model", "tests.gpu.models:fixed", "--emulate"]
    assert run(tmp_path / "plain", images, "cuda", *argv) == [0]
    assert run(tmp_path / "dp", images, "cuda", *argv, "--parallel", *kind) == [0]
    ours, theirs = (state(tmp_path / name)["model"] for name in ("dp", "plain"))
    assert distance(ours, theirs) < (1e-4 if precision == "fp32" else 0.1)


@NEEDS_GPU
def test_a_layer_without_a_deterministic_kernel_is_refused_by_name(images, tmp_path):
    """torch raises; the run does not go on with other bits."""
    argv = ["--data", images, "--device", "cuda", "--deterministic", "--workers", 0]
    argv += ["--model", "tests.gpu.models:pooled", "--per_node_batch_size", 12]
    with pytest.raises(AssertionError, match=r"(?s)adaptive_avg_pool2d_backward.*deterministic"):
        run_ranks([1], trainer, *argv)
