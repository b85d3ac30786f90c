"""Stopped anywhere, by anything, a run ends with the weights of a run that was never stopped."""

import functools
import os
import random
import signal
import time

import pytest
import torch

from tandem.pickles import load_tensors
from tests.trainer_ranks import (
    CONTEXT,
    end,
    newest_checkpoint,
    run_ranks,
    start_ranks,
    steps_done,
    trainer,
    wait_for_steps,
)
from trainer.writer import Writer, is_complete

ARGV = [
    "--model", "tests.trainer_models:normed", "--precision", "fp32", "--augment", "shift",
    "--mixup", 0.2, "--ema", 0.9, "--accumulate", 2, "--per_node_batch_size", 8, "--epochs", 10,
    "--checkpoint_every", 3, "--log_every", 1, "--evaluate_every", 10, "--workers", 0,
    "--resume", "auto",
]  # fmt: skip
REPEATED = ("--repeat_augment", 4, "--loss", "bce", "--bce_threshold", 0.2)
NODES = [1, 1, 1]


def argv(images, output, *more):
    return ["--data", images, "--output", output, *ARGV, *more]


@pytest.fixture(scope="module")
def undisturbed(images, tmp_path_factory):
    """undisturbed(*more) -> the last checkpoint of a run that nobody ended."""

    @functools.cache
    def run(*more):
        output = tmp_path_factory.mktemp("undisturbed")
        assert run_ranks(NODES, trainer, *argv(images, output, *more), quiet=True) == [0, 0, 0]
        return newest_checkpoint(output)

    return run


def same(ours, theirs):
    for part in ("model", "ema"):
        ours_part = ours[part].get("average", ours[part])
        theirs_part = theirs[part].get("average", theirs[part])
        assert all(torch.equal(ours_part[key], theirs_part[key]) for key in theirs_part)
    assert ours["step"] == theirs["step"]


@pytest.mark.parametrize("most, epochs", [(3, 10), pytest.param(20, 30, marks=pytest.mark.long)])
def test_kills_change_no_bit(images, undisturbed, tmp_path, most, epochs):
    kills, chance, more = 0, random.Random(1), ("--epochs", epochs, *REPEATED)
    while kills < most:
        started = start_ranks(NODES, trainer, *argv(images, tmp_path, *more), quiet=True)
        wait_for_steps(tmp_path, steps_done(tmp_path) + chance.randint(4, 12), started)
        kills += any(child.is_alive() for child, _ in started)
        end(started, signal.SIGKILL)
        saved = [*tmp_path.glob("checkpoints/node1/step-*.pt")]  # none yet after an early kill
        if saved and newest_checkpoint(tmp_path)["epoch"] == epochs:
            break
    assert kills == most
    assert run_ranks(NODES, trainer, *argv(images, tmp_path, *more), quiet=True) == [0, 0, 0]
    same(newest_checkpoint(tmp_path), undisturbed(*more))


def test_one_rank_told_to_stop_stops_all_at_one_step(images, undisturbed, tmp_path):
    started = start_ranks(NODES, trainer, *argv(images, tmp_path), quiet=True)
    wait_for_steps(tmp_path, 20, started)
    os.kill(started[1][0].pid, signal.SIGTERM)
    assert [pipe.recv() for _, pipe in started] == [(True, 75)] * 3
    steps = {newest_checkpoint(tmp_path, host)["step"] for host in ("node1", "node2", "node3")}
    assert len(steps) == 1
    assert run_ranks(NODES, trainer, *argv(images, tmp_path), quiet=True) == [0, 0, 0]
    same(newest_checkpoint(tmp_path), undisturbed("--epochs", 10))


def test_five_ranks_then_three_see_each_sample_once(images, tmp_path):
    more = ("--sample_log", "--epochs", 3)
    first = start_ranks([1] * 5, trainer, *argv(images, tmp_path, *more), quiet=True)
    wait_for_steps(tmp_path, 6, first)
    end(first, signal.SIGKILL)
    position = max(newest_checkpoint(tmp_path, f"node{n}")["samples"] for n in range(1, 6))
    second = {"TANDEM_ATTEMPT": 2}
    run_ranks([1] * 3, trainer, *argv(images, tmp_path, *more), env=second, quiet=True)
    seen = []
    for path in (tmp_path / "samples").glob("*.csv"):
        attempt = path.name.split(".")[1]
        for line in path.read_text().splitlines()[1:]:
            epoch, place, index = map(int, line.split(","))
            counted = epoch * 164 + place < position if attempt == "1" else True
            seen += [(epoch, index)] * counted
    assert sorted(seen) == [(epoch, index) for epoch in range(3) for index in range(164)]


def save_for_ever(folder, pipe):
    writer, step = Writer(folder, keep=3), 0
    pipe.send("ready")
    while True:
        step += 1
        tensor = torch.full((200_000,), float(step))
        writer.save({"step": step, "model": {"weight": tensor}}, best=step % 2 == 0)


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.long)])
def test_killed_while_saving_leaves_whole_checkpoints(tmp_path, kills):
    """After each kill, whatever has a checkpoint's name loads and is what was saved."""
    chance, seen = random.Random(2), 0
    for _ in range(kills):
        ours, theirs = CONTEXT.Pipe()
        child = CONTEXT.Process(target=save_for_ever, args=(tmp_path, theirs))
        child.start()
        assert ours.recv() == "ready"
        while not any(tmp_path.glob("*.pt")):
            assert child.is_alive()
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        for path in tmp_path.glob("*.pt"):
            assert is_complete(path)
            with path.open("rb") as file:
                found = load_tensors(file)
            assert (found["model"]["weight"] == found["step"]).all()
            seen += 1
    assert seen >= kills
