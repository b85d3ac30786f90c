"""The hash of a tree of files, on the control machine and on nodes."""

import hashlib
import os
import pathlib


def tree_sha256(root, names=None):
    """SHA-256 over the names and contents of these files below `root` (a Path), without `names` of
    all files there; None where there is no such folder.

    For each file, in the order of the names: name, NUL, "x" or "-" (executable), NUL, SHA-256 of
    the contents, newline.
    """
    if not root.is_dir():
        return None
    if names is None:
        files = [path for path in root.rglob("*") if path.is_file()]
        names = [str(path.relative_to(root)) for path in files if "__pycache__" not in path.parts]
    total = hashlib.sha256()
    for name in sorted(names):
        path = root / name
        contents = hashlib.sha256(path.read_bytes()).hexdigest()
        mode = "x" if os.access(str(path), os.X_OK) else "-"
        total.update("{}\0{}\0{}\n".format(name, mode, contents).encode())
    return total.hexdigest()


def show(mark, folder):
    """Print the hash of a folder's tree after a mark by which it is found among other output."""
    print("{}{}".format(mark, tree_sha256(pathlib.Path(folder))))
