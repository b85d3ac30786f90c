#!/usr/bin/env python3
"""Prepare a folder for a new name: relocate.py OLD NEW rewrites text files and links in OLD.

Role cuda runs this file on a machine (Python >= 3.6) before it renames the folder of a new toolkit.
A file counts as text if it has less than 1 MiB and no zero byte, such as those of pkg-config.
"""

import os
import sys

TEXT_BYTES_MAX = 1 << 20


def relocate(old_folder, new_folder):
    """Replace the path of the folder in all links and text files below it."""
    for folder, folders, files in os.walk(old_folder):
        for name in folders + files:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                target = os.readlink(path)
                # A relative link needs no change, nor does a link out of the folder.
                if target == old_folder or target.startswith(old_folder + "/"):
                    os.unlink(path)
                    os.symlink(new_folder + target[len(old_folder) :], path)
            elif name in files and os.path.getsize(path) < TEXT_BYTES_MAX:
                rewrite(path, old_folder.encode(), new_folder.encode())


def rewrite(path, old_bytes, new_bytes):
    with open(path, "r+b") as file:
        content = file.read()
        if b"\0" in content or old_bytes not in content:
            return
        file.seek(0)
        file.write(content.replace(old_bytes, new_bytes))
        file.truncate()


if __name__ == "__main__":
    relocate(*sys.argv[1:])
