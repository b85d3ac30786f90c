"""The report at the end of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launcher.machines.inventory import CHECKOUT
from launcher.messages import relative
from launcher.waiting import waiting
from launcher.watch.lines import Terminal

REPORT = (sys.executable, "-m", "report")


def make_report(folder: Path, terminal: Terminal) -> bool:
    """Make and show the report. Returns whether that worked; the training is valid either way."""
    with waiting(terminal, "making the report"):
        done = subprocess.run(
            [*REPORT, str(relative(folder))],
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    lines = done.stdout.splitlines()
    if done.returncode == 0:
        for line in lines:
            terminal.line(line)
    else:
        why = lines[-1] if lines else f"exit code {done.returncode}"
        terminal.say(
            f"the report could not be made ({why}): the run is as it was, and "
            f"`make report RUN={folder.name}` makes its report again"
        )
    terminal.say(f"everything is in {relative(folder)}")
    return done.returncode == 0
