"""The arrows of docs/architecture.md: which room may import which."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {"contract", "boundary", "tandem", "trainer", "launcher", "report", "lab"}
# Each room may import contract/, which owns what passes between rooms, and tandem/, of which any
# script is built, and no other room; on the control node the launcher and the report also
# boundary/, and the launcher the report, whose figures it shows.
SHARED = {"contract", "tandem"}
MAY = {
    "contract": set(),
    "boundary": {"contract"},
    "tandem": {"contract"},
    "launcher": {*SHARED, "boundary", "report"},
    "report": {*SHARED, "boundary"},
}
NEVER = {
    "contract": {"torch", "torchvision", "fabric", "paramiko", "ansible", "msgspec", "rich"},
    "boundary": {"torch", "torchvision", "fabric", "paramiko", "ansible"},
    "tandem": {"torchvision", "fabric", "paramiko", "ansible", "msgspec", "rich"},
    "trainer": {"fabric", "ansible", "msgspec", "rich"},
    "launcher": {"torch"},
    "report": {"torch", "torchvision", "fabric", "paramiko"},
    "lab": {"torch", "fabric", "ansible"},
}


@functools.cache
def nodes_of(path):
    """All nodes of a module's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path):
    """The modules that a file imports absolutely, wherever in it that stands."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


@pytest.mark.parametrize("room", sorted(NEVER))
def test_a_room_imports_what_it_may_and_no_other_room(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"{room}/ has no Python files"
    forbidden = ROOMS - {room} - MAY.get(room, SHARED) | NEVER[room]
    wrong = {
        str(file.relative_to(ROOT)): found
        for file in files
        if (found := {name.split(".")[0] for name in imported(file)} & forbidden)
    }
    assert not wrong


def test_the_contract_needs_nothing_but_the_standard_library():
    """The control node imports it before it has an environment's packages."""
    modules = [path.stem for path in sorted((ROOT / "contract").glob("*.py"))]
    code = "import sys; known = set(sys.modules); from contract import {}; "
    code += "print(*(set(sys.modules) - known))"
    done = subprocess.run(
        [sys.executable, "-c", code.format(", ".join(set(modules) - {"__init__"}))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    foreign = {name.split(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    assert foreign == {"contract"}
    assert (ROOT / "contract/__init__.py").read_text() == ""


def imported_by(name, path):
    """Every dotted name that a module may import, wherever in it that stands."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def test_no_modules_import_one_another():
    """Wherever in a module an import stands: within a function it only hides the circle."""
    modules = {
        ".".join(
            part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"
        ): path
        for room in (*ROOMS, "ansible", "tools")
        for path in (ROOT / room).rglob("*.py")
    }
    assert len(modules) > 200
    # Ansible's Python begins at its own folder: there `planning` is ansible/planning/.
    names = {name.removeprefix("ansible."): name for name in modules} | {
        name: name for name in modules
    }
    graph = {
        name: {names[other] for other in imported_by(name, path) if other in names} - {name}
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle


OPENING = {"open", "fdopen", "open_record", "read_text", "read_bytes", "read_yaml"}
RECEIVING = {"recv", "recvfrom", "recv_into", "recv_stderr", "loads", "load", "safe_load"}
LISTING = {"iterdir", "glob", "rglob", "scandir", "listdir", "walk"}


def reads(path):
    """Whether a module opens files, receives bytes, reads folders or takes JSON or YAML apart."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if name in OPENING | RECEIVING | LISTING and (
                ast.unparse(node.func) not in ("ast.walk", "tl.load")  # a tree, a GPU's memory
            ):
                return True
    return False


# Modules that open files, receive bytes, read folders or take JSON or YAML apart, by what it is.
# The first turn what a machine, another user or a file gives into values that the rest trusts.
READS = {
    "what others give, with a fuzzer": """
        ansible/bootstrap.py ansible/dry_provision.py ansible/planning/network_netplan.py
        ansible/planning/stacks.py ansible/planning/wake.py ansible/roles/owner/files/tandem.py
        ansible/wake.py contract/command_line.py contract/layout.py contract/runs.py
        contract/text.py launcher/checkpoints.py launcher/collect.py
        launcher/control.py launcher/folders.py launcher/machines/ssh.py
        launcher/machines/inventory.py launcher/node/owner.py launcher/node/pairprobe.py
        launcher/node/machine_lock.py launcher/node/probe.py launcher/outputs.py
        launcher/plan/code.py launcher/plan/files.py launcher/plan/layer.py
        launcher/build_script.py launcher/plan/requirements.py launcher/plan/sources.py
        launcher/status.py launcher/top.py launcher/watch/attempts.py launcher/watch/guards.py
        report/evaluation.py report/files.py
        tools/sweep.py trainer/checkpoint.py trainer/data/decode.py trainer/data/folder.py
        trainer/resume.py trainer/safetensors.py trainer/weights.py trainer/writer.py""",
    "the checkout's own files": """
        ansible/bundling/debs.py ansible/bundling/table.py ansible/planning/offline.py
        ansible/stacks_page.py contract/prices.py contract/seal.py launcher/plan/devices.py
        launcher/problems.py launcher/remote.py launcher/watch/known_errors.py
        tandem/standalone.py tools/all_tests.py trainer/classifiers.py""",
    "the kernel's files": """
        contract/git.py contract/interface.py launcher/node/processes.py launcher/node/records.py
        launcher/node/idle.py launcher/node/sockets.py launcher/node/stacks.py
        tandem/process_facts.py""",
    "files that are copied or hashed, and not taken apart": """
        launcher/node/machine.py launcher/plan/pretrained.py""",
    "what it has written itself, or its like": """
        ansible/bundle.py ansible/bundling/wheels.py ansible/check.py contract/interrupts.py
        contract/scratch.py tandem/step_lines.py tandem/sums.py launcher/background.py
        launcher/evaluate.py launcher/node/supervisor.py
        launcher/node/work.py launcher/node/workers.py
        launcher/node/startup/sitecustomize.py
        report/cli.py report/measurements.py tools/shrink.py tools/tensorboard.py
        trainer/export.py
        ansible/roles/cuda/files/relocate.py""",
    "what the control node sends to its own programs": """
        contract/decisions.py contract/options.py contract/result_lines.py
        launcher/machines/slurm.py launcher/node/link.py launcher/slurm.py
        ansible/planning/network.py ansible/module_utils/commands.py""",
    "what a machine finds on itself, which is checked here (boundary/facts.py)": """
        ansible/library/driver_facts.py ansible/library/machine_facts.py
        ansible/module_utils/kernels.py""",
    "a user's own, as that user: test_user_modules.py": """
        ansible/library/share_reader.py ansible/library/user_key.py
        ansible/library/user_path.py""",
    "a method of that name, of no file": """
        launcher/look.py launcher/machines/engine.py launcher/measure.py
        launcher/watch/watch.py""",
    "members, who trust each other (docs/security.md)": """
        tandem/exchange.py trainer/world.py""",
    "what `make bundle` has written": "ansible/bundling/manifest.py",
    "archives, by their sums": """
        ansible/bundling/fetch.py ansible/library/toolkit_archive.py tools/imagenet.py""",
    "greetings of 255 bytes at most, by a pattern: test_find.py": "launcher/find.py",
}


def test_what_comes_from_elsewhere_is_read_in_listed_modules_alone():
    """Whoever opens, receives or lists anything in another one says what it is."""
    rooms = ("ansible", "contract", "launcher", "report", "tandem", "tools", "trainer")
    paths = {path for room in rooms for path in (ROOT / room).rglob("*.py") if reads(path)}
    listed = {file for files in READS.values() for file in files.split()}
    assert {path.relative_to(ROOT).as_posix() for path in paths} == listed, "see READS"


def test_ssh_is_called_where_it_is_said_how():
    """ansible/bootstrap.py takes ansible.cfg's options; the lab's machines are its own."""
    calling = {"ssh", "scp", "sftp", "rsync"}
    found = set()
    for room in ("ansible", "launcher", "report", "lab", "tools", "trainer"):
        for path in (ROOT / room).rglob("*.py"):
            lists = (node for node in nodes_of(path) if isinstance(node, ast.List))
            words = (node.elts[0] for node in lists if node.elts)
            if any(getattr(word, "value", None) in calling for word in words):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {"ansible/bootstrap.py", "lab/control.py"}
    plays = [ROOT / "site.yml", ROOT / "Makefile", *(ROOT / "ansible").rglob("*.yml")]
    typed = r"(argv: *\[|command: *|shell: *|cmd: *|^\t@?)[\"']?(ssh|scp|sftp|rsync)\b"
    assert not [p for p in plays if re.search(typed, p.read_text(), re.MULTILINE)]


def test_tests_of_what_nodes_get_import_nothing_that_nodes_lack():
    """tests/lab/test_legacy.py runs these on a machine that has contract, tandem and trainer."""
    lacking = ("report", "launcher", "boundary", "lab", "planning", "tests.unit.report")
    found = []
    for folder in ("tandem", "trainer"):
        for path in (ROOT / "tests/unit" / folder).glob("*.py"):
            # An import in a function or behind `try` is for other machines.
            for node in ast.parse(path.read_text()).body:
                names = (
                    [getattr(node, "module", None) or ""] if type(node) is ast.ImportFrom else []
                )
                names += [name.name for name in node.names] if type(node) is ast.Import else []
                hits = [n for n in names for room in lacking if f"{n}.".startswith(f"{room}.")]
                found += [f"{path.name}: {name}" for name in hits]
    assert found == []
