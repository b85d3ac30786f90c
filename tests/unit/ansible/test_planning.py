"""planning/ is a pure library, and roles see all of it, and no more than they use, as tandem_*."""

import ast
import re
import sys

import pytest
from ansible.errors import AnsibleFilterError

from tests.unit.ansible.provision_machines import ROOT, TABLE, load, machine

filters = load("ansible/filter_plugins/tandem.py")
FILES = sorted((ROOT / "ansible/planning").rglob("*.py"))
PLAYS = [
    path
    for folder in ("ansible/roles", "ansible/playbooks", "group_vars")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".yml", ".j2")
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_planning_imports_no_ansible_touches_no_path_and_takes_no_private_name(path):
    allowed = sys.stdlib_module_names | {"yaml"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            assert names <= allowed - {"subprocess", "socket"}, names
        elif isinstance(node, ast.ImportFrom):
            assert node.level or node.module.split(".")[0] in allowed, node.module
            assert not any(alias.name.startswith("_") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            assert ast.unparse(node) != "sys.path"


def test_each_filter_is_used_and_each_that_is_used_exists():
    text = "\n".join(path.read_text() for path in [*PLAYS, ROOT / "site.yml"])
    used = set(re.findall(r"(?:\| *|map\(')(tandem_\w+)", text))
    assert used == set(filters.FilterModule().filters())


def test_what_a_plan_refuses_is_ansibles_own_error_with_the_sentence_alone():
    stack = filters.FilterModule().filters()["tandem_stack"]
    with pytest.raises(AnsibleFilterError, match=r"^stack 'cu999' is not in ansible/stacks\.yml"):
        stack([machine()], "cu999", TABLE)
