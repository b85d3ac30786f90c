"""Has a machine evaluate a call in a module of ours, which it may not have yet: what is sent is one
text for `python -`, the module with all that it imports."""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from typing import Annotated, Any

from boundary.schema import Invalid, decode, matching
from contract.errors import UserError
from launcher.machines.engine import Node, talk
from launcher.machines.inventory import CHECKOUT
from launcher.node.machine import PULSE

MARK = "tandem-answer "  # before what such a program answers: a .bashrc may print, too
# Python 3.11's ast.parse raises SystemError now and then where several threads call it at once.
PARSING = threading.Lock()
# Each module is made from its source; its packages are empty and know their modules by name.
LOADER = """
import sys, types
def _load(name, source):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    package, _, last = name.rpartition(".")
    if package:
        if package not in sys.modules:
            _load(package, "")
        setattr(sys.modules[package], last, module)
    exec(compile(source, name, "exec"), module.__dict__)
"""
SECONDS = 30.0


def program(module: str, call: str) -> str:
    """A Python program that loads a module of the checkout, and those that it imports, and then
    evaluates `call` in it. Beside each other they may import the standard library."""
    lines = [LOADER]
    for name in with_imports(module):
        lines.append(f"_load({name!r}, {_path(name).read_text(encoding='utf-8')!r})")
    return "\n".join([*lines, f"sys.modules[{module!r}].{call}", ""])


def with_imports(module: str) -> list[str]:
    """A module of the checkout after those that it imports, they after theirs, and so on."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        for node in ast.walk(ast.parse(_path(name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                inner = [alias.name for alias in getattr(node, "names", ())]
            for other in inner:
                if other not in order and _path(other).is_file():
                    visit(other)
        order[name] = None

    with PARSING:
        visit(module)
    return list(order)


def _path(name: str) -> Path:
    return CHECKOUT / f"{name.replace('.', '/')}.py"


def ask(node: Node, module: str, call: str, kind: Any, seconds: float = SECONDS) -> Any:
    """What a function of launcher/node answers on a machine, by the guard's Python. Raises OSError,
    UserError and Invalid."""
    process = node.start([node.host.engine.guard_python, "-IB", "-"])
    output, said, _ = talk(process, program(module, call).encode(), seconds, len(PULSE))
    line = marked(output)
    if line is None:
        raise UserError(f"it gave no answer{said and f': {said}'}")
    return decode(line, kind, "answer")


def marked(output: bytes) -> str | None:
    """What stands behind the mark."""
    lines = output.decode(errors="replace").splitlines()
    return next((line[len(MARK) :] for line in lines if line.startswith(MARK)), None)


def tree_sha256(node: Node, folder: str) -> str | None:
    """The hash of the tree that a machine holds in `folder`, "" where it has no such folder, None
    where it cannot be known."""
    try:
        kind = Annotated[str, matching("([0-9a-f]{64})?")]
        known: str = ask(node, "launcher.node.machine", f"show({MARK!r}, {folder!r})", kind)
    except (OSError, UserError, Invalid):
        return None
    return known
