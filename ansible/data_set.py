"""Says whether a folder of the control machine is a data set with images, before it is copied.

Run by role data, with the checkout in PYTHONPATH; contract/layout.py defines a data set.
Exit code 1: it is not one, and stderr says why.
"""

import sys
from pathlib import Path

from contract import layout


def problem(root):
    """Why `root` is not a data set with images in each split; "" if it is one."""
    try:
        classes = {split: layout.images_by_class(root, split) for split in layout.SPLITS}
    except layout.LayoutError as error:
        return f"{root}: {error}"
    empty = [split for split, images in classes.items() if not any(images.values())]
    return f"{root} has no images in {' and '.join(empty)}" if empty else ""


if __name__ == "__main__":
    sys.exit(problem(Path(sys.argv[1])) or 0)
