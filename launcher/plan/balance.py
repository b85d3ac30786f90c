"""How the images of a step are divided among unlike machines (BALANCE=).

With equal parts every step lasts as long as the slowest machine's. In proportion to their speeds
all are done at the same time; the global batch stays BATCH times the machines, so what is learned
does not change. The split itself is contract/split.py's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from boundary.answers import NodeFacts
from contract import split
from contract.errors import UserError
from contract.runs import DAYS
from launcher.machines.engine import Host

AUTO, OFF = "auto", "off"
MOST = 1_000_000


@dataclass(frozen=True)
class Balance:
    """`weights`: each machine's number by its name; empty for equal parts. `why` is one clause for
    people."""

    weights: Mapping[str, int] = field(default_factory=dict)
    why: str = "equal parts"

    @classmethod
    def before(cls, weights: Mapping[str, int], hosts: Sequence[Host]) -> Balance | None:
        """That of an earlier start with these weights, where it had the same machines: then what is
        computed is the same, to the bit."""
        if set(weights) != {host.name for host in hosts}:
            return None
        return cls(weights if len(set(weights.values())) > 1 else {}, "as before")

    def of(self, hosts: Sequence[Host]) -> tuple[int, ...]:
        """The numbers of these machines, in their order; empty for equal parts: also where there is
        only one machine, or one of them has no number."""
        if len(hosts) < 2 or any(host.name not in self.weights for host in hosts):
            return ()
        return tuple(self.weights[host.name] for host in hosts)


def check(asked: str, machines: int) -> tuple[int, ...]:
    """The numbers of BALANCE=3:2:2:1; none for a word. Raises UserError."""
    if asked in (AUTO, OFF):
        return ()
    if not re.fullmatch(r"[0-9]{1,7}(:[0-9]{1,7})*", asked):
        raise UserError(
            f"BALANCE={asked}: give {AUTO}, {OFF}, or a number for each machine, node 0 first, "
            "like 3:2:2:1."
        )
    weights = tuple(map(int, asked.split(":")))
    if len(weights) != machines:
        raise UserError(
            f"BALANCE={asked} has {len(weights)} numbers, and the run has {machines} machines: "
            "give one for each."
        )
    if not all(1 <= weight <= MOST for weight in weights):
        raise UserError(f"BALANCE={asked}: give numbers from 1 to {MOST:,}.")
    return weights


def decide(
    asked: str,
    everybody: Sequence[Host],
    hosts: Sequence[Host],
    facts: Mapping[str, NodeFacts],
    speeds: Callable[[], Mapping[str, float]],
) -> Balance:
    """What BALANCE= becomes for a start on `hosts`, of `everybody` in the run; `speeds` are
    images/s of each machine by itself, of those that are known. Raises UserError."""
    names = [host.name for host in hosts]
    weights = check(asked, len(everybody))
    if weights:
        return Balance(dict(zip([host.name for host in everybody], weights)), "as asked")
    if asked == OFF:
        return Balance(why="equal parts, as asked")
    if len(hosts) < 2:
        return Balance(why="one machine has it all")
    if len({facts[name].machine for name in names}) < len(names):
        return Balance(why="equal parts: nodes of one machine share its speed")
    own = speeds()
    unknown = [name for name in names if name not in own]
    if unknown:
        return Balance(
            why=f"equal parts: neither `make plan` nor a run of the last {DAYS} days has measured "
            f"{', '.join(unknown)} with this model"
        )
    fastest, slowest = max(names, key=own.__getitem__), min(names, key=own.__getitem__)
    weights = split.weights_of([own[name] for name in names])
    apart = own[fastest] / own[slowest]
    if not weights:
        return Balance(why=f"equal parts: as measured the machines differ by {apart - 1:.0%}")
    why = f"as measured {fastest} is {apart:.1f} x as fast as {slowest} by itself"
    return Balance(dict(zip(names, weights)), why)


def told(
    balance: Balance, hosts: Sequence[Host], ranks: Sequence[int], per_node: int
) -> str | None:
    """A line about unequal parts, in the machines' images of a step; None for equal ones."""
    weights = balance.of(hosts)
    if not weights:
        return None
    parts = split.node_batches(per_node, ranks, weights)
    named = ", ".join(f"{host.name} {part}" for host, part in zip(hosts, parts))
    return f"images a step: {named}: {balance.why}"
