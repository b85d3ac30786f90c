"""Show a run to people, from rank 0 only: a bar on a terminal, plain lines otherwise."""

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

FIRST_FIGURES_SECONDS = 2.0  # after the start of the first epoch
PLAIN_SECONDS = 10.0  # between two plain lines
BAR_SECONDS = 2.0  # between two readings for the bar, each of which waits for the device
SILENCE_SECONDS = 15.0  # without output, after which a line says what the run is doing
MIN_BAR_COLUMNS = 10  # of the bar itself, without its texts


def quiet_others(world: World) -> None:
    """Let rank 0 log information, and the other ranks only warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger(__package__).setLevel(logging.INFO if world.rank == 0 else logging.WARNING)


class Screen:
    """Progress for people. `shown` is True on rank 0 only."""

    def __init__(self, options: Options, world: World, steps: int, lines: Lines) -> None:
        self.shown, self._lines = world.rank == 0, lines
        kind = options.progress
        # A rank under the launcher writes into a pipe: the launcher knows its terminal.
        if kind == "auto":
            kind = os.environ.get("TANDEM_PROGRESS", "bar" if sys.stderr.isatty() else "plain")
        self._with_bar = self.shown and kind == "bar"
        self._bar: Any = None
        self._epochs, self._steps_per_epoch = options.epochs, steps
        self._start: Optional[float] = None  # of the first epoch, in seconds of time.monotonic()
        # `print_if_silent` prints lines, too, but they do not count as the last line.
        self._last_line = self._printed = time.monotonic()
        self._due_at = float("inf")  # the time.monotonic() of the next figures
        self._images = self._steps = 0  # of all ranks since the start
        self._epoch_steps = 0  # completed steps of the current epoch
        self._first_images = 0  # in the first step
        self._epoch = ""  # such as "epoch 1/3"
        self._activity = ""  # such as "epoch 1/3  in step 2 of 40"
        self._ended = threading.Event()

    def say(self, text: str) -> None:
        """Print a line, on rank 0 only."""
        if self.shown:
            self._last_line = time.monotonic()
            self._print(text)

    def _print(self, text: str) -> None:
        # A line would tear the bar apart: the next epoch begins a new one.
        self.close()
        self._printed = time.monotonic()
        print(text, flush=True)

    def watch(self) -> None:
        """Start a thread that prints the activity after SILENCE_SECONDS without output."""
        if self.shown:
            threading.Thread(target=self._watch, name="screen", daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self.print_if_silent()

    def print_if_silent(self) -> None:
        """Print the activity if nothing was printed for SILENCE_SECONDS and no bar shows it."""
        now_seconds = time.monotonic()
        if self._bar is None and self._activity and now_seconds - self._printed >= SILENCE_SECONDS:
            seconds = now_seconds - self._last_line
            self._print(f"{self._activity}: {seconds:.0f} s since the last line")

    def set_activity(self, text: str) -> None:
        """Say what the run is doing now, for `print_if_silent`."""
        self._activity = text

    def begin_epoch(self, epoch: int, done: int) -> None:
        """Begin to show an epoch, of which `done` steps are complete. `epoch` counts from 0."""
        if self._start is None:
            self._start = time.monotonic()
            self._due_at = self._start + FIRST_FIGURES_SECONDS
        self._epoch, self._epoch_steps = f"epoch {epoch + 1}/{self._epochs}", done
        self._show_step()
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

    def count_step(self, images: int) -> None:
        """Count a step with `images` of all ranks."""
        self._first_images = self._first_images or images
        self._images += images
        self._steps += 1
        self._epoch_steps += 1
        self._show_step()
        if self._bar is not None:
            self._bar.update()

    def _show_step(self) -> None:
        step = self._epoch_steps + 1
        self.set_activity(f"{self._epoch}  in step {step} of {self._steps_per_epoch}")

    def is_due(self) -> bool:
        """Return whether it is time to show figures, even if this is no log point."""
        return self.shown and time.monotonic() >= self._due_at

    def show_figures(self, step: int, remaining_images: int, loss: float, top1: float) -> None:
        """Show figures that were just read. `remaining_images`: until the run's end."""
        spent = time.monotonic() - (self._start or 0.0)
        remaining_time = tqdm.format_interval(remaining_images * spent / max(self._images, 1))
        if self._bar is not None:
            speed = self._speed()
            fields = [f"run {remaining_time}", *speed, f"loss {loss:.3f}", f"top-1 {top1:.1%}"]
            free_columns = columns() - len(f"{self._epoch} 100%|| 00:00") - MIN_BAR_COLUMNS
            # tqdm would cut off a long text in the middle of a number, so whole fields are chosen.
            chosen: List[str] = []
            for field in fields:
                free_columns -= len(f", {field}")
                if free_columns < 0:
                    break
                chosen.append(field)
            self._bar.set_postfix_str(", ".join(chosen), refresh=False)
            self._due_at = time.monotonic() + BAR_SECONDS
        elif self.is_due():
            self.say(
                f"{self._epoch}  step {step}  loss {loss:.4f}  top-1 {top1:.2%}  "
                + "  ".join([*self._speed(), f"{remaining_time} to go"])
            )
            self._due_at = time.monotonic() + PLAIN_SECONDS

    def _speed(self) -> List[str]:
        """Return the images per second, as docs/report.md defines them; [] if unknown."""
        # The first step warms up the device, and would make the mean too slow.
        if not self._lines.steps or self._steps < 2:
            return []
        images = (self._images - self._first_images) / (self._steps - 1)
        return [f"{images * self._lines.steps / self._lines.step_seconds:.0f} images/s"]

    def show_evaluation(
        self, epoch: int, loss: float, top1: float, result: Any, images: int
    ) -> None:
        """Show an evaluation. `loss` and `top1`: of the epoch's steps. `images`: those of val."""
        # With the launcher's label, such as `[node1 0] `, the line fits into 80 columns.
        figures = f"loss {loss:.3f} top-1 {top1:.2%}  val {result.loss:.3f} {result.top1:.2%}"
        if result.samples < images:
            figures += f" over {result.samples} of {images} images"
        self.say("  ".join([f"epoch {epoch + 1}/{self._epochs}", figures, *self._speed()]))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def end(self) -> None:
        self._ended.set()
        self.close()


def columns() -> int:
    """Return how wide a bar may be: COLUMNS, or the width of the terminal."""
    # The launcher has subtracted its label from COLUMNS.
    setting = os.environ.get("COLUMNS", "")
    if setting.isdigit() and int(setting) > 0:
        return int(setting)
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns - 1
    except (OSError, ValueError):
        return 79
