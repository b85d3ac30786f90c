"""`python3 -IB <code>/launcher/node UNIT`: starts the guard (docs/guard-protocol.md)."""

import pathlib
import sys


def run():
    """Make `launcher.node` importable from the copied code and from nowhere else, then start."""
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent.parent)
    from launcher.node import start

    return start.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
