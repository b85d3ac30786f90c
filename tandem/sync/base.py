"""Describe which ranks share a machine, and define the interface of a strategy, `Sync`.

In each step a communication hook of DDP sums the ranks' gradients while backward runs. attach.py
calls the strategy in this order:

    begin(scale, exact)
    forward, backward        DDP calls the hook for each bucket
    optimizer

A strategy is not told whether the optimizer took the step. If gradients overflowed, each rank has
received sums that are not finite, and the next `begin` or `close` drops the step's errors.

If a machine has several ranks, they sum among themselves, and one of them, the leader, encodes and
sends to the other machines. The machine's network interface then carries no more than with one GPU.
The leader broadcasts the encoded result, so all ranks of a machine decode the same bytes.
"""

import dataclasses
from datetime import timedelta
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist

from contract.strategies import Strategy

from ..compat import end_group
from .carrier import Stage, new_group, to_host

# Parameters whose last sum no optimizer has used. True: the sum is still in .grad, so a step may
# use the sum. False: the loop has zeroed the sum.
Unused = Mapping[torch.Tensor, bool]
ALL_USED: Unused = {}
Future = torch.futures.Future[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Topology:
    """Assigns ranks to machines. `nodes`: the machine number of each rank, from 0, such as
    (0, 0, 1). `group`: the process group of this machine's ranks; None if no machine has two."""

    nodes: Tuple[int, ...]
    rank: int
    group: Any = None

    @property
    def rank_count(self) -> int:
        """Return the number of ranks of all machines."""
        return len(self.nodes)

    @property
    def machine_count(self) -> int:
        """Return the number of machines."""
        return max(self.nodes) + 1

    @property
    def ranks(self) -> Tuple[Tuple[int, ...], ...]:
        """Return the ranks of each machine."""
        return tuple(
            tuple(rank for rank, node in enumerate(self.nodes) if node == machine)
            for machine in range(self.machine_count)
        )

    @property
    def local_ranks(self) -> Tuple[int, ...]:
        """Return the ranks of this machine, the leader first."""
        return self.ranks[self.nodes[self.rank]]

    @property
    def leaders(self) -> Tuple[int, ...]:
        """Return the first rank of each machine, which sends for all ranks of the machine."""
        return tuple(ranks[0] for ranks in self.ranks)

    @property
    def is_leader(self) -> bool:
        return self.rank == self.local_ranks[0]

    @property
    def multi_rank_nodes(self) -> bool:
        """Return whether any machine has more than one rank."""
        return self.rank_count > self.machine_count

    def connect(self, patience: float) -> "Topology":
        """Return a copy with its process group. `patience`: its timeout in seconds. Collective."""
        if not self.multi_rank_nodes:
            return self
        group = new_group(self.ranks, timedelta(seconds=patience))
        return dataclasses.replace(self, group=group)

    def arrange_stages(
        self,
        stages: List[Stage],
        blank: Callable[[Any], Any],
        tensors_to_broadcast: Callable[[Any], List[torch.Tensor]],
    ) -> List[Stage]:
        """Return this rank's stages, from a leader's `stages`: the first encodes, the last decodes.
        A leader calls `tensors_to_broadcast` before the last stage, and sends these tensors to the
        other ranks of its machine. These ranks begin with `blank`, receive the tensors, and run
        only the last stage."""
        if not self.multi_rank_nodes:
            return stages

        def broadcast_result(bucket: Any, group: Any) -> Any:
            # A machine with one rank sends to nobody, though other machines have several ranks.
            if len(self.local_ranks) > 1:
                broadcast(tensors_to_broadcast(bucket), self.local_ranks[0], group)
            return bucket

        encode, *middle, decode = stages
        # Between machines only leaders send.
        middle = [
            dataclasses.replace(stage, groups=(self.leaders,)) if stage.sends else stage
            for stage in middle
        ]
        if not self.is_leader:
            encode = Stage(blank)
            # These stages do nothing, but remain: all ranks must make the same process groups.
            middle = [
                dataclasses.replace(stage, work=lambda bucket, group=None: bucket)
                for stage in middle
            ]
        return [encode, *middle, Stage(broadcast_result, sends=True, groups=self.ranks), decode]


def broadcast(tensors: List[torch.Tensor], source: int, group: Any) -> None:
    """Fill tensors of one dtype with those of rank `source`, by one broadcast."""
    if not tensors:
        return
    # The groups of stages are Gloo's (see carrier.py), which sends from host memory.
    flat = to_host(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    dist.broadcast(flat, source, group=group)
    if dist.get_rank() == source:
        return
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(values.view_as(tensor), non_blocking=True)


class Sync:
    """A strategy. A subclass must implement `hook`; a strategy with state also other methods."""

    follows_scale = False  # whether `begin` needs the loss scale; to read it may wait for the GPU
    scale = 1.0  # the loss scale by which the state is multiplied
    note: Optional[str] = None  # for the user, to be printed once

    def __init__(self, strategy: Strategy, patience: float = 120.0) -> None:
        self.strategy, self.patience = strategy, patience  # seconds to wait for a silent peer

    def setup(self, device: torch.device, topology: Optional[Topology] = None) -> None:
        """Prepare for gradients on `device`, before `hook` is registered. By default each rank
        counts as a machine. Collective."""
        self.topology = topology or Topology(tuple(range(dist.get_world_size())), dist.get_rank())
        if self.topology.group is not None:
            # NCCL connects in a group's first sum, which must not be within the first backward.
            dist.all_reduce(torch.zeros(1, device=device), group=self.topology.group)

    def hook(self, bucket: dist.GradBucket) -> Future:
        """Begin to average one bucket over all ranks. The future holds a tensor with the shape and
        type of the bucket's buffer."""
        raise NotImplementedError

    def end(self) -> None:
        """End threads and groups, after the last sum."""
        end_group(self.topology.group)
        self.topology = dataclasses.replace(self.topology, group=None)

    def begin(self, scale: float, exact: bool, unused: Unused = ALL_USED) -> None:
        """Close the last step, and begin a step before its first bucket. `scale`: the loss scale.
        `exact`: a strategy with state sums exactly in this step. `unused`: sums of the last step
        that no optimizer used."""

    def close(self) -> None:
        """Close a step, after its backward has returned."""

    def settle(self, unused: Unused) -> None:
        """Close a step, and undo what unused sums changed in the state."""

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """Close the step, and return this machine's state, or None if there is none. The state fits
        only a run with the same ranks on each machine. Any other run begins without a state."""
        return None

    @property
    def state_copies(self) -> float:
        """Return this rank's memory for the state after `setup`, in fp32 copies of gradients."""
        return 0.0

    def common_state(self, model: torch.nn.Module) -> Optional[Dict[str, Any]]:
        """Close the step, and return the state that is equal on all ranks, by parameter name, or
        None if there is none. The state fits a run on any ranks."""
        return None

    def load_common_state(self, model: torch.nn.Module, state: Dict[str, Any]) -> None:
        """Restore what `common_state` returned. Raises the errors of `load_state_dict`. The next
        `begin` raises UserError if ranks have loaded different states."""

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restore what `state_dict` returned, read from a file that may be damaged. Check
        everything before changing anything. Raises ValueError, LookupError, TypeError or
        OverflowError if the state does not fit."""


def sum_over_ranks(tensor: torch.Tensor, group: Any = None) -> Future:
    """Begin an all-reduce of `tensor` in place, over all ranks by default. The future holds
    `tensor`, which then has the sum."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    # The work's future holds a list of one tensor.
    return work.get_future().then(lambda done: done.value()[0])
