"""The guards of an attempt: the code is sent, a guard is started on each node and given its task,
and what it sends is read (docs/guard-protocol.md)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from boundary.answers import LaidOut
from boundary.frames import Exit, Frames, Record
from boundary.schema import Invalid
from contract import records
from contract.errors import UserError
from contract.records import PIECE
from launcher import remote
from launcher.background import MIB, Spool
from launcher.look import OpenMachines
from launcher.machines import engine
from launcher.machines.engine import Host, MachineError, Node, Process, talk
from launcher.node.link import LEASE
from launcher.node.machine import who
from launcher.outputs import show_names
from launcher.plan import code
from launcher.plan.code import Delivery
from launcher.plan.layer import DAYS
from launcher.plan.plan import NodePlan, Plan

# Code, and a layer, are as old as their last use. None of another run's is in use for so long.
USED = 'touch "$1" && find "${1%/*}" -mindepth 1 -maxdepth 1 -mtime "+$2" -exec rm -rf -- "{}" +'


def deliver(
    deliveries: Iterable[Delivery], machines: OpenMachines, say: Callable[[str], None]
) -> None:
    """Send files to the machines that do not hold them, see that they came, and throw away there
    what was long not used beside them. Raises MachineError."""
    hosts, nodes, facts = machines.hosts, machines.nodes, machines.facts
    for delivery in deliveries:
        sent = delivery.code
        folders = {h.name: f"{facts[h.name].absolute(h.node_dir)}/{sent.folder}" for h in hosts}
        is_held = engine.of_each(
            partial(_holds, sent.sha256), [(nodes[h.name], folders[h.name]) for h in hosts]
        )
        lacking = [host for host, there in zip(hosts, is_held) if not there]
        if lacking:
            say(f"{delivery.said} {', '.join(host.name for host in lacking)}")
            code.send(sent, {host.name: nodes[host.name] for host in lacking}, folders)
            check_code(sent.sha256, lacking, nodes, folders)


def _holds(sha256: str, place: tuple[Node, str]) -> bool:
    """Whether the folder of a machine has exactly these files; what was changed there goes."""
    node, folder = place
    there = remote.tree_sha256(node, folder)
    if there:
        used = ["sh", "-c", USED, "sh", folder, str(DAYS)]
        with contextlib.suppress(OSError, UserError):
            argv = used if there == sha256 else ["rm", "-rf", "--", folder]
            talk(node.start(argv), b"", 20.0)
    return there == sha256


def check_code(
    sha256: str, hosts: list[Host], nodes: dict[str, Node], folders: dict[str, str]
) -> None:
    """Check that these machines hold the code that is recorded. Raises MachineError for those that
    do not."""

    def one(host: Host) -> str | None:
        found = remote.tree_sha256(nodes[host.name], folders[host.name])
        if found == sha256:
            return None
        return (
            f"{host.label()}: {folders[host.name]} does not hold what was sent: see that "
            "nothing else writes there and that its disk is not full, then start again."
        )

    results = zip(hosts, engine.of_each(one, hosts))
    problems = {host.name: problem for host, problem in results if problem}
    if problems:
        raise MachineError([*problems], *problems.values())


def lay_out(
    plan: Plan, machines: OpenMachines, outputs: Sequence[str], say: Callable[[str], None]
) -> None:
    """Lay out the delivered code of a program in the folder that it runs in on each machine, and
    make the folders `outputs` there. Raises MachineError."""

    def lay_out_on(node: NodePlan) -> str | None:
        sent, work = f"{node.code}/{code.OWN}", f"{node.output}/{code.WORK}/{node.host}"
        call = f"lay_out({remote.MARK!r}, {sent!a}, {work!a}, {[*outputs]!a})"
        try:
            answer = remote.ask(machines.nodes[node.host], "launcher.node.work", call, LaidOut)
        except (OSError, UserError, Invalid) as error:
            return f"{node.host}: the code was not laid out: {error}"
        if answer.kept.count:
            names = show_names([*map(unquote, answer.kept.first)], answer.kept.count)
            say(f"{node.host}: this run's own versions stay in {work}, not the sent ones: {names}")
        why = answer.problem
        return why and f"{node.host}: the folder of the script cannot be made: {why}"

    problems = zip(plan.nodes, engine.of_each(lay_out_on, plan.nodes))
    failed = {node.host: problem for node, problem in problems if problem}
    if failed:
        raise MachineError([*failed], *failed.values())


def start_guards(plan: Plan, machines: OpenMachines) -> dict[str, Process]:
    """Start a guard on each node, all at once; the guards then wait for their task."""

    def one(node: NodePlan) -> Process:
        python = engine.of(node.connection).guard_python
        argv = [python, "-IB", f"{node.code}/launcher/node", plan.unit]
        return machines.nodes[node.host].start(argv)

    return dict(zip([node.host for node in plan.nodes], engine.of_each(one, plan.nodes)))


def task(plan: Plan, node: NodePlan) -> dict[str, Any]:
    """The first line for a node's guard: argv and env exactly as a dry run prints them."""
    return {
        "type": "start",
        "run": plan.run,
        "attempt": plan.attempt,
        "host": node.host,
        "ranks": list(node.ranks),
        "argv": list(node.argv),
        "env": dict(node.env),
        "cwd": node.cwd,
        "output": node.output,
        "data": node.data,
        "lease": LEASE,
        "interface": node.interface,
        "holder": f"{who()[0]}@{socket.gethostname()}",
        "shared": plan.options.force,
        "peers": peers_of(plan, node),
        "owner_signs": list(node.owner_signs),
        "away_dir": node.away_dir,
        "measured": plan.measured.document() if plan.measured else {},
    }


def peers_of(plan: Plan, node: NodePlan) -> list[str]:
    """Where ranks are found of which nobody knows whether they make a process group."""
    if plan.world_size == 1:
        return []
    near = ["127.0.0.1", "::1"] if len(node.ranks) > 1 else []
    return [*{other.address: None for other in plan.nodes}, *near]


class Guarded:
    """One node's guard as the control machine sees it."""

    def __init__(self, node: NodePlan, process: Process, now: float):
        self.node = node
        self.process = process
        self.frames = Frames(node.ranks)
        self.heard = now
        self.exit: Exit | None = None
        self.running: list[int] = []  # ranks
        self.idle: float | None = None  # seconds in which these did nothing, if that is known
        self.behind = False  # it sent frames that were not taken yet
        self.ended = False  # its stream has ended, or it was given up
        self.gone = False
        self._pending = bytearray()

    def send(self, line: dict[str, Any]) -> None:
        self._pending += json.dumps(line).encode() + b"\n"
        self.push()

    def renew(self) -> None:
        """Renew the lease. One renewal that waits for the network is enough: more would only arrive
        all at once."""
        if not self._pending:
            self.send({"type": "lease"})
        else:
            self.push()

    def push(self) -> None:
        # A broken pipe: the end of its stdout shows it.
        with contextlib.suppress(OSError, ValueError):
            while self._pending:
                taken = self.process.write(bytes(self._pending))
                if not taken:
                    return
                del self._pending[:taken]


# A guard sends a piece of a file a second. So much may come besides: the rest at its end, and what
# waited in the network. A piece counts as LEAST, so that tiny ones are few, too.
BESIDE, LEAST = 4 * MIB, 1024


class Copy:
    """One file of one node."""

    def __init__(self, path: Path, limit: int):
        self.path, self.limit = path, limit
        self.end = 0  # bytes that were sent of it
        self.cost = 0  # the same, as they count

    def append(self, offset: int, data: bytes) -> None:
        """Write a piece where it belongs, at the file's end, whole or not at all: what a full disk
        takes nothing of is fetched at the end, from where the file ends then."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o644)
            try:
                whole = os.fstat(descriptor).st_size
                if whole == offset and os.write(descriptor, data) < len(data):
                    os.ftruncate(descriptor, whole)
            finally:
                os.close(descriptor)
        except OSError:
            return


class Records:
    """Those of an attempt, each of at most so many bytes."""

    def __init__(self, plan: Plan, folder: Path, spool: Spool, most: int):
        self._spool, self._begun = spool, time.monotonic()
        self._copies = {
            (node.host, name): Copy(folder / "nodes" / node.host / name, most)
            for node in plan.nodes
            for name in records.names(plan.attempt, node.ranks)
        }

    def take(self, host: str, frame: Record, payload: bytes) -> None:
        """A piece of a file. Raises Invalid for one that its guard does not have, that does not
        follow the last, or that comes sooner than a guard sends it. Beyond the file's limit pieces
        are counted and left out."""
        copy = self._copies.get((host, frame.file))
        if copy is None:
            raise Invalid(f"a record {frame.file!r}, which is none of its own")
        offset = copy.end
        if frame.offset != offset:
            raise Invalid(f"byte {frame.offset} of {frame.file} after byte {offset}")
        copy.end += len(payload)
        copy.cost += max(len(payload), LEAST)
        seconds = time.monotonic() - self._begun
        if copy.cost > BESIDE + PIECE * seconds:
            raise Invalid(f"more of {frame.file} than a guard sends in {int(seconds) + 1} s")
        if copy.end <= copy.limit:
            self._spool.add(lambda: copy.append(offset, payload), len(payload))
