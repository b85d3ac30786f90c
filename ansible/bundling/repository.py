"""Archives made from a commit of a git repository, whose id is a checksum of all its contents."""

import subprocess
import tempfile

from contract.errors import UserError


def pack(url, commit, path):
    """Writes the files of `commit` to `path`, a .tar.gz with one folder. Raises UserError."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".git-") as folder:
        _git(folder, "init", "--quiet")
        # git compares what it receives with the id that it asked for.
        _git(folder, "fetch", "--quiet", "--depth=1", url, commit)
        part = path.with_name(path.name + ".part")
        prefix = f"--prefix={path.name.removesuffix('.tar.gz')}/"
        _git(folder, "archive", "--format=tar.gz", prefix, f"--output={part}", commit)
        part.rename(path)


def _git(folder, *words):
    try:
        process = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("git is missing on this machine: sudo apt install git") from None
    if process.returncode:
        reason = " ".join(process.stderr.split()) or "nothing"
        raise UserError(f"git {words[0]} of {words[-1]} failed: {reason}")
