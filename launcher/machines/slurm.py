"""The machines of a Slurm job, each reached by a step of that job (srun) from the first of them."""

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

# Steps share what the job has: a guard, and the commands that look after it. run_env is in JOB, may
# hold passwords, and reaches the processes that it is for by their guard.
STEP = ("env", f"--unset={JOB}", f"{IN_JOB}=1", "srun", "--quiet", "--overlap", "--cpu-bind=none")
VISIBLE = "CUDA_VISIBLE_DEVICES"
SAY = f'echo "tandem $SLURM_NODEID $SLURMD_NODENAME ${{{VISIBLE}-}}"'
SAID = re.compile(r"^tandem (\d{1,6}) ([\w.-]{1,250}) ([\w,-]*)$", re.MULTILINE)


class SlurmNode(LocalNode):
    """One machine of the job that this process is in."""

    def start(self, argv: list[str]) -> LocalProcess:
        one = ("--nodes=1", "--ntasks=1", f"--nodelist={self.host.name}")
        return LocalProcess([*STEP, *one, *argv])


def machines() -> list[Host]:
    """Those of the job, each as the host in JOB, with the cards that it has there. Raises
    UserError."""
    like = Host(**json.loads(os.environ[JOB])["host"])
    argv = [*STEP, "--ntasks-per-node=1", "sh", "-c", SAY]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    found = sorted((int(place), name, cards) for place, name, cards in SAID.findall(done.stdout))
    if done.returncode or len(found) != int(os.environ["SLURM_NNODES"]):
        raise UserError(f"Slurm started no step on all machines of the job: {done.stderr.strip()}")
    addresses = meeting([name for _, name, _ in found])
    own = {} if VISIBLE in like.env or not like.gpus else {VISIBLE: None}
    return [
        replace(like, name=name, address=address, env={**like.env, **dict.fromkeys(own, cards)})
        for (_, name, cards), address in zip(found, addresses)
    ]


def meeting(names: list[str]) -> list[str]:
    """The address of each. That of the first, where this runs, is the one by which it reaches the
    second: its own name may mean 127.0.1.1 here. Raises UserError."""
    if len(names) == 1:
        return ["127.0.0.1"]
    others = [address_of(name) for name in names[1:]]
    return [route(others[0])["source"] or others[0], *others]


def address_of(name: str) -> str:
    """The first by which other machines reach it. Raises UserError."""
    try:
        every = [str(row[4][0]) for row in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise UserError(f"{name}: no such host ({error.strerror}), and the job is on it.") from None
    others = [one for one in every if not one.startswith(("127.", "::ffff:127.")) and one != "::1"]
    if not others:
        raise UserError(f"{name} means {', '.join(every)} here, by which no other node is reached.")
    return others[0]


ENGINE = Engine(
    node=SlurmNode,
    is_local=False,
    guard_python="/usr/bin/python3",
    repair_hint="see that all nodes of the cluster have the same environment",
    data_hint="give DATA=/<folder> that every node has",
    machines=machines,
)
