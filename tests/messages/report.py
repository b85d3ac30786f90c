"""What a report says: verdict and advice of each cause, a whole report, a plan, a comparison."""

import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path

from report.__main__ import main
from report.analysis import analyse
from report.hang import Standing, describe_silent_ranks
from report.links import Links, Pair, links_sentences
from report.read import read_run
from report.run_view import describe_unequal_batches, not_finite_sentences
from report.verdict import headline_of
from tests.unit.report.report_runs import (
    BOTTLENECKS,
    SCRIPT,
    WARMED,
    RunBuilder,
    change,
    change_lines,
    text_of,
)

OPTIONS = {"batch": 32, "model": "resnet50", "data": "imagenet", "trainer": ["--lr=1"]}
OF_SCRIPT = {"inventory": "own.ini", "script": "/p/train.py", "nodes": 4, "trainer": ["--lr=1"]}
LOCAL = {"connection": "local"}
# Runs of which more is said than of their cause.
OTHERS = {
    "a card that promises more": {**BOTTLENECKS["network"], "speed_mbit": 10000},
    "late on one machine": {
        "step": {"sync_exposed": 0.31},
        "by_rank": {2: {"data": 0.3, "sync_exposed": 0.01}},
    },
    "a share of one of them": {
        "step": {"data": 1.5},
        "speed_mbit": 1000,
        "mounts": 2.1,
        "share_host": "node1",
    },
    "a demo": {**BOTTLENECKS["network"], **LOCAL},
    "a demo's straggler": {**BOTTLENECKS["straggler"], **LOCAL},
    "one machine": {**BOTTLENECKS["network"], "nodes": 1, "sent": 0.0},
    "oversubscribed": {"machine": {"busy": 7.9, "ran": 3.0, "waited": 4.0}},
    "a demo, oversubscribed": {
        "machine": {"busy": 8.0, "ran": 1.0, "waited": 4.0},
        "nodes": 9,
        **LOCAL,
    },
    "parts by speed": {"parts": [38, 38, 16, 36]},
    "warm-up": {"steps": 400, "exact": 100, **WARMED},
    "all warm-up": {"exact": 240, **WARMED},
    "network and saving": {"step": {"sync_exposed": 0.6}, "speed_mbit": 1000, "checkpoint": 30.0},
    "too short": {"steps": 20},
    "before one pass": {"steps": 40, "epochs": 1, "steps_per_epoch": 80},
    "steps that still change": {"steps": 60, "slow_steps": 20},
}


WAITS = [Standing(f"node{n + 1}", n, 41.0, "is at train.py:39, in main", 4712, 4) for n in range(3)]
# Silent ranks of a script.
HANGS = {
    "a sum by bucket": [*WAITS, Standing("node4", 3, 40.0, "is at loader.py:88, in load", 4710, 2)],
    "a sum by backward pass": [
        Standing("node1", 0, 150.0, "is at train.py:39, in main", 31),
        Standing("node2", 1, 150.0, "waits in barrier at train.py:52, in main", 30),
        *(Standing(f"node{n}", n - 1, 99.0, "is at train.py:8, in load", 30) for n in (3, 4)),
    ],
    "nothing is counted": [Standing("node1", 0, 25.0, "waits in barrier at train.py:9, in main")],
}


def linked(rates, mtu=1500.0, speed=1000.0, ring=0.0):
    """Machines a, b, c, ... with {"ab": Mbit/s} for each pair."""
    hosts = tuple(sorted({*"".join(rates)}))
    pairs = tuple(Pair((a, b), rate, rate, 0.1, 0.2, mtu) for (a, b), rate in rates.items())
    around = (ring or min(rates.values()),) * len(hosts)
    mtus, speeds = (dict.fromkeys(hosts, figure) for figure in (1500.0, speed))
    return Links(hosts, pairs, around, mtus, speeds)


FAST = {"ab": 941.0, "ac": 941.0, "ad": 941.0, "bc": 941.0, "bd": 941.0, "cd": 930.0}
LINKS = {
    "good": linked(FAST, ring=700.0),
    "slow cable": linked({**FAST, "ac": 94.0, "bc": 94.0, "cd": 95.0}),
    "slow cards": linked({"ab": 94.0}, speed=100.0),
    "slow machine": linked({**FAST, "ac": 400.0, "bc": 410.0, "cd": 400.0}),
    "two switches": linked({**FAST, "ad": 300.0}),
    "short packets": linked({"ab": 941.0}, mtu=1400.0),
    "shared switch": linked(FAST, ring=310.0),
}


def lines_of(folder):
    """Verdict, advice with the first command, and what is said of parts."""
    done = analyse(folder)
    if done.too_short:
        return (done.too_short.headline, done.too_short.command)
    lines = [done.verdict.headline, *done.verdict.because, describe_unequal_batches(done.step)]
    for place, one in enumerate(done.summary["advice"]):
        gain = one["predicted_images_per_second"] / done.advice.images_per_second
        lines.append(f"{gain:.2f} x: {one['change']}{' ($)' if one['costs_money'] else ''}")
        if one["command"] and (place == 0 or one["change"].endswith("together")):
            lines.append(f"  {one['command']}")
    return lines


def printed(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main([str(word) for word in words])
    return out.getvalue().partition("\nComparison: ")[0].rstrip()


def failed(folder):
    """A run with every kind of file, whose second attempt failed, and of which one machine left
    nothing."""
    run = RunBuilder(folder, gpu=True, mounts=3.0, **BOTTLENECKS["straggler"])
    run.attempt = 2
    run.write()
    cause = {"host": "node3", "rank": 2, "message": "node3 has no space left", "remedy": "Delete."}
    more = {"first_cause": {**cause, "last_lines": ["a line", "another"]}, "reason": "once more"}
    run.write_control(status="failed", attempt=2, **more)
    first = {"attempt": 1, "nodes": run.hosts, "wall_seconds": 9.0, "status": "failed"}
    (last,) = json.loads((folder / "attempts.json").read_text())["attempts"]
    change(folder / "attempts.json", attempts=[{**first, "reason": "first attempt"}, last])
    shutil.rmtree(folder / "nodes/node4")
    return folder


def render():
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        return {code: "\n".join(filter(None, lines)) for code, lines in sentences(Path())}


def sentences(place):
    """(code, lines), without those that another run said before."""
    before = set()
    for name, settings in {**BOTTLENECKS, **OTHERS}.items():
        known = {"options": {"optimizer": "sgd"}, **settings}
        plan = RunBuilder(place / name, **known).write() / "plan.json"
        change(plan, options=OPTIONS)
        lines = [*lines_of(plan.parent)]
        if name in BOTTLENECKS or settings.get("exact") == 240:
            plan = RunBuilder(place / f"{name} in a script", **settings).write() / "plan.json"
            change(plan, options=OF_SCRIPT, program=SCRIPT)
            lines += [f"In a script: {one}" for one in lines_of(plan.parent) if one not in lines]
        yield name, [line for line in lines if line not in before]
        before.update(lines)
    lacking = RunBuilder(place / "lacking", **BOTTLENECKS["data_decode"]).write()
    for path in lacking.glob("nodes/*/machine.1.jsonl"):
        change_lines(path, lambda line: {n: v for n, v in line.items() if n != "disks"})
    yield "a signal is missing", [line for line in lines_of(lacking) if line not in before]
    yield "a whole report", [text_of(analyse(failed(place / "failed"))).rstrip()]
    for status in ("stopped", "running", "failed"):
        yield status, [headline_of(status, None)]
    yield "failed without a message", [headline_of("failed", {"host": "a", "rank": 1})]
    steps = place / "a demo/nodes/node2/rank1.1.steps.jsonl"
    change_lines(
        steps, lambda line: line.get("step") == 37 and {**line, "not_finite": {"loss": 37}}
    )
    yield "a loss that became NaN", not_finite_sentences(read_run(place / "a demo"))
    for case, links in LINKS.items():
        yield f"links: {case}", [*links_sentences(links)]
    for case, silent_ranks in HANGS.items():
        yield f"hang: {case}", [*describe_silent_ranks(silent_ranks, 4, True).values()]
    yield "a plan on paper", [printed("plan", "--gpu=2080ti", "--link=1gbit", "--sync=ef:255")]
    yield "a plan of a run", [printed("plan", "--run=network", "--runs=.", "--nodes=2")]
    yield "a comparison", [printed("compare", "network", "warm-up", "a demo")]
