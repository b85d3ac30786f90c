"""What `make plan` measured of the links between machines: each pair, and which cable is at
fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from contract.text import link_speed
from report.files import Entry, positive, read_object
from report.read import Run
from report.text import aligned

FIGURES = ("mbit_to", "mbit_from", "latency_ms", "latency_p99_ms")


@dataclass(frozen=True)
class Pair:
    hosts: tuple[str, str]
    mbit_to: float
    mbit_from: float
    latency_ms: float
    latency_p99_ms: float
    mtu: float | None  # of what arrives whole; None where no datagram does

    @property
    def mbit(self) -> float:
        return min(self.mbit_to, self.mbit_from)


@dataclass(frozen=True)
class Links:
    """Every pair of machines; `ring`: what each received while all sent. In Mbit/s of payload."""

    hosts: tuple[str, ...]
    pairs: tuple[Pair, ...]
    ring: tuple[float, ...]
    mtus: dict[str, float]  # of their network cards, as far as these say
    speeds: dict[str, float]

    def between(self, one: str, other: str) -> Pair:
        return next(pair for pair in self.pairs if set(pair.hosts) == {one, other})

    @property
    def slowest(self) -> float:
        return min(pair.mbit for pair in self.pairs)

    @property
    def best(self) -> dict[str, float]:
        """The best rate of each machine with any other: a slow cable slows all of its pairs."""
        return {
            host: max(pair.mbit for pair in self.pairs if host in pair.hosts) for host in self.hosts
        }


def read_links(run: Run, hosts: tuple[str, ...]) -> Links | None:
    """None where links were not measured, or not all of them."""
    files = [read_object(run.folder / "nodes" / host / "links.json", []) for host in hosts]
    measured = dict(zip(hosts, files))
    pairs = [
        read_pair(measured, a, b) or read_pair(measured, b, a) for a, b in combinations(hosts, 2)
    ]
    ring = [positive(_part(file, "ring").get("mbit")) for file in files]
    if not pairs or not all(pairs) or not all(ring):
        return None
    cards = {host: _part(file, "card") for host, file in measured.items()}
    mtus, speeds = (
        {host: figure for host, card in cards.items() if (figure := positive(card.get(name)))}
        for name in ("mtu", "speed")
    )
    known = tuple(pair for pair in pairs if pair)
    return Links(hosts, known, tuple(rate for rate in ring if rate), mtus, speeds)


def read_pair(measured: dict[str, Entry], host: str, peer: str) -> Pair | None:
    """What `host` measured with `peer`."""
    entry = _part(_part(measured[host], "pairs"), peer)
    figures = {name: figure for name in FIGURES if (figure := positive(entry.get(name)))}
    if len(figures) < len(FIGURES):
        return None
    return Pair(hosts=(host, peer), mtu=positive(entry.get("mtu")), **figures)


def _part(entry: Entry, name: str) -> Entry:
    part = entry.get(name)
    return part if isinstance(part, dict) else {}


def link_rates(links: Links | None) -> tuple[float, ...]:
    """Basis.rates: with n machines the rate of the slowest link of their ring, limited by their
    part of what went through the switch when all sent."""
    if links is None:
        return ()
    ring, limits = links.ring, []
    for n in range(2, len(ring) + 1):
        hosts = links.hosts[:n]
        alone = min(links.between(*two).mbit for two in zip(hosts, (*hosts[1:], hosts[0])))
        limits.append(min(alone, sum(ring) / n if n < len(ring) else min(ring)))
    return tuple(rate * 1e6 / 8 for rate in (limits[0], *limits))


def table(links: Links) -> list[str]:
    """The figures of each pair, in 80 columns."""
    heads = ("pair", "Mbit/s there", "back", "latency ms", "99 %", "MTU")
    cells = [
        (
            " - ".join(pair.hosts),
            f"{pair.mbit_to:.0f}",
            f"{pair.mbit_from:.0f}",
            f"{pair.latency_ms:.2f}",
            f"{pair.latency_p99_ms:.2f}",
            f"{pair.mtu:.0f}" if pair.mtu else "-",
        )
        for pair in links.pairs
    ]
    return aligned([heads, *cells])


def links_sentences(links: Links | None) -> tuple[str, ...]:
    """How fast links are, and what is wrong with them."""
    if links is None:
        return ()
    return (
        f"Links: {links.slowest:.0f} Mbit/s of payload in pairs, {min(links.ring):.0f} while all "
        f"sent (the slowest; of {link_speed(1000)} TCP gets 941).",
        *slow_machines(links),
        *slow_pairs(links),
        *short_packets(links),
        *shared_switch(links),
    )


def slow_machines(links: Links) -> Iterator[str]:
    others = max(links.best.values())
    for host, rate in links.best.items():
        speed = links.speeds.get(host, 0.0)
        # If all cables are slow, no rate stands out, but a card that reports 100 is not at gigabit.
        if rate >= others / 2 and not 0 < speed <= 100:
            continue
        kind = "a 100 Mbit/s cable, port or card" if rate < 100 else "a bad cable, port or card"
        says = f" (its card says {speed:.0f} Mbit/s)" if speed else ""
        yield (
            f"{host} reaches {rate:.0f} Mbit/s at best{says}, others {others:.0f}: {kind}. It "
            "slows every run down to its own rate. Try another cable, then another port of the "
            "switch."
        )


def slow_pairs(links: Links) -> Iterator[str]:
    for pair in links.pairs:
        both = min(links.best[host] for host in pair.hosts)
        if pair.mbit < 0.7 * both:
            a, b = pair.hosts
            yield (
                f"{a} and {b} reach {pair.mbit:.0f} Mbit/s with each other, though both reach "
                f"{both:.0f} with others: are they on two switches?"
            )


def short_packets(links: Links) -> Iterator[str]:
    for pair in links.pairs:
        a, b = pair.hosts
        if pair.mtu and pair.mtu < max(links.mtus.get(a, 0), links.mtus.get(b, 0)):
            cards = " and ".join(f"{links.mtus[host]:.0f}" for host in (a, b) if host in links.mtus)
            yield (
                f"Packets of {pair.mtu:.0f} bytes at most pass between {a} and {b}, though their "
                f"cards are set to {cards}: larger ones vanish and connections hang. Set the MTU "
                "of both, and of the switch, to the same value."
            )


def shared_switch(links: Links) -> Iterator[str]:
    """In a ring each cable carries as much as in a pair, unless machines share one."""
    if 1.5 * min(links.ring) < links.slowest:
        yield (
            f"A machine receives {min(links.ring):.0f} Mbit/s while all send, though each pair by "
            f"itself reaches {links.slowest:.0f}: is the switch, or a cable between two switches, "
            "shared?"
        )
