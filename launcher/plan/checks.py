"""What comes before a run: machines are queried and checked until nothing is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.options import Config
from contract.runs import run_id, slug
from contract.text import pluralize
from launcher import hours
from launcher.look import OpenMachines
from launcher.machines import inventory
from launcher.machines.engine import Host
from launcher.machines.inventory import CHECKOUT
from launcher.notify import Notify
from launcher.participants import Moment, Participants, Waiter
from launcher.plan import plan
from launcher.plan.plan import Plan
from launcher.terminal import Terminal
from launcher.workload import Requirements, Workload
from launcher.workloads import kind_of

# Where they are set, oneDNN and torch's own kernels use no newer instructions than they say. A
# rank's environment is made from scratch, so it has them only through the plan.
INSTRUCTION_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")

# torch for nodes of this machine that train by the checkout's own environment.
OWN_ENVIRONMENT = CHECKOUT / ".venv"
INSTALL_TORCH = [str(CHECKOUT / "tools/venv.sh"), "torch"]


def instruction_limits() -> dict[str, str]:
    """The variables above that are set in the launcher's own environment."""
    return {name: os.environ[name] for name in INSTRUCTION_LIMITS if os.environ.get(name)}


@dataclass(frozen=True)
class ReadyRun:
    """Everything that was asked and found out before anything is started: `machines` take part at
    the start, `participants` knows all of the run."""

    needs: Requirements
    machines: OpenMachines
    participants: Participants

    @property
    def run_config(self) -> Config:
        return self.needs.run_config

    @property
    def workload(self) -> Workload:
        return self.needs.workload


def check_machines(
    config: Config,
    terminal: Terminal,
    waiter: Waiter | None = None,
    run: str | None = None,
    before: Mapping[str, int] | None = None,
) -> ReadyRun:
    """Check everything and change nothing. Without a `waiter` nothing starts: machines that others
    use are checked, too. `run` is the run to continue, and `before` the weights of the machines
    that it had last, unless others are asked for. Raises UserError."""
    workload = kind_of(config).read(config, run)
    hosts = inventory.hosts_of(config)
    for text in workload.check(config, hosts):
        terminal.say(text)
    add_torch(hosts, terminal)
    participants = Participants(hosts, config)
    moment = Moment.START if waiter else Moment.DRY_RUN
    waiter = waiter or Waiter(terminal, Notify(config.notify, terminal))
    name = f"{slug(workload.name)} on {pluralize(len(hosts), 'machine')}"
    if hours.wait(config.at, terminal):
        waiter.waited = name
    machines = participants.gather(moment, Requirements(config, workload, run), waiter, name)
    try:
        config, workload = workload.decide(config, hosts, machines, before or {}, terminal)
    except BaseException:
        machines.close()
        raise
    return ReadyRun(Requirements(config, workload, run), machines, participants)


def add_torch(hosts: Sequence[Host], terminal: Terminal) -> None:
    """Install what nodes of this machine need to train, where `make env` made their environment;
    the script says how much that is, and does nothing a second time. Raises UserError."""
    ours = [
        host
        for host in hosts
        if host.engine.is_local and OWN_ENVIRONMENT in Path(host.env_python).parents
    ]
    if not ours or Path(sys.prefix) != OWN_ENVIRONMENT:
        return
    terminal.drain()
    if subprocess.call(INSTALL_TORCH):
        raise UserError(
            f"{ours[0].name} trains on this machine, which needs torch, and it could not be "
            "installed (above): make room or mend the network, then start again."
        )


def make_plan(checked: ReadyRun, machines: OpenMachines, **details: Any) -> Plan:
    """The plan of an attempt on these machines; `details` are plan.Request's. Raises UserError."""
    workload = checked.workload
    env = {**instruction_limits(), **details.pop("extra_env", {})}
    request = plan.Request(
        unix=time.time(),
        options=checked.run_config,
        workload=workload,
        code=workload.code(),
        extra_env=env,
        **details,
    )
    return plan.build(machines.hosts, machines.facts, request)


def new_id(checked: ReadyRun) -> str:
    return run_id(checked.workload.name, len(checked.machines.hosts), time.time())
