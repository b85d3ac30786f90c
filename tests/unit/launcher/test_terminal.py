"""Which signals stop a run."""

import os
import signal

import pytest

from launcher.terminal import STOP_SIGNALS, Stopper


@pytest.fixture(autouse=True)
def as_before():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "before", "asked"),
    [
        *((number, signal.SIG_DFL, 2) for number in STOP_SIGNALS),
        # Of nohup, and of a script's `&`; but `make stop` is heard in any case.
        (signal.SIGHUP, signal.SIG_IGN, 0),
        (signal.SIGINT, signal.SIG_IGN, 0),
        (signal.SIGTERM, signal.SIG_IGN, 2),
    ],
)
def test_each_signal_counts_but_for_those_that_were_ignored(number, before, asked):
    signal.signal(number, before)
    with Stopper().listening() as stopper:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert stopper.stop_requests == asked
    assert signal.getsignal(number) is before
