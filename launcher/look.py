"""Asks all machines at once for the facts that a plan needs, and which peers each machine reaches.
Also lists the data sets on the control node that machines have copies of. participants.py calls
this module before each attempt, and judge.py turns the answers into problems.
"""

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
    MAX_ANSWER_BYTES,
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
from launcher.remote import MARK, SECONDS, ask, find_answer, program

FIRST_PORT, PORT_COUNT = 29500, 32  # the ports that a run may use: torch's default and more
NO_STATUS = -1  # what paramiko returns if the connection ended before the command
REACH_SECONDS = 15.0  # for a machine's answer about its peers
# Up to this many machines, each tries to reach every other one. With more, n * n pairs would be too
# many, so each tries only node 0 and its nearest neighbours.
ALL_PAIRS = 16


@dataclass
class OpenMachines:
    """Connected machines and their facts, by name. `silent`: why the other machines that were asked
    are not among them."""

    hosts: list[Host]
    nodes: dict[str, Node]
    facts: dict[str, NodeFacts]
    silent: dict[str, Problem] = field(default_factory=dict)

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
        """Return the same connections and facts with one host."""
        return replace(self, hosts=[host])


@dataclass(frozen=True)
class DataSource:
    """A folder that machines have copies of, or read over a share. `name`: for people. `splits`:
    its listings, such as those of train and val."""

    name: str
    is_copied: bool
    splits: dict[str, Listing]


@dataclass(frozen=True)
class ControlFacts:
    """Facts of the control node: the bytes free for runs/, and the source of each machine's data,
    by the machine's name."""

    disk_free: int
    sources: Mapping[str, DataSource] = field(default_factory=dict)


def open_and_probe(
    hosts: list[Host], needs: Needs, *, without_missing: bool = False
) -> OpenMachines:
    """Connect to the machines and ask them for their facts. Raises UserError with a sentence on
    each machine that did not answer. If `without_missing`, these machines are `silent` instead."""
    nodes, failures = engine.open_all(hosts)
    try:
        if failures and not without_missing:
            sentences = [*failures.values()]
            # If all machines are the inventory's samples, the user has listed no machines yet.
            are_samples = all(inventory.EXAMPLE.get(host.name) == host.address for host in hosts)
            if are_samples and len(failures) == len(hosts):
                lead = f"{', '.join(failures)}: {problem('examples').message}"
                sentences = [lead, sentences[0]]
            raise UserError(*sentences)
        present = [host for host in hosts if host.name in nodes]
        questions = {host.name: make_question(host, present, needs) for host in present}
        facts, silent = ask_all(nodes, questions)
        # Of the machines that mount a share, one (`data_reader`) has listed it: the others get its
        # listing. If the folders of the two changed at different times, they are not the same
        # share, and the machine has to list its folder itself.
        questions_again = {}
        for name, question in questions.items():
            reader, node_facts = facts.get(question["data_reader"]), facts.get(name)
            if not question["data_reader"] or node_facts is None or not node_facts.data.exists:
                continue
            data = node_facts.data
            if reader is None or reader.data.changed != data.changed:
                questions_again[name] = {**question, "data_reader": ""}
                facts.pop(name)
            else:
                data = structs.replace(data, splits=reader.data.splits, problem=reader.data.problem)
                facts[name] = structs.replace(node_facts, data=data)
        if questions_again:
            nodes_again = {name: nodes[name] for name in questions_again}
            more_facts, more_silent = ask_all(nodes_again, questions_again)
            facts, silent = {**facts, **more_facts}, {**silent, **more_silent}
        if silent and not without_missing:
            raise Refused([*silent.values()])
        silent.update({name: Problem("unreached", text) for name, text in failures.items()})
        return OpenMachines([host for host in present if host.name in facts], nodes, facts, silent)
    except BaseException:  # also Ctrl-C
        engine.close_all(nodes)
        raise


def make_question(host: Host, hosts: Sequence[Host], needs: Needs) -> dict[str, Any]:
    """Return the question for launcher/node/probe.py on `host`, one of these machines."""
    ports, typed_port = range(FIRST_PORT, FIRST_PORT + PORT_COUNT), needs.config.port
    # A single machine is asked for the interface of its own address.
    peers = [peer.address for peer in hosts if peer.name != host.name] or [host.address]
    # The first of the machines that mount a share lists it for all; its server lists it, too.
    readers = [
        peer.name
        for peer in hosts
        if host.data_server not in ("", host.name, peer.name)
        and (peer.data_server, peer.data_root) == (host.data_server, host.data_root)
    ]
    return {
        "peers": list(dict.fromkeys(peers)),
        "ports": [*ports] if typed_port is None else [typed_port, *ports],
        "node_dir": host.node_dir,
        "guard_python": host.engine.guard_python,
        "packages": needs.program.modules,
        # How many packages to list, at most. Only a layer depends on their versions.
        "distributions": MOST_PACKAGES if needs.program.requirements else 0,
        # The answer says whether this folder exists, and / always does.
        "toolkit": f"{host.cuda_home}/bin" if host.cuda_home else "/",
        "data": host.data_path(needs.config.data),
        "data_kind": needs.program.data_kind,
        # The machine that lists the data in place of this one; "" if this one lists them itself.
        "data_reader": readers[0] if host.name in readers[1:] else "",
        "cpu_flags": precisions.BF16_FLAGS,
    }


def ask_all(
    nodes: dict[str, Node], questions: dict[str, dict[str, Any]]
) -> tuple[dict[str, NodeFacts], dict[str, Problem]]:
    """Return NodeFacts by host name, and a problem for each host that gave none."""
    results = map_parallel(lambda name: _ask_machine(nodes[name], questions[name]), nodes)
    answers = dict(zip(nodes, results))
    return (
        {name: answer for name, answer in answers.items() if isinstance(answer, NodeFacts)},
        {name: answer for name, answer in answers.items() if isinstance(answer, Problem)},
    )


def _ask_machine(node: Node, question: dict[str, Any]) -> NodeFacts | Problem:
    """Ask one machine for its facts. Returns a Problem if it gives none, or if its answer causes an
    error here. Raises nothing."""
    host = node.host
    try:
        source = program("launcher.node.probe", f"main({question!r}, {MARK!r})")
        start = time.time()
        process = node.start([host.env_python, "-IB", "-"])
        # While it computes, the machine sends PULSE, which renews the time limit.
        output, stderr, status = talk(process, source.encode(), SECONDS, len(PULSE))
        if (line := find_answer(output)) is not None:
            facts = read_facts(line, question)
            skew = clock_skew(facts.unix, start, time.time())
            return structs.replace(facts, host=host.name, skew=skew)
    except MachineError as error:  # before UserError, of which it is a kind
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
    if status in (126, 127):  # the machine's shell found no Python, or cannot run it
        return problem("python-missing", host, python=host.env_python, reason=stderr)
    if status == NO_STATUS:
        return problem("connection-broke", host, why="")
    if status is None:
        return problem("answer-late", host, seconds=SECONDS)
    return problem("python-fails", host, python=host.env_python, reason=stderr)


def read_facts(line: str, question: Mapping[str, Any]) -> NodeFacts:
    """Read a machine's answer, and keep only what the question names. Raises Invalid."""
    # Later code indexes by the names in the question, so the facts keep exactly these names.
    facts: NodeFacts = decode(line, NodeFacts, "answer")
    missing_peers = [peer for peer in question["peers"] if peer not in facts.interfaces]
    if missing_peers:
        raise Invalid(f"answer.interfaces.{missing_peers[0]} is missing")
    missing, free = set(facts.missing), set(facts.free_ports)
    return structs.replace(
        facts,
        missing=[name for name in question["packages"] if name in missing],
        interfaces={peer: facts.interfaces[peer] for peer in question["peers"]},
        free_ports=[port for port in question["ports"] if port in free],
    )


def read_data_sources(machines: OpenMachines, needs: Needs) -> dict[str, DataSource]:
    """Return the sources of the machines' data that can be read, by machine."""
    # Each source is read once, and is None if it cannot be read. A server that participates is no
    # source either: judge.py compares its data with the other machines' data. The name of a copied
    # source is its folder, and that of a shared one is its server.
    sources_by_name: dict[str, DataSource | None] = {host.name: None for host in machines.hosts}
    sources = {}
    for host in machines.hosts:
        folder = host.data_path(needs.config.data)
        is_below_root = folder.startswith(f"{host.data_root}/")
        # Provisioning copied the data from a folder on the control node, or the machine reads them
        # from a server. `copied` has the folder of /srv/tandem/data/coco under the name coco.
        copied = host.copied.get(folder.removeprefix(f"{host.data_root}/"))
        name = copied or host.data_server
        if not is_below_root or not name:
            continue
        if name not in sources_by_name and not copied:
            sources_by_name[name] = _read_shared(name, needs)
        elif name not in sources_by_name:
            sources_by_name[name] = None  # if its folder is gone, the copies are still good
            with contextlib.suppress(layout.LayoutError):
                cache, kind = inventory.CHECKOUT / ".tandem", needs.program.data_kind
                splits = layout.read_listings(Path(name), cache, kind=kind)
                listings = convert(splits, dict[str, Listing], "listing")
                sources_by_name[name] = DataSource(f"{name} here", True, listings)
        if source := sources_by_name[name]:
            sources[host.name] = source
    return sources


def _read_shared(name: str, needs: Needs) -> DataSource | None:
    """Read the listing of a server that is no machine of the run; None if it does not answer."""
    config, kind = needs.config, needs.program.data_kind
    # One host, or none if the inventory does not list the server in group `cluster`.
    servers = [host for host in inventory.load(Path(config.inventory)) if host.name == name]
    nodes, _ = engine.open_all(servers)
    try:
        for host in servers:
            folder = host.data_path(config.data)
            call = f"show_data({folder!r}, {kind!r}, {host.node_dir!r}, {MARK!r})"
            # `ask` uses the guard's Python: a file server may have no other environment.
            answer: DataSet = ask(nodes[name], "launcher.node.probe", call, DataSet)
            return DataSource(name, False, answer.splits) if answer.splits else None
    except (KeyError, OSError, UserError, Invalid):
        # The run's machines can read the share anyway. KeyError: the server was not reached.
        pass
    finally:
        engine.close_all(nodes)
    return None


def clock_skew(unix: float, start: float, end: float) -> float:
    """Return by how many seconds, at least, a machine's clock is ahead (negative: behind). The
    clock showed `unix` at a moment between `start` and `end` of the control node's clock."""
    return unix - end if unix > end else min(0.0, unix - start)


def peers_of(index: int, count: int) -> list[int]:
    """Return the numbers of the machines that number `index` of `count` connects to."""
    if count <= ALL_PAIRS:
        return [peer for peer in range(count) if peer != index]
    # All ranks meet at node 0, so every machine has to reach it.
    neighbours = [(index + step) % count for step in range(1, ALL_PAIRS // 2)]
    return sorted({0, *neighbours} - {index})


def find_unreachable_peers(machines: OpenMachines) -> dict[str, list[Unreached] | str]:
    """Ask each machine which peers it does not reach. Returns these peers by machine, or the reason
    why a machine gave no answer."""
    hosts = machines.hosts
    addresses = {host.address for host in hosts}
    if len(addresses) < 2:
        return {}  # nodes of one PC: no network is between them
    # Each machine listens on its last free port while the others try to reach it.
    ports = [([*machines.facts[host.name].free_ports] or [FIRST_PORT])[-1] for host in hosts]

    def start(index: int) -> Process:
        host = hosts[index]
        peers = [[hosts[n].address, ports[n]] for n in peers_of(index, len(hosts))]
        call = f"main({host.address!r}, {ports[index]}, {peers!r}, {MARK!r})"
        source = program("launcher.node.reach", call)
        return machines.nodes[host.name].start([host.env_python, "-IB", "-c", source])

    processes = map_parallel(start, range(len(hosts)))
    try:
        answers = map_parallel(lambda process: read_reach(process, addresses), processes)
    finally:  # not before: slower machines must still reach a machine that has answered
        for process in processes:
            process.close()
    return {host.name: answer for host, answer in zip(hosts, answers)}


def read_reach(process: Process, addresses: Collection[str]) -> list[Unreached] | str:
    """Read until a machine has answered. Return the peers that it does not reach, or the reason why
    it gave no answer."""
    size, unread = 0, b""
    try:
        for piece in stream_output(process, REACH_SECONDS):
            # The answer is a line after MARK, and may arrive in pieces.
            *lines, unread = (unread + piece).split(b"\n")
            for line in lines:
                if line.startswith(MARK.encode()):
                    return read_unreached(line[len(MARK) :], addresses)
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                return "its answer is too long"
    except TimedOut:
        return f"no answer within {REACH_SECONDS:.0f} s"
    except Exception as error:  # whatever its answer breaks here is that machine's problem
        return error_location(error)
    stderr = process.stderr()
    return stderr.splitlines()[-1] if stderr else "it ended without an answer"


def read_unreached(line: bytes, addresses: Collection[str]) -> list[Unreached] | str:
    """Read an answer, which may list each of these addresses once. Return the peers that a machine
    does not reach, or the reason why its answer is invalid."""
    try:
        peers: list[Unreached] = decode(line, list[Unreached], "its answer")
        peer_addresses = [peer.address for peer in peers]
        is_repeated = len(set(peer_addresses)) < len(peer_addresses)
        if is_repeated or not set(peer_addresses) <= set(addresses):
            raise Invalid("it lists a machine twice, or a machine that was not requested")
    except Invalid as error:
        return f"its answer is malformed ({error})"
    return peers
