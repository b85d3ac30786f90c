"""Show the time charts of a run's report in TensorBoard on this machine: `make tensorboard`.

This program lets the report write the run's series.csv, turns its rows into TensorBoard's events,
and becomes TensorBoard.
"""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

from contract.command_line import verb_words
from contract.errors import UserError
from report.cli import find_run
from report.files import number, read_object
from tools.verbs import say


def write_events(run: Path) -> Path:
    """Replace the events of a run, and return their folder. Raises UserError."""
    from tensorboardX import SummaryWriter  # of requirements/tensorboard.txt

    folder = run / "tensorboard"
    # The folder of a run may come from another user, who could put a link there.
    if folder.is_symlink():
        raise UserError(f"{folder} is a link, through which nothing is written: remove it.")
    for events in folder.glob("events.out.tfevents.*.tandem"):
        events.unlink()  # otherwise TensorBoard would show each value twice
    began = number(read_object(run / "plan.json", []).get("created_unix")) or 0.0
    writer = SummaryWriter(str(folder), filename_suffix=".tandem")
    for row in csv.DictReader((run / "series.csv").read_text().splitlines()):
        seconds, match = float(row["seconds"]), re.fullmatch("(epoch|step) (.+)", row["of"])
        # A row of training has "epoch 3" or "step 120" in the column `of`, which becomes the axis.
        # The row of a machine or rank has its name there, and its axis is the seconds of the run.
        tag, step = row["what"], seconds
        if match:
            step = float(match[2])
        else:
            tag += f"/{row['of']}"
        writer.add_scalar(tag, float(row["value"]), round(step), began + seconds)
    writer.close()
    return folder


if __name__ == "__main__":
    try:
        run = find_run(
            verb_words("tensorboard", sys.argv[1:], "make tensorboard").get("run", "latest")
        )
        # The report runs in another process, so that its memory is free again for TensorBoard.
        subprocess.run([sys.executable, "-m", "report", run], stdout=subprocess.DEVNULL, check=True)
        program = str(Path(sys.executable).with_name("tensorboard"))
        os.execv(program, [program, "--logdir", str(write_events(run))])  # noqa: S606 (no shell)
    except subprocess.CalledProcessError as error:  # the report has said why
        sys.exit(error.returncode)
    except UserError as error:
        say(error)
        sys.exit(error.code)
