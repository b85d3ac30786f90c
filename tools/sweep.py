"""`make sweep`: a grid of short runs, one after the other, and the comparison of what came of them.

Each cell of the grid is a `python -m launcher train` of its own, in rounds (A B C, A B C), so that
what changes in the meantime falls on all of them alike. What was done is in
runs/sweeps/<id>/sweep.json, rewritten after each run: whatever ends a sweep, RESUME goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from boundary.run_files import RunEnd, Sweep
from boundary.schema import Invalid, convert_what_fits, decode
from contract import seal, verbs
from contract.command_line import verb_words
from contract.errors import INTERRUPTED, STOPPED, UserError
from contract.options import ENTRIES
from contract.result_lines import WANTED, read_results
from contract.runs import RUNS, may_be_a_run
from contract.text import open_lock, pluralize, read_text, write_whole
from report.files import read_object
from tools.verbs import say

SWEEPS = Path(RUNS, "sweeps")
# What may have several values: everything that a run can differ in.
SWEPT = ("NODES", "MODEL", "DATA", "EPOCHS", "BATCH", "PRECISION", "SYNC", "ARGS")
# Of steps in a run without EPOCHS: the report judges from 20 steps on (report/measure.py), each of
# which may take 1.9 s.
SECONDS = 40
TRIAL = ("--trial", str(SECONDS), "--sync_warmup", "0")

Words = dict[str, str]  # NAME -> value, as they are typed after `make train`
State = dict[str, Any]  # sweep.json


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    try:
        words = verb_words("sweep", argv, "make sweep")
        folder = sweep_to_resume(words) if "resume" in words else new_sweep(words)
        with alone(folder):
            return carry_out(folder)
    except UserError as error:
        say(str(error))
        return UserError.code


def new_sweep(options: Mapping[str, Any]) -> Path:
    """The folder of a new sweep. Raises UserError for a grid that cannot be carried out."""
    if "sweep" not in options:
        raise UserError(
            "SWEEP is missing: `make help sweep` has an example; RESUME goes on with a sweep."
        )
    keys = {name: name.lower() for name in ("INVENTORY", *SWEPT)}
    base = {name: str(options[key]) for name, key in keys.items() if key in options}
    if "args" in options:
        base["ARGS"] = shlex.join(options["args"])
    rounds = options.get("rounds", 2)
    cells = [cell(base, words) for words in grid(options["sweep"], base)]
    folder = SWEEPS / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"a sweep began this very second: {folder}; type it again.") from None
    state = {"sweep": options["sweep"], "rounds": rounds, "cells": cells, "runs": []}
    write(folder, {**state, "seal": seal.seal(cells)})
    return folder


def grid(text: str, base: Mapping[str, str]) -> list[Words]:
    """The cells: each combination of values. Raises UserError."""
    axes: dict[str, list[str]] = {}
    for word in verbs.VARIABLES["ARGS"].read("SWEEP", text):
        name, equals, values = word.partition("=")
        if name not in SWEPT:
            raise UserError(unknown(name, values))
        if name in axes or (name in base and name != "ARGS"):
            raise UserError(f"{name} is given twice: leave one of them out.")
        if not equals:
            raise UserError(f"SWEEP has {word!r}: write {name}=one,other.")
        axes[name] = values_of(name, values)
    cells = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
    if len(cells) < 2:
        raise UserError(
            f"SWEEP={text!r} has {'one cell' if axes else 'no variable'}: nothing to compare; give "
            "a variable two values, as in SYNC=allreduce,ef:5."
        )
    return cells


def values_of(name: str, text: str) -> list[str]:
    """The values, separated by commas, or by | in ARGS and where a | occurs. Raises UserError."""
    values = text.split("|" if name == "ARGS" or "|" in text else ",")
    if name != "ARGS" and "" in values:
        raise UserError(f"SWEEP has {name}={text}, of which a value is empty.")
    if len(set(values)) < len(values):
        raise UserError(f"SWEEP has {name}={text}, of which a value is there twice.")
    return values


def unknown(name: str, values: str) -> str:
    first, *_ = values.split(",")
    if name.lower() in ENTRIES:
        hint = "|".join(f"--{name.lower()} {value}" for value in values.split(","))
        return f"{name}={first} is an option of the trainer: SWEEP has it as ARGS='{hint}'."
    return f"SWEEP cannot vary {name}: it takes {', '.join(SWEPT)}."


def cell(base: Words, words: Words) -> dict[str, Any]:
    """A cell's entry in sweep.json. Raises UserError for a value that a variable cannot have."""
    typed = {**base, **words}
    args = [base.get("ARGS", ""), words.get("ARGS", "")]
    typed["ARGS"] = " ".join(filter(None, args))
    command = verbs.line("train", **typed)
    if "EPOCHS" not in typed:
        typed["ARGS"] += f" {shlex.join(TRIAL)}"
    argv = [f"{name}={value}" for name, value in typed.items() if value]
    verb_words("train", argv, "make train")
    name = " ".join(f"{key}={shlex.quote(value)}" for key, value in words.items())
    return {"name": name, "argv": argv, "command": command}


def sweep_to_resume(words: Mapping[str, Any]) -> Path:
    """The folder of a sweep that goes on. Raises UserError."""
    other = [key for key in words if key != "resume"]
    if other:
        raise UserError(f"RESUME goes on with a sweep as it began: leave {other[0].upper()} out.")
    names = sorted(path.parent.name for path in SWEEPS.glob("*/sweep.json"))
    name = Path(words["resume"]).name
    name = names[-1] if name == "latest" and names else name
    if name not in names:
        known = f"the newest are {', '.join(names[:-4:-1])}" if names else "there is none yet"
        raise UserError(f"there is no sweep {words['resume']}: {known}.")
    state = read(SWEEPS / name)
    if not seal.holds(state["cells"], state.get("seal")):
        raise UserError(
            f"sweep {name} was not begun by you and from here, or its sweep.json was changed "
            "since, and its commands would be carried out: start a new one."
        )
    return SWEEPS / name


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Raises UserError while another process carries this sweep out."""
    with open_lock(folder / "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"sweep {folder.name} is being carried out already.") from None
        yield


def carry_out(folder: Path) -> int:
    """Runs what has no result yet, then compares. Returns the exit code."""
    state = read(folder)
    state["runs"] = [adopt(folder, run) for run in state["runs"]]
    state["runs"] = [run for run in state["runs"] if run["run"]]  # what failed is tried again
    cells = state["cells"]
    order = [(turn, at) for turn in range(state["rounds"]) for at in range(len(cells))]
    finished = {(run["round"], run["cell"]) for run in state["runs"]}
    pending = [place for place in order if place not in finished]
    print(
        f"sweep {folder.name}: {len(cells)} settings, {state['rounds']} times each; "
        f"{len(pending)} of {len(order)} runs to do",
        flush=True,
    )
    with Stop() as stop:
        for index, (turn, at) in enumerate(pending):
            if any(run["cell"] == at and not run["run"] for run in state["runs"]):
                continue  # it failed in an earlier round
            print(f"{index + 1}/{len(pending)}  {cells[at]['name']}", flush=True)
            run, code = run_cell(folder, state, turn, at, stop)
            if stop.requested or code in (STOPPED, INTERRUPTED):
                hint = f"`make sweep RESUME={folder.name}` goes on"
                say(f"stopped, {pluralize(len(pending) - index, 'run')} left: {hint}")
                return STOPPED
            print(f"     {run['run'] or run['cause']}", flush=True)
    return subprocess.call([sys.executable, "-m", "report", "sweep", str(folder)])


def read(folder: Path) -> State:
    """The state of a sweep. Raises UserError where its file is damaged."""
    path = folder / "sweep.json"
    try:
        state: State = to_builtins(decode(read_text(path), Sweep, "it"))
        if any(run["cell"] >= len(state["cells"]) for run in state["runs"]):
            raise Invalid("it has runs of cells that it has not")
        return state
    except (OSError, ValueError, Invalid) as error:
        raise UserError(f"{path} is damaged ({error}): start a new sweep.") from None


class Stop:
    """Passes Ctrl-C, SIGTERM and a closed terminal on to the run under way, which saves first."""

    def __init__(self) -> None:
        self.requested = False
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Stop:
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heeded = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        self.before = {number: signal.signal(number, self._request) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _request(self, *_: object) -> None:
        self.requested = True
        if self.child is not None:
            self.child.terminate()


def run_cell(folder: Path, state: State, turn: int, at: int, stop: Stop) -> tuple[State, int]:
    """Carries out a cell once; returns its entry in sweep.json and its exit code."""
    log = f"{len(state['runs']) + 1:03d}-{turn + 1}-{at + 1}.log"
    entry: State = {"round": turn, "cell": at, "log": log, "run": None, "cause": None}
    state["runs"].append(entry)
    write(folder, state)
    # It waits for busy machines, since nobody watches.
    argv = [sys.executable, "-m", "launcher", "train", "--queue", *state["cells"][at]["argv"]]
    with (folder / log).open("wb") as file:
        code = call(argv, file, stop)
    if not stop.requested:
        entry.update(adopt(folder, entry))
        if not entry["run"]:
            entry["cause"] = why(folder / log, code)
    write(folder, state)
    return entry, code


def call(argv: list[str], file: Any, stop: Stop) -> int:
    """A command in a session of its own: Ctrl-C reaches it through `stop` alone, and once."""
    words = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
    environment = {**os.environ, WANTED: "1"}
    with subprocess.Popen(argv, env=environment, start_new_session=True, **words) as child:
        stop.child = child
        if stop.requested:  # between the last run and this one
            child.terminate()
        code = child.wait()
        stop.child = None
    return code


def adopt(folder: Path, entry: State) -> State:
    """The entry with its run, if that has finished: a sweep that was killed has not noted it."""
    name, end, _ = outcome(folder / entry["log"])
    return {**entry, "run": name} if end.status == "finished" and not entry["run"] else entry


def outcome(log: Path) -> tuple[str, RunEnd, str | None]:
    """Return the run that a log names ("" if none has begun), its end, and why it was refused."""
    results = {}
    with contextlib.suppress(OSError):
        results = read_results(log.read_text(errors="replace"))
    name = results.get("run", "")
    file = SWEEPS.parent / name / "attempts.json"
    end = read_object(file, []) if may_be_a_run(name) else {}
    return name, convert_what_fits(end, RunEnd), results.get("refused")


def why(log: Path, code: int) -> str:
    """A sentence on why a run did not finish."""
    name, end, refused = outcome(log)
    cause = end.attempts[-1].first_cause if end.attempts else None
    if cause and cause.message:
        return f"failed: {cause.message} ({name})"
    return f"refused: {refused}" if refused else f"exit code {code}: read {log}"


def write(folder: Path, state: State) -> None:
    """Replaces sweep.json as a whole."""
    write_whole(folder / "sweep.json", json.dumps(state, indent=1).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
