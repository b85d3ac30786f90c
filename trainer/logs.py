"""What a run writes: JSON lines for the report, and the indices that it trained on."""

import json
import logging
import math
import os
import pathlib
import sys
import time
from typing import IO, Any, Dict, List, Optional, Tuple

from contract.errors import UserError
from contract.options import Options
from tandem.timings import Clock, Lap

from .world import World


def attempt() -> int:
    return int(os.environ.get("TANDEM_ATTEMPT", "1"))


def quiet_others(world: World) -> None:
    """Rank 0 logs information; the others only log warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger(__package__).setLevel(logging.INFO if world.rank == 0 else logging.WARNING)


def _opened(options: Options, name: str, mode: str) -> IO[str]:
    path = pathlib.Path(options.output or "", name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output: cannot write {path}: {error.strerror}.") from error


def _endless(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


FLUSH = 1.0  # seconds: at most so much of its steps does a killed rank leave untold, and one step


class Lines:
    """`nodes/<host>/rank<k>.steps.jsonl` below --output; see docs/run-directory.md.

    Each line is held with its lap until `flush` or `keep_up`, because on CUDA a lap can be read
    only once the device has passed its end.
    """

    def __init__(self, options: Options, world: World, clock: Clock) -> None:
        self._clock = clock
        self._waiting: List[Tuple[Dict[str, Any], Optional[Lap]]] = []
        self._flushed = time.monotonic()
        name = f"nodes/{world.host}/rank{world.rank}.steps.jsonl"
        self._file = _opened(options, name, "a") if options.output else None

    def add(self, kind: str, timed: bool = True, **fields: Any) -> None:
        """`timed`: the line accounts for all time since the last timed one."""
        # JSON has no NaN and no infinity.
        known = {name: None if _endless(value) else value for name, value in fields.items()}
        line = {"kind": kind, "attempt": attempt(), **known}
        self._waiting.append((line, self._clock.lap() if timed else None))

    def end(self, **fields: Any) -> None:
        """Write the last line; its `mono` is the time at which the last lap ends."""
        self.add("end", **fields)
        self._waiting[-1][0]["mono"] = time.monotonic()
        # After a failure the device may hang in a collective whose peers are gone.
        self.flush(patience=1.0 if fields["status"] == "failed" else None)

    def keep_up(self) -> None:
        """Write, once in FLUSH seconds, the lines whose end the device has passed; waits for
        none."""
        if time.monotonic() - self._flushed < FLUSH:
            return
        passed = 0
        while passed < len(self._waiting):
            lap = self._waiting[passed][1]
            if lap is not None and not self._clock.passed(lap):
                break
            passed += 1
        self._write(passed)

    def flush(self, patience: Optional[float] = None) -> None:
        """Write all lines, after waiting for the device, `patience` seconds at most."""
        self._write(len(self._waiting), patience)

    def _write(self, count: int, patience: Optional[float] = None) -> None:
        """Write the first `count` of the lines that wait."""
        for line, lap in self._waiting[:count]:
            if lap is not None:
                spent = self._clock.read(lap, patience)
                if not spent and patience:
                    patience = 0.0  # later laps end later
                line["seconds"] = {name: round(value, 7) for name, value in spent.items() if value}
            if self._file is not None:
                self._file.write(json.dumps(line, allow_nan=False) + "\n")
        del self._waiting[:count]
        if self._file is not None:
            self._file.flush()
        self._flushed = time.monotonic()


class SampleLog:
    """`samples/rank<k>.<attempt>.csv`: epoch, position in its order, and index of each sample,
    written once the rank has trained on it."""

    def __init__(self, options: Options, world: World) -> None:
        name = f"samples/rank{world.rank}.{attempt()}.csv"
        self._file = None
        if options.sample_log and options.output:
            self._file = _opened(options, name, "w")
            self._file.write("epoch,position,index\n")

    def add(self, epoch: int, begin: int, indices: List[int]) -> None:
        if self._file is not None:
            rows = (f"{epoch},{begin + place},{index}\n" for place, index in enumerate(indices))
            self._file.writelines(rows)
            self._file.flush()
