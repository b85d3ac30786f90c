"""How fast each link between two machines was, and which machine's is slow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from report.usage import NetworkUsage


@dataclass(frozen=True)
class Link:
    """What one machine sent to another during the loop, and how fast: bytes per second while there
    was something to send and the receiver had room for it."""

    sender: str
    receiver: str
    sent: float
    rate: float


LINK_BYTES = 4e6  # a link that carried less is not judged
SLOW_LINK = 0.5  # of the other machines' rate


def links(networks: Sequence[NetworkUsage]) -> list[Link]:
    """Links between machines that recorded their peers, by the addresses that they send from."""
    hosts = {own: use.host for use in networks for own, _, _ in use.sent_to.values()}
    return [
        Link(use.host, hosts[peer], sent, sent / busy)
        for use in networks
        for peer, (_, sent, busy) in use.sent_to.items()
        if peer in hosts and hosts[peer] != use.host and sent >= LINK_BYTES and busy > 0
    ]


def slow_link(networks: Sequence[NetworkUsage]) -> tuple[str, float, float] | None:
    """(machine, bytes per second, those of the others) where one machine's cable or card is slow:
    nothing that it sends or gets is fast, and the others are fast among themselves."""
    best: dict[str, float] = {}
    for link in links(networks):
        for host in (link.sender, link.receiver):
            best[host] = max(best.get(host, 0.0), link.rate)
    if len(best) < 3:
        return None
    host = min(best, key=lambda name: best[name])
    others = statistics.median(rate for name, rate in best.items() if name != host)
    return (host, best[host], others) if best[host] < SLOW_LINK * others else None
