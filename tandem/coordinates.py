"""A process's coordinates among the others, from its launcher's environment, and on its machine. No
torch."""

import dataclasses
import os
import socket
from typing import Mapping, Optional, Sequence, Tuple

# Rank, world size, rank on this machine, number of ranks on this machine, number of this machine:
# as set by torchrun and torch.distributed.launch, by Open MPI's mpirun, by the mpirun of MPICH and
# its relatives, and by srun.
VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NODEID"),
)


@dataclasses.dataclass(frozen=True)
class ProcessCoordinates:
    """A process's coordinates, read from the environment alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: Optional[int] = None  # its machine's number, if the launcher sets it


def read_coordinates(
    environ: Mapping[str, str], local_rank: Optional[int] = None
) -> ProcessCoordinates:
    """From torchrun or torch.distributed.launch, mpirun, srun, or one plain process."""
    env = {name: int(value) for name, value in environ.items() if value.isdigit()}
    for rank, size, local, count, node in VARIABLES:
        # A shell within salloc has SLURM_NTASKS but no rank; srun may set PMI_RANK, but then
        # no local rank. torch.distributed.launch may pass the local rank as an argument.
        if rank in env and env.get(size, 1) > 1 and (local in env or rank == "RANK"):
            local_rank = env.get(local, local_rank or 0)
            return ProcessCoordinates(
                env[rank], env[size], local_rank, env.get(count, 1), env.get(node)
            )
    return ProcessCoordinates()


def host_name(environ: Mapping[str, str]) -> str:
    """This machine's name: the inventory's, where a launcher of ours has set it."""
    return environ.get("TANDEM_NODE") or socket.gethostname()


def numbered(machines: Sequence[object]) -> Tuple[int, ...]:
    """The machine of each rank, as a number from 0, from what each calls its own machine."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(machines))}
    return tuple(numbers[name] for name in machines)


def cores() -> int:
    """How many cores of the machine this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
