"""Which modules of ours import one another, wherever in a module an import stands: `python -m
tests.unit.house` prints the rooms that import rooms, and every circle of modules (there is none:
tests/unit/test_architecture.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "contract",
    "boundary",
    "tandem",
    "trainer",
    "launcher",
    "report",
    "ansible",
    "lab",
    "tools",
)


def imports(room_files: dict[str, Path]) -> dict[str, set[str]]:
    """For each module of ours, by its dotted name, the modules of ours that it imports."""
    modules = {name: name for name in room_files}
    # Ansible's Python begins at its own folder: there `planning` is ansible/planning/.
    modules |= {name.removeprefix("ansible."): name for name in room_files}
    graph = {}
    for name, path in room_files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        graph[name] = {modules[other] for other in _imported(tree, package) if other in modules} - {
            name
        }
    return graph


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, node.module or ""] if node.level else [node.module or ""])
            base = base.strip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
            yield from names
            yield base


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that reach one another, each set once, the largest first."""
    reach = {name: _reachable(graph, name) for name in graph}
    sets = {
        frozenset(other for other in reach[name] if name in reach[other]) | {name} for name in graph
    }
    return sorted((sorted(part) for part in sets if len(part) > 1), key=len, reverse=True)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for name in graph[todo.pop()] - seen:
            seen.add(name)
            todo.append(name)
    return seen - {start} if start not in seen else seen


def modules_of(room: str) -> dict[str, Path]:
    files = sorted((ROOT / room).rglob("*.py"))
    named = {path: path.relative_to(ROOT).with_suffix("").parts for path in files}
    return {".".join(p for p in parts if p != "__init__"): path for path, parts in named.items()}


def main() -> None:
    graph = imports({name: path for room in ROOMS for name, path in modules_of(room).items()})
    across = {(a.split(".")[0], b.split(".")[0]) for a in graph for b in graph[a]}
    print("rooms importing rooms:", *sorted(f"{a}>{b}" for a, b in across if a != b))
    for circle in circles(graph):
        print("circle:", *circle)


if __name__ == "__main__":
    main()
