"""Archives made from a commit of a git repository, whose id is a checksum of all its contents."""

import tempfile
from pathlib import Path

from contract import git
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
        git.run(Path(folder), *words, online=True)
    except UserError as error:
        raise UserError(f"git {words[0]} of {words[-1]} failed: {error}") from None
