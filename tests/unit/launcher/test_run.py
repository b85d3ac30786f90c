"""Whole runs on local nodes: real guards and processes, a stand-in for torch and the trainer."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from contract import runs
from contract.errors import UNWRITTEN, UserError
from contract.options import Options as TrainerOptions
from contract.runs import prediction_path
from launcher import collect, folders, run
from launcher.machines.engine import Busy, MachineError
from launcher.machines.engines.local import LocalNode
from launcher.machines.engines.ssh import SshNode
from launcher.options import Options
from launcher.plan import checks, plan, predictions, preflight
from launcher.plan.checks import ReadyRun
from launcher.run import Run
from launcher.terminal import Terminal
from launcher.watch import attempts
from tests.unit.launcher.launcher_values import SETTINGS, facts, host

pytestmark = pytest.mark.usefixtures("settles_soon")
CHECKOUT = Path(__file__).resolve().parents[3]
PYTHON = Path(__file__).with_name("launcher_python.py")
REPORT = run.REPORT


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """start(script, nodes=3, max_restarts=0, ...) -> exit code, output, run folder.

    `nodes`: how many, or their numbers. `resumed`: how the run ended before. The report
    is a stand-in that says nothing.
    """
    monkeypatch.setattr(folders, "RUNS", tmp_path / "runs")
    monkeypatch.setattr("launcher.run.REPORT", ("true",))

    def start(script, nodes=3, env=None, resumed=None, **options):
        (tmp_path / "script.py").write_text("import os, sys, time, signal\n" + script)
        own = {"TANDEM_TEST_SCRIPT": str(tmp_path / "script.py"), **(env or {})}
        hosts = [
            host(
                number,
                connection="local",
                address="127.0.0.1",
                node_dir=str(tmp_path / f"node{number}"),
                env_python=str(PYTHON),
                env=own,
            )
            for number in (range(1, nodes + 1) if isinstance(nodes, int) else nodes)
        ]

        def look(_hosts, _options, *, without_missing=False):
            found = {h.name: facts(int(h.name[4:]), machine="one", routes={}) for h in hosts}
            return preflight.OpenMachines(hosts, {h.name: h.engine.node(h) for h in hosts}, found)

        monkeypatch.setattr(preflight, "inspect", look)
        # This machine may be training, or have these tests twice.
        asked = Options(**{"force": True, **options})
        machines, what = look(hosts, None), preflight.Requirements(asked, SETTINGS)
        checked = ReadyRun(asked, SETTINGS, hosts, machines, what)
        folder = tmp_path / "runs" / "r"
        folder.mkdir(parents=True, exist_ok=True)
        number = 1
        if resumed:
            earlier = {"attempt": 1, "status": resumed, "nodes": [], "master_port": 1, "ranks": {}}
            earlier.update(reason="first attempt", wall_seconds=1.0)
            ended = {"status": resumed, "attempts": [earlier]}
            attempts.write_json(folder / "attempts.json", ended)
            number = 2
        made = checks.make_plan(checked, checked.machines, run="r", attempt=number)
        attempts.write_json(folder / "plan.json", made.document())
        code = Run(checked, folder, Terminal()).carry_out(made, "first attempt")
        return code, capsys.readouterr().out, folder

    return start


def told(folder):
    return json.loads((folder / "attempts.json").read_text())


def test_a_run_that_finishes(start, monkeypatch):
    monkeypatch.setattr("launcher.run.REPORT", REPORT)
    script = "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    code, said, folder = start(script)
    assert code == 0
    for rank in range(3):
        assert f"[node{rank + 1} {rank}] rank {rank} of 3\n" in said
        log = folder / f"nodes/node{rank + 1}/rank{rank}.log"
        assert log.read_text() == f"rank {rank} of 3\n"
        assert (folder / f"nodes/node{rank + 1}/exit.json").exists()
        assert (folder / f"nodes/node{rank + 1}/iostat.json").exists()
    assert told(folder)["status"] == "finished"
    assert (folder.parent / "latest").resolve() == folder.resolve()


def test_the_first_cause_ends_all_and_gives_the_exit_code(start):
    code, said, folder = start(
        "rank = int(os.environ['RANK'])\n"
        "if rank == 1:\n    print('about to break'); sys.exit(41)\n"
        "time.sleep(600)"
    )
    assert code == 41
    cause = told(folder)["attempts"][0]["first_cause"]
    assert (cause["host"], cause["rank"], cause["exit_code"]) == ("node2", 1, 41)
    assert cause["last_lines"] == ["about to break"]
    assert said.count(": clean: ") == 3


def test_a_signal_is_told_and_gives_128_more(start):
    code, _, folder = start(
        "if os.environ['RANK'] == '2': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    )
    assert code == 137
    cause = told(folder)["attempts"][0]["first_cause"]
    assert (cause["host"], cause["signal"], cause["exit_code"]) == ("node3", "SIGKILL", None)


def test_a_restart_has_a_new_port_and_resumes(start):
    code, said, folder = start(
        "print(os.environ['MASTER_PORT'], sys.argv[-2:])\n"
        "if os.environ['TANDEM_ATTEMPT'] == '1': time.sleep(0.2); sys.exit(9)",
        max_restarts=1,
    )
    assert code == 0
    first, second = told(folder)["attempts"]
    assert (first["status"], second["status"]) == ("failed", "finished")
    assert first["master_port"] != second["master_port"]
    assert f"{second['master_port']} ['--resume', 'auto']" in said
    assert "failed: exit code 9" in second["reason"]


@pytest.mark.parametrize("before", ["stopped", "failed", "finished"])
def test_a_run_that_is_resumed_in_vain_stays_what_it_was(start, before):
    """The trainer refuses, for its data set is another; 41 is a real failure."""
    refusal = "print('trainer: another data set', file=sys.stderr); sys.exit(2)"
    code, said, folder = start(refusal, nodes=1, resumed=before)
    assert code == 2 and "another data set" in said
    assert told(folder)["status"] == before
    assert [one["status"] for one in told(folder)["attempts"]] == [before, "failed"]
    code, _, folder = start("sys.exit(41)", nodes=1, resumed=before)
    assert (code, told(folder)["status"]) == (41, "failed")


def test_at_its_hour_a_run_saves_and_ends_as_by_make_stop(start):
    """The rank notes what it is asked, and ends with the code of a trainer that has saved."""
    saves = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\ntime.sleep(600)"
    code, said, folder = start(saves, nodes=2, until=int(time.time()) + 8, max_restarts=3)
    assert told(folder)["status"] == "stopped" and len(told(folder)["attempts"]) == 1
    assert "(UNTIL): the run saves and ends" in said
    assert code == 75


def test_a_machine_lost_at_a_restart_is_one_more_failure(start, monkeypatch):
    """Between looking and starting; the run goes on without asking anybody."""
    seen, lost = run.start_guards, []

    def start_guards(plan, machines):
        if plan.attempt == 2 and not lost:
            lost.append(MachineError(["node2"], "node2 (127.0.0.1): cannot be reached: No route"))
            raise lost[0]
        return seen(plan, machines)

    monkeypatch.setattr(run, "start_guards", start_guards)
    script = "if os.environ['TANDEM_ATTEMPT'] == '1': sys.exit(9)"
    code, said, folder = start(script, nodes=2, max_restarts=2)
    assert code == 0
    assert [one["status"] for one in told(folder)["attempts"]] == ["failed", "failed", "finished"]
    cause = told(folder)["attempts"][1]["first_cause"]
    assert (cause["host"], "No route" in cause["message"]) == ("node2", True)
    assert "starting again: node2 gone: node2 (127.0.0.1): cannot be reached" in said


def test_of_machines_of_like_names_the_one_that_is_lost_is_named(start, monkeypatch):
    """node10's name begins like node1's; what is lost is its ssh connection, not a stand-in."""

    class Broken(LocalNode):
        def start(self, argv):
            if "launcher/node" not in argv[-2]:
                return super().start(argv)
            wire = SshNode(host(10, address="127.0.0.1"))
            wire._connection.transport = Closed()
            return wire.start(argv)

    class Closed:
        def open_session(self, timeout):
            raise EOFError

    seen, lost = run.start_guards, []

    def start_guards(plan, machines):
        if plan.attempt == 2 and not lost:
            lost.append("node10")
            machines.nodes["node10"] = Broken(machines.hosts[1])
        return seen(plan, machines)

    monkeypatch.setattr(run, "start_guards", start_guards)
    script = "if os.environ['TANDEM_ATTEMPT'] == '1': sys.exit(9)"
    code, said, folder = start(script, nodes=[1, 10], max_restarts=2)
    assert code == 0
    assert told(folder)["attempts"][1]["first_cause"]["host"] == "node10"
    assert "starting again: node10 gone: node10 (" in said


def test_what_no_other_machine_would_mend_ends_the_run_with_its_records(start, monkeypatch):
    seen = run.sync_code

    def sync_code(plan, machines, say):
        if plan.attempt == 2:
            raise UserError("this machine's disk is full: make room.")
        seen(plan, machines, say)

    monkeypatch.setattr(run, "sync_code", sync_code)
    code, said, folder = start("sys.exit(9)", nodes=2, max_restarts=2)
    assert code == 1
    assert "tandem: this machine's disk is full" in said
    assert [one["first_cause"]["exit_code"] for one in told(folder)["attempts"]] == [9]
    assert told(folder)["status"] == "failed"
    assert (folder / "nodes/node2/exit.json").exists()


def test_environment_survives_every_character(start):
    odd = "a b'c\"d$HOME\n`e`\\ü"
    code, said, _ = start("print(repr(os.environ['ODD']))", nodes=1, env={"ODD": odd})
    assert code == 0
    assert f"[node1 0] {odd!r}\n" in said


def test_the_nodes_get_exactly_what_the_plan_says(start):
    _, said, folder = start("import json; print('argv', json.dumps(sys.argv[1:]))", nodes=2)
    kept = json.loads((folder / "plan.json").read_text())
    for node in kept["nodes"]:
        after = node["argv"][node["argv"].index("trainer") + 1 :]
        assert f"[{node['host']} {node['node_rank']}] argv {json.dumps(after)}\n" in said


def test_checkpoints_best_and_last_come_back(start):
    script = (
        "out = sys.argv[sys.argv.index('--output') + 1]\n"
        "held = f\"{out}/checkpoints/{os.environ['TANDEM_NODE']}\"\n"
        "os.makedirs(held)\n"
        "for name in ('step-8.pt', 'step-12.pt', 'best.pt'): open(f'{held}/{name}', 'w').close()"
    )
    code, said, folder = start(script, nodes=2)
    assert code == 0
    held = sorted(path.name for path in (folder / "checkpoints" / "node1").iterdir())
    assert held == ["best.pt", "step-12.pt"]
    assert said.count("tandem: checkpoint ") == 2


def test_a_disk_that_takes_nothing_more_is_told_once_and_in_the_exit_code(start, monkeypatch):
    make = collect.tempfile.mkdtemp

    def full(*words, **options):
        if options.get("prefix") != ".collect-":
            return make(*words, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(collect.tempfile, "mkdtemp", full)
    code, said, folder = start("print('trained')", nodes=2)
    assert (code, told(folder)["status"]) == (UNWRITTEN, "finished")
    assert said.count("No space left on device") == 1
    assert "stays on the machines, in runs/r of their node_dir" in said
    assert "Traceback" not in said


def test_a_run_whose_report_cannot_be_made_does_not_end_well(start, monkeypatch):
    monkeypatch.setattr("launcher.run.REPORT", (sys.executable, "-c", "raise SystemExit('full')"))
    code, said, _ = start("print('trained')", nodes=1)
    assert code == UNWRITTEN and "the report could not be made (full)" in said


def test_a_run_whose_outcome_cannot_be_written_does_not_end_well(start, monkeypatch):
    write = attempts.write_json

    def refuse(path, value, mode=0o644):
        if value["status"] == "finished":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        write(path, value, mode)

    begin = attempts.Attempts.begin

    def begin_then_refuse(self, *words):
        begin(self, *words)
        monkeypatch.setattr(attempts, "write_json", refuse)

    monkeypatch.setattr(attempts.Attempts, "begin", begin_then_refuse)
    code, said, _ = start("print('trained')", nodes=1)
    assert code == UNWRITTEN
    assert "attempts.json could not be written (Read-only file system)" in said


SAVING = """
out = sys.argv[sys.argv.index('--output') + 1]
host = os.environ['TANDEM_NODE']
os.makedirs(f'{out}/nodes/{host}', exist_ok=True)
with open(f"{out}/nodes/{host}/rank{os.environ['RANK']}.steps.jsonl", 'w') as file:
    file.write('{"kind": "checkpoint", "attempt": 1, "step": 3, "file": %s}\\n')
sys.exit(9)
"""


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("sys.exit(9)", "this run cannot be continued"),
        (SAVING % "null", "this run cannot be continued"),
        (SAVING % '"step-3.pt"', "to continue where it was saved: `make train RESUME=r`"),
    ],
)
def test_a_failed_run_ends_with_what_to_type(start, script, last):
    _, said, _ = start(script, nodes=2)
    assert said.splitlines()[-1].startswith(f"tandem: {last}")


def test_what_a_start_waits_for_is_said_until_a_rank_speaks(start, monkeypatch, tmp_path):
    for name in ("terminal.FIRST_NOTICE", "terminal.NOTICE_EVERY", "watch.watch.RENEW_EVERY"):
        monkeypatch.setattr(f"launcher.{name}", 0.02)
    seen = Terminal.say

    def say(self, text):
        seen(self, text)
        if "1 of 1 processes run" in text:
            (tmp_path / "told").touch()

    monkeypatch.setattr(Terminal, "say", say)
    script = (
        "for _ in range(1000):\n"
        f"    if os.path.exists({str(tmp_path / 'told')!r}): break\n"
        "    time.sleep(0.02)\n"
        "print('here', flush=True); time.sleep(0.5)"
    )
    _, said, _ = start(script, nodes=1)
    prefix = "tandem: starting (torch, network, data): "
    before, after = said.split("[node1 0] here")
    assert prefix in before and prefix not in after


def test_a_traceback_is_in_the_log_and_the_error_on_the_terminal(start):
    _, said, folder = start("def f(): raise ValueError('odd')\nf()", nodes=1)
    assert "[node1 0] ValueError: odd\n" in said
    before_cause = said.split("tandem: node1, rank 0")[0]
    assert "Traceback" not in before_cause and "line 2" not in before_cause
    assert "Traceback" in (folder / "nodes/node1/rank0.log").read_text()


def test_a_run_has_one_controller(tmp_path):
    held = folders.lock(tmp_path)
    script = (
        "import pathlib, sys\nfrom launcher import folders\nfolders.lock(pathlib.Path(sys.argv[1]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert f"is being carried out by process {os.getpid()}" in other.stderr
    held.close()
    folders.lock(tmp_path).close()


def test_what_a_dead_controller_left_open_is_closed(tmp_path):
    begun = attempts.Attempts(tmp_path)
    begun.begin(plan_of_one(), "first attempt", 0.0)
    again = attempts.Attempts(tmp_path)
    assert again.close_broken() == 1
    assert again.list[0]["status"] == "failed"
    assert again.ports == {29500}


def plan_of_one() -> plan.Plan:
    from tests.unit.launcher.launcher_values import build

    return build([host(1)], [facts(1)])


def test_stop_asks_the_workers_to_save(start, monkeypatch):
    script = (
        "def leave(*_): print('saved'); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    seen = Terminal.lines

    def lines(self, texts):
        seen(self, texts)
        if "ready" in texts[0] and not getattr(self, "asked", False):
            self.asked = True
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Terminal, "lines", lines)
    code, said, folder = start(script, nodes=1)
    assert (code, told(folder)["status"]) == (75, "stopped")
    assert "[node1 0] saved" in said
    assert "node1: clean: " in said


def test_the_plan_carries_what_was_predicted(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    asked = TrainerOptions(
        model="resnet50",
        per_node_batch_size=64,
        precision="fp32",
        sync="bf16",
        epochs=90,
        sync_warmup=0.0,
    )
    hosts = [host(n) for n in (1, 2, 3, 4)]
    assert predictions.predicted(asked, hosts) is None
    file = prediction_path(tmp_path, "resnet50", 4)
    measured = runs.Setting("resnet50", 64, 224, "fp32")
    rows = [
        {"nodes": 1, "sync": "allreduce", "images_per_second": 99.0},
        {"nodes": 4, "sync": "allreduce", "images_per_second": 80.0},
        {"nodes": 4, "sync": "bf16", "images_per_second": 150.5},
    ]
    file.write_text(runs.prediction_text(measured, 4, None, rows, {}))
    told = predictions.predicted(asked, hosts)
    assert told == {"images_per_second": 150.5, "made_unix": pytest.approx(time.time(), abs=60)}
    assert predictions.predicted(replace(asked, sync="fp16"), hosts) is None
    assert predictions.slower_than_one(asked, hosts) is None
    other = [*rows[:1], {**rows[2], "sync": "ef:2"}, rows[1]]
    file.write_text(runs.prediction_text(measured, 4, None, other, {}))
    said = predictions.slower_than_one(replace(asked, sync="allreduce"), hosts)
    assert "4 machines with SYNC=allreduce are slower than one alone, 80 against 99" in said
    assert "SYNC=ef:2 would give 150" in said
    assert predictions.slower_than_one(replace(asked, sync="ef:2"), hosts) is None


def test_whoever_loses_the_machines_to_another_run_waits_on_if_asked_to(monkeypatch, capsys):
    results = [Busy("node2: in use"), Busy("node1: in use"), 0]

    def once(_options, _terminal):
        result = results.pop(0)
        if result == 0:
            return 0
        raise result

    monkeypatch.setattr(run, "train_once", once)
    monkeypatch.setattr(run.time, "sleep", lambda _seconds: None)
    with pytest.raises(Busy, match="node2"):
        run.train(Options())
    assert run.train(Options(queue=True)) == 0
    assert "waiting: node1: in use" in capsys.readouterr().out
