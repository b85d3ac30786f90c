"""How programs end early: what a plan says where it cannot be made, and Ctrl-C."""

import sys

INTERRUPTED = 130  # as a shell has it for SIGINT


class PlanError(ValueError):
    """Settings that these machines cannot have; the message says why and what is nearest."""


def ended(main):
    """The exit code of a program's main(); Ctrl-C is no defect, so it gets a sentence."""
    try:
        return main()
    except KeyboardInterrupt:
        print("\ntandem: interrupted; the same command can be typed again", file=sys.stderr)
        return INTERRUPTED
