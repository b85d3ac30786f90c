"""What one room writes, as another reads it: each record by its real writer, taken by its reader.

Predictions have test_runs.py, measured links tests/unit/launcher/test_measure.py, and what machines
find of one another test_mesh.py there.
"""

import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from boundary import run_files
from contract.options import Config
from launcher import collect
from launcher.node import counters, records, sockets
from launcher.node.link import FIELDS, read_task
from launcher.options import document
from launcher.plan import plan as planning
from launcher.programs import build_program
from launcher.watch import attempts, guards
from launcher.watch.attempts import Attempts, Outcome, write_json
from launcher.watch.failures import Failure
from report import read
from report.files import time_of
from tests import run_directory
from tests.trainer_ranks import make_images
from tests.unit.launcher.guard_client import Client, workers
from tests.unit.launcher.launcher_values import CODE, build, facts, host

ROOT = Path(__file__).parents[3]
MODEL = f"{ROOT}/tests/tiny.py:tiny"
TRAINER = """
import runpy, sys
sys.path.insert(0, {root!r})
sys.argv = ["trainer", "--data", {data!r}, "--output", {output!r}, "--model", {model!r},
            "--epochs", "1", "--per_node_batch_size", "8", "--sample_log", "--precision", "fp32",
            "--device", "cpu", "--workers", "0", "--log_every", "1"]
runpy.run_module("trainer", run_name="__main__", alter_sys=True)
"""
MOUNT = {  # a kernel's own words of an NFS share
    "/proc/self/mounts": "nas:/data /data nfs4 rw 0 0\n",
    "/proc/self/mountstats": "device nas:/data mounted on /data with fstype nfs4 statvers=1.1\n"
    "\tbytes:\t1 2 3 4 5 6 7 8\n",
}


class Made(NamedTuple):
    """What a guard and a trainer left and said, and a folder for the launcher's own records."""

    folder: Path
    scratch: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder, scratch = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("scratch")
    data = make_images(scratch / "images", per_class=6)
    script = TRAINER.format(root=str(ROOT), data=str(data), output=str(folder), model=MODEL)
    env = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "1"}
    kept = {"record": True, "interface": "lo", "data": str(data)}
    (scratch / "away").mkdir()
    (scratch / "away/anna").touch()
    kept |= {"owner_signs": ["asked"], "away_dir": str(scratch / "away")}
    guard = Client()
    try:
        guard.start(folder, workers(script), env=env, **kept)
        guard.wait_for("exit", seconds=120)
    finally:
        guard.close()
    return Made(folder, scratch)


def lost(record, written):
    """The fields that a reader knows and does not get; one that was written as null has arrived."""
    return {
        name
        for name in record.__struct_fields__
        if name not in written or (written[name] and not getattr(record, name))
    }


def lines(path, kind):
    every = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def steps(made, kind):
    return lines(made.folder / "nodes/node1/rank0.1.steps.jsonl", kind)


def samples(made):
    return lines(made.folder / "nodes/node1/machine.1.jsonl", "sample")


def trained(made):
    (record,) = read.read_run(made.folder).ranks
    (line, *_), columns = steps(made, "step"), record.steps
    found = {
        "step": columns.step[0] == 1 and columns.step[-1] == sum(columns.count),
        "samples": columns.samples[0] == line["samples"] > 0,
        "steps": list(columns.count) == [one["steps"] for one in steps(made, "step")],
        "longest": columns.longest[0] == time_of(line["longest"]) > 0,
        "loss": record.loss is not None and record.epoch == 0,
    }
    missing = {name for name, fits in found.items() if not fits}
    measured = {"data", "h2d", "forward", "backward", "optimizer", "evaluate"}
    return missing | measured - set(record.seconds)


def resumes(made):
    path = made.folder / "nodes/node1/rank0.1.steps.jsonl"
    (line,) = attempts.read_record_lines(path, run_files.Start)
    has_checkpoint = Attempts.has_checkpoint(made.folder)
    said = {"resumed_samples": line.resumed_samples == 0, "file": has_checkpoint}
    return {name for name, fits in said.items() if not fits}


def brought(made):
    names = {*collect.list_record_files("node1", [{"attempt": 1, "ranks": {"node1": [0]}}])}
    written = {path for path in made.folder.glob("*/**/*") if path.is_file()}
    left = {str(path.relative_to(made.folder)) for path in written}
    return {name for name in left - names if not name.startswith("checkpoints/")}


def plan_written(made):
    options = Config(nodes=2, trainer={"model": "resnet50", "per_node_batch_size": 64, "lr": 0.1})
    code = dataclasses.replace(CODE, git_revision="abc", git_diff="x")
    asked = planning.PlanRequest(made.scratch.name, 1.0, options, build_program(options), code)
    one = planning.build([host(1), host(2)], {"node1": facts(1), "node2": facts(2)}, asked)
    write_json(made.scratch / "plan.json", one.document())
    return one


def planned(made):
    one = plan_written(made)
    found, written = (
        read.read_run(made.scratch).plan,
        json.loads((made.scratch / "plan.json").read_text()),
    )
    parts = [name for pair in zip(found.nodes, written["nodes"]) for name in lost(*pair)]
    asked = document(one.options)
    options = found.options.items()
    gone = {name for name, value in options if tuple_of(asked[name]) != tuple_of(value)}
    without = {"nodes"} if [len(node.ranks) for node in found.nodes] != [1, 1] else set()
    trainers = {"script": None, **written}  # of the trainer's run there is none
    return {*lost(found, trainers), *parts, *gone, *without}


def tuple_of(value):
    return tuple(value) if isinstance(value, list) else value


def attempted(made):
    path = made.scratch / "attempts.json"
    path.unlink(missing_ok=True)
    mine = Attempts(made.scratch)
    mine.begin(build([host(1)], [facts(1)]), "first attempt", 1.0)
    cause = Failure("node1", "worker", 0, rank=0, exit_code=1, signal="SIGKILL", exception="E: x")
    mine.end(Outcome("failed", cause, 2.0, [], {}))
    mine.close("failed")
    mine.note_how_to_resume("type it again")
    (entry,), (written,) = (
        read.read_run(made.scratch).attempts,
        json.loads(path.read_text())["attempts"],
    )
    missing = lost(entry, written) | lost(entry.first_cause, written["first_cause"])
    again = Attempts(made.scratch)
    return missing | (
        {"attempts"} if (again.list, again.status) != (mine.list, "failed") else set()
    )


def tasks(made):
    one = plan_written(made)
    written = json.loads(json.dumps(guards.make_task(one, one.nodes[0])))
    known = set(FIELDS) - {
        "beat",
        "fail_grace",
        "meet_within",
        "ask_after",
        "record",
    }  # these are the guard's own
    taken = vars(read_task(written))
    return {name for name in known if name not in written or taken[name] != written[name]}


# Who writes, who reads, and the function that gives what of the record is lost on the way.
CASES = [
    ("trainer/train.py, steps", "report/read.py", trained),
    ("trainer/train.py", "launcher/watch/attempts.py", resumes),
    ("launcher/node and trainer, names of files", "launcher/collect.py", brought),
    ("launcher/plan/plan.py", "report/read.py", planned),
    ("launcher/watch/attempts.py", "report/read.py and itself", attempted),
    ("launcher/watch/guards.py", "launcher/node/link.py", tasks),
]


def test_the_files_of_a_machine_and_of_its_ranks_keep_the_contract(made):
    """Which the runs of the report's tests keep, too (tests/unit/test_run_directory.py)."""
    assert run_directory.problems(made.folder) == []
    assert "0" in {rank for line in samples(made) for rank in line.get("ranks", ())}


def test_what_this_machine_may_not_have_keeps_it_too(monkeypatch):
    """A disk that did something and holds the data, a share, a peer and a card."""
    looks, read_text = itertools.count(0, 900), records.read_text
    one = sockets.Connection(1, ("192.0.2.2", 5, "192.0.2.1", 6), "socket:[7]", 9, 9, 0.5)
    connections = iter([[], [one]])

    def read_disks():
        return {"sda": dict.fromkeys(counters.DISK_COUNTERS, next(looks))}

    monkeypatch.setattr(records, "read_disks", read_disks)
    monkeypatch.setattr(records, "disk_of", lambda path: "sda")
    monkeypatch.setattr(records, "read_text", lambda path: MOUNT.get(path) or read_text(path))
    monkeypatch.setattr("launcher.node.sockets.connections", lambda: next(connections))
    sampler = records.Sampler(interface="lo", data="/")
    line = [sampler.sample() for _ in range(2)][1]
    line["gpus"] = [counters.parse_gpu_sample("0, 50, 1024, 60, 100.5, 1500", 1.0)]
    assert run_directory.machine_line({"kind": "sample", **line}, "a line") == []
    assert {"disks", "data_disk", "mounts"} <= line.keys() and "192.0.2.1" in line["card"]["peers"]


@pytest.mark.parametrize(
    "lost_of", [one for *_, one in CASES], ids=[f"{w} to {r}" for w, r, _ in CASES]
)
def test_what_is_written_is_what_is_read(made, lost_of):
    assert lost_of(made) == set()


@pytest.mark.parametrize(
    ("hidden", "place", "field"), [("schedstat", "ranks", "ran"), ("/proc/diskstats", "", "disks")]
)
def test_what_the_kernel_does_not_say_is_absent_and_not_0(monkeypatch, hidden, place, field):
    def known(path):
        return read_text(path)

    def unknown(path):
        return "" if str(path).endswith(hidden) else read_text(path)

    read_text = records.read_text
    for reader, is_known in ((known, True), (unknown, False)):
        monkeypatch.setattr(records, "read_text", reader)
        sampler = records.Sampler(interface="lo", pids=lambda: {0: os.getpid()})
        line = [sampler.sample() for _ in range(2)][1]
        assert (field in (line[place]["0"] if place else line)) == is_known
