"""Prepares a run: checks the machines until nothing is wrong, then plans attempts.

run.py, measure.py and evaluate.py call `check_machines`. They and lifecycle.py call `make_plan` for
each attempt. participants.py selects machines, judge.py checks them, plan.py computes the plan.
"""

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

# These variables limit the CPU instructions that oneDNN and torch use. A rank does not inherit the
# launcher's environment, so the plan passes these variables on.
INSTRUCTION_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")

# Nodes on this machine may train with the checkout's environment, which has no torch at first.
CHECKOUT_ENVIRONMENT = CHECKOUT / ".venv"
INSTALL_TORCH = [str(CHECKOUT / "tools/venv.sh"), "torch"]


def instruction_limits() -> dict[str, str]:
    """Return the INSTRUCTION_LIMITS that are set in the launcher's environment."""
    return {name: os.environ[name] for name in INSTRUCTION_LIMITS if os.environ.get(name)}


@dataclass(frozen=True)
class ReadyRun:
    """Holds a checked run before its start: `machines` participate at the start, and `participants`
    knows all machines that the run may use."""

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
    """Check options and machines, without changing anything on the machines. A dry run has no
    `waiter`, and also checks machines that are in use. `run`: the run to continue; `decided`: the
    decisions of its ranks. Raises UserError."""
    # Mistakes that the control node finds without the machines are reported first.
    program, hosts = build_program(config), inventory.hosts_of(config)
    read_balance(config.balance or BALANCE_AUTO, [host.name for host in hosts])
    terminal.say(*program.notes)
    add_torch(hosts, terminal)
    participants = Participants(hosts, config)
    moment = Moment.START if waiter else Moment.DRY_RUN
    waiter = waiter or Waiter(terminal, Notify(config.notify, terminal))
    name = f"{slug(program.name)} on {pluralize(len(hosts), 'machine')}"
    if hours.wait_until(config.at, terminal):
        waiter.waited = name
    needs = Needs(config, program, run, decided or {})
    machines = participants.gather(moment, needs, waiter, name)
    # Fetching weights and packages may take long, so it comes after all other checks.
    try:
        program = fetch_files(with_layer(program, machines), terminal)
    except BaseException:
        machines.close()
        raise
    return ReadyRun(replace(needs, program=program), machines, participants)


def add_torch(hosts: Sequence[Host], terminal: Terminal) -> None:
    """Install torch for nodes on this machine whose environment `make env` made. The script prints
    how much it downloads, and does nothing if torch is installed. Raises UserError."""
    local_hosts = [host for host in hosts if host.engine.is_local]
    torch_hosts = [h for h in local_hosts if CHECKOUT_ENVIRONMENT in Path(h.env_python).parents]
    # Another environment, in which somebody runs the launcher, is not changed.
    if not torch_hosts or Path(sys.prefix) != CHECKOUT_ENVIRONMENT:
        return
    terminal.drain()  # the script prints to the terminal, too
    if subprocess.call(INSTALL_TORCH):
        raise UserError(
            f"{torch_hosts[0].name} trains on this machine, which needs torch, and it could not be "
            "installed (above): make room or repair the network, then start again."
        )


def make_plan(ready: ReadyRun, machines: OpenMachines, **details: Any) -> Plan:
    """Return the plan of an attempt on these machines. `details`: further fields of PlanRequest,
    such as the run's name and the attempt's number. Raises UserError."""
    needs, program, config = ready.needs, ready.program, ready.config
    measured = None
    # Ranks of our trainer decide their options by measurements. Ranks of a script only ask for
    # their parts of a batch.
    if program.request:
        level = devices.choose_precision(program, machines, needs.decided.get("precision"))
        expected_request = replace(program.request, precision=level.name if level else "auto")
        measured = collect_measurements(
            config, expected_request, ready.participants.hosts, machines, needs.decided
        )
    elif program.divides_batches:
        measured = collect_script_speeds(ready, machines)
    request = plan.PlanRequest(
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
    """Return the measurements by which the ranks of the trainer decide, for an attempt on
    `machines`. `all_hosts`: the machines that the run may use; `request.precision`: the precision
    that the ranks will probably choose. Raises UserError."""
    balance = read_balance(config.balance or BALANCE_AUTO, [host.name for host in all_hosts])
    hosts = machines.hosts
    setting = request.make_setting([host.name for host in hosts], request.precision)
    path = runs.prediction_path(folders.RUNS, request.model, len(hosts))
    command = verbs.format_command(
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
        prediction_advice=verbs.with_inventory(f"`{command}` makes one"),
        balance=balance,
        decided=decided,
    )
    # A single machine has no link to others, so no strategy has to be predicted.
    needs_prediction = len(hosts) > 1 and request.sync == AUTO
    if needs_prediction and find_prediction(measured, setting, request.phases) is None:
        # The report writes a prediction from an earlier run of the model, or from measurements of
        # `make plan`. Without these it writes nothing.
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
    # Measured speeds are for whole machines, so nodes that share a machine get equal batches.
    if 1 < len(hosts) == len(set(measured.hosts.values())) and balance == BALANCE_AUTO:
        from report import measurements  # imported late: few runs need it

        speeds = measurements.newest_speeds(folders.RUNS, setting)
        measured = replace(measured, speeds=speeds)
    return measured


def collect_script_speeds(ready: ReadyRun, machines: OpenMachines) -> Measurements:
    """Return the measured speeds for an attempt of a script, whose ranks ask tandem.batch_size or
    tandem.sampler for their parts of a batch. Raises UserError."""
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
        from report import measurements  # imported late: few runs need it

        options = {"script": config.script, "folder": config.folder}
        speeds = measurements.script_speeds(folders.RUNS, program.name, options)
        measured = replace(measured, speeds=speeds)
    return measured


def new_id(ready: ReadyRun) -> str:
    """Return the name of a run that starts now."""
    return run_id(ready.program.name, len(ready.machines.hosts), time.time())
