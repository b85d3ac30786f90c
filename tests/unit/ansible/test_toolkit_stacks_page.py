"""docs/stacks.md says what ansible/stacks.yml says."""

import copy

import pytest

from tests.unit.ansible.provision_machines import ROOT, TABLE, load

stacks_page = load("ansible/stacks_page.py")
PAGE = (ROOT / "docs/stacks.md").read_text()


def test_the_page_is_made_from_the_table():
    assert stacks_page.page(PAGE, TABLE) == PAGE, "run: python ansible/stacks_page.py"


@pytest.mark.parametrize("name", TABLE["rows"])
def test_every_stack_has_its_row(name):
    row = TABLE["rows"][name]
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    assert f"| {row['torch']} | {row['torchvision']} |" in line


def test_a_changed_table_changes_the_page():
    changed = copy.deepcopy(TABLE)
    changed["rows"]["cu102"]["torch"] = "1.13.0"
    assert "| 1.13.0 | 0.13.1 |" in stacks_page.page(PAGE, changed)
