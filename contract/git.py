"""git, asked about a folder that may come from elsewhere. Nothing that its configuration names is
run (fsmonitor, hooks, filters), nothing is fetched, and its index stays as it is. git ends whatever
the files are: named pipes, files without end, patterns that take years."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from contract.errors import UserError

SETTINGS = ("-c", "core.fsmonitor=", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=off")
# git sets these for its hooks and `rebase --exec`: they name another repository than the folder's.
OTHER_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_NAMESPACE")
OTHER_OBJECTS = ("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES")
# A partial clone would fetch what it lacks, by a command of its configuration.
OFFLINE = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}

# To list 200,000 files takes git 0.2 s of a processor and 13 MB.
CPU_SECONDS, MEMORY_KIB = 60, 4 << 20
LIMITED = 'ulimit -S -t "$1"; ulimit -S -v "$2" 2>/dev/null; shift 2; exec "$@"'
MISSING = "git is missing on this machine: sudo apt install git"
IDLE_SECONDS = 15.0  # a disk that has to start up takes less


def root_of(folder: Path) -> Path | None:
    """The nearest folder, this one or above, that has a .git, whether git can read it or not."""
    return next((one for one in (folder, *folder.parents) if os.path.lexists(one / ".git")), None)


def run(folder: Path, *words: str, online: bool = False) -> str:
    """What git prints. Raises UserError: git's own words, or that there is no git."""
    environment = {**os.environ, **({} if online else OFFLINE)}
    for name in (*OTHER_REPOSITORY, *OTHER_OBJECTS):
        environment.pop(name, None)
    if root := root_of(folder.resolve()):
        # Where git takes this .git for none, it would go on to a repository above with other rules.
        environment["GIT_CEILING_DIRECTORIES"] = str(root.parent)
        environment["GIT_DISCOVERY_ACROSS_FILESYSTEM"] = "1"
        if not online:  # core.worktree may name a home, whose files and rules would be taken
            environment["GIT_WORK_TREE"] = str(root)
    argv = ["git", *SETTINGS, *words]
    if not online:
        argv = ["sh", "-c", LIMITED, "sh", str(CPU_SECONDS), str(MEMORY_KIB), *argv]
    pipe, no_input = subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            argv, cwd=folder, env=environment, stdin=no_input, stdout=pipe, stderr=pipe
        )
    except FileNotFoundError:
        raise UserError(MISSING) from None
    with process:
        try:
            said, error = _wait(process, root or folder, None if online else IDLE_SECONDS)
        except BaseException:  # Ctrl-C and SIGTERM, too: git might wait for ever
            process.kill()
            raise
    if process.returncode == 127:  # the shell's word
        raise UserError(MISSING)
    if process.returncode == -signal.SIGXCPU:
        raise UserError(f"nothing: it has computed for {CPU_SECONDS} s")
    if process.returncode:
        raise UserError(" ".join(os.fsdecode(error).split()) or "nothing")
    return os.fsdecode(said)  # names and contents may be of any encoding


def _wait(process: subprocess.Popen[bytes], root: Path, idle: float | None) -> tuple[bytes, bytes]:
    """What git prints. Raises UserError if for `idle` seconds it neither computes nor gets anything
    from a disk, as at a named pipe that nobody writes to."""
    switches: list[str] = []
    while True:
        try:
            return process.communicate(timeout=idle)
        except subprocess.TimeoutExpired:
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            before, switches = switches, [line for line in status if "ctxt_switches" in line]
        if before == switches:
            files = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
            pipes = (path for path in files if os.access(path, os.F_OK) and path.is_fifo())
            what = next((f"the named pipe {path}" for path in pipes), "a file or its disk")
            raise UserError(f"nothing: it waits for {what}")


def diff(folder: Path, *parts: str) -> str:
    """What the files of these parts have that the commit has not. Raises UserError."""
    try:
        named = run(folder, "config", "-z", "--name-only", "--get-regexp", r"^filter\.")
    except UserError:  # there are none
        named = ""
    filters = [name for name in named.split("\0") if name]
    if any("=" in name for name in filters):
        raise UserError("a filter has a name that -c cannot set")
    off = [word for name in filters for word in ("-c", f"{name}=")]
    return run(folder, *off, "diff", "--no-ext-diff", "--no-textconv", "HEAD", "--", *parts)
