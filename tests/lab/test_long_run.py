"""Ten minutes of a run whose terminal shows nothing for one of them, and whose disk here takes
nothing for another."""

import json
import time
import uuid

from tests.lab import chaos_standin
from tests.lab.control_machine import CTRL_Q, CTRL_S, Controller, fill
from tests.lab.lineage import assert_exact
from tests.run_directory import document

EPOCHS, STEPS = 45, 13  # of a second each: 585
MINUTE = 60


def test_ten_minutes_with_a_minute_of_each_trouble(start_lab, small_disk, tmp_path):
    lab = start_lab("long", "--nodes", "2", "--no-bundle")
    for node in (1, 2):
        chaos_standin.install(lab, node)
    mark = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
    file = chaos_standin.inventory(tmp_path, 2, mark, step_seconds=1.0)
    asked = ("--inventory", str(file), "--data", "d", "--epochs", str(EPOCHS))
    disk = small_disk(1200)
    run = Controller(lab, tmp_path, mark, *asked, "--", "--sample_log", disk=disk, terminal=True)
    try:
        run.wait_for(r"\] step 20\n", 2)
        run.press(CTRL_S)
        time.sleep(MINUTE)
        assert run.process.poll() is None, (run.folder / "controller.log").read_text()
        run.press(CTRL_Q)
        run.wait_for(r"\] step 120\n", 2)
        full = fill(disk)
        time.sleep(MINUTE)
        full.unlink()
        for step in (*range(200, EPOCHS * STEPS, 100), EPOCHS * STEPS):
            run.wait_for(rf"\] step {step}\n", 2)
        assert run.end() == 0, run.said()
        assert document(run.folder / "summary.json") == document(run.folder / "attempts.json") == []
        summary = json.loads((run.folder / "summary.json").read_text())
        assert summary["status"] == "finished" and len(summary["attempts"]) == 1
        assert summary["wall_seconds"] > EPOCHS * STEPS and summary["first_cause"] is None
        assert (run.folder / "report.html").stat().st_size > 1000
        assert assert_exact(run.fetch([1, 2], tmp_path), EPOCHS) == 0
        assert run.processes() == []
    finally:
        run.close()
