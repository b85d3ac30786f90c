"""Meet the other processes: find ranks, nodes, device and process group, under any launcher.

process.py calls `start` once, and the trainer's other files use the `World` that it returns.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import re
import subprocess
from datetime import timedelta
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from contract.errors import RankError, UserError
from contract.interface import interface_towards
from contract.options import Options
from contract.precisions import Device, cpu_has_bf16, refuse_mixture
from contract.split import SMALLEST, split_batch
from tandem.compat import bound_to, nccl_settings
from tandem.coordinates import ProcessCoordinates, host_name, number_machines, read_coordinates
from tandem.exchange import Exchange

CPUINFO = pathlib.Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True)
class World(ProcessCoordinates):
    """A process's coordinates, and the facts that all ranks exchange when they meet."""

    node_rank: int = 0  # the number of this machine
    nodes: Tuple[int, ...] = (0,)  # of each rank the number of its machine, from 0
    host: str = "localhost"
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    batches: Tuple[int, ...] = (1,)  # of each rank its samples of a full step
    decided: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the record of decide.py
    devices: Tuple[Device, ...] = ()  # of each rank, for the choice of the precision
    store: Optional[dist.Store] = None
    exchange: Optional[Exchange] = None  # None in a world of one

    @property
    def global_batch(self) -> int:
        return sum(self.batches)

    @property
    def smallest(self) -> int:
        """Return the fewest samples that a rank gets in a step; a rank may also get none."""
        return min(SMALLEST, *self.batches)

    def rank_samples(self, count: int) -> List[int]:
        """Split a step of `count` samples over the ranks."""
        return split_batch(count, self.batches, self.smallest)

    def gather(self, thing: Any) -> List[Any]:
        """Gather a value of JSON from each rank, in rank order, on every rank; tuples become lists.
        Collective."""
        return [thing] if self.exchange is None else self.exchange.json(thing)

    def gather_state(self, thing: Any) -> List[Any]:
        """Gather a value of tensors and plain containers from each rank. Collective."""
        return [thing] if self.exchange is None else self.exchange.state(thing)

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Raise a UserError of one rank within the block on all ranks. Its exit code is that of the
        first rank with an error. Collective."""
        # Otherwise the other ranks would wait in their next collective for the rank that has ended.
        local_error, code = "", 0
        try:
            yield
        except UserError as error:
            local_error, code = str(error), error.code
        answers = self.gather((local_error, self.host, code))
        errors = [(sentence, host) for sentence, host, _ in answers]
        if any(sentence for sentence, _ in errors):
            # Each different error of a host once, although several of its ranks may have it.
            by_host = [
                f"{host}: {sentence}" for sentence, host in dict.fromkeys(errors) if sentence
            ]
            is_common = len({sentence for sentence, _ in errors}) == 1  # all ranks have the same
            joint_error = UserError(local_error if is_common else " ".join(by_host))
            joint_error.code = next(code for _, _, code in answers if code)
            raise joint_error


def start(options: Options) -> World:
    """Choose the device, then meet the other ranks. Raises UserError for options or coordinates
    that cannot work. Collective."""
    process = read_coordinates(os.environ, options.local_rank)
    device = _choose_device(options, process)
    # Before anything that could touch a device: NCCL calls a model on another GPU "invalid usage".
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # torch's defaults for TF32 differ from version to version.
    if options.tf32 != "auto":
        torch.backends.cuda.matmul.allow_tf32 = options.tf32 == "on"
        torch.backends.cudnn.allow_tf32 = options.tf32 == "on"
    # cuBLAS reads its setting only once.
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    world = World(**vars(process), host=host_name(os.environ), device=device)
    local_device = describe_device(device, world.host, options)
    world = dataclasses.replace(world, devices=(local_device,))
    if process.size > 1:
        meeting = _meet(options, process, local_device, device)
        world = dataclasses.replace(world, **meeting._asdict())
    # Ranks with the same node number, or without a number with the same host name, share a machine.
    nodes = number_machines(world.gather(world.host if process.node is None else process.node))
    return dataclasses.replace(
        world,
        node_rank=nodes[process.rank],
        nodes=nodes,
        local_size=nodes.count(nodes[process.rank]),
    )


def _choose_device(options: Options, process: ProcessCoordinates) -> torch.device:
    """Choose this process's GPU, or the CPU. Raises UserError; RankError for too few GPUs."""
    count = torch.cuda.device_count() if options.device != "cpu" else 0
    if options.device == "cuda" and count == 0:
        raise UserError("--device cuda: this machine has no usable GPU; see nvidia-smi.")
    if count == 0:
        return torch.device("cpu")
    # srun and mpirun may show each process only its own GPU, as number 0.
    index = 0 if count == 1 and "LOCAL_RANK" not in os.environ else process.local_rank
    if index >= count:
        raise RankError(
            f"local rank {index} has no GPU: this machine has {count}. "
            f"Start {count} processes here (--nproc_per_node {count})."
        )
    return torch.device("cuda", index)


def _backend(device: torch.device) -> str:
    """Return the backend for gradients. Tests replace this function: NCCL needs a GPU for each
    process, and they let two share one, over Gloo."""
    return "nccl" if device.type == "cuda" else "gloo"


class Meeting(NamedTuple):
    """The fields of World that exist once the group is formed. Only the trainer uses `store`."""

    store: dist.Store
    exchange: Exchange
    devices: Tuple[Device, ...]


def _meet(
    options: Options, process: ProcessCoordinates, local_device: Device, device: torch.device
) -> Meeting:
    """Form the process group. Raises UserError if the ranks do not find each other."""
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _find_first_host(process)
    os.environ.setdefault("MASTER_PORT", "29500")
    # Gloo and NCCL by themselves may choose an interface that does not lead to the other machines.
    interface = interface_towards(os.environ["MASTER_ADDR"])
    backend = _backend(device)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if backend == "nccl":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # = means exactly this one
    patience = timedelta(seconds=options.timeout)
    if backend == "nccl":
        os.environ.update(nccl_settings())
    try:
        # Devices are exchanged first: GPUs and CPUs together cannot form a group.
        store, *_ = next(rendezvous("env://", process.rank, process.size, timeout=patience))
        store.set_timeout(patience)
        trainer_store = dist.PrefixStore("trainer", store)
        devices = exchange_devices(local_device, process.rank, process.size, trainer_store)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=process.rank,
            world_size=process.size,
            timeout=patience,
            **(bound_to(device) if backend == "nccl" else {}),
        )
        exchange = Exchange(patience)
        exchange.meet()
    except (RuntimeError, OSError) as error:
        if "nccl" in str(error).lower():
            raise  # the ranks have met, and NCCL's message says what is wrong
        raise UserError(
            f"rank {process.rank} of {process.size} could not connect to the other ranks at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
            f"{options.timeout} s: {str(error).splitlines()[0]}. Were {process.size} "
            "processes started, and does the address belong to the first machine?"
        ) from error
    return Meeting(trainer_store, exchange, devices)


def _find_first_host(process: ProcessCoordinates) -> str:
    """Return the address of the first machine. Raises UserError if the environment lacks it."""
    if process.local_size == process.size or os.environ.get("SLURM_NNODES") == "1":
        return "127.0.0.1"
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError("MASTER_ADDR is not set: set it to the address of the first machine.")
    # Slurm lists nodes in a short form, like pc[1-4], that only Slurm's scontrol expands.
    answer = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
    )
    return answer.stdout.split()[0]


def describe_device(device: torch.device, host: str, options: Options) -> Device:
    """Describe this rank's device; with --parallel dp, the weakest of the process's GPUs."""
    versions: Dict[str, Any] = {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    if device.type == "cpu":
        # A line of /proc/cpuinfo is `flags           : fpu vme de ... avx512_bf16`.
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
        flags = re.findall(r"^flags\s*:(.*)", text, re.MULTILINE)
        bf16 = cpu_has_bf16(flags[0].split() if flags else (), os.environ)
        return Device(host, "cpu", platform.machine(), bf16=bf16, **versions)
    gpus = range(torch.cuda.device_count()) if options.parallel != "ddp" else [device.index]
    weakest = min(gpus, key=torch.cuda.get_device_capability)
    major, minor = torch.cuda.get_device_capability(weakest)
    name = torch.cuda.get_device_name(weakest)
    return Device(host, "cuda", name, sm=10 * major + minor, **versions)


def exchange_devices(
    local_device: Device, rank: int, size: int, store: dist.Store
) -> Tuple[Device, ...]:
    """Exchange devices over `store`; return them in rank order. Raises UserError on all ranks if
    GPUs and CPUs are mixed. Collective."""
    store.set(f"device/{rank}", json.dumps(local_device))
    devices = tuple(Device(*json.loads(store.get(f"device/{number}"))) for number in range(size))
    store.set(f"device/read/{rank}", "1")
    if rank == 0:
        # This process may host the store, so it must not exit before all ranks have read.
        store.wait([f"device/read/{number}" for number in range(size)])
    refuse_mixture(devices)
    return devices
