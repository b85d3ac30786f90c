"""Machines that somebody works at: which of them take part now, and when a run goes on with others
(docs/office.md).

A run's machines change at a start alone: it saves at an agreed step, and goes on with those that
take part then. A machine is left as soon as its owner is back, and joins when it has been free for
`idle_minutes`; between two joins lies as much time. So a machine costs a run no more than two
starts in that time, whatever its owner does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from boundary.answers import OwnerAnswer
from contract.errors import UserError
from contract.text import pluralize
from launcher import judge, look, remote
from launcher.look import OpenMachines, Requirements
from launcher.machines import engine
from launcher.machines.engine import Host, Node
from launcher.machines.owned import SIGNS
from launcher.problems import ALWAYS, BUSY

LOOK_EVERY = 20.0  # seconds between two looks at a machine that takes no part
LOOKS = 4  # that have to find it free, at least
NO_ANSWER = "it does not answer"
SILENT = "silent"  # no sign of those that a machine may send


@dataclass(frozen=True)
class Availability:
    """What is known of a machine: since when it is free, in monotonic seconds; None and `why` where
    it is not. `fit`: it was looked at as before a run, and nothing is wrong."""

    free_since: float | None = None
    why: str = NO_ANSWER
    fit: bool = False


def absence(
    host: Host, report: Availability, inside: bool, day: datetime, now: float
) -> str | None:
    """Why a machine takes no part now; None where it does. `inside`: it takes part already."""
    owner = host.owner
    if owner.hours and not owner.hours.has(day):
        return f"it is outside its hours ({owner.hours.text})"
    if report.free_since is None:
        return report.why
    # Where an owner cannot come back unseen, nothing has to be waited for.
    if not inside and owner.yields and now - report.free_since < owner.idle_seconds:
        return f"nobody has used it for less than {owner.idle_seconds / 60:g} min"
    return None


def regroup(
    hosts: Sequence[Host],
    inside: Sequence[str],
    reports: dict[str, Availability],
    day: datetime,
    now: float,
    changed: float,
) -> str | None:
    """Why a run is to go on with other machines than those `inside`, which it has had since
    `changed` (monotonic); None where it is not."""
    missing = {
        host.name: absence(host, reports[host.name], host.name in inside, day, now)
        for host in hosts
    }
    leaving = [f"{name} leaves: {why}" for name, why in missing.items() if why and name in inside]
    if leaving:
        return "; ".join(leaving)
    joining = [
        host.name
        for host in hosts
        if host.name not in inside
        and missing[host.name] is None
        and reports[host.name].fit
        and now - changed >= host.owner.idle_seconds
    ]
    return f"{', '.join(joining)} can take part" if joining else None


def least(min_nodes: int | None, hosts: Sequence[Host]) -> int:
    """The fewest machines that a run goes on with: without MIN_NODES all that belong to the cluster
    alone."""
    return min_nodes or max(1, sum(not host.owner.signs for host in hosts))


class Owners:
    """What is known of a run's machines. The guards of an attempt tell of theirs; the others are
    looked at now and then, from a thread of its own."""

    def __init__(self, hosts: Sequence[Host], min_nodes: int | None):
        self.hosts = list(hosts)
        self.least = least(min_nodes, hosts)
        # Without which a run may begin.
        self.optional = {host.name for host in hosts if min_nodes or host.owner.signs}
        self._reports = {
            host.name: Availability(free_since=float("-inf"), why="") for host in hosts
        }
        self._inside: list[str] = []
        self._been: set[str] = set()  # that ever took part
        self._changed = time.monotonic()
        self._machines: OpenMachines | None = None
        self._needs: Requirements | None = None
        self._held: dict[str, Node] = {}  # to machines outside

    # ---- before an attempt ----

    def available(self) -> list[Host]:
        """Those that may take part in a start now, as far as is known."""
        absent = self.absent()
        return [host for host in self.hosts if host.name not in absent]

    def waits(self, minimum: int) -> str:
        """What is said of a run that has too few machines."""
        named = "; ".join(f"{name}: {why}" for name, why in self.absent().items())
        return f"at least {pluralize(minimum, 'machine')} must be free ({named})"

    def strict(self, needs: Requirements) -> OpenMachines:
        """Connections to all machines. Raises UserError."""
        return look.open_and_probe(self.hosts, needs)

    def present(self, needs: Requirements) -> OpenMachines:
        """Connections to those machines that take part in the first start. Raises UserError where
        one does not answer without which the run does not begin."""
        if not self.optional:
            return self.strict(needs)
        hosts = self.available()
        if len(hosts) < self.least:
            return OpenMachines([], {}, {})
        machines = look.open_and_probe(hosts, needs, without_missing=True)
        silent = [host for host in hosts if host.name not in machines.facts]
        needed = [host for host in silent if host.name not in self.optional]
        if needed:
            machines.close()
            look.open_and_probe(needed, needs).close()  # which says why it does not answer
            return self.present(needs)
        for host in silent:
            self.silent(host.name)
        self.leave_used(machines)
        if not (needs.run_config.queue or needs.run_config.force):
            self._leave_busy(machines, needs)
        return machines

    def _leave_busy(self, machines: OpenMachines, needs: Requirements) -> None:
        for host in [host for host in machines.hosts if host.name in self.optional]:
            own = machines.only(host)
            wrong = judge.problems(own, needs, look.control_machine_facts(needs))
            busy = [one.said for one in wrong if one.blocks is BUSY]
            if busy:
                self.silent(host.name, busy[0])
                machines.leave([host.name])

    def leave_used(self, machines: OpenMachines) -> None:
        """Go on without those that somebody uses at this moment."""
        nodes = {
            host.name: machines.nodes[host.name] for host in machines.hosts if host.owner.signs
        }
        for name, sign in ask(nodes).items():
            if sign is not None:
                self.silent(name, SIGNS.get(sign, NO_ANSWER))
                machines.leave([name])

    def leave_strangers(self, machines: OpenMachines, needs: Requirements) -> list[str]:
        """Go on without machines that never took part, where they and the others do not go
        together. Returns why."""
        new = [host.name for host in machines.hosts if host.name not in self._been]
        if not new or len(new) == len(machines.hosts):
            return []
        wrong = judge.mismatches(machines) or [
            *judge.unreachable_pairs(machines, look.unreachable_pairs(machines))
        ]
        texts = [one.text for one in wrong]
        if texts:
            machines.leave(new)
            for name in new:
                self.silent(name, texts[0])
        return texts

    def leave_unfit(self, unfit: dict[str, str]) -> None:
        """An attempt begins without these, for these reasons. Those that are looked at during it
        have to be found free and fit anew; the others are asked before the next one."""
        for host in self.hosts:
            if host.name in unfit and self._may_join(host):
                self.silent(host.name, unfit[host.name].removeprefix(f"{host.label()}: "))

    def table(self, machines: OpenMachines) -> list[str]:
        """A line for each machine that has an owner: what is agreed, and whether it is free now."""
        owned = [host for host in machines.hosts if host.owner.signs]
        for name, sign in ask({host.name: machines.nodes[host.name] for host in owned}).items():
            if sign is not None:
                self.silent(name, SIGNS.get(sign, NO_ANSWER))
        absent = self.absent()
        now = {name: f"takes no part now: {why}" for name, why in absent.items()}
        told = {host.name: now.get(host.name, "takes part now") for host in owned}
        return [f"{host.name} {host.owner.told()}; it {told[host.name]}" for host in owned]

    # ---- during an attempt ----

    def began(self, machines: OpenMachines, needs: Requirements) -> None:
        """An attempt begins on these machines."""
        self._inside, self._changed = [host.name for host in machines.hosts], time.monotonic()
        self._machines, self._needs = machines, needs
        self._been.update(self._inside)

    def ended(self) -> None:
        """Its guards have ended, and tell no more."""
        self._inside, self._machines = [], None

    def told(self, name: str, sign: str | None) -> None:
        """What a machine says of its owner: one of SIGNS, or None."""
        before = self._reports[name]
        if sign is not None:
            self._reports[name] = Availability(None, SIGNS[sign])
        elif before.free_since is None:
            self._reports[name] = Availability(time.monotonic(), "")

    def silent(self, name: str, why: str = NO_ANSWER) -> None:
        self._reports[name] = Availability(None, why)

    def regroup(self) -> str | None:
        """Why the machines are to change now."""
        day, now = datetime.now(), time.monotonic()
        return regroup(self.hosts, self._inside, dict(self._reports), day, now, self._changed)

    def absent(self) -> dict[str, str]:
        """Those that take no part in a start now, each with the reason."""
        day, now = datetime.now(), time.monotonic()
        found = {
            host.name: absence(host, self._reports[host.name], host.name in self._inside, day, now)
            for host in self.hosts
        }
        return {name: why for name, why in found.items() if why}

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Looks at machines that take no part, for as long as the body runs."""
        over = threading.Event()
        every = min([LOOK_EVERY, *(host.owner.idle_seconds / LOOKS for host in self.hosts)])

        def look() -> None:
            while not over.wait(every):
                with contextlib.suppress(UserError):  # too few open files, or a machine is lost
                    self.look()

        thread = threading.Thread(target=look, name="owners", daemon=True)
        if self.optional:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if self.optional:
                thread.join()
            self._hold(())

    def look(self) -> None:
        """Ask the machines outside that may take part by the clock: those with an owner, and those
        that never took part. One that failed is not asked again, nor one in a night's sleep."""
        day = datetime.now()
        hosts = [
            host
            for host in self.hosts
            if host.name not in self._inside
            and self._may_join(host)
            and (host.owner.hours is None or host.owner.hours.has(day))
        ]
        self._hold({host.name for host in hosts})
        opened, failures = engine.open_all([one for one in hosts if one.name not in self._held])
        self._held.update(opened)
        for name in failures:
            self._outside(name, Availability())
        for name, sign in ask(self._held).items():
            self._seen(self._held[name].host, sign)
            if sign == SILENT:
                self._hold(self._held.keys() - {name})

    def _hold(self, names: Collection[str]) -> None:
        """Keep the connections to these machines from one look to the next, and no others: each
        that is opened writes a dozen lines into its owner's journal."""
        closed = {name: node for name, node in self._held.items() if name not in names}
        self._held = {name: node for name, node in self._held.items() if name in names}
        engine.close_all(closed)

    def _may_join(self, host: Host) -> bool:
        return bool(host.owner.signs) or host.name not in self._been

    def _seen(self, host: Host, sign: str | None) -> None:
        """What a look at a machine outside found."""
        now, before = time.monotonic(), self._reports[host.name]
        if sign is not None:
            self._outside(host.name, Availability(None, SIGNS.get(sign, NO_ANSWER)))
        elif before.free_since is None:
            self._outside(host.name, Availability(now, ""))
        report = self._reports[host.name]
        if (
            sign is None
            and not report.fit
            and not absence(host, report, False, datetime.now(), now)
        ):
            needs, those = self._needs, self._machines
            if needs is None or those is None:
                return  # there is nothing to compare it with until an attempt has begun
            problem = self._problem(host, needs, those)
            self._outside(
                host.name, Availability(None, problem) if problem else replace(report, fit=True)
            )

    def _problem(self, host: Host, needs: Requirements, those: OpenMachines) -> str | None:
        """What keeps a machine that is free from joining these, which train; None where nothing
        does."""
        try:
            found = look.open_and_probe([host], needs, without_missing=True)
        except UserError as error:
            return str(error)
        try:
            if not found.hosts:
                return NO_ANSWER
            busy = not needs.run_config.force
            wrong = judge.problems(found, needs, look.control_machine_facts(needs))
            problems = [p for p in wrong if p.blocks is ALWAYS or (p.blocks is BUSY and busy)]
            facts = {**those.facts, **found.facts}
            together = OpenMachines([*those.hosts, host], {}, facts)
            problems += judge.mismatches(together)
            return problems[0].said if problems else None
        finally:
            found.close()

    def _outside(self, name: str, report: Availability) -> None:
        if name not in self._inside:  # an attempt may have begun meanwhile
            self._reports[name] = report


def ask(nodes: dict[str, Node]) -> dict[str, str | None]:
    """By their names the sign of somebody's use of each of these machines; None where there is
    none, and a word that is no sign where no answer came."""
    return dict(zip(nodes, engine.of_each(_ask, nodes.values())))


def _ask(node: Node) -> str | None:
    owner = node.host.owner
    call = f"show({remote.MARK!r}, {list(owner.signs)!r}, {owner.away_dir!r})"
    try:
        sign: str = remote.ask(node, "launcher.node.owner", call, OwnerAnswer).sign
    except Exception:  # the border of a machine: whatever goes wrong there, it gave no answer
        return SILENT
    return (sign if sign in owner.signs else SILENT) if sign else None
