"""Which ranks share a machine: they sum among themselves, and one of them acts for all.

Only that one, the leader, encodes and sends to the other machines, so a machine's network card
carries no more than with one GPU. The leader passes on what came back, still encoded, and all ranks
of the machine decode the same bytes. Where each machine has one rank, none of this happens.
"""

import dataclasses
from datetime import timedelta
from typing import Any, Callable, List, Tuple

import torch
import torch.distributed as dist

from .carrier import Stage, new_group, to_host


@dataclasses.dataclass(frozen=True)
class Machines:
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
    def here(self) -> Tuple[int, ...]:
        """The ranks of this machine, the leader first."""
        return self.ranks[self.own]

    @property
    def leaders(self) -> Tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.ranks)

    @property
    def leads(self) -> bool:
        return self.rank == self.here[0]

    @property
    def several(self) -> bool:
        """Whether any machine has more than one rank."""
        return len(self.nodes) > self.count

    def connected(self, patience: float) -> "Machines":
        """The same with its group, whose collectives time out after `patience` s. Collective."""
        if not self.several:
            return self
        group = new_group(self.ranks, timedelta(seconds=patience))
        return dataclasses.replace(self, group=group)

    def stages(
        self,
        stages: List[Stage],
        blank: Callable[[Any], Any],
        wire: Callable[[Any], List[torch.Tensor]],
    ) -> List[Stage]:
        """The stages of this rank. A leader passes on the tensors `wire` before the last stage. Any
        other rank begins with `blank(job)`, receives these tensors, and runs only the last stage.
        """
        if not self.several:
            return stages

        def hand_on(bucket: Any, group: Any) -> Any:
            if len(self.here) > 1:
                broadcast(wire(bucket), self.here[0], group)
            return bucket

        first, *middle, last = stages
        middle = [
            dataclasses.replace(stage, among=(self.leaders,)) if stage.sends else stage
            for stage in middle
        ]
        if not self.leads:
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
