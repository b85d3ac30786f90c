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
MAX_SOURCE_BYTES = 1 << 18  # of a file; parsing may take a thousand times as much memory


@dataclass(frozen=True)
class LoadedSources:
    """Holds what is loaded when a file is imported."""

    packages: set[str]  # names of imported packages, except those of the standard library
    sources: list[list[ast.stmt]]  # the statements of the file itself, then of its modules


def find_loaded(file: Path, roots: Sequence[Path]) -> LoadedSources:
    """Return what `file` imports as it is loaded, and what its modules below `roots` import."""
    pending, visited, modules = [file], set[Path](), set[str]()
    packages, sources = set[str](), list[list[ast.stmt]]()
    while pending:
        path = pending.pop()
        if path in visited or not path.is_file():
            continue
        visited.add(path)
        # Parse the file in its own encoding. Python on the machine reports what is wrong with it,
        # and has perhaps a package that adds its encoding. A file that is nested too deeply fills
        # the parser's stack.
        try:
            content = read_bytes(path, MAX_SOURCE_BYTES)
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            sources.append(ast.parse(decode_text(content, encoding)).body)
        except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
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
                pending += [stem.with_suffix(".py"), stem / "__init__.py"]
            top = module.partition(".")[0]
            if not any((root / top).is_dir() or (root / f"{top}.py").is_file() for root in roots):
                packages.add(top)
    return LoadedSources(packages - sys.stdlib_module_names, sources)


def find_declared_option(sources: Sequence[list[ast.stmt]], options: Sequence[str]) -> str | None:
    """Return which of these options the program declares to its parser; None if it declares none.
    The first source is the program. A parser in another source counts if it is made during import,
    or in a function that other sources use: otherwise it may belong to another program."""
    candidates = [number for number, body in enumerate(sources) if _find_option(body, options)]
    # Names that a source uses and does not define. If a candidate defines one of these names, then
    # another source uses its definition. The program, number 0, does not need these names.
    foreign = set().union(*map(_foreign_names, sources)) if any(candidates) else set[str]()
    for number in candidates:
        # All statements of the program itself count.
        body = _find_reached(sources[number], foreign) if number else sources[number]
        if option := _find_option(body, options):
            return option
    return None


def _find_option(body: list[ast.stmt], options: Sequence[str]) -> str | None:
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


def _find_reached(body: list[ast.stmt], used_names: set[str]) -> list[ast.stmt]:
    """Return the statements that run if other sources import this source, and use those of its
    definitions that are among `used_names`."""
    definitions = {node.name: node for node in body if isinstance(node, DEFINITIONS)}
    reached: list[ast.stmt] = []
    for node in body:
        # `if __name__ == "__main__"` runs only in the program itself.
        is_main = isinstance(node, ast.If) and "__name__" in _names(node.test)
        if not isinstance(node, DEFINITIONS) and not is_main:
            reached.append(node)
    # A definition that is reached may use further definitions.
    pending = [name for name in definitions if name in used_names]
    pending += [name for statement in reached for name in _names(statement)]
    while pending:
        if definition := definitions.pop(pending.pop(), None):
            reached.append(definition)
            pending += _names(definition)
    return reached


def _names(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement uses, attributes and imported names included."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
