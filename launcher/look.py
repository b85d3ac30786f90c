"""Asks all machines at once what a plan needs to know of them, and whom each of them reaches; and
what this one has for them. The answers are values of known types: judge.py says what they mean."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from boundary.answers import MOST_PACKAGES, DataSet, Listing, NodeFacts, Unreached
from boundary.schema import Invalid, convert, decode
from contract import layout, precisions
from contract.errors import UserError
from contract.options import Config
from launcher import folders
from launcher.machines import engine, inventory
from launcher.machines.engine import (
    LARGEST,
    Host,
    MachineError,
    Node,
    Process,
    TimedOut,
    error_location,
    of_each,
    stream_output,
    talk,
)
from launcher.node.machine import PULSE
from launcher.problems import Problem, Refused, problem
from launcher.program import Needs
from launcher.remote import MARK, SECONDS, ask, marked, program

FIRST_PORT, PORT_COUNT = 29500, 32
NO_STATUS = -1  # what paramiko has where the connection ended before the command
REACH_SECONDS = 15.0
# With more machines than this each tries only its nearest neighbours and node 0, not all n * n
# pairs.
ALL_PAIRS = 16


@dataclass
class OpenMachines:
    """Open connections and what was seen over them."""

    hosts: list[Host]
    nodes: dict[str, Node]
    facts: dict[str, NodeFacts]
    silent: dict[str, Problem] = field(default_factory=dict)  # why others that were asked are not

    def close(self) -> None:
        engine.close_all(self.nodes)

    def leave(self, names: Collection[str]) -> None:
        """Go on without these machines."""
        engine.close_all({name: self.nodes[name] for name in names if name in self.nodes})
        for name in names:
            self.nodes.pop(name, None)
            self.facts.pop(name, None)
        self.hosts = [host for host in self.hosts if host.name not in names]

    def only(self, host: Host) -> OpenMachines:
        return replace(self, hosts=[host])


@dataclass(frozen=True)
class Source:
    """What machines have copies of, or read over a share: `name` for people."""

    name: str
    is_copied: bool
    splits: dict[str, Listing]


@dataclass(frozen=True)
class Control:
    """What this machine knows itself: the bytes free for runs/, and of machines by name what their
    data come from."""

    disk_free: int
    sources: Mapping[str, Source] = field(default_factory=dict)


def control_machine_facts(needs: Needs) -> Control:
    """What this machine has for such a run."""
    return Control(folders.disk_free())


def open_and_probe(
    hosts: list[Host], needs: Needs, *, without_missing: bool = False
) -> OpenMachines:
    """Connect to the machines and ask them. Raises UserError naming all that did not answer.

    With `without_missing`, machines that do not answer are `silent` instead.
    """
    nodes, failures = engine.open_all(hosts)
    try:
        if failures and not without_missing:
            raise UserError(*unreached(hosts, failures))
        present = [host for host in hosts if host.name in nodes]
        questions = {host.name: question(host, present, needs) for host in present}
        facts, silent = ask_all(nodes, questions)
        if silent and not without_missing:
            raise Refused([*silent.values()])
        silent.update({name: Problem("unreached", text) for name, text in failures.items()})
        return OpenMachines([host for host in present if host.name in facts], nodes, facts, silent)
    except BaseException:
        engine.close_all(nodes)
        raise


def unreached(hosts: list[Host], failures: dict[str, str]) -> list[str]:
    """What to say of machines that cannot be reached, by their names. Where none can, and they are
    those of the inventory as it comes, nobody has listed machines yet."""
    example = all(inventory.EXAMPLE.get(host.name) == host.address for host in hosts)
    if len(failures) < len(hosts) or not example:
        return list(failures.values())
    return [f"{', '.join(failures)}: {problem('examples').said}", next(iter(failures.values()))]


def question(host: Host, hosts: Iterable[Host], needs: Needs) -> dict[str, Any]:
    """What launcher/node/probe.py is asked on one of these machines."""
    hosts = list(hosts)
    peers = [other.address for other in hosts if other.name != host.name] or [host.address]
    return {
        "peers": list(dict.fromkeys(peers)),
        "ports": candidate_ports(needs.config),
        "node_dir": host.node_dir,
        "guard_python": host.engine.guard_python,
        "packages": needs.program.modules,
        "distributions": MOST_PACKAGES if needs.program.requirements else 0,
        "toolkit": f"{host.cuda_home}/bin" if host.cuda_home else "/",
        "data": host.data_path(needs.config.data),
        "data_kind": needs.program.data_kind,
        "cpu_flags": precisions.BF16_FLAGS,
    }


def candidate_ports(options: Config) -> list[int]:
    ports = list(range(FIRST_PORT, FIRST_PORT + PORT_COUNT))
    return ports if options.port is None else [options.port, *ports]


def ask_all(
    nodes: dict[str, Node], questions: dict[str, dict[str, Any]]
) -> tuple[dict[str, NodeFacts], dict[str, Problem]]:
    """NodeFacts by host name, and a problem for each host that gave none."""
    facts, failures = {}, {}
    answers = of_each(lambda name: _asked(nodes[name], questions[name]), nodes)
    for name, answer in zip(nodes, answers):
        if isinstance(answer, NodeFacts):
            facts[name] = answer
        else:
            failures[name] = answer
    return facts, failures


def _asked(node: Node, question: dict[str, Any]) -> NodeFacts | Problem:
    """The border of a machine: what goes wrong here with its answer is that machine's."""
    try:
        return _ask(node, question)
    except Invalid as error:
        return problem("answer-impossible", node.host, why=error)
    except Exception as error:
        return problem("answer-fails", node.host, place=error_location(error))


def _ask(node: Node, question: dict[str, Any]) -> NodeFacts | Problem:
    host = node.host
    source = program("launcher.node.probe", f"main({question!r}, {MARK!r})")
    start = time.time()
    try:
        process = node.start([host.env_python, "-IB", "-"])
        output, said, status = talk(process, source.encode(), SECONDS, len(PULSE))
    except MachineError as error:
        return Problem("unreached", str(error))
    except UserError as error:
        return problem("answer-refused", host, why=error)
    except FileNotFoundError:
        return problem("python-missing", host, python=host.env_python, said="no such file")
    except OSError as error:
        return problem("connection-broke", host, why=f": {error}")
    if (line := marked(output)) is not None:
        facts = read_facts(line, question)
        return structs.replace(facts, host=host.name, skew=skew(facts.unix, start, time.time()))
    if status in (126, 127):
        return problem("python-missing", host, python=host.env_python, said=said)
    if status == NO_STATUS:
        return problem("connection-broke", host, why="")
    if status is None:
        return problem("answer-late", host, seconds=SECONDS)
    return problem("python-fails", host, python=host.env_python, said=said)


def read_facts(line: str, question: Mapping[str, Any]) -> NodeFacts:
    """What a machine answers to a question, and nothing else. Raises Invalid."""
    facts: NodeFacts = decode(line, NodeFacts, "answer")
    silent = [peer for peer in question["peers"] if peer not in facts.interfaces]
    if silent:
        raise Invalid(f"answer.interfaces.{silent[0]} is missing")
    missing, free = set(facts.missing), set(facts.free_ports)
    return structs.replace(
        facts,
        missing=[name for name in question["packages"] if name in missing],
        interfaces={peer: facts.interfaces[peer] for peer in question["peers"]},
        free_ports=[port for port in question["ports"] if port in free],
    )


def data_sources(machines: OpenMachines, needs: Needs) -> dict[str, Source]:
    """By machine, what its data come from, where that can be read. A server that takes part is
    compared as all machines are."""
    known: dict[str, Source | None] = {host.name: None for host in machines.hosts}
    sources = {}
    for host in machines.hosts:
        folder = host.data_path(needs.config.data)
        inside = folder.startswith(f"{host.data_root}/")
        copied = host.copied.get(folder[len(host.data_root) + 1 :])
        name = copied or host.data_server
        if not inside or not name:
            continue
        if name not in known:
            known[name] = _read_copied(name, needs) if copied else _read_shared(name, needs)
        if source := known[name]:
            sources[host.name] = source
    return sources


def _read_copied(folder: str, needs: Needs) -> Source | None:
    try:
        cache, kind = inventory.CHECKOUT / ".tandem", needs.program.data_kind
        splits = layout.listings(Path(folder), cache, kind=kind)
    except layout.LayoutError:  # it may be gone since; the copies are still good
        return None
    return Source(f"{folder} here", True, convert(splits, dict[str, Listing], "listing"))


def _read_shared(name: str, needs: Needs) -> Source | None:
    """From a machine of the inventory that takes no part."""
    options, kind = needs.config, needs.program.data_kind
    servers = [host for host in inventory.load(Path(options.inventory)) if host.name == name]
    nodes, _ = engine.open_all(servers)
    try:
        for host in servers:
            folder = host.data_path(options.data)
            call = f"show_data({folder!r}, {kind!r}, {host.node_dir!r}, {MARK!r})"
            answer: DataSet = ask(nodes[name], "launcher.node.probe", call, DataSet)
            return Source(name, False, answer.splits) if answer.splits else None
    except (KeyError, OSError, UserError, Invalid):  # the machines of the run read it nevertheless
        pass
    finally:
        engine.close_all(nodes)
    return None


def skew(unix: float, start: float, end: float) -> float:
    """By how many seconds a clock is ahead that showed `unix` at some time between two of ours."""
    return unix - end if unix > end else min(0.0, unix - start)


def peers_of(index: int, count: int) -> list[int]:
    """The machines that number `index` of `count` connects to."""
    if count <= ALL_PAIRS:
        return [other for other in range(count) if other != index]
    near = [(index + step) % count for step in range(1, ALL_PAIRS // 2)]
    return sorted({0, *near} - {index})


def unreachable_pairs(machines: OpenMachines) -> dict[str, list[Unreached] | str]:
    """Whom each machine does not reach, or why it does not say."""
    hosts = machines.hosts
    addresses = {host.address for host in hosts}
    if len(addresses) < 2:
        return {}  # local nodes: there is nothing between them
    ports = [([*machines.facts[host.name].free_ports] or [FIRST_PORT])[-1] for host in hosts]

    def start(index: int) -> Process:
        host = hosts[index]
        peers = [[hosts[n].address, ports[n]] for n in peers_of(index, len(hosts))]
        call = f"main({host.address!r}, {ports[index]}, {peers!r}, {MARK!r})"
        source = program("launcher.node.reach", call)
        return machines.nodes[host.name].start([host.env_python, "-IB", "-c", source])

    processes = of_each(start, range(len(hosts)))
    try:
        answers = of_each(lambda process: _answer(process, addresses), processes)
    finally:  # only now: others may still have to reach a machine that has answered
        for process in processes:
            process.close()
    return {host.name: answer for host, answer in zip(hosts, answers)}


def read_unreached(line: bytes, known: Collection[str]) -> list[Unreached] | str:
    """What an answer says of each machine, once at most; or why it is not one."""
    try:
        peers: list[Unreached] = decode(line, list[Unreached], "its answer")
        addresses = [peer.address for peer in peers]
        if len(set(addresses)) < len(addresses) or not set(addresses) <= set(known):
            raise Invalid("it names a machine twice, or one that it was not asked for")
    except Invalid as error:
        return f"what it says is impossible ({error})"
    return peers


def _answer(process: Process, known: Collection[str]) -> list[Unreached] | str:
    """What one machine did not reach, or why it says nothing of that. Its process stays, since
    others may not have reached it yet."""
    size, rest = 0, b""
    try:
        for piece in stream_output(process, REACH_SECONDS):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(MARK.encode()):
                    return read_unreached(line[len(MARK) :], known)
            size += len(piece)
            if size > LARGEST:
                return "it said too much"
    except TimedOut:
        return f"no answer within {REACH_SECONDS:.0f} s"
    except Exception as error:  # the border of a machine, as above
        return error_location(error)
    said = process.stderr()
    return said.splitlines()[-1] if said else "it ended without an answer"
