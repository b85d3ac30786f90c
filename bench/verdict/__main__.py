"""Test the report's verdict by forty trials on four machines of a lab: an hour and a half, in which
nothing else may run on this machine. Each trial adds a JSON line to runs/verdicts.jsonl, and a
command that was stopped continues there.

python -m bench.verdict                  # all trials without a line
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

LIVE, REST = 60.0, 4.0  # seconds of a fault until `make status` is asked, and after that
START, END = 180, 180  # seconds that a run may take until its first steps, and until its end
QUIET = 0.15  # share of this machine's processors that may be busy before a trial
# Options that keep steps short, so that only the fault makes them longer.
TRAINER = (
    "--device cpu --augment none --lr 0.0001 --momentum 0 --weight_decay 0 --warmup_epochs 0 "
    "--image_size 32 --workers 1 --bucket_mb 1 --sync_warmup 0"
)
Lines = dict[str, Line]  # by name of the trial
BROKEN = (AssertionError, OSError, ValueError, subprocess.SubprocessError)  # a trial that fails
ADVICE = ("change", "predicted_images_per_second")  # the fields of an advice that a line keeps


class TrialRun:
    """A run of `make train` of the checkout `tree`, for one trial. `words`: variables of make,
    and `args`: options of the trainer or the script, that replace the usual ones of the trial."""

    def __init__(self, cluster: Cluster, tree: Path, trial: Trial | Blind, words: Line, args: Line):
        self.cluster, self.tree, self.trial = cluster, tree, trial
        self.mark = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"  # in each process's environment
        root = trial.fault.root
        is_share = trial.variant.is_share or trial.fault.right == "data_share"
        cluster.prepare(root, is_share, trial.usual)
        typed: dict[str, Any] = {"NODES": len(NODES), **words}
        if trial.variant.script:
            options = {"--data": f"{root}/tiny", "--batch": BATCH, "--workers": 1, **args}
            typed |= {"SCRIPT": HERE / "script.py", "FOLDER": HERE, "ARGS": joined(options)}
        else:
            usual = f"{TRAINER} {trial.fault.args}".split()
            options = dict(zip(usual[::2], usual[1::2])) | args
            typed = {"BATCH": BATCH, "EPOCHS": 9, "PRECISION": "fp32", "BALANCE": "off", **typed}
            model = HERE / "workload.py"
            typed |= {"DATA": "tiny", "MODEL": f"{model}:sleeper", "ARGS": joined(options)}
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
        """Return the lines that a machine's rank has recorded, the start line first."""
        files = [*self.folder.glob(f"nodes/node{node}/rank*.1.steps.jsonl")]
        text = files[0].read_text() if files else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def speed(self) -> float:
        """Return the images per second of all steps, with checkpoints, without evaluation."""
        images, seconds = 0.0, []
        for lines in filter(None, map(self.steps, NODES)):
            places = [place for place, line in enumerate(lines) if line["kind"] == "step"]
            within = lines[places[0] + 1 : places[-1] + 1]
            images += sum(line["samples"] for line in within if line["kind"] == "step")
            spent = [line["seconds"] for line in within if line["kind"] in ("step", "checkpoint")]
            seconds.append(sum(sum(times.values()) for times in spent))
        return round(images / statistics.fmean(seconds), 2)

    def begin(self) -> dict[int, int]:
        """Wait for the third step. Return {machine: process ID of its rank}."""
        until = time.monotonic() + START
        while len(self.steps(1)) < 4:  # a start line and three steps
            assert self.process.poll() is None and time.monotonic() < until, self.last_output()
            time.sleep(0.2)
        return {node: pid for pid in alive(self.mark) for node in NODES if self.is_rank(pid, node)}

    def is_rank(self, pid: int, node: int) -> bool:
        """Return whether a process wrote its machine's start line, which has the last of NSpid."""
        numbers = re.search(r"^NSpid:(.*)", read(pid, "status"), re.M)
        start = self.steps(node)[:1] if f"TANDEM_NODE=node{node}" in environment(pid) else []
        return bool(start and numbers and numbers[1].split()[-1] == str(start[0]["pid"]))

    def idle(self, seconds: float) -> None:
        """Wait, and keep the statistics of shares up to date."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.cluster.count_shares()
            time.sleep(0.5)

    def read_json(self, *words: str) -> Any:
        """Return what a command of the tree prints as JSON."""
        return json.loads(run(".venv/bin/python", "-m", *words, "JSON=1", cwd=self.tree))

    def stop(self) -> None:
        """Stop the run by SIGTERM. (What a shell starts in the background ignores Ctrl-C.)"""
        if self.process.poll() is None:
            os.kill(int((self.folder / "controller.pid").read_text().split()[0]), signal.SIGTERM)
        self.process.wait(END)

    def __exit__(self, *_: object) -> None:
        """Kill the processes that are left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in alive(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def joined(options: Line) -> str:
    return shlex.join(str(word) for pair in options.items() for word in pair)


def carry_out(running: TrialRun, live: float) -> dict[str, Any]:
    """Make a trial's fault for `live` seconds of its run. Return the fields of its line."""
    ranks = running.begin()
    running.idle(running.trial.fault.after)
    before = processor_seconds()
    fault = (running.trial.fault.method, running.trial.variant.words)
    with Faults(running.cluster, ranks).make(fault):
        running.idle(live)
        status = running.read_json("launcher", "status", f"RUN={running.folder.name}")
        busy = round(busy_since(before), 3)
        running.idle(REST)
        running.stop()  # while the fault is there, as a person would
    return {"live": live_answer(status), "busy": busy, **report_of(running)}


def carry_out_blind(running: TrialRun, trial: Blind) -> Line:
    """Make the faults of a trial that a seed drew. Return the fields of its line."""
    ranks, before = running.begin(), processor_seconds()
    running.idle(trial.begins)
    since = time.time()  # when the right answer of `make status` changes
    with contextlib.ExitStack() as stack:
        stack.enter_context(Faults(running.cluster, ranks).make(*trial.faults))
        if trial.ends is not None:
            running.idle(trial.ends)
            stack.close()
            since = time.time()
        running.idle(STEPS - (trial.ends or trial.begins))
        until, busy = time.time(), round(busy_since(before), 3)
        running.stop()  # while the fault is there, as a person would
    live = list(answers(running.folder, since, until))
    return {**report_of(running), "busy": busy, "live": live}


def report_of(running: TrialRun) -> dict[str, Any]:
    """Return the fields of a line that come from the report of a finished run."""
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
    """Return the cause that grew most from run `base` to run `name`, by `make compare`."""
    words = ("report", "compare", f"RUNS={base} {name}", "JSON=1")
    sides = json.loads(run(".venv/bin/python", "-m", *words, cwd=tree))["runs"]
    return grown_cause(sides[1]["changes"])


def with_remedy(trial: Trial, advice: list[Line]) -> dict[str, Any] | None:
    """Return {value, predicted, and `args` or `words` of TrialRun}. None if nothing was advised."""
    advised, way = find_remedy(trial.remedy, advice), REMEDIES[trial.remedy]
    if advised is None:
        return None
    entry, value = advised
    is_option = not way.variable or (trial.variant.script and trial.remedy != "NODES")
    typed = {"args": {way.option: value}} if is_option else {"words": {way.variable: value}}
    return {"value": value, "predicted": entry["predicted_images_per_second"], **typed}


def try_blind(cluster: Cluster, trial: Blind, options: argparse.Namespace, _: Lines) -> Line:
    """Run a trial that a seed drew. Return its line."""
    rules = run("git", "describe", "--always", "--dirty", "--abbrev=12", cwd=CHECKOUT).strip()
    line = {"trial": trial.name, "drawn": trial._asdict(), "commit": rules}
    try:
        with TrialRun(cluster, options.tree, trial, {"NODES": trial.nodes}, {}) as running:
            return {**line, **carry_out_blind(running, trial)}
    except BROKEN as error:
        return {**line, "broken": f"{type(error).__name__}: {error}"[-1500:]}


def try_one(cluster: Cluster, trial: Trial, options: argparse.Namespace, known: Lines) -> Line:
    """Run a trial. Return its line. `known`: the lines of the trials before it."""
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
        changes = {key: remedy.pop(key, {}) for key in ("words", "args")}
        with TrialRun(cluster, options.tree, trial, **changes) as running:
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
    """Wait until this machine's processors are quiet. Return the share that is still busy."""
    while (busy := busy_cores(3)) > QUIET and not anyway:
        print(f"{100 * busy:.0f} % of the processors are busy: waiting", flush=True)
        time.sleep(10)
    return round(busy, 3)


def carry_out_all(options: argparse.Namespace) -> None:
    """Run the trials that have no whole line yet, and append their lines to the results."""
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
