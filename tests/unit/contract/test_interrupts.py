"""Ctrl-C in the first moments of a program, which are imports."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Python runs this at its start: who imports the named module stays there, and says so.
WAITING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["WAITS_IN"]:
            print("importing", flush=True)
            signal.pause()
sys.meta_path.insert(0, Finder())
"""


def test_a_stream_that_the_shell_closed_is_no_file_of_ours():
    """A file that is opened next would be printed into."""
    line = "import contract.interrupts, os; print('x'); raise SystemExit(os.open('/', 0))"
    for closed in (">&-", "<&-", "2>&-"):
        shell = f'exec "$0" -c "{line}" {closed}'
        assert subprocess.run(["sh", "-c", shell, sys.executable], cwd=ROOT).returncode == 3
    argv = ["sh", "-c", 'exec "$0" -m launcher runs >&-', sys.executable]
    done = subprocess.run(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("program", "module"),
    [
        (["-m", "launcher", "runs"], "launcher.cli"),
        (["-m", "report", "latest"], "report.analysis"),
        (["ansible/check.py"], "planning.preflight"),
        (["ansible/bootstrap.py"], "contract.verbs"),
        (["ansible/dry_provision.py"], "planning.stacks"),
    ],
)
def test_ctrl_c_while_a_program_imports_is_no_traceback(tmp_path, program, module):
    (tmp_path / "sitecustomize.py").write_text(WAITING)
    begun = subprocess.Popen(
        [sys.executable, *program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "WAITS_IN": module},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert begun.stdout.readline() == "importing\n"
    begun.send_signal(signal.SIGINT)
    _, said = begun.communicate(timeout=60)
    assert (begun.returncode, said) == (-signal.SIGINT, "")
