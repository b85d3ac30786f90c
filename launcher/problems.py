"""The problems of machines before a run starts. problems.txt has every sentence, once: its code,
when it blocks a run, the message and the remedy. judge.py and look.py find the problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from contract.errors import UserError
from launcher.machines.engine import Host


class Blocks(Enum):
    """Lists how a problem keeps a run from starting."""

    NEVER = "never"  # it is only reported
    ALWAYS = "always"
    UNLESS_FORCED = "soft"  # FORCE=1
    BUSY = "busy"  # unless FORCE=1; QUEUE=1 waits until it is over
    SILENT = "silent"  # always, unless the run may begin without the machine
    OWNER = "owner"  # as long as it lasts, the run does without the machine


NEVER, ALWAYS, UNLESS_FORCED, BUSY, SILENT, OWNER = Blocks


class Rule(NamedTuple):
    """A line of the table. `message`: what is wrong, and why. `remedy`: what to do, "" for none."""

    blocks: Blocks
    message: str
    remedy: str = ""

    def sentence(self, values: dict[str, object]) -> str:
        text = self.message.format(**values)
        return f"{text}: {self.remedy.format(**values)}." if self.remedy else text


# disk-low | soft | only {free} MiB are free on the disk of {folder} | remove old runs
_TABLE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
_ROWS = [row.split(" | ") for row in _TABLE.splitlines() if row and not row.startswith("#")]
RULES = {code: Rule(Blocks(blocks), *texts) for code, blocks, *texts in _ROWS}
BUSY_REMEDY = RULES["machine-busy"].remedy


@dataclass(frozen=True)
class Problem:
    """A problem of the machines with these labels; without labels it is between machines."""

    code: str
    message: str
    labels: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{', '.join(self.labels)}: {self.message}" if self.labels else self.message

    @property
    def blocks(self) -> Blocks:
        return RULES[self.code].blocks


def problem(code: str, host: Host | None = None, /, **values: object) -> Problem:
    """Make the problem with this code, of `host` or of no single machine. `values`: what its
    sentence names. Each sentence may also name the machine and what repairs its environment."""
    if host is None:
        return Problem(code, RULES[code].sentence(values))
    values = {"name": host.name, "repair": host.engine.repair_hint, **values}
    return Problem(code, RULES[code].sentence(values), (host.label(),))


class Refused(UserError):
    """Raised for problems with which a run must not start."""

    def __init__(self, problems: Sequence[Problem], *hints: str):
        super().__init__(*(problem.text for problem in problems), *hints)
        self.reasons = list(problems)


def merge_problems(problems: Sequence[Problem]) -> list[Problem]:
    """Merge equal problems of several machines into one, with the labels of all of them."""
    # Ten machines without torch are one mistake, and one sentence.
    labels: dict[Problem, tuple[str, ...]] = {}
    for entry in problems:
        key = replace(entry, labels=())
        labels[key] = (*labels.get(key, ()), *entry.labels)
    return [replace(entry, labels=names) for entry, names in labels.items()]


def refuse_or_warn(problems: Sequence[Problem], force: bool) -> list[str]:
    """Return the texts of problems that a run may start with. Raises Refused if it must not."""
    # FORCE=1 is for what may be wrong, never for what would fail in any case.
    blocking = {ALWAYS, SILENT} if force else {ALWAYS, SILENT, UNLESS_FORCED, BUSY}
    stopping = [entry for entry in problems if entry.blocks in blocking]
    if stopping:
        force_helps = not any(entry.blocks is ALWAYS for entry in stopping)
        raise Refused(stopping, *["(FORCE=1 starts anyway.)"] * force_helps)
    return [entry.text for entry in problems]
