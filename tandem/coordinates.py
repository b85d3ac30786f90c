"""Find out which rank this process is, from the environment that its launcher sets. This module
must not import torch, because the trainer reads the rank before it imports torch."""

import dataclasses
import os
import socket
from typing import Mapping, Optional, Sequence, Tuple

# The variables of: rank, world size, rank on this machine, number of ranks on this machine, number
# of this machine; "" if there is none. The lines are for torchrun and torch.distributed.launch, for
# Open MPI's mpirun, for the mpirun of MPICH and its relatives, and for srun.
VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NODEID"),
)


@dataclasses.dataclass(frozen=True)
class ProcessCoordinates:
    """The rank of a process in the run and on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: Optional[int] = None  # the machine's number, if the launcher sets it


def read_coordinates(
    environ: Mapping[str, str], local_rank: Optional[int] = None
) -> ProcessCoordinates:
    """Return the coordinates that torchrun, torch.distributed.launch, mpirun or srun set, or rank 0
    of 1 if none of them started this process. `local_rank`: the script's --local_rank."""
    env = {name: int(value) for name, value in environ.items() if value.isdigit()}
    for rank, size, local, count, node in VARIABLES:
        # A shell within salloc has SLURM_NTASKS but no rank. srun may set PMI_RANK, but then no
        # local rank. torch.distributed.launch may pass the local rank only as an argument.
        if rank in env and env.get(size, 1) > 1 and (local in env or rank == "RANK"):
            local_rank = env.get(local, local_rank or 0)
            return ProcessCoordinates(
                env[rank], env[size], local_rank, env.get(count, 1), env.get(node)
            )
    return ProcessCoordinates()


def host_name(environ: Mapping[str, str]) -> str:
    """Return this machine's name: its name in the inventory if Tandem's launcher has set it."""
    return environ.get("TANDEM_NODE") or socket.gethostname()


def number_machines(machines: Sequence[object]) -> Tuple[int, ...]:
    """Return each rank's machine as a number from 0: (0, 1, 0) for the names a, b, a."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(machines))}
    return tuple(numbers[name] for name in machines)


def count_cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
