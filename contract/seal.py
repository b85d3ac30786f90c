"""A seal on what a folder says is to be carried out: a script, a model, a list of machines (a
program, where it is executable), the cells of a sweep. A folder of runs may come from elsewhere, so
RESUME takes at its word only what this user wrote from this checkout.
"""

import contextlib
import hmac
import json
import os
import secrets
from pathlib import Path
from typing import Any

from contract.text import write_whole

KEYS = Path(__file__).resolve().parents[1] / ".tandem"
BYTES = 32


def seal(words: Any) -> str:
    """That of plain values; "" where no key can be kept here, which then holds for nothing."""
    path = KEYS / f"seal-{os.getuid()}"  # other users of the checkout have theirs
    with contextlib.suppress(OSError):
        if not path.exists():
            write_whole(path, secrets.token_bytes(BYTES), 0o600)
        key = path.read_bytes()
        if len(key) == BYTES:
            return hmac.new(key, json.dumps(words, sort_keys=True).encode(), "sha256").hexdigest()
    return ""


def holds(words: Any, sealed: Any) -> bool:
    """Whether this is the seal of these words."""
    return bool(sealed) and hmac.compare_digest(seal(words).encode(), str(sealed).encode())
