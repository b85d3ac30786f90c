"""Each remedy that ansible/ prints can be typed, or written down, and helps."""

import ast
import functools
import itertools
import json
import re

import pytest
import yaml

from contract.errors import UserError
from planning import PlanError, driver, reading, stacks
from tests.unit.ansible.driver_machines import WANTED
from tests.unit.ansible.provision_machines import ROOT, TABLE, machine
from tools import verbs

ANSIBLE = ROOT / "ansible"
SETTINGS = yaml.safe_load((ROOT / "group_vars/all.yml").read_text())
# What follows `make` and is no verb of the Makefile's.
PROSE = {"environments", "one", "room"}
DRIVER = {"driver_policy": "policy", "driver_source": "source", "driver_version": "version"}


def of_python(path):
    """The texts of a module but its docstrings; what is put in when they are printed is "X"."""
    tree = ast.parse(path.read_text())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    documented = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    docs = {ast.get_docstring(node, clean=False) for node in documented}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in docs:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def of_yaml(value):
    """The texts of tasks and variables, likewise."""
    if isinstance(value, str):
        yield re.sub(r"\{\{.*?\}\}", "X", value, flags=re.DOTALL)
        yield from re.findall(r"'([^']*)'", value)  # those that an expression chooses from
    elif isinstance(value, dict):
        for key, one in value.items():
            if key != "name":  # of a task
                yield from of_yaml(one)
    elif isinstance(value, list):
        for one in value:
            yield from of_yaml(one)


@functools.cache
def texts():
    """[(path, text)] of all that may be printed, each on one line."""
    found = [(path, text) for path in ANSIBLE.rglob("*.py") for text in of_python(path)]
    for path in ANSIBLE.rglob("*.yml"):
        if {"roles", "playbooks"} & set(path.relative_to(ANSIBLE).parts):
            parsed = yaml.load(path.read_text(), yaml.CSafeLoader)  # the quick one
            found += [(path, text) for text in of_yaml(parsed)]
    for path in ANSIBLE.rglob("*.j2"):
        found += [(path, line) for line in path.read_text().splitlines() if line[:1] != "#"]
    return [(path, " ".join(text.split())) for path, text in found]


def named(pattern):
    """[(path, match)] of a pattern in these texts, of which there are some."""
    found = [(path, match) for path, text in texts() for match in re.finditer(pattern, text)]
    assert found
    return found


def tags(path):
    """The tags of a playbook and of those that it imports."""
    text = path.read_text()
    found = set(re.findall(r"[\w]+", " ".join(re.findall(r"tags: \[([^\]]*)\]", text))))
    for other in re.findall(r"import_playbook: (\S+)", text):
        found |= tags(path.parent / other)
    return found


def test_each_command_of_make_is_one_that_make_takes():
    """`make VERB NAME=value` goes through the table of verbs as if it had been typed."""
    for path, match in named(r"(?<![\w/-])make ([a-z][a-z-]*)((?: [A-Z][A-Z_]+=[\w.,/-]+)*)"):
        verb, rest = match.groups()
        if verb in PROSE or f"`{verb}" in match.string:
            continue
        given = dict(word.split("=", 1) for word in rest.rstrip(".,").split())
        try:
            typed = {"TANDEM_GIVEN": " ".join(given), **given}
            assert not verbs.check([verb], typed), (path, match[0])
        except UserError as error:
            pytest.fail(f"{path}: {match[0]}: {error}")
        assert set(given.get("TAGS", "").split(",")) - {""} <= tags(ROOT / "site.yml"), match[0]


def test_each_command_of_ansible_is_one_that_its_playbook_takes():
    for path, match in named(r"ansible-playbook (\S+\.yml)((?: (?:-e [\w=.]+|--tags [\w,]+))*)"):
        book = ROOT / match[1].rstrip(".,;")
        text = book.read_text()
        for name in re.findall(r"-e (\w+)=", match[2]):
            assert name in SETTINGS or name in text, (path, match[0])
        for word in re.findall(r"--tags ([\w,]+)", match[2]):
            assert set(word.split(",")) <= tags(book), (path, match[0])


def options():
    """{setting: the values that its role takes; None: any}."""
    shown = re.findall(r"^(\w+): ", (ROOT / "docs/shares.md").read_text(), re.MULTILINE)
    known = dict.fromkeys([*SETTINGS, *shown])
    for path in (ANSIBLE / "roles").glob("*/meta/argument_specs.yml"):
        for spec in yaml.safe_load(path.read_text())["argument_specs"].values():
            for name, option in spec.get("options", {}).items():
                known[name] = option.get("choices")
    return known


def test_each_setting_that_is_to_be_set_is_one_and_takes_that_value():
    known = options()
    plain = r"(?:[Ss]et|and|or|write) ([a-z]+(?:_[a-z]+)+|stack|toolkit|apex|offline): (\w+)?"
    for path, match in named(plain):
        assert match[1] in known, (path, match[0])
        choices = known[match[1]]
        if choices and match[2] not in (None, "X"):
            assert match[2] in [str(choice) for choice in choices], (path, match[0])
    for path, match in named(r"\b(?!ansible_)([a-z]+(?:_[a-z]+)+)=(\w+)? in its line"):
        assert match[1] in known, (path, match[0])


def recorded():
    """[(name, facts)] of all machines of examples/machines/."""
    found = []
    for path in sorted((ROOT / "examples/machines").glob("*.json")):
        every = [entry["facts"] for entry in json.loads(path.read_text())]
        found += [(f"{path.stem}:{facts['host']}", facts) for facts in every if facts.get("gpus")]
    return found


def driver_plan(facts, wanted, stack):
    return {"remedy": "", **driver.driver_plan(facts, wanted, stack, TABLE)}


def plans(facts):
    """(settings, plan) by each policy, source and stack that can be set."""
    wishes = itertools.product(("keep", "install", "upgrade"), ("auto", "package", "runfile"))
    for (policy, source), name in itertools.product(wishes, TABLE["rows"]):
        wanted = {**WANTED, "policy": policy, "source": source}
        try:
            stack = stacks.resolve([facts], name, TABLE)
        except PlanError:
            continue
        yield wanted, stack, driver_plan(facts, wanted, stack)


@pytest.mark.parametrize(("name", "facts"), recorded())
def test_a_setting_that_a_refusal_names_is_not_set_already_and_helps(name, facts):
    for wanted, stack, plan in plans(facts):
        told = re.findall(r"set (driver_\w+): (\w+)", plan["remedy"])
        told += re.findall(r"then (driver_\w+): (\w+)", plan["remedy"])
        for setting, value in told:
            assert wanted[DRIVER[setting]] != value, plan
        if told and re.fullmatch(r"set driver_\w+: \w+.*", plan["remedy"]):
            done = {**wanted, DRIVER[told[0][0]]: told[0][1]}
            again = driver_plan(facts, done, stack)
            assert (again["reason"], again["remedy"]) != (plan["reason"], plan["remedy"])
            # Where the next step is another remedy, it is not one more setting of the same kind.
            assert not re.match(f"set {told[0][0]}", again["remedy"]), (plan, again)


def test_what_removes_a_driver_leaves_what_containers_need():
    """`apt-get purge '*nvidia*' NAME+` keeps NAME: tried by apt's own simulation."""
    there = ("nvidia-driver-535", "nvidia-container-toolkit", "libnvidia-container1", "gcc")
    facts = reading.as_machine_facts(machine(packages=dict.fromkeys(there, "1")))
    kept = "libnvidia-container1+ nvidia-container-toolkit+"
    assert driver.removal_command(facts, "package") == f"sudo apt-get purge '*nvidia*' {kept}"
    assert driver.removal_command(facts, "runfile") == "sudo nvidia-uninstall"
