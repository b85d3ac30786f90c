"""Seal the words of a run's folder that RESUME would run: a script, a model, an inventory (which
may be a program), and the cells of a sweep. A folder of runs may come from another person, so
RESUME trusts only what this user wrote from this checkout."""

import contextlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from contract.text import write_whole

KEYS = Path(__file__).resolve().parents[1] / ".tandem"  # the folder with the users' keys
BYTES = 32  # of a key


def seal(words: Any) -> str:
    """Return the seal of plain values; "", which `holds` rejects, if no key can be stored."""
    path = KEYS / f"seal-{os.getuid()}"  # each user of the checkout has a key
    key = _read_key(path)
    if not key:
        with contextlib.suppress(OSError):
            write_whole(path, secrets.token_bytes(BYTES), 0o600)
        key = _read_key(path)
    if not key:
        return ""
    return hmac.new(key, json.dumps(words, sort_keys=True).encode(), "sha256").hexdigest()


def _read_key(path: Path) -> bytes:
    """Return the key that this user wrote and nobody else can read; b"" for any other file.
    Another user who can write here may have replaced the key with their own, or with a link."""
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            is_ours = status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o600
            if stat.S_ISREG(status.st_mode) and is_ours and status.st_size == BYTES:
                return file.read(BYTES)
    return b""


def holds(words: Any, sealed: Any) -> bool:
    """Return whether `sealed` is the seal of these words."""
    return bool(sealed) and hmac.compare_digest(seal(words).encode(), str(sealed).encode())
