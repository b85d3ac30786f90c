"""What the network cards carried while the training loop ran, from nodes/<host>/net.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

from report.files import Entry, dicts, number
from report.records import Run
from report.windows import Window, between, loop_windows


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
    series: tuple[tuple[float, float], ...]  # (seconds since the loop began, bytes per second sent)


def network_use(run: Run) -> list[NetworkUse]:
    """One NetworkUse per host and attempt that has at least two samples within its loop."""
    windows = loop_windows(run)
    sharing = machines_shared(run)
    found = []
    for host, samples in run.net.items():
        for window in windows.get(host, []):
            use = one_use(host, samples, window, sharing.get(host, 1))
            if use:
                found.append(use)
    return found


def machines_shared(run: Run) -> dict[str, int]:
    """Host -> how many nodes are processes of the same machine (connection `local`)."""
    nodes = dicts(run.plan.get("nodes"))
    local = [node.get("host") for node in nodes if node.get("connection") == "local"]
    return {host: len(local) for host in local if isinstance(host, str)}


def one_machine(run: Run) -> bool:
    """Whether all ranks are processes of one machine, so that no network is between them."""
    return len(run.hosts) == 1 or machines_shared(run).keys() >= set(run.hosts)


def one_use(host: str, samples: list[Entry], window: Window, shared_by: int) -> NetworkUse | None:
    """The card's counters between the loop's begin and end."""
    inside = between(samples, window)
    if len(inside) < 2:
        return None
    first, last = inside[0], inside[-1]
    seconds = last["mono"] - first["mono"]
    sent, received = (grown(first, last, key) / shared_by for key in ("tx_bytes", "rx_bytes"))
    series = tuple(
        (b["mono"] - window.start, grown(a, b, "tx_bytes") / shared_by / (b["mono"] - a["mono"]))
        for a, b in zip(inside, inside[1:])
        if b["mono"] > a["mono"]
    )
    if seconds <= 0 or not series:
        return None
    return NetworkUse(
        host=host,
        attempt=window.attempt,
        interface=str(last.get("interface", "?")),
        speed_mbit=positive(last.get("speed_mbit")),
        seconds=seconds,
        sent=sent / seconds,
        received=received / seconds,
        peak_sent=max(rate for _, rate in series),
        sent_per_step=sent_a_step(samples, window.after_warm_up, shared_by),
        retransmits=int(grown(first, last, "tcp_retransmits")),
        dropped=int(grown(first, last, "tx_dropped") + grown(first, last, "rx_dropped")),
        shared_by=shared_by,
        series=series,
    )


def sent_a_step(samples: list[Entry], window: Window, shared_by: int) -> float | None:
    """Bytes that a node sent per step within the window; None where too little of it was seen."""
    inside = between(samples, window)
    seconds = inside[-1]["mono"] - inside[0]["mono"] if inside else 0.0
    steps = window.steps * seconds / window.seconds if window.seconds > 0 else 0.0
    return grown(inside[0], inside[-1], "tx_bytes") / shared_by / steps if steps >= 1 else None


def grown(first: Entry, last: Entry, key: str) -> float:
    """How much a counter grew; 0 where it is absent or was reset."""
    before, after = number(first.get(key)), number(last.get(key))
    return 0.0 if before is None or after is None else max(0.0, after - before)


def positive(value: object) -> float | None:
    """A number above zero, else None (a card without a link says -1)."""
    value = number(value)
    return value if value is not None and value > 0 else None
