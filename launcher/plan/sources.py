"""What a Python file imports, and which options it declares, as far as reading it says."""

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
MOST_SOURCE = 1 << 18  # bytes of a file that is parsed, in up to a thousand times as much memory


@dataclass(frozen=True)
class Loaded:
    """`packages`: their names, without the standard library; `sources`: the statements of the file
    and of its modules."""

    packages: set[str]
    sources: list[list[ast.stmt]]


def loaded_by(file: Path, roots: Sequence[Path]) -> Loaded:
    """What `file` imports as it is loaded, and the modules below `roots` in their turn."""
    waiting, seen, modules = [file], set[Path](), set[str]()
    packages, sources = set[str](), list[list[ast.stmt]]()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        try:
            sources.append(parsed(path))
        except (OSError, SyntaxError, ValueError):  # its own Python says what is wrong with it
            continue
        # Each is looked for once, however many files import it.
        imported = [m for m in dict.fromkeys(_imported(sources[-1])) if m not in modules]
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
    except (MemoryError, RecursionError):  # of the parser's own stack
        raise ValueError("it is nested too deeply") from None


def _imported(body: list[ast.stmt]) -> list[str]:
    """The modules that a source imports in any case: what it tries to import may be missing."""
    modules = []
    for node in body:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.append(node.module)
    return modules


def declares(sources: Sequence[list[ast.stmt]], options: Sequence[str]) -> str | None:
    """Which of these options a parser of the first source has. One in another source counts where
    it is made on import, or by what the others name of it: it may be another program's."""
    candidates = [number for number, body in enumerate(sources) if _option_of(body, options)]
    # All names that a source takes from elsewhere. None of them is its own, so what a candidate
    # defines stands here only where another source names it.
    taken = set().union(*map(_foreign_names, sources)) if any(candidates) else set[str]()
    for number in candidates:
        body = sources[number]
        if number:
            body = _reached(body, taken)
        if option := _option_of(body, options):
            return option
    return None


def _option_of(body: list[ast.stmt], options: Sequence[str]) -> str | None:
    """The first of these options that a call of add_argument names."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            for text in texts:
                if isinstance(text, str) and text in options:
                    return text
    return None


def _foreign_names(body: list[ast.stmt]) -> set[str]:
    """What a source names and does not define."""
    defined = {node.name for node in body if isinstance(node, DEFINITIONS)}
    return {name for node in body for name in _names(node)} - defined


def _reached(body: list[ast.stmt], named: set[str]) -> list[ast.stmt]:
    """The statements that run where others import this source, and use these names of it."""
    own = {node.name: node for node in body if isinstance(node, DEFINITIONS)}
    reached = [node for node in body if not isinstance(node, DEFINITIONS) and not _is_main(node)]
    waiting = [name for name in own if name in named]
    waiting += [name for statement in reached for name in _names(statement)]
    while waiting:
        if node := own.pop(waiting.pop(), None):
            reached.append(node)
            waiting += _names(node)
    return reached


def _names(statement: ast.AST) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name


def _is_main(statement: ast.stmt) -> bool:
    """Whether it runs only where the source is the program."""
    return isinstance(statement, ast.If) and "__name__" in _names(statement.test)
