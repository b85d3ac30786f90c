"""How ranks become one run: which of them share a machine, and the interface of a strategy.

All ranks meet in each step: a communication hook of DDP sums their gradients while backward runs.

    begin(scale, exact)
    forward, backward        the hook sums here
    optimizer

Nobody tells a strategy whether the optimizer took the step: where gradients overflowed, what each
rank received was not finite, and the next `begin`, or `close`, acts on that.

Where a machine has several ranks, they sum among themselves, and one of them, the leader, acts for
all: only it encodes and sends to the other machines, so a machine's network card carries no more
than with one GPU. The leader passes on what came back, still encoded, and all ranks of the machine
decode the same bytes. Where each machine has one rank, none of this happens.
"""

import dataclasses
from datetime import timedelta
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist

from contract.strategies import Strategy

from ..compat import end_group
from .carrier import Stage, new_group, to_host

# The parameters whose last sum no optimizer has used, with whether one still may: it is in .grad.
Unused = Mapping[torch.Tensor, bool]
NONE: Unused = {}
Future = torch.futures.Future[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Topology:
    """`nodes`: the machine of each rank, numbered from 0. `group`: the process group in which this
    machine's ranks sum their gradients; None where no machine has several ranks."""

    nodes: Tuple[int, ...]
    rank: int
    group: Any = None

    @property
    def count(self) -> int:
        return max(self.nodes) + 1

    @property
    def ranks(self) -> Tuple[Tuple[int, ...], ...]:
        """The ranks of each machine."""
        every = range(len(self.nodes))
        return tuple(
            tuple(rank for rank in every if self.nodes[rank] == machine)
            for machine in range(self.count)
        )

    @property
    def own(self) -> int:
        """This rank's machine."""
        return self.nodes[self.rank]

    @property
    def own_ranks(self) -> Tuple[int, ...]:
        """The ranks of this machine, the leader first."""
        return self.ranks[self.own]

    @property
    def leaders(self) -> Tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.ranks)

    @property
    def is_leader(self) -> bool:
        return self.rank == self.own_ranks[0]

    @property
    def multi_rank_nodes(self) -> bool:
        """Whether any machine has more than one rank."""
        return len(self.nodes) > self.count

    def connected(self, patience: float) -> "Topology":
        """The same with its group, whose collectives time out after `patience` s. Collective."""
        if not self.multi_rank_nodes:
            return self
        group = new_group(self.ranks, timedelta(seconds=patience))
        return dataclasses.replace(self, group=group)

    def stages(
        self,
        stages: List[Stage],
        blank: Callable[[Any], Any],
        tensors_to_broadcast: Callable[[Any], List[torch.Tensor]],
    ) -> List[Stage]:
        """The stages of this rank. A leader passes on `tensors_to_broadcast` before the last stage.
        Any other rank begins with `blank(job)`, receives these tensors, and runs only the last
        stage.
        """
        if not self.multi_rank_nodes:
            return stages

        def hand_on(bucket: Any, group: Any) -> Any:
            if len(self.own_ranks) > 1:
                broadcast(tensors_to_broadcast(bucket), self.own_ranks[0], group)
            return bucket

        first, *middle, last = stages
        middle = [
            dataclasses.replace(stage, among=(self.leaders,)) if stage.sends else stage
            for stage in middle
        ]
        if not self.is_leader:
            first = Stage(blank)
            middle = [dataclasses.replace(stage, work=_pass_on) for stage in middle]
        return [first, *middle, Stage(hand_on, sends=True, among=self.ranks), last]


def _pass_on(bucket: Any, group: Any = None) -> Any:
    return bucket


def broadcast(tensors: List[torch.Tensor], source: int, group: Any) -> None:
    """Fill tensors of one dtype with those of rank `source`, by one broadcast."""
    if not tensors:
        return
    flat = to_host(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    dist.broadcast(flat, source, group=group)
    if dist.get_rank() == source:
        return
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(values.view_as(tensor), non_blocking=True)


class Sync:
    """A subclass only has to implement `hook`; one that keeps state overrides the rest."""

    # Whether the strategy needs the loss scale; reading it may wait for the device.
    follows_scale = False
    scale = 1.0  # by which all that is kept is multiplied
    note: Optional[str] = None  # for people, to be shown once

    def __init__(self, strategy: Strategy, patience: float = 120.0) -> None:
        self.strategy, self.patience = strategy, patience  # seconds to wait for a silent peer

    def setup(self, device: torch.device, topology: Optional[Topology] = None) -> None:
        """Before `hook` is registered. `device`: of the gradients; `topology`: by default, each
        rank counts as a machine of its own. Collective."""
        self.topology = topology or Topology(tuple(range(dist.get_world_size())), dist.get_rank())
        if self.topology.group is not None:
            # NCCL connects in a group's first sum, which must not be within the first backward.
            dist.all_reduce(torch.zeros(1, device=device), group=self.topology.group)

    def hook(self, bucket: dist.GradBucket) -> Future:
        """Begin to average one bucket over all ranks; the future holds a tensor like its buffer."""
        raise NotImplementedError

    def end(self) -> None:
        """Give back threads and groups: no sum comes after the last one."""
        end_group(self.topology.group)
        self.topology = dataclasses.replace(self.topology, group=None)

    def begin(self, scale: float, exact: bool, unused: Unused = NONE) -> None:
        """A step begins; called before its first bucket, and closes the step before, all of whose
        sums were used but those of `unused`. `scale`: by which the loss is multiplied; `exact`: in
        warm-up, for strategies that begin with exact sums."""

    def close(self) -> None:
        """The step before is over. To be called where its backward has returned."""

    def settle(self, unused: Unused) -> None:
        """Close, and let sums that no optimizer used leave no trace in what is kept."""

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """This machine's own state, after `close`; None where there is none. It fits only a run
        with the same ranks on each machine: any other run begins without it."""
        return None

    @property
    def state_copies(self) -> float:
        """What this rank holds from step to step beside the gradients, in copies of them in fp32;
        known after `setup`."""
        return 0.0

    def common_state(self, model: torch.nn.Module) -> Optional[Dict[str, Any]]:
        """What all ranks have alike, by the names of the model's parameters, after `close`; None
        where there is none. It fits a run on any ranks."""
        return None

    def load_common_state(self, model: torch.nn.Module, state: Dict[str, Any]) -> None:
        """Restore what `common_state` returned, as `load_state_dict` does. The next `begin` raises
        UserError where ranks have loaded different ones."""

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restore what `state_dict` returned, as a file gave it: everything is checked before
        anything is changed. Raises ValueError, LookupError, TypeError or OverflowError where it
        does not fit."""


def sum_over_ranks(tensor: torch.Tensor, group: Any = None) -> Future:
    """Begin an all-reduce, over all ranks by default; the future holds the sum, in place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
