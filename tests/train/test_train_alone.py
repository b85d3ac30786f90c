"""trainer/ and contract/ are all that training needs: copied into an empty folder, they run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.trainer_ranks import free_port, make_images

ROOT = Path(__file__).parents[2]


def test_a_copy_of_trainer_and_contract_trains_under_bare_torchrun(tmp_path):
    for room in ("trainer", "tandem", "contract"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    images = make_images(tmp_path / "images", per_class=4)
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    argv += [f"--master_port={free_port()}", "-m", "trainer", "--data", str(images)]
    argv += ["--model", "resnet18", "--sync", "ef:2", "--sync_warmup", "0", "--epochs", "2"]
    env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    env = {**env, "OMP_NUM_THREADS": "1", "TANDEM_NODE": "here"}
    argv += ["--image_size", "32", "--output", "out"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        lines = (tmp_path / f"out/nodes/here/rank{rank}.steps.jsonl").read_text().splitlines()
        assert json.loads(lines[0])["world_size"] == 2
    assert list((tmp_path / "out/checkpoints/here").glob("step-*.pt"))
