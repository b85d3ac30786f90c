"""Sends an attempt's code, starts a guard on each node with its task, and keeps what it sends
(docs/guard-protocol.md)."""

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
from launcher.node.machine import current_user
from launcher.outputs import show_names
from launcher.plan import code
from launcher.plan.code import Delivery
from launcher.plan.layer import DAYS
from launcher.plan.plan import NodePlan, Plan

# Marks a folder (code, or a layer) as used now, and removes its neighbors that were not used for
# DAYS. No other run still uses a folder of that age.
USED = 'touch "$1" && find "${1%/*}" -mindepth 1 -maxdepth 1 -mtime "+$2" -exec rm -rf -- "{}" +'


def deliver(
    deliveries: Iterable[Delivery], machines: OpenMachines, say: Callable[[str], None]
) -> None:
    """Send files to the machines that lack them and check that they arrived. Remove there what was
    not used for DAYS. Raises MachineError."""
    hosts, nodes, facts = machines.hosts, machines.nodes, machines.facts
    # Code, weights and packages change rarely: most machines have them from an earlier run.
    for delivery in deliveries:
        sent = delivery.code
        folders = {h.name: f"{facts[h.name].absolute(h.node_dir)}/{sent.folder}" for h in hosts}
        is_held = engine.map_parallel(
            partial(_holds, sent.sha256), [(nodes[h.name], folders[h.name]) for h in hosts]
        )
        lacking = [host for host, has_files in zip(hosts, is_held) if not has_files]
        if lacking:
            say(f"{delivery.lead} {', '.join(host.name for host in lacking)}")
            code.send(sent, {host.name: nodes[host.name] for host in lacking}, folders)
            check_code(sent.sha256, lacking, nodes, folders)


def _holds(sha256: str, place: tuple[Node, str]) -> bool:
    """Return whether a machine's folder, (node, folder), has exactly these files. A folder with
    other files is removed."""
    node, folder = place
    found_sha256 = remote.tree_sha256(node, folder)
    if found_sha256:
        mark_used = ["sh", "-c", USED, "sh", folder, str(DAYS)]
        # Without either the run works, too: the check after sending decides.
        with contextlib.suppress(OSError, UserError):
            argv = mark_used if found_sha256 == sha256 else ["rm", "-rf", "--", folder]
            talk(node.start(argv), b"", 20.0)
    return found_sha256 == sha256


def check_code(
    sha256: str, hosts: list[Host], nodes: dict[str, Node], folders: dict[str, str]
) -> None:
    """Check that these machines hold the recorded code. Raises MachineError, which names those that
    do not."""

    def check_host(host: Host) -> str | None:
        if remote.tree_sha256(nodes[host.name], folders[host.name]) == sha256:
            return None
        return (
            f"{host.label()}: {folders[host.name]} differs from what was sent: check that no "
            "other program writes to it and that its disk is not full, then start again."
        )

    results = zip(hosts, engine.map_parallel(check_host, hosts))
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
            return f"{node.host}: the code could not be unpacked: {error}"
        if answer.kept.count:
            names = show_names([*map(unquote, answer.kept.first)], answer.kept.count)
            say(
                f"{node.host}: {work} keeps this run's versions of files that were also sent: "
                f"{names}"
            )
        problem = answer.problem
        return problem and f"{node.host}: the folder of the script cannot be made: {problem}"

    problems = zip(plan.nodes, engine.map_parallel(lay_out_on, plan.nodes))
    failed = {node.host: problem for node, problem in problems if problem}
    if failed:
        raise MachineError([*failed], *failed.values())


def start_guards(plan: Plan, machines: OpenMachines) -> dict[str, Process]:
    """Start a guard on each node, all at once; the guards then wait for their task. Returns
    {host: process}."""
    argv = {
        n.host: [engine.find_engine(n.connection).guard_python, "-IB", f"{n.code}/launcher/node"]
        for n in plan.nodes
    }
    # -I: neither the user's packages nor PYTHON* variables there change the guard.
    start = engine.map_parallel(lambda h: machines.nodes[h].start([*argv[h], plan.unit]), argv)
    return dict(zip(argv, start))


def task(plan: Plan, node: NodePlan) -> dict[str, Any]:
    """Return the first line for a node's guard (FIELDS in launcher/node/link.py)."""
    # Each rank is to connect to these addresses, unless it is the only one; ranks of one machine
    # may meet on its loopback.
    loopback = ["127.0.0.1", "::1"] if len(node.ranks) > 1 else []
    peers = [*dict.fromkeys(peer.address for peer in plan.nodes), *loopback]
    if plan.world_size == 1:
        peers = []
    # argv and env are exactly what a dry run prints.
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
        "holder": f"{current_user()[0]}@{socket.gethostname()}",
        "shared": plan.options.force,
        "peers": peers,
        "owner_signs": list(node.owner_signs),
        "away_dir": node.away_dir,
        "measured": plan.measured.document() if plan.measured else {},
    }


class Guarded:
    """Holds what the control node knows of one node's guard, and sends it orders."""

    def __init__(self, node: NodePlan, process: Process, now: float):
        self.node = node
        self.process = process
        self.frames = Frames(node.ranks)
        self.heard = now  # when its last frame came, by the monotonic clock
        self.exit: Exit | None = None
        self.running: list[int] = []  # ranks
        self.idle: float | None = None  # seconds in which these did nothing, if that is known
        self.has_backlog = False  # it sent frames that were not handled yet
        self.ended = False  # its stream has ended, or it was given up
        self.gone = False  # it was silent for too long, or its connection broke
        self._pending = bytearray()

    def send(self, line: dict[str, Any]) -> None:
        """Queue one line, and write as much as the pipe takes."""
        self._pending += json.dumps(line).encode() + b"\n"
        self.push()

    def renew(self) -> None:
        """Renew the lease."""
        # One renewal that waits for the network is enough: more would only arrive all at once.
        if not self._pending:
            self.send({"type": "lease"})
        else:
            self.push()

    def push(self) -> None:
        """Write as much of the queued lines as the pipe takes."""
        # A broken pipe is no error here: the end of the guard's stdout shows it.
        with contextlib.suppress(OSError, ValueError):
            while self._pending:
                written = self.process.write(bytes(self._pending))
                if not written:
                    return
                del self._pending[:written]


# A guard sends one piece of a file a second. EXTRA_BYTES may come besides: the end of the file, and
# what waited in the network. A piece counts as PIECE_COST at least, so that tiny ones are few, too.
EXTRA_BYTES, PIECE_COST = 4 * MIB, 1024


class Copy:
    """Keeps the copy of one file of one node."""

    def __init__(self, path: Path, limit: int):
        self.path, self.limit = path, limit
        self.end = 0  # bytes of it that were sent
        self.cost = 0  # bytes; the same, but a small piece costs PIECE_COST

    def append(self, offset: int, data: bytes) -> None:
        """Write a piece at the file's end, whole or not at all."""
        # The launcher fetches a piece that a full disk did not take after the run, from where the
        # file ends then.
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if size == offset and os.write(descriptor, data) < len(data):
                    os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError:
            return


class Records:
    """Keeps local copies of an attempt's record files, each of at most `max_bytes`."""

    def __init__(self, plan: Plan, folder: Path, spool: Spool, max_bytes: int):
        self._spool, self._start = spool, time.monotonic()
        self._copies = {
            (node.host, name): Copy(folder / "nodes" / node.host / name, max_bytes)
            for node in plan.nodes
            for name in records.names(plan.attempt, node.ranks)
        }

    def take(self, host: str, frame: Record, payload: bytes) -> None:
        """Add a piece of a file; beyond the file's limit it is only counted. Raises Invalid for a
        file that the guard does not have, a gap, and more bytes than a guard sends."""
        # The names were made here, so no name of a machine becomes a path.
        copy = self._copies.get((host, frame.file))
        if copy is None:
            raise Invalid(f"a record {frame.file!r} that it does not have")
        offset = copy.end
        if frame.offset != offset:
            raise Invalid(f"byte {frame.offset} of {frame.file} after byte {offset}")
        # A guard that floods would fill this disk, and memory while the disk is slow.
        copy.end += len(payload)
        copy.cost += max(len(payload), PIECE_COST)
        seconds = time.monotonic() - self._start
        if copy.cost > EXTRA_BYTES + PIECE * seconds:
            raise Invalid(f"more of {frame.file} than a guard sends in {int(seconds) + 1} s")
        if copy.end <= copy.limit:
            self._spool.add(lambda: copy.append(offset, payload), len(payload))
