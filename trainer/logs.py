"""What a run says: JSON lines for the report, a bar or plain lines for people (rank 0 alone)."""

import json
import logging
import os
import pathlib
import sys
import time
from typing import Any, Dict, List, Optional, TextIO, Tuple

from tqdm import tqdm

from .errors import UserError
from .options import Options
from .timing import Clock, Lap
from .world import World

QUIET = 30  # seconds between plain lines within an epoch


def attempt() -> int:
    return int(os.environ.get("TANDEM_ATTEMPT", "1"))


def quiet_others(world: World) -> None:
    """Rank 0 speaks; the others only warn."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger(__package__).setLevel(logging.INFO if world.rank == 0 else logging.WARNING)


def _opened(options: Options, name: str, mode: str) -> TextIO:
    path = pathlib.Path(options.output or "", name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output: cannot write {path}: {error.strerror}.") from error


class Lines:
    """`nodes/<host>/rank<k>.steps.jsonl` below --output; see docs/run-directory.md.

    A line waits with its lap until `flush`, because on CUDA a lap can be read only when the device
    has passed its end.
    """

    def __init__(self, options: Options, world: World, clock: Clock) -> None:
        self._clock = clock
        self._waiting: List[Tuple[Dict[str, Any], Optional[Lap]]] = []
        name = f"nodes/{world.host}/rank{world.rank}.steps.jsonl"
        self._file = _opened(options, name, "a") if options.output else None

    def add(self, kind: str, timed: bool = True, **fields: Any) -> None:
        """`timed`: the line takes all time since the last timed one."""
        line = {"kind": kind, "attempt": attempt(), **fields}
        self._waiting.append((line, self._clock.lap() if timed else None))

    def end(self, **fields: Any) -> None:
        """The last line; its `mono` is the moment at which the last lap ends."""
        self.add("end", **fields)
        self._waiting[-1][0]["mono"] = time.monotonic()
        self.flush()

    def flush(self) -> None:
        for line, lap in self._waiting:
            if lap is not None:
                spent = self._clock.read(lap)
                line["seconds"] = {name: round(value, 7) for name, value in spent.items() if value}
            if self._file is not None:
                self._file.write(json.dumps(line) + "\n")
        self._waiting.clear()
        if self._file is not None:
            self._file.flush()


class Screen:
    """Progress for people. `shown` is False on all ranks but 0."""

    def __init__(self, options: Options, world: World, steps: int) -> None:
        self.shown = world.rank == 0
        wish = options.progress
        if wish == "auto":
            wish = os.environ.get("TANDEM_PROGRESS", "bar" if sys.stderr.isatty() else "plain")
        self._with_bar = self.shown and wish == "bar"
        self._bar: Any = None
        self._epochs, self._steps_per_epoch = options.epochs, steps
        self._begun = self._said = time.monotonic()
        self._done = 0
        self._board = _board(options) if self.shown and options.tensorboard else None

    def say(self, text: str) -> None:
        if self.shown:
            self.close()
            self._said = time.monotonic()
            print(text, flush=True)

    def epoch(self, epoch: int, done: int) -> None:
        if self._with_bar:
            self._bar = tqdm(
                total=self._steps_per_epoch,
                initial=done,
                desc=f"epoch {epoch + 1}/{self._epochs}",
                file=sys.stderr,
                leave=False,
                mininterval=0.5,
                bar_format="{desc} {percentage:3.0f}%|{bar}| {remaining}{postfix}",
                ncols=None if sys.stderr.isatty() else 79,
            )

    def step(self, images: int) -> None:
        self._done += images
        if self._bar is not None:
            self._bar.update()

    def figures(self, step: int, left: int, loss: float, top1: float) -> None:
        """At a log point; `left`: training images to go until the run's end."""
        speed = self._done / max(time.monotonic() - self._begun, 1e-9)
        if self._bar is not None:
            rest = tqdm.format_interval(left / max(speed, 1e-9))
            text = f"loss {loss:.3f} top-1 {top1:.1%} {speed:.0f} img/s run {rest}"
            self._bar.set_postfix_str(text, refresh=False)
        elif self.shown and time.monotonic() - self._said > QUIET:
            self.say(f"step {step}  loss {loss:.4f}  top-1 {top1:.2%}  {speed:.0f} images/s")
        self._chart(step, train_loss=loss, train_top1=top1, images_per_second=speed)

    def evaluated(self, epoch: int, step: int, train_loss: float, result: Any) -> None:
        speed = self._done / max(time.monotonic() - self._begun, 1e-9)
        self.say(
            f"epoch {epoch + 1}/{self._epochs}  loss {train_loss:.3f}  val {result.loss:.3f}  "
            f"top-1 {result.top1:.2%}  {speed:.0f} img/s"
        )
        self._chart(step, val_loss=result.loss, val_top1=result.top1)

    def _chart(self, step: int, **values: float) -> None:
        for name, value in values.items() if self._board is not None else ():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _board(options: Options) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("--tensorboard needs `pip install tensorboard`.") from error
    return SummaryWriter(str(pathlib.Path(options.output or ".", "tensorboard")))


class SampleLog:
    """`samples/rank<k>.<attempt>.csv`: epoch, position in its order, index, once trained on."""

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
