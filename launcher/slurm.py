"""The same run as a Slurm batch script, for a cluster where jobs are queued rather than started
by ssh: the job's first machine carries it out, and reaches the others by machines/slurm.py."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.options import Config
from contract.runs import RUNS, run_id
from contract.text import write_whole
from launcher import folders, judge, look, run, terminal
from launcher.machines import inventory
from launcher.machines.engine import Host
from launcher.machines.inventory import CHECKOUT, JOB
from launcher.options import document, read
from launcher.plan.checks import instruction_limits
from launcher.problems import Refused
from launcher.program import Needs, Program
from launcher.programs import build_program

TEMPLATE = r"""#!/bin/bash
# Submit with `sbatch FILE` from a checkout that every node of the job has under the same path.
# To go on with a run that ended too soon, submit this same file again.
#SBATCH --job-name=tandem-{run}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@120
# (120 s before the time limit the run is stopped, and saves a checkpoint.)
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
export TANDEM_JOB={job}
exec {python} -m launcher slurm
"""


def batch_script(config: Config, host: Host, name: str) -> str:
    """The batch script. Python, data and GPUs are those of `host`: in Slurm all nodes are alike,
    and Slurm decides who has them. Raises UserError."""
    nodes = config.nodes or 1
    own = {**asdict(host), "connection": "slurm", "env": {**instruction_limits(), **host.env}}
    del own["owner"], own["route"]
    data = host.data_path(config.data) if "/" in config.data else config.data
    options = document(replace(config, data=data, force=True))
    return TEMPLATE.format(
        run=name,
        nodes=nodes,
        gpus=f"#SBATCH --gpus-per-node={host.gpus}\n" if host.gpus else "",
        job=shlex.quote(json.dumps({"run": name, "options": options, "host": own})),
        python=shlex.quote(sys.executable),
    )


def run_job(job: dict[str, Any]) -> int:
    """The run of the job that this process is in, from its newest checkpoint where it was begun
    before. Returns the exit code."""
    if (folders.RUNS / job["run"] / "plan.json").exists():
        return run.resume(job["run"], {})
    options = read(job["options"])
    terminal.keep_machines(options.inventory)
    return run.train(options, job["run"])


def refuse(host: Host, options: Config, program: Program, nodes: int) -> None:
    """Raise UserError for what the job would fail by, as far as this machine can know it: it has
    the checkout, perhaps torch and Slurm's own tools, and the data if the inventory says so."""
    here = replace(
        host,
        connection="local",
        address="127.0.0.1",
        env_python=sys.executable,
        node_dir=str(CHECKOUT / ".tandem" / "slurm"),
        gpus=0,
    )
    options = options if host.engine.is_local else replace(options, data="")
    needs = Needs(options, program)
    machines = look.open_and_probe([here], needs)
    machines.close()
    if found := [*judge.data(here, machines.facts[here.name], needs)]:
        raise Refused(found)
    if importlib.util.find_spec("torch"):
        argv = [sys.executable, *program.check]
        env = {**os.environ, "TANDEM_OUTPUT": "."}  # as in a run, it speaks of make's variables
        done = subprocess.run(
            argv, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(*done.stderr.strip().splitlines()[-1:])
    else:
        said = "torch is not on this machine, so the program was not checked"
        terminal.show(f"{program.typed}: {said}", sys.stdout)
    available = machines_of_slurm()
    if available is not None and nodes > available:
        raise UserError(f"NODES={nodes}: Slurm's largest partition has {available} here (sinfo).")


def machines_of_slurm() -> int | None:
    """How many nodes the largest partition has; None where Slurm's tools are not at hand."""
    tool = shutil.which("sinfo")
    if tool is None:
        return None
    said = subprocess.run(
        [tool, "--noheader", "--format=%D"], capture_output=True, text=True, check=False
    ).stdout
    counts = [int(word) for word in said.split() if word.isdigit()]
    return max(counts, default=None)


def main(options: Config) -> int:
    """Write the script beside the runs and say how to submit it; in its job, carry it out. Raises
    UserError."""
    if JOB in os.environ:
        return run_job(json.loads(os.environ[JOB]))
    program = build_program(options)
    hosts = inventory.load(Path(options.inventory))
    # Slurm may have more machines than the inventory, whose first one stands for them all.
    wanted = options.nodes or len(hosts)
    refuse(hosts[0], replace(options, nodes=None), program, wanted)
    host, options = hosts[0], replace(options, nodes=wanted)
    name = run_id(program.name, wanted, time.time())
    path = CHECKOUT / RUNS / f"{name}.sbatch"
    text = batch_script(options, host, name)
    with folders.writing(path):
        write_whole(path, text.encode(), mode=0o600)  # run_env may hold passwords
    wrote = path.relative_to(CHECKOUT)
    terminal.show(f"wrote {wrote}; nothing was started. To submit it:", sys.stdout)
    print(f"sbatch {wrote}")
    return 0
