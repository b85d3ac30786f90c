#!/usr/bin/env python3
"""Times reading from a machine's disk and from its data set: diskprobe.py DATA SECONDS.

Prints {"disk": {"filesystem", "mb_per_second"}, "data": the same with "folder", or null} as JSON.
Standard library only, Python >= 3.6.
"""

import json
import os
import sys
import time
from pathlib import Path

CHUNK = 1 << 20


def timed_read(paths, seconds):
    """(bytes, seconds) of reading files one after another, without the page cache."""
    total, began = 0, time.monotonic()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while True:
                block = file.read(CHUNK)
                total += len(block)
                if time.monotonic() - began > seconds:
                    return total, time.monotonic() - began
                if not block:
                    break
    return total, time.monotonic() - began


def filesystem(path):
    """The type of the file system that holds a path (nfs4, cifs, ext4, ...)."""
    best, kind = "", "unknown"
    with Path("/proc/self/mounts").open() as mounts:
        for line in mounts:
            place, fstype = line.split()[1:3]
            if Path(place) in [path, *path.parents] and len(place) >= len(best):
                best, kind = place, fstype
    return kind


def data_rate(folder, seconds):
    """MB/s of reading the data set's own files; None where there is less than 64 MB of them."""
    folder = Path(folder).resolve()
    paths, size = [], 0
    for path in folder.rglob("*"):
        if path.is_file():
            paths.append(path)
            size += path.stat().st_size
        if size > 2 << 30:
            break
    figures = {"folder": str(folder), "filesystem": filesystem(folder), "mb_per_second": None}
    if size >= 64 << 20:
        count, spent = timed_read(paths, seconds)
        figures["mb_per_second"] = round(count / spent / 1e6, 1)
    return figures


def disk_rate(folder, seconds):
    """MB/s of reading one large file back from the disk that holds a folder."""
    path = folder / f"diskprobe-{os.getpid()}"
    try:
        with path.open("wb") as file:
            for _ in range(256):
                file.write(os.urandom(CHUNK))
            file.flush()
            os.fsync(file.fileno())
        count, spent = timed_read([path], seconds)
    finally:
        path.unlink()
    return {"filesystem": filesystem(folder), "mb_per_second": round(count / spent / 1e6, 1)}


def main():
    data, seconds = Path(sys.argv[1]), float(sys.argv[2])
    figures = {"disk": disk_rate(Path.home(), seconds)}
    figures["data"] = data_rate(data, seconds) if data.is_dir() else None
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
