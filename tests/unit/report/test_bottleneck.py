"""The rules of `bottleneck` at their edges: tests/messages/report.txt has a run of each value."""

import dataclasses

import pytest

from contract.strategies import Payload, parse
from report.analysis import analyse
from report.bottleneck import find_bottleneck
from report.measure import RankWork, Step
from report.status import Follower
from report.usage import ResourceUsage
from report.verdict import explain_straggler
from tests.unit.report.report_runs import BOTTLENECKS, RunBuilder, change_lines

STEP = Step(
    attempt=1, nodes=4, world=4, steps=40, images=128, payload=Payload(1e8),
    strategy=parse("allreduce"),
    data=0.0, h2d=0.0, forward=0.04, backward=0.05, optimizer=0.01, other=0.0,
    network=0.0, peers=0.0, checkpoint=0.0, bytes_sent=1.5e8, link_mbit=1000, rate=1e8,
    shared_machine=False, ranks=(RankWork("node1", 0, {}),),
)  # fmt: skip


def slower(backward, **machine):
    """A rank with such a backward, and what its machine did meanwhile."""
    by_rank = {2: {"sync_exposed": 0.01, "backward": backward}}
    step = {"sync_exposed": backward - 0.08 + 0.01}
    return {"step": step, "by_rank": by_rank, "machines": {"node3": machine}}


def swaps(**machine):
    return {"machines": {"node2": machine}}


def waits_for_images(mounts=9.0, **machine):
    """What `loaders` on all machines do while MB/s come from a share."""
    quiet = {"rkB/s": 30.0}
    return {"step": {"data": 0.3}, "mounts": mounts, "machine": machine, "disk": quiet}


def links(**rates):
    return {**BOTTLENECKS["slow_link"], "links": rates}


BUSY_DISK = BOTTLENECKS["data_disk"]["disk"]
BUSY = {"busy": 7.9, "ran": 2.0, "waited": 2.5}
FULL = {"busy": 7.9, "ran": 1.5, "waited": 4.0}
RUNS = [
    ({**BOTTLENECKS["network"], "gpu": True}, "network"),  # cards at 100 % do not hide it
    (slower(0.08 + 0.14 * 0.127), "compute"),
    (slower(0.08 + 0.16 * 0.127), "straggler"),
    (slower(0.16, waited=3.0, busy=8.0), "cpu_contention"),
    (slower(0.16, waited=0.2, busy=8.0), "straggler"),  # that explains a fourth of it
    (slower(0.16, waited=3.0, busy=3.1), "straggler"),  # its own threads, and no others
    ({**BOTTLENECKS["straggler"], "machine": BUSY}, "straggler"),  # all machines are alike
    ({"machine": FULL}, "cpu_oversubscribed"),
    ({"machine": {**FULL, "busy": 6.0}}, "compute"),  # some are idle
    ({"machine": FULL, **BOTTLENECKS["network"]}, "network"),
    ({"machine": FULL, **BOTTLENECKS["network"], "connection": "local"}, "cpu_oversubscribed"),
    (swaps(**{"in": 6e6, "pressure": 0.4}), "memory_pressure"),
    (swaps(**{"in": 6e6, "pressure": 0.02}), "compute"),  # what was put away once comes back
    (swaps(out=6e6, pressure=0.4), "compute"),
    (swaps(**{"in": 6e6, "pressure": None, "available": 1 << 30}), "memory_pressure"),
    (swaps(**{"in": 6e6, "pressure": None, "available": 8 << 30}), "compute"),
    (waits_for_images(loaders=8.0, loaders_busy=7.0), "data_decode"),
    (waits_for_images(loaders=8.0, loaders_busy=1.0), "data_share"),
    (waits_for_images(mounts=0.1, loaders=8.0, loaders_busy=1.0), "data_share"),  # small files
    (waits_for_images(mounts=0.1), "data_decode"),
    (waits_for_images(mounts=0, loaders=8.0, loaders_busy=1.0), "data_decode"),  # a download
    (links(node1=460), "slow_link"),
    (links(node3=480), "network"),  # more than half of what the others reach
]


@pytest.mark.parametrize(("settings", "cause"), RUNS)
def test_each_bottleneck_is_told_from_its_run(tmp_path, settings, cause):
    run = RunBuilder(tmp_path / "run", **{"steps": 80, "epochs": 1, **settings}).write()
    assert analyse(run).summary["bottleneck"] == cause


@pytest.mark.parametrize(("late_by", "cause"), [("data", "data_disk"), ("backward", "straggler")])
def test_ranks_that_wait_for_each_other_in_turn_wait_for_what_the_last_is_late_by(
    tmp_path, late_by, cause
):
    made = RunBuilder(tmp_path / "run", steps=60, epochs=1, disk=BUSY_DISK)
    made.write()
    for rank in range(4):

        def wait(line, rank=rank):
            if line["kind"] == "step":
                name = late_by if line["step"] % 4 == rank else "sync_exposed"
                line["seconds"][name] = 0.3
            return line

        change_lines(made.folder / f"nodes/node{rank + 1}/rank{rank}.1.steps.jsonl", wait)
    analysis = analyse(made.folder)
    assert analysis.summary["bottleneck"] == cause
    assert Follower(made.folder).look().judgement.kind == cause.partition("_")[0]


@pytest.mark.parametrize(
    ("seconds", "place"), [((1, 2, 1), "node2's device of rank 1"), ((2, 2, 1, 1, 1), "node2")]
)
def test_a_slow_device_beside_a_fast_one_is_no_slow_machine(seconds, place):
    """The first two ranks are on node2."""
    hosts = ["node2", "node2", *["node1"] * 3]
    work = [RankWork(hosts[n], n, {"forward": float(one)}) for n, one in enumerate(seconds)]
    step = dataclasses.replace(STEP, ranks=tuple(work), peers=0.5)
    told = explain_straggler(step, ResourceUsage())
    assert told.because[0].startswith(f"{place} needs"), told


@pytest.mark.parametrize(
    ("connection", "cause"), [("local", "cpu_oversubscribed"), ("ssh", "network")]
)
def test_within_one_pc_sums_that_wait_for_processors_are_no_network(tmp_path, connection, cause):
    step = {"forward": 0.02, "backward": 0.03, "sync_exposed": 0.07}
    more = {"step": step, "machine": FULL, "connection": connection}
    made = RunBuilder(tmp_path / "run", steps=60, **more).write()
    assert analyse(made).summary["bottleneck"] == cause
    assert Follower(made).look().judgement.kind == cause


def test_images_that_are_late_on_one_machine_are_its_own_disk_s(tmp_path):
    step, by_rank = {"sync_exposed": 0.31}, {2: {"data": 0.3, "sync_exposed": 0.01}}
    builder = RunBuilder(tmp_path / "run", step=step, by_rank=by_rank)
    builder.write()
    busy = {"rkB/s": 12000.0, "util": 97.0, "r_await": 11.0}
    for host, cause in (("node1", "data_decode"), ("node3", "data_disk")):
        path = tmp_path / f"run/nodes/{host}/machine.1.jsonl"
        change_lines(path, lambda line: {**line, "disks": {"sda": busy}})
        assert analyse(tmp_path / "run").summary["bottleneck"] == cause


@pytest.mark.parametrize("part", ["data", "h2d", "network", "peers", "checkpoint"])
def test_a_wait_counts_from_a_quarter_of_the_time(part):
    for factor in (0.99, 1.01):
        step = dataclasses.replace(STEP, **{part: factor * STEP.seconds / 3})
        assert (find_bottleneck(step, ResourceUsage()) == "compute") == (factor < 1)
    assert find_bottleneck(None, ResourceUsage()) == "unknown"


def test_the_step_ignores_the_first_one(tmp_path):
    run = RunBuilder(tmp_path / "run", nodes=1, sent=0.0).write()
    slow = {"seconds": {"forward": 30.0}}
    path = run / "nodes/node1/rank0.1.steps.jsonl"
    change_lines(path, lambda line: {**line, **slow} if line.get("step") == 1 else line)
    assert analyse(run).step.forward == pytest.approx(0.04)


def test_machines_of_several_gpus_wait_for_what_one_of_each_sends():
    one, four = (dataclasses.replace(STEP, nodes=2, world=world) for world in (2, 8))
    for spec, times in (("ef:5", 1), ("allreduce", (7 / 8) / (1 / 2))):
        waits = [step.wait(parse(spec), 2, 1e6) for step in (one, four)]
        assert waits[1] == pytest.approx(times * waits[0], rel=0.1), spec
