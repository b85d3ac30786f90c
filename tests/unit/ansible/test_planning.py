"""planning/ is a pure library, and roles see all of it, and no more than they use, as tandem_*."""

import ast
import json
import re
import sys

import pytest
from ansible.errors import AnsibleFilterError

from ansible.module_utils import basic
from planning import PlanError, reading
from tests.unit.ansible.provision_machines import NO_DRIVER, ROOT, TABLE, load, machine

filters = load("ansible/filter_plugins/tandem.py")
FILES = sorted((ROOT / "ansible/planning").rglob("*.py"))
PLAYS = [
    path
    for folder in ("ansible/roles", "ansible/playbooks", "group_vars")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".yml", ".j2")
]


def test_planning_imports_no_ansible_touches_no_path_and_takes_no_private_name():
    for path in FILES:
        allowed = sys.stdlib_module_names | {"yaml", "msgspec", "contract.text", "boundary"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
                assert names <= allowed - {"subprocess", "socket"}, (path, names)
            elif isinstance(node, ast.ImportFrom):
                known = node.level or {node.module, node.module.split(".")[0]} & allowed
                assert known and not any(alias.name[0] == "_" for alias in node.names), path
            elif isinstance(node, ast.Attribute):
                assert ast.unparse(node) != "sys.path", path


def test_each_filter_is_used_and_each_that_is_used_exists():
    text = "\n".join(path.read_text() for path in [*PLAYS, ROOT / "site.yml"])
    used = set(re.findall(r"(?:\| *|map\(')(tandem_\w+)", text))
    assert used == set(filters.FilterModule().filters())


def test_what_a_plan_refuses_is_ansibles_own_error_with_the_sentence_alone():
    stack = filters.FilterModule().filters()["tandem_stack"]
    with pytest.raises(AnsibleFilterError, match=r"^stack 'cu999' is not in ansible/stacks\.yml"):
        stack([machine()], "cu999", TABLE)


def test_an_ansible_by_another_python_ends_with_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(SystemExit, match=r"has no msgspec. .*\.venv/bin/ansible-playbook"):
        load("ansible/callback_plugins/tandem.py")


MODULES = {
    "machine_facts": {"address": "192.0.2.1", "folders": ["/var/tmp"]},
    "driver_facts": {"pin": "/nowhere"},
}
# What machine_facts would ask of the network.
DEAD = [{"source": "http://x.invalid focal", "file": None}]


def test_all_that_the_modules_return_is_known(monkeypatch, capsys, tmp_path):
    """On this machine: a fact without a shape would be lost. Its package lists take seconds."""
    (tmp_path / "apt.conf").write_text(
        f'Dir::State "{tmp_path}"; Dir::State::status "/dev/null"; Dir::Cache "{tmp_path}";'
    )
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)  # as Ansible starts it
    said = {}
    for name, arguments in MODULES.items():
        words = json.dumps({"ANSIBLE_MODULE_ARGS": arguments}).encode()
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", words)
        module = load(f"ansible/library/{name}.py")
        monkeypatch.setattr(module, "find_dead_sources", lambda: DEAD, raising=False)
        with pytest.raises(SystemExit):
            module.main()
        said[name] = json.loads(capsys.readouterr().out)
    one, two = (said[name]["facts"] for name in ("machine_facts", "driver_facts"))
    taken = reading.machine(one, "pc1", "192.0.2.1", ["/var/tmp"]) | reading.driver(two, "pc1")
    beside = {"host": "pc1", "like": "", "container": "", "gpus_counted": None}
    beside |= {"driver_kept": False}
    assert taken == {**one, **two, **beside}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"packages": {"gcc": "4:12", "nvidia-smi": "none"}}, "pc1.packages[...]: "),
        ({"displays": [{"pid": 1, "command": None}, {"pid": "x", "command": None}]},
         "pc1.displays[1].pid: "),
        ({"waiting_kernel": 7}, "pc1.waiting_kernel: "),
        ({"packages": {"a" * 9999: "none"}}, "pc1.packages"),
    ],
)  # fmt: skip
def test_the_part_that_cannot_be_is_named(changes, part):
    with pytest.raises(PlanError) as caught:
        reading.driver({**NO_DRIVER, "offered": {}, **changes}, "pc1")
    said = str(caught.value)
    assert part in said and "xpected" in said and len(said) < 500
