"""Collects the speeds of a run's machines and the prediction of `make plan`, before the run starts.
The ranks get them as one file and decide by them (contract/decisions.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from contract import runs, verbs
from contract.decisions import Measurements, Request, find_prediction, read_balance
from contract.options import Config
from contract.strategies import AUTO
from launcher import folders
from launcher.look import OpenMachines
from launcher.machines import inventory
from launcher.machines.engine import Host


def collect_measurements(
    config: Config,
    request: Request,
    all_hosts: Sequence[Host],
    machines: OpenMachines,
    decided: Mapping[str, Any],
) -> Measurements:
    """Return what is known for an attempt on these machines, of `all_hosts` that the run may use.
    `request.precision`: what the ranks will probably decide. Raises UserError."""
    balance = read_balance(config.balance, [host.name for host in all_hosts])
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
        subprocess.run(argv, cwd=inventory.CHECKOUT, capture_output=True, check=False)
        measured = replace(measured, prediction=runs.read_prediction(path))
    # Nodes of one machine share its speed, and get equal batches whatever was measured.
    if 1 < len(hosts) == len(set(measured.hosts.values())) and balance == AUTO:
        from report import measurements  # which no run with equal batches needs

        speeds = measurements.newest_speeds(folders.RUNS, setting)
        measured = replace(measured, speeds=speeds)
    return measured
