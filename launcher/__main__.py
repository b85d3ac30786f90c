"""`python -m launcher VERB ...`: handles signals, and calls cli.main."""

from __future__ import annotations

import signal
import sys

from contract import interrupts
from launcher.cli import main


def _exit(number: int, _: object) -> None:
    """End as after Ctrl-C: remove temporary files, and end programs that were started. The same
    signal once more ends this process at once."""
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


interrupts.accept_ctrl_c()
for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
        signal.signal(number, _exit)
sys.exit(main(sys.argv[1:]))
