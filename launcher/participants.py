"""Who takes part in a run: at its first start, after a loss, when an owner comes or goes, and what
is waited for until enough do (docs/office.md).

A run's machines change at a start alone: it saves at an agreed step, and goes on with those that
take part then. A machine is left as soon as its owner is back, and joins when it has been free for
`idle_minutes`; between two joins lies as much time. So a machine costs a run no more than two
starts in that time, whatever its owner does.

First stands what is decided, from facts and rules alone; then how people hear of a wait; then who
asks the machines.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum, auto

from boundary.answers import OwnerAnswer
from contract.errors import UserError
from contract.options import Config
from contract.runs import slug
from contract.text import pluralize
from launcher import hours, judge, look, remote
from launcher.look import OpenMachines
from launcher.machines import engine
from launcher.machines.engine import Host, Node
from launcher.machines.owned import SIGNS
from launcher.notify import Notify
from launcher.problems import ALWAYS, BUSY, NEVER, Problem, Refused, refuse_or_warn
from launcher.terminal import Stopper, Terminal, WaitNotice, waiting
from launcher.workload import Requirements

LOOK_EVERY = 20.0  # seconds between two looks at a machine that takes no part
LOOKS = 4  # that have to find it free, at least
NO_ANSWER = "it does not answer"
SILENT = "silent"  # no sign of those that a machine may send
# Machines are given this long to come back when fewer than MIN_NODES answer.
PATIENCE = 90.0
# How often it is tried anew: a run that others may overtake, and one that has begun.
QUEUE_POLL_SECONDS, RESTART_POLL_SECONDS = 10.0, 3.0


# ---- what is decided ----


@dataclass(frozen=True)
class Availability:
    """What is known of a machine: since when it is free, in monotonic seconds; None and `why` where
    it is not. `fit`: it was looked at as before a run, and nothing is wrong."""

    free_since: float | None = None
    why: str = NO_ANSWER
    fit: bool = False


def absence(host: Host, known: Availability, inside: bool, day: datetime, now: float) -> str | None:
    """Why a machine takes no part now; None where it does. `inside`: it takes part already."""
    owner = host.owner
    if owner.hours and not owner.hours.has(day):
        return f"it is outside its hours ({owner.hours.text})"
    if known.free_since is None:
        return known.why
    # Where an owner cannot come back unseen, nothing has to be waited for.
    if not inside and owner.yields and now - known.free_since < owner.idle_seconds:
        return f"nobody has used it for less than {owner.idle_seconds / 60:g} min"
    return None


def regroup(
    hosts: Sequence[Host],
    inside: Sequence[str],
    known: Mapping[str, Availability],
    day: datetime,
    now: float,
    changed: float,
) -> str | None:
    """Why a run is to go on with other machines than those `inside`, which it has had since
    `changed` (monotonic); None where it is not."""
    missing = {
        host.name: absence(host, known[host.name], host.name in inside, day, now) for host in hosts
    }
    leaving = [f"{name} leaves: {why}" for name, why in missing.items() if why and name in inside]
    if leaving:
        return "; ".join(leaving)
    joining = [
        host.name
        for host in hosts
        if host.name not in inside
        and missing[host.name] is None
        and known[host.name].fit
        and now - changed >= host.owner.idle_seconds
    ]
    return f"{', '.join(joining)} can take part" if joining else None


def least(min_nodes: int | None, hosts: Sequence[Host]) -> int:
    """The fewest machines that a run goes on with: without MIN_NODES all that belong to the cluster
    alone."""
    return min_nodes or max(1, sum(not host.owner.signs for host in hosts))


class Moment(Enum):
    """When a machine is judged by itself."""

    FIRST = auto()  # start
    LATER = auto()  # start
    JOINING = auto()  # the run trains without it


def keeps_out(problem: Problem, moment: Moment, config: Config) -> bool:
    """Whether a machine that has it takes no part, and others go on without."""
    if moment is Moment.FIRST:  # all else is refused, or waited for with QUEUE=1
        return problem.blocks is BUSY and not (config.queue or config.force)
    if moment is Moment.LATER and problem.blocks is BUSY:
        # A run's own processes may still be leaving the GPUs: only another run has a machine.
        return problem.code == "machine-busy" and not config.force
    return problem.blocks is ALWAYS or (problem.blocks is BUSY and not config.force)


@dataclass(frozen=True)
class Wait:
    """Why there is no start yet. `patience`: for so many seconds in a row, after which `over` says
    why not; None for as long as it takes. `wrong`: what is wrong with machines that answer."""

    why: str
    patience: float | None = None
    over: str = ""
    wrong: tuple[str, ...] = ()


def decide(
    fit: Sequence[str],
    count: int,
    least: int,
    absent: Mapping[str, str],
    moment: Moment = Moment.FIRST,
    wrong: Sequence[str] = (),
) -> Wait | None:
    """None where these machines are enough to start with. `count`: all of the run, of which these
    are `absent`, each with its reason."""
    if len(fit) >= least:
        return None
    if moment is Moment.FIRST or count - len(absent) < least:
        named = "; ".join(f"{name}: {why}" for name, why in absent.items())
        return Wait(f"at least {pluralize(least, 'machine')} must be free ({named})")
    return Wait(
        f"machines that answer and are fit, of which it needs {least}",
        PATIENCE,
        f"only {len(fit)} machines answer and are fit ({', '.join(fit) or 'none'}), and MIN_NODES "
        f"is {least}: mend the others, then `make train RESUME=latest`.",
        tuple(wrong),
    )


# ---- what people hear of it ----


@dataclass
class Waiter:
    """Waits until it is worth asking again, and says for what, each reason once. There is no order:
    of those that wait, whoever asks first when the machines are free has them. `waited`: what has
    waited to begin, for machines, their owners or a time of day; "" where nothing has."""

    terminal: Terminal
    notify: Notify
    until: int | None = None
    stopper: Stopper | None = None
    lead: str = "waiting: "
    is_first: bool = True
    waited: str = ""
    _said: str = ""
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._since = time.monotonic()
        self._notice = WaitNotice(self.terminal, "waiting for machines") if self.is_first else None

    @classmethod
    def first(cls, config: Config, terminal: Terminal) -> Waiter:
        return cls(terminal, Notify(config.notify, terminal), config.until)

    @classmethod
    def later(cls, terminal: Terminal, notify: Notify, stopper: Stopper, saved: bool) -> Waiter:
        """Of a run that has begun, and that has `saved`."""
        lead = f"{'all is saved, and ' if saved else ''}the run waits: "
        return cls(terminal, notify, stopper=stopper, lead=lead, is_first=False)

    def pause(self, wait: Wait) -> None:
        """Raises UserError where it is not waited any longer."""
        if self.until is not None and time.time() >= self.until:
            raise UserError(
                f"it is {hours.shown(self.until)} (UNTIL) and the run has not begun, since "
                f"{wait.why}"
            )
        if wait.patience is None:
            self._say(wait.why)
            self._since = time.monotonic()
        if self.stopper and self.stopper.asked:
            raise UserError(*wait.wrong, f"the run was stopped while it waited: {wait.why}")
        if wait.patience is not None and time.monotonic() - self._since > wait.patience:
            raise UserError(*wait.wrong, wait.over)
        if self._notice:
            self._notice.update()
        time.sleep(QUEUE_POLL_SECONDS if self.is_first else RESTART_POLL_SECONDS)

    def _say(self, why: str) -> None:
        if why != self._said:
            self.terminal.say(f"{self.lead}{why}")
        if not self._said and self.is_first:
            self.terminal.say(
                f"it asks again every {QUEUE_POLL_SECONDS:.0f} s; of runs that wait for the same "
                "machines, whichever asks first has them"
            )
        self._said = why


# ---- who asks the machines ----


class Participants:
    """What is known of a run's machines. The guards of an attempt tell of theirs; the others are
    looked at now and then, from a thread of its own."""

    def __init__(self, hosts: Sequence[Host], min_nodes: int | None):
        self.hosts = list(hosts)
        self.least = least(min_nodes, hosts)
        # Without which a run may begin.
        self.optional = {host.name for host in hosts if min_nodes or host.owner.signs}
        self._known = {host.name: Availability(free_since=float("-inf"), why="") for host in hosts}
        self._inside: list[str] = []
        self.took_part: set[str] = set()  # ever
        self._changed = time.monotonic()
        self._machines: OpenMachines | None = None
        self._needs: Requirements | None = None
        self._held: dict[str, Node] = {}  # to machines outside

    # before an attempt

    def first(self, needs: Requirements, waiter: Waiter, everybody: bool = False) -> OpenMachines:
        """Connections to the run's machines, once nothing is wrong with them; with QUEUE=1 those
        that are busy are waited for, and with AT= that time. Those that their owners use are left
        out, as are, with MIN_NODES, those that do not answer or are busy. `everybody`: no one is,
        and nothing is waited for. Raises UserError."""
        what = f"{slug(needs.workload.name)} on {pluralize(len(self.hosts), 'machine')}"
        if hours.wait(needs.run_config.at, waiter.terminal):
            waiter.waited = what
        return self._gather(
            lambda: self._first_look(needs, waiter.terminal, everybody), waiter, what
        )

    def later(self, needs: Requirements, waiter: Waiter) -> OpenMachines:
        """Connections to the machines that are fit now, and that no owner uses, at least MIN_NODES:
        owners are waited for as long as it takes. Raises UserError."""
        return self._gather(
            lambda: self._later_look(needs, waiter.terminal), waiter, needs.run or ""
        )

    def _gather(
        self, look_at_them: Callable[[], OpenMachines | Wait], waiter: Waiter, what: str
    ) -> OpenMachines:
        tell = waiter.notify.wait(what)
        while isinstance(outcome := look_at_them(), Wait):
            if waiter.is_first:
                waiter.waited = what
            tell(outcome.why)
            waiter.pause(outcome)
            if waiter.is_first and len(self.available()) < self.least:
                self.look()  # later a thread does (looking)
        return outcome

    def _first_look(
        self, needs: Requirements, terminal: Terminal, everybody: bool
    ) -> OpenMachines | Wait:
        config = needs.run_config
        queues = config.queue and not everybody  # what starts nothing waits for nobody
        with waiting(terminal, f"asking {pluralize(len(self.hosts), 'machine')} what is there"):
            machines = look.open_and_probe(self.hosts, needs) if everybody else self.present(needs)
        names = [host.name for host in machines.hosts]
        least = 0 if everybody else self.least
        if wait := decide(names, len(self.hosts), least, self.absent()):
            machines.close()
            return wait
        try:
            with waiting(terminal, "comparing the machines and the ways between them"):
                problems = problems_of(machines, needs)
            busy = [entry for entry in problems if entry.blocks is BUSY and (queues or everybody)]
            # What waiting cannot fix is reported before the waiting begins.
            others = [entry for entry in problems if entry not in busy]
            passed = refuse_or_warn(others, config.force)
        except BaseException:
            machines.close()
            raise
        if busy and queues:
            machines.close()
            return Wait(busy[0].text)
        out = {} if everybody else self.absent()
        apart = [f"{name} takes no part: {why}" for name, why in out.items()]
        for text in [*apart, *(problem.text for problem in busy), *passed]:
            terminal.say(text)
        return machines

    def _later_look(self, needs: Requirements, terminal: Terminal) -> OpenMachines | Wait:
        hosts = self.available()
        machines, unfit = OpenMachines([], {}, {}), {}
        if len(hosts) >= self.least:
            machines = look.open_and_probe(hosts, needs, without_missing=True)
            unfit = self._leave_unfit(machines, needs, Moment.LATER)
            self._leave_used(machines)
            self._leave_strangers(machines)
        texts = [problem.text for problem in unfit.values()]
        names, count = [host.name for host in machines.hosts], len(self.hosts)
        if wait := decide(names, count, self.least, self.absent(), Moment.LATER, texts):
            machines.close()
            return wait
        for name, problem in unfit.items():
            # Those that are looked at during an attempt have to be found free and fit anew; the
            # others are asked before the next one.
            if self._may_join(name):
                self.mark_absent(name, problem.said)
            terminal.say(f"the run goes on without {problem.text}")
        return machines

    def available(self) -> list[Host]:
        """Those that may take part in a start now, as far as is known."""
        absent = self.absent()
        return [host for host in self.hosts if host.name not in absent]

    def present(self, needs: Requirements) -> OpenMachines:
        """Connections to those machines that take part in the first start. Raises UserError where
        one does not answer without which the run does not begin."""
        if not self.optional:
            return look.open_and_probe(self.hosts, needs)
        hosts = self.available()
        if len(hosts) < self.least:
            return OpenMachines([], {}, {})
        machines = look.open_and_probe(hosts, needs, without_missing=True)
        silent = [host for host in hosts if host.name not in machines.facts]
        if needed := [host for host in silent if host.name not in self.optional]:
            machines.close()
            look.open_and_probe(needed, needs).close()  # which says why it does not answer
            return self.present(needs)
        for host in silent:
            self.mark_absent(host.name)
        self._leave_used(machines)
        for name, problem in self._leave_unfit(machines, needs, Moment.FIRST).items():
            self.mark_absent(name, problem.said)
        return machines

    def _leave_unfit(
        self, machines: OpenMachines, needs: Requirements, moment: Moment
    ) -> dict[str, Problem]:
        """Go on without machines that are not fit by themselves; returns why."""
        unfit = {}
        for host in machines.hosts:
            if moment is Moment.FIRST and host.name not in self.optional:
                continue
            if problem := why_unfit(machines.only(host), needs, moment):
                unfit[host.name] = problem
        machines.leave(unfit)
        return unfit

    def _leave_used(self, machines: OpenMachines) -> None:
        """Go on without those that somebody uses at this moment."""
        nodes = {
            host.name: machines.nodes[host.name] for host in machines.hosts if host.owner.signs
        }
        for name, sign in ask(nodes).items():
            if sign is not None:
                self.mark_absent(name, SIGNS.get(sign, NO_ANSWER))
                machines.leave([name])

    def _leave_strangers(self, machines: OpenMachines) -> None:
        """Go on without machines that never took part, where they and the others do not go
        together."""
        new = [host.name for host in machines.hosts if host.name not in self.took_part]
        if not new or len(new) == len(machines.hosts):
            return
        wrong = judge.mismatches(machines) or [
            *judge.unreachable_pairs(machines, look.unreachable_pairs(machines))
        ]
        if wrong:
            machines.leave(new)
            for name in new:
                self.mark_absent(name, wrong[0].text)

    def table(self, machines: OpenMachines) -> list[str]:
        """A line for each machine that has an owner: what is agreed, and whether it is free now."""
        owned = [host for host in machines.hosts if host.owner.signs]
        for name, sign in ask({host.name: machines.nodes[host.name] for host in owned}).items():
            if sign is not None:
                self.mark_absent(name, SIGNS.get(sign, NO_ANSWER))
        absent = self.absent()
        now = {name: f"takes no part now: {why}" for name, why in absent.items()}
        lines = {host.name: now.get(host.name, "takes part now") for host in owned}
        return [f"{host.name} {host.owner.told()}; it {lines[host.name]}" for host in owned]

    # during an attempt

    def attempt_began(self, machines: OpenMachines, needs: Requirements) -> None:
        """An attempt begins on these machines."""
        self._inside, self._changed = [host.name for host in machines.hosts], time.monotonic()
        self._machines, self._needs = machines, needs
        self.took_part.update(self._inside)

    def attempt_ended(self) -> None:
        """Its guards have ended, and tell no more."""
        self._inside, self._machines = [], None

    def note_sign(self, name: str, sign: str | None) -> None:
        """What a machine says of its owner: one of SIGNS, or None."""
        before = self._known[name]
        if sign is not None:
            self._known[name] = Availability(None, SIGNS[sign])
        elif before.free_since is None:
            self._known[name] = Availability(time.monotonic(), "")

    def mark_absent(self, name: str, why: str = NO_ANSWER) -> None:
        self._known[name] = Availability(None, why)

    def regroup(self) -> str | None:
        """Why the machines are to change now."""
        day, now = datetime.now(), time.monotonic()
        return regroup(self.hosts, self._inside, dict(self._known), day, now, self._changed)

    def absent(self) -> dict[str, str]:
        """Those that take no part in a start now, each with the reason."""
        day, now = datetime.now(), time.monotonic()
        reasons = {
            host.name: absence(host, self._known[host.name], host.name in self._inside, day, now)
            for host in self.hosts
        }
        return {name: why for name, why in reasons.items() if why}

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
            and self._may_join(host.name)
            and (host.owner.hours is None or host.owner.hours.has(day))
        ]
        self._hold({host.name for host in hosts})
        opened, failures = engine.open_all([host for host in hosts if host.name not in self._held])
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

    def _may_join(self, name: str) -> bool:
        signs = any(host.owner.signs for host in self.hosts if host.name == name)
        return signs or name not in self.took_part

    def _seen(self, host: Host, sign: str | None) -> None:
        """What a look at a machine outside found."""
        now, before = time.monotonic(), self._known[host.name]
        if sign is not None:
            self._outside(host.name, Availability(None, SIGNS.get(sign, NO_ANSWER)))
        elif before.free_since is None:
            self._outside(host.name, Availability(now, ""))
        known = self._known[host.name]
        if sign is not None or known.fit or absence(host, known, False, datetime.now(), now):
            return
        needs, training = self._needs, self._machines
        if needs is None or training is None:
            return  # there is nothing to compare it with until an attempt has begun
        why = why_not_joining(host, needs, training)
        self._outside(host.name, Availability(None, why) if why else replace(known, fit=True))

    def _outside(self, name: str, known: Availability) -> None:
        if name not in self._inside:  # an attempt may have begun meanwhile
            self._known[name] = known


# ---- what is wrong with machines ----


def why_unfit(machines: OpenMachines, needs: Requirements, moment: Moment) -> Problem | None:
    """The first thing by which a machine takes no part."""
    wrong = judge.problems(machines, needs, look.control_machine_facts(needs))
    return next((entry for entry in wrong if keeps_out(entry, moment, needs.run_config)), None)


def why_not_joining(host: Host, needs: Requirements, training: OpenMachines) -> str | None:
    """What keeps a machine that is free from joining those that train; None where nothing does."""
    try:
        joining = look.open_and_probe([host], needs, without_missing=True)
    except UserError as error:
        return str(error)
    try:
        if not joining.hosts:
            return NO_ANSWER
        problem = why_unfit(joining, needs, Moment.JOINING)
        facts = {**training.facts, **joining.facts}
        together = judge.mismatches(OpenMachines([*training.hosts, host], {}, facts))
        first = problem or next(iter(together), None)
        return first.said if first else None
    finally:
        joining.close()


def problems_of(machines: OpenMachines, needs: Requirements) -> list[Problem]:
    """Everything that is wrong with machines for a run, the ways between them included."""
    wrong: list[Problem] = []
    try:
        needs = replace(needs, workload=needs.workload.for_machines(machines))
    except Refused as refused:
        wrong = refused.reasons
    sources = look.data_sources(machines, needs)
    control = replace(look.control_machine_facts(needs), sources=sources)
    wrong = [*wrong, *judge.problems(machines, needs, control)]
    if not all(problem.blocks is NEVER for problem in wrong):
        return wrong
    return [*wrong, *judge.unreachable_pairs(machines, look.unreachable_pairs(machines))]


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
