"""Sends an attempt's code, starts a guard on each node, and copies the records that guards send.

lifecycle.py and errand.py deliver files and start guards. Then watch.py reads the guards' frames
(docs/guard-protocol.md), and orders them by GuardConnection. launcher/node/guard.py is the guard.
"""

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
from launcher.plan.layer import UNUSED_DAYS
from launcher.plan.plan import NodePlan, Plan

# $1 is a folder with one version of the code or one layer, $2 is UNUSED_DAYS. The command marks the
# folder as used now, and removes its neighbours that no run has used for so long.
MARK_USED = (
    'touch "$1" && find "${1%/*}" -mindepth 1 -maxdepth 1 -mtime "+$2" -exec rm -rf -- "{}" +'
)


def deliver(
    deliveries: Iterable[Delivery], machines: OpenMachines, say: Callable[[str], None]
) -> None:
    """Send files to the machines that lack them, and check that they arrived. Remove versions that
    were not used for UNUSED_DAYS from the machines. Raises MachineError."""
    hosts, nodes, facts = machines.hosts, machines.nodes, machines.facts
    # Code, weights and packages change rarely, so most machines have them from an earlier run.
    for delivery in deliveries:
        files = delivery.code
        folders = {h.name: f"{facts[h.name].absolute(h.node_dir)}/{files.folder}" for h in hosts}
        check_host = partial(_has_files, files.sha256, nodes, folders)
        have_files = engine.map_parallel(check_host, [host.name for host in hosts])
        lacking = [host for host, has_files in zip(hosts, have_files) if not has_files]
        if lacking:
            say(f"{delivery.lead} {', '.join(host.name for host in lacking)}")
            code.send(files, {host.name: nodes[host.name] for host in lacking}, folders)
            check_code(files.sha256, lacking, nodes, folders)


def _has_files(sha256: str, nodes: dict[str, Node], folders: dict[str, str], name: str) -> bool:
    """Return whether the folder on the machine `name` has exactly the files of this hash. Remove a
    folder with other files, and mark the right folder as used."""
    node, folder = nodes[name], folders[name]
    folder_sha256 = remote.tree_sha256(
        node, folder
    )  # "" without the folder, None without an answer
    if folder_sha256:
        mark_used = ["sh", "-c", MARK_USED, "sh", folder, str(UNUSED_DAYS)]
        # An error of this command does not matter: check_code decides after the files were sent.
        with contextlib.suppress(OSError, UserError):
            argv = mark_used if folder_sha256 == sha256 else ["rm", "-rf", "--", folder]
            talk(node.start(argv), b"", 20.0)  # seconds
    return folder_sha256 == sha256


def check_code(
    sha256: str, hosts: list[Host], nodes: dict[str, Node], folders: dict[str, str]
) -> None:
    """Check that the folders on these machines, {host: folder}, have the files of this hash. Raises
    MachineError with a problem for each machine whose files differ."""

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
    """On each machine, copy the delivered code of a script into the folder in which the script
    runs. Make the folders `outputs` there. Raises MachineError."""

    def lay_out_on(node: NodePlan) -> str | None:
        sent, work = f"{node.code}/{code.USER_FILES}", f"{node.output}/{code.WORK}/{node.host}"
        call = f"lay_out({remote.MARK!r}, {sent!a}, {work!a}, {[*outputs]!a})"
        try:
            answer = remote.ask(machines.nodes[node.host], "launcher.node.work", call, LaidOut)
        except (OSError, UserError, Invalid) as error:
            return f"{node.host}: the code could not be unpacked: {error}"
        # A resumed run may have changed some of its files, and needs its own versions.
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
    """Start the guards of all nodes at the same time. Each guard then waits for its task. Returns
    {host: process}."""

    def start(node: NodePlan) -> Process:
        python = engine.find_engine(node.connection).guard_python
        # With -I, packages of the user and PYTHON* variables on the node cannot change the guard.
        # With -B, Python writes no .pyc files into the folder of the code.
        argv = [python, "-IB", f"{node.code}/launcher/node", plan.unit]
        return machines.nodes[node.host].start(argv)

    processes = engine.map_parallel(start, plan.nodes)
    return {node.host: process for node, process in zip(plan.nodes, processes)}


def make_task(plan: Plan, node: NodePlan) -> dict[str, Any]:
    """Return the first line for a node's guard (FIELDS in launcher/node/link.py)."""
    # The guard reports a rank that has connected to none of the peers' addresses. Ranks on the same
    # machine may connect over its loopback.
    loopback = ["127.0.0.1", "::1"] if len(node.ranks) > 1 else []
    # In a measurement each node trains alone (measure.separate_nodes), and has a rank 0 of its own.
    is_separate = sum(0 in member.ranks for member in plan.nodes) > 1
    group = [node] if is_separate else plan.nodes  # the nodes whose ranks connect to each other
    peers = [*dict.fromkeys(member.address for member in group), *loopback]
    if sum(len(member.ranks) for member in group) == 1:  # a single rank connects to nobody
        peers = []
    # argv and env must be exactly those that a dry run prints (plan.render).
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
        "shared": plan.options.force,  # start although another run has the machine
        "peers": peers,
        "owner_signs": list(node.owner_signs),
        "away_dir": node.away_dir,
        "measured": plan.measured.document() if plan.measured else {},
    }


class GuardConnection:
    """Keeps the state of one node's guard as the control node knows it, and sends orders to it."""

    def __init__(self, node: NodePlan, process: Process, start_time: float):
        self.node = node
        self.process = process
        self.frames = Frames(node.ranks)
        self.last_frame_time = start_time  # by the monotonic clock
        self.exit: Exit | None = None  # the guard's last frame
        self.running: list[int] = []  # ranks
        self.idle: float | None = None  # seconds in which all running ranks did nothing, if known
        self.has_backlog = False  # the watch has received frames that it has not handled yet
        self.ended = False  # the guard's stream has ended, or the watch gave the guard up
        self.is_lost = False  # the guard was silent for too long, or its connection broke
        self._unsent = bytearray()

    def send(self, order: dict[str, Any]) -> None:
        """Queue one order as a line, and write as many queued bytes as the pipe accepts."""
        self._unsent += json.dumps(order).encode() + b"\n"
        self.push()

    def renew(self) -> None:
        """Renew the lease."""
        # If the network is slow, the queue is not empty: a second renewal would only arrive
        # together with the first renewal.
        if not self._unsent:
            self.send({"type": "lease"})
        else:
            self.push()

    def push(self) -> None:
        """Write as many queued bytes as the pipe accepts."""
        # A broken pipe is no error here: the watch notices the end of the guard's stdout.
        with contextlib.suppress(OSError, ValueError):
            while self._unsent:
                written = self.process.write(bytes(self._unsent))
                if not written:
                    return
                del self._unsent[:written]


# A guard sends one piece of each file a second, of at most PIECE bytes. EXTRA_BYTES are allowed in
# addition, for the end of the file and for data that was delayed in the network. Each piece counts
# at least PIECE_COST bytes, which also limits the number of tiny pieces.
EXTRA_BYTES, PIECE_COST = 4 * MIB, 1024


class RecordCopy:
    """Writes the local copy of one record file of one node."""

    def __init__(self, path: Path, max_bytes: int):
        self.path, self.max_bytes = path, max_bytes
        self.received_bytes = 0
        self.cost_bytes = 0  # like received_bytes, but a small piece costs PIECE_COST

    def append(self, offset: int, data: bytes) -> None:
        """Write a piece at the file's end, completely or not at all."""
        # A piece may be missing because the disk was full. Then the offset of no later piece fits,
        # and collect.py fetches the rest of the file after the run.
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if size == offset and os.write(descriptor, data) < len(data):
                    os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)


class Records:
    """Keeps local copies of an attempt's record files, each with at most `max_bytes`."""

    def __init__(self, plan: Plan, folder: Path, spool: Spool, max_bytes: int):
        self._spool, self._start = spool, time.monotonic()
        self._copies = {
            (node.host, name): RecordCopy(folder / "nodes" / node.host / name, max_bytes)
            for node in plan.nodes
            for name in records.names(plan.attempt, node.ranks)
        }

    def take(self, host: str, frame: Record, payload: bytes) -> None:
        """Append a piece to a file's copy, unless the copy would exceed its limit. Raises Invalid,
        whose message names what the guard sent, for an unknown file, for a gap, and for more bytes
        than a guard sends."""
        # The keys of _copies come from the plan, so a machine cannot choose a path.
        copy = self._copies.get((host, frame.file))
        if copy is None:
            raise Invalid(f"a record {frame.file!r} that it does not have")
        offset = copy.received_bytes
        if frame.offset != offset:
            raise Invalid(f"byte {frame.offset} of {frame.file} after byte {offset}")
        # Without this limit a guard could fill this disk, and memory while the disk is slow.
        copy.received_bytes += len(payload)
        copy.cost_bytes += max(len(payload), PIECE_COST)
        seconds = time.monotonic() - self._start
        if copy.cost_bytes > EXTRA_BYTES + PIECE * seconds:
            raise Invalid(f"more of {frame.file} than a guard sends in {int(seconds) + 1} s")
        if copy.received_bytes <= copy.max_bytes:
            self._spool.add(lambda: copy.append(offset, payload), len(payload))
