#!/usr/bin/env python3
"""Prepare a folder for a new name: relocate.py OLD NEW rewrites text files and links in OLD.

Text files are those under 1 MiB without a zero byte, such as pkg-config's. Run before the folder is
renamed; prints nothing. Standard library, Python >= 3.6.
"""

import os
import sys

LIMIT = 1 << 20


def relocate(old, new):
    for folder, folders, files in os.walk(old):
        for name in folders + files:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                target = os.readlink(path)
                if target == old or target.startswith(old + "/"):
                    os.unlink(path)
                    os.symlink(new + target[len(old) :], path)
            elif name in files and os.path.getsize(path) < LIMIT:
                rewrite(path, old.encode(), new.encode())


def rewrite(path, old, new):
    with open(path, "r+b") as file:
        content = file.read()
        if b"\0" in content or old not in content:
            return
        file.seek(0)
        file.write(content.replace(old, new))
        file.truncate()


if __name__ == "__main__":
    relocate(*sys.argv[1:])
