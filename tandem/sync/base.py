"""Describe which ranks share a machine, and define the interface of a strategy.

All ranks communicate in each step: a communication hook of DDP sums their gradients while backward
runs.

    begin(scale, exact)
    forward, backward        the hook sums here
    optimizer

Nobody tells a strategy whether the optimizer took the step. If gradients overflowed, each rank
received sums that are not finite, and the next `begin` or `close` acts on that.

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
# use it. False: the loop has zeroed it.
Unused = Mapping[torch.Tensor, bool]
ALL_USED: Unused = {}
Future = torch.futures.Future[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Topology:
    """Assigns ranks to machines. `nodes`: the machine number of each rank, from 0. `group`: the
    process group of this machine's ranks; None if each machine has one rank."""

    nodes: Tuple[int, ...]
    rank: int
    group: Any = None

    @property
    def count(self) -> int:
        """Return the number of machines."""
        return max(self.nodes) + 1

    @property
    def ranks(self) -> Tuple[Tuple[int, ...], ...]:
        """Return the ranks of each machine."""
        return tuple(
            tuple(rank for rank, node in enumerate(self.nodes) if node == machine)
            for machine in range(self.count)
        )

    @property
    def local_ranks(self) -> Tuple[int, ...]:
        """Return the ranks of this machine, the leader first."""
        return self.ranks[self.nodes[self.rank]]

    @property
    def leaders(self) -> Tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.ranks)

    @property
    def is_leader(self) -> bool:
        return self.rank == self.local_ranks[0]

    @property
    def multi_rank_nodes(self) -> bool:
        """Return whether any machine has more than one rank."""
        return len(self.nodes) > self.count

    def connect(self, patience: float) -> "Topology":
        """Return a copy with its process group, whose collectives time out after `patience`
        seconds. Collective."""
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
        """Return this rank's stages. A leader broadcasts `tensors_to_broadcast` before the last
        stage. The other ranks of its machine begin with `blank(job)`, receive these tensors, and
        run only the last stage.
        """
        if not self.multi_rank_nodes:
            return stages

        # A machine with one rank, among others with several, has nobody to send to.
        def broadcast_result(bucket: Any, group: Any) -> Any:
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
            # The stages remain, because all ranks must make the same process groups.
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
    """A strategy. A subclass only has to implement `hook`; a strategy with state overrides the
    other methods, too."""

    follows_scale = False  # needs the loss scale in `begin`; reading it may wait for the device
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
        """Begin to average one bucket over all ranks; the future holds a tensor like its buffer."""
        raise NotImplementedError

    def end(self) -> None:
        """End threads and groups, after the last sum."""
        end_group(self.topology.group)
        self.topology = dataclasses.replace(self.topology, group=None)

    def begin(self, scale: float, exact: bool, unused: Unused = ALL_USED) -> None:
        """Begin a step before its first bucket, and close the step before. `scale`: the loss scale.
        `exact`: a strategy with state sums exactly in this step. `unused`: sums of the step before
        that no optimizer used."""

    def close(self) -> None:
        """Close a step, after its backward has returned."""

    def settle(self, unused: Unused) -> None:
        """Close a step, and undo what unused sums changed in the state."""

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """Close the step, and return this machine's state, or None. The state fits only a run with
        the same ranks on each machine: any other run begins without it."""
        return None

    @property
    def state_copies(self) -> float:
        """Return this rank's memory for the state, in fp32 copies of the gradients; after
        `setup`."""
        return 0.0

    def common_state(self, model: torch.nn.Module) -> Optional[Dict[str, Any]]:
        """Close the step, and return the state that is equal on all ranks, by parameter name, or
        None. It fits a run on any ranks."""
        return None

    def load_common_state(self, model: torch.nn.Module, state: Dict[str, Any]) -> None:
        """Restore what `common_state` returned; errors are those of `load_state_dict`. The next
        `begin` raises UserError if ranks have loaded different states."""

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restore what `state_dict` returned, read from a file that may be damaged. Check
        everything before changing anything. Raises ValueError, LookupError, TypeError or
        OverflowError if the state does not fit."""


def sum_over_ranks(tensor: torch.Tensor, group: Any = None) -> Future:
    """Begin an all-reduce, over all ranks by default; the future holds the sum, in place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    # The work's future holds a list.
    return work.get_future().then(lambda done: done.value()[0])
