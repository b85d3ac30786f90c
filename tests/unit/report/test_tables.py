"""The terminal and the page show the same tables: columns, rows and cells."""

import re
from html.parser import HTMLParser

import pytest

from report import tables
from report.analysis import analyse
from report.progress import Epoch
from report.run_view import view_of
from report.text import aligned
from report.view import Table, table
from tests.unit.report.report_runs import BOTTLENECKS, RunBuilder, page_of, text_of


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
    return re.search(rf"^{title}.*\n((?:  .*\n)+)", text, re.M).group(1).splitlines()


@pytest.fixture
def analysis(tmp_path):
    return analyse(RunBuilder(tmp_path / "run", gpu=True, **BOTTLENECKS["network"]).write())


def test_text_and_page_show_the_same_columns_and_cells(analysis):
    view = view_of(analysis)
    shown = {
        section.title: item
        for section in view.sections
        for item in section.items
        if isinstance(item, Table)
    }
    assert {"Disks", "Network", "GPUs", "Memory", "Machines"} <= shown.keys()
    on_page = Cells(page_of(analysis)).tables
    for title, item in shown.items():
        wanted = [list(row) for row in (item.heads, *item.rows)]
        assert len(wanted) > 2 and wanted in on_page
        lines = lines_of(text_of(analysis), title.upper())
        cells = [re.split(r"  +", line.strip()) for line in lines]
        assert [row for row in cells if row in wanted] == wanted


def test_both_say_the_same_of_what_ran(tmp_path):
    folder = RunBuilder(tmp_path / "run", **BOTTLENECKS["network"]).write()
    for path in folder.glob("nodes/*/rank*.jsonl"):
        lines = path.read_text().replace('"accumulate": 1', '"accumulate": 4')
        path.write_text(lines.replace('"onednn_limit": null', '"onednn_limit": "AVX2"'))
    analysis = analyse(folder)
    said = ["M parameters", "224 px", " in 4 micro-", "torch 2.15.0", "limited to AVX2"]
    text, page = " ".join(text_of(analysis).split()), page_of(analysis)
    assert [words for words in said if words not in text] == []
    assert [words for words in said if words not in page.replace("\u00a0", " ")] == []


def test_where_columns_are_too_few_names_are_cut_and_no_figure():
    heads = ("node", "card", *(f"figure{n}" for n in range(7)))
    rows = [("node1", "enx0123456789ab", *["123,456"] * 7)]
    lines = aligned([heads, *rows], "ll")
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
    assert re.search(r"% +1\.00 +0\.50\n", text_of(analysis))


def test_a_loss_of_any_size_keeps_its_column():
    score = {"epoch": 1, "top1": 0.1, "top5": 0.5, "seconds": 1.0}
    astray = Epoch(**score, loss=3.3e24, train_loss=1_898_571_906.8)
    well = Epoch(**score, loss=2.291, train_loss=9408.9)
    rows = table("", tables.EPOCHS, [astray, well]).rows
    assert [row[3:] for row in rows] == [("2e+09", "3e+24"), ("9,409", "2.29")]
