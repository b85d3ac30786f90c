"""The images that could not be used: each is logged once, and their number is limited."""

import logging
from typing import Dict, Iterable, NamedTuple

from contract.layout import printable
from contract.text import counted

from ..errors import DataLost, RankError

log = logging.getLogger(__name__)


class Bad(NamedTuple):
    """`mount`: the disk or share that did not give it, where the image itself is not at fault;
    `alone`: it gives others."""

    path: str
    reason: str
    mount: str = ""
    alone: bool = True


class Quarantine:
    """The bad images that this rank has found so far. The user's files are left where they are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.found: Dict[str, Bad] = {}

    def __len__(self) -> int:
        return len(self.found)

    def add(self, met: Iterable[Bad]) -> None:
        """Log each new file. Raises DataLost where a mount gives no image any more, and RankError
        when there are more than `limit` bad ones."""
        for bad in met:
            if bad.path in self.found:
                continue
            self.found[bad.path] = bad
            if not bad.alone:
                raise self._lost(bad, "and other images there cannot be read either")
            log.warning("bad image %s: %s", printable(bad.path), bad.reason)
            if len(self.found) <= self.limit:
                continue
            if sum(bool(one.mount) for one in self.found.values()) > self.limit // 2:
                raise self._lost(bad, f"as {len(self.found)} images could not be used before it")
            raise RankError(
                f"{counted(len(self.found), 'image')} cannot be used, the last is "
                f"{printable(bad.path)}: {bad.reason}. "
                f"Repair or remove them, or raise --bad_images (now {self.limit})."
            )

    def _lost(self, bad: Bad, why: str) -> DataLost:
        path = printable(bad.path)
        mount = bad.mount or next(one.mount for one in self.found.values() if one.mount)
        return DataLost(
            f"{mount} does not give the images any more: {path} {bad.reason}, {why}. Check "
            "that disk or file server; what was saved before is kept."
        )
