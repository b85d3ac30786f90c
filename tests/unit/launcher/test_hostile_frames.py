"""Machines whose frames would end the controller, make it deaf, or reach a defect of it: each is
that machine's failure alone."""

from pathlib import Path

import pytest

from launcher import collect
from launcher.background import Sizes
from launcher.engines.local import LocalProcess
from launcher.terminal import Stopper
from launcher.watch import failures
from launcher.watch.guards import Frames, Guarded
from launcher.watch.lines import RankLog, RunLogs
from launcher.watch.records import Records
from launcher.watch.watch import Stage, Watch
from report.status import Follower
from tests.unit.launcher.scripted_guards import watch

pytestmark = pytest.mark.usefixtures("settles_soon")
GOOD = "for line in sys.stdin:\n    if 'kill' in line: end('killed'); break\n"
RECORD = """
def record(data, offset=0, file="machine.1.jsonl"):
    say(type="record", file=file, offset=offset, bytes=len(data))
    sys.stdout.write(data); sys.stdout.flush()
"""


def second_process(process, *_):
    return "second = 1" in process._process.args[-1]


def second_host(_, host, *__):
    return host == "node2"


# What the loop calls for a machine's data, and whether these arguments are those of node2.
CALLED = {
    "what comes": (LocalProcess, "read", second_process),
    "its status": (LocalProcess, "wait", second_process),
    "its stderr": (LocalProcess, "stderr", second_process),
    "orders": (Guarded, "send", lambda guard, *_: guard.node.host == "node2"),
    "its lease": (Guarded, "renew", lambda guard: guard.node.host == "node2"),
    "frames": (Frames, "feed", lambda frames, _: 1 in frames._shapes["beat"]["running"][0].values),
    "records": (Records, "take", second_host),
    "lines": (RunLogs, "feed", second_host),
    "what failed": (failures, "_answer", lambda failure, _: failure.source == "worker"),
}
SAYS = """
second = 1
own = task["ranks"][0]
say(type="beat", unix=1.0, running=[own])
say(type="log", rank=own, stream="stdout", bytes=2)
print("x", flush=True)
record("{}\\n")
time.sleep(0.3)
say(type="worker_exit", rank=own, exit_code=1, signal=None, exception=None, first=True)
sys.exit()
"""


def planted(monkeypatch, owner, name, here):
    real = getattr(owner, name)

    def broken(*args, **more):
        if here(*args):
            raise LookupError("planted")
        return real(*args, **more)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("reader", CALLED)
def test_a_defect_that_a_machines_data_reach_is_its_failure_alone(tmp_path, monkeypatch, reader):
    monkeypatch.setattr("launcher.watch.watch.RENEW_EVERY", 0.1)
    planted(monkeypatch, *CALLED[reader])
    outcome, _ = watch(tmp_path, [GOOD, RECORD + SAYS])
    assert outcome.status == "failed"
    assert outcome.exits["node1"]["reason"] == "killed"
    assert outcome.cause.host == "node2"


def test_such_a_defect_is_told_with_its_place(tmp_path, monkeypatch):
    planted(monkeypatch, *CALLED["records"])
    outcome, _ = watch(tmp_path, [GOOD, RECORD + "record('{}')\nsys.stdin.read()"])
    assert (outcome.cause.host, outcome.cause.source) == ("node2", "guard")
    assert f"LookupError: planted ({Path(__file__).name}:" in outcome.cause.message


def test_a_defect_in_what_all_machines_told_together_ends_no_run(tmp_path, monkeypatch):
    planted(monkeypatch, Follower, "look", lambda *_: True)
    monkeypatch.setattr("launcher.watch.ruling.LOOK_EVERY", 0.1)
    outcome, said = watch(tmp_path, ["time.sleep(0.5)\nend('finished')"])
    assert outcome.status == "finished" and said.count("LookupError: planted") == 1


def test_a_defect_in_a_machines_last_lines_ends_no_run(tmp_path, monkeypatch):
    planted(monkeypatch, RankLog, "close", lambda log: "node1" in log._label)
    say = "say(type='log', rank=task['ranks'][0], stream='stdout', bytes=1)\n"
    say += "print('x', end='', flush=True)\nend('finished')"
    outcome, _ = watch(tmp_path, [say, say])
    assert outcome.status == "finished"
    assert (tmp_path / "nodes/node2/rank1.log").read_text() == "x\n"


def test_a_defect_in_a_machines_records_keeps_no_others_from_being_collected(monkeypatch):
    def bring(_, there, name, *__):
        if there == "node2":
            raise LookupError("planted")
        return [name]

    monkeypatch.setattr(collect, "_bring", bring)
    nodes = {f"node{n}": f"node{n}" for n in (1, 2, 3)}
    told = collect.bring(nodes, nodes, [], Path(), Sizes(), ("links.json",))
    assert (told[0], told[2]) == ("nodes/node1/links.json", "nodes/node3/links.json")
    assert told[1].startswith("node2: ") and "planted" in told[1]


def test_a_defect_in_the_newest_checkpoint_hides_no_others(tmp_path, monkeypatch):
    def checkpoint(node, _, __, target):
        if node == "node2":
            raise LookupError("planted")
        return [target]

    monkeypatch.setattr(collect, "_checkpoint", checkpoint)
    held = {"node1": ["step-1.pt"], "node2": ["step-9.pt"]}
    nodes = {host: host for host in held}
    paths, problems = collect.best_and_last(held, nodes, nodes, tmp_path)
    assert paths == [tmp_path / "checkpoints/node1/step-1.pt"]
    assert problems[0].startswith("node2: ") and "planted" in problems[0]


# As much as a piece may hold, without end.
FLOOD = """
data, offset = "x" * (1 << 15), 0
while True:
    record(data, offset)
    offset += len(data)
"""


def test_ctrl_c_is_heard_between_two_frames_of_a_flood(tmp_path, monkeypatch):
    stopper, seen = Stopper(), []
    take, enter = Records.take, Watch._enter

    def taken(self, host, *frame):
        seen.append(host)
        stopper.asked += seen.count(host) == 5 and stopper.asked < 2
        take(self, host, *frame)

    def entered(self, stage, *rest):
        seen.append(stage)
        enter(self, stage, *rest)

    monkeypatch.setattr(Records, "take", taken)
    monkeypatch.setattr(Watch, "_enter", entered)
    monkeypatch.setattr("tests.unit.launcher.scripted_guards.Stopper", lambda: stopper)
    monkeypatch.setattr("launcher.watch.watch.SLICE", 0.0)
    monkeypatch.setattr("launcher.watch.watch.SILENCE", 0.5)
    outcome, _ = watch(tmp_path, [RECORD + FLOOD] * 2)
    assert outcome.status == "stopped"
    before = seen[: seen.index(Stage.STOPPING)]
    assert max(before.count("node1"), before.count("node2")) == 5
    assert before[-1] == max(("node1", "node2"), key=before.count)
