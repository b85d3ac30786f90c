"""How far a run is, from the files that its controller keeps: what `make status` says of it."""

import json
import time

import pytest

from contract import digests
from contract.digests import PHASES
from launcher import folders, status
from launcher.progress import Follower

RUN = "20260101T000000Z-resnet18-2n"
START = {"epochs": 4, "steps_per_epoch": 100, "train_images": 3200, "global_batch": 32}


def line(unix, steps, rank=0, attempt=1, machine=None, sums=None, each=0.5, sync=0.3, **more):
    """Steps of half a second, of which 0.3 s are waits for peers, the least of them 0.25 s."""
    phases = {name: {"steps": 0, "seconds": {}} for name in PHASES}
    seconds = {"sync_exposed": sync * steps, "forward": (each - sync) * steps}
    phases["steady"] = {"steps": steps, "seconds": seconds}
    place = {"step": steps, "epoch": steps // 100, "samples": 16 * steps}
    ranks = {str(rank): {**place, "loss": 0.5, "top1": 0.8, **phases}}
    counted = {"seconds": float(steps), "cpu": 0.5 * steps, "sent": 1e8 * steps, **(sums or {})}
    told = {"attempt": attempt, "unix": unix, "mono": unix, "world_size": 2, "ranks": ranks}
    least = {"exact": [0, 0.0], "steady": [steps, 0.25 * steps]}
    return {**told, "machine": machine or {}, "sums": counted, "least": least, **more}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(lines, ...) -> the folder of a run whose machines have these lines."""
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    folder = tmp_path / RUN
    folder.mkdir()
    (folder / "plan.json").write_text("{}")

    def run(*machines):
        for number, lines in enumerate(machines, 1):
            path = folder / f"nodes/node{number}" / digests.NAME
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                for one in lines:
                    file.write(one if isinstance(one, str) else json.dumps(one) + "\n")
        return folder

    return run


def begun(attempt=1):
    return {"attempt": attempt, "rank": 0, "unix": 0.0, "start": START}


def test_a_run_is_told_from_the_last_lines(run):
    now = time.time()
    lines = [[begun(), *(line(now - 100 + n, n, rank) for n in range(2, 100))] for rank in (0, 1)]
    found = Follower(run(*lines)).look()
    assert (found.epoch, found.epochs, found.step, found.steps) == (1, 4, 99, 400)
    assert found.images_per_second == pytest.approx(64) == found.recent_images_per_second
    assert found.left == pytest.approx(301 * 0.5)
    assert (found.loss, found.top1, found.cause) == (0.5, 0.8, "network")
    assert found.mean.network == pytest.approx(0.25)
    assert found.machines[0].cpu == pytest.approx(50) and found.machines[1].sent == 1e8
    assert status.verdict(found) == "so far: network: 0.25 s of 0.50 s a step (50 %)"


def told(rows, rank=0):
    """One line of these steps, (seconds, of which waiting for peers) each, as long ago as they say;
    the least wait of each is none."""
    now, spent = time.time(), {"sync_exposed": 0.0, "forward": 0.0}
    lines = []
    for steps, (seconds, waiting) in enumerate(rows, 1):
        spent = {
            "sync_exposed": spent["sync_exposed"] + waiting,
            "forward": spent["forward"] + seconds - waiting,
        }
        one = line(now - sum(each for each, _ in rows[steps:]), steps, rank)
        one["ranks"][str(rank)]["steady"]["seconds"] = spent
        one["least"]["steady"] = [steps, 0.0]
        lines.append(one)
    return lines


def test_what_began_40_seconds_ago_is_the_verdict(run):
    """Not what an hour before was like."""
    before, now = [(1.0, 0.6)] * 300, [(1.0, 0.0)] * 42
    folder = run([begun(), *told(before)], told(before, 1))
    found = Follower(folder).look()
    assert (found.cause, status.verdict(found)[:18]) == ("straggler", "now: slower ranks:")
    for path in folder.glob("nodes/*/" + digests.NAME):
        path.unlink()
    found = Follower(run([begun(), *told(before + now)], told(before + now, 1))).look()
    assert found.cause == "compute" and found.mean.straggler > 0.5
    assert status.verdict(found).startswith("now: computing: 1.00 s of 1.00 s a step")


def test_a_rank_that_the_others_wait_for_is_named(run):
    """Though no wait takes a quarter of the time."""
    even, slow = [(1.0, 0.2)] * 50, [(1.0, 0.0)] * 50
    found = Follower(run([begun(), *told(even)], told(slow, 1))).look()
    assert found.judged.fractions["straggler"] == pytest.approx(0.1)
    said = "now: slower ranks: 0.10 s of 1.00 s a step (10 %), rank 1"
    assert (found.cause, status.verdict(found)) == ("straggler", said)


def test_only_what_is_new_is_read_and_half_a_line_waits(run):
    now = time.time()
    folder = run([begun(), line(now - 9, 10)], [line(now - 9, 10, 1)])
    follower = Follower(folder)
    assert follower.look().step == 10
    whole = json.dumps(line(now, 20)) + "\n"
    run([whole[:50]])
    assert follower.look().step == 10
    run([whole[50:]])
    assert follower.look().step == 20
    # A file that was thinned is shorter.
    path = folder / "nodes/node1" / digests.NAME
    path.write_text(json.dumps(line(now + 1, 21)) + "\n")
    assert follower.look().step == 21


def test_a_new_attempt_begins_anew(run):
    now = time.time()
    follower = Follower(run([begun(), line(now - 9, 50)], [line(now - 9, 50, 1)]))
    assert follower.look().step == 50
    run([begun(2), line(now, 3, attempt=2)], [])
    found = follower.look()
    assert (found.attempt, found.step, [one.host for one in found.machines]) == (2, 3, ["node1"])


ODD = ["x\n", "[]\n", "{}\n", "[" * 100_000 + "\n", '{"start": 1}\n', '{"attempt": 1}\n', "\xff\n"]


@pytest.mark.parametrize("odd", [*ODD, line("x", 1), line(1, 1, each=1e300), {"start": {}}])
def test_what_a_runs_files_hold_is_not_trusted(run, capsys, odd):
    now = time.time()
    good = [begun(), line(now, 50, machine={"memory": 41.0})]
    folder = run([odd, *good], [line(now, 50, 1), odd])
    assert Follower(folder).look().step == 50
    assert status.status(folder.name) == status.status(folder.name, as_json=True) == 0
    json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))


def test_a_link_in_the_place_of_a_file_is_not_followed(run, tmp_path):
    folder = run([line(1.0, 5)])
    path = folder / "nodes/node1" / digests.NAME
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert Follower(folder).look() is None


GPU = [0, 98.0, 9e9, 91.0, 250.0, 1725.0]
SICK = {"memory": 97.5, "swap": 1 << 30, "temperature": 95.0, "disk_free": 10**9, "gpus": [GPU]}


def test_status_says_what_is_wrong_with_a_machine_in_80_columns(run, capsys):
    now = time.time()
    sick = [line(now - 5 + n, n, machine=SICK, sums={"dropped": 3.0 * n}) for n in range(2, 6)]
    long_ago = [line(now - 60, 50, 1)]
    folder = run([begun(), *sick], long_ago)
    held = folders.lock(folder)
    assert status.status(folder.name) == 0
    said = capsys.readouterr().out
    held.close()
    assert all(len(one) <= 80 for one in said.splitlines()), said
    assert "node1: a GPU has 91 C" in said and "node1: its processor has 95 C" in said
    assert "node1: short of memory: 1.07 GB swapped" in said
    assert "node1: 1.00 GB free on its disk" in said and "drops 3 packets a second" in said
    assert "node2: silent for 60 s" in said


def test_status_is_json_for_scripts(run, capsys):
    now = time.time()
    folder = run([begun(), line(now, 99)], [line(now, 99, 1)])
    assert status.status(folder.name, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["state"], told["step"]) == (RUN, "abandoned", 99)
    assert told["bottleneck"] == "network" and told["machines"][0]["trouble"] == []


def test_too_little_is_not_judged(run):
    now = time.time()
    found = Follower(run([begun(), line(now, 20)], [line(now, 20, 1)])).look()
    assert found.cause is None
    assert status.verdict(found) == "too early to say what holds it up"


def test_a_run_without_digests_has_a_status(run, capsys):
    folder = run([])
    assert status.status(folder.name) == status.status(folder.name, as_json=True) == 0
    assert '"state": "abandoned"' in capsys.readouterr().out
