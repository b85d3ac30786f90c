"""Each value of `bottleneck` from a run directory that shows it, and the rules at their edges."""

import dataclasses
import json

import pytest

from contract.strategies import Payload, parse
from report.advice import advise
from report.analysis import analyse
from report.measure import RankWork, Step, real_rate
from report.text import render_text
from report.verdict import bottleneck
from tests.unit.report.report_runs import BOTTLENECKS, RunBuilder

STEP = Step(
    attempt=1, nodes=4, world=4, steps=40, images=128, payload=Payload(1e8),
    strategy=parse("allreduce"),
    data=0.0, h2d=0.0, forward=0.04, backward=0.05, optimizer=0.01, other=0.0,
    network=0.0, peers=0.0, checkpoint=0.0, bytes_sent=1.5e8, link_mbit=1000, rate=1e8,
    shared_machine=False, ranks=(RankWork("node1", 0, {}),),
)  # fmt: skip


@pytest.mark.parametrize("cause", BOTTLENECKS)
def test_each_bottleneck_is_told_from_its_run(tmp_path, cause):
    analysis = analyse(RunBuilder(tmp_path / "run", **BOTTLENECKS[cause]).write())
    assert analysis.summary["bottleneck"] == cause


def test_verdict_names_the_network_with_its_figures(tmp_path):
    run = RunBuilder(tmp_path / "run", **BOTTLENECKS["network"]).write()
    text = " ".join(render_text(analyse(run)).split())
    assert "The network is the bottleneck: 90 % of each step waits for gradients." in text
    assert "Each node sent 153 MB per step; at 1 Gbit/s that alone takes 1.23 s" in text


def test_a_full_gpu_does_not_hide_the_network(tmp_path):
    run = RunBuilder(tmp_path / "run", gpu=True, **BOTTLENECKS["network"]).write()
    analysis = analyse(run)
    assert analysis.gpus[0].utilization == 100
    assert analysis.summary["bottleneck"] == "network"


def test_the_straggler_and_what_it_is_slow_at_are_named(tmp_path):
    run = RunBuilder(tmp_path / "run", **BOTTLENECKS["straggler"]).write()
    words = analyse(run).verdict
    assert "node3 (rank 2)" in words.headline
    assert any("`backward`" in sentence for sentence in words.because)


def test_an_idle_disk_is_explained_and_not_accused(tmp_path):
    words = analyse(RunBuilder(tmp_path / "run").write()).verdict
    assert any("page cache" in sentence for sentence in words.because)
    late = analyse(RunBuilder(tmp_path / "late", **BOTTLENECKS["data_decode"]).write()).verdict
    assert not any("page cache" in sentence for sentence in late.because)
    some = analyse(RunBuilder(tmp_path / "some", **BOTTLENECKS["none"]).write()).verdict
    assert not any("page cache" in sentence for sentence in some.because)


def test_a_card_that_promises_more_than_it_gives_is_named(tmp_path):
    settings = {**BOTTLENECKS["network"], "speed_mbit": 10000}
    words = analyse(RunBuilder(tmp_path / "run", **settings).write()).verdict
    assert any("The card says 10 Gbit/s, but" in sentence for sentence in words.because)


@pytest.mark.parametrize("part", ["data", "h2d", "network", "peers", "checkpoint"])
def test_a_wait_counts_from_a_quarter_of_the_time(part):
    edge = STEP.seconds / 3
    assert bottleneck(dataclasses.replace(STEP, **{part: edge * 1.01}), [], []) != "compute"
    assert bottleneck(dataclasses.replace(STEP, **{part: edge * 0.99}), [], []) == "compute"


def test_no_step_no_bottleneck():
    assert bottleneck(None, [], []) == "none"


def test_local_nodes_share_the_counters_of_one_card(tmp_path):
    settings = {**BOTTLENECKS["network"], "connection": "local"}
    analysis = analyse(RunBuilder(tmp_path / "run", **settings).write())
    assert analysis.summary["bytes_sent_per_step"] == pytest.approx(153.3e6, rel=0.05)
    assert any("processes of one machine" in sentence for sentence in analysis.verdict.because)
    assert not any("NODES=" in item["change"] for item in analysis.summary["advice"])


def test_the_least_wait_is_the_network_and_the_rest_is_waiting_for_peers(tmp_path):
    step = {"sync_exposed": 0.16}
    by_rank = {2: {"backward": 0.23, "sync_exposed": 0.01}}
    analysis = analyse(RunBuilder(tmp_path / "run", step=step, by_rank=by_rank).write())
    assert analysis.step.network == pytest.approx(0.01)
    assert analysis.step.peers == pytest.approx((0.16 * 3 + 0.01) / 4 - 0.01)


def test_the_step_ignores_the_first_one(tmp_path):
    run = RunBuilder(tmp_path / "run", nodes=1, sent=0.0).write()
    path = run / "nodes/node1/rank0.steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["seconds"] = {"forward": 30.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert analyse(run).step.forward == pytest.approx(0.04)


def test_what_gpus_of_one_machine_wait_for_is_no_matter_of_its_card():
    """Sums within it leave by no cable, whatever else its counters saw."""
    step = dataclasses.replace(STEP, nodes=1, world=4, network=0.1, rate=None)
    assert real_rate(step, []) is None
    assert not any("SYNC" in one.change for one in advise(step, "network", {}).remedies)


def test_machines_of_several_gpus_wait_for_what_one_of_each_sends():
    one, four = (dataclasses.replace(STEP, nodes=2, world=world) for world in (2, 8))
    for spec, times in (("ef:2", 1), ("allreduce", (7 / 8) / (1 / 2))):
        waits = [step.wait(parse(spec), 2, 1e6) for step in (one, four)]
        assert waits[1] == pytest.approx(times * waits[0], rel=0.1), spec
