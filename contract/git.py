"""git, asked about a folder that may come from elsewhere. Nothing that its configuration names is
run (fsmonitor, hooks, filters), nothing is fetched, and its index stays as it is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from contract.errors import UserError

SETTINGS = ("-c", "core.fsmonitor=", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=off")
# git sets these for its hooks and `rebase --exec`: they name another repository than the folder's.
OTHER_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_NAMESPACE")
OTHER_OBJECTS = ("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES")
# A partial clone would fetch what it lacks, by a command of its configuration.
OFFLINE = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}


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
    argv = ["git", *SETTINGS, *words]
    try:
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, check=False)
    except FileNotFoundError:
        raise UserError("git is missing on this machine: sudo apt install git") from None
    if done.returncode:
        raise UserError(" ".join(os.fsdecode(done.stderr).split()) or "nothing")
    return os.fsdecode(done.stdout)  # names and contents may be of any encoding


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
