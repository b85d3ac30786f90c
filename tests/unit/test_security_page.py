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


def test_each_claim_about_machines_names_the_test_that_fails_without_it():
    table = PAGE.split("| claim |", 1)[1].split("\n\n", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) >= 20
    for claim, tests, last_run in rows:
        named = re.findall(r"`((?:tests/\S+/)?test_\w+\.py)::(test_\w+)`", tests)
        assert named, claim
        for file, test in named:
            path = ROOT / file if "/" in file else ROOT / "tests/unit/launcher" / file
            assert f"\ndef {test}(" in path.read_text(), test
        assert re.match(r"\d{4}-\d\d-\d\d|in the lab: ", last_run), claim


def test_whoever_reports_a_hole_finds_the_page():
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text()
