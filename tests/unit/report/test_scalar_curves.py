"""What the report shows of the scalars that a script recorded with `timings.step(loss=...)`."""

import json
import re

from report.analysis import analyse
from report.page import curve
from report.time_charts import charts_of
from report.view import Curve, Line
from tests.unit.report.report_runs import text_of


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
