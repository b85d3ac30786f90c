"""What a file of Python loads, read from its source and from those beside it that it imports."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Loaded:
    """`packages`: their names, without the standard library; `texts`: the sources that were
    read."""

    packages: set[str]
    texts: list[str]


def of(file: Path, roots: Sequence[Path]) -> Loaded:
    """What `file` imports as it is loaded, and the modules below `roots` in their turn."""
    left, seen = [file], set[Path]()
    packages, texts = set[str](), list[str]()
    while left:
        file = left.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        with contextlib.suppress(SyntaxError, OSError, ValueError):
            texts.append(file.read_text(encoding="utf-8"))
            for module in _imported(texts[-1]):
                beside = [root / module.replace(".", "/") for root in roots]
                left += [one.with_suffix(".py") for one in beside]
                left += [one / "__init__.py" for one in beside]
                top = module.partition(".")[0]
                if not any(_holds(root, top) for root in roots):
                    packages.add(top)
    return Loaded(packages - sys.stdlib_module_names, texts)


def _holds(root: Path, top: str) -> bool:
    return (root / top).is_dir() or (root / f"{top}.py").is_file()


def _imported(text: str) -> list[str]:
    """The modules that a source imports in any case: what it tries to import may be missing."""
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return found
