"""What a verdict rests on: its signals, the second cause, and two causes that nobody can tell apart
because a signal is missing."""

import shutil

import pytest

from report.analysis import analyse
from report.status import Follower, section_of
from report.text import section_lines
from tests.unit.report.report_runs import (
    BOTTLENECKS,
    SCRIPT,
    RunBuilder,
    change,
    change_lines,
    page_of,
    text_of,
)

ALL = [0, 1, 2, 3]


def without(*names):
    """A change of a machine's line: without these fields, of it, of its card or of its ranks."""

    def leave_out(line):
        inner = [line, line.get("card", {}), *line.get("ranks", {}).values()]
        for entry in inner:
            for name in names:
                entry.pop(name, None)
        return line

    return leave_out


def run(folder, hosts=(), change_line=None, **settings):
    made = RunBuilder(folder / "run", **settings).write()
    for host in hosts:
        change_lines(made / f"nodes/{host}/machine.1.jsonl", change_line)
    return made


def verdict_of(analysis):
    return analysis.verdict.headline, analysis.summary


@pytest.mark.parametrize(
    ("cause", "fields", "hosts", "second", "signal"),
    [
        ("data_decode", ["disks"], [1, 2, 3, 4], "data_disk", "disk"),
        ("straggler", ["waited"], [3], "cpu_contention", "processors"),
        ("straggler", ["waited"], [1, 2, 4], "cpu_contention", "processors"),
        ("network", ["peers"], [2], "slow_link", "links"),
        ("compute", ["waited"], [1, 2, 3, 4], "cpu_oversubscribed", "processors"),
    ],
)
def test_two_causes_that_a_missing_signal_would_tell_apart_are_both_named(
    tmp_path, cause, fields, hosts, second, signal
):
    names = [f"node{number}" for number in hosts]
    made = run(tmp_path, names, without(*fields), **BOTTLENECKS[cause])
    analysis = analyse(made)
    headline, summary = verdict_of(analysis)
    assert summary["bottleneck"] == cause
    found = summary["undecided"]
    assert (found["cause"], found["signal"]) == (second, signal)
    assert found["ranks"] == tuple(number - 1 for number in hosts)
    assert headline.startswith("Either ") and f"the {signal} of" in headline
    shown = " ".join(text_of(analysis).split())
    assert "To tell them apart, " in shown and "To tell them apart, " in page_of(analysis)


@pytest.mark.parametrize(
    ("cause", "fields", "hosts"),
    [
        ("network", ["disks", "waited"], [1, 2, 3, 4]),  # neither would decide
        ("compute", ["waited"], [2]),  # a single slow machine would make the others wait
        ("straggler", ["waited"], [1]),  # it is compared with those that are known
        ("data_disk", ["loaders"], [1, 2, 3, 4]),
    ],
)
def test_a_missing_signal_that_decides_nothing_leaves_the_verdict(tmp_path, cause, fields, hosts):
    names = [f"node{number}" for number in hosts]
    analysis = analyse(run(tmp_path, names, without(*fields), **BOTTLENECKS[cause]))
    assert verdict_of(analysis)[1]["undecided"] is None
    assert not verdict_of(analysis)[0].startswith("Either ")


def test_loaders_that_are_known_to_decode_exclude_the_disk(tmp_path):
    busy = {"step": {"data": 0.3}, "machine": {"loaders": 8.0, "loaders_busy": 7.0}}
    made = run(tmp_path, ["node1", "node2", "node3", "node4"], without("disks"), **busy)
    summary = analyse(made).summary
    assert (summary["bottleneck"], summary["undecided"]) == ("data_decode", None)


def test_the_rank_without_step_times_may_be_the_one_that_all_wait_for(tmp_path):
    made = run(tmp_path, **BOTTLENECKS["network"])
    (made / "nodes/node4/rank3.1.steps.jsonl").unlink()
    analysis = analyse(made)
    _, summary = verdict_of(analysis)
    assert summary["undecided"]["cause"] == "straggler"
    assert summary["coverage"]["step_times"] == {
        "used": True,
        "measured": (0, 1, 2),
        "missing": (3,),
    }
    said = "Not measured: step times, processors, disk, network and links of rank 3."
    assert said in " ".join(text_of(analysis).split())


def test_disks_that_were_all_idle_were_measured(tmp_path):
    hosts = ["node1", "node2", "node3", "node4"]
    idle = run(tmp_path, hosts, lambda line: {**line, "disks": {}}, step={"data": 0.3})
    summary = analyse(idle).summary
    assert (summary["bottleneck"], summary["undecided"]) == ("data_decode", None)
    assert summary["coverage"]["disk"]["measured"] == tuple(ALL)


def test_a_run_that_nobody_recorded_is_told_to_record(tmp_path):
    made = run(tmp_path)
    for node in range(1, 5):
        (made / f"nodes/node{node}/machine.1.jsonl").unlink()
    analysis = analyse(made)
    coverage = analysis.summary["coverage"]
    assert all(coverage[name]["missing"] == tuple(ALL) for name in ("disk", "processors"))
    assert "`make train`" in analysis.summary["undecided"]["remedy"]


def test_signals_that_a_run_cannot_have_are_not_missing(tmp_path):
    demo = analyse(run(tmp_path, connection="local")).summary["coverage"]
    assert demo.keys() == {"step_times", "processors", "disk"}
    assert [*demo["disk"].values()] == [False, tuple(ALL), ()]
    cards = analyse(run(tmp_path / "cards", ["node2"], without("gpus"), gpu=True)).summary[
        "coverage"
    ]
    unknown = analyse(run(tmp_path / "cuda", versions={"cuda": "12.6"})).summary["coverage"]
    assert unknown["gpu"]["missing"] == tuple(ALL)
    assert cards["gpu"] == {"used": False, "measured": (0, 2, 3), "missing": (1,)}


def test_of_two_faults_the_larger_one_is_the_verdict_and_the_other_the_runner_up(tmp_path):
    step = {"data": 0.3, "sync_exposed": 0.2}
    disk = BOTTLENECKS["data_disk"]["disk"]
    analysis = analyse(run(tmp_path, step=step, disk=disk))
    summary, total = analysis.summary, analysis.step.training_seconds
    assert summary["bottleneck"] == "data_disk"
    assert summary["bottleneck_fraction"] == pytest.approx(0.3 / total)
    assert summary["runner_up"]["cause"] == "network"
    assert summary["runner_up"]["fraction"] == pytest.approx(0.2 / total)
    share = f"{100 * 0.2 / total:.0f} % of training time"
    assert f"Runner-up: the network, {share}" in " ".join(text_of(analysis).split())


def test_images_that_make_one_rank_late_are_not_their_own_runner_up(tmp_path):
    late = {"step": {"sync_exposed": 0.31}, "by_rank": {2: {"data": 0.3, "sync_exposed": 0.01}}}
    summary = analyse(run(tmp_path, **late)).summary
    assert summary["bottleneck"] == "data_decode"
    assert summary["runner_up"]["cause"] not in ("straggler", "data_decode")


def test_only_a_run_without_step_times_is_unknown(tmp_path):
    made = run(tmp_path / "spread", **BOTTLENECKS["none"])
    assert analyse(made).summary["bottleneck"] == "none"
    untimed = run(tmp_path / "untimed")
    for path in untimed.glob("nodes/*/rank*"):
        path.unlink()
    change(untimed / "plan.json", program=SCRIPT)
    analysis = analyse(untimed)
    assert analysis.summary["bottleneck"] == "unknown"
    assert analysis.verdict.headline.startswith("Unknown")


def test_status_names_the_runner_up_and_what_was_not_measured(tmp_path):
    step = {**BOTTLENECKS["network"]["step"], "data": 0.1}
    made = run(tmp_path, ["node2"], without("waited"), step=step)
    progress = Follower(made).look()
    said = " ".join(" ".join(section_lines(section_of(progress, True))).split())
    assert "Runner-up: images, " in said
    assert "Used: step times of all 4 ranks; processors of ranks 0, 2 and 3." in said
    assert "Not measured: processors of rank 1." in said
    shutil.rmtree(made / "nodes/node2")
    assert Follower(made).look().judgement is None  # not of all ranks
