"""How a run is while it goes on, from the files that its controller keeps."""

import json
import os
import time

import pytest

from contract.records import machine, steps
from launcher import folders
from launcher import status as verb
from report import status
from report.figures import CPU, QUEUED, SENT, TEMPERATURE
from report.status import Follower
from report.text import section_lines
from tests.unit.report.report_runs import SCRIPT, TRAINER

RUN = "20260101T000000Z-resnet18-2n"
HOSTS = ("node1", "node2")
START = {"kind": "start", "epochs": 4, "steps_per_epoch": 100, "global_batch": 32, "world_size": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / "plan.json").write_text("{}")
    return tmp_path / RUN


def write(folder, host, name, lines):
    path = folder / "nodes" / host / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)


def step(number, seconds, waiting):
    spent = {"sync_exposed": waiting, "forward": seconds - waiting}
    place = {"kind": "step", "step": number, "steps": 1, "epoch": (number - 1) // 100}
    return {**place, "samples": 16, "seconds": spent, "loss": 0.5, "top1": 0.8}


def train(folder, rank, rows, attempt=1, first=1):
    """What a rank tells of steps: (seconds, of which waiting for others) each."""
    lines = [] if first > 1 else [START]
    lines += [step(number, *row) for number, row in enumerate(rows, first)]
    write(folder, HOSTS[rank], steps(rank, attempt), lines)


def sample(second, **more):
    line = {"kind": "sample", "mono": second, "cores": 4, "cpu_busy": 2.0 * second}
    card = {"tx_bytes": int(1e8 * second), "rx_bytes": 0, **more.pop("card", {})}
    return {**line, "card": card, **more}


def of(machine, *figures):
    return [machine.figures.get(figure) for figure in figures]


def test_a_run_is_told_from_its_last_lines(folder):
    for rank in (0, 1):
        train(folder, rank, [(0.5, 0.3)] * 99)
        write(folder, HOSTS[rank], machine(1), [sample(100.0 + n) for n in range(9)])
    found = Follower(folder).look()
    assert (found.epoch, found.epochs, found.step, found.steps) == (1, 4, 99, 400)
    assert found.images_per_second == pytest.approx(64) == found.recent_images_per_second
    assert found.left == pytest.approx(301 * 0.5)
    assert (found.loss, found.top1, found.cause) == (0.5, 0.8, "network")
    assert [(*of(one, CPU, SENT), one.step) for one in found.machines] == [(0.5, 1e8, 99)] * 2
    assert (
        status.describe_bottleneck(found)
        == "now, from memory: network: 0.30 s of 0.50 s a step (60 %)"
    )


@pytest.mark.parametrize("program", [TRAINER, SCRIPT])
def test_the_programs_word_for_samples_is_used_and_who_met_no_other_is_named(folder, program):
    (folder / "plan.json").write_text(json.dumps({"program": program}))
    train(folder, 0, [(0.5, 0.0)] * 99)
    write(
        folder,
        HOSTS[0],
        machine(1),
        [sample(100.0 + n, alone=[0, 7], only_received=4 << 20) for n in range(9)],
    )
    found = Follower(folder).look()
    said = " ".join(section_lines(status.section_of(found, True)))
    words = ("image", "sample")
    assert [f"{word}s/s" in said for word in words] == [word == program["sample"] for word in words]
    assert "node1: ranks 0, 7 never connected to other ranks" in said
    assert "node1: its ranks received 4.19 MB from other ranks, but sent no gradients" in said


def test_who_has_finished_and_where_others_stand_is_said_instead_of_an_old_speed(folder):
    """By now the last 40 s had no step."""
    for rank in (0, 1):
        train(folder, rank, [(0.5, 0.0)] * 99)
        path = folder / "nodes" / HOSTS[rank] / steps(rank, 1)
        os.utime(path, (time.time() - 90,) * 2)
    frames = [["/usr/lib/python3.11/threading.py", 1583, "_shutdown"], ["/x/train.py", 9, "run"]]
    asked = {"last": 15.0, "state": "S", "threads": [frames]}
    alive = [sample(100.0 + n, ranks={"1": {}}) for n in range(9)]
    write(folder, HOSTS[0], machine(1), [sample(100.0, finished=[0])])
    write(folder, HOSTS[1], machine(1), [{"kind": "stacks", "mono": 40.0, "ranks": {"1": asked}}])
    write(folder, HOSTS[1], machine(1), alive)
    said = " ".join(section_lines(status.section_of(Follower(folder).look(), True)))
    assert "rank 0 (node1) ended with exit code 0" in said and "last 40 s" not in said
    assert "rank 1 (node2), silent for 93 s: is in threading._shutdown" in said


@pytest.mark.parametrize("unsummed", [0, 30])
def test_steps_whose_gradients_nobody_summed_are_shown(folder, unsummed):
    write(folder, HOSTS[0], steps(0, 1), [START, {**step(30, 0.5, 0.0), "unsummed": unsummed}])
    said = " ".join(section_lines(status.section_of(Follower(folder).look(), True)))
    assert ("30 consecutive steps" in said) == bool(unsummed)


def test_a_fault_of_the_last_40_seconds_is_the_verdict(folder):
    """Not what an hour before was like."""
    follower = Follower(folder)
    for rank, waiting in ((0, 0.6), (1, 0.0)):
        train(folder, rank, [(1.0, waiting)] * 300)
    found = follower.look()
    assert (found.cause, found.judgement.slower) == ("straggler", 1)
    assert status.describe_bottleneck(found).startswith("now: slower ranks:")
    for rank in (0, 1):
        train(folder, rank, [(1.0, 0.0)] * 42, first=301)
    for reader in (follower, Follower(folder)):
        found = reader.look()
        assert (found.cause, found.judgement.recent) == ("compute", True)
        assert status.describe_bottleneck(found).startswith("now: computing")


@pytest.mark.parametrize(("waited", "said"), [(3.0, "oversubscribed"), (0.5, "as it should be")])
def test_processors_that_are_oversubscribed_are_told(folder, waited, said):
    for rank in (0, 1):
        train(folder, rank, [(1.0, 0.0)] * 50)
    ranks = [{"ranks": {"0": {"ran": 1.0 * n, "waited": waited * n}}} for n in range(9)]
    lines = [sample(float(n), cpu_busy=4.0 * n, **ranks[n]) for n in range(9)]
    write(folder, "node1", machine(1), lines)
    found = Follower(folder).look()
    assert of(found.machines[0], QUEUED) == [pytest.approx(waited / (1 + waited))]
    assert said in status.describe_bottleneck(found)


def test_ranks_that_wait_for_crowded_processors_are_no_runner_up(folder):
    """Of processes on one PC, as in the report."""
    nodes = [{"host": host, "connection": "local"} for host in HOSTS]
    (folder / "plan.json").write_text(json.dumps({"nodes": nodes}))
    for rank in (0, 1):
        train(folder, rank, [(1.0, 0.4)] * 50)
    ranks = [{"ranks": {"0": {"ran": 1.0 * n, "waited": 3.0 * n}}} for n in range(9)]
    lines = [sample(float(n), cpu_busy=4.0 * n, **ranks[n]) for n in range(9)]
    write(folder, "node1", machine(1), lines)
    judgement = Follower(folder).look().judgement
    assert (judgement.kind, judgement.runner_up) == ("cpu_oversubscribed", None)


def test_a_script_that_times_no_steps_is_described_as_in_the_report(folder):
    (folder / "plan.json").write_text(json.dumps({"program": SCRIPT}))
    write(folder, "node1", machine(1), [sample(1.0)])
    found = Follower(folder).look()
    said = status.describe_bottleneck(found, running=False)
    assert said.startswith("unknown: nobody timed the steps of this script")
    assert status.describe_bottleneck(found) == "too early to judge: no step was timed yet"


@pytest.mark.parametrize(
    ("count", "read", "memory"), [(99, 0.0, True), (101, 0.0, False), (99, 9e3, False)]
)
def test_before_one_pass_over_the_data_a_verdict_is_one_from_memory(folder, count, read, memory):
    """Unless the disks are seen to be read."""
    for rank in (0, 1):
        train(folder, rank, [(0.1, 0.0)] * count)
        samples = [sample(float(n), disks={"sda": {"util": 9.0, "rkB/s": read}}) for n in range(9)]
        write(folder, HOSTS[rank], machine(1), samples)
    assert ("from memory" in status.describe_bottleneck(Follower(folder).look())) == memory


def test_a_rank_that_the_others_wait_for_is_named(folder):
    """Though no wait takes a quarter of the time."""
    train(folder, 0, [(1.0, 0.2)] * 101)
    train(folder, 1, [(1.0, 0.0)] * 101)
    found = Follower(folder).look()
    said = "now: slower ranks: 0.10 s of 1.00 s a step (10 %), rank 1"
    assert (found.cause, status.describe_bottleneck(found)) == ("straggler", said)


@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_where_the_last_seconds_had_few_steps_the_last_steps_are_judged(folder, seconds):
    """They evaluated, or steps are long."""
    for rank in (0, 1):
        train(folder, rank, [(seconds, 0.0)] * 100 + [(seconds, seconds / 2)] * 20)
        line = {"kind": "evaluate", "epoch": 0, "top1": 0.5, "seconds": {"evaluate": 30.0}}
        write(folder, HOSTS[rank], steps(rank, 1), [line])
    found = Follower(folder).look()
    assert (found.cause, found.judgement.recent, found.evaluated.top1) == ("network", True, 0.5)
    assert found.judgement.step.measured_steps in (20, 21)


def test_where_the_last_steps_do_not_agree_all_are_judged(folder):
    for rank in (0, 1):
        train(folder, rank, [(0.5, 0.3)] * 200 + [(1.0, 0.3)] * 20)
    assert status.describe_bottleneck(Follower(folder).look()).startswith("so far: network")


@pytest.mark.parametrize(
    ("by_rank", "missing"),
    [([20, 20], "verdict needs 20 steps, but only 19 were measured"), ([99], "")],
)
def test_too_little_is_not_judged(folder, by_rank, missing):
    """Too few steps, or one of two ranks."""
    for rank, count in enumerate(by_rank):
        train(folder, rank, [(0.5, 0.3)] * count)
    found = Follower(folder).look()
    assert found.cause is None
    assert status.describe_bottleneck(found).startswith("too early to judge")
    assert missing in status.describe_bottleneck(found)


def test_a_new_attempt_begins_anew(folder):
    """And a machine is as its last attempt says, though it rebooted."""
    for rank in (0, 1):
        train(folder, rank, [(0.5, 0.3)] * 90)
        write(folder, HOSTS[rank], machine(1), [sample(900.0 + n) for n in range(9)])
    follower = Follower(folder)
    assert follower.look().step == 90
    for attempt in (2, 10):
        train(folder, 0, [(0.5, 0.3)] * 3, attempt)
        write(
            folder, "node1", machine(attempt), [sample(n, temperature=attempt) for n in (5.0, 6.0)]
        )
    found = follower.look()
    assert (found.attempt, found.step, found.cause) == (10, 3, None)
    assert [(one.step, *of(one, TEMPERATURE)) for one in found.machines] == [(3, 10), (None, None)]


def test_a_link_in_the_place_of_a_file_is_not_followed(folder, tmp_path):
    train(folder, 0, [(0.5, 0.3)] * 9)
    write(folder, "node1", machine(1), [sample(9.0, temperature=41.0)])
    for path in list((folder / "nodes/node1").iterdir()):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    found = Follower(folder).look()
    assert found is None or (found.step, of(found.machines[0], TEMPERATURE)) == (None, [None])


GPU = {"index": 0, "utilization": 98, "memory_used": 9 * 10**9, "temperature": 91, "power": 250.0}
SICK = {
    **{"memory_total": 100 << 20, "memory_available": 2 << 20, "swap_total": 2 << 30},
    **{"swap_free": 1 << 30, "temperature": 95.0, "disk_free": 10**9, "gpus": [GPU]},
}


def test_status_says_what_is_wrong_with_a_machine_in_80_columns(folder, capsys):
    sick = [sample(float(n), card={"tx_dropped": 3 * n}, **SICK) for n in range(2, 8)]
    write(folder, "node1", machine(1), sick)
    write(folder, "node2", machine(1), [sample(1.0)])
    for rank in (0, 1):
        train(folder, rank, [(0.5, 0.3)] * 50)
    then = time.time() - 60
    os.utime(folder / "nodes/node2" / machine(1), (then, then))
    held = folders.lock(folder)
    assert verb.status(folder.name) == 0
    said = capsys.readouterr().out
    held.close()
    assert all(len(one) <= 80 for one in said.splitlines()), said
    assert "node1: a GPU has 91 C" in said and "node1: its processor has 95 C" in said
    assert "node1: short of memory: 1.07 GB swapped" in said
    assert "node1: 1.00 GB free on its disk" in said and "drops 3 packets a second" in said
    assert "node2: silent for 60 s" in said


def test_status_is_json_for_scripts(folder, capsys):
    for rank in (0, 1):
        train(folder, rank, [(0.5, 0.3)] * 99)
    gpus = [GPU, {**GPU, "index": 1, "temperature": 40, "power": None}]
    write(folder, "node1", machine(1), [sample(9.0, gpus=gpus, temperature=50)])
    assert verb.status(folder.name, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["state"], told["step"]) == (RUN, "abandoned", 99)
    assert told["bottleneck"] == "network" and len(told["machines"][0]["trouble"]) == 1
    shown = told["machines"][0]
    assert (shown["temperature"], shown["cpu"], shown["disk_busy"]) == (50, None, None)
    assert shown["gpus"] == [
        {**GPU, "clock_sm": None},
        {**GPU, "index": 1, "temperature": 40, "power": None, "clock_sm": None},
    ]


def test_a_run_without_records_has_a_status(folder, capsys):
    assert verb.status(folder.name) == verb.status(folder.name, as_json=True) == 0
    assert '"state": "abandoned"' in capsys.readouterr().out
