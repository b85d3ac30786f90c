"""The terminal text and the page: their limits, and that both show what was found."""

import csv
import json
import re
import subprocess

import pytest

from report.__main__ import main
from report.analysis import analyse
from report.page import curve
from report.run_view import evaluation_section
from report.time_charts import charts_of
from report.view import Curve, Line
from tests.unit.report.report_runs import (
    BOTTLENECKS,
    RunBuilder,
    change,
    change_lines,
    page_of,
    text_of,
)


def test_text_stays_within_80_columns_of_ascii(tmp_path):
    settings = {"nodes": 12, "gpu": True, "mounts": 1.0, **BOTTLENECKS["network"]}
    analysis = analyse(RunBuilder(tmp_path / "run", **settings).write())
    text = text_of(analysis)
    assert text.isascii() and "\033" not in text
    assert max(map(len, text.splitlines())) <= 80
    # Machines stand in the order of their numbers.
    uses, hosts = analysis.uses, [f"node{n}" for n in range(1, 13)]
    assert [use.host for use in uses.disks] == [use.host for use in uses.networks] == hosts


def test_page_is_one_small_offline_file_with_a_text_for_every_chart_and_table(tmp_path):
    settings = {**BOTTLENECKS["network"], "step": {"sync_exposed": 0.2}}
    run = RunBuilder(tmp_path / "run", nodes=16, steps=200, epochs=100, gpu=True, **settings)
    page = page_of(analyse(run.write()))
    assert len(page.encode()) < 300_000
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    charts = re.findall(r'<svg [^>]*role="img" aria-label="[^"]{20,}"', page)
    assert len(charts) == page.count("<svg") >= 6
    assert page.count("<th ") == page.count("<th scope=")
    assert page.count("<table") == page.count("<caption>")


def test_what_a_run_says_of_itself_cannot_become_markup(tmp_path):
    builder = RunBuilder(tmp_path / "run", model="<script>alert(1)</script>")
    builder.hosts = ["<b>node1", *builder.hosts[1:]]
    builder.write()
    page = page_of(analyse(tmp_path / "run"))
    assert "<script" not in page
    assert "<b>node1" not in page


MEASURED = """<pre id="out"></pre><iframe id="page" width="400" height="800"></iframe><script>
const page = document.getElementById("page");
page.style.border = 0;
page.onload = () => {{
  const found = page.contentDocument.documentElement.scrollWidth;
  document.getElementById("out").textContent = `as wide as ${{found}}`;
}};
page.srcdoc = {page};
</script>"""


@pytest.mark.needs("chromium")
def test_a_narrow_window_does_not_scroll_sideways(tmp_path):
    settings = {**BOTTLENECKS["slow_link"], "model": "a_module.of_mine:" + "a_long_name_" * 5}
    page = page_of(analyse(RunBuilder(tmp_path / "run", gpu=True, **settings).write()))
    text = json.dumps(page).replace("</", "<\\/")
    (tmp_path / "measured.html").write_text(MEASURED.format(page=text))
    argv = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    argv += ["--virtual-time-budget=5000", f"file://{tmp_path}/measured.html"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    (width,) = re.findall(r"as wide as (\d+)", done.stdout)
    assert 300 < int(width) <= 400


def test_what_the_page_says_beside_the_text(tmp_path):
    builder = RunBuilder(tmp_path / "run", **{**BOTTLENECKS["network"], "parts": [38, 38, 16, 36]})
    builder.write()
    builder.write_control(wall_seconds=2 * builder.wall)
    change(tmp_path / "run/plan.json", options={"model": "resnet50", "trainer": []})
    analysis = analyse(tmp_path / "run")
    page = page_of(analysis)
    assert 'class="c-gap"' in page
    assert "Images of a step (BALANCE): node1 38" in page
    card = page[page.index('class="verdict') : page.index("Where the time went")]
    advice = analysis.summary["advice"]
    assert card.count('<span class="money">') == sum(one["costs_money"] for one in advice) == 2
    assert f">{advice[0]['command']}</pre>" in card


def words_of(drawn):
    return re.findall(r"<text[^>]*>(.*?)</text>", drawn)


def test_a_line_is_broken_where_nothing_was_recorded_and_its_axis_has_round_figures():
    seconds = [*range(1, 101), *range(200, 419)]
    drawn = curve(Curve("x", "", [Line("a", "n0", [(float(s), 1.0) for s in seconds])]))
    assert drawn.count("<polyline") == 2
    figures = [word for word in words_of(drawn) if word.endswith("min")]
    assert figures == ["6 min"]


def test_figures_of_an_axis_do_not_touch():
    points = [(float(epoch), 1.0) for epoch in range(1, 305)]
    drawn = curve(Curve("x", "", [Line("a", "n0", points)], "epochs"))
    figures = words_of(drawn)
    assert "300 epochs" in figures and "200" in figures and "250" not in figures


def test_one_loss_that_went_astray_does_not_flatten_the_others():
    points = [(float(epoch), 2.0 / epoch) for epoch in range(1, 30)] + [(30.0, 1029.0)]
    drawn = curve(Curve("Loss", "", [Line("a", "n0", points)], "epochs", steady=True))
    assert "the highest of all: 1,029" in words_of(drawn)
    assert "1,000" not in words_of(drawn)
    burst = Curve("Swap", "MB/s", [Line("a", "n0", points)])
    assert "1,000" in words_of(curve(burst))


def test_what_was_recorded_is_drawn_over_time_by_machine(tmp_path):
    analysis = analyse(RunBuilder(tmp_path / "run", steps=2000, gpu=True).write())
    page = page_of(analysis)
    titles = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert titles == [
        *("Images per second", "One step, ms", "Share of the steps that waits, %"),
        *("Network card, sent, MB/s", "Disk, read, MB/s", "Disk, busy, %"),
        *("Processors, busy, %", "Waits for a processor, %", "Memory, used, %"),
        *("GPU, resident, %", "GPU, power, W", "GPU, temperature, C", "GPU, clock, MHz"),
        *("Top-1, %", "Loss"),
    ]
    found = {one.title: one for one in charts_of(analysis)}
    power = {line.name: line.points for line in found["GPU, power"].lines}
    assert list(power) == ["node1", "node2", "node3", "node4"]
    assert {value for _, value in power["node2"]} == {180.0}
    sent = [value for _, value in found["Network card, sent"].lines[0].points[1:-2]]
    assert sum(sent) / len(sent) == pytest.approx(153.3 / 0.138, rel=0.1)


def test_a_step_in_twenty_that_takes_long_is_seen(tmp_path):
    run = RunBuilder(tmp_path / "run", steps=2000).write()
    for path in run.glob("nodes/*/rank*.steps.jsonl"):
        change_lines(path, lambda line: {**line, **slow_step(line)} if tenth(line) else None)
    spans = analyse(run).spans
    assert 50 < len(spans) <= 120
    assert [span.p50 for span in spans] == pytest.approx([0.138] * len(spans))
    assert [span.p95 for span in spans] == pytest.approx([1.098] * len(spans))


def slow_step(line):
    seconds = {**line["seconds"], "forward": 1.0}
    return {"seconds": seconds, "longest": sum(seconds.values())}


def tenth(line):
    return line["kind"] == "step" and line["step"] % 10 == 0


def test_what_is_drawn_is_in_a_file_for_scripts(tmp_path):
    run = RunBuilder(tmp_path / "run", gpu=True).write()
    assert main([str(run)]) == 0
    rows = list(csv.DictReader((run / "series.csv").open()))
    assert {"GPU, power", "One step", "top-1", "loss, training"} <= {row["what"] for row in rows}
    top1 = [row for row in rows if row["what"] == "top-1"]
    assert [(row["of"], float(row["value"])) for row in top1] == [
        ("epoch 1", 0.7),
        ("epoch 2", 0.9),
    ]
    page = (run / "report.html").read_text()
    linked = re.findall(r'href="([^"]+)"', page)
    assert linked == ["summary.json", "series.csv", "report.txt"]
    assert all((run / name).exists() for name in linked)
    assert "2023-11-14 22:13 UTC" in page
    assert "0.29.2" in page


def test_a_restart_stalls_and_a_failure_are_marked_in_the_charts(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.attempt = 2
    made = builder.write()
    path = made / "nodes/node2/rank1.2.steps.jsonl"
    lines = path.read_text().splitlines()
    for place, length in ((100, 39.0), (50, 9.0)):  # one is too short for a mark
        step = json.loads(lines[place])
        step["seconds"]["sync_exposed"] += length
        step.pop("longest", None)
        stall = {"kind": "stall", "category": "sync_exposed", "idle": 5.0}
        lines[place : place + 1] = [json.dumps(stall), json.dumps(step)]
    path.write_text("\n".join(lines) + "\n")
    begun = {"attempt": 1, "status": "failed", "nodes": ["node1"]}
    samples = builder.per_epoch * builder.batch * 4
    later = {"attempt": 2, "status": "failed", "resumed_samples": samples / 2}
    change(made / "attempts.json", status="failed", attempts=[begun, {**begun, **later}])
    analysis = analyse(made)
    *some, failed = charts_of(analysis)[0].marks
    assert [some[0].x, failed.words] == [0.0, "failure"]
    (stall,) = some[1:]
    assert "39 s" in stall.words and 0 < stall.x < failed.x
    assert [mark.x for mark in evaluation_section(analysis).items[0].curves[0].marks] == [0.5]
    page = page_of(analysis)
    drawn = [page.count(f">{mark.words}</text>") for mark in (*some, failed)]
    assert min(drawn) == len(charts_of(analysis)) and page.count('class="mark"') == sum(drawn)
