"""The file in which a rank tells the report of its steps: docs/run-directory.md."""

import contextlib
import json
import math
import os
import pathlib
import threading
import time
from typing import IO, Any, Dict, List, Optional, Tuple

from contract.errors import UserError

from .clock import Clock, Lap
from .scalars import StepScalars


def attempt_number() -> int:
    """Return the number of the run's attempt, from 1."""
    return int(os.environ.get("TANDEM_ATTEMPT", "1"))


def open_output(output: str, name: str, mode: str) -> IO[str]:
    """Open a file below the folder `output`. Raises UserError."""
    path = pathlib.Path(output, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error


LOOK_SECONDS, STALL_SECONDS = 1.0, 5.0  # how often a stall is looked for, and when it is one
FLUSH_SECONDS = 1.0  # a killed rank leaves the steps of so many seconds untold, and one more


class Block:
    """The steps that share a line, as their sums.

    A loop of hundreds of steps a second would write more lines than anybody reads. So a line has as
    many steps as take SHORT_SECONDS, and their number is a power of two. A line ends at a multiple
    of it: the steps of all ranks last as long, so their lines end at the same steps, and the report
    can match their waits. A line also ends after LONG_SECONDS, so that little is untold.
    """

    SHORT_SECONDS, LONG_SECONDS = 0.5, 1.0

    def __init__(self) -> None:
        self.size = 1  # steps of the next line, if the steps last as long as before
        self.line: Optional[Dict[str, Any]] = None
        self._scalars: Dict[str, List[float]] = {}  # of the line's steps
        self._not_finite: Dict[str, int] = {}  # scalar -> the first such step of the attempt

    def add(
        self, line: Dict[str, Any], scalars: Optional[Dict[str, float]] = None
    ) -> Optional[Dict[str, Any]]:
        """Add a step, and return the line that it completes, if it completes one."""
        for name, value in (scalars or {}).items():
            self._scalars.setdefault(name, []).append(value)
            if not math.isfinite(value):
                self._not_finite.setdefault(name, line["step"])
        step_seconds = sum(line["seconds"].values())
        if self.line is None:
            self.line = {**line, "steps": 1, "longest": step_seconds}
        else:
            seconds = self.line["seconds"]
            for name, value in line["seconds"].items():
                seconds[name] = round(seconds.get(name, 0.0) + value, 7)
            samples = self.line["samples"], line["samples"]
            sums = {
                "seconds": seconds,
                "steps": self.line["steps"] + 1,
                "samples": None if None in samples else sum(samples),
                "longest": max(self.line["longest"], step_seconds),
            }
            self.line = {**self.line, **line, **sums}
        line_seconds = sum(self.line["seconds"].values())
        if line["step"] % self.size == 0 or line_seconds >= self.LONG_SECONDS:
            self.resize(line["step"], line_seconds / self.line["steps"])
            return self.close()
        return None

    def resize(self, step: int, step_seconds: float) -> None:
        """Double or halve the size, so that `step` stays a multiple of it."""
        if step_seconds * self.size < self.SHORT_SECONDS and step % (2 * self.size) == 0:
            self.size *= 2
        elif step_seconds * self.size >= 2 * self.SHORT_SECONDS and self.size > 1:
            self.size //= 2

    def close(self) -> Optional[Dict[str, Any]]:
        """Return the line of the steps so far, if there are any, and begin another."""
        line, self.line = self.line, None
        if line is not None and self._scalars:
            means = {name: sum(values) / len(values) for name, values in self._scalars.items()}
            # JSON has no NaN and no infinity.
            line["scalars"] = {
                name: float(f"{mean:.7g}") if math.isfinite(mean) else None
                for name, mean in means.items()
            }
            begin = line["step"] - line["steps"]
            first_steps = {n: step for n, step in self._not_finite.items() if step > begin}
            if first_steps:
                line["not_finite"] = first_steps
        self._scalars = {}
        return line


class Lines:
    """Writes `nodes/<host>/rank<k>.<attempt>.steps.jsonl` below `output`, if there is an output.
    Raises UserError if the file cannot be written.

    Each line is kept with its lap until `flush` or `flush_ready`, because on CUDA a lap can be read
    only once the device has passed its end. If no line is added for STALL_SECONDS, a thread writes
    in which category the rank is, and again when the category changes. So the report can tell ranks
    that wait in a sum from the rank that has not arrived there.
    """

    def __init__(self, output: Optional[str], host: str, rank: int, clock: Clock) -> None:
        self._clock = clock
        self._pending: List[Tuple[Dict[str, Any], Optional[Lap], Optional[StepScalars]]] = []
        self._flush_time = time.monotonic()
        self._block = Block()
        self._is_first_step = True  # the next step warms up, and has a line to itself
        self.steps, self.step_seconds = 0, 0.0  # of the later steps, as far as they were read
        self._line_time, self._step = time.monotonic(), 0
        self._reported_stall: Optional[Tuple[float, str]] = None
        self._file: Optional[IO[str]] = None
        self._file_lock = threading.Lock()
        self._ended = threading.Event()
        if output:
            name = f"nodes/{host}/rank{rank}.{attempt_number()}.steps.jsonl"
            self._file = open_output(output, name, "a")
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="stalls")
            self._watcher.start()

    def add(
        self, kind: str, timed: bool = True, scalars: Optional[StepScalars] = None, **fields: Any
    ) -> None:
        """Add a line. A `timed` line accounts for all time since the last timed one; `scalars`
        belong to a line of kind `step`."""
        # JSON has no NaN and no infinity.
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                fields[name] = None
        if kind == "start":
            fields = {"attempt": attempt_number(), **fields}
        line = {"kind": kind, **fields}
        self._pending.append((line, self._clock.lap() if timed else None, scalars))
        self._line_time, self._step = time.monotonic(), fields.get("step", self._step)

    def _watch(self) -> None:
        # The loop itself reports a full disk.
        with contextlib.suppress(OSError):
            while not self._ended.wait(LOOK_SECONDS):
                self.report_stall()

    def report_stall(self) -> None:
        """Write in which category a rank stalls that has added no line for STALL_SECONDS: once, and
        again if it goes on to another category."""
        stall = self._line_time, self._clock.category
        idle_seconds = time.monotonic() - self._line_time
        if idle_seconds >= STALL_SECONDS and stall != self._reported_stall:
            self._reported_stall = stall
            line = {"kind": "stall", "category": stall[1], "step": self._step}
            self._write_line({**line, "idle": round(idle_seconds, 1)})

    def end(self, **fields: Any) -> None:
        """Write the last line; its `mono` is the time at which the last lap ends."""
        self._ended.set()
        if self._file is not None:
            # A thread that wakes while Python exits is ended in the middle of its work.
            self._watcher.join(LOOK_SECONDS)
        self.add("end", **fields)
        self._pending[-1][0]["mono"] = time.monotonic()
        # After a failure the device may hang in a collective whose peers are gone.
        self.flush(patience=1.0 if fields["status"] == "failed" else None)

    def flush_ready(self) -> None:
        """Write the lines whose end the device has passed, once in FLUSH_SECONDS and without
        waiting."""
        if time.monotonic() - self._flush_time < FLUSH_SECONDS:
            return
        count = 0
        while count < len(self._pending):
            _, lap, scalars = self._pending[count]
            if lap is not None and not self._clock.passed(lap):
                break
            # A loss may be on another device than the clock's.
            if scalars is not None and not scalars.have_arrived():
                break
            count += 1
        self._write(count)

    def flush(self, patience: Optional[float] = None) -> None:
        """Write all lines, after waiting for the device, `patience` seconds at most."""
        self._write(len(self._pending), patience)

    def _write(self, count: int, patience: Optional[float] = None) -> None:
        """Write the first `count` of the pending lines."""
        for line, lap, scalars in self._pending[:count]:
            values = None
            if scalars is not None and (patience is None or scalars.have_arrived()):
                values = scalars.read()
            if lap is not None:
                seconds = self._clock.read(lap, patience)
                if not seconds and patience:
                    patience = 0.0  # later laps end later
                line["seconds"] = {
                    name: round(value, 7) for name, value in seconds.items() if value
                }
                if line["kind"] == "step" and not self._is_first_step:
                    self.steps += 1
                    self.step_seconds += sum(seconds.values())
            if line["kind"] == "step":
                self._add_step(line, values)
            else:
                self._write_line(self._block.close())
                self._write_line(line)
        del self._pending[:count]
        self._flush_time = time.monotonic()

    def _add_step(self, line: Dict[str, Any], scalars: Optional[Dict[str, float]]) -> None:
        # Steps with exact sums and steps with coded ones have lines of their own.
        block_line = self._block.line
        if block_line is not None and block_line.get("exact") != line.get("exact"):
            self._write_line(self._block.close())
        complete = self._block.add(line, scalars)
        if self._is_first_step and complete is None:
            complete = self._block.close()
        self._write_line(complete)
        self._is_first_step = False

    def _write_line(self, line: Optional[Dict[str, Any]]) -> None:
        if line is not None and self._file is not None:
            with self._file_lock:
                self._file.write(json.dumps(line, allow_nan=False) + "\n")
                self._file.flush()
