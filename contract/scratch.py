"""Make temporary folders that nobody has to clean up. A program that makes a folder first removes
the folders of its user whose makers were killed. Standard library, because guards call this code on
machines without packages."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Iterator, Tuple

PREFIX = "tandem-"
# The maker of a folder keeps this file in it locked; the kernel unlocks it however the maker ends.
LOCK = ".maker"


def make_scratch() -> Tuple[str, int]:
    """Make a folder among the temporary files. Returns its path and its lock, a file descriptor
    that must stay open as long as the folder is needed. Raises OSError."""
    remove_abandoned()
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        lock = os.open(f"{folder}/{LOCK}", os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have taken the folder for an abandoned one before it was locked.
        if Path(folder, LOCK).exists():
            return folder, lock
        os.close(lock)


def remove_abandoned() -> None:
    """Remove this user's folders whose makers no longer run. Ignores errors."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as scan:
        for entry in scan:
            if not (entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False)):
                continue
            # An OSError means that the folder has no lock file, or that its maker runs.
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                    continue
                descriptor = os.open(f"{entry.path}/{LOCK}", os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # This process has the lock now, so no maker uses the folder.
                    shutil.rmtree(entry.path, ignore_errors=True)
                finally:
                    os.close(descriptor)


def remove_scratch(folder: str, lock: int) -> None:
    """Remove a folder that make_scratch made."""
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder that is removed after the block. Raises OSError."""
    folder, lock = make_scratch()
    try:
        yield Path(folder)
    finally:
        remove_scratch(folder, lock)
