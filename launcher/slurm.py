"""`make slurm`: writes a run as a Slurm batch script, for a cluster with a queue of jobs instead of
ssh. In the job, this module carries the run out on the first machine, which reaches the other
machines by machines/slurm.py.
"""

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
# To continue a run that ended too soon, submit this same file again.
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


def write_batch_script(config: Config, host: Host, name: str) -> str:
    """Return the text of the batch script. Python, data and GPUs are those of `host`: in Slurm all
    nodes are alike, and Slurm decides which nodes a job gets. Raises UserError."""
    fields = {**asdict(host), "connection": "slurm", "env": {**instruction_limits(), **host.env}}
    del fields["owner"], fields["route"]
    data = host.data_path(config.data) if "/" in config.data else config.data
    # FORCE: Slurm gives the nodes to this job, so no other run is on them.
    options = document(replace(config, data=data, force=True))
    return TEMPLATE.format(
        run=name,
        nodes=config.nodes or 1,
        gpus=f"#SBATCH --gpus-per-node={host.gpus}\n" if host.gpus else "",
        job=shlex.quote(json.dumps({"run": name, "options": options, "host": fields})),
        python=shlex.quote(sys.executable),
    )


def check_here(host: Host, options: Config, program: Program, nodes: int) -> None:
    """Raise UserError for mistakes that this machine can find before the job starts. It has the
    checkout, perhaps torch and Slurm's tools, and the data if the inventory lists it as local."""
    local_host = replace(
        host,
        connection="local",
        address="127.0.0.1",
        env_python=sys.executable,
        node_dir=str(CHECKOUT / ".tandem" / "slurm"),
        gpus=0,
    )
    # This machine can look only at the data of a local host.
    options = options if host.engine.is_local else replace(options, data="")
    needs = Needs(options, program)
    machines = look.open_and_probe([local_host], needs)
    machines.close()
    if problems := [*judge.check_data(local_host, machines.facts[local_host.name], needs)]:
        raise Refused(problems)
    if importlib.util.find_spec("torch"):
        argv = [sys.executable, *program.check]
        # With this variable, which a run sets, messages name make's variables.
        env = {**os.environ, "TANDEM_OUTPUT": "."}
        done = subprocess.run(
            argv, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(*done.stderr.strip().splitlines()[-1:])
    else:
        text = f"{program.typed}: torch is not on this machine, so the program was not checked"
        terminal.show(text, sys.stdout)
    if tool := shutil.which("sinfo"):
        argv = [tool, "--noheader", "--format=%D"]  # the number of nodes of each partition
        output = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
        available = max((int(word) for word in output.split() if word.isdigit()), default=nodes)
        if nodes > available:
            raise UserError(
                f"NODES={nodes}: Slurm's largest partition has {available} here (sinfo)."
            )


def main(options: Config) -> int:
    """Write the script into runs/ and show how to submit it. In a job of this script, carry the run
    out. Returns the exit code. Raises UserError."""
    if JOB in os.environ:
        job = json.loads(os.environ[JOB])
        # A job that was submitted again continues the run that it has begun.
        if (folders.RUNS / job["run"] / "plan.json").exists():
            return run.resume(job["run"], {})
        options = read(job["options"])
        terminal.remember_inventory(options.inventory)
        return run.train(options, job["run"])
    program = build_program(options)
    hosts = inventory.load(Path(options.inventory))
    # Slurm may have more machines than the inventory, whose first one stands for them all.
    nodes = options.nodes or len(hosts)
    check_here(hosts[0], replace(options, nodes=None), program, nodes)
    name = run_id(program.name, nodes, time.time())
    path = CHECKOUT / RUNS / f"{name}.sbatch"
    text = write_batch_script(replace(options, nodes=nodes), hosts[0], name)
    with folders.writing(path):
        write_whole(path, text.encode(), mode=0o600)  # run_env may hold passwords
    file = path.relative_to(CHECKOUT)
    terminal.show(f"wrote {file}; nothing was started. To submit it:", sys.stdout)
    print(f"sbatch {file}")
    return 0
