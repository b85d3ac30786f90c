"""The report of a run that goes on: of what guards told, by the whole way from a rank's lines."""

import json
import shutil
from types import SimpleNamespace

import pytest

from contract import validate
from contract.digests import MACHINE, ROW
from launcher.background import Spool
from launcher.node.digest import RankDigest
from launcher.watch import digests as watching
from report.__main__ import main
from report.analysis import analyse
from report.page import render_page
from report.text import heading_section, render_text
from tests.unit.report.report_runs import RunBuilder

SECOND = 1.0


def tell(run, seconds=None, swapped=0):
    """Puts digests of the first so many seconds in the place of what ranks and machines recorded,
    as the guards and the launcher of a run that goes on would."""
    nodes = sorted((run / "nodes").iterdir())
    plan = SimpleNamespace(
        attempt=1, world_size=len(nodes), nodes=[SimpleNamespace(host=one.name) for one in nodes]
    )
    lines = {
        node.name: [
            json.loads(line)
            for path in sorted(node.glob("rank*.steps.jsonl"))
            for line in path.read_text().splitlines()
        ]
        for node in nodes
    }
    shutil.rmtree(run / "nodes")
    spool = Spool()
    kept = watching.Digests(plan, run, spool)
    ranks, clocks = {}, {}
    for rank, (host, own) in enumerate(lines.items()):
        path = run / "nodes" / host / f"rank{rank}.steps.jsonl"
        path.parent.mkdir(parents=True)
        ranks[host] = RankDigest(path, rank, 1), own, path
        start = next(line for line in own if line["kind"] == "start")
        size = {"rank": rank, "cores": 8, "memory": 8 << 30}
        kept.begun(host, size, json.dumps(start).encode())
        clocks[host] = start["mono"]
    now = 0.0
    while any(own for _, own, _ in ranks.values()) and (seconds is None or now < seconds):
        now += SECOND
        for host, (digest, own, path) in ranks.items():
            with path.open("a") as file:
                spent = 0.0
                while own and spent < SECOND:
                    line = own.pop(0)
                    spent += sum(line.get("seconds", {}).values())
                    file.write(json.dumps(line) + "\n")
            row = digest.take()
            kept.take(host, frame(row, clocks[host] + now, swapped))
        for host in ranks:
            kept.write(host)
    spool.drain()
    for _, _, path in ranks.values():
        path.unlink()
    goes_on(run)


def goes_on(run):
    """As attempts.json is while a run goes on."""
    told = json.loads((run / "attempts.json").read_text())
    told["status"] = "running"
    for attempt in told["attempts"]:
        attempt.update(status="running", wall_seconds=None)
    (run / "attempts.json").write_text(json.dumps(told))


def frame(row, mono, swapped):
    """A digest as it is behind the border."""
    machine = {"cpu": 50.0, "memory": 40.0, "disk": [3.0, 900_000, 0], "card": [0, 10**8, 0, 0]}
    machine.update(swapped=[swapped, 0], stalled=swapped / 1e7, threads={"0": [mono / 2, mono / 4]})
    told = {"ranks": [row] if row else [], "machine": machine, "mono": mono}
    shape = {"ranks": [{"rank": validate.NATURAL, **ROW}], "mono": float, "machine": MACHINE}
    return validate.check(told, shape, "digest")


STEPS = {
    "network": {"sync_exposed": 0.9},
    "data": {"data": 0.5, "sync_exposed": 0.02},
    "compute": {"sync_exposed": 0.02},
}


def test_a_run_that_has_not_stepped_is_told_as_one(tmp_path):
    run = RunBuilder(tmp_path / "run").write()
    goes_on(run)
    for path in run.glob("nodes/*/*"):
        path.unlink()
    analysis = analyse(run)
    assert "  running before its first step" in heading_section(analysis)
    assert "0 ms" not in render_page(analysis)


@pytest.mark.parametrize("kind", STEPS)
def test_a_running_run_is_reported_as_it_is_in_the_end(tmp_path, kind):
    whole = RunBuilder(tmp_path / "run", nodes=2, step=STEPS[kind]).write()
    final = analyse(whole)
    tell(whole)
    told = analyse(whole)
    assert told.summary["status"] == "running"
    for name in ("images_per_second", "steps", "epochs", "final_top1"):
        assert told.summary[name] == pytest.approx(final.summary[name], rel=0.05), name
    for name, seconds in final.summary["seconds"].items():
        if name != "start_stop":
            assert told.summary["seconds"][name] == pytest.approx(seconds, rel=0.05, abs=0.01), name
    for name in ("network", "peers", "data", "seconds", "checkpoint"):
        assert getattr(told.step, name) == pytest.approx(
            getattr(final.step, name), rel=0.05, abs=2e-3
        )
    assert told.summary["bottleneck"].split("_")[0] == final.summary["bottleneck"].split("_")[0]
    assert [one.top1 for one in told.curve] == [one.top1 for one in final.curve]


def test_it_says_up_to_when_and_shows_the_whole_page(tmp_path, capsys):
    run = RunBuilder(tmp_path / "run", nodes=2).write()
    tell(run, seconds=40)
    assert main([str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The run has not ended, or what started it is gone; this is what it did up to" in said
    assert "No rank wrote" not in said and "DISKS" in said and "NETWORK" in said
    page = (run / "report.html").read_text()
    assert "Network card, sent" in page and "up to" in page
    assert all(len(line) <= 80 for line in render_text(analyse(run)).splitlines())


def test_machines_are_told_too(tmp_path):
    run = RunBuilder(tmp_path / "run", nodes=2).write()
    tell(run, swapped=5 * 10**6)
    use = analyse(run).machines[0]
    assert (use.cores, use.busy) == (8, pytest.approx(0.5))
    assert use.swapped_in == pytest.approx(5e6) and use.memory_pressure == pytest.approx(0.5)
    assert use.memory_used == pytest.approx(0.4) and use.queued == pytest.approx(1 / 3)
    assert analyse(run).summary["bottleneck"] == "memory_pressure"


def test_records_that_are_here_count_and_digests_only_where_there_are_none(tmp_path):
    run = RunBuilder(tmp_path / "run", nodes=2).write()
    before = analyse(run)
    (run / "nodes/node1/digest.jsonl").write_text('{"attempt": 1, "start": {}, "rank": 0}\n')
    assert analyse(run).summary == before.summary


LIE = {
    "attempt": 1, "unix": 1e18, "mono": 5.0, "world_size": 2,
    "ranks": {"0": {"step": 1 << 60, "epoch": 0, "samples": 1 << 60, "loss": None, "top1": None,
              **{name: {"steps": 1 << 60, "seconds": {"forward": 1e17}}
                 for name in ("first", "exact", "steady", "beside")}}},
    "least": {"exact": [1, 1e17], "steady": [1 << 60, 1.0]}, "machine": {}, "sums": {},
}  # fmt: skip


@pytest.mark.parametrize("line", [LIE, {**LIE, "least": {}}, {**LIE, "ranks": {"x": 1}}, [], {}])
def test_what_the_file_holds_is_not_trusted(tmp_path, line):
    run = RunBuilder(tmp_path / "run", nodes=2).write()
    shutil.rmtree(run / "nodes")
    path = run / "nodes/node1/digest.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(line) + "\n" + json.dumps({**LIE, "mono": 6.0}) + "\n[[[\n")
    assert main([str(run)]) == 0
