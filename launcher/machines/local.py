"""Makes this machine a node: for trials, for tests, and for several nodes on one PC (engine.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from launcher.machines.engine import Engine, Host
from launcher.machines.inventory import CHECKOUT


class LocalProcess:
    """Runs a command on this machine. Its methods are described in engine.Process."""

    broken = False  # no connection is between this process and the command

    def __init__(self, argv: list[str]):
        # The command can write to a file even if nobody reads; a full pipe would block it.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            argv, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        # One thread serves all nodes, so no call may block.
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)

    def fileno(self) -> int:
        return self._stdout.fileno()

    def read(self) -> bytes | None:
        try:
            return os.read(self._stdout.fileno(), 1 << 18)
        except BlockingIOError:
            return None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return os.write(self._stdin.fileno(), data)
        except BlockingIOError:
            return 0

    def close_stdin(self) -> None:
        self._stdin.close()

    def wait(self, seconds: float = 60.0) -> int:  # srun may take longer to end than ssh
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:  # the command has closed its stdout, but still runs
            return -1

    def stderr(self) -> str:
        # Errors are at the end of the output, and a command may print any amount.
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 4096))
        return self._stderr.read(4096).decode(errors="replace").strip()

    def close(self) -> None:
        if not self._stdin.closed:
            self._stdin.close()
        self._stdout.close()
        self._stderr.close()


class LocalNode:
    """Starts commands on this machine. Several nodes may be this machine."""

    def __init__(self, host: Host):
        self.host = host

    def open(self) -> None:
        pass

    def start(self, argv: list[str]) -> LocalProcess:
        return LocalProcess(argv)

    def close(self) -> None:
        pass


ENGINE = Engine(
    node=LocalNode,
    is_local=True,
    guard_python=sys.executable,
    repair_hint="run `tools/venv.sh torch`",
    data_hint="`make data/digits` writes the digits; for your own images type DATA=<folder>",
)
