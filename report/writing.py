"""Writes the report's files, each whole or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

from contract.errors import UserError


def write(path: Path, content: str) -> None:
    """Replace a file atomically, or leave it as it was. Raises UserError when it cannot be
    written."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(content, encoding="utf-8", errors="replace")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise UserError(
            f"Cannot write {path}: {error.strerror}. Make room on that disk, or give the folder to "
            "your user."
        ) from None
