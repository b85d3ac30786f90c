"""Measures this machine's links, then becomes what is to run here:
python -m launcher.node.links RESULT COMMAND...

The timetable is in TANDEM_LINKS, because it holds the token by which the machines know each other,
and other users may read a command line.
"""

import json
import os
import pathlib
import sys

from launcher.node import pairprobe


def main(argv):
    """An exit code; none where all was measured."""
    figures = pairprobe.main(json.loads(os.environ.pop("TANDEM_LINKS")))
    measured = [(peer, found) for peer, found in figures["pairs"].items()]
    measured.append(("the machine before it in the ring", figures["ring"]))
    failed = ["{}: {}".format(peer, found["error"]) for peer, found in measured if "error" in found]
    if failed:
        print("the link could not be measured with " + ", ".join(failed), file=sys.stderr)
        return 1
    path = pathlib.Path(argv[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures) + "\n")
    os.execv(argv[1], argv[1:])  # noqa: S606 (no shell is what is wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
