"""An archive made from a commit of a git repository, here a local one."""

import subprocess
import tarfile

import pytest

from bundling import repository
from contract.errors import UserError


@pytest.fixture
def source(tmp_path):
    """(path of a repository, its older commit)."""
    path = tmp_path / "source"
    path.mkdir()
    (path / "setup.py").write_text("first\n")
    author = ["-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["config", "uploadpack.allowAnySHA1InWant", "true"],
                  ["add", "."], [*author, "commit", "-qm", "first"]):  # fmt: skip
        subprocess.run(["git", *words], cwd=path, check=True)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=path, capture_output=True, text=True)
    (path / "setup.py").write_text("second\n")
    subprocess.run(["git", *author, "commit", "-qam", "second"], cwd=path, check=True)
    return path, done.stdout.strip()


def test_the_files_of_the_commit_are_packed_and_none_of_a_later_one(source, tmp_path):
    path, commit = source
    repository.pack(f"file://{path}", commit, tmp_path / "apex-1.tar.gz")
    with tarfile.open(tmp_path / "apex-1.tar.gz") as archive:
        assert archive.getnames() == ["apex-1", "apex-1/setup.py"]
        assert archive.extractfile("apex-1/setup.py").read() == b"first\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["apex-1.tar.gz", "source"]
    with pytest.raises(UserError, match="git fetch of 0000"):  # and of another one nothing
        repository.pack(f"file://{path}", "0" * 39 + "1", tmp_path / "apex-2.tar.gz")
    assert not (tmp_path / "apex-2.tar.gz").exists()
