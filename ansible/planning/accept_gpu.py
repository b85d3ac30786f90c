"""What the figures of NVIDIA cards mean, compared with what such cards are known to reach."""

from __future__ import annotations

from typing import Any

# Fractions of the known figures below which something is wrong. Good cards reach 85 to 95 % of the
# fp32 product and of the memory's rate, 75 to 95 % of the tensor cores', 75 to 85 % of PCIe's.
FRACTIONS = {"fp32": 0.6, "fp16": 0.5, "copy": 0.7, "to_card": 0.6, "from_card": 0.6}
UNITS = {"fp32": "TFLOP/s", "fp16": "TFLOP/s", "copy": "GB/s"}
WORDS = {"fp32": "fp32 matrix product", "fp16": "fp16 matrix product", "copy": "memory copy"}
# Bits of nvidia-smi's clocks_throttle_reasons.active (NVML, nvmlClocksThrottleReasons) that are
# faults; every card reaches the power cap (0x4) under load.
THROTTLES = {
    0x08: ("a hardware slowdown", "too hot or too little power"),
    0x20: ("its driver, for the heat", "too hot"),
    0x40: ("its hardware, for the heat", "too hot"),
    0x80: ("its power supply's signal", "too little power"),
}
# GB/s of one lane for each PCIe generation, net of the line code (PCI-SIG).
LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


def row_of(name: str, table: dict[str, Any]) -> dict[str, Any] | None:
    """The row of ansible/gpus.yml for nvidia-smi's name of a card, e.g. "NVIDIA GeForce RTX 3090".

    The name's whole end counts: "RTX 2080" is not "RTX 2080 Ti", nor the other way round.
    """
    return next(
        (row for key, row in table.items() if name == key or name.endswith(" " + key)), None
    )


def gpu_findings(
    results: dict[str, list[dict[str, Any]]], table: dict[str, Any], allreduce: dict[str, Any]
) -> list[str]:
    """Sentences about what is wrong; [] if nothing is.

    results: {host: what `gpuprobe.py cards` printed}; table: ansible/gpus.yml's "gpus"; allreduce:
    see accept_allreduce in accept.py, or {}.
    """
    findings = []
    for host, cards in results.items():
        for number, card in enumerate(cards):
            findings += [f"{host}, card {number}: {text}" for text in _card(card, table)]
    drivers = {card["driver"] for cards in results.values() for card in cards if "driver" in card}
    if len(drivers) > 1:
        findings.append(
            f"The machines have different drivers ({', '.join(sorted(drivers))}): they work, but "
            "a fault of one machine is then hard to find. For the same driver on all, set "
            "driver_policy: upgrade."
        )
    if allreduce and allreduce["seconds"] > 1.5 * allreduce["floor_seconds"]:
        findings.append(
            f"The all-reduce over NCCL takes {allreduce['seconds']:.2f} s, though the slowest link "
            f"allows {allreduce['floor_seconds']:.2f} s. Does NCCL take another card "
            "(NCCL_DEBUG=INFO names it)?"
        )
    return findings


def _card(card: dict[str, Any], table: dict[str, Any]) -> list[str]:
    if "error" in card:
        return [f"it could not be measured: {card['error']}. Does nvidia-smi work there?"]
    row = row_of(card["name"], table)
    findings = [] if row is None else _figures(card, row) + _memory(card, row)
    return findings + _link(card, row) + _throttling(card)


def _figures(card: dict[str, Any], row: dict[str, Any]) -> list[str]:
    return [
        f"{card['name']}: {WORDS[name]} {card[name]:.1f} {UNITS[name]}, while {row[name]} are "
        "usual for it. Is somebody else using it, is it too hot, or is its power limited "
        "(nvidia-smi -q -d POWER)?"
        for name in WORDS
        if row[name] is not None and card[name] < FRACTIONS[name] * row[name]
    ]


def _memory(card: dict[str, Any], row: dict[str, Any]) -> list[str]:
    findings = []
    if card["memory_mib"] is not None and card["memory_mib"] < 0.9 * row["memory"] * 1024:
        findings.append(
            f"{card['name']} has {card['memory_mib']} MiB of memory, while {row['memory']} GB are "
            "usual for it: is it really this model?"
        )
    return findings


def _link(card: dict[str, Any], row: dict[str, Any] | None) -> list[str]:
    generation, lanes = card["generation"], card["lanes"]
    if not generation or not lanes:
        return []
    findings = []
    if row and lanes < row["lanes"]:
        # nvidia-smi's "max" is what card and slot have in common.
        why = "the slot has no more" if lanes == card["most_lanes"] else "the slot has more"
        findings.append(
            f"it is linked by {lanes} of its {row['lanes']} lanes of PCIe; {why}: reseat it, "
            "clean its contacts, or use a slot that shares its lanes with no other card"
        )
    limit = LANE.get(generation, 0.0) * lanes  # a generation that is not known has none
    slowest = min(card["to_card"], card["from_card"])
    if slowest < FRACTIONS["to_card"] * limit:
        findings.append(
            f"{slowest:.1f} GB/s pass between it and the machine's memory, although {limit:.1f} "
            f"fit through {lanes} lanes of PCIe {generation}"
        )
    return findings


def _throttling(card: dict[str, Any]) -> list[str]:
    return [
        f"it was slowed down by {who} ({why}; {card['celsius']} C): look at fans, dust, cables"
        for bit, (who, why) in THROTTLES.items()
        if (card["throttled"] or 0) & bit
    ]


def gpu_table(
    results: dict[str, list[dict[str, Any]]],
    table: dict[str, Any],
    allreduce: dict[str, Any],
    size: int,
) -> list[str]:
    """The figures as lines of at most 80 columns, each with the known one after a slash."""
    wide = max([7, *(len(host) for host in results)])
    lines = [f"{'machine':<{wide}}  card          fp32 TFLOP/s  fp16 TFLOP/s   copy GB/s  PCIe   C"]
    for host, cards in results.items():
        for card in cards:
            if "error" in card:
                lines.append(f"{host:<{wide}}  {card['error']}"[:80])
                continue
            row = row_of(card["name"], table) or {}
            cells = [f"{_beside(card[key], row.get(key)):>12}" for key in ("fp32", "fp16")]
            lines.append(
                f"{host:<{wide}}  {_short(card['name']):<13} {'  '.join(cells)} "
                f"{_beside(card['copy'], row.get('copy'), 0):>11}  {_pcie(card):<5} "
                f"{card['celsius'] or '-':>3}"
            )
    if allreduce:
        lines.append(
            f"all-reduce of {size / 1e6:.0f} MB over NCCL: {allreduce['seconds']:.2f} s, floor "
            f"{allreduce['floor_seconds']:.2f} s"
        )
    return lines


def _short(name: str) -> str:
    return name.replace("NVIDIA ", "").replace("GeForce ", "")[:13]


def _pcie(card: dict[str, Any]) -> str:
    generation, lanes = card["generation"], card["lanes"]
    return f"{generation}x{lanes}" if generation and lanes else "-"


def _beside(value: float, limit: float | None, digits: int = 1) -> str:
    return f"{value:.{digits}f}/{limit or '-'}"
