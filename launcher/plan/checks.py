"""Prepares a run: machines are queried and checked until nothing is wrong, then it is planned."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contract import runs, verbs
from contract.decisions import AUTO as BALANCE_AUTO
from contract.decisions import Measurements, Request, find_prediction, read_balance
from contract.errors import UserError
from contract.options import Config
from contract.runs import run_id, slug
from contract.strategies import AUTO
from contract.text import pluralize
from launcher import folders, hours
from launcher.look import OpenMachines
from launcher.machines import inventory
from launcher.machines.engine import Host
from launcher.machines.inventory import CHECKOUT
from launcher.notify import Notify
from launcher.participants import Moment, Participants, Waiter
from launcher.plan import devices, plan
from launcher.plan.plan import Plan
from launcher.plan.sending import current_code, fetch_files, file_codes, with_layer
from launcher.program import Needs, Program
from launcher.programs import build_program
from launcher.terminal import Terminal

# Where they are set, oneDNN and torch's own kernels use no newer instructions than they say. A
# rank's environment is made from scratch, so it has them only through the plan.
INSTRUCTION_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")

# torch for nodes of this machine that train by the checkout's own environment.
OWN_ENVIRONMENT = CHECKOUT / ".venv"
INSTALL_TORCH = [str(CHECKOUT / "tools/venv.sh"), "torch"]


def instruction_limits() -> dict[str, str]:
    """Return the variables above that are set in the launcher's environment."""
    return {name: os.environ[name] for name in INSTRUCTION_LIMITS if os.environ.get(name)}


@dataclass(frozen=True)
class ReadyRun:
    """Everything that was found out before anything is started: `machines` participate at the
    start, `participants` knows all machines of the run."""

    needs: Needs
    machines: OpenMachines
    participants: Participants

    @property
    def config(self) -> Config:
        return self.needs.config

    @property
    def program(self) -> Program:
        return self.needs.program


def check_machines(
    config: Config,
    terminal: Terminal,
    waiter: Waiter | None = None,
    run: str | None = None,
    decided: Mapping[str, Any] | None = None,
) -> ReadyRun:
    """Check everything and change nothing. A dry run has no `waiter`, and also checks machines that
    are in use. `run` is the run to continue, and `decided` what its ranks decided. Raises
    UserError."""
    # First come the mistakes that no machine need be asked for.
    program, hosts = build_program(config), inventory.hosts_of(config)
    read_balance(config.balance or BALANCE_AUTO, [host.name for host in hosts])
    terminal.say(*program.notes)
    add_torch(hosts, terminal)
    participants = Participants(hosts, config)
    moment = Moment.START if waiter else Moment.DRY_RUN
    waiter = waiter or Waiter(terminal, Notify(config.notify, terminal))
    name = f"{slug(program.name)} on {pluralize(len(hosts), 'machine')}"
    if hours.wait(config.at, terminal):
        waiter.waited = name
    needs = Needs(config, program, run, decided or {})
    machines = participants.gather(moment, needs, waiter, name)
    # Only now: weights and packages are fetched when nothing else can keep the run from starting.
    try:
        program = fetch_files(with_layer(program, machines), terminal)
    except BaseException:
        machines.close()
        raise
    return ReadyRun(replace(needs, program=program), machines, participants)


def add_torch(hosts: Sequence[Host], terminal: Terminal) -> None:
    """Install torch for nodes of this machine if `make env` made their environment. The script says
    how much that is, and does nothing a second time. Raises UserError."""
    local_hosts = [host for host in hosts if host.engine.is_local]
    users = [host for host in local_hosts if OWN_ENVIRONMENT in Path(host.env_python).parents]
    if not users or Path(sys.prefix) != OWN_ENVIRONMENT:
        return
    terminal.drain()
    if subprocess.call(INSTALL_TORCH):
        raise UserError(
            f"{users[0].name} trains on this machine, which needs torch, and it could not be "
            "installed (above): make room or repair the network, then start again."
        )


def make_plan(ready: ReadyRun, machines: OpenMachines, **details: Any) -> Plan:
    """Return the plan of an attempt on these machines; `details` are plan.Request's. Raises
    UserError."""
    needs, program, config = ready.needs, ready.program, ready.config
    measured = None
    # Ranks of a script decide nothing, so nothing is measured for them.
    if program.request:
        level = devices.precision(program, machines, needs.decided.get("precision"))
        expected = replace(program.request, precision=level.name if level else "auto")
        all_hosts = ready.participants.hosts
        measured = collect_measurements(config, expected, all_hosts, machines, needs.decided)
    elif program.divides_batches:
        measured = collect_script_speeds(ready, machines)
    request = plan.Request(
        unix=time.time(),
        options=config,
        program=program,
        code=current_code(program),
        files=file_codes(program),
        extra_env={**instruction_limits(), **details.pop("extra_env", {})},
        measured=measured,
        **details,
    )
    return plan.build(machines.hosts, machines.facts, request)


def collect_measurements(
    config: Config,
    request: Request,
    all_hosts: Sequence[Host],
    machines: OpenMachines,
    decided: Mapping[str, Any],
) -> Measurements:
    """Return what is known for an attempt on these machines, of `all_hosts` that the run may use.
    `request.precision`: what the ranks will probably decide. Raises UserError."""
    balance = read_balance(config.balance or BALANCE_AUTO, [host.name for host in all_hosts])
    hosts = machines.hosts
    setting = request.setting([host.name for host in hosts], request.precision)
    path = runs.prediction_path(folders.RUNS, request.model, len(hosts))
    command = verbs.line(
        "plan",
        NODES=len(setting.machines),
        MODEL=setting.model,
        BATCH=setting.batch,
        PRECISION=setting.precision,
        ARGS=f"--image_size {setting.image_size}" if setting.image_size else None,
    )
    measured = Measurements(
        hosts={host.name: machines.facts[host.name].machine for host in hosts},
        prediction=runs.read_prediction(path),
        measure=verbs.with_inventory(f"`{command}` makes one"),
        balance=balance,
        decided=decided,
    )
    # A single machine has no link, so any strategy would do.
    needs_prediction = len(hosts) > 1 and request.sync == AUTO
    if needs_prediction and find_prediction(measured, setting, request.phases) is None:
        # The report predicts from an earlier run of the model, or from what `make plan` measured.
        # If there is neither, it writes nothing.
        options = {
            "--nodes": len(setting.machines),
            "--model": setting.model,
            "--batch": setting.batch,
            "--precision": setting.precision,
            "--image-size": setting.image_size,
            "--machines": ",".join(setting.machines),
            "--runs": folders.RUNS,
        }
        words = [f"{name}={value}" for name, value in options.items() if value is not None]
        argv = [sys.executable, "-m", "report", "plan", *words]
        subprocess.run(argv, cwd=CHECKOUT, capture_output=True, check=False)
        measured = replace(measured, prediction=runs.read_prediction(path))
    # Nodes of one machine share its speed, and get equal batches whatever was measured.
    if 1 < len(hosts) == len(set(measured.hosts.values())) and balance == BALANCE_AUTO:
        from report import measurements  # which no run with equal batches needs

        speeds = measurements.newest_speeds(folders.RUNS, setting)
        measured = replace(measured, speeds=speeds)
    return measured


def collect_script_speeds(ready: ReadyRun, machines: OpenMachines) -> Measurements:
    """Return what is known for an attempt of a script, whose ranks ask tandem.batch_size or
    tandem.sampler for their parts. Raises UserError."""
    config, program, hosts = ready.config, ready.program, machines.hosts
    all_names = [host.name for host in ready.participants.hosts]
    measured = Measurements(
        hosts={host.name: machines.facts[host.name].machine for host in hosts},
        balance=read_balance(config.balance or BALANCE_AUTO, all_names),
        is_typed=config.balance is not None,
        ranks={
            name: node_devices.processes
            for name, node_devices in devices.assign(hosts, machines.facts, program).items()
        },
        unknown=f"in the last {runs.SCRIPT_DAYS} days, no run of this script has timed {{}} "
        "(tandem.timings): the next run will know its speed",
        decided=ready.needs.decided,
    )
    if len(hosts) > 1 and measured.balance == BALANCE_AUTO:
        from report import measurements  # which no run with equal batches needs

        options = {"script": config.script, "folder": config.folder}
        speeds = measurements.script_speeds(folders.RUNS, program.name, options)
        measured = replace(measured, speeds=speeds)
    return measured


def new_id(ready: ReadyRun) -> str:
    return run_id(ready.program.name, len(ready.machines.hosts), time.time())
