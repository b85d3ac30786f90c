"""Which signals stop a run, and when a wait is told."""

import os
import signal

import pytest

from launcher.machines.inventory import CHECKOUT
from launcher.terminal import FIRST_NOTICE, NOTICE_EVERY, SIGNALS, Stopper


@pytest.fixture(autouse=True)
def as_before():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_counts(number):
    signal.signal(number, signal.SIG_DFL)
    with Stopper().listening() as stopper:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert stopper.asked == 2
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_nohup_or_a_script_ignored_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with Stopper().listening() as stopper:
        os.kill(os.getpid(), number)
    assert stopper.asked == 0


def test_make_stop_is_heard_however_the_run_was_started():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Stopper().listening() as stopper:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopper.asked == 1


def test_the_page_says_when_a_wait_is_told():
    said = f"first after {FIRST_NOTICE:.0f} s and then every {NOTICE_EVERY:.0f} s"
    assert said in (CHECKOUT / "docs/launcher.md").read_text()
