"""Describes the program that a run starts on each machine: Tandem's trainer, or a user's script.
programs.py builds it. All later code reads its fields, and never asks which of the two it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.decisions import Request
from contract.layout import IMAGES
from contract.options import Config

if TYPE_CHECKING:  # the error about a mistyped option need not wait for these
    from launcher.plan.layer import Layer
    from launcher.plan.pretrained import Pretrained
    from launcher.plan.requirements import RequirementsFile

LAST = "{last}"  # in `resume`: the name of the newest checkpoint
DATA = "{data}"  # in `words` and `check` of a program with data: their folder on that machine


@dataclass(frozen=True)
class SentFile:
    """A file that every machine gets, or weights that are fetched first (`pretrained`). The
    environment of the ranks has its path there as `variable`; `label` is for people."""

    variable: str
    label: str
    path: Path | None = None
    pretrained: Pretrained | None = None


@dataclass(frozen=True)
class Program:
    """Describes what a run starts, sends, copies back and requires of machines.

    Start:
    `name`: in the names of runs. `typed`: how the user named the program, for messages.
    `words`: what torch.distributed.launch starts. Each rank's environment also has TANDEM_DATA,
    TANDEM_OUTPUT and TANDEM_DEVICE, which differ from machine to machine, and `env`.
    `resume`: words that follow in an attempt that continues; None if the program cannot continue.
    `device`: auto, cuda or cpu. `parallel`: ddp starts a process for each device, others start one
    for each machine. `needs_port`: its ranks meet at a port of their own.
    `check`: words for Python that find out whether the program would fail, on the machine of node 0
    and before any rank starts; empty for none.
    `request`: what its ranks decide together when they start, None for nothing. Ranks of a program
    that `divides_batches` may ask for their share of each batch (tandem/balance.py).

    Files to send:
    `folder`: the user's folder, besides our code, and `script_folder` below it, which is sent even
    if git ignores it. `runs_in_folder`: the ranks run in a copy of `folder`, in which they may
    write. `files`: single files. `requirements`: its packages, which are not sent if every machine
    has the module `unless_module`. `layer`: those packages, once the machines are known. `modules`:
    what it seems to import. `data_kind`: what its data have to be (contract/layout.py).

    Files that it writes:
    `outputs`: folders of the copy, which are copied back; empty for all that it writes there.
    `results`: files of the run's folder on node 0, which are copied back after the run.
    `ranks_pass_on`: the ranks find the newest checkpoint of their machines in the run's
    checkpoints/<machine>/ and pass it on; otherwise checkpoints are in `outputs`.
    `resumes_own`: each machine continues from a checkpoint that the machine itself saved.
    `has_exit_codes`: its exit codes are those of contract/errors.py.

    For people:
    `command`: what the report calls it, if not by its model. `sample`: what one thing that it
    trains on is called. `times_steps`: each of its ranks writes timings. `adjustable`: make's
    BATCH, SYNC, EPOCHS and BALANCE and the trainer's options change it. `when_stopped`: what its
    processes do after a request to stop.
    `phrases`: how advice is given to its user.
    `notes`: sentences that the terminal shows before any machine is asked.
    """

    name: str
    typed: str
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    resume: tuple[str, ...] | None = None
    device: str = "auto"
    parallel: str = "ddp"
    needs_port: bool = False
    check: tuple[str, ...] = ()
    request: Request | None = None
    divides_batches: bool = False
    folder: Path | None = None
    script_folder: str = "."
    runs_in_folder: bool = False
    files: tuple[SentFile, ...] = ()
    requirements: RequirementsFile | None = None
    unless_module: str | None = None
    layer: Layer | None = None
    modules: tuple[str, ...] = ()
    data_kind: str = IMAGES
    outputs: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    ranks_pass_on: bool = False
    resumes_own: bool = False
    has_exit_codes: bool = False
    command: str = ""
    sample: str = "sample"
    times_steps: bool = False
    adjustable: bool = False
    when_stopped: str = "got SIGTERM and have {seconds} s to save and exit"
    phrases: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """Return the fields that plan.json keeps for the report."""
        return {
            "name": self.name,
            "typed": self.typed,
            "folder": str(self.folder) if self.folder else None,
            "outputs": list(self.outputs),
            "packages": self.layer.packages if self.layer else {},
            "command": self.command,
            "sample": self.sample,
            "times_steps": self.times_steps,
            "adjustable": self.adjustable,
            "phrases": dict(self.phrases),
        }


@dataclass(frozen=True)
class Needs:
    """The demands of a run on its machines. `run`: the run that is resumed, None for a new run.
    `decided`: decisions of the ranks of an earlier attempt, which all machines must support."""

    config: Config
    program: Program
    run: str | None = None
    decided: Mapping[str, Any] = field(default_factory=dict)
