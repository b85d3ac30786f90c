"""Name the records of a run, files of nodes/<host>/ that grow by whole lines
(docs/run-directory.md), the categories of a rank's time, and the counters of its sums."""

import re
from typing import Iterable, List, NamedTuple, Tuple


class Category(NamedTuple):
    """Describe a category of a rank's time. `kind`: COMPUTE, LOCAL (other work of the rank), or
    PEERS (waiting for other ranks); "" if the category is not part of a step."""

    words: str  # the name in the times of a run; {} is the word for samples, such as images
    light: str  # the colour on a light page
    dark: str  # the colour on a dark page
    kind: str = ""
    short: str = ""  # the name in the times of a step


COMPUTE, LOCAL, PEERS = "compute", "local", "peers"
# The categories of a rank's time, in the order of the report. A rank is in exactly one at a time.
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
    # In a script, the time from the end of its loader to the next epoch, which is in no step.
    "between_epochs": Category("work between epochs", "#6f7d1f", "#b3c25a", short="between"),
    "other": Category("other", "#5b6671", "#a3afba", LOCAL, "other"),
}
# Categories that no rank records: the two parts of `sync_exposed`, which the report computes, and
# wall time outside all categories.
DERIVED = {
    "network": CATEGORIES["sync_exposed"]._replace(short="network"),
    "peers": Category("waiting for slower ranks", "#8c2f5c", "#c9689d", PEERS, "slower"),
    "gap": Category("not accounted for", "#fff", "#1b2229"),
}


def of_kind(*kinds: str) -> Tuple[str, ...]:
    """Return the names of the categories of these kinds."""
    return tuple(name for name, category in CATEGORIES.items() if category.kind in kinds)


# A rank's counters of its collective sums: integers of 8 bytes each, in memory that its guard
# shares (tandem/sums.py writes, launcher/node/workers.py reads). `first` and `newest` are times of
# sums, in nanoseconds of CLOCK_MONOTONIC; `queued` and `completed` are collectives by NCCL's Flight
# Recorder, -1 if it was not asked.
SUM_COUNTERS = ("pid", "entered", "bucket", "passes", "first", "newest", "queued", "completed")
SUM_BYTES = 8 * len(SUM_COUNTERS)

# Newer torch begins each line of a rank's traceback with `[rank0]: `.
RANK = re.compile(r"^\[rank\d+\]:\s?")
MOST_SCALARS = 8  # the names of scalars that the ranks of a run may record (tandem/timings.py)
PIECE = 1 << 15  # bytes of a file that a guard sends at once (launcher/node/records.py)


def machine(attempt: int) -> str:
    """Return the name of the file in which a guard records its machine's state."""
    return f"machine.{attempt}.jsonl"


def steps(rank: int, attempt: int) -> str:
    """Return the name of the file in which a rank records its steps."""
    return f"rank{rank}.{attempt}.steps.jsonl"


def names(attempt: int, ranks: Iterable[int]) -> List[str]:
    """Return the names of all files of a node that has these ranks in an attempt."""
    return [machine(attempt), *(steps(rank, attempt) for rank in ranks)]
