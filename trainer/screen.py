"""What people see of a run, printed by rank 0 only: a bar on a terminal, plain lines elsewhere."""

import logging
import os
import sys
import threading
import time
from typing import Any, List, Optional

from tqdm import tqdm

from contract.options import Options
from tandem.step_lines import Lines

from .world import World

# In seconds: until the first figures, between two plain lines, between two readings from the device
# for the bar (each waits for the device), and the longest silence in any case.
FIRST, PLAIN_EVERY, BAR_EVERY, SILENCE = 2.0, 10.0, 2.0, 15.0
NARROWEST = 10  # least width of the bar itself


def quiet_others(world: World) -> None:
    """Rank 0 logs information; the others only log warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger(__package__).setLevel(logging.INFO if world.rank == 0 else logging.WARNING)


class Screen:
    """Progress for people. `shown` is True on rank 0 only."""

    def __init__(self, options: Options, world: World, steps: int, lines: Lines) -> None:
        self.shown, self._lines = world.rank == 0, lines
        kind = options.progress
        if kind == "auto":
            kind = os.environ.get("TANDEM_PROGRESS", "bar" if sys.stderr.isatty() else "plain")
        self._with_bar = self.shown and kind == "bar"
        self._bar: Any = None
        self._epochs, self._steps_per_epoch = options.epochs, steps
        self._start: Optional[float] = None
        self._last_line = self._printed = time.monotonic()  # of `_printed` also what `look` printed
        self._due_at = float("inf")
        self._images = self._step = self._steps = self._first = 0
        self._epoch, self._doing = "", ""
        self._over = threading.Event()

    def say(self, text: str) -> None:
        if self.shown:
            self._last_line = time.monotonic()
            self._print(text)

    def _print(self, text: str) -> None:
        self.close()
        self._printed = time.monotonic()
        print(text, flush=True)

    def watch(self) -> None:
        """From now until `end`, never be silent for longer than SILENCE."""
        if self.shown:
            threading.Thread(target=self._watch, name="screen", daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            self.look()

    def look(self) -> None:
        """Say what is going on if nothing was printed for long; a bar, if there is one, shows it
        already."""
        now = time.monotonic()
        if self._bar is None and self._doing and now - self._printed >= SILENCE:
            self._print(f"{self._doing}, {now - self._last_line:.0f} s after the last line")

    def doing(self, what: str) -> None:
        """Set the description of the current work that `look` prints."""
        self._doing = what

    def epoch(self, epoch: int, done: int) -> None:
        """An epoch begins with its step `done`, counted from 0."""
        if self._start is None:
            self._start = time.monotonic()
            self._due_at = self._start + FIRST
        self._epoch, self._step = f"epoch {epoch + 1}/{self._epochs}", done
        self._in_step()
        if self._with_bar:
            self._bar = tqdm(
                total=self._steps_per_epoch,
                initial=done,
                desc=self._epoch,
                file=sys.stderr,
                leave=False,
                mininterval=0.5,
                bar_format="{desc} {percentage:3.0f}%|{bar}| {remaining}{postfix}",
                ncols=columns(),
            )

    def step(self, images: int) -> None:
        self._first = self._first or images
        self._images += images
        self._steps += 1
        self._step += 1
        self._in_step()
        if self._bar is not None:
            self._bar.update()

    def _in_step(self) -> None:
        self.doing(f"{self._epoch}  in step {self._step + 1} of {self._steps_per_epoch}")

    def is_due(self) -> bool:
        """Whether people should get figures now, whether or not this is a log point."""
        return self.shown and time.monotonic() >= self._due_at

    def figures(self, step: int, left: int, loss: float, top1: float) -> None:
        """Show figures that were just read; `left`: training images until the run's end."""
        spent = time.monotonic() - (self._start or 0.0)
        rest = tqdm.format_interval(left * spent / max(self._images, 1))
        if self._bar is not None:
            parts = [f"run {rest}", *self._speed(), f"loss {loss:.3f}", f"top-1 {top1:.1%}"]
            room = columns() - len(f"{self._epoch} 100%|| 00:00") - NARROWEST
            self._bar.set_postfix_str(", ".join(fitting(parts, room)), refresh=False)
            self._due_at = time.monotonic() + BAR_EVERY
        elif self.is_due():
            self.say(
                f"{self._epoch}  step {step}  loss {loss:.4f}  top-1 {top1:.2%}  "
                + "  ".join([*self._speed(), f"{rest} to go"])
            )
            self._due_at = time.monotonic() + PLAIN_EVERY

    def _speed(self) -> List[str]:
        """By the definition of docs/report.md, of the steps whose lines were read: images of all
        ranks over this rank's seconds of steps, without the first one."""
        if not self._lines.steps or self._steps < 2:
            return []
        images = (self._images - self._first) / (self._steps - 1)
        return [f"{images * self._lines.steps / self._lines.step_seconds:.0f} images/s"]

    def evaluation(self, epoch: int, loss: float, top1: float, result: Any, images: int) -> None:
        """`loss` and `top1` are those of the epoch's steps; `images`: how many there are in val."""
        figures = f"loss {loss:.3f}  val {result.loss:.3f}"
        figures += f"  top-1 {top1:.2%}  val {result.top1:.2%}"
        if result.samples < images:
            figures += f" over {result.samples} of {images} images"
        self.say("  ".join([f"epoch {epoch + 1}/{self._epochs}", figures, *self._speed()]))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def end(self) -> None:
        self._over.set()
        self.close()


def columns() -> int:
    """How wide a bar may be: COLUMNS (from which the launcher has subtracted its label), else the
    width of the terminal."""
    setting = os.environ.get("COLUMNS", "")
    if setting.isdigit() and int(setting) > 0:
        return int(setting)
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns - 1
    except (OSError, ValueError):
        return 79


def fitting(parts: List[str], room: int) -> List[str]:
    """The first of the parts, as many as fit into `room` with a comma in front of each."""
    chosen: List[str] = []
    for part in parts:
        room -= len(f", {part}")
        if room < 0:
            break
        chosen.append(part)
    return chosen
