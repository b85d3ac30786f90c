"""A signal to every process of a run, as Slurm's scancel, systemd and a terminal send it."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

from contract.errors import STOPPED
from tandem.compat import load_tensors
from tests.trainer_ranks import run_ranks, steps_done, trainer

PATIENCE = 60  # seconds in which all are to be gone, on a machine that does other things too


def argv(images, output, *more):
    """A crop has to be decoded anew in each epoch, by the loader processes."""
    words = ["--data", images, "--output", output, "--model", "tests.trainer_models:normed"]
    words += ["--augment", "crop", "--per_node_batch_size", 8, "--epochs", 20, "--resume", "auto"]
    return [str(word) for word in (*words, "--precision", "fp32", "--log_every", 1, *more)]


def weights(output):
    newest = max(output.glob("checkpoints/node1/step-*.pt"))
    with newest.open("rb") as file:
        state = load_tensors(file)
    return state["step"], state["model"]


def group_of(session):
    """The processes that are left of a session."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found += [int(path.parent.name)] * (int(fields[3]) == session and fields[0] != "Z")
    return found


def end_of(process):
    """Its exit code, once nothing of its session is left."""
    until = time.monotonic() + PATIENCE
    try:
        code = process.wait(PATIENCE)
        while group_of(process.pid):
            assert time.monotonic() < until, group_of(process.pid)
            time.sleep(0.05)
        return code
    finally:
        for pid in group_of(process.pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_sigterm_to_every_process_of_spawn_saves_and_no_bit_is_lost(images, tmp_path):
    """Two ranks with two loader processes each, and the process that started the ranks."""
    command = [sys.executable, "-m", "trainer", *argv(images, tmp_path / "a", "--spawn", 2)]
    env = {**os.environ, "TANDEM_NODE": "node1", "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        [*command, "--workers", "2"], env=env, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    while steps_done(tmp_path / "a") < 30:
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGTERM)
    assert end_of(run) == STOPPED, run.stderr.read()
    assert weights(tmp_path / "a")[0] < 20 * 21
    for output in ("a", "b"):
        more = ("--workers", 0)
        assert run_ranks([2], trainer, *argv(images, tmp_path / output, *more)) == [0, 0]
    resumed, undisturbed = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert resumed[0] == undisturbed[0]
    assert all(torch.equal(resumed[1][key], value) for key, value in undisturbed[1].items())
