"""`make tensorboard`: what a run's report draws over time, in TensorBoard, on this machine."""

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
    """Replaces the events of a run. Returns their folder. Raises UserError."""
    from tensorboardX import SummaryWriter  # of requirements/tensorboard.txt

    folder = run / "tensorboard"
    if folder.is_symlink():  # a run's folder may be somebody else's
        raise UserError(f"{folder} is a link, through which nothing is written: remove it.")
    for former in folder.glob("events.out.tfevents.*.tandem"):
        former.unlink()
    began = number(read_object(run / "plan.json", []).get("created_unix")) or 0.0
    writer = SummaryWriter(str(folder), filename_suffix=".tandem")
    for row in csv.DictReader((run / "series.csv").read_text().splitlines()):
        seconds, place = float(row["seconds"]), re.fullmatch("(epoch|step) (.+)", row["of"])
        tag, step = (
            (row["what"], float(place[2])) if place else (f"{row['what']}/{row['of']}", seconds)
        )
        writer.add_scalar(tag, float(row["value"]), round(step), began + seconds)
    writer.close()
    return folder


if __name__ == "__main__":
    try:
        run = find_run(
            verb_words("tensorboard", sys.argv[1:], "make tensorboard").get("run", "latest")
        )
        # A process of its own, which files of whatever size cannot fill the memory with.
        subprocess.run([sys.executable, "-m", "report", run], stdout=subprocess.DEVNULL, check=True)
        program = str(Path(sys.executable).with_name("tensorboard"))
        os.execv(program, [program, "--logdir", str(write_events(run))])  # noqa: S606 (no shell)
    except subprocess.CalledProcessError as error:  # the report has said why
        sys.exit(error.returncode)
    except UserError as error:
        say(error)
        sys.exit(error.code)
