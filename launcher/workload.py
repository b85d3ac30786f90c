"""What a run trains: our trainer, or a program of the user's own. All in which they differ is asked
of a Workload; launcher/workloads/ has one file for each kind.

The methods stand in the order in which a run calls them: before any machine is asked, while the
machines are looked at, for a plan, for an attempt, and after the last one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boundary.answers import NodeFacts
from contract.options import Config
from contract.runs import folder_on_machine
from launcher.look import Control, OpenMachines
from launcher.machines.engine import Host
from launcher.plan.code import Code, Delivery
from launcher.plan.devices import NodeDevices
from launcher.plan.plan import Command, NodePart, Plan
from launcher.problems import Problem
from launcher.terminal import Terminal

if TYPE_CHECKING:  # for which a refusal before the first machine need not wait
    from launcher.watch.attempts import Attempts


@dataclass(frozen=True)
class RunSite:
    """A run, here and on those of its `hosts` that are connected now."""

    folder: Path
    needs: Requirements
    hosts: Sequence[Host]
    machines: OpenMachines
    attempts: Attempts
    terminal: Terminal

    @property
    def folders(self) -> dict[str, str]:
        """Where each machine has the run."""
        return folders_of(self.machines, self.folder.name)


def folders_of(machines: OpenMachines, run: str) -> dict[str, str]:
    facts = machines.facts
    return {
        h.name: folder_on_machine(facts[h.name].absolute(h.node_dir), run) for h in machines.hosts
    }


@dataclass(frozen=True)
class Requirements:
    """What the machines must be able to do. `run` is the run to resume, None for a new one."""

    run_config: Config
    workload: Workload
    run: str | None = None


@dataclass(frozen=True)
class Collected:
    """What came back at the end: sentences for people, whether a checkpoint was saved anywhere, and
    whether this machine has all that it should."""

    said: Sequence[str] = ()
    saved: bool = False
    is_whole: bool = True


class Workload(ABC):
    """A frozen value; what is decided once the machines are known makes another one."""

    # Whether its ranks are our trainer's: they write what they save into their records, make a
    # process group in any case, save within seconds of SIGTERM, and have its exit codes.
    is_trainer = False

    # ---- before any machine is asked ----

    @classmethod
    @abstractmethod
    def read(cls, config: Config, run: str | None = None) -> Workload:
        """What the options ask for; `run`: the run that goes on. Raises UserError."""

    @classmethod
    @abstractmethod
    def resumed(cls, plan_file: Path, began: Config, given: Mapping[str, Any]) -> Config:
        """The options of a run that goes on: those that it began with, and what was typed now.
        Raises UserError."""

    @classmethod
    @abstractmethod
    def unnamed_code(cls, began: Config, given: Mapping[str, Any]) -> list[str]:
        """What these options would execute or send and was not typed now, as it is typed."""

    @abstractmethod
    def check(self, config: Config, hosts: Sequence[Host]) -> list[str]:
        """What is worth saying before these machines are asked. Raises UserError."""

    # ---- while the machines are looked at ----

    @property
    @abstractmethod
    def name(self) -> str:
        """In the names of runs, and of what waits."""

    @property
    @abstractmethod
    def device(self) -> str:
        """auto, cuda or cpu."""

    @property
    @abstractmethod
    def parallel(self) -> str:
        """ddp has one process for each device, others one for each machine."""

    @property
    @abstractmethod
    def packages(self) -> list[str]:
        """What is to be imported in the machines' environments."""

    @abstractmethod
    def question(self, is_first: bool) -> dict[str, Any]:
        """What launcher/node/probe.py is asked of a machine besides."""

    @abstractmethod
    def of_checkout(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of a model of the user's: the files that are sent and the packages that they import."""

    @abstractmethod
    def for_machines(self, machines: OpenMachines) -> Workload:
        """The same with what has to suit these machines. Raises Refused."""

    @abstractmethod
    def problems(
        self,
        machines: OpenMachines,
        parts: Mapping[str, NodeDevices],
        control: Control,
        others: Sequence[Problem],
    ) -> list[Problem]:
        """What keeps it from running there; `others` are wrong with any."""

    @abstractmethod
    def decide(
        self,
        config: Config,
        everybody: Sequence[Host],
        machines: OpenMachines,
        before: Mapping[str, int],
        terminal: Terminal,
    ) -> tuple[Config, Workload]:
        """With all that is decided once for the run, and said. `everybody` are the run's machines,
        `before` the weights of those that it had last. Raises UserError."""

    @abstractmethod
    def for_attempt(
        self,
        config: Config,
        everybody: Sequence[Host],
        machines: OpenMachines,
        terminal: Terminal,
    ) -> Workload:
        """With what is decided anew for an attempt on these machines. Raises UserError."""

    # ---- for a plan ----

    @abstractmethod
    def warnings(self, hosts: Sequence[Host]) -> list[str]:
        """Sentences on a run that begins nevertheless."""

    @abstractmethod
    def code(self) -> Code:
        """What is sent of the checkout and of the user's own folder. Raises UserError."""

    @abstractmethod
    def plan_fields(
        self,
        config: Config,
        hosts: Sequence[Host],
        counts: Sequence[int],
        first: NodeFacts,
        used_ports: Collection[int],
    ) -> dict[str, Any]:
        """The fields of a Plan that it alone knows; `counts` are the machines' processes, `first`
        what the first machine said. Raises Refused."""

    @abstractmethod
    def plan_lines(self, plan: Plan) -> list[str]:
        """What a dry run shows of them."""

    @abstractmethod
    def command(self, plan: Plan, part: NodePart, last: str | None) -> Command:
        """What one machine starts; `last`: the checkpoint that was found for it."""

    # ---- for an attempt ----

    @property
    @abstractmethod
    def can_go_on(self) -> bool:
        """Whether another attempt would go on from where the last one saved."""

    @abstractmethod
    def find_checkpoint(self, site: RunSite) -> str | None:
        """What the next attempt is to be told that it goes on from, which its machines have then;
        None where there is nothing to tell. Raises UserError."""

    @abstractmethod
    def prepare_machines(self, site: RunSite, plan: Plan) -> None:
        """Make the machines ready for an attempt, after all files were sent. Raises UserError."""

    @abstractmethod
    def deliveries(self) -> list[Delivery]:
        """What each machine is sent. Raises UserError."""

    @abstractmethod
    def when_stopped(self, seconds: int) -> str:
        """What its workers do once they are told to stop, within so many seconds."""

    @abstractmethod
    def hint(self, error: str, host: str) -> str | None:
        """What to do about an error on a machine, as far as it is seen here."""

    # ---- after the last attempt ----

    @abstractmethod
    def collect(self, site: RunSite, there: dict[str, str], most: int) -> Collected:
        """Bring here what it wrote, from each machine's folder in `there`, up to `most` bytes of a
        file. Raises Unwritable."""
