"""The arrows of docs/architecture.md: which room may import which."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import house
from tests import readers

ROOT = Path(__file__).parents[2]
ROOMS = {"contract", "tandem", "trainer", "launcher", "report", "lab"}
# Each room may import contract/, which owns what passes between rooms, and tandem/, of which any
# script is built, and no other room; the launcher also the report, whose figures it shows.
SHARED = {"contract", "tandem"}
MAY = {"contract": set(), "tandem": {"contract"}, "launcher": {*SHARED, "report"}}
NEVER = {
    "contract": {"torch", "torchvision", "fabric", "paramiko", "ansible"},
    "tandem": {"torchvision", "fabric", "paramiko", "ansible"},
    "trainer": {"fabric", "ansible"},
    "launcher": {"torch"},
    "report": {"torch", "torchvision", "fabric", "paramiko"},
    "lab": {"torch", "fabric", "ansible"},
}


def imported(path):
    """The modules that a file imports absolutely, wherever in it that stands."""
    for node in ast.walk(ast.parse(path.read_text())):
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
    """The control machine imports it before it has an environment's packages."""
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


def arrows():
    """The table of docs/architecture.md."""
    lines = ["| room | of other rooms it imports | it never imports |", "|---|---|---|"]
    for room in sorted(NEVER):
        files = (ROOT / room).rglob("*.py")
        others = {name.split(".")[0] for file in files for name in imported(file)} & ROOMS - {room}
        told = [
            ", ".join(f"`{name}`" for name in sorted(names)) or "nothing"
            for names in (others, NEVER[room])
        ]
        lines.append(f"| `{room}/` | {told[0]} | {told[1]} |")
    return "\n".join(lines)


def test_the_page_has_these_arrows():
    page = (ROOT / "docs/architecture.md").read_text()
    assert arrows() in page, f"docs/architecture.md needs this table:\n{arrows()}"


def way_of(thing):
    """The files of that list in docs/architecture.md."""
    part = (ROOT / "docs/architecture.md").read_text().split(f"## The way of {thing}\n", 1)[1]
    steps = re.findall(r"^\d+\. (.*(?:\n   .*)*)", part.split("\n## ", 1)[0], re.M)
    return [re.match(r"`([^`]+)`", step)[1] for step in steps]


@pytest.mark.parametrize(
    ("thing", "first", "last"),
    [
        ("a record", "tandem/timings.py", "report/read.py"),
        ("an option", "contract/options.py", "trainer/__main__.py"),
    ],
)
def test_the_files_that_it_crosses_are_there(thing, first, last):
    way = way_of(thing)
    assert (way[0], way[-1]) == (first, last) and len(way) > 5
    assert all((ROOT / path).is_file() for path in way)


def test_relative_imports_do_not_leave_their_room():
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            depth = len(path.relative_to(ROOT).parts) - 1
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert node.level <= depth, f"{path}: {node.module}"


def test_no_modules_import_one_another():
    """Wherever in a module an import stands: within a function it only hides the circle."""
    modules = {name: path for room in house.ROOMS for name, path in house.modules_of(room).items()}
    assert len(modules) > 200
    assert house.circles(house.imports(modules)) == []


def test_images_are_opened_in_one_place():
    """Another decoder is one file's change; augment.py has Pillow's geometry and colours."""
    opening = {
        path.relative_to(ROOT / "trainer").as_posix()
        for path in (ROOT / "trainer").rglob("*.py")
        if any(name.partition(".")[0] == "PIL" for name in imported(path))
    }
    assert opening == {"data/decode.py", "data/augment.py"}
    assert ".open(" not in (ROOT / "trainer/data/augment.py").read_text()


OPENING = {"open", "fdopen", "open_record", "read_text", "read_bytes", "read_yaml"}
RECEIVING = {"recv", "recvfrom", "recv_into", "recv_stderr", "loads", "load", "safe_load"}
LISTING = {"iterdir", "glob", "rglob", "scandir", "listdir", "walk"}


def reads(path):
    """Whether a module opens files, receives bytes, reads folders or takes JSON or YAML apart."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if name in OPENING | RECEIVING | LISTING and ast.unparse(node.func) != "ast.walk":
                return True
    return False


def test_what_comes_from_elsewhere_is_read_in_listed_modules_alone():
    """Whoever opens, receives or lists anything in another one says in tests/readers.py what it
    is: a reader, with its fuzzer, or why it needs none."""
    rooms = ("ansible", "contract", "launcher", "report", "tandem", "tools", "trainer")
    paths = {path for room in rooms for path in (ROOT / room).rglob("*.py") if reads(path)}
    found = {path.relative_to(ROOT).as_posix() for path in paths}
    fuzzed = {file for modules in readers.READERS.values() for file in modules}
    assert found - fuzzed == set(readers.OWN), "see OWN of tests/readers.py"
    assert not fuzzed & set(readers.OWN)


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
