"""`make demo` as the README has it: no root, four local nodes, an old CPU's instructions."""

import json
import os
import re
import subprocess

import pytest

from tests import run_directory
from tests.train.script_runs import CHECKOUT
from tests.unit.test_pages import without_values

pytest.importorskip("fabric", reason="the demo needs the control node's environment")
LIMITS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def test_the_demo_learns_the_digits_with_the_instructions_of_an_old_cpu():
    # QUEUE: somebody may try the demo on this machine.
    demo = ["make", "--silent", "demo", "QUEUE=1"]
    done = subprocess.run(
        demo, cwd=CHECKOUT, env={**os.environ, **LIMITS}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = {without_values(line) for line in done.stdout.splitlines()}
    shown = re.search(r"^```text\n(.*?)^```", (CHECKOUT / "README.md").read_text(), re.M | re.S)[1]
    assert {without_values(line) for line in shown.splitlines()} <= printed
    assert (
        "tandem: everything is in #"
        in {without_values(line) for line in done.stderr.splitlines()} | printed
    )
    run = CHECKOUT / "runs/latest"
    assert run_directory.problems(run) == []
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["nodes"], summary["world_size"]) == ("finished", 4, 4)
    assert "too short to judge" not in (run / "report.txt").read_text()  # on any PC
    assert summary["final_top1"] >= 0.98
    # Of rank 0, in the trainer's last line of an epoch, and of all ranks.
    said = float(re.findall(r"val [\d.]+ [\d.]+%  (\d+) images/s", done.stdout)[-1])
    assert said == pytest.approx(summary["images_per_second"], rel=0.05)
    starts = [
        json.loads(path.read_text().splitlines()[0])
        for path in run.glob("nodes/*/rank*.steps.jsonl")
    ]
    told = [start["instructions"] for start in starts]
    assert told == [{"aten": "AVX2", "onednn_limit": "AVX2"}] * 4
    assert {start["device"] for start in starts} == {os.uname().machine}
