"""Figures: what the benchmarks measured, printed at the end. They are never a reason to fail."""

import os

import pytest

from tests.lab.conftest import new_lab, start_lab  # noqa: F401 (fixtures)

FIGURES = []


@pytest.fixture
def figure():
    """figure(name, value, unit, aim): printed when all have been measured."""

    def add(name, value, unit, aim=""):
        FIGURES.append({"name": name, "value": round(value, 3), "unit": unit, "aim": aim})

    return add


def pytest_terminal_summary(terminalreporter):
    if not FIGURES:
        return
    terminalreporter.section(f"figures ({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f})")
    for figure in FIGURES:
        aim = f"  (aim: {figure['aim']})" if figure["aim"] else ""
        terminalreporter.line(f"{figure['name']:<56} {figure['value']:>10g} {figure['unit']}{aim}")
