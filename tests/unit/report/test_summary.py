"""summary.json: complete, adding up, and made of whatever files there are."""

import json
import math
import shutil

import pytest

from report.__main__ import main
from report.analysis import analyse
from report.page import render_page
from report.records import CATEGORIES
from report.text import heading_section, render_text
from tests.unit.report.report_runs import BOTTLENECKS, GUARD, START, STEP, RunBuilder

FIELDS = {
    "status", "nodes", "world_size", "attempts", "first_cause", "best_top1", "final_top1", "epochs",
    "steps", "images_per_second", "wall_seconds", "seconds", "bytes_sent_per_step", "sync",
    "bottleneck", "advice", "predicted", "gpu_joules", "gpu_joules_per_image",
}  # fmt: skip


def test_twelve_machines_stand_in_the_order_of_their_numbers(tmp_path):
    analysis = analyse(RunBuilder(tmp_path / "run", nodes=12).write())
    names = [f"node{number}" for number in range(1, 13)]
    for uses in (analysis.disks, analysis.networks):
        assert list(dict.fromkeys(use.host for use in uses)) == names


def test_summary_has_every_field_and_adds_up(tmp_path):
    summary = analyse(RunBuilder(tmp_path / "run").write()).summary
    assert set(summary) == FIELDS
    assert set(summary["seconds"]) == set(CATEGORIES)
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_seconds"], rel=0.001)
    expected = {"status": "finished", "nodes": 4, "world_size": 4, "epochs": 2, "steps": 240}
    assert {key: summary[key] for key in expected} == expected
    assert summary["best_top1"] == summary["final_top1"] == pytest.approx(0.9)
    assert summary["images_per_second"] == pytest.approx(128 / 0.138, rel=1e-4)
    assert summary["bytes_sent_per_step"] == pytest.approx(153.3e6, rel=0.05)


def test_what_the_cards_took_is_told_a_run_and_an_image(tmp_path):
    """180 W of each of four cards, as long as their loops; nothing where a card does not say."""
    folder = RunBuilder(tmp_path / "run", gpu=True).write()
    analysis = analyse(folder)
    images = 2 * 120 * 128
    joules = sum(180.0 * use.seconds for use in analysis.gpus)
    assert len(analysis.gpus) == 4 and all(use.seconds > 240 * 0.138 for use in analysis.gpus)
    assert analysis.summary["gpu_joules"] == round(joules)
    assert analysis.summary["gpu_joules_per_image"] == pytest.approx(joules / images, rel=0.001)
    said = f"The cards took {joules / 3600:.2f} Wh, {joules / images:.2f} J an image"
    assert said in " ".join(render_text(analysis).split())
    path = folder / "nodes/node2/gpu.jsonl"
    path.rename(tmp_path / "elsewhere")
    assert analyse(folder).summary["gpu_joules"] is None
    (tmp_path / "elsewhere").rename(path)
    path.write_text(path.read_text().replace('"power": 180.0', '"power": null'))
    assert analyse(folder).summary["gpu_joules"] is None
    assert "The cards took" not in render_text(analyse(folder))


@pytest.mark.parametrize(
    "why, told", [("node2's card has no bf16", ["precision fp32: node2's card has no bf16"]),
                  ("as asked", [])]
)  # fmt: skip
def test_why_the_precision_was_chosen_is_said_where_the_launcher_chose_it(tmp_path, why, told):
    folder = RunBuilder(tmp_path / "run").write()
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "precision_why": why}))
    lines = [line.strip() for line in heading_section(analyse(folder))]
    assert [line for line in lines if line.startswith("precision")] == told


def test_time_of_a_rank_that_died_is_a_gap_and_not_a_remainder(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.write()
    path = tmp_path / "run/nodes/node2/rank1.steps.jsonl"
    path.unlink()
    builder.write_rank(1, "node2", steps=10, end=False)
    accounting = analyse(tmp_path / "run").accounting
    died = next(time for time in accounting.ranks if time.rank == 1)
    assert died.seconds["start_stop"] == pytest.approx(START)
    assert died.gap == pytest.approx(builder.wall - START - 10 * sum(builder.step.values()))


def test_a_rank_that_never_began_was_starting_all_the_time(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.write()
    for path in (tmp_path / "run/nodes").glob("*/*.steps.jsonl"):
        path.unlink()
    builder.write_exit(0, "node1", exit_code=1, mono_end=GUARD + 9.0)
    accounting = analyse(tmp_path / "run").accounting
    assert accounting.ranks[0].seconds["start_stop"] == pytest.approx(9.0)


def test_attempts_are_summed_and_their_nodes_kept(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.write()
    second = RunBuilder(tmp_path / "run", nodes=3, by_rank={})
    second.attempt = 2
    for rank, host in enumerate(second.hosts):
        second.write_rank(rank, host)
        second.write_net(rank, host)
        first = json.loads((tmp_path / f"run/nodes/{host}/exit.json").read_text())["attempts"]
        second.write_exit(rank, host)
        document = json.loads((tmp_path / f"run/nodes/{host}/exit.json").read_text())
        second.dump(
            f"nodes/{host}/exit.json", {**document, "attempts": first + document["attempts"]}
        )
    control = json.loads((tmp_path / "run/attempts.json").read_text())
    control["attempts"].append(
        {
            **control["attempts"][0],
            "attempt": 2,
            "nodes": second.hosts,
            "world_size": 3,
            "reason": "node4 gone: no heartbeat for 15 s",
        }
    )
    second.dump("attempts.json", control)
    summary = analyse(tmp_path / "run").summary
    assert (summary["nodes"], summary["world_size"]) == (3, 3)
    assert [len(entry["nodes"]) for entry in summary["attempts"]] == [4, 3]
    assert summary["wall_seconds"] == pytest.approx(2 * builder.wall, abs=0.01)
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_seconds"], rel=0.001)


def test_first_cause_of_a_failed_run_comes_with_the_last_lines_of_its_log(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.write()
    cause = {"host": "node3", "rank": 2, "exit_code": 1, "message": "no space left", "remedy": "rm"}
    builder.write_control(status="failed", first_cause=cause)
    log = tmp_path / "run/nodes/node3/rank2.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)) + "OSError: No space left\n")
    analysis = analyse(tmp_path / "run")
    assert analysis.summary["status"] == "failed"
    lines = analysis.summary["first_cause"]["last_lines"]
    assert (len(lines), lines[-1]) == (12, "OSError: No space left")
    assert "The run failed: no space left" in analysis.failure


@pytest.mark.parametrize(
    "gone",
    ["plan.json", "attempts.json", "exit.json", "iostat.json", "net.jsonl", "rank*.steps.jsonl"],
)
def test_any_kind_of_file_may_be_missing(tmp_path, gone, capsys):
    run = RunBuilder(tmp_path / "run").write()
    for path in list(run.rglob(gone)):
        path.unlink()
    assert main([str(run)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines()[:-1])) <= 80
    if gone not in ("exit.json",):
        assert "WHAT IS MISSING" in text


def test_a_run_by_hand_has_only_what_the_trainer_wrote(tmp_path):
    builder = RunBuilder(tmp_path / "run", nodes=2)
    for rank, host in enumerate(builder.hosts):
        builder.write_rank(rank, host)
    summary = analyse(tmp_path / "run").summary
    assert summary["status"] == "finished"
    assert (summary["nodes"], summary["world_size"]) == (2, 2)
    assert summary["wall_seconds"] == pytest.approx(START + builder.loop_seconds, abs=0.01)


def test_a_run_by_hand_that_failed_twice_is_shown(tmp_path, capsys):
    builder = RunBuilder(tmp_path / "run", nodes=1)
    for builder.attempt in (1, 2):
        builder.write_rank(0, "node1", steps=5, end=False)
        end = {"kind": "end", "attempt": builder.attempt, "mono": 110.0, "status": "failed"}
        builder.append("nodes/node1/rank0.steps.jsonl", [end])
    assert main([str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "The run failed on node1, rank 0" in text
    assert "2. node1; started by hand" in text


def test_a_node_that_left_nothing_is_named(tmp_path):
    run = RunBuilder(tmp_path / "run").write()
    shutil.rmtree(run / "nodes/node4")
    notes = " ".join(analyse(run).notes)
    assert "no timings of rank 3" in notes
    assert "node4" in notes


@pytest.mark.parametrize(
    "garbage",
    ['{"kind": "step", "atte', "null", "[1]", '"x"', '{"kind": "step", "seconds": 3, "step": "x"}',
     '{"kind": "step", "step": 9, "samples": NaN, "seconds": {"data": "a", "forward": Infinity}}',
     '{"kind": "evaluate", "epoch": null}', '{"kind": "end", "mono": "late"}', "\x00\xff"],
)  # fmt: skip
def test_lines_that_make_no_sense_never_stop_the_report(tmp_path, garbage, capsys):
    run = RunBuilder(tmp_path / "run").write()
    for name in ("rank0.steps.jsonl", "net.jsonl"):
        with (run / "nodes/node1" / name).open("a", errors="surrogateescape") as file:
            file.write(garbage + "\n")
    for name in ("iostat.json", "exit.json"):
        (run / "nodes/node1" / name).write_text(garbage)
    assert main([str(run), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert all(math.isfinite(value) for value in summary["seconds"].values())


def test_a_figure_that_json_does_not_have_is_not_passed_on(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.write()
    builder.write_control(status="failed", first_cause={"message": "x", "loss": float("nan")})
    assert main([str(tmp_path / "run")]) == 0
    assert "NaN" not in (tmp_path / "run/summary.json").read_text()


def test_half_of_any_json_file_never_stops_the_report(tmp_path):
    run = RunBuilder(tmp_path / "run").write()
    for path in run.rglob("*.json"):
        path.write_text(path.read_text()[: path.stat().st_size // 2])
    assert main([str(run)]) == 0


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_a_run_is_refused_in_one_sentence(tmp_path, make, capsys):
    folder = tmp_path / "nothing"
    if make:
        folder.mkdir()
    assert main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert str(folder) in error
    assert "Traceback" not in error


def test_hundred_epochs_follow_from_the_measured_epoch(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    predicted = analyse(builder.write()).hundred_epochs
    epoch = builder.loop_seconds / builder.epochs
    assert predicted == pytest.approx(100 * epoch + START + 1.0, rel=1e-6)


def test_latest_is_found_under_runs(tmp_path, monkeypatch):
    RunBuilder(tmp_path / "runs/20261120T120000Z-resnet50-4n").write()
    (tmp_path / "runs/latest").symlink_to("20261120T120000Z-resnet50-4n")
    monkeypatch.chdir(tmp_path)
    assert main(["latest", "--json"]) == 0
    assert (tmp_path / "runs/latest/report.html").stat().st_size < 300_000


def test_a_run_is_found_by_the_path_of_its_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["latest"]) == 2
    said = capsys.readouterr().err
    assert said == "report: there is no run yet: `make demo` or `make train` starts one.\n"
    RunBuilder(tmp_path / "runs" / "one").write()
    for name in ("one", "runs/one", "runs/one/", "runs/one/report.html", f"{tmp_path}/runs/one"):
        assert main([name]) == 0, capsys.readouterr().err
    assert "Report: runs/one/report.html" in capsys.readouterr().out


# Four machines on 1 Gbit/s: with ef:1.6 a step waits 5 ms, and 1.2 s where it sums exactly.
WARMED = {
    "sync": "ef:1.6",
    "bucket_mb": 8,
    "speed_mbit": 1000,
    "step": {"sync_exposed": 0.005},
    "exact_step": {"sync_exposed": 1.2},
    "sent": 8e6,
    "exact_sent": 153.4e6,
}


def test_steps_of_a_strategys_warm_up_are_told_apart(tmp_path):
    done = analyse(RunBuilder(tmp_path / "run", steps=400, exact=100, **WARMED).write())
    step, warm = done.step, sum(STEP.values()) - STEP["sync_exposed"] + 1.2
    assert step.network == pytest.approx(0.005, rel=0.01)
    assert step.warm_seconds == pytest.approx(warm, rel=0.01)
    assert done.summary["bytes_sent_per_step"] == pytest.approx(8e6, rel=0.05)
    told = " ".join(done.verdict.because)
    assert "The first 100 of 400 steps were the warm-up of ef:1.6: exact sums of 1.33 s" in told
    assert "77 % of the time" in told
    assert done.hundred_epochs < 100 * 200 * 0.2 + 100 * warm + 1000
    assert not [one for one in done.summary["advice"] if "NODES" in one["change"]]


def test_a_run_that_was_all_warm_up_is_told_as_exact_sums(tmp_path):
    """Bytes, link and advice were those of a strategy that had never begun: `NODES=3` would have
    been eleven times as fast, and SYNC=ef:2 the remedy."""
    done = analyse(RunBuilder(tmp_path / "run", exact=240, **WARMED).write())
    told = " ".join(done.verdict.because)
    assert "Every step was warm-up: ef:1.6 never began" in told
    assert done.summary["bytes_sent_per_step"] == pytest.approx(153.4e6, rel=0.05)
    assert done.step.rate * 8 / 1e6 == pytest.approx(950, rel=0.06)
    advice = {one["change"].split(":")[0]: one for one in done.summary["advice"]}
    assert not any("NODES=3" in change or "NODES=2" in change for change in advice)
    (sync,) = (one for one in done.summary["advice"] if one["change"].startswith("SYNC="))
    assert sync["change"].startswith("SYNC=ef:1.6 with more EPOCHS, or with ARGS='--sync_warmup 0'")
    assert sync["predicted_images_per_second"] == pytest.approx(128 / 0.135, rel=0.05)


def test_advice_counts_the_warm_up_of_a_run_as_long(tmp_path):
    """A strategy that begins after half of the run makes it at most twice as fast."""
    builder = RunBuilder(tmp_path / "run", **BOTTLENECKS["network"])
    builder.warmup = 1.0
    (sync,) = (
        one for one in analyse(builder.write()).summary["advice"] if "SYNC=" in one["change"]
    )
    exact = sum({**STEP, **BOTTLENECKS["network"]["step"]}.values())
    assert 128 / exact < sync["predicted_images_per_second"] < 2 * 128 / exact


def test_a_script_that_timed_no_steps_has_its_machines_and_a_sentence(tmp_path):
    run = RunBuilder(tmp_path / "run", gpu=True, mounts=1.0).write()
    for path in run.glob("nodes/*/*.steps.jsonl"):
        path.unlink()
    plan = json.loads((run / "plan.json").read_text())
    script = {"words": ["train.py"], "arguments": ["--lr", "0.1 2"], "folder": "/p", "outputs": []}
    none = dict.fromkeys(("model", "epochs", "sync", "precision"))
    (run / "plan.json").write_text(json.dumps({**plan, **none, "script": script}))
    analysis = analyse(run)
    assert {use.host for use in analysis.networks} == {use.host for use in analysis.disks}
    assert len(analysis.networks) == len(analysis.memory) == 4
    assert analysis.memory[0].peak_memory == 2e9
    assert not analysis.notes and not analysis.advice.remedies
    told = render_text(analysis)
    assert "  train.py --lr '0.1 2', 4 nodes (4 ranks)\n" in told
    assert "nobody timed its steps" in told and "docs/own-script.md" in told
    assert "WHERE THE TIME WENT" not in told and "images/s" not in told
    assert max(map(len, told.splitlines())) <= 80
    page = render_page(analysis)
    assert "nobody timed its steps" in page and "Where the time went" not in page
    for path in run.glob("nodes/*/exit.json"):
        path.unlink()
    assert analyse(run).memory == []
