"""Report on a run: write summary.json, report.txt and report.html, and print the text.

python -m report RUN reports on one run.
python -m report plan predicts the next run (report/plan.py).
python -m report compare RUN RUN ... compares runs (report/comparing.py).
python -m report sweep FOLDER compares the runs of a sweep (report/comparing.py).
python -m report evaluation FILE shows how good a model is (report/evaluation.py).
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
from report.analysis import analyse
from report.cli import find_run, write
from report.comparing import compare_main, sweep_main
from report.evaluation import evaluation_main
from report.page import render_page
from report.plan import plan_main
from report.run_view import view_of
from report.text import printable, printed, render_text
from report.time_charts import as_csv

# Limits of this process. The records of five machines over a month need a tenth of each.
MEMORY_LIMIT_BYTES, CPU_LIMIT_SECONDS = 1 << 30, 600
WOULD = "would be needed for these files: remove files that are too large below nodes/ of the run."


def main(argv: list[str]) -> int:
    """Run a subcommand, or report on a run. Returns 0 when the report was made, 2 when the user has
    to correct something, and 3 when a plan has no measurement to start from."""
    subcommand = SUBCOMMANDS.get(argv[0] if argv else "")
    try:
        return interrupts.run_printing_main(
            "report", lambda: subcommand(argv[1:]) if subcommand else report_main(argv)
        )
    # Each file is replaced as a whole, so an interrupt leaves no half-written file.
    except KeyboardInterrupt:
        print("report: interrupted; the run is unchanged", file=sys.stderr)
        return 130
    except UserError as error:
        print(f"report: {printable(verbs.with_inventory(str(error)))}", file=sys.stderr)
        return error.code


SUBCOMMANDS = {
    "plan": plan_main,
    "compare": compare_main,
    "sweep": sweep_main,
    "evaluation": evaluation_main,
}


def report_main(argv: list[str]) -> int:
    """Make and print the report of one run. Returns the exit code; raises UserError."""
    words = verb_words("report", argv, "python -m report")
    analysis = analyse(find_run(words.get("run", verbs.LATEST)))
    # Each file is written completely or not at all.
    view = view_of(analysis)
    text = render_text(view)
    summary = json.dumps(analysis.summary, indent=1) + "\n"
    write(analysis.run.folder / "summary.json", summary)
    write(analysis.run.folder / "report.txt", text)
    write(analysis.run.folder / "series.csv", as_csv(analysis))
    write(analysis.run.folder / "report.html", render_page(view))
    if words.get("json"):
        print(summary, end="")
        return 0
    # Only a terminal gets escape codes (bold titles), unless NO_COLOR (no-color.org) is set.
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        lines = text.split("\n")
        text = "\n".join(f"\033[1m{ln}\033[0m" if ln[:1].isalpha() else ln for ln in lines)
    print(text, end="")
    print(printed(["", f"Report: {analysis.run.folder / 'report.html'}"]))
    return 0


def run_limited(argv: list[str]) -> int:
    """Call `main` under limits of memory and computing time, and return its exit code."""

    def stop_computing(number: int, frame: FrameType | None) -> NoReturn:
        raise UserError(f"more than {CPU_LIMIT_SECONDS} s of computing {WOULD}")

    # A run's files may be hostile. A file that fills the memory must not make the kernel kill other
    # programs of the user, and no file may keep this process busy for ever.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    # The kernel sends SIGXCPU at the first limit, and kills the process at the second.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_SECONDS, CPU_LIMIT_SECONDS + 10))
    signal.signal(signal.SIGXCPU, stop_computing)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack characters
    try:
        return main(argv)
    except MemoryError:
        limit = MEMORY_LIMIT_BYTES >> 20
        print(f"report: more than {limit} MiB of memory {WOULD}", file=sys.stderr)
        return UserError.code


if __name__ == "__main__":
    interrupts.accept_ctrl_c()
    sys.exit(run_limited(sys.argv[1:]))
