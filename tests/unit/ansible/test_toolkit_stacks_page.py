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
    changed["apex"]["23.05"] = {**TABLE["apex"]["22.04-dev"], "file": "apex-23.05.tar.gz"}
    changed["rows"]["cu126"]["apex"] = "23.05"
    page = stacks_page.page(PAGE, changed)
    assert "| 1.13.0 | 0.13.1 |" in page
    # Each row of apex is for the stacks that have it.
    assert "| `apex-23.05.tar.gz` | `cu126` |" in page
    assert "| `apex-22.04-dev.tar.gz` | `cu102` |" in page
