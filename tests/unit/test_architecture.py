"""The arrows of docs/architecture.md: who may import whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {"trainer", "launcher", "report", "lab"}
FORBIDDEN = {
    "trainer": ROOMS - {"trainer"} | {"fabric", "ansible"},
    "launcher": ROOMS - {"launcher"} | {"torch"},
    "report": ROOMS - {"report"} | {"torch", "torchvision", "fabric", "paramiko"},
    "lab": ROOMS - {"lab"} | {"torch", "fabric", "ansible"},
}


def imported(path):
    """Top-level names of the absolute imports of a file, wherever in it they stand."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("room", sorted(FORBIDDEN))
def test_room_imports_only_what_its_arrows_allow(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"{room}/ has no Python files"
    wrong = {str(f.relative_to(ROOT)): imported(f) & FORBIDDEN[room] for f in files}
    assert not {name: found for name, found in wrong.items() if found}


def test_relative_imports_do_not_leave_their_room():
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            depth = len(path.relative_to(ROOT).parts) - 1
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert node.level <= depth, f"{path}: {node.module}"
