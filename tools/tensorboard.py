"""Show the time charts of a run's report in TensorBoard on this machine: `make tensorboard`."""

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
    if folder.is_symlink():  # a run's folder may be somebody else's
        raise UserError(f"{folder} is a link, through which nothing is written: remove it.")
    for events in folder.glob("events.out.tfevents.*.tandem"):
        events.unlink()  # otherwise TensorBoard would show old and new ones
    began = number(read_object(run / "plan.json", []).get("created_unix")) or 0.0
    writer = SummaryWriter(str(folder), filename_suffix=".tandem")
    for row in csv.DictReader((run / "series.csv").read_text().splitlines()):
        seconds, match = float(row["seconds"]), re.fullmatch("(epoch|step) (.+)", row["of"])
        # The axis is the epoch or the step. Other rows, such as a machine's, are over seconds.
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
        # In another process, so that large files cannot fill this one's memory.
        subprocess.run([sys.executable, "-m", "report", run], stdout=subprocess.DEVNULL, check=True)
        program = str(Path(sys.executable).with_name("tensorboard"))
        os.execv(program, [program, "--logdir", str(write_events(run))])  # noqa: S606 (no shell)
    except subprocess.CalledProcessError as error:  # the report has said why
        sys.exit(error.returncode)
    except UserError as error:
        say(error)
        sys.exit(error.code)
