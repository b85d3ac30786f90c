"""Write and read the JSON lines by which the launcher reports its progress to the program that
started it. The launcher's sentences are only for people."""

import contextlib
import json
import os
from typing import Any, Dict

# Set in the environment of a launcher whose output a program reads.
WANTED = "TANDEM_RESULT_LINES"
MARK = "tandem-result "


def result_line(**facts: str) -> str:
    """Return the line with these facts; "" if no program reads the output. `run`: the name of a run
    that has begun; `waits`: why the run has not begun yet; `refused`: why it will not begin."""
    return f"{MARK}{json.dumps(facts)}\n" if os.environ.get(WANTED) else ""


def read_results(text: str) -> Dict[str, str]:
    """Return the facts of all result lines in a launcher's output. Later facts replace earlier."""
    facts: Dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):  # the launcher was killed while it printed
                facts.update(json.loads(line[len(MARK) :]))
    return facts
