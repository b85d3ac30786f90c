"""Says whether a folder of the control machine is a data set with images, before it is copied.

Run by role data, with the checkout in PYTHONPATH; contract/layout.py defines a data set.
Exit code 1: it is not one, and stderr says why. Else stdout says what of it is not read.
"""

import sys
from pathlib import Path

from contract import layout


def examine(root):
    """Why `root` cannot be copied as a data set, or ""; and what of it is not read."""
    try:
        read = {split: layout.read_split(root, split) for split in layout.SPLITS}
    except layout.LayoutError as error:
        return f"{root}: {error}", ""
    empty = [split for split in layout.SPLITS if not any(read[split].images.values())]
    if empty:
        return f"{root} has no images in {' and '.join(empty)}", ""
    links = [link for split in read.values() for link in split.broken_links]
    if links:  # what they led to would be missing in every copy
        first = layout.printable(layout.describe_link(min(links)))
        return f"{first}, the first of {len(links)} in {root}: repair or remove them", ""
    return "", "; ".join(filter(None, (read[split].note(split) for split in layout.SPLITS)))


if __name__ == "__main__":
    problem, note = examine(Path(sys.argv[1]))
    print(note)
    sys.exit(problem or 0)
