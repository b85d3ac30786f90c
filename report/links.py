"""Judge the links between machines that `make plan` measured: each pair, and cables at fault.

measurements.py reads the links for a Basis. The links of a training run are judged by
bottleneck.find_slow_link.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from msgspec import structs

from boundary.run_files import LinksFile
from boundary.schema import convert_what_fits
from contract.text import link_speed
from report.files import read_object
from report.read import RunRecord
from report.text import aligned

# A machine is slow if its best link reaches less than this fraction of the fastest link.
SLOW_MACHINE = 0.5
# A pair is slow if its link reaches less than this fraction of what both machines reach elsewhere.
SLOW_PAIR = 0.7
# Machines share a cable if all links together are slower than a single link by this factor.
SHARED_CABLE = 1.5


@dataclass(frozen=True)
class Pair:
    """The link between two machines; `mbit_to` is the rate from the first host to the second."""

    hosts: tuple[str, str]
    mbit_to: float
    mbit_from: float
    latency_ms: float
    latency_p99_ms: float
    mtu: float | None  # of packets that arrive complete; None if none do

    @property
    def mbit(self) -> float:
        return min(self.mbit_to, self.mbit_from)


@dataclass(frozen=True)
class Links:
    """The links of all pairs of machines. Rates in Mbit/s of payload."""

    hosts: tuple[str, ...]
    pairs: tuple[Pair, ...]
    ring: tuple[float, ...]  # the rate at which each machine received while all machines sent
    # The MTU and the speed (Mbit/s) of each network interface that reports them, by host.
    mtus: dict[str, float]
    speeds: dict[str, float]

    def between(self, host: str, peer: str) -> Pair:
        return next(pair for pair in self.pairs if set(pair.hosts) == {host, peer})

    @property
    def slowest(self) -> float:
        return min(pair.mbit for pair in self.pairs)

    @property
    def best(self) -> dict[str, float]:
        """The best rate of each machine with any other: a slow cable slows down all its pairs."""
        return {
            host: max(pair.mbit for pair in self.pairs if host in pair.hosts) for host in self.hosts
        }


def read_links(run: RunRecord, hosts: tuple[str, ...]) -> Links | None:
    """Read the measurements; None unless all links were measured."""
    files: dict[str, LinksFile] = {
        host: convert_what_fits(read_object(run.folder / f"nodes/{host}/links.json", []), LinksFile)
        for host in hosts
    }

    def read_pair(host: str, peer: str) -> Pair | None:
        measurement = files[host].pairs.get(peer)
        figures = structs.asdict(measurement) if measurement else {}
        mtu = figures.pop("mtu", None)
        return Pair((host, peer), mtu=mtu, **figures) if all(figures.values()) and figures else None

    # Either machine of a pair may have measured their link.
    measured = [read_pair(a, b) or read_pair(b, a) for a, b in combinations(hosts, 2)]
    pairs = tuple(pair for pair in measured if pair)
    ring = tuple(file.ring.mbit for file in files.values() if file.ring.mbit)
    # Conclusions about cables compare all pairs, so a missing pair makes them wrong.
    if not pairs or len(pairs) < len(measured) or len(ring) < len(hosts):
        return None
    interfaces = {host: file.interface for host, file in files.items()}
    mtus = {host: interface.mtu for host, interface in interfaces.items() if interface.mtu}
    speeds = {host: interface.speed for host, interface in interfaces.items() if interface.speed}
    return Links(hosts, pairs, ring, mtus, speeds)


def link_rates(links: Links | None) -> tuple[float, ...]:
    """Return Basis.rates in bytes per second, or () without links."""
    if links is None:
        return ()
    ring, limits = links.ring, []
    for n in range(2, len(ring) + 1):
        # In a ring of the first n machines each sends to the next. The slowest of these links
        # counts, or the machine's part of what the switch carried while all machines sent.
        hosts = links.hosts[:n]
        slowest = min(links.between(*pair).mbit for pair in zip(hosts, (*hosts[1:], hosts[0])))
        limits.append(min(slowest, sum(ring) / n if n < len(ring) else min(ring)))
    # A single machine sends nothing. Its unused rate is that of two machines.
    return tuple(rate * 1e6 / 8 for rate in (limits[0], *limits))


def links_table(links: Links) -> list[str]:
    """Show the figures of each pair, in 80 columns."""
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
    """Return a sentence on how fast the links are, and one on each thing that is wrong with them.
    Return () without links."""
    if links is None:
        return ()
    sentences = [
        f"Links: the slowest link reaches {links.slowest:.0f} Mbit/s, and "
        f"{min(links.ring):.0f} Mbit/s while all machines send (TCP reaches at most 941 on "
        f"{link_speed(1000)}).",
    ]
    best_rates = links.best
    fastest = max(best_rates.values())
    # Machines whose own cable, port or card is slow.
    for host, rate in best_rates.items():
        speed = links.speeds.get(host, 0.0)
        # If all cables are slow, no machine is slower than the others. A card that reports 100
        # Mbit/s is slow in any case.
        if rate >= SLOW_MACHINE * fastest and not 0 < speed <= 100:
            continue
        kind = "a 100 Mbit/s cable, port or card" if rate < 100 else "a bad cable, port or card"
        says = f" (its card says {speed:.0f} Mbit/s)" if speed else ""
        sentences.append(
            f"{host} reaches at most {rate:.0f} Mbit/s{says}, other machines {fastest:.0f}: "
            f"{kind}. It slows every run down to its own rate. Try another cable, then "
            "another switch port."
        )
    for pair in links.pairs:
        a, b = pair.hosts
        best = min(best_rates[a], best_rates[b])
        # A slow cable slows down all pairs of its machine, but here a single pair is slow.
        if pair.mbit < SLOW_PAIR * best:
            sentences.append(
                f"{a} and {b} reach {pair.mbit:.0f} Mbit/s with each other, but both reach "
                f"{best:.0f} with other machines: are they on two switches?"
            )
    for pair in links.pairs:
        a, b = pair.hosts
        # A switch with a smaller MTU than the cards drops packets without telling the sender.
        mtus = [links.mtus[host] for host in pair.hosts if host in links.mtus]
        if pair.mtu and pair.mtu < max(mtus, default=0):
            set_to = " and ".join(f"{mtu:.0f}" for mtu in mtus)
            sentences.append(
                f"Only packets of up to {pair.mtu:.0f} bytes pass between {a} and {b}, but "
                f"their network cards are set to {set_to}: larger packets are lost, and "
                "connections hang. Set the MTU of both and of the switch to the same value."
            )
    # In a ring each cable carries as much as in a pair, unless machines share a cable.
    if SHARED_CABLE * min(links.ring) < links.slowest:
        sentences.append(
            f"A machine receives {min(links.ring):.0f} Mbit/s while all send, though each single "
            f"pair reaches {links.slowest:.0f}: is the switch, or a cable between two switches, "
            "shared?"
        )
    return tuple(sentences)
