"""planning/ is a pure library, and roles see all of it, and no more than they use, as tandem_*."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError

from planning import border
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
    # Shapes for what machines say have one owner, of which one file here knows.
    shapes = {"contract.validate"} if path.stem == "border" else set()
    allowed = sys.stdlib_module_names | {"yaml", "contract.text"} | shapes
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            assert names <= allowed - {"subprocess", "socket"}, names
        elif isinstance(node, ast.ImportFrom):
            assert node.level or node.module in allowed or node.module.split(".")[0] in allowed
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


COLLECT = """
- name: Facts of this machine
  hosts: all
  gather_facts: false
  tasks:
    - {name: Machine, machine_facts: {address: 192.0.2.1, folders: [/var/tmp]}, register: one}
    - {name: Driver, driver_facts: {pin: /nowhere}, register: two}
    - name: Keys
      ansible.builtin.copy:
        content: "{{ [one.facts, two.facts, taken] | to_json }}"
        dest: "{{ out }}"
        mode: "0600"
      vars:
        taken: >-
          {{ one.facts | tandem_machine_facts('pc1', '192.0.2.1', ['/var/tmp'])
             | combine(two.facts | tandem_driver_facts('pc1')) }}
"""


def test_the_border_knows_all_that_the_modules_return(tmp_path):
    """By Ansible itself, on this machine: a fact without a shape would be lost."""
    (tmp_path / "play.yml").write_text(COLLECT)
    words = ["--inventory", "pc1,", "--connection", "local", "-e", f"out={tmp_path}/out"]
    words += ["-e", f"ansible_python_interpreter={sys.executable}", str(tmp_path / "play.yml")]
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, two, taken = json.loads((tmp_path / "out").read_text())
    assert set(one) == set(border.MACHINE) and set(two) == set(border.DRIVER)
    assert taken == {**one, **two, "host": "pc1"}
