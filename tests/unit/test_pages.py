"""The pages: each is reachable from README, and each link leads to something."""

import dataclasses
import re
import unicodedata
from pathlib import Path

import pytest

from contract import verbs
from contract.options import Options

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page):
    """The files that a page links to, outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in LINK.findall(text)]
    return [page.parent / one for one in targets if one and "://" not in one]


def pages():
    names = ("performance.md", "accuracy/README.md", "verdict.md")
    bench = [ROOT / "bench" / name for name in names]
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *bench]


def test_every_link_leads_to_a_file():
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', (ROOT / "README.md").read_text())
    assert pictures and all((ROOT / one).stat().st_size <= 300_000 for one in pictures)
    broken = [(page.name, str(one)) for page in pages() for one in links(page) if not one.exists()]
    assert broken == []


def headings(page):
    return re.findall(r"^#+ (.*?)\s*$", page.read_text(), re.MULTILINE)


def slug(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_part_that_a_page_names_is_there():
    """`page.md#anchor`, and a page's link followed by a heading of it in quotation marks."""
    named = []
    for page in pages():
        text = page.read_text()
        for target, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", text):
            there = map(slug, headings(page.parent / target if target else page))
            named.append((page.name, anchor, anchor in there))
        for target, heading in re.findall(r'\]\(([\w./-]+\.md)\),\s"([^"]+)"', text):
            heading = " ".join(heading.split())
            named.append((page.name, heading, heading in headings(page.parent / target)))
    assert len(named) > 5
    assert [one for one in named if not one[2]] == []


def test_every_test_that_a_page_names_is_there():
    """A file, or file::test, the latter also as `::test` after a file."""
    rooms = (ROOT / "tests", ROOT / "bench")
    there = [path for room in rooms for path in room.rglob("test_*.py")]
    defined = re.findall(r"^def (test_\w+)\(", "\n".join(map(Path.read_text, there)), re.MULTILINE)
    text = "\n".join(page.read_text() for page in pages())
    assert set(re.findall(r"\btest_\w+\.py\b", text)) <= {path.name for path in there}
    assert set(re.findall(r"::(test_\w+)", text)) <= set(defined)


def test_every_file_and_option_that_a_page_names_is_there():
    """Of the rooms; an option of the trainer is on its page."""
    text = "\n".join(page.read_text() for page in pages())
    named = re.findall(r"`((?:ansible|contract|launcher|report|tandem|trainer)/[\w./]+\.py)`", text)
    assert len(named) > 50 and {one for one in named if not (ROOT / one).is_file()} == set()
    options = re.findall(r"(?<![\w-])--([a-z0-9_]+)", (ROOT / "docs/trainer.md").read_text())
    known = {field.name for field in dataclasses.fields(Options)} | {"help", "best"}
    assert len(options) > 30 and set(options) <= known


def columns(line):
    """How wide a line is on a terminal: two columns for a character of Chinese."""
    return sum(1 + (unicodedata.east_asian_width(one) in "WF") for one in line)


def test_no_line_of_prose_is_wider_than_100_columns():
    """Tables and code apart."""
    wide = []
    for page in pages():
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        lines = [line for line in text.splitlines() if not line.startswith("|")]
        wide += [f"{page.name}: {line}" for line in lines if columns(line) > 100]
    assert wide == []


CHINESE = {
    "README.md": "README.zh-CN.md",
    "docs/cluster-guide.md": "docs/zh-CN/cluster-guide.md",
    "docs/pitfalls.md": "docs/zh-CN/pitfalls.md",
}


def outline(path):
    """The levels of a page's headings, what its code blocks type, what it names as a command, and
    how many rows its tables have; without comments and the choice of a mirror."""
    text = (ROOT / path).read_text()
    code = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    typed = [re.sub(r"\s+#.*", "", line) for line in "".join(code).splitlines()]
    named = re.findall(r"`(?:sudo )?((?:make|ansible-playbook)\s[^`]+)`", prose)
    return (
        re.findall(r"^#+", prose, re.MULTILINE),
        [line for line in typed if line and not line.startswith("export PIP_INDEX_URL=")],
        {" ".join(one.split()) for one in named},
        len(re.findall(r"^\|", prose, re.MULTILINE)),
    )


@pytest.mark.parametrize(("page", "chinese"), CHINESE.items())
def test_a_page_in_two_languages_has_the_same_headings_commands_and_rows(page, chinese):
    assert outline(page) == outline(chinese)


def blocks(page):
    """Paragraphs and items, without code and tables: how many words each may have, and it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    begins = r"(?=^\s*(?:[-*]|\d+\.) )"
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        for block in re.split(begins, paragraph, flags=re.MULTILINE):
            yield (60 if re.match(begins, block) else 120), block


def test_no_paragraph_or_item_is_too_long_to_be_read():
    long = [
        f"{page.name}: {len(block.split())} words: {' '.join(block.split())[:60]}"
        for page in pages()
        for most, block in blocks(page)
        if len(block.split()) > most
    ]
    assert long == []


def test_every_page_is_reachable_from_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            todo += links(page)
    assert [page.name for page in pages() if page.resolve() not in seen] == []


def test_what_the_pages_say_to_type_are_verbs_and_variables_that_there_are():
    text = "\n".join(page.read_text() for page in pages())
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.DOTALL | re.MULTILINE)
    command = re.compile(r"^`?make ([a-z-]+)((?: [A-Z_]+=[^\s`]+)*)", re.MULTILINE)
    typed = [found for piece in code for found in command.findall(piece)]
    assert len(typed) > 50
    known = {*verbs.VERBS}
    for verb, rest in typed:
        assert verb in known, f"make {verb}"
        names = set(re.findall(r"([A-Z_]+)=", rest))
        assert names <= set(verbs.VERBS[verb].variables), f"make {verb}{rest}"


def without_values(line):
    """The line without what differs between two runs: numbers, times, addresses and keys."""
    return " ".join(re.sub(r"\S*\d\S*", "#", line).split())


def sample_lines(page):
    """The lines of output that a page shows: in a comment below a command, or after `$ `."""
    text = page.read_text()
    below = re.findall(r"^#   (.*)$", text, re.MULTILINE)
    after = re.findall(r"^```\n\$ .*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    marked = re.findall(r"^#?\w+ ansible_host=.*#.*$", text, re.MULTILINE)
    return [*below, *marked, *(line for block in after for line in block.splitlines())]


def test_the_samples_on_pages_are_what_commands_print():
    """tests/train/test_train_demo.py compares those of `make demo` and `make train`."""
    printed = {
        without_values(line)
        for path in (ROOT / "tests/messages").glob("*.txt")
        for line in path.read_text().splitlines()
    }
    printed |= {"...", "tandem: everything is in #", "# : # # # #"}  # the last is Ansible's
    script = (ROOT / "tools/venv.sh").read_text()
    echo = [
        re.sub(r"\\\$\w+", ".+", re.escape(text)) for text in re.findall(r'echo "(.+)"', script)
    ]
    shown = [line for page in pages() for line in sample_lines(page)]
    assert len(shown) > 10
    other = [line for line in shown if without_values(line) not in printed]
    assert [line for line in other if not any(re.fullmatch(text, line) for text in echo)] == []
