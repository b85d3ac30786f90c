"""Asks all machines at once for the facts that a plan needs, and which others each reaches.

What asks there is one text for `python -`, since a machine may not have the code yet: a module of
ours with all that it imports.
"""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract import levels, validate
from contract.errors import UserError
from contract.validate import NATURAL, Each, Invalid, Match, One, Row
from launcher.machines.engine import (
    LARGEST,
    Host,
    Late,
    MachineError,
    Node,
    Process,
    pieces,
    place_of,
    talk,
)
from launcher.machines.inventory import CHECKOUT, MOST_GPUS
from launcher.machines.probes.machine import MOST_PACKAGES

MARK = "tandem-answer "  # before what such a program answers: a .bashrc may print, too
# Python 3.11's ast.parse raises SystemError now and then where several threads call it at once.
PARSING = threading.Lock()
# Each module is made from its source; its packages are empty and know their modules by name.
LOADER = """
import sys, types
def _load(name, source):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    package, _, last = name.rpartition(".")
    if package:
        if package not in sys.modules:
            _load(package, "")
        setattr(sys.modules[package], last, module)
    exec(compile(source, name, "exec"), module.__dict__)
"""


def program(module: str, call: str) -> str:
    """A Python program that loads a module of the checkout, and those that it imports, and then
    evaluates `call` in it. Beside each other they may import the standard library."""
    lines = [LOADER]
    for name in with_imports(module):
        lines.append(f"_load({name!r}, {_path(name).read_text(encoding='utf-8')!r})")
    return "\n".join([*lines, f"sys.modules[{module!r}].{call}", ""])


def with_imports(module: str) -> list[str]:
    """A module of the checkout after those that it imports, they after theirs, and so on."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        for node in ast.walk(ast.parse(_path(name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                inner = [alias.name for alias in getattr(node, "names", ())]
            for other in inner:
                if other not in order and _path(other).is_file():
                    visit(other)
        order[name] = None

    with PARSING:
        visit(module)
    return list(order)


def _path(name: str) -> Path:
    return CHECKOUT / f"{name.replace('.', '/')}.py"


FIRST_PORT = 29500
PORTS = 32
NO_STATUS = -1  # what paramiko has where the connection ended before the command
SECONDS = 30.0
INTERFACE = Match(r"[^\s/]{1,15}")
ROUTE = {"interface": (INTERFACE, None), "source": (str, None), "error": (str, None)}
SHA256 = Match("[0-9a-f]{64}")
LISTING = {"classes": NATURAL, "images": NATURAL, "sha256": SHA256}
VERSION = Match(r"[A-Za-z0-9.+!_-]{1,100}")
VERSIONS = ("python", "torch", "torchvision", "nccl", "cuda")
CARD = {"name": str, "uuid": str, "pci": (str, None), "sm": (One(range(10, 1000)), None)}
REACH_SECONDS = 15.0
# With more machines than this each tries only its nearest neighbours and node 0, not all n * n
# pairs.
ALL_PAIRS = 16


@dataclass(frozen=True)
class Facts:
    """What launcher/machines/probes/machine.py found on one machine."""

    host: str
    unix: float
    asked_unix: float
    answered_unix: float
    home: str
    hostname: str
    cores: int
    cpu_flags: list[str]
    machine: str
    versions: dict[str, str | None]
    models: list[str]
    packages: dict[str, bool]
    distributions: dict[str, str]
    glibc: int
    gpus: dict[str, Any]
    runs: list[dict[str, Any]]
    paths: dict[str, bool]
    routes: dict[str, dict[str, Any]]
    free_ports: tuple[int, ...]
    data: dict[str, Any]
    disk_free: int
    writable: bool
    guard_python: bool

    def absolute(self, folder: str) -> str:
        """An absolute path on this machine; relative ones begin at the run user's home."""
        return folder if folder.startswith("/") else f"{self.home}/{folder}"

    @property
    def skew(self) -> float:
        """By how many seconds this machine's clock is ahead of ours, at least: the round trip is
        uncertain."""
        if self.unix > self.answered_unix:
            return self.unix - self.answered_unix
        return min(0.0, self.unix - self.asked_unix)


def shape(task: dict[str, Any]) -> dict[str, Any]:
    """What the answer to a task of preflight.py is: of all that was asked, and of nothing else."""
    return {
        "unix": float,
        "home": Match(r"/[^\x00-\x1f]*"),
        "hostname": str,
        "cores": One(range(1, 1 << 20)),
        "cpu_flags": [One(levels.BF16_FLAGS)],
        "machine": str,
        "versions": dict.fromkeys(VERSIONS, (VERSION, None)),
        "models": [str],
        "packages": dict.fromkeys(task["packages"], bool),
        "distributions": Each(VERSION, MOST_PACKAGES),
        "glibc": One(range(1000)),
        "gpus": {
            "count": One(range(MOST_GPUS + 1)),
            "cards": [CARD],
            "driver": (str, None),
            "processes": [{"pid": NATURAL, "user": str, "command": str}],
            "error": (str, None),
            "cards_on_bus": NATURAL,
        },
        "runs": [{"pid": NATURAL, "run": str, "holder": str}],
        "paths": dict.fromkeys(task["paths"], bool),
        "routes": dict.fromkeys(task["peers"], ROUTE),
        "free_ports": [One(frozenset(task["ports"]))],
        "data": {
            "path": One((task["data"],)),
            "exists": bool,
            "problem": (str, None),
            "splits": Each(LISTING),
            "others": [str],
        },
        "disk_free": NATURAL,
        "writable": bool,
        "guard_python": bool,
    }


def ask_all(
    nodes: dict[str, Node], tasks: dict[str, dict[str, Any]]
) -> tuple[dict[str, Facts], dict[str, str]]:
    """Facts by host name, and a sentence for each host that gave none."""
    facts, failures = {}, {}
    with ThreadPoolExecutor(max_workers=min(64, len(nodes) or 1)) as pool:
        answers = pool.map(lambda name: _asked(nodes[name], tasks[name]), nodes)
        for name, answer in zip(nodes, answers):
            if isinstance(answer, Facts):
                facts[name] = answer
            else:
                failures[name] = answer
    return facts, failures


def _asked(node: Node, task: dict[str, Any]) -> Facts | str:
    """The border of a machine: what goes wrong here with its answer is that machine's."""
    try:
        return _ask(node, task)
    except Exception as error:
        return f"{node.host.label()}: what it answered ended in an error here: {place_of(error)}."


def _ask(node: Node, task: dict[str, Any]) -> Facts | str:
    host = node.host
    asked_for = {**task, "cpu_flags": levels.BF16_FLAGS}
    source = program("launcher.machines.probes.machine", f"main({asked_for!r}, {MARK!r})")
    asked = time.time()
    try:
        process = node.start([host.env_python, "-IB", "-"])
        output, said, status = talk(process, source.encode(), SECONDS)
    except MachineError as error:
        return str(error)
    except UserError as error:
        return f"{host.label()}: {error}"
    except FileNotFoundError:
        return no_python(host, "no such file")
    except OSError as error:
        return f"{host.label()}: the connection broke while asking it: {error}."
    text = output.decode(errors="replace")
    line = next((line for line in text.splitlines() if line.startswith(MARK)), None)
    if line is not None:
        try:
            found = read_facts(line[len(MARK) :], task)
        except Invalid as error:
            return f"{host.label()}: what it says of itself is impossible: {error}."
        return Facts(host=host.name, asked_unix=asked, answered_unix=time.time(), **found)
    if status in (126, 127):
        return no_python(host, said)
    if status == NO_STATUS:
        return f"{host.label()}: the connection broke while asking it."
    if status is None:
        return (
            f"{host.label()}: gave no answer within {SECONDS:.0f} s: is its disk or its data "
            "share hanging?"
        )
    return f"{host.label()}: {host.env_python} could not inspect the machine: {said}"


def read_facts(line: str, task: dict[str, Any]) -> dict[str, Any]:
    """The fields of Facts that a machine reports, checked. Raises Invalid."""
    found = validate.check(validate.parse(line), shape(task), "answer")
    if len(found["gpus"]["cards"]) != found["gpus"]["count"]:
        raise Invalid("answer.gpus.count is not the number of its cards")
    return {**found, "free_ports": tuple(found["free_ports"])}


def code_sha256(node: Node, python: str, folder: str) -> str | None:
    """The hash of the tree that a machine holds in `folder`, "" where it has no such folder, None
    where it cannot be found out."""
    source = program("launcher.node.machine", f"show({MARK!r}, {folder!r})")
    try:
        process = node.start([python, "-IB", "-"])
        output, _, _ = talk(process, source.encode(), SECONDS)
    except (OSError, UserError):
        return None
    said = [line for line in output.decode(errors="replace").splitlines() if line.startswith(MARK)]
    return said[0][len(MARK) :] if said else None


def no_python(host: Host, said: str) -> str:
    remedy = f"{host.engine.repair_hint}, or correct env_python of {host.name}"
    return f"{host.label()}: no Python at {host.env_python} ({said}): {remedy}."


def peers_of(index: int, count: int) -> list[int]:
    """The machines that number `index` of `count` connects to."""
    if count <= ALL_PAIRS:
        return [other for other in range(count) if other != index]
    near = [(index + step) % count for step in range(1, ALL_PAIRS // 2)]
    return sorted({0, *near} - {index})


def check_ways(hosts: list[Host], nodes: dict[str, Node], facts: dict[str, Facts]) -> list[str]:
    """A sentence for each pair of machines that cannot connect."""
    if len({host.address for host in hosts}) < 2:
        return []  # local nodes: there is nothing between them
    ports = [(facts[host.name].free_ports or (FIRST_PORT,))[-1] for host in hosts]

    def start(index: int) -> Process:
        host = hosts[index]
        peers = [[hosts[n].address, ports[n]] for n in peers_of(index, len(hosts))]
        call = f"main({host.address!r}, {ports[index]}, {peers!r}, {MARK!r})"
        source = program("launcher.machines.probes.reach", call)
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


def _read_pairs(line: bytes, known: Collection[str]) -> list[Any] | str:
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
        for piece in pieces(process, REACH_SECONDS):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(MARK.encode()):
                    return _read_pairs(line[len(MARK) :], known)
            size += len(piece)
            if size > LARGEST:
                return "it said too much"
    except Late:
        return f"no answer within {REACH_SECONDS:.0f} s"
    except Exception as error:  # the border of a machine, as above
        return place_of(error)
    said = process.stderr()
    return said.splitlines()[-1] if said else "it ended without an answer"
