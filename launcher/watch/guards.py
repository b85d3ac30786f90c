"""The guards of an attempt: the code is sent, a guard is started on each node and given its task,
and what it sends is read (docs/guard-protocol.md)."""

from __future__ import annotations

import contextlib
import json
import reprlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from contract import validate
from contract.errors import UserError
from contract.records import PIECE
from contract.validate import NATURAL, Each, Invalid, Match, One
from launcher import remote
from launcher.folders import relative
from launcher.look import OpenMachines
from launcher.machines import engine
from launcher.machines.engine import Host, MachineError, Node, Process, talk
from launcher.machines.owned import SIGNS
from launcher.node.machine import who
from launcher.node.task import LEASE
from launcher.plan import code
from launcher.plan.code import Code
from launcher.plan.layer import DAYS, FOLDER, Layer
from launcher.plan.plan import NodePlan, Plan

LARGEST = 1 << 20  # bytes of a frame without its raw bytes, and of these; our guard splits
GREETING = 1 << 20  # bytes before hello: a .bashrc that prints more never gets to a guard
KEPT = 4096  # bytes kept of what is not a frame, for the person who asks why
REASONS = ("finished", "alone", "failed", "stopped", "killed", "busy", "lease", "eof", "guard")
SIGNAL = (Match(r"SIG[A-Z0-9+-]{1,20}|signal \d{1,3}"), None)
PROCESSES = [{"pid": int, "command": str}]
# Code, and a layer, are as old as their last use. None of another run's is in use for so long.
USED = 'touch "$1" && find "${1%/*}" -mindepth 1 -maxdepth 1 -mtime "+$2" -exec rm -rf -- "{}" +'
SHOWN = 6  # packages of a layer that are named
# What our guard sends once at most: these, and for each of its ranks the two with a rank.
ONCE = ("hello", "started", "worker", "worker_exit", "exit")


def sync_code(plan: Plan, machines: OpenMachines, say: Callable[[str], None]) -> None:
    """Send the code to machines that lack this version. Raises MachineError."""
    now = code.current(plan.own_folder)
    folders = {node.host: node.cwd for node in plan.nodes}
    own = f" ({', '.join(now.files.lines()[:1])})" if plan.script else ""
    _sync(now, folders, machines, lambda names: say(f"code {now.sha256[:12]}{own} goes to {names}"))


def sync_layer(layer: Layer, machines: OpenMachines, say: Callable[[str], None]) -> None:
    """Send the packages of a script to machines that lack them. Raises MachineError."""
    folders = _below_node_dir(f"{FOLDER}/{layer.key}", machines)
    first = [f"{name} {version}" for name, version in [*layer.packages.items()][:SHOWN]]
    more = len(layer.packages) - len(first)
    said = f"packages {', '.join(first)}{f' and {more} more' if more else ''} go to"
    _sync(layer.code(), folders, machines, lambda names: say(f"{said} {names}"))


def sync_weights(weights: Code, machines: OpenMachines, say: Callable[[str], None]) -> None:
    """Send a file of weights to machines that lack it. Raises MachineError."""
    folders, file = _below_node_dir(weights.folder, machines), relative(weights.tree)
    said = f"weights {file / weights.names[0]} go to"
    _sync(weights, folders, machines, lambda names: say(f"{said} {names}"))


def _below_node_dir(folder: str, machines: OpenMachines) -> dict[str, str]:
    facts = machines.facts
    return {h.name: f"{facts[h.name].absolute(h.node_dir)}/{folder}" for h in machines.hosts}


def _sync(
    sent: Code, folders: dict[str, str], machines: OpenMachines, say: Callable[[str], None]
) -> None:
    """Send files to the machines that do not hold them, see that they came, and throw away there
    what was long not used beside them."""
    nodes = machines.nodes
    hosts = machines.hosts
    held = engine.of_each(lambda host: _holds(sent.sha256, nodes[host.name], folders), hosts)
    lacking = [host for host, there in zip(hosts, held) if not there]
    if lacking:
        say(", ".join(host.name for host in lacking))
        code.send(sent, {host.name: nodes[host.name] for host in lacking}, folders)
        check_code(sent.sha256, lacking, nodes, folders)


def _holds(sha256: str, node: Node, folders: dict[str, str]) -> bool:
    """Whether the machine has exactly these files; what was changed in their place goes."""
    host = node.host
    folder = folders[host.name]
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


def guard_argv(plan: Plan, node: NodePlan) -> list[str]:
    return [engine.of(node.connection).guard_python, "-IB", f"{node.cwd}/launcher/node", plan.unit]


def start_guards(plan: Plan, machines: OpenMachines) -> dict[str, Process]:
    """Start a guard on each node, all at once; the guards then wait for their task."""

    def one(node: NodePlan) -> Process:
        return machines.nodes[node.host].start(guard_argv(plan, node))

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
    }


def peers_of(plan: Plan, node: NodePlan) -> list[str]:
    """Where a script's ranks are found; our trainer's always make a process group."""
    if plan.script is None or plan.world_size == 1:
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
        self.exit: dict[str, Any] | None = None
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
        with contextlib.suppress(
            OSError, ValueError
        ):  # a broken pipe: the end of its stdout shows it
            while self._pending:
                taken = self.process.write(bytes(self._pending))
                if not taken:
                    return
                del self._pending[:taken]


def shapes(ranks: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """What the fields of each frame may be, from a node that has these ranks."""
    rank = One(frozenset(ranks))
    code = (One(range(256)), None)
    worker = {"exit_code": code, "signal": SIGNAL, "exception": (str, None)}
    return {
        "hello": {"protocol": One((2,)), "way": One(("service", "wardens"))},
        "started": {"pid": int, "mono_start": float},
        "worker": {"rank": rank, "pid": int},
        "log": {
            "rank": (rank, None),
            "stream": One(("stdout", "stderr")),
            "bytes": One(range(1, LARGEST + 1)),
        },
        "record": {"file": str, "offset": NATURAL, "bytes": One(range(1, PIECE + 1))},
        "beat": {"unix": float, "running": [rank]},
        "worker_exit": {"rank": rank, "first": bool, **worker},
        "trouble": {"what": str, "message": str},
        "owner": {"sign": (One(tuple(SIGNS)), None)},
        "exit": {
            "reason": One(REASONS),
            "message": (str, None),
            "exit_code": code,
            "signal": SIGNAL,
            "mono_start": float,
            "mono_end": float,
            "workers": Each(worker),
            "ended": PROCESSES,
            "left": PROCESSES,
        },
    }


class Frames:
    """Cuts a byte stream into frames, however it was split on the way.

    A frame that our guard never sends raises Invalid: the rest of the stream means nothing.
    """

    def __init__(self, ranks: tuple[int, ...]):
        self._shapes = shapes(ranks)
        # What came before hello: a .bashrc's greeting, or why there is no guard.
        self.said_before = b""
        self._before = 0  # bytes of it
        self._buffer = bytearray()
        self._looked = 0  # bytes of the buffer known to contain no newline
        self._greeted = False
        self._sent: set[tuple[str, int | None]] = set()  # of ONCE, with their ranks
        self._waiting: dict[str, Any] | None = None  # a frame whose raw bytes are not all here

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Add bytes; yield the frames that are now complete, each with its raw bytes. After those
        that precede a bad one, raises Invalid."""
        self._buffer += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> tuple[dict[str, Any], bytes] | None:
        while True:
            if self._waiting is not None:
                size = self._waiting["bytes"]
                if len(self._buffer) < size:
                    return None
                frame, payload = self._waiting, bytes(self._buffer[:size])
                del self._buffer[:size]
                self._waiting = None
                return frame, payload
            line = self._line()
            if line is None:
                return None
            found = self._frame(line)
            if found is None:
                self._keep(line + b"\n")
            elif "bytes" in found:
                self._waiting = found
            else:
                return found, b""

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n", self._looked)
        if end < 0:
            self._looked = len(self._buffer)
            if self._looked > LARGEST:
                self._keep(bytes(self._buffer[:KEPT]))
                raise Invalid(f"a line of more than {LARGEST >> 20} MiB")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._looked = 0
        return line

    def _frame(self, line: bytes) -> dict[str, Any] | None:
        """The frame in a line, checked; None for a line that is not a frame."""
        if not line.startswith(b"{"):  # a flood of other lines costs little
            return None
        try:
            found = validate.parse(line)
        except Invalid:
            return None
        if not isinstance(found, dict) or "type" not in found:
            return None
        kind = found["type"]
        if not self._greeted and kind != "hello":
            return None
        if not isinstance(kind, str) or kind not in self._shapes:
            raise Invalid(f"a frame of type {reprlib.repr(kind)}")
        frame = {"type": kind, **validate.check(found, self._shapes[kind], f"{kind} frame")}
        self._greeted = True
        self._count(frame)
        return frame

    def _count(self, frame: dict[str, Any]) -> None:
        """Refuse what comes again, however often, and what comes after the last frame."""
        kind, rank = frame["type"], frame.get("rank")
        whose = "" if rank is None else f" of rank {rank}"
        if ("exit", None) in self._sent:
            raise Invalid(f"after its exit frame one of type {kind!r}")
        if (kind, rank) in self._sent:
            raise Invalid(f"a second {kind} frame{whose}")
        if kind in ONCE:
            self._sent.add((kind, rank))

    def _keep(self, said: bytes) -> None:
        """Keep text that is not a frame. stderr shares the stream: the text is a defect of the
        guard, or what answered instead of one."""
        self.said_before = (self.said_before + said)[-KEPT:]
        self._before += len(said)
        if not self._greeted and self._before > GREETING:
            raise Invalid(
                f"{GREETING >> 20} MiB before its first frame: does a .bashrc print something "
                "there?"
            )

    def rest(self) -> str:
        """What is not a frame, as text."""
        text = self.said_before + bytes(self._buffer[:KEPT])
        return text.decode(errors="replace").strip()
