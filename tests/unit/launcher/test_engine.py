"""Ways to machines: a new one is one new file, and all of the launcher works through it; and
connections to many."""

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import UserError
from contract.options import Config
from launcher import collect, engines, look
from launcher.background import Sizes
from launcher.engines.local import LocalProcess
from launcher.look import OpenMachines
from launcher.machines import engine, inventory
from launcher.machines.engine import talk
from launcher.plan import code
from launcher.terminal import Stopper, Terminal
from launcher.watch import guards
from launcher.watch.attempts import Attempts
from launcher.watch.lines import RunLogs
from launcher.watch.watch import Watch
from tests.unit.launcher.launcher_values import build, facts

STANDIN = Path(__file__).with_name("launcher_python.py")  # for torch's launch
# As `docker exec` or `kubectl exec` would be one: a machine behind a command.
WRAPPED = '''
"""Machines behind `env -i`, which hands over no variable of this one."""

from launcher.machines.engine import Engine
from launcher.engines.local import LocalProcess


class WrappedNode:
    def __init__(self, host):
        self.host = host

    def open(self):
        pass

    def start(self, argv):
        return LocalProcess(["env", "-i", "PATH=/usr/bin:/bin", *argv])

    def close(self):
        pass


ENGINE = Engine(
    node=WrappedNode,
    is_local=False,
    guard_python="/usr/bin/python3",
    repair_hint="make its image anew",
    data_hint="its image has the digits",
)
'''


@pytest.fixture
def wrapped(tmp_path, monkeypatch):
    """Two machines of an inventory that are reached by an engine of one new file."""
    folder = tmp_path / "engines"
    folder.mkdir()
    (folder / "wrapped.py").write_text(WRAPPED)
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(folder)])
    monkeypatch.delitem(sys.modules, "launcher.engines.wrapped", raising=False)
    variables = {
        f"node{n}": {
            "ansible_connection": "wrapped",
            "ansible_host": f"127.0.8.{n}",
            "env_python": sys.executable,
            "node_dir": str(tmp_path / f"node{n}"),
        }
        for n in (1, 2)
    }
    document = {"cluster": {"hosts": list(variables)}, "_meta": {"hostvars": variables}}
    hosts = inventory.parse(document, tmp_path / "inventory.ini")
    nodes, failures = engine.open_all(hosts)
    assert failures == {}
    return hosts, nodes


TASK = {
    **{"peers": [], "ports": [47401], "packages": [], "distributions": 0, "toolkit": "/"},
    **{"models": None, "data": "/none", "cpu_flags": ()},
}


def test_an_engine_is_one_new_file(wrapped, tmp_path):
    """Questions, code, ways between the machines, guards and records go through it."""
    hosts, nodes = wrapped
    assert engine.names() == ["local", "ssh", "wrapped"]
    with pytest.raises(UserError, match="on node1 this path would begin nowhere"):
        hosts[0].data_path("data/digits")

    tasks = {one.name: {**TASK, "node_dir": one.node_dir} for one in hosts}
    for one in hosts:
        tasks[one.name]["guard_python"] = one.engine.guard_python
    found, silent = look.ask_all(nodes, tasks)
    assert silent == {} and found["node2"].guard_python

    listening = {f"node{n}": facts(n, free_ports=[47410 + n]) for n in (1, 2)}
    assert look.ways(OpenMachines(hosts, nodes, listening)) == {"node1": [], "node2": []}

    script = tmp_path / "script.py"
    script.write_text("import os; print('rank', os.environ['RANK'])")
    own = {"TANDEM_TEST_SCRIPT": str(script)}
    hosts = [replace(one, env_python=str(STANDIN), env=own) for one in hosts]
    plan = build(hosts, [facts(n, interfaces={}) for n in (1, 2)], Config(force=True))
    folders = {node.host: node.cwd for node in plan.nodes}
    code.send(code.current(), nodes, folders)
    guards.check_code(code.current().sha256, hosts, nodes, folders)
    run = tmp_path / "run"
    logs = RunLogs(run, Terminal(io.StringIO()), len(hosts))
    processes = guards.start_guards(plan, OpenMachines(hosts, nodes, {}))
    try:
        outcome = Watch(plan, processes, logs, Stopper()).run()
    finally:
        logs.close()
    assert outcome.status == "finished", outcome
    attempts = Attempts(run)
    attempts.begin(plan, "first attempt", 0.0)
    assert (
        collect.bring(
            nodes, {node.host: node.output for node in plan.nodes}, attempts.list, run, Sizes()
        )
        == []
    )
    assert (run / "nodes/node2/machine.1.jsonl").exists()
    assert "rank 1" in (run / "nodes/node2/rank1.log").read_text()


def python(script):
    return LocalProcess([sys.executable, "-c", script])


def test_a_command_gets_its_input_and_its_end_is_told():
    script = "import sys; print(len(sys.stdin.read())); sys.exit(3)"
    assert talk(python(script), b"x" * 3_000_000, 60) == (b"3000000\n", "", 3)
    said = "import sys; print('no'); sys.exit('it is full')"
    assert talk(python(said), b"x" * 3_000_000, 60) == (b"no\n", "it is full", 1)


def test_a_command_that_says_too_much_is_left():
    with pytest.raises(UserError, match="longer than 4 MiB"):
        talk(python("while True: print('y' * 65536)"), b"", 60)


MANY = """
import os, resource, sys
from launcher.machines import engine
from contract.errors import UserError
from tests.unit.launcher.launcher_values import host
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    nodes, _ = engine.open_all([host(n, connection="local") for n in range(1, 301)])
except UserError as error:
    sys.exit(str(error))
processes = [node.start(["cat"]) for node in nodes.values()]
print(len(processes))
for process in processes:
    process.close()
"""


@pytest.mark.parametrize(
    ("hard", "code", "said"),
    [
        (4096, 0, "300\n"),
        (512, 1, "300 machines need about 2528 open files, and this machine allows 512"),
    ],
)
def test_three_hundred_machines_fit_where_a_shell_allows_few_open_files(hard, code, said):
    done = subprocess.run(
        [sys.executable, "-c", MANY, "256", str(hard)],
        cwd=inventory.CHECKOUT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code and said in done.stdout + done.stderr
