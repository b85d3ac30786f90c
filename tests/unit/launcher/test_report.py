"""The report at the end of a run: shown, or said to be missing."""

import io
import sys

import pytest

from launcher import run
from launcher.terminal import Terminal


@pytest.fixture
def said(tmp_path, monkeypatch):
    """said(script) -> what the terminal shows when the report runs this script."""

    def make(script):
        monkeypatch.setattr("launcher.run.REPORT", (sys.executable, "-c", script))
        screen = io.StringIO()
        whole = run.make_report(tmp_path / "r", Terminal(screen))
        assert whole is ("could not be made" not in screen.getvalue())
        return screen.getvalue()

    return make


def test_a_report_is_shown(said, tmp_path):
    assert said("print('one'); print('two')") == (
        f"one\ntwo\ntandem: everything is in {tmp_path / 'r'}\n"
    )


def test_a_report_that_fails_is_said_in_a_sentence(said):
    shown = said("raise ZeroDivisionError('no steps')")
    assert shown.startswith(
        "tandem: the report could not be made (ZeroDivisionError: no steps): the run is as it was, "
        "and `make report RUN=r` makes its report again\n"
    )
    assert "Traceback" not in shown
    assert "(exit code 3)" in said("raise SystemExit(3)")
