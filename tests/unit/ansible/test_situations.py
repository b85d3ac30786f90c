"""docs/situations.md quotes what is printed."""

import re

import pytest

from tests.unit.ansible.provision_machines import ROOT

PAGE = (ROOT / "docs/situations.md").read_text()
# Sections with lines, and rows with a part of one.
SECTION = r"^## [^\n]*`(\S+)`\n(?:(?!^## ).*?)^```\n(.*?)^```$"
QUOTED = re.findall(SECTION, PAGE, re.MULTILINE | re.DOTALL)
QUOTED += re.findall(r"^\| [^|]*`(\S+)` \| `([^|]+)` \|", PAGE, re.MULTILINE)
assert len(QUOTED) > 15


@pytest.mark.parametrize(("name", "lines"), QUOTED)
def test_the_page_quotes_what_is_printed(name, lines):
    printed = (ROOT / f"tests/unit/ansible/dry_provision/{name}.txt").read_text()
    assert [line for line in lines.splitlines() if line not in printed] == []
