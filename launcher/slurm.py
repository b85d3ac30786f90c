"""The same run as a Slurm batch script, for a cluster where jobs are queued rather than started
by ssh."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from contract.command_line import words_for_trainer
from contract.errors import UserError
from contract.options import Config
from contract.options import Options as TrainerOptions
from contract.runs import run_id
from contract.text import write_whole
from launcher import folders, terminal
from launcher.machines import inventory
from launcher.machines.engine import Host
from launcher.machines.inventory import CHECKOUT
from launcher.machines.probe import FIRST_PORT
from launcher.node.machine import PATH
from launcher.options import for_trainer, trainer_settings
from launcher.plan import preflight
from launcher.plan.checks import instruction_limits
from launcher.plan.plan import Launch, check_batch, environment
from launcher.plan.problems import data_problems

TEMPLATE = r"""#!/bin/bash
# Submit with `sbatch FILE` from a checkout that every node of the job has under the same path.
# To go on with a run that ended too soon, submit this same file again.
#SBATCH --job-name=tandem-{run}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --output=%x-%j.log
#SBATCH --signal=TERM@120
# (At the time limit the trainer gets SIGTERM 120 s earlier, and saves a checkpoint.)
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

way_to() {{ # the network card, or the own address, by which this node reaches another
    ip -o route get "$1" | sed -n "s/.* $2 \([^ ]*\).*/\1/p"
}}

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [ "$SLURM_NNODES" -gt 1 ]; then
    # This script runs on the first node. Its own name may mean 127.0.1.1 here; the second node's
    # does not.
    peer=$(getent ahosts "${{hosts[1]}}" | awk '$1 !~ /^(127\.|::1)/ {{ print $1; exit }}')
    master=$(way_to "$peer" src)
else
    peer=127.0.0.1
    master=127.0.0.1
fi
port=$(({first_port} + SLURM_JOB_ID % 1000))
export peer master port

node() {{
    local other=$master card count threads
    if [ "$SLURM_NODEID" = 0 ]; then other=$peer; fi
    card=$(way_to "$other" dev)
    count=${{SLURM_GPUS_ON_NODE:-1}}
    threads=$((SLURM_CPUS_ON_NODE > count ? SLURM_CPUS_ON_NODE / count : 1))
    export {environment}
    export TANDEM_NODE="$SLURMD_NODENAME" TANDEM_ATTEMPT=$((${{SLURM_RESTART_COUNT:-0}} + 1))
    exec {launch} \
        -m trainer --data {data} --output "$PWD/runs/{run}" --resume auto {arguments}
}}

# One node's failure ends the others; Slurm's own control groups leave no orphan.
srun --kill-on-bad-exit=1 bash -c "$(declare -f way_to node); node"
"""


def script(options: Config, settings: TrainerOptions, host: Host, run: str) -> str:
    """The batch script. Python, data and GPUs are those of `host`: in Slurm all nodes are alike.
    Raises UserError."""
    nodes = options.nodes or 1
    check_batch(["each node"], [host.gpus or 1] * nodes, settings.per_node_batch_size)
    return TEMPLATE.format(
        run=run,
        nodes=nodes,
        gpus=f"#SBATCH --gpus-per-node={host.gpus}\n" if host.gpus else "",
        first_port=FIRST_PORT,
        environment=exports(host),
        launch=launch(host, run),
        data=shlex.quote(host.data_path(options.data)),
        arguments=shlex.join(words_for_trainer(for_trainer(options))),
    )


def launch(host: Host, run: str) -> str:
    """The launch command of a run started by ssh; bash variables for what only the job knows."""
    name = f"{run}-$SLURM_JOB_ID"
    part = Launch("$SLURM_NNODES", "$SLURM_NODEID", "$count", "$master", "$port", name)
    words = [f'"{word}"' if "$" in word else word for word in part.arguments()]
    return " ".join([shlex.quote(host.env_python), *words])


def exports(host: Host) -> str:
    """The environment of a run started by ssh, with bash variables for what only the node knows.

    InfiniBand stays allowed, and PATH begins with the job's: a cluster with a queue may have both.
    """
    known = environment("$card", "$threads", host.cuda_home)
    del known["NCCL_IB_DISABLE"]
    if "PATH" in known:
        known["PATH"] = known["PATH"].replace(PATH, "$PATH")
    words = [f'{name}="{value}"' for name, value in known.items()]
    own = {**instruction_limits(), **host.env}
    return " ".join([*words, *(f"{name}={shlex.quote(own[name])}" for name in own)])


def refuse(host: Host, options: Config, settings: TrainerOptions, nodes: int) -> None:
    """Raise UserError for what the job would fail by, as far as this machine can know it: it has
    the checkout, a torchvision and Slurm's own words, and the data if the inventory says so."""
    here = replace(
        host,
        connection="local",
        address="127.0.0.1",
        env_python=sys.executable,
        node_dir=str(CHECKOUT / ".tandem" / "slurm"),
        gpus=0,
    )
    options = options if host.engine.is_local else replace(options, data="")
    asked = preflight.Requirements(options, settings)
    machines = preflight.inspect([here], asked)
    machines.close()
    facts = machines.facts[here.name]
    problems = [*preflight.model(machines, settings.model), *data_problems(here, facts)]
    if problems:
        raise UserError(*(problem.text for problem in problems))
    there = machines_of_slurm()
    if there is not None and nodes > there:
        raise UserError(f"NODES={nodes}: Slurm's largest partition has {there} here (sinfo).")


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
    """Write the script beside the runs and say how to submit it. Raises UserError."""
    settings = trainer_settings(options)
    hosts = inventory.load(Path(options.inventory))
    # Slurm may have more machines than the inventory, whose first one stands for them all.
    wanted = options.nodes if options.nodes is not None else len(hosts)
    if wanted < 1:
        raise UserError(f"NODES={wanted}: a run needs at least one machine.")
    refuse(hosts[0], replace(options, nodes=None), settings, wanted)
    host, options = hosts[0], replace(options, nodes=wanted)
    name = run_id(settings.model, wanted, time.time())
    path = CHECKOUT / "runs" / f"{name}.sbatch"
    text = script(options, settings, host, name)
    with folders.writing(path):
        write_whole(path, text.encode(), mode=0o600)  # run_env may hold passwords
    wrote = path.relative_to(CHECKOUT)
    terminal.show(f"wrote {wrote}; nothing was started. To submit it:", sys.stdout)
    print(f"sbatch {wrote}")
    return 0
