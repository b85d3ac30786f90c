"""The host keys that the user has confirmed, and those that were revoked.

OpenSSH's files are read line by line. A line that is damaged, in another encoding, with an unknown
type of key, or of a certificate authority is treated as if it were not there, and hides no other
line.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

FILES = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))


class Revoked(paramiko.SSHException):
    """A machine showed a key that a known_hosts file marks as @revoked."""


@dataclass(frozen=True)
class Line:
    """One key for the names that the patterns match."""

    entry: HostKeyEntry
    revoked: bool

    def means(self, name: str) -> bool:
        """Whether the patterns match, by the rules of sshd(8): `*` and `?`, `!` before a pattern
        that must not match, or a hash of the name."""
        hashed = paramiko.HostKeys()
        hashed._entries.append(self.entry)
        if hashed.lookup(name) is not None:
            return True
        patterns = self.entry.hostnames
        if any(p.startswith("!") and _like(name, p[1:]) for p in patterns):
            return False
        return any(_like(name, p) for p in patterns if p[:1] not in ("!", "|"))


def _like(name: str, pattern: str) -> bool:
    # Brackets stand for themselves: [192.0.2.1]:2222.
    return fnmatch.fnmatchcase(name.lower(), pattern.lower().replace("[", "[[]"))


def read(data: bytes) -> list[Line]:
    """The usable lines of a file."""
    found = []
    for raw in data.split(b"\n"):
        try:
            words = raw.decode("utf-8").split()
        except UnicodeDecodeError:
            continue
        marker = words.pop(0) if words and words[0].startswith("@") else None
        if not words or words[0].startswith("#") or marker not in (None, "@revoked"):
            continue
        try:
            entry = HostKeyEntry.from_line(" ".join(words))
            if entry is None or entry.key is None:
                continue
            line = Line(entry, marker is not None)
            line.means("")  # a hash of a name that is none is not noticed before
        except (paramiko.SSHException, InvalidHostKey, ValueError, IndexError, AssertionError):
            continue
        found.append(line)
    return found


@lru_cache(maxsize=1)
def lines() -> tuple[Line, ...]:
    """The lines of the user's and of this machine's files, read once for all hosts."""
    found = []
    for path in FILES:
        try:
            found += read(path.expanduser().read_bytes())
        except OSError:
            continue
    return tuple(found)


def confirm(client: paramiko.SSHClient, name: str) -> None:
    """Let a client know the confirmed keys of the machine `name`; it refuses every other one."""
    mine = [line for line in lines() if line.means(name)]
    revoked = {line.entry.key.asbytes() for line in mine if line.revoked}
    for line in mine:
        key = line.entry.key
        if not line.revoked and key.asbytes() not in revoked:
            client.get_host_keys().add(name, key.get_name(), key)
    client.set_missing_host_key_policy(Refuse(revoked))


class Refuse(paramiko.RejectPolicy):
    """Refuses a machine without a confirmed key, and says when its key was revoked."""

    def __init__(self, revoked: set[bytes]):
        self.revoked = revoked

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        if key.asbytes() in self.revoked:
            raise Revoked(f"the key of {hostname} was revoked")
        super().missing_host_key(client, hostname, key)
