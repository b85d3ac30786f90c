"""The records of a run: files of nodes/<host>/ that grow by whole lines (docs/run-directory.md)."""

import re
from typing import Iterable, List, NamedTuple, Tuple


class Category(NamedTuple):
    """Something that a rank spends time on. `kind` says what it is in a step: COMPUTE, LOCAL (other
    work of its own), or PEERS, which is waiting for other ranks; "" where it is no part of one."""

    words: str  # in the times of a run; {} is the word for samples, such as images
    light: str  # its colour on a light page
    dark: str
    kind: str = ""
    short: str = ""  # in the parts of a step


COMPUTE, LOCAL, PEERS = "compute", "local", "peers"
# Of a rank's time, in the order in which they are shown. A rank is in one of them at each moment.
CATEGORIES = {
    "start_stop": Category("start and stop", "#76828e", "#8494a3"),
    "data": Category("waiting for {}", "#b87700", "#e69f00", LOCAL, "{}"),
    "h2d": Category("copy to device", "#8f7c10", "#f0d264", LOCAL, "copy"),
    "forward": Category("forward", "#2a7fc1", "#4f9fdd", COMPUTE, "forward"),
    "backward": Category("backward", "#14507f", "#3f83c0", COMPUTE, "backward"),
    "sync_exposed": Category("waiting for gradients", "#d1495b", "#ea6577", PEERS, "waits"),
    "optimizer": Category("optimizer", "#2f8f78", "#56b4a0", COMPUTE, "optim."),
    "evaluate": Category("evaluation", "#8a6fb8", "#a58ad0"),
    "checkpoint": Category("checkpoints", "#8a5a00", "#c8953a"),
    # Of a script, from the end of its loader to the next epoch. It is no part of a step.
    "between_epochs": Category("work between epochs", "#6f7d1f", "#b3c25a", short="between"),
    "other": Category("other", "#5b6671", "#a3afba", LOCAL, "other"),
}
# What no rank records: the two parts of `sync_exposed`, and the wall time beyond all categories.
DERIVED = {
    "network": CATEGORIES["sync_exposed"]._replace(short="network"),
    "peers": Category("waiting for slower ranks", "#8c2f5c", "#c9689d", PEERS, "slower"),
    "gap": Category("not accounted for", "#fff", "#1b2229"),
}


def of_kind(*kinds: str) -> Tuple[str, ...]:
    """The names of these categories."""
    return tuple(name for name, category in CATEGORIES.items() if category.kind in kinds)


# Newer torch begins each line of a rank's traceback with its rank.
RANK = re.compile(r"^\[rank\d+\]:\s?")
PIECE = 1 << 15  # bytes of a file that a guard sends at once (launcher/node/records.py)


def machine(attempt: int) -> str:
    """What a guard records of its machine."""
    return f"machine.{attempt}.jsonl"


def steps(rank: int, attempt: int) -> str:
    """What a rank records of its steps."""
    return f"rank{rank}.{attempt}.steps.jsonl"


def names(attempt: int, ranks: Iterable[int]) -> List[str]:
    """All files of a node in an attempt in which it has these ranks."""
    return [machine(attempt), *(steps(rank, attempt) for rank in ranks)]
