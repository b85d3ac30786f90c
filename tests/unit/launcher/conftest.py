"""Guards for tests, ended when their test is over, and machines of two kinds."""

import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from boundary.answers import OwnerAnswer
from contract import prices
from launcher import look, remote
from launcher.machines import engine
from launcher.plan.checks import INSTRUCTION_LIMITS
from launcher.problems import Problem
from tests.unit.launcher.guard_client import Client, alive, kill
from tests.unit.launcher.launcher_values import facts, host

PYTHON = Path(__file__).with_name("launcher_python.py")


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
def sent(tmp_path_factory):
    """Where the nodes of all tests keep the code that they are sent."""
    return tmp_path_factory.mktemp("sent")


@pytest.fixture
def local_hosts(tmp_path, sent):
    """local_hosts(script, numbers, NAME=value, ...) -> nodes on this machine; their trainer does
    what the script says."""

    def make(script, numbers, **variables):
        (tmp_path / "script.py").write_text(script)
        own = {"TANDEM_TEST_SCRIPT": str(tmp_path / "script.py"), **variables}
        own["TANDEM_TEST_PYTHON"] = sys.executable
        local = {"connection": "local", "env_python": str(PYTHON), "env": own}
        for number in numbers:
            (tmp_path / f"node{number}").mkdir()
            (sent / f"node{number}").mkdir(exist_ok=True)
            (tmp_path / f"node{number}/code").symlink_to(sent / f"node{number}")
        return [
            host(n, address=f"127.0.0.{n}", node_dir=str(tmp_path / f"node{n}"), **local)
            for n in numbers
        ]

    return make


@pytest.fixture
def machines(monkeypatch):
    """{name: changes of its facts}; `sign`: of its owner, a Problem: it gives no facts, a text: why
    no connection to it opens."""
    those = {"node1": {}, "node2": {}, "node3": {}}

    def open_all(hosts):
        failures = {h.name: those[h.name] for h in hosts if isinstance(those[h.name], str)}
        nodes = {h.name: SimpleNamespace(host=h) for h in hosts if h.name not in failures}
        return nodes, failures

    def ask_all(nodes, _questions):
        silent = {name: those[name] for name in nodes if isinstance(those[name], Problem)}
        changes = {
            n: {f: v for f, v in those[n].items() if f != "sign"} for n in {*nodes} - {*silent}
        }
        return {name: facts(int(name[4:]), **changes[name]) for name in changes}, silent

    def ask(node, *_):
        return OwnerAnswer(those[node.host.name].get("sign", ""))

    monkeypatch.setattr(engine, "open_all", open_all)
    monkeypatch.setattr(engine, "close_all", lambda _nodes: None)
    monkeypatch.setattr(look, "ask_all", ask_all)
    monkeypatch.setattr(look, "find_unreachable_peers", lambda *_: {})
    monkeypatch.setattr(remote, "ask", ask)
    return those


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
    monkeypatch.setattr(
        prices, "read_prices", lambda: {"task": {"steps": 1000}, "strategies": measured}
    )
