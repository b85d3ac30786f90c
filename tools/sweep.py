"""Run a grid of short runs one after the other, and compare them: `make sweep`.

Each cell of the grid is a run of `python -m launcher train`. The runs are in rounds (A B C, A B C),
so that changes in the meantime affect all cells equally. runs/sweeps/<id>/sweep.json is rewritten
after each run, so RESUME can continue after every interruption. `python -m report sweep` compares
the cells at the end.
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
from typing import Any, NamedTuple

from msgspec import to_builtins

from boundary.run_files import RunEnd, Sweep
from boundary.schema import Invalid, convert_what_fits, decode
from contract import seal, verbs
from contract.command_line import verb_words
from contract.errors import INTERRUPTED, STOPPED, UserError
from contract.options import TRAINER_OPTIONS
from contract.result_lines import WANTED, read_results
from contract.runs import RUNS, may_be_a_run
from contract.text import open_lock, pluralize, read_text, write_whole
from report.files import read_object
from tools.verbs import say

SWEEPS = Path(RUNS, "sweeps")
# Variables of `make train` that may have several values in a sweep.
SWEEPABLE = ("NODES", "MODEL", "DATA", "EPOCHS", "BATCH", "PRECISION", "SYNC", "ARGS")
# The duration of the steps in a run without EPOCHS. The report needs 20 steps (report/measure.py),
# so a step may take 1.9 s.
TRIAL_SECONDS = 40
TRIAL = ("--trial", str(TRIAL_SECONDS), "--sync_warmup", "0")

Words = dict[str, str]  # NAME -> value, as they are typed after `make train`
State = dict[str, Any]  # sweep.json or a part of it: boundary/run_files.py, Sweep


def main(argv: list[str]) -> int:
    """Start or resume a sweep. Returns the exit code."""
    try:
        words = verb_words("sweep", argv, "make sweep")
        folder = find_sweep(words) if "resume" in words else new_sweep(words)
        with lock_sweep(folder):
            return run_cells(folder)
    except UserError as error:
        say(str(error))
        return UserError.code


def new_sweep(words: Mapping[str, Any]) -> Path:
    """Make the folder of a new sweep, and return it. `words`: the value of each typed variable, by
    its name in lower case. Raises UserError for an invalid grid."""
    if "sweep" not in words:
        raise UserError(
            "SWEEP is missing: `make help sweep` has an example; RESUME continues a sweep."
        )
    # `base` has the variables that are the same in every cell. verb_words has split ARGS.
    keys = {name: name.lower() for name in ("INVENTORY", *SWEEPABLE)}
    base = {name: str(words[key]) for name, key in keys.items() if key in words}
    if "args" in words:
        base["ARGS"] = shlex.join(words["args"])
    rounds = words.get("rounds", 2)
    # Every cell is checked before the first run, since the last may run hours later.
    cells = [make_cell(base, settings) for settings in parse_grid(words["sweep"], base)]
    folder = SWEEPS / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    try:
        folder.mkdir(parents=True)  # without exist_ok, since two sweeps must not share a folder
    except FileExistsError:
        raise UserError(f"a sweep began this very second: {folder}; type it again.") from None
    state = {"sweep": words["sweep"], "rounds": rounds, "cells": cells, "runs": []}
    # RESUME will run the cells' commands. The seal lets it recognize a changed or foreign file.
    write_state(folder, {**state, "seal": seal.seal(cells)})
    return folder


def parse_grid(text: str, base: Mapping[str, str]) -> list[Words]:
    """Return the settings of each cell: all combinations of the values in `text`, which is like
    "SYNC=allreduce,ef:5 BATCH=32,64". `base`: the settings that are the same in every cell. Raises
    UserError."""
    axes: dict[str, list[str]] = {}
    for word in verbs.VARIABLES["ARGS"].read("SWEEP", text):
        name, equals, values = word.partition("=")
        # An option of the trainer can be swept too, but only as a value of ARGS.
        if name.lower() in TRAINER_OPTIONS and name not in SWEEPABLE:
            hint = "|".join(f"--{name.lower()} {value}" for value in values.split(","))
            raise UserError(
                f"{name}={values.split(',')[0]} is an option of the trainer: SWEEP has it as "
                f"ARGS='{hint}'."
            )
        if name not in SWEEPABLE:
            raise UserError(f"SWEEP cannot vary {name}: it takes {', '.join(SWEEPABLE)}.")
        # The options of ARGS in a cell are added to those of all cells.
        if name in axes or (name in base and name != "ARGS"):
            raise UserError(f"{name} is given twice: leave one of them out.")
        if not equals:
            raise UserError(f"SWEEP has {word!r}: write {name}=one,other.")
        # A value of ARGS may have commas, and so may a path: then | separates the values.
        axes[name] = values.split("|" if name == "ARGS" or "|" in values else ",")
        # An empty value of ARGS stands for no more options.
        if name != "ARGS" and "" in axes[name]:
            raise UserError(f"SWEEP has {word}, of which a value is empty.")
        if len(set(axes[name])) < len(axes[name]):
            raise UserError(f"SWEEP has {word}, of which a value is there twice.")
    cells = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
    if len(cells) < 2:
        raise UserError(
            f"SWEEP={text!r} has {'one cell' if axes else 'no variable'}: nothing to compare; give "
            "a variable two values, as in SYNC=allreduce,ef:5."
        )
    return cells


def make_cell(base: Words, settings: Words) -> State:
    """Return a cell's entry in sweep.json. `base`: the settings of every cell; `settings`: those of
    this cell alone. Raises UserError for an invalid value of a variable."""
    typed = {**base, **settings}
    args = [base.get("ARGS", ""), settings.get("ARGS", "")]
    typed["ARGS"] = " ".join(filter(None, args))
    # The report prints this command for people, who want to train and not to time steps.
    command = verbs.format_command("train", **typed)
    if "EPOCHS" not in typed:
        typed["ARGS"] += f" {shlex.join(TRIAL)}"
    argv = [f"{name}={value}" for name, value in typed.items() if value]
    verb_words("train", argv, "make train")  # only for its errors
    name = " ".join(f"{key}={shlex.quote(value)}" for key, value in settings.items())
    return {"name": name, "argv": argv, "command": command}


def find_sweep(words: Mapping[str, Any]) -> Path:
    """Return the folder of the sweep that RESUME names. Raises UserError."""
    extra = [key for key in words if key != "resume"]
    if extra:
        raise UserError(f"RESUME continues a sweep as it began: leave {extra[0].upper()} out.")
    names = sorted(path.parent.name for path in SWEEPS.glob("*/sweep.json"))
    name = Path(words["resume"]).name
    name = names[-1] if name == "latest" and names else name
    if name not in names:
        newest = ", ".join(list(reversed(names))[:3])
        hint = f"the newest are {newest}" if names else "there is none yet"
        raise UserError(f"there is no sweep {words['resume']}: {hint}.")
    state = read_state(SWEEPS / name)
    # The folder may be somebody else's, and options can name programs to run.
    if not seal.holds(state["cells"], state.get("seal")):
        raise UserError(
            f"sweep {name} was not begun by you and from here, or its sweep.json was changed "
            "since, and its commands would be carried out: start a new one."
        )
    return SWEEPS / name


@contextlib.contextmanager
def lock_sweep(folder: Path) -> Iterator[None]:
    """Lock a sweep within a block. Raises UserError if another process runs it."""
    with open_lock(folder / "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"sweep {folder.name} is being carried out already.") from None
        yield


def run_cells(folder: Path) -> int:
    """Run every cell that has no result yet, then compare. Returns the exit code."""
    state = read_state(folder)
    entries = [adopt_run(folder, entry) for entry in state["runs"]]
    # Failed runs are dropped from the list here, so that they are repeated.
    state["runs"] = [entry for entry in entries if entry["run"]]
    cells, rounds = state["cells"], range(state["rounds"])
    # Round by round, as pairs (index of the round, index of the cell).
    planned = [(turn, cell_index) for turn in rounds for cell_index in range(len(cells))]
    finished = {(entry["round"], entry["cell"]) for entry in state["runs"]}
    pending = [pair for pair in planned if pair not in finished]
    print(
        f"sweep {folder.name}: {len(cells)} settings, {state['rounds']} times each; "
        f"{len(pending)} of {len(planned)} runs to do",
        flush=True,
    )
    with Stop() as stop:
        for index, (turn, cell_index) in enumerate(pending):
            # The cell failed in an earlier round of this call, so it would fail again.
            if any(entry["cell"] == cell_index and not entry["run"] for entry in state["runs"]):
                continue
            print(f"{index + 1}/{len(pending)}  {cells[cell_index]['name']}", flush=True)
            entry, code = run_cell(folder, state, turn, cell_index, stop)
            if stop.requested or code in (STOPPED, INTERRUPTED):
                hint = f"`make sweep RESUME={folder.name}` continues"
                say(f"stopped, {pluralize(len(pending) - index, 'run')} left: {hint}")
                return STOPPED
            print(f"     {entry['run'] or entry['cause']}", flush=True)
    return subprocess.call([sys.executable, "-m", "report", "sweep", str(folder)])


def read_state(folder: Path) -> State:
    """Return the state of a sweep. Raises UserError if its file is damaged."""
    path = folder / "sweep.json"
    try:
        state: State = to_builtins(decode(read_text(path), Sweep, "it"))
        if any(run["cell"] >= len(state["cells"]) for run in state["runs"]):
            raise Invalid("it has runs of cells that it has not")
        return state
    except (OSError, ValueError, Invalid) as error:
        raise UserError(f"{path} is damaged ({error}): start a new sweep.") from None


class Stop:
    """Pass Ctrl-C, SIGTERM and a closed terminal to the current run, which saves first."""

    def __init__(self) -> None:
        self.requested = False
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Stop:
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # nohup ignores SIGHUP, and a shell makes its background jobs ignore SIGINT.
        active = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        self.handlers = {number: signal.signal(number, self._request) for number in active}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _request(self, *_: object) -> None:
        self.requested = True
        if self.child is not None:
            self.child.terminate()


def run_cell(
    folder: Path, state: State, turn: int, cell_index: int, stop: Stop
) -> tuple[State, int]:
    """Run a cell once, in the round `turn`, from 0. Returns the run's entry in sweep.json, and the
    launcher's exit code."""
    log = f"{len(state['runs']) + 1:03d}-{turn + 1}-{cell_index + 1}.log"
    entry: State = {"round": turn, "cell": cell_index, "log": log, "run": None, "cause": None}
    state["runs"].append(entry)
    write_state(folder, state)  # if this process is killed, RESUME finds the run by its log
    # --queue waits for busy machines, since nobody watches a sweep and starts it again.
    words = state["cells"][cell_index]["argv"]
    argv = [sys.executable, "-m", "launcher", "train", "--queue", *words]
    with (folder / log).open("wb") as file:
        # In its own session, the launcher gets Ctrl-C only through `stop`, and once.
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, WANTED: "1"},
            start_new_session=True,
        )
    with child:
        stop.child = child
        if stop.requested:  # before `stop` knew the child
            child.terminate()
        code = child.wait()
        stop.child = None
    if not stop.requested:
        entry.update(adopt_run(folder, entry))
        if not entry["run"]:
            entry["cause"] = explain_failure(folder / log, code)
    # If the sweep was stopped, the run has no cause. RESUME repeats the run.
    write_state(folder, state)
    return entry, code


def adopt_run(folder: Path, entry: State) -> State:
    """Return the entry with the name of its run, if the run has finished."""
    # A sweep that is killed during a run cannot write the name. The log of the run has it.
    outcome = read_outcome(folder / entry["log"])
    is_new = outcome.end.status == "finished" and not entry["run"]
    return {**entry, "run": outcome.run} if is_new else entry


class Outcome(NamedTuple):
    """The end of a cell's run, as the launcher reported it."""

    run: str  # its name, or "" if no run began
    end: RunEnd
    refusal: str | None  # why the launcher refused to begin


def read_outcome(log: Path) -> Outcome:
    """Read how a run ended from the launcher's output, and from the run's folder."""
    results = {}
    with contextlib.suppress(OSError):
        results = read_results(log.read_text(errors="replace"))
    name = results.get("run", "")
    file = SWEEPS.parent / name / "attempts.json"
    end = read_object(file, []) if may_be_a_run(name) else {}
    return Outcome(name, convert_what_fits(end, RunEnd), results.get("refused"))


def explain_failure(log: Path, code: int) -> str:
    """Return why a run did not finish, as a sentence; code: the exit code of the launcher."""
    name, end, refusal = read_outcome(log)
    cause = end.attempts[-1].first_cause if end.attempts else None
    if cause and cause.message:
        return f"failed: {cause.message} ({name})"
    return f"refused: {refusal}" if refusal else f"exit code {code}: read {log}"


def write_state(folder: Path, state: State) -> None:
    """Replace sweep.json atomically."""
    write_whole(folder / "sweep.json", json.dumps(state, indent=1).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
