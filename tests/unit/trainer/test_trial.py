"""`--trial`: steps and their times, and nothing else."""

import dataclasses
import os

from contract.command_line import parse
from contract.options import Options
from contract.runs import RECORD
from tests.trainer_ranks import lines, make_images, run_ranks
from trainer.process import work


def tried(output, *words):
    common = ("--trial", "1", "--output", str(output), "--model", "examples.small_cnn:small_cnn")
    return work(parse([*common, "--per_node_batch_size", "8", "--device", "cpu", *words]))


def test_two_ranks_of_a_machine_time_steps_on_noise_and_save_nothing(tmp_path):
    words = ("--image_size", "16", "--accumulate", "2", "--bucket_mb", "3")
    assert run_ranks([2], tried, tmp_path, *words) == [0, 0]
    first, second = lines(tmp_path, "step")
    assert len(first) == len(second) >= 4
    assert all(line["seconds"]["backward"] > 0 for line in first)
    (start,), _ = lines(tmp_path, "start")
    assert (start["image_size"], start["global_batch"]) == (16, 8)
    assert set(start["options"]) == {field.name for field in dataclasses.fields(Options)}
    settled = {"accumulate": 2, "bucket_mb": 3, "sync_bn": False, "channels_last": False}
    assert {name: start["options"][name] for name in settled} == settled
    assert (start["record"], start["workers"]) == (RECORD, 0)
    assert {"torchvision", "numpy", "pillow", "kernel"} <= set(start["versions"])
    assert start["cores"] == len(os.sched_getaffinity(0))
    assert [end["status"] for (end,) in lines(tmp_path, "end")] == ["finished"] * 2
    assert not any(lines(tmp_path, "evaluate") + lines(tmp_path, "checkpoint"))
    assert not list(tmp_path.rglob("*.pt"))


def test_a_data_set_is_gone_through_again_until_the_time_is_over(tmp_path):
    make_images(tmp_path / "data", per_class=3)
    assert run_ranks([1], tried, tmp_path / "out", "--data", str(tmp_path / "data")) == [0]
    (steps,) = lines(tmp_path / "out", "step")
    assert sum(line["steps"] for line in steps) >= 4
    assert {line["samples"] / line["steps"] for line in steps} == {6}
    (start,) = lines(tmp_path / "out", "start")[0]
    assert start["train_images"] == 12
    assert not list(tmp_path.rglob("*.pt"))
