"""Reaches the machines of a Slurm job, as an Engine (engine.py): each command is a step of the job,
which srun starts from the job's first machine."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from dataclasses import replace

from contract.errors import UserError
from contract.interface import route
from launcher.machines.engine import Engine, Host
from launcher.machines.inventory import JOB
from launcher.machines.local import LocalNode, LocalProcess
from launcher.node.machine import IN_JOB

# --overlap lets steps share the job's resources, as other commands run while the guard runs. JOB is
# removed from the environment because it has run_env, which may have passwords. Ranks get run_env
# from their guard.
STEP = ("env", f"--unset={JOB}", f"{IN_JOB}=1", "srun", "--quiet", "--overlap", "--cpu-bind=none")
VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK_NODE = f'echo "tandem $SLURM_NODEID $SLURMD_NODENAME ${{{VISIBLE}-}}"'
# ASK_NODE prints a line such as `tandem 0 gpu01 0,1`.
ANSWER = re.compile(r"^tandem (\d{1,6}) ([\w.-]{1,250}) ([\w,-]*)$", re.MULTILINE)


class SlurmNode(LocalNode):
    """Starts commands on one machine of the job in which this process runs."""

    def start(self, argv: list[str]) -> LocalProcess:
        options = ("--nodes=1", "--ntasks=1", f"--nodelist={self.host.name}")
        return LocalProcess([*STEP, *options, *argv])


def list_machines() -> list[Host]:
    """Return the machines of the job: copies of the host in JOB, each with its machine's name,
    address and GPUs. Raises UserError."""
    template = Host(**json.loads(os.environ[JOB])["host"])
    argv = [*STEP, "--ntasks-per-node=1", "sh", "-c", ASK_NODE]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    # Sorted by the number of the machine in the job, which also becomes its node rank.
    rows = sorted((int(index), name, gpus) for index, name, gpus in ANSWER.findall(done.stdout))
    if done.returncode or len(rows) != int(os.environ["SLURM_NNODES"]):
        raise UserError(f"Slurm started no step on all machines of the job: {done.stderr.strip()}")
    # This process runs on the first machine, whose name may mean 127.0.1.1 here. So its address is
    # the source address of its route to the second machine.
    addresses = [find_address(name) for _, name, _ in rows[1:]]
    leader = (route(addresses[0])["source"] or addresses[0]) if addresses else "127.0.0.1"
    # The ranks see the GPUs that Slurm gave the job, unless run_env names other ones.
    takes_gpus = bool(template.gpus) and VISIBLE not in template.env
    return [
        replace(
            template,
            name=name,
            address=address,
            env={**template.env, **({VISIBLE: gpus} if takes_gpus else {})},
        )
        for (_, name, gpus), address in zip(rows, [leader, *addresses])
    ]


def find_address(name: str) -> str:
    """Return the first address of a machine at which other machines reach it. Raises UserError."""
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"{name}: there is no such host ({error.strerror}), but it belongs to the job."
        ) from None
    # A row is (family, type, protocol, name, (address, port, ...)).
    addresses = [str(end[0]) for _, _, _, _, end in rows]
    for address in addresses:
        if not address.startswith(("127.", "::ffff:127.")) and address != "::1":
            return address
    listed = ", ".join(addresses)
    raise UserError(
        f"{name} is {listed} on this machine, an address at which no other node can reach it."
    )


ENGINE = Engine(
    node=SlurmNode,
    is_local=False,
    guard_python="/usr/bin/python3",
    repair_hint="give all nodes of the cluster the same environment",
    data_hint="type DATA=/<folder>, a folder that every node has",
    machines=list_machines,
)
