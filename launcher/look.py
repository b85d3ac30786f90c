"""Asks all machines at once for the facts that a plan needs, and for the peers that each of them
reaches. It also reads the data of this machine that they have copies of. judge.py turns the answers
into problems."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from boundary.answers import MOST_PACKAGES, DataSet, Listing, NodeFacts, Unreached
from boundary.schema import Invalid, convert, decode
from contract import layout, precisions
from contract.errors import UserError
from launcher.machines import engine, inventory
from launcher.machines.engine import (
    LARGEST,
    Host,
    MachineError,
    Node,
    Process,
    TimedOut,
    error_location,
    map_parallel,
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
        """Close the connections to these machines, and forget them."""
        engine.close_all({name: self.nodes[name] for name in names if name in self.nodes})
        for name in names:
            self.nodes.pop(name, None)
            self.facts.pop(name, None)
        self.hosts = [host for host in self.hosts if host.name not in names]

    def only(self, host: Host) -> OpenMachines:
        return replace(self, hosts=[host])


@dataclass(frozen=True)
class Source:
    """A folder that machines have copies of, or read over a share: `name` for people."""

    name: str
    is_copied: bool
    splits: dict[str, Listing]


@dataclass(frozen=True)
class Control:
    """Facts of this machine: the bytes free for runs/, and the sources of the machines' data, by
    the machine's name."""

    disk_free: int
    sources: Mapping[str, Source] = field(default_factory=dict)


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
        unlike = _take_listings(facts, questions)
        if unlike:
            named = {name: nodes[name] for name in unlike}
            more_facts, more_silent = ask_all(named, unlike)
            facts, silent = {**facts, **more_facts}, {**silent, **more_silent}
        if silent and not without_missing:
            raise Refused([*silent.values()])
        silent.update({name: Problem("unreached", text) for name, text in failures.items()})
        return OpenMachines([host for host in present if host.name in facts], nodes, facts, silent)
    except BaseException:  # also Ctrl-C
        engine.close_all(nodes)
        raise


def unreached(hosts: list[Host], failures: dict[str, str]) -> list[str]:
    """Return sentences on machines that cannot be reached; `failures`: by their names."""
    # If none can, and they are the example's, nobody has listed machines yet.
    example = all(inventory.EXAMPLE.get(host.name) == host.address for host in hosts)
    if len(failures) < len(hosts) or not example:
        return list(failures.values())
    return [f"{', '.join(failures)}: {problem('examples').message}", next(iter(failures.values()))]


def _take_listings(
    facts: dict[str, NodeFacts], questions: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Give each machine that reads a share the listing of the one that read it for all, in `facts`.
    Return the questions to machines whose folder is unlike that one's, to list it themselves."""
    unlike = {}
    for name, asked in questions.items():
        reader, own = facts.get(asked["data_reader"]), facts.get(name)
        if not asked["data_reader"] or own is None or not own.data.exists:
            continue
        if reader is None or reader.data.changed != own.data.changed:
            unlike[name] = {**asked, "data_reader": ""}
            facts.pop(name)
        else:
            data = structs.replace(own.data, splits=reader.data.splits, problem=reader.data.problem)
            facts[name] = structs.replace(own, data=data)
    return unlike


def question(host: Host, hosts: Sequence[Host], needs: Needs) -> dict[str, Any]:
    """Return the question for launcher/node/probe.py on one of these machines."""
    ports, wanted_port = range(FIRST_PORT, FIRST_PORT + PORT_COUNT), needs.config.port
    # A single machine is asked for the interface of its own address.
    peers = [peer.address for peer in hosts if peer.name != host.name] or [host.address]
    # A share is listed by one of the machines that mount it, and by its server.
    readers = [
        peer.name
        for peer in hosts
        if host.data_server not in ("", host.name, peer.name)
        and (peer.data_server, peer.data_root) == (host.data_server, host.data_root)
    ]
    return {
        "peers": list(dict.fromkeys(peers)),
        "ports": [*ports] if wanted_port is None else [wanted_port, *ports],
        "node_dir": host.node_dir,
        "guard_python": host.engine.guard_python,
        "packages": needs.program.modules,
        "distributions": MOST_PACKAGES if needs.program.requirements else 0,
        "toolkit": f"{host.cuda_home}/bin" if host.cuda_home else "/",
        "data": host.data_path(needs.config.data),
        "data_kind": needs.program.data_kind,
        "data_reader": readers[0] if host.name in readers[1:] else "",
        "cpu_flags": precisions.BF16_FLAGS,
    }


def ask_all(
    nodes: dict[str, Node], questions: dict[str, dict[str, Any]]
) -> tuple[dict[str, NodeFacts], dict[str, Problem]]:
    """Return NodeFacts by host name, and a problem for each host that gave none."""
    answers = dict(zip(nodes, map_parallel(lambda name: _ask(nodes[name], questions[name]), nodes)))
    return (
        {name: answer for name, answer in answers.items() if isinstance(answer, NodeFacts)},
        {name: answer for name, answer in answers.items() if isinstance(answer, Problem)},
    )


def _ask(node: Node, question: dict[str, Any]) -> NodeFacts | Problem:
    """Ask one machine. If its answer causes an error here, that is the machine's problem."""
    host = node.host
    try:
        source = program("launcher.node.probe", f"main({question!r}, {MARK!r})")
        # The clock of the machine is compared with the times before and after its answer.
        start = time.time()
        process = node.start([host.env_python, "-IB", "-"])
        output, stderr, status = talk(process, source.encode(), SECONDS, len(PULSE))
        if (line := marked(output)) is not None:
            facts = read_facts(line, question)
            ahead = skew(facts.unix, start, time.time())
            return structs.replace(facts, host=host.name, skew=ahead)
    except MachineError as error:
        return Problem("unreached", str(error))
    except UserError as error:
        return problem("answer-refused", host, why=error)
    except FileNotFoundError:
        return problem("python-missing", host, python=host.env_python, reason="no such file")
    except OSError as error:
        return problem("connection-broke", host, why=f": {error}")
    except Invalid as error:
        return problem("answer-impossible", host, why=error)
    except Exception as error:
        return problem("answer-fails", host, place=error_location(error))
    if status in (126, 127):  # of the shell there: Python cannot be run, or does not exist
        return problem("python-missing", host, python=host.env_python, reason=stderr)
    if status == NO_STATUS:
        return problem("connection-broke", host, why="")
    if status is None:
        return problem("answer-late", host, seconds=SECONDS)
    return problem("python-fails", host, python=host.env_python, reason=stderr)


def read_facts(line: str, question: Mapping[str, Any]) -> NodeFacts:
    """Read a machine's answer. Raises Invalid."""
    # Later code indexes by these names, so they are exactly those of the question.
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
    """Return the sources of the machines' data that can be read, by machine."""
    # A server that participates is no source: its data are compared with the other machines'.
    sources_by_name: dict[str, Source | None] = {host.name: None for host in machines.hosts}
    sources = {}
    for host in machines.hosts:
        folder = host.data_path(needs.config.data)
        inside = folder.startswith(f"{host.data_root}/")
        # Provisioning copied the data there, or the machine reads them from a server.
        copied = host.copied.get(folder[len(host.data_root) + 1 :])
        name = copied or host.data_server
        if not inside or not name:
            continue
        if name not in sources_by_name and not copied:
            sources_by_name[name] = _read_shared(name, needs)
        elif name not in sources_by_name:
            sources_by_name[name] = None  # its folder may be gone; the copies are still good
            with contextlib.suppress(layout.LayoutError):
                cache, kind = inventory.CHECKOUT / ".tandem", needs.program.data_kind
                splits = layout.listings(Path(name), cache, kind=kind)
                listings = convert(splits, dict[str, Listing], "listing")
                sources_by_name[name] = Source(f"{name} here", True, listings)
        if source := sources_by_name[name]:
            sources[host.name] = source
    return sources


def _read_shared(name: str, needs: Needs) -> Source | None:
    """Read the listing of a server that is no machine of the run; None if it does not answer."""
    options, kind = needs.config, needs.program.data_kind
    servers = [host for host in inventory.load(Path(options.inventory)) if host.name == name]
    nodes, _ = engine.open_all(servers)
    try:
        for host in servers:
            folder = host.data_path(options.data)
            call = f"show_data({folder!r}, {kind!r}, {host.node_dir!r}, {MARK!r})"
            # Only its guard's Python is needed: a file server may have no environment.
            answer: DataSet = ask(nodes[name], "launcher.node.probe", call, DataSet)
            return Source(name, False, answer.splits) if answer.splits else None
    except (KeyError, OSError, UserError, Invalid):  # the machines of the run read it nevertheless
        pass
    finally:
        engine.close_all(nodes)
    return None


def skew(unix: float, start: float, end: float) -> float:
    """Return by how many seconds a clock is ahead (negative: behind) that showed `unix` between two
    times of ours."""
    return unix - end if unix > end else min(0.0, unix - start)


def peers_of(index: int, count: int) -> list[int]:
    """Return the numbers of the machines that number `index` of `count` connects to."""
    if count <= ALL_PAIRS:
        return [peer for peer in range(count) if peer != index]
    # All ranks meet at node 0, so every machine has to reach it.
    neighbours = [(index + step) % count for step in range(1, ALL_PAIRS // 2)]
    return sorted({0, *neighbours} - {index})


def unreachable_pairs(machines: OpenMachines) -> dict[str, list[Unreached] | str]:
    """Ask each machine which peers it does not reach. Returns these peers by machine, or the reason
    why a machine gave no answer."""
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

    def read_answer(process: Process) -> list[Unreached] | str:
        size, unread = 0, b""
        try:
            for piece in stream_output(process, REACH_SECONDS):
                *lines, unread = (unread + piece).split(b"\n")
                for line in lines:
                    if line.startswith(MARK.encode()):
                        return read_unreached(line[len(MARK) :], addresses)
                size += len(piece)
                if size > LARGEST:
                    return "its answer is too long"
        except TimedOut:
            return f"no answer within {REACH_SECONDS:.0f} s"
        except Exception as error:  # whatever its answer breaks here is that machine's problem
            return error_location(error)
        stderr = process.stderr()
        return stderr.splitlines()[-1] if stderr else "it ended without an answer"

    processes = map_parallel(start, range(len(hosts)))
    try:
        answers = map_parallel(read_answer, processes)
    finally:  # only now: others may still have to reach a machine that has answered
        for process in processes:
            process.close()
    return {host.name: answer for host, answer in zip(hosts, answers)}


def read_unreached(line: bytes, addresses: Collection[str]) -> list[Unreached] | str:
    """Read an answer that has each of these addresses at most once. Return its peers, or the reason
    why it is invalid."""
    try:
        peers: list[Unreached] = decode(line, list[Unreached], "its answer")
        peer_addresses = [peer.address for peer in peers]
        is_repeated = len(set(peer_addresses)) < len(peer_addresses)
        if is_repeated or not set(peer_addresses) <= set(addresses):
            raise Invalid("it lists a machine twice, or a machine that was not requested")
    except Invalid as error:
        return f"its answer is malformed ({error})"
    return peers
