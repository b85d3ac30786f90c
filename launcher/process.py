"""One command on a node, over ssh or on this machine, through the same few methods."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile

import paramiko

from launcher.inventory import CHECKOUT

STATUS_SECONDS = 5.0
READS = 16


class SshProcess:
    """A command on another machine."""

    def __init__(self, channel: paramiko.Channel):
        self._channel = channel
        self._stderr = b""
        channel.setblocking(False)

    def fileno(self) -> int:
        return self._channel.fileno()

    def read(self) -> bytes | None:
        """What has arrived on stdout; b"" at the end; None when there is nothing yet."""
        for _ in range(READS):  # a flood there must not keep us from what matters
            if not self._channel.recv_stderr_ready():
                break
            self._stderr = (self._stderr + self._channel.recv_stderr(1 << 16))[-4096:]
        try:
            return self._channel.recv(1 << 18)
        except socket.timeout:
            return None

    def write(self, data: bytes) -> int:
        """Bytes taken, perhaps 0 while the network is stalled. Raises OSError when the other side
        is gone."""
        try:
            return self._channel.send(data)
        except socket.timeout:
            return 0

    def close_stdin(self) -> None:
        self._channel.shutdown_write()

    def wait(self) -> int:
        """The exit status, -1 when the connection broke; call it after read() has returned b""."""
        # Not recv_exit_status(): it waits for ever when a machine died between output and status.
        self._channel.status_event.wait(STATUS_SECONDS)
        return self._channel.exit_status

    def stderr(self) -> str:
        return self._stderr.decode(errors="replace").strip()

    @property
    def broken(self) -> bool:
        """Whether the way to the machine is gone, rather than the command's end reached."""
        return not self._channel.transport.is_active()

    def close(self) -> None:
        self._channel.close()


class LocalProcess:
    """A command on this machine."""

    broken = False

    def __init__(self, argv: list[str]):
        # A file needs no reader, so a talkative process does not block on it.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            argv,
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)

    def fileno(self) -> int:
        return self._stdout.fileno()

    def read(self) -> bytes | None:
        try:
            return os.read(self._stdout.fileno(), 1 << 18)
        except BlockingIOError:
            return None

    def write(self, data: bytes) -> int:
        try:
            return os.write(self._stdin.fileno(), data)
        except BlockingIOError:
            return 0

    def close_stdin(self) -> None:
        self._stdin.close()

    def wait(self) -> int:
        return self._process.wait()

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-4096:].decode(errors="replace").strip()

    def close(self) -> None:
        """Let go of its pipes. A guard whose stdin ends kills what it started, then itself."""
        if not self._stdin.closed:
            self._stdin.close()
        self._stdout.close()
        self._stderr.close()
