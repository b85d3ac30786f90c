"""QUEUE=1: in which order those that wait for machines have them, and `make queue`.

A run that waits has one number, 1 + the largest on any of its machines, and a ticket with it on
each (launcher/node/tickets.py). Of two runs that both want some machine the one with the smaller
number goes first, and with equal ones the one whose name comes first, which begins with the time.
So all machines have one order, and no ring of runs waits for each other. Who dies is passed over as
soon as its tickets are no longer renewed; nobody goes ahead of another because it needs less.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.runs import may_be_a_run
from contract.text import seconds
from contract.validate import Each, Invalid, Match, One
from launcher import control, folders
from launcher.machines import engine, inventory
from launcher.machines.engine import Host, Node
from launcher.node import tickets
from launcher.node.machine import who
from launcher.node.tickets import LARGEST, LEASE
from launcher.problems import Problem, problem
from launcher.remote import MARK, ask

TICKETS = "launcher.node.tickets"
WORD = Match(r"[\w@+.-]{0,200}")
TICKET = {
    **{"name": WORD, "number": One(range(LARGEST + 1)), "user": WORD, "holder": WORD},
    "dead": One(("", tickets.DAMAGED, tickets.BEFORE, tickets.SILENT)),
}
ANSWER = {"tickets": [TICKET], "taken": bool, "problem": str}
TAKEN = (
    "its ticket was taken away (`make queue REMOVE=`), so it waits no longer: start it again to "
    "wait at the end."
)


@dataclass(frozen=True, order=True)
class Ticket:
    """`user`: whose file it is on the machine; `holder`: who it says that asked, and from where."""

    number: int
    name: str
    user: str = field(compare=False)
    holder: str = field(compare=False)
    dead: str = field(compare=False)

    @property
    def run(self) -> str:
        return self.name.rpartition(".")[0] or self.name


@dataclass(frozen=True)
class Seen:
    """What one machine says of its queue; `problem` where it has none."""

    tickets: tuple[Ticket, ...] = ()
    taken: bool = False
    problem: str = ""

    @property
    def waiting(self) -> list[Ticket]:
        return sorted(ticket for ticket in self.tickets if not ticket.dead)


class Place:
    """A run's place in the queues of its machines: none until `take`. `waited`: what has waited to
    begin, for these machines, their owners or a time of day; "" where nothing has."""

    def __init__(self) -> None:
        self.name, self.number, self._run, self.waited = "", 0, "", ""
        self._renewed: dict[str, float] = {}  # when, by machine
        self._hosts: dict[str, Host] = {}

    def run(self) -> str:
        """The name that it waited under, once: after a collision machines may have files of it. ""
        where it has none."""
        name, self._run = self._run, ""
        return name

    def take(self, nodes: Mapping[str, Node], run: str) -> dict[str, Ticket]:
        """Take or renew it on these machines; by machine the ticket next before ours. Raises
        UserError where it was taken away."""
        if not self.number:
            largest = [t.number for seen in look(nodes).values() for t in seen.waiting]
            self._run, self.name = run, f"{run}.{secrets.token_hex(4)}"
            self.number = min(LARGEST, 1 + max(largest, default=0))
        now, own = time.monotonic(), f"{who()[0]}@{socket.gethostname()}"
        held = {name for name, when in self._renewed.items() if now - when < LEASE}
        found = _ask(nodes, lambda name: (self.name, self.number, own, name in held))
        if any(seen.taken for seen in found.values()):
            self.leave()
            raise UserError(f"the run waited as number {self.number}: {TAKEN}")
        self._renewed.update({name: now for name, seen in found.items() if not seen.problem})
        self._hosts.update({name: node.host for name, node in nodes.items()})
        mine = Ticket(self.number, self.name, "", "", "")
        before = {name: [t for t in seen.waiting if t < mine] for name, seen in found.items()}
        return {name: max(those) for name, those in before.items() if those}

    def leave(self) -> None:
        """Give it back, where it is still held."""
        now = time.monotonic()
        hosts = [self._hosts[name] for name, when in self._renewed.items() if now - when < LEASE]
        self._renewed, self._hosts = {}, {}
        if not hosts:
            return
        with contextlib.suppress(UserError):  # it then ends by itself
            nodes, _ = engine.open_all(hosts)
            try:
                take_away(nodes, {name: [self.name] for name in nodes})
            finally:
                engine.close_all(nodes)


def ahead(before: Mapping[str, Ticket]) -> str:
    """What is waited for, of machines that have somebody before a run."""
    name, ticket = next(iter(before.items()))
    number, who = ticket.number, f"{ticket.user} ({ticket.holder})"
    return f"{name}: run {ticket.run} of {who} waits for it too, before it as number {number}"


def folder_of(_host: Host) -> str:
    """Of its tickets: "" for the one that each machine has; tests have others."""
    return ""


def look(nodes: Mapping[str, Node]) -> dict[str, Seen]:
    """The queues of these machines."""
    return _ask(nodes, lambda _: ("", 0, "", False))


def _ask(nodes: Mapping[str, Node], words: Callable[[str], tuple[Any, ...]]) -> dict[str, Seen]:
    def visit(name: str) -> Seen:
        call = ", ".join(map(repr, (MARK, *words(name), folder_of(nodes[name].host))))
        try:
            answer = ask(nodes[name], TICKETS, f"visit({call})", ANSWER)
        except (OSError, UserError, Invalid) as error:
            return Seen(problem=str(error))
        found = tuple(Ticket(**one) for one in answer["tickets"])
        return Seen(found, answer["taken"], answer["problem"])

    with ThreadPoolExecutor(max_workers=min(64, len(nodes) or 1)) as pool:
        return dict(zip(nodes, pool.map(visit, nodes)))


def problems(nodes: Mapping[str, Node]) -> list[Problem]:
    """What keeps a run that has no ticket from machines that others wait for."""
    return [
        problem("queue", nodes[name].host, run=first.run, user=first.user, holder=first.holder)
        for name, seen in look(nodes).items()
        for first in seen.waiting[:1]
    ]


def take_away(nodes: Mapping[str, Node], names: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Remove these tickets; by machine why one is still there."""

    def remove(name: str) -> list[str]:
        try:
            call = f"remove({MARK!r}, {names[name]!r}, {folder_of(nodes[name].host)!r})"
            answer = ask(nodes[name], TICKETS, call, Each(str))
        except (OSError, UserError, Invalid) as error:
            return [str(error)]
        return [why for why in answer.values() if why]

    with ThreadPoolExecutor(max_workers=min(64, len(nodes) or 1)) as pool:
        return dict(zip(names, pool.map(remove, names)))


def left(run: str) -> str:
    """`2 h 5 min to go` of a run that this machine controls and knows so much of; else ""."""
    folder = folders.RUNS / run  # a machine's word, so no path yet
    if not may_be_a_run(run) or not control.controller(folder):
        return ""
    progress = _follower(folder).look()
    return f"{seconds(progress.left)} to go" if progress and progress.left else ""


@lru_cache(maxsize=4)
def _follower(folder: Path) -> Any:
    """It reads only what is new since it looked last."""
    from report.status import Follower  # a fifth of a second, where something waits

    return Follower(folder)


def queue(file: str, taken: str | None) -> int:
    """Print who has the machines of an inventory and who waits for them, in their order; before
    that take away the tickets with this number, or of this run. Returns the exit code. Raises
    UserError, also where no machine can be asked."""
    nodes, failures = engine.open_all(inventory.load(Path(file)))
    if not nodes:
        raise UserError(*failures.values())
    try:
        seen, code = look(nodes), 0
        if taken is not None:
            code = _remove(nodes, seen, taken)
            seen = look(nodes)
        for text in (*failures.values(), *_odd(seen)):
            control.say(text)
        _print(seen, running(nodes))
        return code
    finally:
        engine.close_all(nodes)


def _remove(nodes: Mapping[str, Node], seen: Mapping[str, Seen], taken: str) -> int:
    names = {
        name: [t.name for t in one.tickets if taken in (str(t.number), t.run, t.name)]
        for name, one in seen.items()
    }
    if not any(names.values()):
        raise UserError(
            f"REMOVE={taken}: no ticket has that number or run: `make queue` lists all."
        )
    wrong = take_away(nodes, {name: those for name, those in names.items() if those})
    for name, why in sorted((name, why) for name, those in wrong.items() for why in those):
        control.say(f"{name}: {why}: only whose ticket it is, or root there, takes it away")
    return 1 if any(wrong.values()) else 0


def _odd(seen: Mapping[str, Seen]) -> list[str]:
    return [f"{name} has no queue: {one.problem}" for name, one in seen.items() if one.problem]


def running(nodes: Mapping[str, Node]) -> dict[tuple[str, str], list[str]]:
    """The machines of each (run, holder) that trains on them."""
    shape = [{"pid": int, "run": WORD, "holder": WORD}]
    found: dict[tuple[str, str], list[str]] = {}
    for name, node in nodes.items():
        call = f"show_claims({MARK!r})"
        try:
            claims = ask(node, TICKETS, call, shape)
        except (OSError, UserError, Invalid):
            continue
        for run, holder in dict.fromkeys((one["run"], one["holder"]) for one in claims):
            found.setdefault((run, holder), []).append(name)
    return found


def _print(seen: Mapping[str, Seen], claims: Mapping[tuple[str, str], list[str]]) -> None:
    machines: dict[Ticket, list[str]] = {}
    for name, one in seen.items():
        for ticket in one.tickets:
            machines.setdefault(ticket, []).append(name)
    rows = []
    for (run, holder), where in claims.items():
        rows.append(("-", run, holder, where, f"trains{(to_go := left(run)) and ', '}{to_go}"))
    trains = {run for run, _ in claims}
    for ticket in sorted(machines):
        if ticket.run not in trains:
            state = f"passed over: {ticket.dead}" if ticket.dead else "waits"
            who = f"{ticket.user} ({ticket.holder})"
            rows.append((str(ticket.number), ticket.run, who, machines[ticket], state))
    if not rows:
        control.say(f"nobody has {', '.join(seen)}, and nobody waits for them")
    for number, run, who, where, state in rows:
        control.say(f"{number:>3}  {run}  {who}  on {', '.join(where)}: {state}")
