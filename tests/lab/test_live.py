"""A run that goes on, on real machines over ssh: what `make status`, `make top` and `make report`
say in its middle is what the final report says of that part.

The trainer is a stand-in that sleeps: 0.2 s of computing, and 0.3 s for a network that it does not
have. TANDEM_LIVE_SECONDS says how long it runs.
"""

import json
import os
import shutil
import time
import uuid

import pytest

from report.analysis import analyse
from tests.lab import chaos_standin
from tests.lab.chaos_run import CHECKOUT, PATIENCE, Running

NODES, STEP, EXCHANGE = 2, 0.2, 0.3
SECONDS = float(os.environ.get("TANDEM_LIVE_SECONDS", "150"))
STEPS_PER_EPOCH = 13  # 97 images of the stand-in, 8 a step


def part(run, folder, step):
    """The run as if it had ended with this step: a copy with the records up to there."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints"))
    for path in folder.glob("nodes/*/rank*.steps.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [line for line in lines if line.get("step", 0) <= step and line["kind"] != "end"]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return analyse(folder)


def test_the_middle_of_a_run_is_told_as_in_the_end(start_lab, tmp_path):
    lab = start_lab("live", "--nodes", str(NODES), "--no-bundle")
    for node in range(1, NODES + 1):
        chaos_standin.install(lab, node)
    mark = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
    file = chaos_standin.inventory(tmp_path, NODES, mark, STEP, EXCHANGE)
    epochs = max(2, round(SECONDS / (STEP + EXCHANGE) / STEPS_PER_EPOCH))
    words = ("--inventory", str(file), "--data", "d", "--epochs", str(epochs))
    run = Running(lab, tmp_path, mark, *words)
    try:
        run.wait_for(r"\] step 3\n", NODES)
        time.sleep(SECONDS / 2)
        told = json.loads(lab.control("python", "-m", "launcher", "status", "--json").stdout)
        top = lab.control("python", "-m", "launcher", "top").stdout
        lab.control("python", "-m", "report", str(run.folder))
        report = (run.folder / "report.txt").read_text()
        middle = json.loads((run.folder / "summary.json").read_text())
        assert run.end(SECONDS + PATIENCE) == 0, run.said()
    finally:
        run.close()
    final = part(run.folder, tmp_path / "part", told["step"])
    assert told["images_per_second"] == pytest.approx(final.summary["images_per_second"], rel=0.05)
    assert middle["images_per_second"] == pytest.approx(
        final.summary["images_per_second"], rel=0.05
    )
    for name in ("backward", "sync_exposed"):
        told_steps = middle["steps"] / final.summary["steps"]
        seconds = final.summary["seconds"][name] * told_steps
        assert middle["seconds"][name] == pytest.approx(seconds, rel=0.05), name
    causes = {told["bottleneck"], middle["bottleneck"], final.summary["bottleneck"]}
    assert causes == {"network"}
    assert "this is what it did up to" in " ".join(report.split())
    assert "network: " in top and f"epoch {told['epoch']} of {epochs}" in top
    (line,) = [one for one in run.said().splitlines() if "`make report` says what to do" in one]
    wait = float(line.split()[2]) / float(line.split()[5])
    whole = analyse(CHECKOUT / "runs" / run.name).step
    assert wait == pytest.approx(whole.network / whole.seconds, rel=0.05)
