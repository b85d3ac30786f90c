"""Measures a machine's links before a launch, which it then becomes:
python -m launcher.node.prepare RESULT COMMAND...
"""

import json
import os
import pathlib
import sys

from launcher.node import pairprobe


def measure(result):
    """Measure this machine's links by the timetable in TANDEM_LINKS: it holds the token by which
    the machines know each other, and other users may read a command line. Returns what failed."""
    figures = pairprobe.main(json.loads(os.environ.pop("TANDEM_LINKS")))
    pairs = list(figures["pairs"].items())
    pairs.append(("the machine before it in the ring", figures["ring"]))
    failed = ["{}: {}".format(peer, one["error"]) for peer, one in pairs if "error" in one]
    if not failed:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps(figures) + "\n")
    return ", ".join(failed)


def main(argv):
    """An exit code; none where the links were measured."""
    failed = measure(pathlib.Path(argv[0]))
    if failed:
        print("the link could not be measured with " + failed, file=sys.stderr)
        return 1
    os.execv(argv[1], argv[1:])  # noqa: S606 (no shell is what is wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
