"""Reads Python files without running them: which modules they import, and which options they
declare. build_script.py and build_trainer.py ask for the user's script or model."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.text import decode_text, read_bytes

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
MOST_SOURCE = 1 << 18  # bytes; parsing may take a thousand times as much memory


@dataclass(frozen=True)
class Loaded:
    """Holds what is loaded when a file is imported."""

    packages: set[str]  # names of imported packages, except those of the standard library
    sources: list[list[ast.stmt]]  # the statements of the file itself, then of its modules


def loaded_by(file: Path, roots: Sequence[Path]) -> Loaded:
    """Return what `file` imports as it is loaded, and what its modules below `roots` import."""
    waiting, visited, modules = [file], set[Path](), set[str]()
    packages, sources = set[str](), list[list[ast.stmt]]()
    while waiting:
        path = waiting.pop()
        if path in visited or not path.is_file():
            continue
        visited.add(path)
        try:
            sources.append(parsed(path))
        except (OSError, SyntaxError, ValueError):  # Python on the machine reports this error
            continue
        # Only imports at the top level count: an import within `try` or `if` may be optional.
        names = []
        for node in sources[-1]:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
        # Look for a module only once, even if many files import it.
        imported = [name for name in dict.fromkeys(names) if name not in modules]
        modules.update(imported)
        for module in imported:
            for root in roots:
                stem = root / module.replace(".", "/")
                waiting += [stem.with_suffix(".py"), stem / "__init__.py"]
            top = module.partition(".")[0]
            if not any((root / top).is_dir() or (root / f"{top}.py").is_file() for root in roots):
                packages.add(top)
    return Loaded(packages - sys.stdlib_module_names, sources)


def parsed(file: Path) -> list[ast.stmt]:
    """Parse a Python file in its own encoding. Raises SyntaxError, OSError and ValueError."""
    content = read_bytes(file, MOST_SOURCE)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError as error:  # a package of the machines may add this encoding
        raise ValueError(error.msg) from None
    text = decode_text(content, encoding)
    try:
        return ast.parse(text).body
    except (MemoryError, RecursionError):  # the parser's stack was full
        raise ValueError("it is nested too deeply") from None


def declares(sources: Sequence[list[ast.stmt]], options: Sequence[str]) -> str | None:
    """Return which of these options the program declares to its parser; None if it declares none.
    The first source is the program. A parser in another source counts if it is made during import,
    or in a function that other sources use: otherwise it may belong to another program."""
    candidates = [number for number, body in enumerate(sources) if _option_of(body, options)]
    # Names that a source uses and does not define. If a candidate defines one of these names, then
    # another source uses its definition.
    foreign = set().union(*map(_foreign_names, sources)) if any(candidates) else set[str]()
    for number in candidates:
        # All statements of the program itself count.
        body = _reached(sources[number], foreign) if number else sources[number]
        if option := _option_of(body, options):
            return option
    return None


def _option_of(body: list[ast.stmt], options: Sequence[str]) -> str | None:
    """Return the first of these options that a call of add_argument names."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            for text in (arg.value for arg in node.args if isinstance(arg, ast.Constant)):
                if isinstance(text, str) and text in options:
                    return text
    return None


def _foreign_names(body: list[ast.stmt]) -> set[str]:
    """Return the names that a source uses and does not define."""
    defined = {node.name for node in body if isinstance(node, DEFINITIONS)}
    return {name for node in body for name in _names(node)} - defined


def _reached(body: list[ast.stmt], named: set[str]) -> list[ast.stmt]:
    """Return the statements that run if other sources import this source and use `named`, names
    that it defines."""
    definitions = {node.name: node for node in body if isinstance(node, DEFINITIONS)}
    reached: list[ast.stmt] = []
    for node in body:
        # `if __name__ == "__main__"` runs only in the program itself.
        is_main = isinstance(node, ast.If) and "__name__" in _names(node.test)
        if not isinstance(node, DEFINITIONS) and not is_main:
            reached.append(node)
    waiting = [name for name in definitions if name in named]
    waiting += [name for statement in reached for name in _names(statement)]
    while waiting:
        if definition := definitions.pop(waiting.pop(), None):
            reached.append(definition)
            waiting += _names(definition)
    return reached


def _names(statement: ast.AST) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
