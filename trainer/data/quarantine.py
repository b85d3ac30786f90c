"""The images that could not be used: each is logged once, and their number is limited."""

import logging
from typing import Dict, Iterable, NamedTuple

from ..errors import RankError

log = logging.getLogger(__name__)


class Bad(NamedTuple):
    path: str
    reason: str


class Quarantine:
    """The bad images that this rank has found so far. The user's files are left where they are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.found: Dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.found)

    def add(self, met: Iterable[Bad]) -> None:
        """Log each new file; raise RankError when there are more than `limit` of them."""
        for path, reason in met:
            if path in self.found:
                continue
            self.found[path] = reason
            log.warning("bad image %s: %s", path, reason)
            if len(self.found) > self.limit:
                raise RankError(
                    f"{len(self.found)} images cannot be used, the last is {path}: {reason}. "
                    f"Repair or remove them, or raise --bad_images (now {self.limit})."
                )
