"""The code that goes to the nodes: the tracked files of a few folders, compared by SHA-256.

It is copied once, when it is first asked for. That copy is hashed, recorded and sent, so that what
is changed in the checkout while a run waits or starts again is no part of the run.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from launcher.errors import MachineError, UserError
from launcher.inventory import CHECKOUT, Host

TRIES = 3
FOLDERS = ("trainer", "launcher/__init__.py", "launcher/node", "recipes", "examples")


@dataclass(frozen=True)
class Code:
    """Names relative to `tree`, a copy of the checkout's files, and the hash of what they hold."""

    names: tuple[str, ...]
    sha256: str
    git_revision: str | None
    git_diff: str
    tree: Path = CHECKOUT


@lru_cache(maxsize=1)
def current() -> Code:
    """The code as it stood in the checkout when this was first called, changes that are not
    committed included. Raises UserError."""
    tree = _scratch()
    for _ in range(TRIES):
        names = [name for name in _names() if _copied(name, tree)]
        revision = _git("rev-parse", "HEAD")
        diff = _git("diff", "HEAD", "--", *FOLDERS) or ""
        sha256 = tree_sha256(tree, names)
        if names == _names() and sha256 == tree_sha256(CHECKOUT, names):
            return Code(tuple(names), sha256, revision.strip() if revision else None, diff, tree)
    raise UserError(
        f"the files of {', '.join(FOLDERS)} change while they are copied: let what writes them "
        "end, then start again."
    )


def _scratch() -> Path:
    """A folder that is there as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="tandem-code-")
    atexit.register(folder.cleanup)
    return Path(folder.name) / "code"


def _copied(name: str, tree: Path) -> bool:
    """Copy one file of the checkout; False when it was taken away a moment ago."""
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copy2(CHECKOUT / name, tree / name)
    except FileNotFoundError:
        return False
    return True


def _names() -> list[str]:
    """The files of the code, sorted."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FOLDERS)
    if listed is None:  # an unpacked archive rather than a checkout
        files = [p for folder in FOLDERS for p in _files(CHECKOUT / folder)]
        names = [str(p.relative_to(CHECKOUT)) for p in files if "__pycache__" not in p.parts]
    else:
        names = [name for name in listed.split("\0") if name and (CHECKOUT / name).is_file()]
    return sorted(set(names))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", "-c", "core.quotePath=off", *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


def tree_sha256(root: Path, names: list[str]) -> str:
    """As launcher/node/probe.py computes it from the node's files."""
    total = hashlib.sha256()
    for name in sorted(names):
        path = root / name
        mode = "x" if os.access(path, os.X_OK) else "-"
        contents = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{name}\0{mode}\0{contents}\n".encode())
    return total.hexdigest()


def send(code: Code, hosts: list[Host], folders: dict[str, str]) -> None:
    """Make `folders[host]` hold exactly the code. Raises MachineError for those where it failed,
    UserError when this machine cannot send."""

    def one(host: Host) -> str | None:
        copy = _copy if host.is_local else _rsync
        return copy(code.tree, host, folders[host.name])

    with ThreadPoolExecutor(max_workers=8) as pool:
        told = zip(hosts, pool.map(one, hosts))
        problems = {host.name: problem for host, problem in told if problem}
    if problems:
        raise MachineError([*problems], *problems.values())


def _copy(tree: Path, host: Host, folder: str) -> str | None:
    """For a node on this machine, which need not have rsync. The old tree is replaced as a
    whole."""
    target = Path(folder)
    fresh = target.with_name(target.name + ".new")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(tree, fresh)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    except OSError as error:
        return (
            f"{host.label()}: the code cannot be written to {target}: {error.strerror}: make room "
            "or give it to your user."
        )
    return None


# Whatever the user's own ssh_config says: a node must not use the keys, the screen or the network
# of its user. ansible.cfg has the same.
FORWARD_NOTHING = (
    *("ForwardAgent=no", "ForwardX11=no", "ForwardX11Trusted=no", "ClearAllForwardings=yes"),
    *("Tunnel=no", "PermitLocalCommand=no"),
)
STRICT = ("StrictHostKeyChecking=yes", "BatchMode=yes", "ConnectTimeout=8")


def ssh_command(host: Host) -> list[str]:
    """ssh for rsync: as strict as launcher/connection.py, and it never asks."""
    options = [word for option in (*STRICT, *FORWARD_NOTHING) for word in ("-o", option)]
    return ["ssh", *options, "-p", str(host.port), *(["-l", host.user] if host.user else [])]


def _rsync(tree: Path, host: Host, folder: str) -> str | None:
    address = f"[{host.address}]" if ":" in host.address else host.address
    argv = [
        "rsync",
        "--archive",
        "--checksum",
        "--delete",
        "--delete-excluded",
        "--exclude=__pycache__",
        "--timeout=60",
    ]
    # (--mkpath would do, but rsync has it only since 3.2.3.)
    argv += [f"--rsync-path=mkdir -p {shlex.quote(folder)} && rsync"]
    argv += [f"--rsh={shlex.join(ssh_command(host))}", f"{tree}/", f"{address}:{folder}/"]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        told = "rsync is not installed on this machine: `sudo apt install rsync`."
        raise UserError(told) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[:300]
        return f"{host.label()}: the code could not be copied to {folder}: {said}"
    return None
