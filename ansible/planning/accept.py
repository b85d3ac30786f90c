"""The timetable of the pairwise check, and what its figures mean."""

from __future__ import annotations

from typing import Any

REST = ""


def accept_rounds(hosts: list[str]) -> list[list[tuple[str, str]]]:
    """Pair everybody with everybody in rounds of disjoint pairs (the circle method of tournaments).

    N machines need N - 1 rounds (N when N is odd: one rests in each).
    """
    ring = list(hosts) + [REST] * (len(hosts) % 2)
    rounds = []
    for _ in range(len(ring) - 1):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if REST not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def accept_turns(hosts: list[str], host: str) -> list[dict[str, Any] | None]:
    """A machine's own part of the timetable: {"partner", "role"} or None (rest) for each round."""
    turns: list[dict[str, Any] | None] = []
    for pairs in accept_rounds(hosts):
        mine = [pair for pair in pairs if host in pair]
        if not mine:
            turns.append(None)
            continue
        client, server = mine[0]
        role = "client" if host == client else "server"
        turns.append({"partner": server if role == "client" else client, "role": role})
    return turns


def accept_pairs(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All pairs, each once, with the figures that its measuring side wrote, or its error."""
    hosts = [result["host"] for result in results]
    by_host = {result["host"]: result for result in results}
    entries = []
    for pair in (pair for pairs in accept_rounds(hosts) for pair in pairs):
        client, server = pair
        figures = by_host[client]["pairs"].get(server) or {"error": "no figures"}
        entries.append({"pair": list(pair), **figures})
    return sorted(entries, key=lambda entry: (hosts.index(entry["pair"][0]), entry["pair"]))


def _worst(entry: dict[str, Any]) -> float:
    return min(entry["mbit_to"], entry["mbit_from"])


def _best_rates(pairs: list[dict[str, Any]]) -> dict[str, float]:
    """The best rate of each machine with any other: a slow cable slows all of its pairs."""
    rates: dict[str, float] = {}
    for entry in pairs:
        for host in entry["pair"]:
            rate = 0.0 if "error" in entry else _worst(entry)
            rates[host] = max(rates.get(host, 0.0), rate)
    return rates


def accept_findings(results: list[dict[str, Any]], allreduce: dict[str, Any] | None) -> list[str]:
    """Sentences about what is wrong between the machines; [] if nothing is.

    results: what pairprobe.py wrote on each machine; allreduce: see accept_allreduce.
    """
    pairs = accept_pairs(results)
    cards = {result["host"]: result["card"] for result in results}
    findings = [
        f"{a} and {b} could not measure each other: {entry['error']}. "
        "Does a firewall stand between them?"
        for entry in pairs
        for a, b in [entry["pair"]]
        if "error" in entry
    ]
    measured = [entry for entry in pairs if "error" not in entry]
    rates = {host: rate for host, rate in _best_rates(measured).items() if rate}
    findings += _slow_machines(rates, cards)
    findings += _slow_pairs(measured, rates) + _short_packets(measured, cards)
    if allreduce and allreduce["seconds"] > 1.5 * allreduce["floor_seconds"]:
        findings.append(
            f"The all-reduce over all machines takes {allreduce['seconds']:.2f} s, though the "
            f"slowest link allows {allreduce['floor_seconds']:.2f} s: several machines sending at "
            "once slow each other down. Is the switch, or a cable between two switches, shared?"
        )
    return findings


def _slow_machines(rates: dict[str, float], cards: dict[str, dict[str, Any]]) -> list[str]:
    best = max(rates.values(), default=0.0)
    findings = []
    for host, rate in rates.items():
        speed = cards[host].get("speed") or 0
        # If all cables are slow, no rate stands out, but a card that reports 100 is not at gigabit.
        if rate >= best / 2 and not 0 < speed <= 100:
            continue
        kind = "a 100 Mbit/s cable, port or card" if rate < 100 else "a bad cable, port or card"
        says = f" (its card says {speed} Mbit/s)" if speed > 0 else ""
        findings.append(
            f"{host} reaches {rate:.0f} Mbit/s at best{says}, others {best:.0f}: {kind}. It slows "
            "every run down to its own rate. Try another cable, then another port of the switch."
        )
    return findings


def _slow_pairs(measured: list[dict[str, Any]], rates: dict[str, float]) -> list[str]:
    return [
        f"{a} and {b} reach {_worst(entry):.0f} Mbit/s with each other, though both reach "
        f"{min(rates[a], rates[b]):.0f} with others: are they on two switches?"
        for entry in measured
        for a, b in [entry["pair"]]
        if _worst(entry) < 0.7 * min(rates[a], rates[b])
    ]


def _short_packets(measured: list[dict[str, Any]], cards: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"Packets of {entry['mtu']} bytes at most pass between {a} and {b}, though their cards are "
        f"set to {cards[a]['mtu']} and {cards[b]['mtu']}: larger ones vanish and connections hang. "
        "Set the MTU of both, and of the switch, to the same value."
        for entry in measured
        for a, b in [entry["pair"]]
        if entry["mtu"] < max(cards[a]["mtu"], cards[b]["mtu"])
    ]


def accept_allreduce(
    seconds: list[float], size: int, results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Compare an all-reduce with its floor.

    A ring sends and receives 2 (N - 1) / N of the buffer by each card (Patarasuk and Yuan 2009,
    "Bandwidth optimal all-reduce algorithms"), so the slowest measured link bounds it.
    seconds: by machine; size: bytes.
    """
    measured = [entry for entry in accept_pairs(results) if "error" not in entry]
    slowest = min((_worst(entry) for entry in measured), default=0.0)
    count = len(results)
    floor = 2 * (count - 1) / count * size * 8 / (slowest * 1e6) if slowest else 0.0
    return {
        "bytes": size,
        "seconds": max(seconds, default=0.0),
        "floor_seconds": floor,
        "mbit": slowest,
    }


def accept_table(results: list[dict[str, Any]], allreduce: dict[str, Any] | None) -> list[str]:
    """The figures as lines of at most 80 columns."""
    pairs = accept_pairs(results)
    wide = max((len(" - ".join(entry["pair"])) for entry in pairs), default=4)
    lines = [f"{'pair':<{wide}}  Mbit/s there   back   latency ms   99 %    MTU"]
    for entry in pairs:
        name = f"{' - '.join(entry['pair']):<{wide}}"
        if "error" in entry:
            lines.append(f"{name}  {entry['error']}"[:80])
            continue
        lines.append(
            f"{name}  {entry['mbit_to']:12.0f}  {entry['mbit_from']:5.0f}   "
            f"{entry['latency_ms']:10.2f}  {entry['latency_p99_ms']:5.2f}  {entry['mtu']:5d}"
        )
    wide = max(len(result["host"]) for result in results)
    lines += ["", f"{'machine':<{max(wide, 7)}}  disk MB/s  data MB/s  data on     card     Mbit/s"]
    for result in results:
        data, speed = result["data"] or {}, result["card"]["speed"]
        lines.append(
            f"{result['host']:<{max(wide, 7)}}  {result['disk']['mb_per_second']:9.0f}  "
            f"{_figure(data.get('mb_per_second')):>9}  {data.get('filesystem', '-'):<10}  "
            f"{result['card']['interface']:<7}  {_figure(speed):>6}"
        )
    if allreduce:
        lines += ["", _allreduce_line(allreduce, len(results))]
    return [line.rstrip() for line in lines]


def _figure(value: float | None) -> str:
    return f"{value:.0f}" if value and value > 0 else "-"


def _allreduce_line(allreduce: dict[str, Any], count: int) -> str:
    return (
        f"all-reduce of {allreduce['bytes'] / 1e6:.0f} MB over {count} machines: "
        f"{allreduce['seconds']:.2f} s, floor {allreduce['floor_seconds']:.2f} s "
        f"at {allreduce['mbit']:.0f} Mbit/s"
    )
