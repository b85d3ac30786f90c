"""docs/own-script.md: the lines that make a script for one device one for several machines."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem import standalone
from tests.trainer_ranks import free_port

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples/own_script/one_device.py"
DIFF = re.search(r"```diff\n(.*?)```", (ROOT / "docs/own-script.md").read_text(), re.DOTALL)


def run(folder, *argv, **env):
    env = {**{name: text for name, text in os.environ.items() if name != "PYTHONPATH"}, **env}
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, env=env, input=DIFF[1])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def script(tmp_path):
    """Of one device, and what the page adds to it."""
    path = tmp_path / "train.py"
    shutil.copy(SCRIPT, path)
    return path


def test_the_page_s_lines_can_be_added(script):
    added = [line for line in DIFF[1].splitlines() if line.startswith("+") and line != "+"]
    assert len(added) == 11
    run(script.parent, "patch", "train.py")
    compile(script.read_text(), script, "exec")
    assert all(line[1:] in script.read_text() for line in added)


@pytest.mark.long
def test_these_lines_make_a_script_for_one_device_one_for_several_machines(script, tmp_path):
    alone = run(tmp_path, sys.executable, "train.py")
    assert re.findall(r"epoch \d", alone) == ["epoch 0", "epoch 1", "epoch 2"]
    run(tmp_path, "patch", "train.py")
    standalone.write(tmp_path / "library")
    # As a script's run has it (launcher/plan/plan.py); both ranks are one machine's, so sums are
    # exact.
    env = {"PYTHONPATH": str(tmp_path / "library"), "TANDEM_OUTPUT": str(tmp_path / "out")}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    launch += [f"--master_port={free_port()}", "train.py"]
    both = run(tmp_path, *launch, **env, TANDEM_NODE="here")
    losses = [float(one) for one in re.findall(r"loss ([\d.]+)", both)]
    assert len(losses) == 6 and max(losses[-2:]) < 0.5
    for rank in (0, 1):
        text = (tmp_path / f"out/nodes/here/rank{rank}.1.steps.jsonl").read_text()
        start, *steps, end = [json.loads(line) for line in text.splitlines()]
        took = sum(line["steps"] for line in steps)
        assert (start["global_batch"], took, end["status"]) == (64, 96, "finished")
