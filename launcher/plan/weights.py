"""A file of weights on this machine (--weights), which every machine is sent."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from contract.errors import UserError
from contract.options import Options, path_of
from launcher.node.machine import tree_sha256
from launcher.plan.code import Code

FOLDER = "weights"  # below node_dir


def of(settings: Options) -> Code | None:
    """What is sent of the file; None where it is not on this machine, since it may be on the
    others. Raises UserError."""
    if not settings.weights:
        return None
    return _local(settings.weights)


@lru_cache(maxsize=1)  # a later attempt sends what the first one sent
def _local(typed: str) -> Code | None:
    file = path_of("--weights", typed)
    if not file.is_file():
        return None
    try:
        sha256 = tree_sha256(file.parent, [file.name])
    except OSError as error:
        raise UserError(f"--weights {typed}: cannot be read: {error.strerror}.") from None
    return Code((file.name,), sha256 or "", None, "", file.parent, FOLDER)


def check(settings: Options) -> None:
    """Raise UserError for a file that can be nowhere: on other machines only a path from / leads
    anywhere."""
    typed = settings.weights
    if typed and not of(settings) and not Path(typed).is_absolute():
        raise UserError(
            f"ARGS='--weights {typed}': there is no such file here: correct the path, or give one "
            "from / that leads to the file on every machine."
        )
