"""NOTIFY: a command of the user's own on this machine, when a run ends, when it fails, and once it
has waited for an hour.

Its words are split as a shell splits them, but no shell reads them. In each word {run} and so on
stand for facts of the run, which are in its environment, too: what a machine said stays within one
word. Whatever becomes of the command, the run's end is its own.
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

PATIENCE = 30.0  # seconds, of the command
HOUR = 3600.0
LONGEST = 500  # characters of a fact, and of what the command said
NAMED = re.compile(r"\{([a-z_0-9]+)\}")
# Programs that read the word after such an option as code, quotes and all; ssh hands on every word.
READS_CODE = re.compile(r"[a-z]*sh|su|runuser|python[\d.]*|perl|ruby|node")
CODE_FOLLOWS = re.compile(r"-[A-Za-z]*[ce]|--command")


@dataclass(frozen=True)
class Facts:
    """`run`: its name; of one that has not begun its model and machines. `status`: finished,
    failed, stopped or waits. `top1`: like `98.31 %`, or `-`. `time`: how long it trained, or has
    waited. `why`: the first cause, or what is waited for. `folder`: with report.html."""

    run: str
    status: str
    top1: str = "-"
    time: str = "-"
    why: str = "-"
    folder: str = "-"

    def words(self) -> dict[str, str]:
        """Each as one line that ends no quote, in JSON or elsewhere, and begins neither an option
        nor a file's name (`curl -d @`): parts of it are a machine's words."""
        plain = str.maketrans("\\\"'\n\t$`;|&<>()", "/\u2019\u2019   \u2019,/+[][]")
        lines = {name: clean(value).translate(plain) for name, value in asdict(self).items()}
        return {name: line.lstrip("-@ ")[:LONGEST] or "-" for name, line in lines.items()}


def is_code(before: list[str]) -> bool:
    """Whether the word after these is code that a program reads."""
    programs = [word.rpartition("/")[2] for word in before]
    follows = bool(before) and CODE_FOLLOWS.fullmatch(before[-1])
    return "ssh" in programs or bool(follows and any(map(READS_CODE.fullmatch, programs)))


def of_run(folder: Path, status: str, why: str | None) -> Facts:
    """Those of a run that is over, from its files."""
    end = convert_what_fits(read_object(folder / "attempts.json", []), RunEnd)
    took = sum(attempt.wall_seconds or 0.0 for attempt in end.attempts)
    return Facts(
        run=folder.name,
        status=status,
        top1=top1(folder),
        time=seconds(took),
        why=why or "-",
        folder=str(folder),
    )


def top1(folder: Path) -> str:
    """The accuracy of a run that has a report, like `98.31 %`; else `-`."""
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        return f"{100 * read_object(folder / 'summary.json', [])['final_top1']:.2f} %"
    return "-"


class Notify:
    """The command of one run; one without words does nothing. Raises UserError where it can never
    work."""

    def __init__(self, command: str | None, terminal: Terminal):
        self._terminal = terminal
        try:
            self.argv = shlex.split(command or "")
        except ValueError:
            raise UserError(f"NOTIFY={command}: a quote is not closed.") from None
        known = [*Facts("", "").words()]
        for name in NAMED.findall(" ".join(self.argv)):
            if name not in known:
                facts = ", ".join(f"{{{one}}}" for one in known)
                raise UserError(f"NOTIFY: {{{name}}} is no fact of a run: there are {facts}.")
        for at, word in enumerate(self.argv):
            if (name := NAMED.search(word)) and is_code(self.argv[:at]):
                raise UserError(
                    f"NOTIFY: {self.argv[0]} would read {name[0]} as code, and parts of it are a "
                    f'machine\'s words: write "$TANDEM_{name[1].upper()}" there, or name a script, '
                    "which has that variable."
                )
        if self.argv and not shutil.which(self.argv[0]):
            raise UserError(
                f"NOTIFY: there is no program {self.argv[0]} on this machine: install it, or name "
                "another one."
            )

    def wait(self, what: str) -> Callable[[str], None]:
        """To be called again and again, with the reason, while something is waited for."""
        since, told = time.monotonic(), False

        def look(why: str) -> None:
            nonlocal told
            long = time.monotonic() - since
            if not told and long >= HOUR:
                told = True
                self.send(Facts(what, "waits", time=seconds(long), why=why))

        return look

    def send(self, facts: Facts) -> None:
        """Run the command with these facts; what goes wrong is said."""
        if not self.argv:
            return
        words = facts.words()
        argv = [NAMED.sub(lambda match: words[match[1]], word) for word in self.argv]
        told = {f"TANDEM_{name.upper()}": value for name, value in words.items()}
        with waiting(self._terminal, "running NOTIFY's command"):
            problem = _run(argv, {**os.environ, **told})
        if problem:
            self._terminal.say(f"NOTIFY: {argv[0]} {problem}: nobody may have been told")
            self._terminal.drain()


def _run(argv: list[str], environment: dict[str, str]) -> str | None:
    """What went wrong; None where nothing did. Not by pipes: what the command leaves behind would
    hold them."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                argv,
                cwd=CHECKOUT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return f"could not be started ({getattr(error, 'strerror', None) or error})"
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return f"did not end within {PATIENCE:.0f} s and was killed"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - LONGEST))
        said = output.read().decode(errors="replace").strip().splitlines()
    if code == 0:
        return None
    return f"failed with exit code {code}{f' ({said[-1]})' if said else ''}"
