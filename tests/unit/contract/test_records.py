"""What one room writes, as another reads it: each record by its real writer, taken by its reader.

Predictions have test_runs.py, runs of an older writer test_older_run.py, measured links
tests/unit/launcher/test_measure.py, and what machines find of one another test_mesh.py there.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from contract.options import Config
from contract.records import names
from launcher import collect, folders, look, run
from launcher.look import Requirements
from launcher.node import counters, gpus, records
from launcher.node.task import FIELDS, read_task
from launcher.options import document, with_trainer
from launcher.plan import plan as planning
from launcher.watch import attempts, guards
from launcher.watch.attempts import Attempts, write_json
from launcher.watch.failures import Failure
from launcher.watch.watch import Outcome
from report import devices, disk, fields, machines, network, read, status
from report.files import number, text, time_of
from report.windows import Window
from tests.trainer_ranks import make_images
from tests.unit.launcher.guard_client import Client, workers
from tests.unit.launcher.launcher_values import CODE, SETTINGS, build, facts, host

ROOT = Path(__file__).parents[3]
MODEL = f"{ROOT}/tests/older_run/tiny.py:tiny"
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
    frames: bytes  # of this guard
    failed: bytes  # of one whose worker failed
    scratch: Path


class Listener(Client):
    """Keeps all that the guard sends as it came."""

    sent = b""

    def take(self, data):
        self.sent += data
        super().take(data)


def guarded(output, argv, **task):
    """All that a guard sends of such an attempt."""
    guard = Listener()
    try:
        guard.start(output, argv, **task)
        guard.wait_for("exit", seconds=120)
    finally:
        guard.close()
    return guard.sent


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
    frames = guarded(folder, workers(script), env=env, **kept)
    left = {"record": True, "interface": "none0"}
    failed = guarded(scratch / "failed", workers("raise SystemExit(3)"), **left)
    return Made(folder, frames, failed, scratch)


def lost(reader, entry):
    """The fields that a reader knows and does not get; one that was written as null has arrived."""
    return {
        name
        for name, read in reader.items()
        if name not in entry or (entry[name] is not None and read(entry[name]) is None)
    }


def lines(path, kind):
    every = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def steps(made, kind):
    return lines(made.folder / "nodes/node1/rank0.1.steps.jsonl", kind)


def samples(made):
    return lines(made.folder / "nodes/node1/machine.1.jsonl", "sample")


def frames(made):
    seen = set()
    for sent in (made.frames, made.failed):
        seen |= {frame["type"] for frame, _ in guards.Frames((0,)).feed(sent)}
    return guards.shapes((0,)).keys() - seen


def sent(made):
    """The files that came by frames are those that lie there."""
    found = {}
    for frame, piece in guards.Frames((0,)).feed(made.frames):
        if frame["type"] == "record":
            found[frame["file"]] = found.get(frame["file"], b"") + piece
    folder = made.folder / "nodes/node1"
    return {name for name, data in found.items() if (folder / name).read_bytes() != data} | (
        set(names(1, [0])) ^ found.keys()
    )


def exits(made):
    (entry,) = read.read_run(made.folder).exits.values()
    return {*lost(fields.EXIT, entry), *({"ranks"} if entry["ranks"] != [0] else ())}


def networks(made):
    cards = [line["card"] for line in samples(made)]
    # The loopback card has no speed, and nobody else was sent anything.
    usual = {"speed_mbit": 1000, "peers": {"192.0.2.1": PEER}}
    return {name for card in cards for name in lost(network.SAMPLE, {**usual, **card})}


PEER = {"from": "192.0.2.2", "sent": 9, "busy": 0.5}


def peers(made):
    with pytest.MonkeyPatch.context() as patch:
        connections = iter([[], [(1, "192.0.2.2", "192.0.2.1", 9, 0.5)]])
        patch.setattr("launcher.node.sockets.connections", lambda: next(connections))
        sampler = records.Sampler(interface="lo")
        line = [sampler.sample() for _ in range(2)][1]
    return set() if network.peers(line["card"]["peers"]) == {"192.0.2.1": PEER} else {"peers"}


def disks(made):
    return {name for line in samples(made) for name in {"disks"} - line.keys()}


def rates(made):
    """A disk that did everything, and holds the data."""
    looks = iter([0, 900])

    def read_disks():
        return {"sda": dict.fromkeys(counters.DISK_COUNTERS, next(looks))}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "read_disks", read_disks)
        patch.setattr(records, "disk_of", lambda path: "sda")
        line = records.Sampler(data="/").sample()
    seen = disk.Disks(None, "node1")
    seen.add(Window(1, 0.0, 10.0, 9), 1.0, line)
    (use,) = seen.uses()
    known = ("read", "write", "peak_read", "util", "await_ms", "holds_data")
    return {name for name in known if not getattr(use, name)}


def cards(made):
    line = gpus.card_of("0, 50, 1024, 60, 100.5, 1500", 1.0)
    known = {"index", *devices.FIGURES, *status.GPU}
    return lost(dict.fromkeys(known, number), line)


def shares(made):
    """The kernel's files of a machine that has a share stand for this one's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "text_of", lambda path: MOUNT.get(path, ""))
        line = records.Sampler().sample()
    seen = disk.Shares(None, "node1")
    for mono in (1.0, 2.0):
        seen.add(Window(1, 0.0, 10.0, 9), mono, line)
        line["mounts"]["/data"]["read_bytes"] += 1e6
    (use,) = seen.uses()
    return set() if (use.mount, use.kind, use.read) == ("/data", "nfs4", 1.0) else {"mounts"}


def loads(made):
    every = samples(made)
    missing = {name for line in every for name in lost(machines.SAMPLE, line)}
    of_rank = [machines.schedule(line.get("ranks")) for line in every]
    missing |= {name for line in every for name in {"mono"} - line.keys()}
    return missing | (set() if any("0" in found for found in of_rank) else {"ranks"})


def shown(made):
    """What status and top read of a machine, but for what this one may not have."""
    (line, *_), sensors = samples(made), {"temperature": 50.0, "gpus": []}
    seen = status.sample_of({**sensors, **line})
    return (status.SAMPLE.keys() | set(status.CARD)) - seen.keys()


def starts(made):
    (line,) = steps(made, "start")
    return lost(fields.START, line)


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
    return missing | {"data", "forward", "backward", "optimizer", "evaluate"} - set(record.seconds)


def evaluated(made):
    (line,) = steps(made, "evaluate")
    return lost(fields.EVALUATION, line)


def ended(made):
    (line,) = steps(made, "end")
    return lost(fields.END, line)


def resumes(made):
    path = made.folder / "nodes/node1/rank0.1.steps.jsonl"
    (line,) = attempts.lines_of(path, attempts.START)
    said = {"resumed_samples": line["resumed_samples"] == 0, "file": Attempts.saved(made.folder)}
    return {name for name, fits in said.items() if not fits}


def brought(made):
    names = {*collect.wanted("node1", [{"attempt": 1, "ranks": {"node1": [0]}}])}
    written = {path for path in made.folder.glob("*/**/*") if path.is_file()}
    left = {str(path.relative_to(made.folder)) for path in written}
    return {name for name in left - names if not name.startswith("checkpoints/")}


def checkpoints(made):
    names = [path.name for path in (made.folder / "checkpoints/node1").iterdir()]
    (saved,) = steps(made, "checkpoint")
    found = collect.newest(names)
    return {"file"} if found != (saved["step"], saved["file"]) else set()


def plan_written(made):
    options = Config(nodes=2, trainer={"model": "resnet50", "per_node_batch_size": 64, "lr": 0.1})
    said = {"images_per_second": 9.0, "made_unix": 1.0}
    code = dataclasses.replace(CODE, git_revision="abc", git_diff="x")
    asked = planning.Request(made.scratch.name, 1.0, options, SETTINGS, code, predicted=said)
    one = planning.build([host(1), host(2)], {"node1": facts(1), "node2": facts(2)}, asked)
    write_json(made.scratch / "plan.json", one.document())
    return one


def planned(made):
    one = plan_written(made)
    found = read.read_run(made.scratch)
    inner = {"host": text, "connection": text, "ranks": fields.ranks}
    parts = [name for node in found.plan["nodes"] for name in lost(inner, node)]
    asked = document(one.options)
    options = found.plan["options"].items()
    gone = {name for name, value in options if tuple_of(asked[name]) != tuple_of(value)}
    without = {"nodes"} if [len(node["ranks"]) for node in found.plan["nodes"]] != [1, 1] else set()
    trainers = {"script": None, **found.plan}  # of the trainer's run there is none
    return {*lost(fields.PLAN, trainers), *parts, *gone, *without}


def resumed(made):
    """What RESUME reads, up to the machines."""
    one, asked = plan_written(made), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "RUNS", made.scratch.parent)
        patch.setattr(run, "check_machines", lambda options, *_: asked.append(options) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.resume(made.scratch.name, {})
    then = document(with_trainer(one.options, precision=one.precision))
    now = document(asked[0])
    return {name for name, value in then.items() if tuple_of(now[name]) != tuple_of(value)}


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
    mine.say_how("type it again")
    (entry,) = read.clean_attempts(json.loads(path.read_text()))
    missing = lost(fields.ATTEMPT, entry) | lost(fields.CAUSE, entry["first_cause"])
    again = Attempts(made.scratch)
    return missing | (
        {"attempts"} if (again.list, again.status) != (mine.list, "failed") else set()
    )


def tasks(made):
    one = plan_written(made)
    written = json.loads(json.dumps(guards.task(one, one.nodes[0])))
    known = set(FIELDS) - {
        "beat",
        "fail_grace",
        "meet_within",
        "record",
    }  # these are the guard's own
    taken = vars(read_task(written))
    return {name for name in known if name not in written or taken[name] != written[name]}


def machine(made):
    """Each fact, with a stand-in for nvidia-smi."""
    tool = made.scratch / "bin/nvidia-smi"
    tool.parent.mkdir(exist_ok=True)
    row = "580.1, NVIDIA GeForce RTX 2080 Ti, GPU-1, 0x1E0710DE"
    tool.write_text(
        f'#!/bin/sh\ncase "$*" in *driver_version*) echo "{row}";; *cap*) echo 7.5;; esac'
    )
    tool.chmod(0o755)
    here = host(
        1, connection="local", address="127.0.0.1", env_python=sys.executable,
        node_dir=str(made.scratch / "node"), data_root=str(made.scratch), cuda_home="/usr",
    )  # fmt: skip
    settings = dataclasses.replace(SETTINGS, model=MODEL)  # else torchvision is imported
    task = look.question(here, [here], Requirements(Config(data="images"), settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
        found, failed = look.ask_all({"node1": here.engine.node(here)}, {"node1": task})
    if failed:
        return {one.text for one in failed.values()}
    facts = found["node1"]
    (card,) = facts.gpus.cards
    known = {"sm": card.sm == 75, "pci": card.pci == "1e07", "val": "val" in facts.data.splits}
    known.update(interface=facts.interfaces == {"127.0.0.1": "lo"})
    return {name for name, fits in known.items() if not fits}


# Who writes, who reads, and the function that gives what of the record is lost on the way.
CASES = [
    ("launcher/node/guard.py", "launcher/watch/guards.py", frames),
    ("launcher/node/records.py", "launcher/watch/guards.py", sent),
    ("launcher/node/records.py, exit", "report/read.py", exits),
    ("launcher/node/records.py, card", "report/network.py", networks),
    ("launcher/node/records.py, peers", "report/network.py", peers),
    ("launcher/node/records.py, disks", "report/uses.py", disks),
    ("launcher/node/records.py, rates", "report/disk.py", rates),
    ("launcher/node/gpus.py, cards", "report/devices.py", cards),
    ("launcher/node/records.py, mounts", "report/disk.py", shares),
    ("launcher/node/records.py, processors", "report/machines.py", loads),
    ("launcher/node/records.py", "report/status.py", shown),
    ("trainer/banner.py", "report/read.py", starts),
    ("trainer/train.py, steps", "report/read.py", trained),
    ("trainer/train.py, evaluations", "report/read.py", evaluated),
    ("trainer/train.py, end", "report/read.py", ended),
    ("trainer/train.py", "launcher/watch/attempts.py", resumes),
    ("launcher/node and trainer, names of files", "launcher/collect.py", brought),
    ("trainer/writer.py", "launcher/collect.py", checkpoints),
    ("launcher/plan/plan.py", "report/read.py", planned),
    ("launcher/plan/plan.py", "launcher/run.py", resumed),
    ("launcher/watch/attempts.py", "report/read.py and itself", attempted),
    ("launcher/watch/guards.py", "launcher/node/task.py", tasks),
    ("launcher/node/probe.py", "launcher/look.py", machine),
]


@pytest.mark.parametrize(
    "lost_of", [one for *_, one in CASES], ids=[f"{w} to {r}" for w, r, _ in CASES]
)
def test_what_is_written_is_what_is_read(made, lost_of):
    assert lost_of(made) == set()
