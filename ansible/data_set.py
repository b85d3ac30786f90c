"""Says whether a folder of the control machine is a data set of a kind, before it is copied.

Run by role data, with the checkout in PYTHONPATH; contract/layout.py defines the kinds.
Exit code 1: it is not one, and stderr says why. Else stdout says what of it is not read.
"""

import sys
from pathlib import Path

from contract import layout


def examine(root, kind):
    """Return why `root` cannot be copied as a data set of this kind, or "", and a note on what of
    it is not read."""
    if kind == layout.FILES:
        return examine_files(root)
    try:
        read = {split: layout.read_split(root, split) for split in layout.SPLITS}
    except layout.LayoutError as error:
        entry = f"{{name: {root.name}, kind: {layout.FILES}}}"
        hint = f" If it has no image classes, write it as {entry} in data_sets."
        return f"{root}: {error}{hint if root.is_dir() else ''}", ""
    empty = [split for split in layout.SPLITS if not any(read[split].images.values())]
    if empty:
        return f"{root} has no images in {' and '.join(empty)}", ""
    note = "; ".join(filter(None, (read[split].note(split) for split in layout.SPLITS)))
    return broken_links(root, *read.values()), note


def examine_files(root):
    """Do the same for a folder of any files."""
    try:
        listing, read = layout.list_files(root, lambda: None)
    except layout.LayoutError as error:
        return str(error), ""
    return broken_links(root, read), listing["note"]


def broken_links(root, *splits):
    """Name the first link that cannot be followed: what it led to would be missing in every
    copy."""
    links = [link for split in splits for link in split.broken_links]
    if not links:
        return ""
    link_text = layout.printable(layout.describe_link(min(links)))
    return f"{link_text}, the first of {len(links)} in {root}: repair or remove them"


if __name__ == "__main__":
    problem, note = examine(Path(sys.argv[1]), sys.argv[2])
    print(note)
    sys.exit(problem or 0)
