"""`python -m launcher`: the verbs."""

from __future__ import annotations

import signal
import sys

from contract import interrupts
from launcher.cli import main


def _exit(number: int, _: object) -> None:
    """End as by Ctrl-C: temporary files are removed and programs that were started are ended. The
    same signal once more ends this program at once."""
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


interrupts.accept_ctrl_c()
for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
        signal.signal(number, _exit)
sys.exit(main(sys.argv[1:]))
