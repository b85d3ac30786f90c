"""Our modules as one text for `python -`, for a machine that does not have the code yet."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

from launcher.machines.inventory import CHECKOUT

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
