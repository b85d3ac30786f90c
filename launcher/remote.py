"""Lets a machine evaluate a call in a module of Tandem. The machine may not have the module yet, so
it gets one text for `python -`: the module with all modules that it imports.
"""

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

MARK = "tandem-answer "  # before the answer of such a program: a .bashrc may print, too
# Python 3.11's ast.parse raises SystemError now and then if several threads call it at once.
PARSING = threading.Lock()
# Each module is made from its source. Its packages, such as `launcher`, are empty modules.
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
    """Return a Python program that loads a module of the checkout, and those that it imports, and
    then evaluates `call` in it. All of them may also import the standard library."""
    sources: dict[str, str] = {}  # by module; a module comes after the modules that it imports

    def path_of(name: str) -> Path:
        return CHECKOUT / f"{name.replace('.', '/')}.py"

    def visit(name: str) -> None:
        source = path_of(name).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                names = [alias.name for alias in getattr(node, "names", ())]
            for imported in names:
                if imported not in sources and path_of(imported).is_file():
                    visit(imported)
        sources[name] = source

    with PARSING:
        visit(module)
    lines = [f"_load({name!r}, {source!r})" for name, source in sources.items()]
    return "\n".join([LOADER, *lines, f"sys.modules[{module!r}].{call}", ""])


def ask(node: Node, module: str, call: str, kind: Any, seconds: float = SECONDS) -> Any:
    """Return the answer of a function of launcher/node on a machine, of the type `kind`. Raises
    OSError, UserError and Invalid."""
    # The guard's Python works even if the environment of the ranks does not.
    process = node.start([node.host.engine.guard_python, "-IB", "-"])
    output, stderr, _ = talk(process, program(module, call).encode(), seconds, len(PULSE))
    line = find_answer(output)
    if line is None:
        raise UserError(f"it gave no answer{stderr and f': {stderr}'}")
    return decode(line, kind, "answer")


def find_answer(output: bytes) -> str | None:
    """Return the text after MARK; None if there is no mark."""
    # A .bashrc may print before the answer, and a command after it.
    lines = output.decode(errors="replace").splitlines()
    return next((line[len(MARK) :] for line in lines if line.startswith(MARK)), None)


def tree_sha256(node: Node, folder: str) -> str | None:
    """Return the hash of a machine's files below `folder`; "" if the machine has no such folder,
    None if it does not answer."""
    try:
        kind = Annotated[str, matching("([0-9a-f]{64})?")]
        sha256: str = ask(node, "launcher.node.machine", f"show({MARK!r}, {folder!r})", kind)
    except (OSError, UserError, Invalid):
        return None
    return sha256
