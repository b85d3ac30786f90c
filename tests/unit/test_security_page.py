"""docs/security.md: each test that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def place(name):
    return ROOT / name if "/" in name else ROOT / "tests/unit/launcher" / name


def tables():
    """The rows of each table, as lists of cells."""
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.M):
        yield [line.strip("| ").split(" | ") for line in table.splitlines()]


def test_each_claim_about_machines_names_the_test_that_fails_without_it():
    """`::test_name` is of the file before it."""
    head, _, *rows = next(tables())
    assert head[0] == "claim" and len(rows) >= 20
    for claim, tests in rows:
        named = re.findall(r"`((?:tests/\S+/)?test_\w+\.py)?::(test_\w+)`", tests)
        assert named and tests.count("::") == len(named), claim
        text = ""
        for file, test in named:
            text = place(file).read_text() if file else text
            assert f"\ndef {test}(" in text, test


def test_each_line_names_its_test_or_says_that_it_has_none():
    for _head, _, *rows in tables():
        assert [row for row in rows if not re.search(r"test_\w+\.py|^no test", row[-1])] == []
    trusted = PAGE.split("## What is trusted\n", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^- (?:.+\n)(?:  .+\n)*", trusted, re.M)
    assert [line for line in lines if not re.search(r"test_\w+\.py|No test\.", line)] == []
