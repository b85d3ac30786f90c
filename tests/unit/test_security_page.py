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


def test_whoever_reports_a_hole_finds_the_page():
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text()
