"""A plugin of pytest for bench/mutants.py: which lines each test reaches in its own process, and
its seconds, written into the working directory."""

import json
import os
from pathlib import Path

import coverage
import pytest

ROOMS = ["contract", "boundary", "tandem", "trainer", "launcher", "report", "ansible/planning"]
COVERAGE = coverage.Coverage(data_file=f".reach.{os.getpid()}", source=ROOMS, config_file=False)
COVERAGE.start()


def named(nodeid):
    """A test's name without its parameters."""
    return nodeid.split("[", 1)[0]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    COVERAGE.switch_context(named(item.nodeid))
    yield
    COVERAGE.switch_context("")


def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" in os.environ:
        row = {"test": named(report.nodeid), "seconds": report.duration, "failed": report.failed}
        with Path(f".seconds.{os.getpid()}").open("a") as file:
            file.write(json.dumps(row) + "\n")


def pytest_sessionfinish():
    COVERAGE.stop()
    COVERAGE.save()
