"""Runs the user's command NOTIFY on the control node when a run ends or fails, and when a run has
waited for an hour. Whether the command works does not change the outcome of the run.

Tandem splits the command into words as a shell does, but no shell reads the words. In each word
{run} and so on stand for facts of the run, so a machine's text stays within one word. The
environment has these facts, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from boundary.run_files import RunEnd
from boundary.schema import convert_what_fits
from contract.errors import UserError
from contract.text import clean, seconds
from launcher.machines.inventory import CHECKOUT
from launcher.terminal import Terminal, waiting
from report.files import read_object

COMMAND_SECONDS = 30.0  # until the command is killed
WAIT_SECONDS = 3600.0  # of a run that waits, until the user is told
MAX_CHARACTERS = 500  # of a fact, and of the command's output
FACT_NAME = re.compile(r"\{([a-z_0-9]+)\}")  # {run}
# In `bash -c WORD` and `perl -e WORD` the program runs the word after the option as code.
CODE_READERS = re.compile(r"[a-z]*sh|su|runuser|python[\d.]*|perl|ruby|node")
CODE_OPTION = re.compile(r"-[A-Za-z]*[ce]|--command")


@dataclass(frozen=True)
class Facts:
    """The facts of a run, by the names that the user writes in NOTIFY, as {why}. `run`: its name,
    or its model and machines before it begins. `status`: finished, failed, stopped or waits.
    `top1`: like `98.31 %`, or `-`. `time`: of training, or of waiting. `why`: the first cause, or
    the reason of the wait. `folder`: of report.html."""

    run: str
    status: str
    top1: str = "-"
    time: str = "-"
    why: str = "-"
    folder: str = "-"

    def words(self) -> dict[str, str]:
        """Return each fact as one line that is safe in the command, since a machine wrote parts of
        it: it ends no quote, and begins neither an option nor a file's name (`curl -d @FILE`)."""
        plain = str.maketrans("\\\"'\n\t$`;|&<>()", "/\u2019\u2019   \u2019,/+[][]")
        lines = {name: clean(value).translate(plain) for name, value in asdict(self).items()}
        return {name: line.lstrip("-@ ")[:MAX_CHARACTERS] or "-" for name, line in lines.items()}


def read_facts(folder: Path, status: str, reason: str | None) -> Facts:
    """Return the facts of a run that is over, from its files."""
    end = convert_what_fits(read_object(folder / "attempts.json", []), RunEnd)
    duration = seconds(sum(attempt.wall_seconds or 0.0 for attempt in end.attempts))
    return Facts(folder.name, status, top1(folder), duration, reason or "-", str(folder))


def top1(folder: Path) -> str:
    """Return the accuracy of a run that has a report, like `98.31 %`; else `-`."""
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        return f"{100 * read_object(folder / 'summary.json', [])['final_top1']:.2f} %"
    return "-"


class Notify:
    """The command of one run; without NOTIFY it does nothing. Raises UserError if the command can
    never work."""

    def __init__(self, command: str | None, terminal: Terminal):
        self._terminal = terminal
        try:
            self.argv = shlex.split(command or "")
        except ValueError:
            raise UserError(f"NOTIFY={command}: a quote is not closed.") from None
        fact_names = [*Facts("", "").words()]
        for name in FACT_NAME.findall(" ".join(self.argv)):
            if name not in fact_names:
                listed = ", ".join(f"{{{fact_name}}}" for fact_name in fact_names)
                raise UserError(f"NOTIFY: {{{name}}} does not exist: use {listed}.")
        # In `bash -c "mail {why}"` the shell reads the word a second time: a machine's text could
        # end a quote and add a command. Variables are safe: a shell does not read their values.
        for index, word in enumerate(self.argv):
            earlier_names = [earlier.rpartition("/")[2] for earlier in self.argv[:index]]
            follows_option = index > 0 and CODE_OPTION.fullmatch(self.argv[index - 1])
            is_code = bool(follows_option) and any(map(CODE_READERS.fullmatch, earlier_names))
            match = FACT_NAME.search(word)
            if match and (is_code or "ssh" in earlier_names):
                raise UserError(
                    f"NOTIFY: {self.argv[0]} would run {match[0]} as code, although a machine "
                    f'wrote parts of it: write "$TANDEM_{match[1].upper()}" instead, or use '
                    "a script, which has this variable."
                )
        if self.argv and not shutil.which(self.argv[0]):
            raise UserError(
                f"NOTIFY: the control node has no program {self.argv[0]}: install it, or type "
                "another program."
            )

    def make_reminder(self, name: str) -> Callable[[str], None]:
        """Return a function to call again and again with the reason while the run `name` waits. It
        notifies the user once, after WAIT_SECONDS."""
        start_time, has_sent = time.monotonic(), False

        def remind(reason: str) -> None:
            nonlocal has_sent
            # During the first hour the user may still sit at the terminal.
            duration = time.monotonic() - start_time
            if not has_sent and duration >= WAIT_SECONDS:
                has_sent = True
                self.send(Facts(name, "waits", time=seconds(duration), why=reason))

        return remind

    def send(self, facts: Facts) -> None:
        """Run the command with these facts, and report if it fails."""
        if not self.argv:
            return
        words = facts.words()
        argv = [FACT_NAME.sub(lambda match: words[match[1]], word) for word in self.argv]
        variables = {f"TANDEM_{name.upper()}": value for name, value in words.items()}
        problem = None
        # The output goes into a file: programs that the command leaves behind would hold a pipe.
        with (
            waiting(self._terminal, "running NOTIFY's command"),
            tempfile.TemporaryFile() as output,
        ):
            try:
                process = subprocess.Popen(
                    argv,
                    cwd=CHECKOUT,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                problem = f"could not be started ({reason})"
            else:
                try:
                    if code := process.wait(COMMAND_SECONDS):
                        output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_CHARACTERS))
                        lines = output.read().decode(errors="replace").strip().splitlines()
                        last_line = f" ({lines[-1]})" if lines else ""
                        problem = f"failed with exit code {code}{last_line}"
                except subprocess.TimeoutExpired:
                    problem = f"did not end within {COMMAND_SECONDS:.0f} s and was killed"
                finally:  # also after Ctrl-C, which ends the wait
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
        if problem:
            self._terminal.say(f"NOTIFY: {argv[0]} {problem}: perhaps nobody was notified")
            self._terminal.drain()
