"""Tables in Markdown, and pages of which a program writes a part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table without a last newline. `head`, `rows`: cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def replace_part(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what a page has between the lines `begin` and `end`."""
    pattern, part = f"{re.escape(begin)}.*?{re.escape(end)}", f"{begin}\n{text}\n{end}"
    content = page.read_text(encoding="utf-8")
    page.write_text(re.sub(pattern, lambda _: part, content, flags=re.DOTALL), encoding="utf-8")
