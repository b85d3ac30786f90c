"""What holds of every machine: how it may be called, which group of an inventory it is in, and how
far its clock may be from the control machine's."""

import re

GROUP = "cluster"
NOBODY = f"has no hosts in group [{GROUP}]: list your machines there."  # the end of a sentence
NAME = re.compile(r"[\w:][\w.:-]{0,200}")
# Seconds. What `make check` calls wrong, a run warns of, too.
CLOCK_TOLERANCE = 5.0


def fault(name: str) -> str:
    """Why a machine cannot be called so, as the end of a sentence; "" where it can."""
    if NAME.fullmatch(name):
        return ""
    return (
        f"calls a machine {name[:80]!r}: files are named by it, so write letters, digits, dots, "
        "hyphens and colons, beginning with no dot."
    )
