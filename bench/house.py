"""How much there is to read: `python -m bench.house`.

- statements: of each room and of the tests, as Python's parser counts them, without docstrings.
- modules: those of ours that `make train` has loaded when it opens its first ssh connection.
- step: the files of ours with a function that runs in one step of training with `ef:2`, on rank 0
  of two, the exchange's threads included.
- driver: the Python files of ours with a function that runs while `make dry-provision` decides what
  one recorded machine gets.
- circles: sets of modules that import one another, wherever in a module an import stands.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("contract", "tandem", "trainer", "launcher", "report", "ansible", "lab", "tools")
MACHINE = "examples/machines/2080ti-ubuntu2204-driver535.json"

FIRST_CONNECTION = """
import fabric, sys
from launcher import cli
def opening(*_args, **_options):
    print(*sorted(name for name in sys.modules if name.split(".")[0] in ROOMS))
    sys.stdout.flush()
    os._exit(0)
import os
fabric.Connection.open = opening
cli.main(["train", "--inventory", sys.argv[1]])
"""

# Notes the files whose functions run while `watching`, in every thread of the process.
WATCHED = """
import sys, threading
seen, watching = set(), False
def note(frame, event, _value):
    if watching and event == "call":
        seen.add(frame.f_code.co_filename)
threading.setprofile(note)
sys.setprofile(note)
"""

STEP = (
    WATCHED
    + """
import os
from trainer import train
from trainer.__main__ import main
real, done = train.train_step, 0
def step(*args, **options):
    global watching, done
    done += 1
    watching = done == 5  # after the warm-up and DDP's first buckets
    try:
        return real(*args, **options)
    finally:
        if watching and os.environ["RANK"] == "0":
            print("SEEN", *sorted(seen))
        watching = False
train.train_step = step
folder = f"{os.path.dirname(__file__)}/{os.environ['RANK']}"
sys.exit(main([*sys.argv[1:], "--output", folder]))
"""
)

DRIVER = (
    WATCHED
    + """
import runpy
watching = True
try:
    runpy.run_path("ansible/dry_provision.py", run_name="__main__")
finally:
    watching = False
    print("SEEN", *sorted(seen))
"""
)


def statements(paths: Iterable[Path]) -> int:
    return sum(
        isinstance(node, ast.stmt) and not _is_text(node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def imports(room_files: dict[str, Path]) -> dict[str, set[str]]:
    """For each module of ours, by its dotted name, the modules of ours that it imports."""
    known = {name: name for name in room_files}
    # Ansible's Python begins at its own folder: there `planning` is ansible/planning/.
    known |= {name.removeprefix("ansible."): name for name in room_files}
    found = {}
    for name, path in room_files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = {known[one] for one in _imported(tree, package) if one in known} - {name}
    return found


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
    return sorted((sorted(one) for one in sets if len(one) > 1), key=len, reverse=True)


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


def _run(code: str, *arguments: str, nodes: int = 1) -> str:
    """What the first of so many processes prints, each of which is a node of its own."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "flow.py"
        script.write_text(f"ROOMS = {ROOMS!r}\n{code}")
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'ansible'}"}
        if nodes > 1:
            store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29876", "LOCAL_RANK": "0"}
            store |= {"WORLD_SIZE": str(nodes), "LOCAL_WORLD_SIZE": "1"}
            environment |= store
        started = [
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                cwd=ROOT,
                env={**environment, "RANK": str(rank), "GROUP_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(nodes)
        ]
        said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{[p.returncode for p in started]}\n" + "\n".join(said)[-4000:])
    return said[0]


def _files(output: str) -> list[str]:
    """Those of the checkout, of a line `SEEN ...`."""
    (line,) = (line for line in output.splitlines() if line.startswith("SEEN"))
    paths = [Path(ROOT, word) for word in line.split()[1:]]
    inside = [path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT)]
    return sorted({str(path) for path in inside if path.parts[0] in ROOMS})


def main() -> None:
    for room in (*ROOMS, "tests"):
        files = sorted((ROOT / room).rglob("*.py"))
        print(f"{room:9} {len(files):4} files {statements(files):6} statements")
    graph = imports({name: path for room in ROOMS for name, path in modules_of(room).items()})
    across = {(a.split(".")[0], b.split(".")[0]) for a in graph for b in graph[a]}
    print("rooms importing rooms:", *sorted(f"{a}>{b}" for a, b in across if a != b))
    for one in circles(graph):
        print("circle:", *one)
    with tempfile.TemporaryDirectory() as folder:
        inventory = Path(folder) / "one.ini"
        inventory.write_text("[cluster]\none ansible_host=127.0.0.2\n")
        loaded = _run(FIRST_CONNECTION, str(inventory)).split()
        print(f"modules before the first connection: {len(loaded)}")
        words = ["--data", "data/digits", "--model", "resnet18"]
        words += ["--image_size", "32", "--epochs", "1", "--sync", "ef:2", "--sync_warmup", "0"]
        crossed = _files(_run(STEP, *words, nodes=2))
        print(f"files in a step with ef: {len(crossed)}:", *crossed)
    decided = _files(_run(DRIVER, f"--facts={MACHINE}"))
    print(f"files in a driver's decision: {len(decided)}:", *decided)


if __name__ == "__main__":
    main()
