"""Each value of `bottleneck` from a run directory that shows it, and the rules at their edges."""

import dataclasses
import json

import pytest

from contract.strategies import Payload, parse
from report.advice import advise
from report.analysis import analyse
from report.bottleneck import Seen, bottleneck
from report.measure import RankWork, Step, real_rate
from report.text import render_text
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


SAID = {
    "network": "waits for gradients",
    "slow_link": "The link of node3 is the bottleneck",
    "data_disk": "The disk is the bottleneck",
    "data_share": "The data share is the bottleneck",
    "data_decode": "Decoding images is the bottleneck",
    "h2d": "PCIe link",
    "straggler": "for node3",
    "cpu_contention": "`top` on node3 shows them",
    "memory_pressure": "node3 is short of memory: 6.00 MB/s come back from its swap",
    "checkpoint": "Saving checkpoints is the bottleneck",
}
REMEDY = {
    "network": "SYNC=",
    "slow_link": "repair the link of node3",
    "data_disk": "an SSD",
    "data_share": "own disk instead of the share",
    "data_decode": "--workers",
    "h2d": "Another slot costs nothing",
    "straggler": "node3 repaired or upgraded: as fast as the others",
    "cpu_contention": "node3 without the other programs",
    "memory_pressure": "ARGS='--workers 1'",
    "checkpoint": "--checkpoint_every",
}


@pytest.mark.parametrize("cause", SAID)
def test_each_fault_has_its_words_and_a_remedy(tmp_path, cause):
    text = " ".join(
        render_text(analyse(RunBuilder(tmp_path / "r", **BOTTLENECKS[cause]).write())).split()
    )
    verdict = text[text.index("VERDICT") : text.index("WHERE THE TIME WENT")]
    assert SAID[cause] in verdict and REMEDY[cause] in verdict


def test_every_bottleneck_but_good_ones_has_them():
    assert SAID.keys() == REMEDY.keys() == BOTTLENECKS.keys() - {"compute", "none"}


# A rank that is slower by so much, with what its machine did meanwhile.
SLOW_RANK = {"step": {"sync_exposed": 0.03}, "by_rank": {2: {"sync_exposed": 0.01}}}


@pytest.mark.parametrize(
    ("backward", "machine", "cause"),
    [
        (0.08 + 0.14 * 0.127, {}, "compute"),
        (0.08 + 0.16 * 0.127, {}, "straggler"),
        (0.08 * 1.3, {}, "straggler"),
        (0.16, {"waited": 3.0, "busy": 8.0}, "cpu_contention"),
        (0.16, {"waited": 0.2, "busy": 8.0}, "straggler"),  # that explains a fourth of it
        (0.16, {"waited": 3.0, "busy": 3.1}, "straggler"),  # its own threads, and no others
    ],
)
def test_a_slower_rank_and_what_takes_its_processors(tmp_path, backward, machine, cause):
    by_rank = {2: {**SLOW_RANK["by_rank"][2], "backward": backward}}
    step = {"sync_exposed": backward - 0.08 + 0.01}
    run = RunBuilder(tmp_path / "run", step=step, by_rank=by_rank, machines={"node3": machine})
    assert analyse(run.write()).summary["bottleneck"] == cause


def test_on_busy_machines_that_are_all_alike_no_program_is_accused(tmp_path):
    settings = {**BOTTLENECKS["cpu_contention"], "machines": {}}
    settings["machine"] = {"busy": 7.9, "ran": 2.0, "waited": 2.5}
    run = RunBuilder(tmp_path / "run", **settings).write()
    assert analyse(run).summary["bottleneck"] == "straggler"


@pytest.mark.parametrize(
    ("machine", "cause"),
    [
        ({"in": 6e6, "pressure": 0.4}, "memory_pressure"),
        ({"in": 6e6, "pressure": 0.02}, "compute"),  # what was put away once comes back
        ({"out": 6e6, "pressure": 0.4}, "compute"),
        ({"in": 0.4e6, "pressure": 0.4}, "compute"),
        ({"in": 6e6, "pressure": None, "available": 1 << 30}, "memory_pressure"),
        ({"in": 6e6, "pressure": None, "available": 8 << 30}, "compute"),
    ],
)
def test_swap_counts_where_memory_is_short(tmp_path, machine, cause):
    run = RunBuilder(tmp_path / "run", machines={"node2": machine}).write()
    assert analyse(run).summary["bottleneck"] == cause


@pytest.mark.parametrize(
    ("links", "cause"),
    [
        ({"node3": 95}, "slow_link"),
        ({"node1": 460}, "slow_link"),
        ({"node3": 480}, "network"),  # more than half of what the others reach
        (dict.fromkeys(("node1", "node2", "node3", "node4"), 95), "network"),
    ],
)
def test_one_slow_link_is_told_from_a_slow_network(tmp_path, links, cause):
    settings = {**BOTTLENECKS["slow_link"], "links": links}
    analysis = analyse(RunBuilder(tmp_path / "run", **settings).write())
    assert analysis.summary["bottleneck"] == cause
    if cause == "slow_link":
        assert f"The link of {next(iter(links))} is" in analysis.verdict.headline
        repair = next(one for one in analysis.advice.remedies if "repair" in one.change)
        assert repair.predicted > 1.5 * analysis.advice.now


def test_images_that_are_late_on_one_machine_are_its_own_disk_s(tmp_path):
    step, by_rank = {"sync_exposed": 0.31}, {2: {"data": 0.3, "sync_exposed": 0.01}}
    builder = RunBuilder(tmp_path / "run", step=step, by_rank=by_rank)
    builder.write()
    assert analyse(tmp_path / "run").summary["bottleneck"] == "data_decode"
    for host, cause in (("node1", "data_decode"), ("node3", "data_disk")):
        builder.disk = {"rkB/s": 12000.0, "util": 97.0, "r_await": 11.0}
        builder.write_iostat(host)
        analysis = analyse(tmp_path / "run")
        assert analysis.summary["bottleneck"] == cause
    assert "for node3, which waits for images" in analysis.verdict.headline
    assert max(one.predicted for one in analysis.advice.remedies) > 1.5 * analysis.advice.now


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
    assert bottleneck(dataclasses.replace(STEP, **{part: edge * 1.01}), Seen()) != "compute"
    assert bottleneck(dataclasses.replace(STEP, **{part: edge * 0.99}), Seen()) == "compute"


def test_no_step_no_bottleneck():
    assert bottleneck(None, Seen()) == "none"


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
    assert not any("SYNC" in one.change for one in advise(step, "network", {}, Seen()).remedies)


def test_machines_of_several_gpus_wait_for_what_one_of_each_sends():
    one, four = (dataclasses.replace(STEP, nodes=2, world=world) for world in (2, 8))
    for spec, times in (("ef:2", 1), ("allreduce", (7 / 8) / (1 / 2))):
        waits = [step.wait(parse(spec), 2, 1e6) for step in (one, four)]
        assert waits[1] == pytest.approx(times * waits[0], rel=0.1), spec
