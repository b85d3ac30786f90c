"""What to do: one model for all of it. tests/messages/report.txt has each remedy with its gain, the
order and the commands."""

import dataclasses

import pytest

from boundary.run_files import RankStart
from report.advice import NO_ADVICE, advise
from report.analysis import analyse
from report.measure import achieved_rate
from report.usage import ResourceUsage
from tests.unit.report.report_runs import (
    BOTTLENECKS,
    GRADIENTS,
    STEP,
    RunBuilder,
    change,
    change_lines,
)


def advised(folder, options=None, **settings):
    run = RunBuilder(folder / "run", **settings).write()
    change(run / "plan.json", options=options or {"model": "resnet50", "trainer": ["--lr=1"]})
    return analyse(run)


def test_processes_of_one_machine_are_told_nothing_of_strategies(tmp_path):
    """What they wait for is no matter of the machine's card, whatever its counters saw."""
    step = advised(tmp_path, **BOTTLENECKS["network"]).step
    inner = dataclasses.replace(step, nodes=1, world=4, network=0.1, rate=None)
    assert achieved_rate(inner, []) is None
    assert not any(
        "SYNC" in one.change
        for one in advise(inner, "network", RankStart(), ResourceUsage()).remedies
    )
    assert advise(None, "none", RankStart(), ResourceUsage()) == NO_ADVICE


def test_a_run_that_had_asked_for_parts_by_speed_did_not_know_these_speeds(tmp_path):
    asked = {"model": "resnet50", "balance": "auto"}
    changes = [
        one.change for one in advised(tmp_path, asked, **BOTTLENECKS["straggler"]).advice.remedies
    ]
    assert not any("BALANCE" in one for one in changes)
    assert any(one.startswith("start the run again: each machine gets images") for one in changes)


def test_saving_half_as_often_leaves_more_steps_in_which_a_file_is_written(tmp_path):
    """Each save but the first waited 12 s for the file before, beside which 60 steps had been made:
    after twice as many it waits for what is left of 12 s after 60 more."""
    folder = RunBuilder(
        tmp_path / "run", steps=240, epochs=4, checkpoint=12.0, options={"checkpoint_every": 60}
    ).write()

    def save_first(line):
        first = line["kind"] == "checkpoint" and line["step"] == 60
        return {**line, "seconds": {"checkpoint": 0.1}} if first else None

    for path in folder.glob("nodes/*/*.steps.jsonl"):
        change_lines(path, save_first)
    step = sum(STEP.values())
    stall = (0.1 + 3 * 12.0) / 4
    remedies = analyse(folder).advice.remedies
    (saving,) = (remedy for remedy in remedies if remedy.step_part == "saving")
    left = 0.1 + (stall - 0.1 - 60 * step)
    assert saving.predicted == pytest.approx(128 / (step + left / 120), rel=0.01)


def test_advice_counts_the_warm_up_of_a_run_as_long(tmp_path):
    """A strategy that begins after half of the run makes it at most twice as fast."""
    builder = RunBuilder(tmp_path / "run", **BOTTLENECKS["network"])
    builder.warmup, builder.options = 1.0, {"sync_warmup": 1.0}
    (sync,) = (
        one for one in analyse(builder.write()).summary["advice"] if "SYNC=" in one["change"]
    )
    exact = sum({**STEP, **BOTTLENECKS["network"]["step"]}.values())
    assert 128 / exact < sync["predicted_images_per_second"] < 2 * 128 / exact


@pytest.mark.parametrize(
    ("mbit", "bought"),
    [
        (1000, ["10 Gbit/s", "2.5 Gbit/s"]),
        (2500, ["10 Gbit/s"]),
        (10000, []),
        (None, ["10 Gbit/s", "2.5 Gbit/s"]),
    ],
)
def test_no_link_is_advised_that_the_machines_have_already(tmp_path, mbit, bought):
    """Their gradients moved at 958 Mbit/s, so something else is slow."""
    found = advised(tmp_path, **{**BOTTLENECKS["network"], "speed_mbit": mbit})
    cards = [one.change for one in found.advice.remedies if "network cards" in one.change]
    assert [change.rpartition(" of ")[2] for change in cards] == bought


@pytest.mark.parametrize(
    ("workers", "busy", "typed"),
    [(4, 3.0, "--workers 8"), (4, 7.0, None), (0, 5.0, "--workers 3")],
)
def test_loader_processes_are_advised_where_processors_are_idle(tmp_path, workers, busy, typed):
    run = RunBuilder(tmp_path, **{**BOTTLENECKS["data_decode"], "machine": {"busy": busy}}).write()
    for path in run.glob("nodes/*/rank*.jsonl"):
        change_lines(
            path, lambda line: {**line, "workers": workers} if line["kind"] == "start" else line
        )
    remedies = analyse(run).advice.remedies
    assert [" ".join(one.args) for one in remedies if "--workers" in one.args] == (
        [typed] if typed else []
    )


@pytest.mark.parametrize("cause", ["data_share", "network"])
def test_images_of_a_share_are_counted_beside_gradients(tmp_path, cause):
    """Of four machines one shares the images: its cable carries 110 kB of each of the 96 that the
    others read, and its own gradients."""
    step, images, sent = {"sync_exposed": 1.2, "data": 0.002}, 96 * 110e3, 1.5 * GRADIENTS
    if cause == "data_share":
        step = {"data": 1.2, "sync_exposed": 0.002}
    took = sum({**STEP, **step}.values())
    found = advised(
        tmp_path,
        {"model": "resnet50", "data": "imagenet"},
        step=step,
        speed_mbit=1000,
        checkpoint=0.0,
        mounts=images / 3 / took / 1e6,
        share_host="node1",
    )
    assert found.summary["bottleneck"] == cause
    rows = found.summary["advice"]
    cached, shrunk = (
        next(row["predicted_images_per_second"] for row in rows if name in row["change"])
        for name in ("share_cache_gb", "`make shrink DATA=imagenet SIZE=256`")
    )
    if cause == "data_share":  # all of the step is the cable's time
        left = (images * 27 / 110 + sent) / (images + sent)
        assert shrunk == pytest.approx(128 / (took * left), rel=0.02)
    else:  # of which backward hides some
        assert 128 / took < shrunk < cached < 128 / took * (images + sent) / sent * 1.1


def test_a_cache_of_a_share_saves_no_gradients_of_processes_of_one_pc(tmp_path):
    """Their gradients use no cable."""
    settings = {**BOTTLENECKS["network"], "mounts": 9.0, "connection": "local"}
    changes = [row["change"] for row in advised(tmp_path, **settings).summary["advice"]]
    assert changes and not [change for change in changes if "share_cache_gb" in change]
