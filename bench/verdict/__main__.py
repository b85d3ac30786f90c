"""Whether the report's verdict is right: forty trials on four machines of a lab, an hour and a half
alone on this machine. One JSON line a trial in runs/verdicts.jsonl; broken off, it goes on where it
was.

python -m bench.verdict                  # all that have no line yet
python -m bench.verdict --only rate-1,nothing-1
python -m bench.verdict --tree DIR --results FILE    # another checkout's make train and report
python -m bench.verdict --seed WORD      # forty trials that the word draws (blind.py)
python -m bench.verdict --table          # results into bench/verdict.md; also with --seed
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.verdict import blind, tables
from bench.verdict.blind import STEPS, Blind, answers
from bench.verdict.cluster import HERE, Cluster, busy_cores, busy_since, processor_seconds, run
from bench.verdict.faults import Faults
from bench.verdict.recorded import make_recorded
from bench.verdict.trials import (
    BATCH,
    NODES,
    REMEDIES,
    Line,
    Trial,
    all_trials,
    base_of,
    find_remedy,
    grown_cause,
    live_answer,
    report_answer,
)
from contract.result_lines import WANTED, read_results
from tests.lab.chaos_run import CHECKOUT, environment, read
from tests.unit.launcher.guard_client import alive

LIVE, REST = 60.0, 4.0  # seconds of a trial until `make status` is asked, and after that
START, END = 180, 180  # seconds in which a run begins to step, and ends
QUIET = 0.15  # of this machine's processors, before a trial
# Short steps, that nothing but the fault makes longer.
TRAINER = (
    "--device cpu --augment none --lr 0.0001 --momentum 0 --weight_decay 0 --warmup_epochs 0 "
    "--image_size 32 --workers 1 --bucket_mb 1 --sync_warmup 0"
)
Lines = dict[str, Line]  # by trial
BROKEN = (AssertionError, OSError, ValueError, subprocess.SubprocessError)  # a run that fails
ADVICE = ("change", "predicted_images_per_second")  # what is kept of an advice


class TrialRun:
    """A run of a tree's `make train`, for one trial; `words` and `args` differ from its own."""

    def __init__(self, cluster: Cluster, tree: Path, trial: Trial | Blind, words: Line, args: Line):
        self.cluster, self.tree, self.trial = cluster, tree, trial
        self.mark = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
        root = trial.fault.root
        is_share = trial.variant.is_share or trial.fault.right == "data_share"
        cluster.prepare(root, is_share, trial.usual)
        typed: dict[str, Any] = {"NODES": len(NODES), **words}
        if trial.variant.script:
            own = {"--data": f"{root}/tiny", "--batch": BATCH, "--workers": 1, **args}
            typed |= {"SCRIPT": HERE / "script.py", "FOLDER": HERE, "ARGS": joined(own)}
        else:
            usual = f"{TRAINER} {trial.fault.args}".split()
            own = dict(zip(usual[::2], usual[1::2])) | args
            typed = {"BATCH": BATCH, "EPOCHS": 9, "PRECISION": "fp32", "BALANCE": "off", **typed}
            model = HERE / "workload.py"
            typed |= {"DATA": "tiny", "MODEL": f"{model}:sleeper", "ARGS": joined(own)}
        typed["INVENTORY"] = cluster.inventory(root, self.mark)
        self.log = cluster.scratch / f"{trial.name}.log"
        with self.log.open("w") as log:
            argv = ["env", f"--chdir={tree}", f"{WANTED}=1"]
            argv += [".venv/bin/python", "-m", "launcher", "train"]
            argv += [f"{name}={value}" for name, value in typed.items()]
            argv = cluster.lab.argv("exec", "--", *argv)
            self.process = subprocess.Popen(argv, cwd=CHECKOUT, stdout=log, stderr=log)

    def __enter__(self) -> TrialRun:
        return self

    def last_output(self) -> str:
        return self.log.read_text()[-3000:]

    @property
    def folder(self) -> Path:
        return self.tree / "runs" / read_results(self.log.read_text()).get("run", "none")

    def steps(self, node: int) -> list[Line]:
        """The lines of a machine's rank, the start line first."""
        files = [*self.folder.glob(f"nodes/node{node}/rank*.1.steps.jsonl")]
        text = files[0].read_text() if files else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def speed(self) -> float:
        """Images a second of all ranks from the first step to the last, with all that was between
        them but evaluation."""
        images, seconds = 0.0, []
        for lines in filter(None, map(self.steps, NODES)):
            places = [place for place, line in enumerate(lines) if line["kind"] == "step"]
            within = lines[places[0] + 1 : places[-1] + 1]
            images += sum(line["samples"] for line in within if line["kind"] == "step")
            spent = [line["seconds"] for line in within if line["kind"] in ("step", "checkpoint")]
            seconds.append(sum(sum(times.values()) for times in spent))
        return round(images / statistics.fmean(seconds), 2)

    def begin(self) -> dict[int, int]:
        """Waits for its third step. {machine: its rank's process}."""
        until = time.monotonic() + START
        while len(self.steps(1)) < 4:
            assert self.process.poll() is None and time.monotonic() < until, self.last_output()
            time.sleep(0.2)
        return {node: pid for pid in alive(self.mark) for node in NODES if self.is_rank(pid, node)}

    def is_rank(self, pid: int, node: int) -> bool:
        """Whether a process of this machine is the one that wrote the machine's start line."""
        numbers = re.search(r"^NSpid:(.*)", read(pid, "status"), re.M)
        own = self.steps(node)[:1] if f"TANDEM_NODE=node{node}" in environment(pid) else []
        return bool(own and numbers and numbers[1].split()[-1] == str(own[0]["pid"]))

    def idle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.cluster.count_shares()
            time.sleep(0.5)

    def read_json(self, *words: str) -> Any:
        """What a command of the tree prints as JSON."""
        return json.loads(run(".venv/bin/python", "-m", *words, "JSON=1", cwd=self.tree))

    def stop(self) -> None:
        """As `kill` of the controller does. (What a shell started in the background hears no
        Ctrl-C.)"""
        if self.process.poll() is None:
            os.kill(int((self.folder / "controller.pid").read_text().split()[0]), signal.SIGTERM)
        self.process.wait(END)

    def __exit__(self, *_: object) -> None:
        """Ends what is left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in alive(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def joined(options: Line) -> str:
    return shlex.join(str(word) for pair in options.items() for word in pair)


def carry_out(running: TrialRun, live: float) -> dict[str, Any]:
    """What was seen in one run."""
    ranks = running.begin()
    running.idle(running.trial.fault.after)
    before = processor_seconds()
    fault = (running.trial.fault.method, running.trial.variant.words)
    with Faults(running.cluster, ranks).make(fault):
        running.idle(live)
        status = running.read_json("launcher", "status", f"RUN={running.folder.name}")
        busy = round(busy_since(before), 3)
        running.idle(REST)
        running.stop()  # with the fault, as a person would
    return {"live": live_answer(status), "busy": busy, **report_of(running)}


def carry_out_blind(running: TrialRun, trial: Blind) -> Line:
    """What was seen in one run that a seed drew."""
    ranks, before = running.begin(), processor_seconds()
    running.idle(trial.begins)
    since = time.time()
    with contextlib.ExitStack() as stack:
        stack.enter_context(Faults(running.cluster, ranks).make(*trial.faults))
        if trial.ends is not None:
            running.idle(trial.ends)
            stack.close()
            since = time.time()
        running.idle(STEPS - (trial.ends or trial.begins))
        until, busy = time.time(), round(busy_since(before), 3)
        running.stop()  # with the fault, as a person would
    live = list(answers(running.folder, since, until))
    return {**report_of(running), "busy": busy, "live": live}


def report_of(running: TrialRun) -> dict[str, Any]:
    summary = running.read_json("report", f"RUN={running.folder.name}")
    attempt = json.loads((running.folder / "attempts.json").read_text())["attempts"][-1]
    text = (running.folder / "report.txt").read_text()
    words = " ".join(text.partition("VERDICT\n")[2].partition("\n\n")[0].split())
    return {
        "run": running.folder.name,
        "report": report_answer(summary, attempt.get("silent_ranks", [])),
        "runner_up": summary["runner_up"],
        "verdict": words.rpartition("again as a new run. ")[2][:300],
        "accounted": round(sum(summary["seconds"].values()) / summary["wall_seconds"], 4),
        "images_per_second": summary["images_per_second"],
        "advice": [{key: entry[key] for key in ADVICE} for entry in summary["advice"]],
    }


def compared(tree: Path, base: str, name: str) -> str:
    """The cause that `make compare` shows to have grown most."""
    words = ("report", "compare", f"RUNS={base} {name}", "JSON=1")
    sides = json.loads(run(".venv/bin/python", "-m", *words, cwd=tree))["runs"]
    return grown_cause(sides[1]["changes"])


def with_remedy(trial: Trial, advice: list[Line]) -> dict[str, Any] | None:
    """What the report predicted of this remedy, and what is typed for it; None without it."""
    found, way = find_remedy(trial.remedy, advice), REMEDIES[trial.remedy]
    if found is None:
        return None
    entry, value = found
    is_option = not way.variable or (trial.variant.script and trial.remedy != "NODES")
    typed = {"args": {way.option: value}} if is_option else {"words": {way.variable: value}}
    return {"value": value, "predicted": entry["predicted_images_per_second"], **typed}


def try_blind(cluster: Cluster, trial: Blind, options: argparse.Namespace, _: Lines) -> Line:
    rules = run("git", "describe", "--always", "--dirty", "--abbrev=12", cwd=CHECKOUT).strip()
    line = {"trial": trial.name, "drawn": trial._asdict(), "commit": rules}
    try:
        with TrialRun(cluster, options.tree, trial, {"NODES": trial.nodes}, {}) as running:
            return {**line, **carry_out_blind(running, trial)}
    except BROKEN as error:
        return {**line, "broken": f"{type(error).__name__}: {error}"[-1500:]}


def try_one(cluster: Cluster, trial: Trial, options: argparse.Namespace, known: Lines) -> Line:
    line: dict[str, Any] = {"trial": trial.name, "unix": round(time.time())}
    remedy: dict[str, Any] | None = {}
    try:
        if not trial.fault.method:
            return {**line, **make_recorded(trial.kind, cluster.scratch)}
        if trial.remedy:
            first = known.get(trial.name.partition("+")[0], {})
            assert "advice" in first, "the trial itself has no line yet"
            remedy = with_remedy(trial, first["advice"])
            if remedy is None:
                return line
        more = {key: remedy.pop(key, {}) for key in ("words", "args")}
        with TrialRun(cluster, options.tree, trial, **more) as running:
            line |= {**carry_out(running, options.live), **remedy}
            if trial.remedy:
                line["came"] = running.speed()
        base = known.get(base_of(trial.variant.script))
        if base and trial.fault.compared and not trial.remedy:
            line["grew"] = compared(options.tree, base["run"], line["run"])
    except BROKEN as error:
        line["broken"] = f"{type(error).__name__}: {error}"[-1500:]
    return line


def wait_for_quiet(anyway: bool) -> float:
    """Returns when nothing else keeps this machine's processors busy: how much still does."""
    while (busy := busy_cores(3)) > QUIET and not anyway:
        print(f"{100 * busy:.0f} % of the processors are busy: waiting", flush=True)
        time.sleep(10)
    return round(busy, 3)


def carry_out_all(options: argparse.Namespace) -> None:
    known = {line["trial"]: line for line in tables.read(options.results)}
    whole = {name for name, line in known.items() if "broken" not in line}
    trials: Sequence[Trial | Blind] = (
        blind.draw(options.seed)
        if options.seed
        else [each for trial in all_trials() for each in (trial, *trial.repeats)]
    )
    left = [trial for trial in trials if trial.name not in whole]
    left = [trial for trial in left if trial.name in (options.only or [trial.name])]
    if not left:
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with Cluster() as cluster:
        for place, trial in enumerate(left, 1):
            busy, began = wait_for_quiet(options.anyway), time.monotonic()
            attempt: Any = try_blind if options.seed else try_one
            line = {**attempt(cluster, trial, options, known), "busy_before": busy}
            known[trial.name] = {**line, "seconds": round(time.monotonic() - began)}
            with options.results.open("a") as file:
                file.write(json.dumps(known[trial.name]) + "\n")
            words = line.get("report") if options.seed else tables.words_of(trial, line)
            print(f"{place} of {len(left)}: {words}", flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench.verdict")
    parser.add_argument("--tree", type=Path, default=CHECKOUT, help="whose make train and report")
    parser.add_argument("--results", type=Path, help="default: runs/verdicts[-SEED].jsonl")
    parser.add_argument("--seed", help="draw forty other trials by this word")
    parser.add_argument("--only", type=lambda text: text.split(","), help="trials by their names")
    parser.add_argument("--anyway", action="store_true", help="though the machine is busy")
    seconds = "of a trial until `make status` is asked"
    parser.add_argument("--live", type=float, default=LIVE, help=f"seconds {seconds}")
    parser.add_argument("--table", action="store_true", help="write bench/verdict.md, run nothing")
    options = parser.parse_args(argv)
    name = f"verdicts-{options.seed}.jsonl" if options.seed else "verdicts.jsonl"
    options.tree = options.tree.resolve()
    options.results = (options.results or CHECKOUT / "runs" / name).resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not options.table:
        carry_out_all(options)
    lines = tables.read(options.results)
    if options.seed:
        text = blind.table(options.seed, lines)
        tables.write_blind(options.seed, text) if options.table else print(text)
        return 0
    if options.table:
        tables.write(lines)
    return tables.conclude(lines) if not options.only else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
