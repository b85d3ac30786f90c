"""Who measures which link when, before `make plan` lets the machines train."""

from __future__ import annotations

import secrets
from typing import Any

from contract.errors import UserError
from launcher.machines.engine import Host
from launcher.machines.probe import Facts

SECONDS = 1.0  # how long each stream lasts
PATIENCE = 30.0  # for a machine that is late: guards start within a second of each other
TESTS = ("receive", "send")


def timetables(hosts: list[Host], facts: dict[str, Facts]) -> dict[str, dict[str, Any]]:
    """Each machine's plan for launcher/node/pairprobe.py; none where there is no cable between
    them. Raises UserError.

    Each machine measures with the next one of a ring and with the one before, in two rounds of
    pairs that share no cable (three rounds for an odd number of machines). So all links are in use
    at once, however many there are. Then all machines send at once.
    """
    if len({host.address for host in hosts}) < len(hosts) or len(hosts) < 2:
        return {}
    ports = set.intersection(*(set(facts[host.name].free_ports) for host in hosts))
    if not ports:
        raise UserError("no port is free on all of these machines: end programs that listen there.")
    common = {
        "peers": {host.name: host.address for host in hosts},
        "port": max(ports),
        "token": secrets.token_urlsafe(),
        "seconds": SECONDS,
        "patience": PATIENCE,
        "tests": TESTS,
    }
    names = [host.name for host in hosts]
    return {
        host.name: {
            **common,
            "host": host.name,
            "address": host.address,
            "interface": host.interface or "",
            "rounds": turns(names, index),
        }
        for index, host in enumerate(hosts)
    }


def turns(names: list[str], own: int) -> list[dict[str, Any] | None]:
    """One machine's part in each round; None where it rests."""
    count = len(names)
    edges = [(at, (at + 1) % count) for at in range(count if count > 2 else 1)]
    # Every second edge is disjoint; the last edge of an odd ring touches both its
    # neighbours, and so has a round of its own.
    rounds = [edges[: count - count % 2 : 2], edges[1 : count - count % 2 : 2]]
    rounds += [edges[count - 1 :]] if count % 2 else []
    found: list[dict[str, Any] | None] = []
    for pairs in filter(None, rounds):
        mine = next((pair for pair in pairs if own in pair), None)
        if mine is None:
            found.append(None)
            continue
        role = "client" if own == mine[0] else "server"
        found.append({"role": role, "partner": names[mine[own == mine[0]]]})
    after, before = names[(own + 1) % count], names[own - 1]
    return [*found, {"role": "ring", "partner": after, "before": before, "first": own == 0}]
