"""What the network cards carried while the training loop ran, and how fast each link was."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from report.fields import Fields
from report.files import Entry, number, only, positive, text, time_of
from report.read import Run
from report.windows import Points, Series, Window


@dataclass(frozen=True)
class NetworkUse:
    """One node's card during the training loop of one attempt. Rates in bytes per second.

    `shared_by` nodes send through this card (nodes that are processes of one machine): per-node
    figures are its counters divided by that number.
    """

    host: str
    attempt: int
    interface: str
    speed_mbit: float | None
    seconds: float
    sent: float
    received: float
    peak_sent: float
    sent_per_step: float | None
    retransmits: int
    dropped: int
    shared_by: int
    # "sent" -> (seconds since the loop began, MB/s)
    series: Mapping[str, Points] = field(default_factory=dict)
    # Address of a peer -> own address, bytes sent there, seconds of sending.
    sent_to: Mapping[str, tuple[str, float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """What one machine sent to another during the loop, and how fast: bytes per second while there
    was something to send and the receiver had room for it."""

    sender: str
    receiver: str
    sent: float
    rate: float


class Cards:
    """The card of one machine: of each attempt one NetworkUse, where two samples or more lie within
    its loop."""

    def __init__(self, run: Run, host: str):
        self.host, self.shared_by = host, nodes_per_machine(run).get(host, 1)
        self.loops: dict[int, CardLoop] = {}

    def add(self, window: Window, mono: float, line: Entry) -> None:
        card = line.get("card")
        if not isinstance(card, dict):
            return
        sample = only(SAMPLE, card)
        if window.attempt not in self.loops:
            self.loops[window.attempt] = CardLoop(window, mono, sample, mono, sample)
        self.loops[window.attempt].add(mono, sample)

    def uses(self) -> list[NetworkUse]:
        uses = (
            network_use(self.host, self.loops[attempt], self.shared_by)
            for attempt in sorted(self.loops)
        )
        return [use for use in uses if use is not None]


MOST_PEERS = 256  # of a machine
PEER: Fields = {"from": text, "sent": number, "busy": time_of}


def peers(value: object) -> dict[str, Entry] | None:
    """Address -> what was sent there."""
    if not isinstance(value, dict):
        return None
    named = list(value.items())[:MOST_PEERS]
    entries = {name: only(PEER, entry) for name, entry in named if isinstance(entry, dict)}
    return {name: entry for name, entry in entries.items() if len(entry) == len(PEER)}


COUNTERS = ("rx_bytes", "tx_bytes", "rx_dropped", "tx_dropped", "tcp_retransmits")
SAMPLE: Fields = {
    **dict.fromkeys(COUNTERS, number),
    "interface": text,
    "speed_mbit": positive,
    "peers": peers,
}


@dataclass
class CardLoop:
    """A card's counters in one loop: at the first and at the last sample; the fastest second."""

    window: Window
    began: float
    first: Entry
    ended: float
    last: Entry
    peak: float | None = None  # bytes per second sent
    warm: tuple[float, Entry] | None = None  # the first sample after the warm-up
    series: Series = field(default_factory=Series)

    def add(self, mono: float, sample: Entry) -> None:
        if self.warm is None and mono >= self.window.after_warm_up.start:
            self.warm = mono, sample
        if mono > self.ended:
            rate = grown(self.last, sample, "tx_bytes") / (mono - self.ended)
            self.peak = max(self.peak or 0.0, rate)
            self.series.add(mono - self.window.start, rate)
        self.ended, self.last = mono, sample


def nodes_per_machine(run: Run) -> dict[str, int]:
    """Host -> how many nodes are processes of the same machine (connection `local`)."""
    nodes = run.plan.get("nodes", [])
    local = [node["host"] for node in nodes if node.get("connection") == "local" and "host" in node]
    return {host: len(local) for host in local}


def one_machine(run: Run) -> bool:
    """Whether all ranks are processes of one machine, so that no network is between them."""
    return len(run.hosts) == 1 or nodes_per_machine(run).keys() >= set(run.hosts)


def network_use(host: str, loop: CardLoop, shared_by: int) -> NetworkUse | None:
    """The card's counters between the loop's begin and end."""
    window, first, last = loop.window, loop.first, loop.last
    seconds = loop.ended - loop.began
    if seconds <= 0 or loop.peak is None:
        return None
    sent, received = (grown(first, last, key) / shared_by for key in ("tx_bytes", "rx_bytes"))
    return NetworkUse(
        host=host,
        attempt=window.attempt,
        interface=last.get("interface", "?"),
        speed_mbit=last.get("speed_mbit"),
        seconds=seconds,
        sent=sent / seconds,
        received=received / seconds,
        peak_sent=loop.peak / shared_by,
        sent_per_step=bytes_per_step(loop, shared_by),
        retransmits=int(grown(first, last, "tcp_retransmits")),
        dropped=int(grown(first, last, "tx_dropped") + grown(first, last, "rx_dropped")),
        shared_by=shared_by,
        series={"sent": [(at, rate / shared_by / 1e6) for at, rate in loop.series.points]},
        sent_to=peer_traffic(first, last),
    )


def peer_traffic(first: Entry, last: Entry) -> dict[str, tuple[str, float, float]]:
    """NetworkUse.sent_to, from the samples at both ends of the loop."""
    none: Entry = {"sent": 0.0, "busy": 0.0}
    before = first.get("peers", {})
    return {
        peer: (now["from"], *(grown(before.get(peer, none), now, key) for key in ("sent", "busy")))
        for peer, now in last.get("peers", {}).items()
    }


LINK_BYTES = 4e6  # a link that carried less is not judged
SLOW_LINK = 0.5  # of the other machines' rate


def links(networks: Sequence[NetworkUse]) -> list[Link]:
    """Links between machines that recorded their peers, by the addresses that they send from."""
    hosts = {own: use.host for use in networks for own, _, _ in use.sent_to.values()}
    return [
        Link(use.host, hosts[peer], sent, sent / busy)
        for use in networks
        for peer, (_, sent, busy) in use.sent_to.items()
        if peer in hosts and hosts[peer] != use.host and sent >= LINK_BYTES and busy > 0
    ]


def slow_link(networks: Sequence[NetworkUse]) -> tuple[str, float, float] | None:
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


def bytes_per_step(loop: CardLoop, shared_by: int) -> float | None:
    """Bytes that a node sent per step after the warm-up; None where too little of it was seen."""
    window = loop.window.after_warm_up
    if loop.warm is None or window.seconds <= 0:
        return None
    began, first = loop.warm
    steps = window.steps * (loop.ended - began) / window.seconds
    return grown(first, loop.last, "tx_bytes") / shared_by / steps if steps >= 1 else None


def grown(first: Entry, last: Entry, key: str) -> float:
    """How much a counter grew; 0 where it is absent or was reset."""
    if key not in first or key not in last:
        return 0.0
    return max(0.0, last[key] - first[key])
