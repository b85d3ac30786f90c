"""summary.json: complete, adding up, and made of whatever files there are."""

import json
import math
import re

import pytest

from contract.records import CATEGORIES
from report.__main__ import main
from report.analysis import analyse
from report.verdict import UNTIMED
from tests.unit.report.report_runs import (
    GUARD,
    SCRIPT,
    START,
    RunBuilder,
    change,
    change_lines,
    page_of,
    text_of,
)

FIELDS = {
    "version", "status", "nodes", "world_size", "attempts", "first_cause", "best_top1",
    "final_top1", "epochs", "steps", "images_per_second", "wall_seconds", "seconds",
    "bytes_sent_per_step", "sync", "bottleneck", "advice", "predicted",
    "gpu_joules", "gpu_joules_per_image", "bottleneck_fraction", "runner_up", "undecided",
    "coverage", "tried",
}  # fmt: skip


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
    joules = sum(180.0 * use.loop for use in analysis.uses.gpus)
    assert len(analysis.uses.gpus) == 4 and all(
        use.loop > 240 * 0.138 for use in analysis.uses.gpus
    )
    assert analysis.summary["gpu_joules"] == round(joules)
    each = joules / (2 * 120 * 128)
    assert analysis.summary["gpu_joules_per_image"] == pytest.approx(each, rel=0.001)
    told = f"The GPUs used {joules / 3600:.2f} Wh, {each:.2f} J per image"
    assert told in " ".join(text_of(analysis).split())
    path = folder / "nodes/node2/machine.1.jsonl"
    change_lines(path, lambda line: {**line, "gpus": [{"index": 0, "power": None}]})
    assert analyse(folder).summary["gpu_joules"] is None
    path.unlink()
    assert analyse(folder).summary["gpu_joules"] is None


def test_the_report_says_why_the_ranks_chose_the_precision(tmp_path):
    folder = RunBuilder(tmp_path / "run").write()
    assert "\n  precision" not in text_of(analyse(folder))
    decided = {"precision_why": "node2's card has no bf16"}
    for path in folder.glob("nodes/*/*.steps.jsonl"):
        change_lines(path, lambda line: line["kind"] == "start" and {**line, "decided": decided})
    assert re.search(r"\n  precision +fp32: node2's card has no bf16\n", text_of(analyse(folder)))


@pytest.mark.parametrize("stood", [None, "sync_exposed"])
def test_time_of_a_rank_that_died_is_a_gap_unless_it_said_where_it_stood(tmp_path, stood):
    builder = RunBuilder(tmp_path / "run")
    builder.write()
    path = tmp_path / "run/nodes/node2/rank1.1.steps.jsonl"
    path.unlink()
    builder.write_rank(1, "node2", steps=10, end=False)
    if stood:
        builder.append(path, [{"kind": "stall", "category": stood, "step": 10, "idle": 5.0}])
    accounting = analyse(tmp_path / "run").accounting
    died = next(time for time in accounting.ranks if time.rank == 1)
    assert died.seconds["start_stop"] == pytest.approx(START)
    untold = builder.wall - START - 10 * sum(builder.step.values())
    assert died.gap == pytest.approx(0.0 if stood else untold)
    if stood:
        assert died.seconds[stood] == pytest.approx(10 * builder.step[stood] + untold)


def test_a_rank_that_never_began_was_starting_all_the_time(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.write()
    for path in (tmp_path / "run/nodes").glob("*/*.steps.jsonl"):
        path.unlink()
    died = {"exit_code": 1, "mono_end": GUARD + 9.0}
    path = tmp_path / "run/nodes/node1/machine.1.jsonl"
    change_lines(path, lambda line: {**line, **died} if line["kind"] == "exit" else line)
    accounting = analyse(tmp_path / "run").accounting
    assert accounting.ranks[0].seconds["start_stop"] == pytest.approx(9.0)


def test_attempts_are_summed_and_their_nodes_kept(tmp_path):
    run = RunBuilder(tmp_path / "run")
    run.write()
    second = RunBuilder(tmp_path / "run", nodes=3)
    second.attempt = 2
    for rank, host in enumerate(second.hosts):
        second.write_rank(rank, host)
        second.write_machine(rank, host)
        second.write_exit(rank, host)
    path = tmp_path / "run/attempts.json"
    (first,) = json.loads(path.read_text())["attempts"]
    more = {"attempt": 2, "nodes": second.hosts, "world_size": 3}
    change(path, attempts=[first, {**first, **more}])
    summary = analyse(tmp_path / "run").summary
    assert (summary["nodes"], summary["world_size"]) == (3, 3)
    assert [len(entry["nodes"]) for entry in summary["attempts"]] == [4, 3]
    assert summary["wall_seconds"] == pytest.approx(2 * run.wall, abs=0.01)
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_seconds"], rel=0.001)


def test_first_cause_of_a_failed_run_comes_with_the_last_lines_of_its_log(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.write()
    # A figure that JSON does not have is not passed on.
    cause = {"host": "node3", "rank": 2, "exit_code": 1, "message": "no space", "loss": math.nan}
    builder.write_control(status="failed", first_cause=cause)
    log = tmp_path / "run/nodes/node3/rank2.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)) + "OSError: No space left\n")
    assert main([str(tmp_path / "run")]) == 0
    text = (tmp_path / "run/summary.json").read_text()
    summary = json.loads(text)
    assert summary["status"] == "failed" and "NaN" not in text
    lines = summary["first_cause"]["last_lines"]
    assert (len(lines), lines[-1]) == (12, "OSError: No space left")


def test_a_run_that_finished_names_who_printed_an_exception_last(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.write()
    cause = {"host": "node3", "rank": 2, "message": "node3 ended with 0 after it printed X: y"}
    builder.write_control(first_cause=cause)
    analysis = analyse(tmp_path / "run")
    assert analysis.summary["first_cause"]["message"] == cause["message"]
    assert f"The run finished, but {cause['message']}" in " ".join(text_of(analysis).split())


def test_a_file_that_is_missing_is_named(tmp_path):
    run = RunBuilder(tmp_path / "run").write()
    (run / "plan.json").unlink()
    assert main([str(run)]) == 0
    assert "plan.json is missing" in (run / "report.txt").read_text()


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
        end = {"kind": "end", "mono": 110.0, "status": "failed"}
        builder.append(f"nodes/node1/rank0.{builder.attempt}.steps.jsonl", [end])
    assert main([str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "The run failed on node1, rank 0" in text
    assert "2. node1; started by hand" in text


def test_a_run_is_found_by_the_path_of_its_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["latest"]) == 2
    RunBuilder(tmp_path / "runs/one").write()
    (tmp_path / "runs/latest").symlink_to("one")
    places = ("one", "runs/one", "runs/one/", "runs/one/report.html", f"{tmp_path}/runs/one")
    for name in ("latest", *places):
        assert main([name]) == 0, name


def test_steps_whose_gradients_nobody_summed_are_the_first_sentence(tmp_path):
    run = RunBuilder(tmp_path / "run").write()
    assert "no gradients" not in text_of(analyse(run))
    path = run / "nodes/node2/rank1.1.steps.jsonl"
    change_lines(path, lambda line: line["kind"] == "step" and {**line, "unsummed": line["step"]})
    assert "VERDICT\n  DDP summed no gradients in 240 consecutive" in text_of(analyse(run))
    change_lines(path, lambda line: {**line, "unsummed": 0})
    end = {"only_received": 46_800_000}
    machine = run / "nodes/node2/machine.1.jsonl"
    change_lines(machine, lambda line: line["kind"] == "exit" and {**line, **end})
    assert "VERDICT\n  node2: its ranks received 46.8 MB" in text_of(analyse(run))


def test_a_script_that_timed_no_steps_has_its_machines_and_a_sentence(tmp_path):
    run = RunBuilder(tmp_path / "run", gpu=True, mounts=1.0).write()
    for path in run.glob("nodes/*/*.steps.jsonl"):
        path.unlink()
    change(run / "plan.json", program={**SCRIPT, "command": "train.py --lr '0.1 2'"})
    analysis = analyse(run)
    assert {use.host for use in analysis.uses.networks} == {use.host for use in analysis.uses.disks}
    assert len(analysis.uses.networks) == len(analysis.memory) == 4
    assert analysis.memory[0].peak_memory == 2e9
    assert not analysis.notes and not analysis.advice.remedies and analysis.verdict is UNTIMED
    text, page = text_of(analysis), page_of(analysis)
    assert "  train.py --lr '0.1 2', 4 nodes (4 ranks)\n" in text
    assert UNTIMED.headline in " ".join(text.split()) and UNTIMED.headline in page
    assert "WHERE THE TIME WENT" not in text and "images/s" not in text
    assert "Where the time went" not in page and max(map(len, text.splitlines())) <= 80
    for path in run.glob("nodes/*/machine.1.jsonl"):
        change_lines(path, lambda line: line["kind"] == "exit" and {"kind": "cut off"})
    assert analyse(run).memory == []


def validated_on_rank_0(folder, seconds, category):
    """A script's run of four epochs: rank 0 works so long before each but the first, and the other
    rank waits for it in the first sum."""
    run = RunBuilder(folder, nodes=2, epochs=4)
    run.write()
    change(folder / "plan.json", program=SCRIPT)
    run.write_control(wall_seconds=run.wall + 3 * seconds)
    change(folder / "plan.json", program=SCRIPT)
    for rank, host, spent in ((0, "node1", category), (1, "node2", "sync_exposed")):

        def delay(line, spent=spent):
            if line["kind"] == "step" and line["step"] in (61, 121, 181):
                line["seconds"][spent] = line["seconds"].get(spent, 0.0) + seconds
                line["longest"] += seconds
            return line

        change_lines(folder / f"nodes/{host}/rank{rank}.1.steps.jsonl", delay)
    return analyse(folder)


def test_what_one_rank_does_between_epochs_is_no_machine_s_fault(tmp_path):
    """Nor the others' wait for it, which is charged to it."""
    usual = validated_on_rank_0(tmp_path / "usual", 0.0, "between_epochs")
    found = validated_on_rank_0(tmp_path / "run", 8.0, "between_epochs")
    assert (usual.summary["bottleneck"], found.summary["bottleneck"]) == ("compute", "rank_work")
    assert found.summary["images_per_second"] == usual.summary["images_per_second"]
    spent = found.summary["seconds"]
    assert spent["between_epochs"] == pytest.approx(24.0)
    assert spent["sync_exposed"] == pytest.approx(usual.summary["seconds"]["sync_exposed"])
    assert {rank.seconds["between_epochs"] for rank in found.accounting.ranks} == {24.0}
    (remedy,) = [
        one
        for one in found.summary["advice"]
        if one["change"].startswith("do the work of one rank")
    ]
    assert remedy["predicted_images_per_second"] > 1.2 * found.advice.images_per_second
    assert not any("node1" in one["change"] for one in found.summary["advice"])
    assert "Rank 0 spends 8.00 s between epochs" in text_of(found)
    # Records of before, which have no such category, and work within an epoch.
    old = validated_on_rank_0(tmp_path / "old", 8.0, "other")
    assert old.summary["bottleneck"] == "rank_work"
    assert not any("node1" in one["change"] for one in old.summary["advice"])


def test_records_that_contradict_each_other_are_named_and_not_shown(tmp_path):
    run = RunBuilder(tmp_path / "run", nodes=2)
    run.write()
    assert " in all" in text_of(analyse(tmp_path / "run"))
    run.write_control(wall_seconds=run.wall / 2)
    text = " ".join(text_of(analyse(tmp_path / "run")).split())
    assert "nodes/node1/rank0.1.steps.jsonl" in text and "The report shows neither." in text
    assert " in all" not in text and "start and stop" not in text


def test_what_a_program_calls_its_samples_changes_no_path_and_no_message(tmp_path):
    run = RunBuilder(tmp_path / "run", nodes=2)
    run.write()
    cause = {"host": "node1", "rank": 0, "message": "no file /data/images/cat/1.png in image.tar"}
    run.write_control(status="failed", first_cause=cause)
    change(tmp_path / "run/plan.json", program=SCRIPT)
    analysis = analyse(tmp_path / "run")
    for text in (text_of(analysis), page_of(analysis)):
        assert "no file /data/images/cat/1.png in image.tar" in " ".join(text.split())
        assert "waiting for samples" in text and "waiting for images" not in text


def test_steps_of_an_unknown_number_of_samples_give_no_speed(tmp_path):
    folder = RunBuilder(tmp_path / "run", nodes=1).write()
    change_lines(folder / "nodes/node1/rank0.1.steps.jsonl", lambda line: {**line, "samples": None})
    analysis = analyse(folder)
    assert analysis.summary["steps"] == 240 and analysis.summary["images_per_second"] is None
    assert "timings.step(samples=N)" in " ".join(text_of(analysis).split())


def test_an_evaluation_of_some_of_the_images_says_of_how_many(tmp_path):
    folder = RunBuilder(tmp_path / "run", nodes=1).write()
    path = folder / "nodes/node1/rank0.1.steps.jsonl"
    change_lines(path, lambda line: {**line, "samples": 400} if "top1" in line else line)
    assert "over 400 of 1000 images" in " ".join(text_of(analyse(folder)).split())
