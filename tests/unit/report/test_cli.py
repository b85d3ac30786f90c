"""Where the report cannot be written or printed."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import UserError
from report import cli
from report.__main__ import main
from tests.unit.report.report_runs import RunBuilder

ROOT = Path(__file__).parents[3]


def test_a_report_that_cannot_be_written_leaves_the_old_one_and_no_half(tmp_path, capsys):
    """A folder stands where a file is to be written: so it fails for root, too."""
    RunBuilder(tmp_path).write()
    (tmp_path / "summary.json").write_text("old")
    (tmp_path / ".summary.json.part").mkdir()
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("report: Cannot write ") and len(said.splitlines()) == 1
    assert (tmp_path / "summary.json").read_text() == "old"


def test_half_a_file_is_taken_away_again(tmp_path, monkeypatch):
    whole = Path.write_bytes

    def write_bytes(path, content):
        whole(path, content[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(UserError, match="No space left on device"):
        cli.write(tmp_path / "report.txt", "a report")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_what_cannot_be_printed_is_said(tmp_path):
    RunBuilder(tmp_path).write()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "report", str(tmp_path)], cwd=ROOT, stdout=full, stderr=-1
        )
    assert done.returncode == 2
    said = done.stderr.decode()
    assert said == "report: what it says could not be printed: No space left on device\n"
    assert (tmp_path / "report.html").exists()
