"""What a guard tells of its ranks' steps: read from their lines, bounded, in few bytes."""

import json
import os
import sys

import pytest

from contract import digests, validate
from launcher.node import digest, vitals
from launcher.node.digest import LARGEST, RankDigest
from tests.unit.launcher.guard_client import workers


def step(number, attempt=1, **more):
    seconds = {"data": 0.01, "forward": 0.1, "backward": 0.2, "sync_exposed": 0.05}
    line = {"kind": "step", "attempt": attempt, "step": number, "epoch": 0, "samples": 32}
    return {**line, "seconds": seconds, **more}


class Rank:
    """A rank's file and the digest of it."""

    def __init__(self, tmp_path, before=()):
        self.path = tmp_path / "rank0.steps.jsonl"
        self.write(*before)
        self.digest = RankDigest(self.path, 0, 1)

    def write(self, *lines):
        with self.path.open("a") as file:
            file.writelines(
                line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines
            )


def test_a_digest_has_the_steps_since_the_last_one(tmp_path):
    rank = Rank(tmp_path, before=[step(1)])  # of an attempt before
    assert rank.digest.take() is None
    rank.write(step(2, loss=0.51234567, top1=0.75), '{"kind": "st')
    assert rank.digest.take() == {
        **{"rank": 0, "phase": "first", "step": 2, "epoch": 0, "steps": 1, "samples": 32},
        **{"spent": [100, 0, 1000, 2000, 500, 0, 0, 0, 0], "waits": [500]},
        **{"loss": 0.51235, "top1": 0.75},
    }
    rank.write('ep"}\n', step(3), step(4))
    assert rank.digest.take()["spent"] == [200, 0, 2000, 4000, 1000, 0, 0, 0, 0]
    assert rank.digest.take() is None


def test_the_order_of_the_times_is_that_of_the_control_side():
    assert digest.CATEGORIES == digests.CATEGORIES and digest.TICK == digests.TICK
    assert digest.STEPS == digests.MOST


def test_a_digest_has_steps_of_one_phase(tmp_path):
    rank = Rank(tmp_path)
    rank.write(step(1, exact=True), step(2, exact=True), step(3), step(4))
    rows = [rank.digest.take() for _ in range(4)]
    told = [(row["phase"], row["step"], row["steps"]) for row in rows if row]
    assert told == [("first", 1, 1), ("exact", 2, 1), ("steady", 4, 2)]


def test_what_is_no_step_is_told_beside_the_steps(tmp_path):
    rank = Rank(tmp_path)
    scores = {"top1": 0.5, "top5": 0.9, "loss": None, "train_loss": 0.25}
    spent = {"evaluate": 2.0, "other": 0.5, "nonsense": 4.0, "data": "x"}
    rank.write({"kind": "evaluate", "attempt": 1, "epoch": 0, **scores, "seconds": spent})
    assert rank.digest.take() == {
        "rank": 0,
        "evaluated": {"epoch": 0, "top1": 0.5, "top5": 0.9, "train_loss": 0.25},
        "beside": [0, 0, 0, 0, 0, 0, 20000, 0, 5000],
    }


@pytest.mark.parametrize(
    "odd",
    [
        step(5, loss=float("nan"), seconds={"data": float("inf"), "forward": -1, "h2d": "x"}),
        step(6, loss=10**400, seconds={"data": 10**400, "forward": 0.1}),
        step("5"),
        step(-1),
        step(1 << 70),
        step(5, samples=None),
        step(5, seconds=[]),
        step(5, attempt=2),
        {"kind": "step", "attempt": 1},
        "[" * 5000 + "\n",
        "\xff\x00\n",
        "x" * (digest.LINE + 10) + "\n",
    ],
)
def test_what_a_rank_wrote_is_not_trusted(tmp_path, odd):
    rank = Rank(tmp_path)
    rank.write(step(1), odd, step(6))
    rows = [rank.digest.take() for _ in range(8)]
    assert [row["step"] for row in rows if row and row.get("phase")][-1] == 6
    text = json.dumps(rows, allow_nan=False)
    assert all(0 <= one < 1 << 48 for row in rows if row for one in row.get("spent", []))
    assert len(text) < 2000


def test_a_long_line_costs_no_memory_and_hides_no_other(tmp_path):
    rank = Rank(tmp_path)
    rank.write("x" * (3 * digest.CHUNK))
    for _ in range(3):
        assert rank.digest.take() is None
        assert len(rank.digest.partial) <= digest.LINE
    rank.write("\n", step(1))
    assert rank.digest.take()["step"] == 1


def test_a_start_line_is_told_unless_nobody_could_write_it_again(tmp_path):
    rank = Rank(tmp_path)
    rank.write(json.dumps({"kind": "start", "attempt": 1, "matrices": [[1, 2]]}) + "\n")
    rank.digest.take()
    assert b"matrices" in rank.digest.begun
    rank.digest.begun = None
    rank.write('{"kind": "start", "attempt": 1, "x": ' + "[" * 900 + "]" * 900 + "}\n")
    assert rank.digest.take() is None and rank.digest.begun is None


def test_what_is_no_file_does_not_hold_up_the_guard(tmp_path):
    path = tmp_path / "rank0.steps.jsonl"
    os.mkfifo(path)
    assert RankDigest(path, 0, 1).take() is None


SHAPE = {
    **{"run": str, "machine": digests.MACHINE},
    "ranks": [{"rank": validate.NATURAL, **digests.ROW}],
}


class Still:
    """A machine with eight GPUs."""

    def size(self):
        return {}

    def read(self):
        gpu = [7, 100.0, 11 * 10**9, 83.0, 249.99, 1935.0]
        rest = {"cpu": 100.0, "memory": 100.0, "swap": 10**12, "temperature": 99.0}
        counted = {"disk": [100.0, 10**12, 10**12], "share": 10**12, "card": [10**12] * 4}
        threads = {str(rank): [123456.78, 12345.67] for rank in range(2)}
        told = {"stalled": 12345.678, "swapped": [10**9, 10**9], "threads": threads}
        return {**rest, **counted, **told, "gpus": [gpu] * 8}


class Sent:
    def __init__(self):
        self.frames = []

    def send(self, kind, payload=b"", **fields):
        self.frames.append((kind, payload, fields))


@pytest.mark.parametrize("steps", [3, 5000])
def test_a_digest_has_at_most_500_bytes_a_rank(tmp_path, steps):
    task = type("Task", (), {"run": "20261103T101010Z-resnet50-16n", "ranks": [0, 1], "attempt": 1})
    told = digest.Digest(task, tmp_path, Still())
    frames = Sent()
    big = dict.fromkeys(digest.CATEGORIES, 123.4567)
    for rank in task.ranks:
        with (tmp_path / f"rank{rank}.steps.jsonl").open("w") as file:
            for number in range(1, steps + 1):
                line = step(10**6 + number, seconds=big, loss=0.123456, top1=0.123456, epoch=89)
                file.write(json.dumps(line) + "\n")
            found = dict.fromkeys(digest.EVALUATED, 0.123456)
            line = {"kind": "evaluate", "attempt": 1, "seconds": big, **found}
            file.write(json.dumps(line) + "\n")
    for turn in range(12):
        told.send(frames)
        for kind, _, fields in frames.frames:
            line = {"type": kind, **fields, "seq": 10**6, "mono": 1234567.123456}
            assert len(json.dumps(line, separators=(",", ":"))) <= LARGEST * len(task.ranks)
            validate.check(fields, SHAPE, "digest")
        assert turn or fields["ranks"][0]["steps"] == 1
    rows = [row for _, _, fields in frames.frames for row in fields["ranks"]]
    for rank in task.ranks:
        own = [row for row in rows if row["rank"] == rank]
        assert sum(row.get("steps", 0) for row in own) == steps
        assert [row["evaluated"]["top1"] for row in own if "evaluated" in row] == [0.12346]


@pytest.mark.parametrize("steps", [1, 19, 20, 21, 41, 999])
def test_waits_of_single_steps_are_grouped_evenly(steps):
    waits = list(range(steps))
    parts = digest.grouped(waits)
    assert len(parts) <= digest.WAITS
    size = -(-steps // len(parts))  # as the control side reads it
    assert parts[0] == round(sum(waits[:size]) / len(waits[:size]))
    assert digest.grouped_again(parts, steps, 1) == [pytest.approx(sum(waits) / steps, abs=1)]


SAY = """
import json, os, sys, time
out = {path!r}
def say(**line):
    open(out, "a").write(json.dumps(dict(line, attempt=1)) + "\\n")
say(kind="start", model="m")
for number in range(1, 400):
    say(kind="step", step=number, epoch=0, samples=4, seconds=dict(forward=0.01))
    time.sleep(0.01)
"""


def test_a_guard_sends_digests_to_who_asks_for_them(guards, tmp_path):
    folder = tmp_path / "nodes/node1"
    folder.mkdir(parents=True)
    script = SAY.format(path=str(folder / "rank0.steps.jsonl"))
    guard = guards()
    guard.start(tmp_path, workers(script), digest=0.1, run="r7")
    begun = guard.wait_for("begun")
    assert begun["run"] == "r7" and begun["rank"] == 0
    while sum(row.get("steps", 0) for row in rows(guard)) < 20:
        guard.pump(1.0)
    assert {"cpu", "memory"} <= guard.wait_for("digest")["machine"].keys()
    told = [row["step"] for row in rows(guard) if "step" in row]
    assert told == sorted(set(told))
    other = guards()
    other.start(tmp_path / "other", workers("import time; time.sleep(0.5)"))
    other.wait_for("exit")
    assert not [frame for frame in other.frames if frame["type"] in ("digest", "begun")]


def rows(guard):
    return [row for one in guard.frames if one["type"] == "digest" for row in one["ranks"]]


MEMINFO = "MemTotal: 1000 kB\nMemAvailable: 250 kB\nSwapTotal: 500 kB\nSwapFree: 400 kB\n"


def test_vitals_are_of_the_time_since_the_last(monkeypatch):
    files = {"/proc/stat": "cpu  100 0 0 9 9 0 0 0 0 0\ncpu0 1\ncpu1 1\n", "/proc/meminfo": MEMINFO}
    monkeypatch.setattr(vitals, "text_of", lambda path: files.get(path, ""))
    monkeypatch.setattr(vitals, "read_disks", dict)
    monkeypatch.setattr(vitals, "hottest", lambda: 61.5)
    seen = {"index": 0, "utilization": 99.0, "memory_used": 5, "temperature": 70.0}
    gpu = {**seen, "power": None, "clock_sm": 1500.0}
    now = vitals.Vitals("eth0", "", lambda: [gpu])
    files["/proc/stat"] = files["/proc/stat"].replace("100", "220")  # 1.2 s of 2 processors
    now.mono = vitals.time.monotonic() - 1.0
    told = now.read()
    assert told.pop("cpu") == pytest.approx(60.0, abs=3)
    assert told == {
        **{"memory": 75.0, "swap": 102400, "temperature": 61.5, "swapped": [0, 0]},
        "gpus": [[0, 99.0, 5, 70.0, None, 1500.0]],
    }


def test_this_machine_has_vitals():
    told = vitals.Vitals("lo").read()
    assert 0 <= told["cpu"] <= 100 and 0 < told["memory"] <= 100
    assert len(told["card"]) == 4 and sys.getsizeof(json.dumps(told)) < 600
