"""docs/security.md: each test that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def test_the_tests_that_the_page_names_are_there():
    named = set(re.findall(r"`((?:tests/\S+/)?test_\w+\.py)", PAGE))
    assert len(named) >= 8
    for name in named:
        path = ROOT / name if "/" in name else ROOT / "tests/unit/launcher" / name
        assert path.is_file(), name


DATED = re.compile(r"2026-\d\d-\d\d|in the lab: docs/tested\.md|No test\.|never")


def tables():
    """The rows of each table, as lists of cells."""
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.M):
        yield [line.strip("| ").split(" | ") for line in table.splitlines()]


def test_each_claim_about_machines_names_the_test_that_fails_without_it():
    head, _, *rows = next(tables())
    assert head[0] == "claim" and len(rows) >= 30
    for claim, tests, _ in rows:
        named = re.findall(r"`((?:tests/\S+/)?test_\w+\.py)::(test_\w+)`", tests)
        assert named, claim
        for file, test in named:
            path = ROOT / file if "/" in file else ROOT / "tests/unit/launcher" / file
            assert f"\ndef {test}(" in path.read_text(), test


def test_each_line_says_when_it_was_seen_or_that_it_never_was():
    for head, _, *rows in tables():
        assert head[-1].rstrip(" |") == "last run"
        for row in rows:
            assert len(row) == len(head) and DATED.match(row[-1]), row
    trusted = PAGE.split("## What is trusted\n", 1)[1].split("\n## ", 1)[0]
    for line in re.findall(r"^- (?:.+\n)(?:  .+\n)*", trusted, re.M):
        assert DATED.search(line), line


def test_whoever_reports_a_hole_finds_the_page():
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text()
