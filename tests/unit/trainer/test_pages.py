"""The pages name only options and tests that exist."""

import dataclasses
import pathlib
import re

from contract.options import Options

ROOT = pathlib.Path(__file__).parents[3]


def test_options_on_the_page_exist():
    known = {field.name for field in dataclasses.fields(Options)} | {"help", "best"}
    named = re.findall(r"(?<![\w-])--([a-z0-9_]+)", (ROOT / "docs/trainer.md").read_text())
    assert len(named) > 30
    assert set(named) - known == set()


def test_pitfalls_name_tests_that_exist():
    page = (ROOT / "docs/pitfalls.md").read_text()
    defined = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"::(test_\w+)", page)
    assert len(named) > 10
    assert [name for name in named if f"def {name}(" not in defined] == []
