"""Which tests are left out on a PC that lacks what they need (tests/conftest.py)."""

from types import SimpleNamespace

import pytest

from tests import conftest


@pytest.mark.parametrize(
    ("need", "root", "ci", "left_out"),
    [
        ("chromium", False, "", True),
        ("chromium", True, "", False),  # `make test` has installed it
        ("chromium", False, "true", False),
        ("root", False, "", True),
        ("root", False, "true", True),
        ("shell", False, "", False),
    ],
)
def test_what_a_pc_lacks_is_left_out_but_not_by_root_or_ci(monkeypatch, need, root, ci, left_out):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(conftest, "ROOT", root)
    lacks = {"root": (root, "sudo"), "chromium": (False, "apt"), "shell": (True, "")}
    monkeypatch.setattr(conftest, "NEEDS", lacks)
    marks = []
    wanted = pytest.mark.needs(need).mark
    item = SimpleNamespace(iter_markers=lambda name: [wanted], add_marker=marks.append)
    conftest.pytest_collection_modifyitems([item])
    assert [mark.name for mark in marks] == ["skip"] * left_out


def test_what_was_left_out_is_named_with_the_remedy():
    reasons = ["need chromium: apt install chromium"] * 2 + ["need root: sudo", "no /dev/full"]
    skipped = [SimpleNamespace(longrepr=("a.py", 1, f"Skipped: {why}")) for why in reasons]
    said = []
    reporter = SimpleNamespace(stats={"skipped": skipped}, write_line=said.append)
    conftest.pytest_terminal_summary(reporter)
    assert said == [
        "tandem: 2 tests need chromium: apt install chromium",
        "tandem: 1 test needs root: sudo",
    ]
