"""The terminal text and the page: their limits, and that both show what was found."""

import re

import pytest

from report import charts
from report.analysis import analyse
from report.page import render_page
from report.templates import bound
from report.text import render_text
from tests.unit.report.report_runs import BOTTLENECKS, RunBuilder


@pytest.mark.parametrize("cause", BOTTLENECKS)
def test_text_stays_within_80_columns_of_ascii(tmp_path, cause):
    settings = {"nodes": 12, "gpu": True, **BOTTLENECKS[cause]}
    text = render_text(analyse(RunBuilder(tmp_path / "run", **settings).write()))
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80
    assert "\033" not in text


def test_page_is_one_small_offline_file(tmp_path):
    run = RunBuilder(tmp_path / "run", nodes=16, steps=4000, epochs=100, gpu=True).write()
    page = render_page(analyse(run))
    assert len(page.encode()) < 300_000
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)


def test_page_has_a_text_alternative_for_every_chart(tmp_path):
    page = render_page(analyse(RunBuilder(tmp_path / "run", **BOTTLENECKS["network"]).write()))
    assert page.count("<svg") >= 6
    assert len(re.findall(r'<svg [^>]*role="img" aria-label="[^"]{20,}"', page)) == page.count(
        "<svg"
    )


def test_what_a_run_says_of_itself_cannot_become_markup(tmp_path):
    builder = RunBuilder(tmp_path / "run", model="<script>alert(1)</script>")
    builder.hosts = ["<b>node1", *builder.hosts[1:]]
    builder.write()
    page = render_page(analyse(tmp_path / "run"))
    assert "<script" not in page
    assert "<b>node1" not in page


def test_a_gap_is_drawn_as_a_gap(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.write()
    builder.write_control(wall_seconds=2 * builder.wall)
    analysis = analyse(tmp_path / "run")
    assert re.search(r"not accounted for +50.0%", render_text(analysis))
    assert 'class="c-gap"' in render_page(analysis)


def test_bars_of_a_chart_add_up_to_its_width():
    drawn = charts.stacked_bars([("all", [("data", 3.0), ("gap", 1.0)])], 4.0, "s", "x")
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', drawn)]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
    assert sum(widths) == pytest.approx(charts.WIDTH - charts.RIGHT - 120, abs=0.2)


@pytest.mark.parametrize(("end", "expected"), [(1, 6), (7, 8), (100, 6), (53.5, 6), (0.03, 7)])
def test_ticks_are_round_and_few(end, expected):
    ticks = charts.ticks(end)
    assert len(ticks) == expected
    assert ticks[0] == 0
    assert ticks[-1] <= end


def test_figures_stay_with_their_units():
    assert bound("takes 1.23 s at 1 Gbit/s, 90 % of 4 nodes") == (
        "takes 1.23\u00a0s at 1\u00a0Gbit/s, 90\u00a0% of 4 nodes"
    )
