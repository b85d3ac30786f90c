"""A full disk on the control machine: before a run starts, and when it ends."""

import errno
import os
from pathlib import Path

import pytest

from contract.errors import UNWRITTEN, UserError
from launcher import folders
from launcher.watch import attempts
from launcher.watch.attempts import exit_code
from launcher.watch.failures import Failure
from launcher.watch.watch import Outcome
from tests.unit.launcher.launcher_values import build, facts, host

# A place where not even root can create files.
READ_ONLY = Path("/proc/self")


def test_a_run_whose_first_files_cannot_be_written_does_not_begin(monkeypatch):
    monkeypatch.setattr(folders, "RUNS", READ_ONLY)
    for begin in (folders.begin, folders.lock, folders.point_latest):
        with pytest.raises(UserError, match=r"/proc/self/.* cannot be written \(.+\): make room"):
            begin(READ_ONLY / "r")


def test_what_finished_but_is_not_all_here_has_a_code_of_its_own():
    finished, stopped = (Outcome(status, None, 1.0, [], {}) for status in ("finished", "stopped"))
    assert [exit_code(finished), exit_code(finished, whole=False)] == [0, UNWRITTEN]
    assert exit_code(stopped, whole=False) == exit_code(stopped)
    cause = Failure(host="node1", source="worker", order=0, rank=0, exit_code=9)
    assert exit_code(Outcome("failed", cause, 1.0, [], {}), whole=False) == 9


def test_the_outcome_is_kept_or_told_and_never_an_error(tmp_path, monkeypatch):
    run = attempts.Attempts(tmp_path)
    run.begin(build([host(1)], [facts(1)]), "first attempt", 0.0)
    before = run.path.read_text()

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(attempts.os, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    run.close("finished")
    assert run.path.read_text() == before
    assert run.problem == f"{run.path} could not be written (Read-only file system): make room"
