"""A run that makes no step any more: which rank the others wait for."""

import json
import math
import os
import time

import pytest

from report.status import Follower, verdict

STEP = {"kind": "step", "samples": 8, "steps": 1, "epoch": 0, "seconds": {"forward": 1.0}}
SILENT = 30.0  # seconds since the files grew


def write(path, lines, silent):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(path, (time.time() - silent,) * 2)


def rank(folder, number, stall=None, step=1.0, steps=20, last=(), silent=SILENT):
    own = [{"kind": "start", "world_size": 2, "epochs": 9, "steps_per_epoch": 100}]
    own += [{**STEP, "step": n + 1, "seconds": {"forward": step}} for n in range(steps)]
    own += [{"kind": "stall", "category": stall, "step": steps, "idle": 5.0}] if stall else []
    name = f"nodes/node{number + 1}/rank{number}.1.steps.jsonl"
    write(folder / name, [*own, *last], silent)


def machine(folder, number, state, ran=0.01, waited=0.0):
    """Its lines go on; its rank had `ran` of a processor a second, and waited so long for one."""
    samples = []
    for n in range(20):
        look = {"ran": ran * n, "waited": waited * n, "state": state}
        samples.append({"kind": "sample", "mono": 100.0 + n, "ranks": {number: look}})
    write(folder / f"nodes/node{number + 1}/machine.1.jsonl", samples, 0.0)


ODD = (True, -1, math.nan, [], "T" * 5000 + "\x1b[2J")


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize("field", ["category", "idle", "step", "state", "ran", "waited", "rank"])
def test_what_a_machine_lies_of_a_stall_ends_no_view(tmp_path, field, value):
    """Its own rank is the one that is late, whatever it says of it."""
    rank(tmp_path, 0, "sync_exposed")
    machine(tmp_path, 0, "S")
    stall = {"kind": "stall", "category": "forward", "step": 20, "idle": 5.0, field: value}
    rank(tmp_path, 1, last=[stall])
    look = {"ran": 0.1, "state": "S", field: value}
    looks = {"1": value if field == "rank" else look}
    samples = [{"kind": "sample", "mono": 1.0 * n, "ranks": looks} for n in range(20)]
    write(tmp_path / "nodes/node2/machine.1.jsonl", samples, 0.0)
    progress = Follower(tmp_path).look()
    said = verdict(progress)
    assert progress.hang.ranks == [("node2", 1)] and said.isprintable() and len(said) < 100


def hang(folder):
    return Follower(folder).look().hang


@pytest.mark.parametrize(
    ("stall", "state", "ran", "why"),
    [
        (None, "T", 0.0, "its process is stopped"),
        ("evaluate", "T", 0.0, "its process is stopped"),
        ("data", "S", 0.01, "waits for its data"),
        ("forward", "D", 0.01, "waits for a disk"),
        ("other", "R", 1.0, "computes"),
        ("other", "R", (0.2, 0.8), "computes"),  # where many want a processor
        ("other", "S", 0.01, "stands in `other`"),
        (None, "S", 0.01, "says nothing"),
    ],
)
def test_the_rank_that_does_not_come_is_named_and_why(tmp_path, stall, state, ran, why):
    rank(tmp_path, 0, "sync_exposed")
    rank(tmp_path, 1, stall)
    machine(tmp_path, 0, "S")
    machine(tmp_path, 1, state, *(ran if isinstance(ran, tuple) else (ran,)))
    seen = hang(tmp_path)
    assert (seen.ranks, seen.why) == ([("node2", 1)], why)
    assert seen.seconds == pytest.approx(SILENT + (5 if stall else 0), abs=5)
    progress = Follower(tmp_path).look()
    assert (progress.left, progress.recent_images_per_second) == (None, 0.0)
    assert "rank 1 (node2) has not arrived" in verdict(progress)


def test_where_all_wait_in_the_sum_no_rank_is_to_blame(tmp_path):
    for number in range(2):
        rank(tmp_path, number, "sync_exposed")
        machine(tmp_path, number, "S")
    assert hang(tmp_path).ranks == []


@pytest.mark.parametrize(
    "late",
    [
        {"stall": "evaluate"},
        {"stall": "checkpoint"},
        {"stall": "forward", "steps": 0},  # it starts, or compiles
        {"stall": "forward", "step": 20.0},  # five of its steps are not over
        {"stall": "forward", "silent": 5.0},
        {"stall": "forward", "last": [{"kind": "end", "status": "failed"}]},
    ],
)
def test_what_takes_long_is_no_hang(tmp_path, late):
    rank(tmp_path, 0, "sync_exposed", silent=late.get("silent", SILENT))
    rank(tmp_path, 1, **late)
    for number in range(2):
        machine(tmp_path, number, "S")
    assert hang(tmp_path) is None
