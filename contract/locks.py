"""Files that a process holds while it does what none beside it may do."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TextIO


def open_lock(path: Path) -> TextIO:
    """A file to lock, its owner's alone, as it is: whoever can read a file can lock it. Follows no
    link, since its folder may be somebody else's."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):  # another user's
        os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
