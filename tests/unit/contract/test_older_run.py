"""Runs of before (tests/older_run/): two local nodes, three epochs of the digits. One is of commit
d188f90, the other of the last version whose records of a machine were six files.

Their folders are as they were written, but for a path and a host's name, and in the first one the
first seconds of iostat.json; beside them lie the model and the first one's checkpoint of step 8,
which was in the second of three epochs.
"""

import base64
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from contract.options import Options
from launcher import folders, run
from launcher.options import trainer_settings
from tests.trainer_ranks import free_port
from trainer.checkpoint import load
from trainer.resume import differing
from trainer.snapshots import snapshot_in

ROOT = Path(__file__).parents[3]
OLDER = ROOT / "tests/older_run"
NAME = "20261123T153609Z-tiny-2n"
# Of each its last top-1, images a second, seconds, and bytes that a node sent in a step.
RUNS = {
    NAME: (0.1634, 4182.2, 38.546, 1722),
    "20261125T013745Z-tiny-2n": (0.1634, 2703.9, 37.523, 1778),
}


@pytest.fixture
def older(tmp_path):
    return Path(shutil.copytree(OLDER / NAME, tmp_path / "runs" / NAME))


@pytest.mark.parametrize("name", RUNS)
def test_its_report_is_made(tmp_path, name):
    older = Path(shutil.copytree(OLDER / name, tmp_path / name))
    argv = [sys.executable, "-m", "report", str(older)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((older / "summary.json").read_text())
    assert (summary["status"], summary["epochs"], summary["steps"]) == ("finished", 3, 18)
    assert summary["nodes"] == 2
    names = ("final_top1", "images_per_second", "wall_seconds", "bytes_sent_per_step")
    assert [summary[name] for name in names] == pytest.approx(RUNS[name], rel=1e-3)
    assert summary["seconds"]["forward"] > 0 and summary["attempts"][0]["status"] == "finished"
    assert (older / "report.html").exists() and "EVALUATION" in done.stdout


def test_the_launcher_goes_on_with_its_options(older, monkeypatch):
    asked = []
    monkeypatch.setattr(folders, "RUNS", older.parent)
    monkeypatch.setattr(run, "check_machines", lambda options, *_: asked.append(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.resume(older.name, {"nodes": 1})
    (options,) = asked
    assert (options.nodes, options.trainer["model"]) == (1, "examples.tiny:tiny")
    assert options.trainer["per_node_batch_size"] == 128
    settings = trainer_settings(options)
    assert (settings.epochs, settings.precision, settings.lr, settings.keep) == (3, "fp32", 0.1, 9)


@pytest.mark.parametrize(
    ("asked", "taken", "now"),
    [
        ("ef:4", "ef:4", "ef:15:peak"),
        ("auto", "ef:1.6", "ef:3:peak"),
    ],
)
def test_a_run_whose_strategy_had_another_name_is_reported_and_goes_on(
    older, monkeypatch, asked, taken, now
):
    for file in older.glob("**/*.json*"):
        text = file.read_text().replace('"sync": "allreduce"', f'"sync": "{taken}"')
        file.write_text(text)
    plan = json.loads((older / "plan.json").read_text())
    plan["options"]["sync"] = asked
    (older / "plan.json").write_text(json.dumps(plan))
    argv = [sys.executable, "-m", "report", str(older)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((older / "summary.json").read_text())["sync"] == taken
    found = []
    monkeypatch.setattr(folders, "RUNS", older.parent)
    monkeypatch.setattr(run, "check_machines", lambda options, *_: found.append(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.resume(older.name, {"nodes": 1})
    assert found[0].trainer["sync"] == now
    state = snapshot_in("it", load("it", io.BytesIO(checkpoint())))
    state["options"]["sync"] = repr(taken)
    options = Options(**{"sync": now, "output": "."})
    assert "sync" not in differing(state, options, state["train_images"])


def checkpoint():
    return base64.b64decode((OLDER / "step-00000008.pt.b64").read_text())


@pytest.mark.long
def test_its_checkpoint_is_continued_by_the_trainer_alone(tmp_path):
    """Under bare torchrun, by trainer/ and contract/ in a folder that holds nothing else of the
    checkout."""
    for room in ("trainer", "tandem", "contract"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "examples").mkdir()
    shutil.copy(OLDER / "tiny.py", tmp_path / "examples/tiny.py")
    digits = tmp_path / "digits"
    subprocess.run([sys.executable, ROOT / "examples/digits.py", digits], check=True)
    saved = tmp_path / "step-00000008.pt"
    saved.write_bytes(checkpoint())
    plan = json.loads((OLDER / NAME / "plan.json").read_text())
    node = plan["nodes"][0]["argv"]
    words = node[node.index("--model") :]
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    argv += [f"--master_port={free_port()}", "-m", "trainer", "--data", str(digits)]
    argv += ["--output", "out", *words, "--resume", str(saved)]
    env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    env = {**env, "OMP_NUM_THREADS": "1", "TANDEM_NODE": "here"}
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "epoch 3/3" in done.stdout and "epoch 1/3" not in done.stdout, done.stdout
