"""`timings.step(loss=...)`: what it records, when that is read, and what the report has of it."""

import json
import math
import re

import numpy as np
import pytest
import torch

from contract.errors import UserError
from report.analysis import analyse
from report.page import curve
from report.time_charts import charts_of
from report.view import Curve, Line
from tandem import step_lines, timings
from tandem.clock import Clock
from tests.trainer_ranks import lines
from tests.unit.report.report_runs import text_of

CPU = torch.device("cpu")


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """loop(scalars of each step): times such steps, and returns their lines."""
    monkeypatch.setenv("TANDEM_OUTPUT", str(tmp_path))
    monkeypatch.setattr(timings, "_current", None)
    monkeypatch.setenv("RANK", "0")

    def run(steps):
        for _, scalars in zip(timings.timed([torch.zeros(3, 2)] * len(steps), model), steps):
            timings.step(**scalars)
        timings._current._end()
        return lines(tmp_path, "step")[0]

    model = torch.nn.Linear(2, 2)
    return run


@pytest.mark.parametrize(
    "value",
    [
        2.5,
        torch.tensor(2.5, requires_grad=True) * 1,
        torch.tensor([2.5], dtype=torch.bfloat16),
        np.float32(2.5),
        np.array(2.5),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_value_is_whatever_a_loop_has_at_hand(loop, value):
    first, *later = loop([{"loss": value, "steps_of_a_bar": 3, "absent": None}] * 3)
    assert first["scalars"] == {"loss": 2.5, "steps_of_a_bar": 3.0}
    assert later[-1]["scalars"]["loss"] == 2.5


def test_a_line_of_several_steps_has_their_mean_and_the_first_step_that_was_not_finite():
    block = step_lines.Block()
    block.size = 3
    written = [
        block.add({"step": step, "samples": 4, "seconds": {"forward": 0.2}}, {"loss": loss, "x": 2})
        for step, loss in enumerate([1.0, 2.0, 4.5, 3.0, math.inf, math.nan, 6.0, 6.0, 6.0], 1)
    ]
    found = [(line["scalars"]["loss"], line.get("not_finite")) for line in written if line]
    assert found == [(2.5, None), (None, {"loss": 5}), (6.0, None)]


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"samples": torch.tensor(0.25)}, "name a value .* step\\(loss=loss\\)"),
        ({"logits": torch.zeros(4, 10)}, "logits is a Tensor of shape \\(4, 10\\)"),
        ({"phase": "train"}, "phase is a str"),
        ({f"s{number}": 0.0 for number in range(9)}, "s8 is one scalar too many"),
    ],
)
def test_what_is_not_one_of_eight_numbers_is_an_error_that_names_it(loop, scalars, message):
    with pytest.raises(UserError, match=message):
        loop([scalars])


class Coming:
    """A stand-in for scalars on their way from a GPU that is not the clock's."""

    arrived = False

    def have_arrived(self):
        return self.arrived

    def read(self):
        assert self.arrived
        return {"loss": 0.5}


def test_a_step_is_written_once_its_scalars_have_arrived(tmp_path, monkeypatch):
    written, coming = step_lines.Lines(str(tmp_path), "node1", 0, Clock(CPU)), Coming()
    monkeypatch.setattr(step_lines, "FLUSH_SECONDS", 0.0)
    written.add("step", scalars=coming, step=1, samples=4)
    written.flush_ready()
    assert lines(tmp_path) == [[]]
    coming.arrived = True
    written.flush_ready()
    assert lines(tmp_path)[0][0]["scalars"] == {"loss": 0.5}


def test_the_report_has_a_curve_of_each_scalar_and_names_the_step_and_rank_of_a_nan(tmp_path):
    """Rank 1's loss is lost in step 7, and rank 0's one step later."""
    for rank in (0, 1):
        start = {"kind": "start", "rank": rank, "world_size": 2, "mono": 1.0, "unix": 1.7e9}
        record = [{**start, "host": f"node{rank + 1}", "attempt": 1, "mono_process": 0.5}]
        for step in range(1, 11):
            lost = step >= 8 - rank
            entry = {"kind": "step", "step": step, "samples": 4, "seconds": {"forward": 1.0}}
            entry["scalars"] = {"loss": None if lost else 2.0 - rank, "reward": -float(step)}
            entry |= {"not_finite": {"loss": step}} if step == 8 - rank else {}
            record.append(entry)
        path = tmp_path / f"run/nodes/node{rank + 1}/rank{rank}.1.steps.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in record))
    analysis = analyse(tmp_path / "run")
    curves = {curve.title: curve.lines[0].points for curve in charts_of(analysis)}
    assert curves["loss"] == [(float(step), 1.5) for step in range(1, 7)] + [(7.0, 2.0)]
    assert [y for _, y in curves["reward"]] == [-float(step) for step in range(1, 11)]
    text = " ".join(text_of(analysis).split())
    assert "loss was NaN or infinite for the first time in step 7, on rank 1 (node2)." in text
    assert "reward -1 -10 -10 -1" in text


def test_a_curve_below_zero_stays_within_its_chart():
    drawn = curve(Curve("x", "", [Line("a", "n0", [(1.0, -3.0), (2.0, 2.0)])], steady=True))
    points = re.findall(r'points="(.*?)"', drawn)[0].split()
    assert [float(point.split(",")[1]) for point in points] == [184.0, 14.0]
