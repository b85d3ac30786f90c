"""Guards for tests, ended when their test is over."""

import uuid

import pytest

from tests.unit.launcher.guard_client import Client, alive, kill


@pytest.fixture
def guards():
    """Call it to start a guard."""
    clients = []

    def start(command=None):
        clients.append(Client(command))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.fixture
def mark():
    """A variable `NAME=value` of no other process; what carries it is ended after the test."""
    value = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
    yield value
    for pid in alive(value):
        kill(pid)
