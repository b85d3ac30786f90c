"""The terminal and the page show the same tables: columns, rows and cells."""

import re
from html.parser import HTMLParser

import pytest

from report import layout, tables
from report.analysis import analyse
from report.page import render_page
from report.progress import Epoch
from report.text import render_text
from tests.unit.report.report_runs import BOTTLENECKS, RunBuilder


class Cells(HTMLParser):
    """`tables`: rows of cells of each table of a page."""

    def __init__(self, page):
        super().__init__()
        self.tables, self.inside = [], False
        self.feed(page)

    def handle_starttag(self, tag, _):
        self.inside = tag in ("th", "td")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif self.inside:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("th", "td")

    def handle_data(self, data):
        if self.inside:
            self.tables[-1][-1][-1] += data.replace("\u00a0", " ")


def lines_of(text, title):
    """The lines of a section of the text below its title."""
    return re.search(rf"^{title}\w* .*\n((?:  .*\n)+)", text, re.M).group(1).splitlines()


@pytest.fixture
def analysis(tmp_path):
    return analyse(RunBuilder(tmp_path / "run", gpu=True, **BOTTLENECKS["network"]).write())


@pytest.mark.parametrize("name", ["disks", "networks", "gpus", "memory", "machines"])
def test_both_show_the_same_columns_and_cells(analysis, name):
    table = getattr(tables, name)(getattr(analysis, name))
    assert len(table.rows) >= 4
    on_page = Cells(render_page(analysis)).tables
    assert [list(row) for row in (table.heads, *table.rows)] in on_page
    in_text = lines_of(render_text(analysis), name.removesuffix("s").upper())
    for cells, line in zip((table.heads, *table.rows), in_text):
        assert re.split(r"  +", line.strip()) == list(cells)


def test_a_column_is_added_in_one_place(analysis, monkeypatch):
    column = tables.Column("seen", lambda use: f"by {use.host}")
    monkeypatch.setattr(tables, "GPUS", (*tables.GPUS[:3], column))
    assert "by node2" in render_text(analysis) and ">by node2<" in render_page(analysis)


def test_both_say_the_same_of_what_ran(tmp_path):
    folder = RunBuilder(tmp_path / "run", **BOTTLENECKS["network"]).write()
    for path in folder.glob("nodes/*/rank*.jsonl"):
        lines = path.read_text().replace('"accumulate": 1', '"accumulate": 4')
        path.write_text(lines.replace('"onednn_limit": null', '"onednn_limit": "AVX2"'))
    analysis = analyse(folder)
    said = ["M parameters", "224 px", " in 4 micro-", "torch 2.15.0", "limited to AVX2"]
    text, page = " ".join(render_text(analysis).split()), render_page(analysis)
    assert [words for words in said if words not in text] == []
    assert [words for words in said if words not in page.replace("\u00a0", " ")] == []


def test_where_columns_are_too_few_names_are_cut_and_no_figure():
    heads = ("node", "card", *(f"figure{n}" for n in range(7)))
    rows = [("node1", "enx0123456789ab", *["123,456"] * 7)]
    lines = layout.table([heads, *rows], tables.NAMES)
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[-7:] == ["123,456"] * 7
    assert lines[1].startswith("  node1  enx")


def test_memory_bad_images_and_losses_are_shown(tmp_path):
    folder = RunBuilder(tmp_path / "run", **BOTTLENECKS["network"]).write()
    for path, peak, bad in zip(sorted(folder.glob("nodes/*/rank*.jsonl")), (7, 3), (2, 0)):
        lines = path.read_text().replace(f": {10**9}", f": {peak * 10**9}")
        path.write_text(lines.replace('"bad_images": 0', f'"bad_images": {bad}'))
    analysis = analyse(folder)
    assert [(use.host, use.peak_memory, use.bad_images) for use in analysis.memory][:2] == [
        ("node1", 7e9, 2),
        ("node2", 3e9, 0),
    ]
    assert "1.00 in training, 0.50 on validation" in render_page(analysis)
    assert re.search(r"% +1\.00 +0\.50  ##", render_text(analysis))


def test_a_loss_of_any_size_keeps_its_column():
    score = {"epoch": 1, "top1": 0.1, "top5": 0.5, "seconds": 1.0}
    astray = Epoch(**score, loss=3.3e24, train_loss=1_898_571_906.8)
    assert tables.losses(astray) == ("2e+09", "3e+24")
    well = Epoch(**score, loss=2.291, train_loss=9408.9)
    assert tables.losses(well) == ("9,409", "2.29")
