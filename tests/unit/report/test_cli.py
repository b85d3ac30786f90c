"""Where the report cannot be written or printed."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

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
    (tmp_path / f".summary.json.{os.getpid()}").mkdir()
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("report: Cannot write ") and len(said.splitlines()) == 1
    assert (tmp_path / "summary.json").read_text() == "old"


def test_half_a_file_is_taken_away_again(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=full))
    with pytest.raises(UserError, match="No space left on device"):
        cli.write(tmp_path / "report.txt", "a report")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_through_links_of_a_run_s_folder(tmp_path):
    """Which may be somebody else's."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    RunBuilder(run).write()
    victim.write_text("mine")
    for name in ("summary.json", ".report.txt.part", f".report.txt.{os.getpid()}"):
        (run / name).symlink_to(victim)
    assert main([str(run)]) == 0
    assert victim.read_text() == "mine"
    assert not (run / "summary.json").is_symlink()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_what_cannot_be_printed_is_said(tmp_path):
    RunBuilder(tmp_path).write()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "report", str(tmp_path)], cwd=ROOT, stdout=full, stderr=-1
        )
    assert done.returncode == 2
    said = done.stderr.decode()
    assert said == "report: the output cannot be printed: No space left on device\n"
    assert (tmp_path / "report.html").exists()
