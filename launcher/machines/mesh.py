"""Before a run: can every machine reach every other one by TCP?"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from contract import validate
from contract.validate import Invalid, One, Row
from launcher.machines import source_bundle
from launcher.machines.connection import LARGEST, Late, pieces
from launcher.machines.engine import Host, Node, Process
from launcher.machines.probe import Facts
from launcher.machines.probes.reach import MARK
from launcher.plan.plan import FIRST_PORT

SECONDS = 15.0
# With more machines than this each tries only its nearest neighbours and node 0, not all n * n
# pairs.
ALL_PAIRS = 16


def peers_of(index: int, count: int) -> list[int]:
    """The machines that number `index` of `count` connects to."""
    if count <= ALL_PAIRS:
        return [other for other in range(count) if other != index]
    near = [(index + step) % count for step in range(1, ALL_PAIRS // 2)]
    return sorted({0, *near} - {index})


def check(hosts: list[Host], nodes: dict[str, Node], facts: dict[str, Facts]) -> list[str]:
    """A sentence for each pair of machines that cannot connect."""
    if len({host.address for host in hosts}) < 2:
        return []  # local nodes: there is nothing between them
    ports = [(facts[host.name].free_ports or (FIRST_PORT,))[-1] for host in hosts]

    def start(index: int) -> Process:
        host = hosts[index]
        peers = [[hosts[n].address, ports[n]] for n in peers_of(index, len(hosts))]
        call = f"main({host.address!r}, {ports[index]}, {peers!r})"
        source = source_bundle.program("launcher.machines.probes.reach", call)
        return nodes[host.name].start([host.env_python, "-IB", "-c", source])

    names = {host.address: host.name for host in hosts}
    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
        processes = list(pool.map(start, range(len(hosts))))
        try:
            answers = list(pool.map(lambda process: _answer(process, names), processes))
        finally:  # only now: others may still have to reach a machine that has answered
            for process in processes:
                process.close()
    problems = []
    for host, answer in zip(hosts, answers):
        if isinstance(answer, str):
            problems.append(f"{host.label()}: its peers could not be tried: {answer}.")
            continue
        for (address, port), said in answer:
            problems.append(
                f"{host.label()} does not reach {names[address]} ({address}) by TCP, tried on port "
                f"{port}: {said}: check the firewall of {names[address]}, and that its address in "
                f"the inventory is one of the same network."
            )
    return problems


def _read(line: bytes, known: Collection[str]) -> list[Any] | str:
    """The pairs in an answer, one for each machine at most; or why it is not one."""
    peer = Row((One(tuple(known)), One(range(1, 1 << 16))))
    try:
        pairs = validate.check(validate.parse(line), [Row((peer, str))], "its answer")
        if len({address for (address, _), _ in pairs}) < len(pairs):
            raise Invalid("one machine twice")
    except Invalid as error:
        return f"what it says is impossible ({error})"
    return pairs


def _answer(process: Process, known: Collection[str]) -> list[Any] | str:
    """What one machine found: pairs of [address, port] and reason; or why it found nothing. Its
    process stays, since others may not have reached it yet."""
    size, rest = 0, b""
    try:
        for piece in pieces(process, SECONDS):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(MARK.encode()):
                    return _read(line[len(MARK) :], known)
            size += len(piece)
            if size > LARGEST:
                return "it said too much"
    except Late:
        return f"no answer within {SECONDS:.0f} s"
    said = process.stderr()
    return said.splitlines()[-1] if said else "it ended without an answer"
