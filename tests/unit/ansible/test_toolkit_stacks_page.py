"""docs/stacks.md says what ansible/stacks.yml says."""

import copy

from tests.unit.ansible.provision_machines import ROOT, TABLE, load

stacks_page = load("ansible/stacks_page.py")
PAGE = (ROOT / "docs/stacks.md").read_text()


def test_the_page_is_made_from_the_table():
    assert stacks_page.page(PAGE, TABLE) == PAGE, "run: python ansible/stacks_page.py"


def test_a_changed_table_changes_the_page():
    changed = copy.deepcopy(TABLE)
    changed["rows"]["cu102"]["torch"] = "1.13.0"
    assert "| 1.13.0 | 0.13.1 |" in stacks_page.page(PAGE, changed)
