"""Check whether a folder of the control node is a data set of a kind, before it is copied.

Role data runs this program, with the checkout in PYTHONPATH; contract/layout.py defines the kinds.
Exit code 1: the folder is not a data set, and stderr has the reason. Otherwise stdout has a line of
JSON with its listings, and a line with a note on skipped files.
"""

import json
import sys
from pathlib import Path

from contract import layout


def examine(root, kind):
    """Return (problem, note on skipped files).

    The problem explains why `root` cannot be copied as a data set of this kind; "" if it can.
    """
    if kind == layout.FILES:
        try:
            listing, tree = layout.list_files(root, lambda: None)
        except layout.LayoutError as error:
            return str(error), ""
        return broken_links(root, tree), listing["note"]
    try:
        splits = {name: layout.read_split(root, name) for name in layout.SPLITS}
    except layout.LayoutError as error:
        entry = f"{{name: {root.name}, kind: {layout.FILES}}}"
        hint = f" If it has no image classes, write it as {entry} in data_sets."
        return f"{root}: {error}{hint if root.is_dir() else ''}", ""
    empty = [name for name, split in splits.items() if not any(split.images.values())]
    if empty:
        return f"{root} has no images in {' and '.join(empty)}", ""
    note = "; ".join(filter(None, (split.note(name) for name, split in splits.items())))
    return broken_links(root, *splits.values()), note


def broken_links(root, *splits):
    """Describe the first link that cannot be followed; "" if there is none."""
    # rsync copies the targets of links, so every copy would lack these files.
    links = [link for split in splits for link in split.broken_links]
    if not links:
        return ""
    link_text = layout.printable(layout.describe_link(min(links)))
    return f"{link_text}, the first of {len(links)} in {root}: repair or remove them"


if __name__ == "__main__":
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    problem, note = examine(folder, kind)
    if not problem:
        # The launcher looks for the listings in this folder before a run.
        store = Path(__file__).resolve().parents[1] / ".tandem"
        print(json.dumps(layout.read_listings(folder, store, kind=kind)))
        print(note)
    sys.exit(problem or 0)
