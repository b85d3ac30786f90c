"""rank<k>.<attempt>.steps.jsonl: lines by time, none of which makes the host wait for a device."""

import json
import types

import pytest

from tandem import step_lines
from tandem.clock import Lap


class Device:
    """A stand-in for a GPU's clock: a lap can be read once the device has passed its end."""

    def __init__(self):
        self.done, self.laps, self.waits = 0, 0, 0
        self.category = "forward"

    def lap(self):
        self.laps += 1
        return Lap(["forward"], [self.laps])

    def passed(self, lap):
        return lap.moments[0] <= self.done

    def read(self, lap, patience=None):
        self.waits += not self.passed(lap)
        return {"forward": 0.5}  # so that each step has a line


@pytest.fixture
def made(tmp_path, monkeypatch):
    now = types.SimpleNamespace(seconds=50.0)
    monkeypatch.setattr(step_lines.time, "monotonic", lambda: now.seconds)
    monkeypatch.setenv("TANDEM_NODE", "node1")
    device = Device()
    lines = step_lines.Lines(str(tmp_path), "node1", 0, device)

    def written():
        text = (tmp_path / "nodes/node1/rank0.1.steps.jsonl").read_text()
        return [json.loads(line)["step"] for line in text.splitlines()]

    return lines, device, now, written


def test_once_a_second_what_the_device_has_passed_is_written_without_a_wait(made):
    lines, device, now, written = made
    counts = []
    for step in range(1, 9):
        lines.add("step", step=step, samples=4)
        device.done = step - 3
        now.seconds += 0.25
        lines.flush_ready()
        counts.append(len(written()))
    assert counts == [0, 0, 0, 1, 1, 1, 1, 5]
    lines.flush_ready()
    assert (written(), device.waits) == ([1, 2, 3, 4, 5], 0)
    lines.flush()
    assert written() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert device.waits == 3


def test_a_rank_that_stalls_says_where_once_a_category(made, tmp_path):
    lines, device, now, _ = made
    lines.add("step", step=7, samples=4)
    lines.flush()
    for category in ("forward", "sync_exposed", "sync_exposed"):
        device.category = category
        now.seconds += 4.0
        lines.report_stall()
        lines.report_stall()
    lines.add("step", step=8, samples=4)
    lines.report_stall()
    lines.flush()
    text = (tmp_path / "nodes/node1/rank0.1.steps.jsonl").read_text()
    told = [json.loads(line) for line in text.splitlines()]
    assert [line.get("category") for line in told] == [None, "sync_exposed", None]
    assert told[1] == {"kind": "stall", "category": "sync_exposed", "step": 7, "idle": 8.0}
