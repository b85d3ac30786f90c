"""The arrows of docs/architecture.md: which room may import which."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {"contract", "trainer", "launcher", "report", "lab"}
# What passes between rooms, which each of them may import.
COMMON = {"contract"}
FORBIDDEN = {
    "contract": ROOMS - {"contract"} | {"torch", "torchvision", "fabric", "paramiko", "ansible"},
    "trainer": ROOMS - {"trainer"} - COMMON | {"fabric", "ansible"},
    "launcher": ROOMS - {"launcher"} - COMMON | {"torch"},
    "report": ROOMS - {"report"} - COMMON | {"torch", "torchvision", "fabric", "paramiko"},
    "lab": ROOMS - {"lab"} | {"torch", "fabric", "ansible"},
}


# Modules without torch for rules that several rooms follow, and the rooms that may import them.
SHARED = {
    "trainer.card": {"launcher"},
    "trainer.cli": {"launcher"},
    "trainer.data.layout": {"launcher"},
    "trainer.data.split": {"launcher"},
    "trainer.strategies": {"launcher", "report"},
    "trainer.prices": {"launcher", "report"},
    "trainer.levels": {"launcher"},
    "trainer.errors": {"launcher", "report"},
    # Names that all verbs must share, although different rooms carry them out.
    "launcher.defaults": {"report"},
}


def modules(path):
    """What a file imports absolutely, wherever in it that stands, as `package.module` names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules_alone = node.module in ROOMS or not SHARED.keys().isdisjoint(names)
            yield from names if modules_alone else [node.module]


def imported(path, room):
    """Top-level names of what a file imports, the modules apart that its room may share."""
    found = (name for name in modules(path) if room not in SHARED.get(name, ()))
    return {name.split(".")[0] for name in found}


@pytest.mark.parametrize("room", sorted(FORBIDDEN))
def test_room_imports_only_what_its_arrows_allow(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"{room}/ has no Python files"
    wrong = {str(f.relative_to(ROOT)): imported(f, room) & FORBIDDEN[room] for f in files}
    assert not {name: found for name, found in wrong.items() if found}


@pytest.mark.parametrize("module", sorted(SHARED))
def test_what_rooms_share_needs_nothing_but_the_standard_library(module):
    """They are imported without torch and without anything that the control machine might lack."""
    code = "import sys; known = set(sys.modules); import {}; print(*(set(sys.modules) - known))"
    done = subprocess.run(
        [sys.executable, "-c", code.format(module)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    foreign = {name.split(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    assert foreign == {module.split(".")[0]}


def arrows():
    """The table of docs/architecture.md."""
    lines = ["| room | of other rooms it may import | it never imports |", "|---|---|---|"]
    for room in sorted(FORBIDDEN):
        others = (COMMON - FORBIDDEN[room] - {room}) | {m for m in SHARED if room in SHARED[m]}
        cells = (sorted(others), sorted(FORBIDDEN[room] - ROOMS))
        told = [", ".join(f"`{name}`" for name in names) or "nothing" for names in cells]
        lines.append(f"| `{room}/` | {told[0]} | {told[1]} |")
    return "\n".join(lines)


def test_the_page_has_these_arrows():
    page = (ROOT / "docs/architecture.md").read_text()
    assert arrows() in page, f"docs/architecture.md needs this table:\n{arrows()}"


def test_relative_imports_do_not_leave_their_room():
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            depth = len(path.relative_to(ROOT).parts) - 1
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert node.level <= depth, f"{path}: {node.module}"


def test_images_are_opened_in_one_place():
    """Another decoder is one file's change; augment.py has Pillow's geometry and colours."""
    opening = {
        path.relative_to(ROOT / "trainer").as_posix()
        for path in (ROOT / "trainer").rglob("*.py")
        if any(name.partition(".")[0] == "PIL" for name in modules(path))
    }
    assert opening == {"data/decode.py", "data/augment.py"}
    assert ".open(" not in (ROOT / "trainer/data/augment.py").read_text()


def test_ssh_is_called_where_it_is_said_how():
    """ansible/bootstrap.py takes ansible.cfg's options; the lab's machines are its own."""
    calling = {"ssh", "scp", "sftp", "rsync"}
    found = set()
    for room in ("ansible", "launcher", "report", "lab", "tools", "trainer"):
        for path in (ROOT / room).rglob("*.py"):
            lists = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.List))
            words = (node.elts[0] for node in lists if node.elts)
            if any(getattr(word, "value", None) in calling for word in words):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {"ansible/bootstrap.py", "lab/control.py"}
    plays = [ROOT / "site.yml", ROOT / "Makefile", *(ROOT / "ansible").rglob("*.yml")]
    typed = r"(argv: *\[|command: *|shell: *|cmd: *|^\t@?)[\"']?(ssh|scp|sftp|rsync)\b"
    assert not [p for p in plays if re.search(typed, p.read_text(), re.MULTILINE)]
