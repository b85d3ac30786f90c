"""The images that a machine has, by the trainer's own rule of what a data set is."""

import hashlib
import json
import os
import pathlib

from contract import layout
from launcher.machines.probes.command import keep


def data(folder, node_dir):
    """Classes and number of images of train/ and val/, or what keeps them from being a data set."""
    root = pathlib.Path(folder)
    there = bool(folder) and root.is_dir()
    found = {"path": folder, "exists": there, "problem": None, "splits": {}, "others": []}
    if folder and not there:
        found["others"] = others(root.parent)
    if found["exists"]:
        try:
            with layout.readable():
                found["splits"] = splits(root, pathlib.Path(node_dir))
        except layout.LayoutError as error:
            found["problem"] = str(error)
    return found


def others(folder):
    """The data sets beside one that is missing, by name; at most ten."""
    try:
        names = sorted(path.name for path in folder.iterdir() if (path / "train").is_dir())
    except OSError:
        return []
    return [name for name in names if name.isprintable()][:10]


def splits(root, node_dir):
    """The listings of train/ and val/, made again only when one of their folders has changed."""
    real = root.resolve()
    cache = node_dir / "manifests" / hashlib.sha256(os.fsencode(str(real))).hexdigest()[:16]
    key = [str(real), *layout.SUFFIXES]
    try:
        cached = json.loads(cache.read_text())
        known = cached["folders"]
        if cached["key"] == key and known == stamps(known):
            return cached["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    folders = stamps(below(real))  # before the listing: so later changes are seen
    found = {split: listing(real, split) for split in layout.SPLITS}
    keep({"key": key, "folders": folders, "splits": found}, cache)
    return found


def below(root):
    """The folders whose modification time changes when an image is added or removed."""
    for split in layout.SPLITS:
        names = layout.class_names(root, split)
        yield str(root / split)
        for name in names:
            for where, _ in layout.walk(str(root / split / name)):
                yield where


def stamps(folders):
    return {folder: pathlib.Path(folder).stat().st_mtime_ns for folder in folders}


def listing(root, split):
    """Number of images, classes and a hash of the names and sizes."""
    by_class = layout.images_by_class(root, split)
    total = hashlib.sha256()
    images = [path for paths in by_class.values() for path in paths]
    for path in images:
        total.update(os.fsencode(f"{path}\0{size(root / path)}\n"))
    return {
        "classes": sum(bool(paths) for paths in by_class.values()),
        "images": len(images),
        "sha256": total.hexdigest(),
    }


def size(path):
    """In bytes; None for a link that leads nowhere, a bad image in training."""
    try:
        return path.stat().st_size
    except OSError:
        return None
