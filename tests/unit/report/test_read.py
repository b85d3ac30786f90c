"""The one reader: what it reads while a run goes on is what it reads at the end, and what one
machine writes is that machine's."""

import json
import shutil
from pathlib import Path

import pytest

from contract.text import three_digits
from report import page, read, text, usage
from report.__main__ import main
from report.analysis import analyse
from report.read import read_run
from report.run_view import view_of
from report.status import Follower, section_of
from tests.unit.report.report_runs import BOTTLENECKS, RunBuilder, change_lines


def grow(run, folder, parts):
    """Copy a run's records piece by piece, cut anywhere; yields after each piece."""
    folder.mkdir()
    for name in ("plan.json", "attempts.json"):
        shutil.copy(run / name, folder)
    files = sorted(path for path in run.glob("nodes/*/*") if path.suffix == ".jsonl")
    data = {path.relative_to(run): path.read_bytes() for path in files}
    for part in range(1, parts + 1):
        for name, whole in data.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(whole[: len(whole) * part // parts])
        yield


@pytest.mark.parametrize("case", ["network", "checkpoint", "data_decode"])
def test_what_was_read_as_it_came_is_what_the_report_says_at_the_end(case, tmp_path):
    """Speed, place and cause, to the last digit: status has kept its reader from the beginning."""
    run = RunBuilder(tmp_path / "run", **BOTTLENECKS[case]).write()
    follower = Follower(tmp_path / "copy")
    for _ in grow(run, tmp_path / "copy", 3):
        progress = follower.look()
    analysis = analyse(run)
    assert round(progress.images_per_second, 2) == analysis.summary["images_per_second"]
    assert progress.step == analysis.summary["steps"]
    assert progress.evaluated.top1 == analysis.summary["final_top1"]
    assert progress.judgement is not None
    if case != "data_decode":
        assert progress.cause == analysis.summary["bottleneck"]
    # NaN stands for a loss that was not read.
    assert repr(follower._reader.read().ranks) == repr(read_run(run).ranks)


def test_a_run_has_one_speed_wherever_it_is_shown(tmp_path, capsys, monkeypatch):
    name = "network"
    run = RunBuilder(tmp_path / "runs" / name, **BOTTLENECKS[name]).write()
    analysis = analyse(run)
    speed, top1 = (analysis.summary[of] for of in ("images_per_second", "final_top1"))
    view, progress = view_of(analysis), Follower(run).look()
    for shown in (text.render_text(view), page.render_page(view), lines_of(progress)):
        assert f"{three_digits(speed)} images/s" in shown or f">{three_digits(speed)}<" in shown
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, run.with_name("again"))
    assert main(["compare", "--json", name, "again"]) == 0
    first = json.loads(capsys.readouterr().out)["runs"][0]
    assert (first["images_per_second"], first["best_top1"]) == (speed, top1)


def lines_of(progress):
    return "\n".join(text.section_lines(section_of(progress, running=False)))


def test_the_last_evaluation_is_known_however_many_there_were(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "MOST_OTHER_LINES", 5)
    run = RunBuilder(tmp_path, epochs=40).write()
    for path in run.glob("nodes/*/rank*.jsonl"):
        change_lines(
            path, lambda line: {**line, "top1": line["epoch"] / 100} if "top5" in line else None
        )
    assert analyse(run).summary["final_top1"] == 0.39
    assert Follower(run).look().evaluated.epoch == 40


def test_lines_that_are_no_records_are_left_out_and_counted(tmp_path):
    run = RunBuilder(tmp_path, nodes=2).write()
    path = run / "nodes/node2/rank1.1.steps.jsonl"
    before = read_run(run).ranks[1].steps
    odd = [
        b"[]",
        b"{",
        b"\xff" * 9,
        b"x" * (1 << 21),
        b'{"kind": "step", "seconds": NaN, "step": []}',
    ]
    path.write_bytes(path.read_bytes() + b"\n".join(odd) + b"\n" + b'{"kind": "st')
    again = read_run(run)
    assert len(again.ranks[1].steps) == len(before) + 1  # the last: a step of no length
    assert [said for said in again.missing if "4 lines are not records" in said and "node2" in said]


def test_what_a_reader_did_not_foresee_is_one_machine_s(tmp_path, monkeypatch):
    run = RunBuilder(tmp_path, nodes=3, gpu=True, mounts=1.0).write()

    class Broken(usage.Loop):
        def add(self, mono, line):
            if self.host == "node2":
                raise ZeroDivisionError("planted")
            super().add(mono, line)

    monkeypatch.setattr(usage, "Loop", Broken)
    analysis = analyse(run)
    kinds = vars(analysis.uses).values()
    assert [{use.host for use in uses} for uses in kinds] == [{"node1", "node3"}] * 5
    assert [note for note in analysis.notes if "node2" in note and "planted" in note]


def test_steps_that_cannot_be_read_are_one_machine_s(tmp_path, monkeypatch):
    run = RunBuilder(tmp_path, nodes=3).write()
    fold = read.RankRecord.fold

    def broken(record, line):
        if record.host == "node2":
            raise RecursionError("planted")
        fold(record, line)

    monkeypatch.setattr(read.RankRecord, "fold", broken)
    analysis = analyse(run)
    assert analysis.summary["steps"] == 240
    assert [note for note in analysis.notes if "node2" in note and "planted" in note]


def test_a_line_of_several_steps_counts_as_so_many(tmp_path):
    """Of the same seconds, in lines of one step and of eight: the same figures."""
    run = RunBuilder(tmp_path / "run", nodes=2, step={"sync_exposed": 0.3}).write()
    joined = Path(shutil.copytree(run, tmp_path / "joined"))
    for path in joined.glob("nodes/*/*.steps.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in in_blocks(lines, 8)))
    one, other = analyse(run), analyse(joined)
    assert len(read_run(joined).ranks[0].steps) < len(read_run(run).ranks[0].steps) / 4
    for name in ("images_per_second", "steps", "epochs", "bottleneck", "bytes_sent_per_step"):
        assert one.summary[name] == pytest.approx(other.summary[name]) or name == "bottleneck"
    assert one.summary["bottleneck"] == other.summary["bottleneck"] == "network"
    for name in ("seconds", "network", "peers", "work", "measured_steps"):
        assert getattr(one.step, name) == pytest.approx(getattr(other.step, name))
    assert one.hundred_epochs == pytest.approx(other.hundred_epochs)


def in_blocks(lines, size):
    """The first step alone, then so many in a line, and none across a line of another kind."""
    block = []
    for line in [*lines, {"kind": "none"}]:
        step = line["kind"] == "step"
        if block and (not step or line["step"] % size == 1 or block[0]["step"] == 1):
            seconds = {
                name: sum(one["seconds"][name] for one in block) for name in block[0]["seconds"]
            }
            samples = sum(one["samples"] for one in block)
            yield {**block[-1], "steps": len(block), "samples": samples, "seconds": seconds}
            block = []
        if step:
            block.append(line)
        elif line["kind"] != "none":
            yield line


def test_waits_are_matched_where_lines_of_all_ranks_end(tmp_path):
    """Rank 0 waits in odd steps, rank 1 in even ones: the network is not what they wait for. In
    lines that end at other steps, between those that both have."""
    builder = RunBuilder(tmp_path, nodes=2, steps=40, epochs=1)
    builder.write()
    for rank, ends in ((0, range(2, 41)), (1, (3, 4, 7, 8, 20, 21, 40))):
        path = tmp_path / f"nodes/node{rank + 1}/rank{rank}.1.steps.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "step":
                line["seconds"]["sync_exposed"] = 0.2 if line["step"] % 2 != rank else 0.1
        first, block, out = True, [], []
        for line in lines:
            if line["kind"] != "step" or first:
                first = first and line["kind"] != "step"
                out.append(line)
                continue
            block.append(line)
            if line["step"] in ends:
                seconds = {n: sum(one["seconds"][n] for one in block) for n in line["seconds"]}
                out.append(
                    {**line, "steps": len(block), "samples": 32 * len(block)} | {"seconds": seconds}
                )
                block = []
        path.write_text("".join(json.dumps(line) + "\n" for line in out))
    step = analyse(tmp_path).step
    assert step.measured_steps == 39 and 0.1 <= step.network <= 0.15
    assert step.network + step.peers == pytest.approx(0.15, abs=0.002)


def test_an_attempt_whose_controller_died_took_as_long_as_its_guards(tmp_path):
    builder = RunBuilder(tmp_path)
    builder.write()
    builder.write_control(status="failed", wall_seconds=0.0)
    analysis = analyse(tmp_path)
    assert analysis.summary["wall_seconds"] == pytest.approx(builder.wall)
    assert abs(analysis.accounting.gap) < 0.05 * builder.wall
