"""python -m report RUN: makes summary.json, report.txt and report.html, and prints the text.

python -m report plan: predicts the next run (report/plan.py).
python -m report compare RUN RUN ...: sets runs side by side (report/comparing.py).
python -m report sweep FOLDER: the same of the runs of a sweep (report/comparing.py).
python -m report evaluation FILE: how good a model is (report/evaluation.py).
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
from types import FrameType
from typing import NoReturn

from contract import interrupts, verbs
from contract.command_line import verb_words
from contract.errors import UserError
from report.analysis import Analysis, analyse
from report.cli import find_run, write
from report.comparing import compare_main, sweep_main
from report.evaluation import evaluation_main
from report.page import render_page
from report.plan import plan_main
from report.run_view import view_of
from report.text import printable, printed, render_text
from report.time_charts import as_csv

# Of this process. A month of five machines takes a tenth of either.
MOST_MEMORY, MOST_SECONDS = 1 << 30, 600
WOULD = "would be needed for these files: remove what is too large below nodes/ of the run."


def main(argv: list[str]) -> int:
    """Returns 0 when the report was made, 2 when the user has to put something right, and 3 when a
    plan has nothing to start from."""
    verb = OTHERS.get(argv[0] if argv else "", report_main)
    try:
        return interrupts.printed(
            "report", lambda: verb(argv[1:] if verb is not report_main else argv)
        )
    except KeyboardInterrupt:
        print("report: interrupted; the run is as it was", file=sys.stderr)
        return 130
    except UserError as error:
        print(f"report: {printable(verbs.with_inventory(str(error)))}", file=sys.stderr)
        return error.code


OTHERS = {
    "plan": plan_main,
    "compare": compare_main,
    "sweep": sweep_main,
    "evaluation": evaluation_main,
}


def report_main(argv: list[str]) -> int:
    """Makes and prints one report."""
    words = verb_words("report", argv, "python -m report")
    analysis = analyse(find_run(words.get("run", verbs.LATEST)))
    text = write_report(analysis)
    if words.get("json"):
        print(summary_json(analysis), end="")
    else:
        print(embolden(text) if wants_colour() else text, end="")
        print(printed(["", f"Report: {analysis.run.folder / 'report.html'}"]))
    return 0


def write_report(analysis: Analysis) -> str:
    """Writes the files, each whole or not at all. Returns the text."""
    view = view_of(analysis)
    text = render_text(view)
    write(analysis.run.folder / "summary.json", summary_json(analysis))
    write(analysis.run.folder / "report.txt", text)
    write(analysis.run.folder / "series.csv", as_csv(analysis))
    write(analysis.run.folder / "report.html", render_page(view))
    return text


def summary_json(analysis: Analysis) -> str:
    return json.dumps(analysis.summary, indent=1) + "\n"


def wants_colour() -> bool:
    """Only a terminal gets escape codes, unless NO_COLOR (no-color.org) asks it not to."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def embolden(text: str) -> str:
    """Section titles in bold."""
    return "\n".join(
        f"\033[1m{line}\033[0m" if line[:1].isalpha() else line for line in text.split("\n")
    )


def run_limited(argv: list[str]) -> int:
    """`main` as a process of its own, which files of whatever size or kind can neither fill the
    memory with nor keep busy for ever."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS + 10))
    signal.signal(signal.SIGXCPU, too_long)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where the terminal has fewer letters
    try:
        return main(argv)
    except MemoryError:
        print(f"report: more than {MOST_MEMORY >> 20} MiB of memory {WOULD}", file=sys.stderr)
        return UserError.code


def too_long(number: int, frame: FrameType | None) -> NoReturn:
    raise UserError(f"more than {MOST_SECONDS} s of computing {WOULD}")


if __name__ == "__main__":
    interrupts.heard()
    sys.exit(run_limited(sys.argv[1:]))
