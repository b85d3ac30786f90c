"""Whole runs on local nodes: real guards and processes, a stand-in for torch and the trainer."""

import contextlib
import errno
import io
import json
import os
import signal
import sys
import tempfile
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from contract.errors import UNWRITTEN, UserError
from contract.options import Config
from launcher import collect, folders, hours, lifecycle, look
from launcher.look import OpenMachines
from launcher.machines.engine import Busy
from launcher.machines.local import LocalNode
from launcher.machines.ssh import SshNode
from launcher.notify import Notify
from launcher.participants import Participants, Waiter
from launcher.plan import checks
from launcher.plan.checks import ReadyRun
from launcher.terminal import Terminal
from launcher.watch import attempts
from launcher.watch.attempts import Outcome
from launcher.watch.failures import Failure
from tests.unit.launcher.launcher_values import build, facts, host, needs

pytestmark = pytest.mark.usefixtures("settles_soon")
REPORT = lifecycle.REPORT_ARGV


@pytest.fixture
def start(tmp_path, monkeypatch, capsys, local_hosts):
    """start(script, nodes=3, max_restarts=0, ...) -> exit code, output, run folder.

    `nodes`: how many, or their numbers. `resumed`: how the run ended before. The report
    is a stand-in that says nothing.
    """
    monkeypatch.setattr(folders, "RUNS", tmp_path / "runs")
    monkeypatch.setattr("launcher.lifecycle.REPORT_ARGV", ("true",))

    def start(script, nodes=3, env=None, resumed=None, **options):
        numbers = range(1, nodes + 1) if isinstance(nodes, int) else nodes
        hosts = local_hosts("import os, sys, time, signal\n" + script, numbers, **(env or {}))

        def answers(_hosts, _options, *, without_missing=False):
            found = {h.name: facts(int(h.name[4:]), machine="one", interfaces={}) for h in hosts}
            return OpenMachines(hosts, {h.name: h.engine.node(h) for h in hosts}, found)

        monkeypatch.setattr(look, "open_and_probe", answers)
        # This machine may be training, or have these tests twice.
        asked = Config(**{"force": True, **options})
        asked = needs(asked)
        asked = replace(asked, program=replace(asked.program, check=()))
        checked = ReadyRun(asked, answers(hosts, None), Participants(hosts, Config()))
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
        run = lifecycle.take_control(folder, checked, Terminal())
        code = lifecycle.run_to_end(run, made, "first attempt")
        return code, capsys.readouterr().out, folder

    return start


def told(folder):
    return json.loads((folder / "attempts.json").read_text())


WHOLE = """
import json
print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], repr(os.environ['ODD']))
print('argv', json.dumps(sys.argv[1:]))
held = f"{os.environ['TANDEM_OUTPUT']}/checkpoints/{os.environ['TANDEM_NODE']}"
os.makedirs(held)
for name in ('step-8.pt', 'step-12.pt', 'best.pt'): open(f'{held}/{name}', 'w').close()
"""
ODD = "a b'c\"d$HOME\n`e`\\ü"


def test_a_run_that_finishes(start, monkeypatch):
    monkeypatch.setattr("launcher.lifecycle.REPORT_ARGV", REPORT)
    code, said, folder = start(WHOLE, env={"ODD": ODD})
    assert (code, told(folder)["status"]) == (0, "finished")
    for rank, node in enumerate(json.loads((folder / "plan.json").read_text())["nodes"]):
        line = f"rank {rank} of 3 {ODD!r}"
        words = node["argv"][node["argv"].index("trainer") + 1 :]
        argv = f"argv {json.dumps(words)}"
        assert f"[{node['host']} {rank}] {line}\n[{node['host']} {rank}] {argv}\n" in said
        there = folder / "nodes" / node["host"]
        assert (there / f"rank{rank}.log").read_text() == f"{line}\n{argv}\n"
        first, *_, last = (there / "machine.1.jsonl").read_text().splitlines()
        assert (json.loads(first)["kind"], json.loads(last)["kind"]) == ("sample", "exit")
    held = sorted(path.name for path in (folder / "checkpoints/node1").iterdir())
    assert held == ["best.pt", "step-12.pt"] and said.count("tandem: checkpoint ") == 2
    assert (folder.parent / "latest").resolve() == folder.resolve()


WRITES = """
import json, pathlib
if os.environ['RANK'] == '0':
    file = pathlib.Path(os.environ['TANDEM_OUTPUT'], 'results', json.loads(sys.argv[-1])['predict'])
    file.parent.mkdir(exist_ok=True)
    file.write_text('path,class,probability')
"""


def test_predictions_come_into_the_run_s_folder_here(start):
    code, said, folder = start(WRITES, nodes=2, trainer={"predict": "out.csv"})
    assert code == 0 and "tandem: results " in said
    assert (folder / "results/out.csv").read_text() == "path,class,probability"


def test_predictions_that_do_not_come_are_an_error(start):
    code, said, _ = start("", nodes=1, trainer={"predict": "out.csv"})
    assert code == UNWRITTEN and "node1: results/out.csv was not copied: it is gone" in said


READS = """
import json
print('read', open(os.environ['TANDEM_WEIGHTS'], 'rb').read())
if os.environ['TANDEM_ATTEMPT'] == '1': sys.exit(9)
"""


def test_weights_that_lie_here_are_sent_to_every_machine_once(start, tmp_path):
    (tmp_path / "best.pt").write_bytes(b"weights")
    given = {"weights": str(tmp_path / "best.pt")}
    code, said, _ = start(READS, nodes=2, max_restarts=1, trainer=given)
    assert code == 0 and said.count("best.pt goes to node1, node2") == 1
    assert all(f"[node{n} {n - 1}] read b'weights'" in said for n in (1, 2))


def test_the_first_cause_ends_all_and_gives_the_exit_code(start):
    script = "if os.environ['RANK'] == '1': print('about to break'); sys.exit(41)\ntime.sleep(600)"
    code, said, folder = start(script)
    assert code == 41
    cause = told(folder)["attempts"][0]["first_cause"]
    assert (cause["host"], cause["rank"], cause["exit_code"]) == ("node2", 1, 41)
    assert cause["last_lines"] == ["about to break"]
    assert said.count(": all processes of the run have ended") == 3
    assert said.splitlines()[-1].startswith("tandem: this run cannot be resumed")


def test_its_end_is_told_by_notify_whatever_becomes_of_that(start, tmp_path):
    tell = """sh -c 'echo "$@" >>"$0"; exit 7' {} {{run}} {{status}} {{why}}"""
    code, said, folder = start("", nodes=1, notify=tell.format(tmp_path / "told"))
    assert (tmp_path / "told").read_text() == f"{folder.name} finished -\n"
    assert code == 0
    assert "tandem: NOTIFY: sh failed with exit code 7: " in said.splitlines()[-1]


def test_a_run_that_cannot_begin_is_told_of(start, monkeypatch, tmp_path):
    def full(*_):
        raise UserError("node1: its disk is full: make room.")

    monkeypatch.setattr(lifecycle, "deliver", full)
    with pytest.raises(UserError):
        start("", notify=f"sh -c 'echo $TANDEM_STATUS $TANDEM_WHY >>{tmp_path}/told'")
    assert (tmp_path / "told").read_text() == "failed node1: its disk is full: make room.\n"


def test_a_run_that_is_resumed_in_vain_stays_what_it_was(start):
    refusal = "print('trainer: another data set', file=sys.stderr); sys.exit(2)"
    code, said, folder = start(refusal, nodes=1, resumed="stopped")
    assert code == 2 and "another data set" in said
    assert told(folder)["status"] == "stopped"
    assert [one["status"] for one in told(folder)["attempts"]] == ["stopped", "failed"]


def test_a_run_that_is_resumed_and_fails_has_failed(start):
    code, _, folder = start("sys.exit(41)", nodes=1, resumed="finished")
    assert (code, told(folder)["status"]) == (41, "failed")


@pytest.mark.parametrize("by", ["make stop", "UNTIL"])
def test_a_run_that_is_to_stop_saves_and_ends(start, monkeypatch, by):
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(75)))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    seen, clock = Terminal.lines, [0.0]

    def lines(self, texts):
        seen(self, texts)
        if "ready" in "".join(texts) and by == "UNTIL":
            clock[0] = 2000.0
        elif "ready" in "".join(texts):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Terminal, "lines", lines)
    monkeypatch.setattr(hours, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(hours, "time", SimpleNamespace(time=lambda: clock[0]))
    monkeypatch.setattr(hours, "keep_awake", lambda *_: contextlib.nullcontext())
    code, said, folder = start(script, 1, max_restarts=3, until=1000 * (by == "UNTIL") or None)
    assert (code, told(folder)["status"], len(told(folder)["attempts"])) == (75, "stopped", 1)
    assert "[node1 0] saved" in said and "node1: all processes of the run have ended" in said
    assert ("(UNTIL): the run saves a checkpoint and ends" in said) is (by == "UNTIL")


def test_a_machine_lost_at_a_restart_is_one_more_failure(start, monkeypatch):
    """Between looking and starting; node10's name begins like node1's. What is lost is its ssh
    connection, not a stand-in."""

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

    seen, lost = lifecycle.start_guards, []

    def start_guards(plan, machines):
        if plan.attempt == 2 and not lost:
            lost.append("node10")
            machines.nodes["node10"] = Broken(machines.hosts[1])
        return seen(plan, machines)

    monkeypatch.setattr(lifecycle, "start_guards", start_guards)
    script = (
        "print(os.environ['MASTER_PORT'], *sys.argv[-2:])\n"
        "if os.environ['TANDEM_ATTEMPT'] == '1': sys.exit(9)"
    )
    code, said, folder = start(script, nodes=[1, 10], max_restarts=2)
    assert code == 0
    first, second, third = told(folder)["attempts"]
    statuses = [one["status"] for one in (first, second, third)]
    assert statuses == ["failed", "failed", "finished"]
    assert "failed: exit code 9" in second["reason"] and second["first_cause"]["host"] == "node10"
    assert "starting again: node10 does not answer any more: node10 (" in said
    assert len({one["master_port"] for one in (first, second, third)}) == 3
    given = [line for line in said.splitlines() if f"] {third['master_port']} " in line]
    assert given and all(line.endswith("--resume auto") for line in given)


def test_what_ranks_decided_reaches_the_next_attempt(start):
    """It comes from the first line of a rank that a guard has sent."""
    script = """
import json, pathlib
told = json.loads(pathlib.Path(os.environ['TANDEM_MEASURED']).read_text())['decided']
print('told', told.get('precision'))
attempt = os.environ['TANDEM_ATTEMPT']
decided = {'precision': 'bf16', 'sync': 'allreduce', 'balance': {}}
line = {'kind': 'start', 'attempt': int(attempt), 'resumed_samples': 0, 'decided': decided}
host, rank = os.environ['TANDEM_NODE'], os.environ['RANK']
folder = pathlib.Path(os.environ['TANDEM_OUTPUT'], 'nodes', host)
(folder / f'rank{rank}.{attempt}.steps.jsonl').write_text(json.dumps(line) + '\\n')
if attempt == '1': sys.exit(9)
"""
    code, said, folder = start(script, 1, max_restarts=1, trainer={"emulate": True})
    assert (code, [one["decided"]["precision"] for one in told(folder)["attempts"]]) == (
        0,
        ["bf16"] * 2,
    )
    assert "] told None\n" in said and "] told bf16\n" in said


def test_what_no_other_machine_would_mend_ends_the_run_with_its_records(start, monkeypatch):
    seen = lifecycle.deliver

    def deliver(*words):
        sent.append(1)
        if len(sent) == 2:
            raise UserError("this machine's disk is full: make room.")
        seen(*words)

    sent = []
    monkeypatch.setattr(lifecycle, "deliver", deliver)
    code, said, folder = start("sys.exit(9)", nodes=1, max_restarts=2)
    assert code == 1
    assert "tandem: this machine's disk is full" in said
    assert [one["first_cause"]["exit_code"] for one in told(folder)["attempts"]] == [9]
    assert told(folder)["status"] == "failed"
    assert (folder / "nodes/node1/machine.1.jsonl").exists()


STOPS = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print('ready', flush=True)
time.sleep(600)
"""


def test_where_no_start_follows_the_files_come_over_new_connections(start, monkeypatch):
    """The run was to go on with other machines: for these it had closed its connections."""

    def gather(*_):
        raise UserError("only 0 machines are ready")

    ready, seen = threading.Event(), Terminal.lines

    def lines(self, texts):
        seen(self, texts)
        if any("ready" in text for text in texts):
            ready.set()

    monkeypatch.setattr(Terminal, "lines", lines)
    leaves = lambda _: "node1 leaves" if ready.is_set() else None  # noqa: E731
    monkeypatch.setattr(Participants, "find_regroup_reason", leaves)
    monkeypatch.setattr(Participants, "gather", gather)
    monkeypatch.setattr(OpenMachines, "close", lambda machines: machines.nodes.clear())
    code, said, folder = start(WHOLE + STOPS, nodes=1, env={"ODD": ""})
    assert code == 75 and "tandem: only 0 machines are ready" in said
    held = sorted(path.name for path in (folder / "checkpoints/node1").iterdir())
    assert held == ["best.pt", "step-12.pt"]


def refuse_records(monkeypatch):
    make = tempfile.mkdtemp

    def full(*words, **options):
        if options.get("prefix") != ".collect-":
            return make(*words, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(collect.tempfile, "mkdtemp", full)


def refuse_report(monkeypatch):
    fails = (sys.executable, "-c", "raise SystemExit('full')")
    monkeypatch.setattr(lifecycle, "REPORT_ARGV", fails)


def refuse_outcome(monkeypatch):
    write = attempts.write_json

    def refuse(path, value, mode=0o644):
        if value.get("status") == "finished":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        write(path, value, mode)

    monkeypatch.setattr(attempts, "write_json", refuse)


@pytest.mark.parametrize(
    ("refuse", "why"),
    [
        (refuse_records, "are still on the machines, in runs/r of their node_dir"),
        (refuse_report, "the report failed (full)"),
        (refuse_outcome, "attempts.json could not be written (Read-only file system)"),
    ],
)
def test_a_run_of_which_something_is_not_written_does_not_end_well(start, monkeypatch, refuse, why):
    refuse(monkeypatch)
    code, said, _ = start("print('trained')", nodes=1)
    assert code == UNWRITTEN
    assert said.count(why) == 1 and "Traceback" not in said


SAVING = """
import json
out = os.environ['TANDEM_OUTPUT']
host = os.environ['TANDEM_NODE']
os.makedirs(f'{out}/nodes/{host}', exist_ok=True)
with open(f"{out}/nodes/{host}/rank{os.environ['RANK']}.1.steps.jsonl", 'w') as file:
    file.write('{"kind": "checkpoint", "attempt": 1, "step": 3, "file": "step-3.pt"}\\n')
sys.exit(9)
"""


def test_a_failed_run_that_saved_ends_with_what_to_type(start, monkeypatch):
    _, said, folder = start(SAVING, nodes=1)
    assert "`make train RESUME=r`" in said.splitlines()[-1]
    (path,) = folder.glob("nodes/node1/rank0.1.steps.jsonl")
    path.write_text(path.read_text().replace('"step-3.pt"', "null"))
    assert not attempts.Attempts.has_checkpoint(folder)


def test_what_a_start_waits_for_is_said_until_a_rank_speaks(start, monkeypatch, tmp_path):
    for name in ("terminal.FIRST_NOTICE", "terminal.NOTICE_EVERY", "watch.watch.RENEW_EVERY"):
        monkeypatch.setattr(f"launcher.{name}", 0.02)
    seen = Terminal.say

    def say(self, *texts):
        seen(self, *texts)
        if "1 of 1 processes run" in " ".join(texts):
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


def test_a_collision_is_busy_and_leaves_no_run(tmp_path, monkeypatch):
    """Two launchers found the same machines free, and another one has them now."""
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    earlier = folders.make_folder(tmp_path, "20261125T090000Z-resnet18-1n")
    (earlier / "plan.json").write_text("{}")
    folders.point_latest(earlier)
    hosts, said = [host(1)], io.StringIO()
    machines = OpenMachines(hosts, {}, {"node1": facts(1)})
    ready = ReadyRun(needs(), machines, Participants(hosts, Config()))
    busy = Failure(host="node1", source="busy", order=0, message="it is in use by ben: run other")
    outcome = Outcome("failed", busy, 1.0, [], {})

    def attempt(run, start, _stopper):
        run.attempts.begin(start.plan, start.reason, 0.0)
        return outcome

    monkeypatch.setattr(lifecycle, "perform_attempt", attempt)
    with pytest.raises(Busy, match="node1: it is in use by ben: run other: wait with QUEUE=1"):
        lifecycle.start_run(
            ready, Terminal(said), Waiter(Terminal(said), Notify(None, Terminal(said)))
        )
    assert [path.name for path in tmp_path.glob("2*")] == [earlier.name]
    assert (tmp_path / "latest").resolve() == earlier


def test_a_run_that_begins_in_another_s_second_gets_the_next_one(tmp_path):
    names = [folders.make_folder(tmp_path, "20261231T235959Z-resnet18-4n").name for _ in range(3)]
    assert names[1:] == ["20270101T000000Z-resnet18-4n", "20270101T000001Z-resnet18-4n"]


def test_a_run_has_one_controller(tmp_path):
    held = folders.lock(tmp_path)
    with pytest.raises(UserError, match=f"process {os.getpid()} .*is running"):
        folders.lock(tmp_path)
    held.close()
    folders.lock(tmp_path).close()


def test_what_a_dead_controller_left_open_is_closed(tmp_path):
    attempts.Attempts(tmp_path).begin(build([host(1)], [facts(1)]), "first attempt", 0.0)
    again = attempts.Attempts(tmp_path)
    assert again.close_broken() == 1
    assert again.list[0]["status"] == "failed"
    assert again.used_ports == {29500}
