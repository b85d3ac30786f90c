"""Write the file of a rank's steps, which the report reads (docs/run-directory.md).

timings.py and trainer/train.py call `Lines`, which reads the seconds of each line from clock.py.
"""

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


# A rank stalls if it adds no line for STALL_SECONDS. A thread checks this every LOOK_SECONDS.
LOOK_SECONDS, STALL_SECONDS = 1.0, 5.0
FLUSH_SECONDS = 1.0  # if a rank is killed, the file lacks the steps of so many seconds and one more


class Block:
    """Adds up the steps that share a line.

    A loop of hundreds of steps a second would write more lines than anybody reads. Therefore a line
    has as many steps as take SHORT_SECONDS, rounded to a power of two, and ends at a multiple of
    this number. The steps of all ranks take the same time, so the lines of all ranks end at the
    same steps, and the report can match the ranks' waits. A line also ends after LONG_SECONDS, so
    that a rank that is killed has written nearly all of its steps.
    """

    SHORT_SECONDS, LONG_SECONDS = 0.5, 1.0

    def __init__(self) -> None:
        self.size = 1  # steps of the next line, if the steps last as long as before
        self.line: Optional[Dict[str, Any]] = None  # the sums of the line's steps so far
        self._scalars: Dict[str, List[float]] = {}  # of the line's steps
        self._not_finite: Dict[str, int] = {}  # scalar -> the first such step of the attempt

    def add(
        self, line: Dict[str, Any], scalars: Optional[Dict[str, float]] = None
    ) -> Optional[Dict[str, Any]]:
        """Add a step's line; return the sums if the step completes a line, otherwise None."""
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
            counts = self.line["samples"], line["samples"]
            sums = {
                "seconds": seconds,
                "steps": self.line["steps"] + 1,
                "samples": None if None in counts else sum(counts),
                "longest": max(self.line["longest"], step_seconds),
            }
            self.line = {**self.line, **line, **sums}
        line_seconds = sum(self.line["seconds"].values())
        if line["step"] % self.size == 0 or line_seconds >= self.LONG_SECONDS:
            self.resize(line["step"], line_seconds / self.line["steps"])
            return self.close()
        return None

    def resize(self, step: int, step_seconds: float) -> None:
        """Double or halve the size if steps last `step_seconds`; `step` stays a multiple of it."""
        if step_seconds * self.size < self.SHORT_SECONDS and step % (2 * self.size) == 0:
            self.size *= 2
        elif step_seconds * self.size >= 2 * self.SHORT_SECONDS and self.size > 1:
            self.size //= 2

    def close(self) -> Optional[Dict[str, Any]]:
        """Return the line of the steps so far, or None if there are none, and begin a new line."""
        line, self.line = self.line, None
        if line is not None and self._scalars:
            means = {name: sum(values) / len(values) for name, values in self._scalars.items()}
            # JSON has no NaN and no infinity.
            line["scalars"] = {
                name: float(f"{mean:.7g}") if math.isfinite(mean) else None
                for name, mean in means.items()
            }
            step_before = line["step"] - line["steps"]
            first_steps = {n: step for n, step in self._not_finite.items() if step > step_before}
            if first_steps:
                line["not_finite"] = first_steps
        self._scalars = {}
        return line


class Lines:
    """Writes `nodes/<host>/rank<k>.<attempt>.steps.jsonl` below `output`, if there is an output.
    Raises UserError if the file cannot be written.

    `_pending` holds each line and its lap until `flush` or `flush_ready`, because on CUDA a lap can
    be read only once the device has passed its end. If the rank stalls, a thread writes the rank's
    category, and writes again when the category changes. The report can then distinguish ranks that
    wait in a sum from the rank that has not arrived in this sum.
    """

    def __init__(self, output: Optional[str], host: str, rank: int, clock: Clock) -> None:
        self._clock = clock
        self._pending: List[Tuple[Dict[str, Any], Optional[Lap], Optional[StepScalars]]] = []
        self._flush_time = time.monotonic()
        self._block = Block()
        self._is_first_step = True  # the first step also warms up the device: it has its own line
        self.steps, self.step_seconds = 0, 0.0  # of the written steps, without the first step
        self._line_time, self._step = time.monotonic(), 0  # of the last line that was added
        self._reported_stall: Optional[Tuple[float, str]] = None  # its `_line_time` and category
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
        """Add a line. A `timed` line gets the seconds of all categories since the last timed line.
        `scalars` belong to a line of kind `step`."""
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
        """Write the rank's category if the rank stalls, unless this was written before."""
        category = self._clock.category
        # A stall that continues in another category is written again.
        stall = self._line_time, category
        idle_seconds = time.monotonic() - self._line_time
        if idle_seconds >= STALL_SECONDS and stall != self._reported_stall:
            self._reported_stall = stall
            line = {"kind": "stall", "category": category, "step": self._step}
            self._write_line({**line, "idle": round(idle_seconds, 1)})

    def end(self, **fields: Any) -> None:
        """Write the last line. Its `mono` is the time.monotonic() at which the last lap ends."""
        self._ended.set()
        if self._file is not None:
            # Python kills a thread that wakes while Python exits, maybe in the middle of a line.
            self._watcher.join(LOOK_SECONDS)
        self.add("end", **fields)
        self._pending[-1][0]["mono"] = time.monotonic()
        # After a failure the device may hang in a collective whose peers are gone.
        self.flush(patience=1.0 if fields["status"] == "failed" else None)

    def flush_ready(self) -> None:
        """Write the lines whose laps the device has ended, once in FLUSH_SECONDS. Never waits."""
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
                    patience = 0.0  # spent; later laps end even later
                line["seconds"] = {
                    name: round(value, 7) for name, value in seconds.items() if value
                }
                if line["kind"] == "step" and not self._is_first_step:
                    self.steps += 1
                    self.step_seconds += sum(seconds.values())
            # Only steps share a line, and steps with exact sums share none with other steps.
            block_line = self._block.line
            if line["kind"] != "step":
                self._write_line(self._block.close())
                self._write_line(line)
                continue
            if block_line is not None and block_line.get("exact") != line.get("exact"):
                self._write_line(self._block.close())
            complete_line = self._block.add(line, values)
            if self._is_first_step and complete_line is None:
                complete_line = self._block.close()
            self._write_line(complete_line)
            self._is_first_step = False
        del self._pending[:count]
        self._flush_time = time.monotonic()

    def _write_line(self, line: Optional[Dict[str, Any]]) -> None:
        """Write a line of JSON, if there is one and a file; the thread for stalls may call it."""
        if line is not None and self._file is not None:
            with self._file_lock:
                self._file.write(json.dumps(line, allow_nan=False) + "\n")
                self._file.flush()
