"""Define rules for machines: names, the group in the inventory, and the clocks' tolerance."""

import re

GROUP = "cluster"
NOBODY = f"has no hosts in group [{GROUP}]: list your machines there."  # the end of a sentence
NAME = re.compile(r"[\w:][\w.:-]{0,200}")
# Seconds between the clocks of a machine and the control node. `make check` reports a larger
# difference, and a run warns about it.
CLOCK_TOLERANCE = 5.0


def name_fault(name: str) -> str:
    """Return why a machine cannot have this name, as the end of a sentence; "" if it can."""
    if NAME.fullmatch(name):
        return ""
    return (
        f"has a machine {name[:80]!r}: file names contain the machine's name, so use only "
        "letters, digits, dots, hyphens and colons, and do not start with a dot."
    )
