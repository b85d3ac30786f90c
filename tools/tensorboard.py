"""`make tensorboard`: a run's figures in TensorBoard, on this machine alone.

The report writes the events from what all machines recorded (report/events.py), so no machine needs
TensorBoard to train; this one needs it to look.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPORT = [sys.executable, "-m", "report", "tensorboard"]


def main(argv: list[str]) -> int:
    """Returns the exit code; `argv` is that of the report."""
    wrote = subprocess.run([*REPORT, *argv], stdout=subprocess.PIPE, text=True, check=False)
    if wrote.returncode:
        return wrote.returncode
    folder = wrote.stdout.strip()
    print(f"Events: {folder}", flush=True)
    beside = Path(sys.executable).with_name("tensorboard")
    program = str(beside) if beside.exists() else shutil.which("tensorboard")
    if program is None:
        print(
            "To look at them, install TensorBoard here: `pipx install tensorboard`.\n"
            "Then type `make tensorboard` again, or on any machine that has the folder\n"
            f"`tensorboard --logdir {folder}`."
        )
        return 0
    os.execv(program, [program, "--logdir", folder])  # noqa: S606 (no shell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
