"""Guards for tests, ended when their test is over."""

import uuid

import pytest

from contract import prices
from launcher.plan.checks import INSTRUCTION_LIMITS
from tests.unit.launcher.guard_client import Client, alive, kill


@pytest.fixture(autouse=True)
def no_instruction_limits(monkeypatch):
    """Removes a limit that the caller's environment has set."""
    for name in INSTRUCTION_LIMITS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settles_soon(monkeypatch):
    """After the first failure a run waits for what other machines report; these tests need not."""
    monkeypatch.setattr("launcher.watch.watch.SETTLE", 0.1)


@pytest.fixture(scope="session")
def node_dir(tmp_path_factory):
    """node_dir(folder, number): a node's folder in this one, with the code that the node of this
    number was sent by tests before."""
    sent = tmp_path_factory.mktemp("sent")

    def make(folder, number):
        own = folder / f"node{number}"
        own.mkdir()
        (sent / own.name).mkdir(exist_ok=True)
        (own / "code").symlink_to(sent / own.name)
        return str(own)

    return make


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


@pytest.fixture(autouse=True)
def a_table_of_their_own(monkeypatch):
    """Replaces the measured costs of strategies, which change now and then, by fixed ones."""
    measured = {"ef:5:peak": {"seeds": 2, "difference": 0.0, "low": 0.0, "high": 0.0}}
    monkeypatch.setattr(prices, "read", lambda: {"task": {"steps": 1000}, "strategies": measured})
