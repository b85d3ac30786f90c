"""Figures: what the benchmarks measured, printed at the end. No figure fails a test."""

import os

import pytest

FIGURES = []


@pytest.fixture
def figure():
    """figure(name, value, unit, aim): print this when all have been measured."""

    def add(name, value, unit, aim=""):
        FIGURES.append(f"{name:<56} {round(value, 3):>10g} {unit}{aim and f'  (aim: {aim})'}")

    return add


def pytest_terminal_summary(terminalreporter):
    if FIGURES:
        load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        terminalreporter.section(f"figures ({load})")
        for line in FIGURES:
            terminalreporter.line(line)
