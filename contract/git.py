"""Ask git about a folder that may come from another person. git runs nothing that the folder's
configuration names (fsmonitor, hooks, filters), fetches nothing, and leaves the index as it is. git
is ended if the folder has named pipes, endless files, or patterns that take years."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from contract.errors import UserError

SETTINGS = ("-c", "core.fsmonitor=", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=off")
# git sets these variables for its hooks and `rebase --exec`. They would name another repository
# than the folder's, and other objects.
OTHER_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_NAMESPACE")
OTHER_OBJECTS = ("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES")
# A partial clone would fetch missing objects, by a command of its configuration.
OFFLINE = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}

# Far more than git needs: a list of 200,000 files takes 0.2 s of a processor and 13 MB.
CPU_SECONDS, MEMORY_KIB = 60, 4 << 20
# A shell that sets both limits, and becomes git. Some systems have no limit of memory.
LIMITED = 'ulimit -S -t "$1"; ulimit -S -v "$2" 2>/dev/null; shift 2; exec "$@"'
MISSING = "git is missing on this machine: sudo apt install git"
IDLE_SECONDS = 15.0  # without progress; a disk that has to spin up takes less


def root_of(folder: Path) -> Path | None:
    """Return the nearest folder with a .git, this folder or one above. The .git may be invalid."""
    folders = (folder, *folder.parents)
    return next((path for path in folders if os.path.lexists(path / ".git")), None)


def run(folder: Path, *words: str, online: bool = False) -> str:
    """Run git in a folder and return its output. `online`: git may fetch, and has no limits. Raises
    UserError with git's message, or if git is missing."""
    environment = {**os.environ, **({} if online else OFFLINE)}
    for name in (*OTHER_REPOSITORY, *OTHER_OBJECTS):
        environment.pop(name, None)
    if root := root_of(folder.resolve()):
        # If this .git is invalid, git must not use a repository above, which has other rules.
        environment["GIT_CEILING_DIRECTORIES"] = str(root.parent)
        environment["GIT_DISCOVERY_ACROSS_FILESYSTEM"] = "1"
        # The folder's setting core.worktree may name a home, whose files git would then read.
        if not online:
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
            idle_seconds = None if online else IDLE_SECONDS
            output, error = _wait(process, root or folder, idle_seconds)
        except BaseException:  # also Ctrl-C and SIGTERM: git might wait forever
            process.kill()
            raise
    if process.returncode == 127:  # the shell did not find git
        raise UserError(MISSING)
    if process.returncode == -signal.SIGXCPU:
        raise UserError(f"no answer: it has computed for {CPU_SECONDS} s")
    if process.returncode:
        raise UserError(" ".join(os.fsdecode(error).split()) or "nothing")
    return os.fsdecode(output)  # names and contents may be of any encoding


def _wait(
    process: subprocess.Popen[bytes], root: Path, idle_seconds: float | None
) -> tuple[bytes, bytes]:
    """Return git's stdout and stderr. Raises UserError if git neither computes nor reads from a
    disk for `idle_seconds`, as at a named pipe that no process writes to."""
    switches: list[str] = []
    while True:
        try:
            return process.communicate(timeout=idle_seconds)
        except subprocess.TimeoutExpired:
            # The kernel counts how often a process is scheduled: `voluntary_ctxt_switches: 42`. A
            # process that works or gets data is scheduled.
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            last_switches = switches
            switches = [line for line in status if "ctxt_switches" in line]
        if last_switches == switches:
            files = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
            pipes = (path for path in files if os.access(path, os.F_OK) and path.is_fifo())
            obstacle = next((f"the named pipe {path}" for path in pipes), "a file or its disk")
            raise UserError(f"no answer: it waits for {obstacle}")


def diff(folder: Path, *paths: str) -> str:
    """Return the difference between the commit and the files of these paths. Raises UserError."""
    try:
        output = run(folder, "config", "-z", "--name-only", "--get-regexp", r"^filter\.")
    except UserError:  # git fails if no setting matches
        output = ""
    filters = [name for name in output.split("\0") if name]
    if any("=" in name for name in filters):
        raise UserError("git cannot switch off a filter, because of the filter's name")
    no_filters = [word for name in filters for word in ("-c", f"{name}=")]
    return run(folder, *no_filters, "diff", "--no-ext-diff", "--no-textconv", "HEAD", "--", *paths)
