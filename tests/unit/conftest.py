"""What all unit tests share."""

import pytest


@pytest.fixture(autouse=True)
def machines_of_no_other_test(monkeypatch):
    """What a test's verb was given as INVENTORY is not kept for the next one's commands."""
    monkeypatch.setenv("TANDEM_MACHINES", "")
