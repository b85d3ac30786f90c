"""A run that makes no step any more: which rank the others wait for."""

import json
import math
import os
import time

import pytest

from report.status import Follower, describe_bottleneck, section_of
from report.text import section_lines

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
@pytest.mark.parametrize("field", ["category", "idle", "state", "ran", "rank"])
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
    said = describe_bottleneck(progress)
    assert progress.hang.ranks == [("node2", 1)] and said.isprintable() and len(said) < 100


def hang(folder):
    return Follower(folder).look().hang


@pytest.mark.parametrize(
    ("stall", "state", "ran", "why"),
    [
        (None, "T", 0.0, "its process is stopped"),
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
    assert "rank 1 (node2) has not arrived" in describe_bottleneck(progress)


def test_where_all_wait_in_the_sum_no_rank_is_to_blame(tmp_path):
    for number in range(2):
        rank(tmp_path, number, "sync_exposed")
        machine(tmp_path, number, "S")
    assert hang(tmp_path).ranks == []


@pytest.mark.parametrize(
    "late",
    [
        {"stall": "evaluate"},
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


ALL_REDUCE = ["/lib/site-packages/torch/distributed/distributed_c10d.py", 9, "barrier"]
WAITING = {"sums": {"entered": 4712, "bucket": 4, "passes": 900, "first": 10**9, "newest": 10**11}}
NOT_THERE = {"sums": {"entered": 4710, "bucket": 2}, "threads": [[["/loader.py", 88, "load"]]]}
IN_KERNEL = {"sums": {"entered": 4710}, "state": "D", "wait": "folio_wait_bit"}
ELSEWHERE = {"sums": {"entered": 4710}, "threads": [[ALL_REDUCE, ["/metrics.py", 5, "mean"]]]}
SUM = "did not enter sum 4,711"
WAITED = "Ranks 0, 1 and 3 have waited in this sum for 41 s"


def silent_ranks(folder, *answers, times_steps=False):
    """Ranks that record no step, one on each machine, silent for 41 s."""
    plan = {"world_size": len(answers), "program": {"times_steps": times_steps}}
    folder.joinpath("plan.json").write_text(json.dumps(plan))
    for number, answer in enumerate(answers):
        entry = {"last": 100.0, "state": "S", "threads": [], **answer}
        stacks = {"kind": "stacks", "mono": 121.0, "ranks": {str(number): entry}}
        samples = [{"kind": "sample", "mono": 141.0}]
        write(folder / f"nodes/node{number + 1}/machine.1.jsonl", [stacks, *samples], 0.0)
    return Follower(folder).look()


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (NOT_THERE, f"node3, rank 2 {SUM} (bucket 3). It is at loader.py:88, in load. {WAITED}"),
        (IN_KERNEL, "It cannot answer: it is in uninterruptible I/O (state D)"),
        (ELSEWHERE, "It waits in barrier at metrics.py:5, in mean. Ranks 0, 1 and 3 have"),
    ],
)
def test_the_sum_that_a_rank_did_not_enter_is_named_with_its_line(tmp_path, late, words):
    """Buckets are counted: those of the backward pass that the others have entered."""
    seen = silent_ranks(tmp_path, WAITING, WAITING, late, WAITING)
    said = " ".join(" ".join(section_lines(section_of(seen, True))).split())
    assert words in said, said
    assert (seen.hang.ranks, seen.hang.seconds) == ([("node3", 2)], 41.0)


def test_a_rank_that_waits_elsewhere_may_wait_for_the_one_that_is_named(tmp_path):
    line = silent_ranks(tmp_path, WAITING, ELSEWHERE, NOT_THERE).silent[
        "did not enter sum 4,711 (bucket 3)"
    ]
    assert line.startswith(f"node3, rank 2 {SUM}") and line.count("rank 1") == 0


@pytest.mark.parametrize(
    "answers",
    [
        [WAITING, WAITING],  # in the same sum, as if the network stood still
        [WAITING, NOT_THERE, {}],  # one rank does not count
        [{"sums": {**WAITING["sums"], "newest": 10**13}}, NOT_THERE],  # a pass takes 11 s
        [{"sums": {"entered": -1}}, {"sums": {"entered": "\x1b"}}],
    ],
)
def test_no_sum_is_named_without_a_long_wait_and_unequal_counts_of_all_ranks(tmp_path, answers):
    assert silent_ranks(tmp_path, *answers).hang is None


@pytest.mark.parametrize("is_trainer", [False, True])
def test_a_script_that_counts_no_sums_is_told_so(tmp_path, is_trainer):
    """The trainer counts them once it has come so far."""
    said = " ".join(silent_ranks(tmp_path, {}, {}, times_steps=is_trainer).silent.values())
    words = "Tandem cannot tell which rank is missing"
    assert (words in said) == (not is_trainer)


def test_what_nccl_recorded_is_shown_with_the_place(tmp_path):
    recorded = {**WAITING["sums"], "queued": 4712, "completed": 4711}
    lines = silent_ranks(tmp_path, {"sums": recorded}, NOT_THERE).silent.values()
    assert any("NCCL completed 4,711 of 4,712 queued collectives" in line for line in lines)
