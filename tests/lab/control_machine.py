"""A run of the lab whose control node has troubles of its own: a terminal, a disk, limits."""

import errno
import fcntl
import os
import pty
import subprocess
import termios
import threading
from pathlib import Path

from tests.lab.chaos_run import CHECKOUT, Running


class Controller(Running):
    """One `python -m launcher train` of a shell that did `before`. `terminal`: on one of its own,
    not into a file. `disk`: the folder that it has as runs/, if not this checkout's."""

    def __init__(self, lab, folder, mark, *words, before=":", disk=None, terminal=False):
        self.disk, self.terminal, self.keys = disk, terminal, None
        own = f"mkdir -p runs; mount --bind {disk} runs; " if disk else ""
        self.before = f'set -e; {own}{before}; exec "$@"'
        super().__init__(lab, folder, mark, *words)

    def start(self, *words: str) -> None:
        argv = ["sh", "-c", self.before, "sh", "python", "-m", "launcher", "train", *words]
        argv = self.lab.argv("exec", "--", *argv)
        if not self.terminal:
            streams = {"stdout": self.output, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(argv, cwd=CHECKOUT, **streams)
            return
        self.keys, there = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            cwd=CHECKOUT,
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(there)
        threading.Thread(target=self._read, args=[self.keys], daemon=True).start()

    def _read(self, screen: int) -> None:
        """What is on the screen, until it is closed."""
        while True:
            try:
                data = os.read(screen, 1 << 16)
            except OSError:
                return
            self.output.write(data.decode(errors="replace"))
            self.output.flush()

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self.keys)
        self.keys = None

    @property
    def folder(self) -> Path:
        return (self.disk or CHECKOUT / "runs") / self.name

    def close(self) -> None:
        super().close()
        if self.keys is not None:
            self.hang_up()


def fill(disk: Path) -> Path:
    """Take all that is free of a disk that others write to. Returns the file that does."""
    file = disk / "fill"
    with file.open("wb") as made:
        size = 0
        while (free := os.statvfs(disk)).f_bavail:
            # No more than half at a time: what others take meanwhile must not fail the whole.
            piece = -(-free.f_bavail // 2) * free.f_frsize
            try:
                os.posix_fallocate(made.fileno(), size, piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                continue  # others took it
            size += piece
    return file
