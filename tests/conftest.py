"""Settings that all tests share."""

import gc
import os
import random
import shutil
import signal
from collections import Counter

import pytest

from contract import interrupts, scratch

# Modules stay for good: the collector need not look at them, neither now nor in each test.
gc.disable()

# One thread a process: test machines have few cores, and thread counts change the bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests count modes, and dpkg-deb refuses folders that others cannot read. Tests of other umasks set
# their own.
os.umask(0o022)

# Ranks of these tests share a machine, and NCCL refuses two on one GPU: only tests/gpu is about
# GPUs, and takes them by CUDA_VISIBLE_DEVICES as they were.
os.environ.setdefault("TANDEM_TEST_CARDS", os.environ.get("CUDA_VISIBLE_DEVICES", "0,1"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# The programs, which tests import, let Ctrl-C end them until their main begins: not this process.
interrupts.accept_ctrl_c()

# What a PC may lack: each value of the mark `needs`, whether it is here, and how to get it.
ROOT = os.geteuid() == 0
NEEDS = {
    "root": (ROOT, "sudo make test"),
    "chromium": (bool(shutil.which("chromium")), "sudo apt install chromium"),
}


class Shuffle:
    """Run the files, and the tests in each, in a random order, and print its seed."""

    def __init__(self, seed):
        self.seed = seed

    def pytest_collection_modifyitems(self, items):
        # A file's tests stay together, since they share fixtures that are slow to make.
        order = random.Random(self.seed)
        places = {path: order.random() for path in sorted({item.path for item in items})}
        order.shuffle(items)
        items.sort(key=lambda item: places[item.path])

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(f"tandem: the order is that of --shuffle={self.seed}")


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help=Shuffle.__doc__)


def pytest_configure(config):
    if config.getoption("--shuffle") is not None:
        config.pluginmanager.register(Shuffle(config.getoption("--shuffle")))


def pytest_collection_modifyitems(items):
    """Tests that need what this PC lacks are left out, but not by root or CI, where `make test`
    installs it."""
    installed = ROOT or os.environ.get("CI") == "true"
    for item in items:
        for mark in item.iter_markers("needs"):
            (name,) = mark.args
            here, remedy = NEEDS[name]
            if not here and (name == "root" or not installed):
                item.add_marker(pytest.mark.skip(reason=f"need {name}: {remedy}"))


def pytest_collection_finish():
    """Look only at objects of the tests from now on."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    """Remove the temporary folders of programs that tests have killed."""
    gc.unfreeze()  # else a library of C++ takes them for leaks at the end, and says so
    scratch.remove_abandoned()


def pytest_terminal_summary(terminalreporter):
    """Names what was left out."""
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ())]
    lacks = [why.removeprefix("Skipped: ") for why in reasons]
    for why, count in Counter(why for why in lacks if why.startswith("need ")).items():
        tests = "1 test needs" if count == 1 else f"{count} tests need"
        terminalreporter.write_line(f"tandem: {tests}{why.removeprefix('need')}")


# A shell's `&` in a script starts children with SIGINT ignored; they and theirs would keep it so,
# and tests that interrupt a program would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
