"""torch comes with nodes of this machine that train by the checkout's own environment."""

import io
import sys

import pytest

from contract.errors import UserError
from launcher import here
from launcher.terminal import Terminal
from tests.unit.launcher.launcher_values import host


@pytest.fixture
def add(monkeypatch, tmp_path):
    """add(code of the script, prefix=..., hosts) -> how often it ran."""

    def add(*hosts, code=0, prefix=here.OWN):
        script = f"echo >>{tmp_path}/ran; exit {code}"
        monkeypatch.setattr(here, "INSTALL", ["sh", "-c", script])
        monkeypatch.setattr(sys, "prefix", str(prefix))
        here.add_torch(hosts, Terminal(io.StringIO()))
        ran = tmp_path / "ran"
        return len(ran.read_text().splitlines()) if ran.exists() else 0

    return add


def local(number, **changes):
    python = str(here.OWN / "bin/python")
    return host(number, **{"connection": "local", "env_python": python, **changes})


def test_it_comes_where_this_machine_trains_by_it(add):
    assert add(local(1), local(2)) == 1
    assert add(host(1), local(2)) == 2


@pytest.mark.parametrize(
    ("hosts", "prefix"),
    [
        ([host(1), host(2)], here.OWN),
        ([local(1, env_python="/opt/tandem/env/bin/python")], here.OWN),
        ([local(1)], "/home/anna/miniforge3"),  # an environment that `make env` did not make
    ],
)
def test_it_does_not_come_where_it_would_be_of_no_use(add, hosts, prefix):
    assert add(*hosts, prefix=prefix) == 0


def test_where_it_cannot_be_installed_the_run_is_refused(add):
    with pytest.raises(UserError, match="node1 trains on this machine, which needs torch"):
        add(local(1), code=1)
