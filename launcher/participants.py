"""Decides which machines participate in a run, and waits until there are enough (docs/office.md).
`select` decides, from facts and rules only; `Participants` asks the machines and waits.

A run changes its machines only when an attempt begins: it saves at an agreed step and continues on
the machines that participate then. A run leaves a machine as soon as its owner is back. A machine
joins when it has been free for `idle_minutes`, and not sooner than `idle_minutes` after the last
change. This limits the cost: a machine causes at most two starts of a run in that time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto
from functools import partial

from boundary.answers import OwnerAnswer
from contract.errors import UserError
from contract.options import Config
from contract.text import pluralize
from launcher import folders, hours, judge, look, problems, remote
from launcher.look import OpenMachines
from launcher.machines import engine
from launcher.machines.engine import Host, Node, error_location
from launcher.machines.owned import SIGNS
from launcher.notify import Notify
from launcher.plan.sending import with_layer
from launcher.problems import ALWAYS, BUSY, NEVER, OWNER, SILENT, Problem, Refused, problem
from launcher.program import Needs
from launcher.terminal import Stopper, Terminal, WaitNotice, in_thread, waiting

LOOK_SECONDS = 20.0  # between two looks at a machine that does not participate
MIN_LOOKS = 4  # looks that have to find a machine free before the machine joins
PATIENCE = 90.0  # seconds in which machines of a run that has begun may come back
# Pauses before asking again: of a run that has not begun, and of a run between two attempts.
QUEUE_POLL_SECONDS, RESTART_POLL_SECONDS = 10.0, 3.0


# ---- the decision ----


class Moment(Enum):
    """Lists the moments at which machines are selected."""

    DRY_RUN = auto()  # nothing starts, and every machine is shown
    START = auto()  # a run begins, or is resumed by hand
    RESTART = auto()  # the next attempt of a run begins
    RUNNING = auto()  # an attempt trains


@dataclass(frozen=True)
class Presence:
    """The state of a machine. `free_since`: the last absence's end in monotonic seconds; -inf for a
    machine that was never absent. `absence`: why it does not participate: its owner uses it, it did
    not answer, or it has a problem. `is_fit`: nothing keeps the machine from joining the attempt
    that trains now."""

    free_since: float = float("-inf")
    absence: Problem | None = None
    is_fit: bool = False


@dataclass
class MachineGroup:
    """A run's machines and what is known of them. `training_names`: the machines of the attempt
    that trains now; empty between attempts. `participated`: the machines of all attempts so far.
    `attempt_start`: when the last attempt began to train, in monotonic seconds."""

    hosts: list[Host]
    config: Config
    presence: dict[str, Presence] = field(default_factory=dict)
    training_names: Collection[str] = ()
    participated: set[str] = field(default_factory=set)
    attempt_start: float = 0.0


@dataclass(frozen=True)
class Selection:
    """The machines that participate, and the problems for which other machines are left out.
    `wait`: why the run cannot start on these machines yet, "" if it can. `is_endless`: the run
    waits as long as it takes; otherwise for PATIENCE. `texts`: problems that do not keep the run
    from starting, or that end the wait once they are solved."""

    names: list[str]
    left_out: dict[str, Problem]
    wait: str = ""
    is_endless: bool = True
    texts: Sequence[str] = ()


def find_exclusion_reason(
    moment: Moment,
    host: Host,
    group: MachineGroup,
    local_time: datetime,
    monotonic_seconds: float,
    findings: Sequence[Problem] = (),
) -> Problem | None:
    """Return the first problem for which a run continues without this machine, or None.
    `local_time`, `monotonic_seconds`: the present time, by two clocks. `findings`: all problems of
    the machines that were asked."""
    owner, config, label = host.owner, group.config, host.label()
    presence = group.presence[host.name]
    is_training = host.name in group.training_names
    # The problems of this machine. Without owner=yields an owner has to ask for the machine, so no
    # idle_minutes have to pass.
    was_used_lately = owner.yields and monotonic_seconds - presence.free_since < owner.idle_seconds
    if owner.hours and not owner.hours.has(local_time):
        entries = [problem("outside-hours", host, hours=owner.hours.text)]
    elif presence.absence:
        entries = [presence.absence]
    elif was_used_lately and not is_training:
        entries = [problem("used-lately", host, minutes=owner.idle_seconds / 60)]
    else:
        # Problems between machines have no label. A machine that joins has to suit the others.
        joins = moment is Moment.RUNNING and not is_training
        joins = joins or (moment is Moment.RESTART and host.name not in group.participated)
        entries = [entry for entry in findings if label in entry.labels]
        entries += [entry for entry in findings if joins and not entry.labels]
        entries = [replace(entry, labels=(label,)) for entry in entries]
    if moment is Moment.RESTART:  # the run's own processes may still be leaving the GPUs
        entries = [entry for entry in entries if entry.code != "gpus-busy"]
    # The kinds of problem for which the run continues without the machine. For all other kinds, a
    # start is refused or waits.
    if moment is Moment.START and (config.min_nodes or owner.signs):  # it can start without it
        tolerated = {OWNER, SILENT} if config.queue else {OWNER, SILENT, BUSY}  # QUEUE=1 waits
    elif moment is Moment.START:
        tolerated = {OWNER}
    elif moment is Moment.DRY_RUN:  # it shows every machine
        tolerated = set()
    else:
        tolerated = {OWNER, SILENT, BUSY, ALWAYS}
    if config.force:  # the run uses the machine although it is busy
        tolerated -= {BUSY}
    return next((entry for entry in entries if entry.blocks in tolerated), None)


def select(
    moment: Moment,
    group: MachineGroup,
    local_time: datetime,
    monotonic_seconds: float,
    findings: Sequence[Problem] = (),
    waited: float = 0.0,
) -> Selection:
    """Select the machines that participate, by the arguments of find_exclusion_reason. `waited`:
    seconds for which too few machines have answered. Raises UserError if the run must not start,
    or has waited in vain."""
    hosts, config, presence = group.hosts, group.config, group.presence
    left_out: dict[str, Problem] = {}
    for host in hosts:
        if entry := find_exclusion_reason(
            moment, host, group, local_time, monotonic_seconds, findings
        ):
            left_out[host.name] = entry
    names = [host.name for host in hosts if host.name not in left_out]

    # While an attempt trains, nothing is refused: machines leave, or join after their idle time.
    if moment is Moment.RUNNING:
        seconds = monotonic_seconds - group.attempt_start
        joining = {host.name for host in hosts if seconds >= host.owner.idle_seconds}
        joining = {name for name in joining if presence[name].is_fit}
        participating = {*group.training_names, *joining}
        return Selection([name for name in names if name in participating], left_out)
    # A machine that the run cannot start without did not answer.
    silent = [absence for name in names if (absence := presence[name].absence)]
    if silent and moment is Moment.START:
        raise Refused(silent)

    # Without MIN_NODES a run needs every machine that has no owner. With too few machines, a start
    # waits for all of them, and a restart waits for owners as long as it takes.
    min_count = config.min_nodes or max(1, sum(not host.owner.signs for host in hosts))
    count, is_short = pluralize(min_count, "machine"), len(names) < min_count
    owned = [entry for entry in left_out.values() if entry.blocks is OWNER]
    if is_short and (moment is Moment.START or len(hosts) - len(owned) < min_count):
        waits_for = left_out.values() if moment is Moment.START else owned
        reason = "; ".join(entry.text for entry in waits_for)
        return Selection(names, left_out, f"at least {count} must be free: {reason}")
    # If `findings` have just left a machine out, the caller compares the remaining machines anew:
    # without that machine they may have fewer problems.
    is_new_exclusion = any(
        entry not in owned and not presence[name].absence for name, entry in left_out.items()
    )
    if is_new_exclusion and not is_short:
        return Selection(names, left_out)
    if moment is Moment.RESTART:
        between = [entry for entry in findings if not entry.labels and entry.blocks is ALWAYS]
        if not is_short and not between:
            return Selection(names, left_out)
        texts = [entry.text for entry in (*left_out.values(), *between) if entry not in owned]
        if waited > PATIENCE:
            fit = f"only {len(names)} are ready ({', '.join(names) or 'none'})"
            advice = "repair the other machines, then type `make train RESUME=latest`."
            raise UserError(*texts, f"the run needs {count}, but {fit}: {advice}")
        return Selection(names, left_out, f"{count} must be ready", False, texts)
    # A problem that waiting cannot solve is reported before the waiting begins.
    can_wait = config.queue or moment is Moment.DRY_RUN
    busy = [entry for entry in findings if entry.blocks is BUSY and can_wait]
    other_problems = [entry for entry in findings if entry not in busy]
    warnings = problems.refuse_or_warn(other_problems, config.force)
    wait = busy[0].text if busy and moment is Moment.START else ""
    return Selection(names, left_out, wait, texts=[*(entry.text for entry in busy), *warnings])


# ---- the loop that asks and waits ----


@dataclass
class Waiter:
    """Pauses before the machines are asked again, and reports each reason once. Waiting runs have
    no order: the first that asks when the machines are free gets them. `until`: UNTIL in Unix
    seconds. `stopper`: of a run that has begun, None before. `lead`: how the sentence with the
    reason begins. `waited`: the name of a run that has waited for machines, owners or a time of
    day; "" for a run that has not, or that sends its own notifications."""

    terminal: Terminal
    notify: Notify
    until: int | None = None
    stopper: Stopper | None = None
    lead: str = "waiting"
    waited: str = ""
    _reported: str = ""
    _notice: WaitNotice | None = None

    def pause(self, reason: str, is_reported: bool = True, texts: Sequence[str] = ()) -> None:
        """Report the reason, if `is_reported`, and wait some seconds. Raises UserError at UNTIL,
        and with `texts` once the user stops the run."""
        if self.until is not None and time.time() >= self.until:
            until = hours.show_time(self.until)
            raise UserError(f"it is {until} (UNTIL) and the run has not begun, since {reason}")
        if is_reported and reason != self._reported:
            self.terminal.say(f"{self.lead}: {reason}")
            if not self._reported and not self.stopper:
                self.terminal.say(
                    f"Tandem checks again every {QUEUE_POLL_SECONDS:.0f} s; if several runs "
                    "wait for the same machines, the first that checks gets them"
                )
            self.terminal.result(waits=reason)
            self._reported = reason
        # A run that has begun asks more often, since its other machines are idle meanwhile.
        if self.stopper:
            if self.stopper.stop_requests:
                raise UserError(*texts, f"the run was stopped while it waited: {reason}")
            time.sleep(RESTART_POLL_SECONDS)
            return
        self._notice = self._notice or WaitNotice(self.terminal, "waiting for machines")
        self._notice.update()
        time.sleep(QUEUE_POLL_SECONDS)


class Participants(MachineGroup):
    """A run's machines, which it asks. During an attempt the guards report on the attempt's
    machines, and a thread looks at all others now and then."""

    def __init__(self, hosts: Sequence[Host], config: Config):
        super().__init__([*hosts], config, {host.name: Presence() for host in hosts})
        # The machines and needs of the attempt that trains now.
        self._training: tuple[OpenMachines, Needs] | None = None
        self._connections: dict[str, Node] = {}  # to machines that do not participate

    def select(
        self, moment: Moment, findings: Sequence[Problem] = (), waited: float = 0.0
    ) -> Selection:
        """Select the machines that participate now. Raises UserError."""
        return select(moment, self, datetime.now(), time.monotonic(), findings, waited)

    def gather(self, moment: Moment, needs: Needs, waiter: Waiter, name: str) -> OpenMachines:
        """Return connections to the machines that participate, as soon as the run can start on
        them. `name`: the run's name, for people. Raises UserError."""
        terminal, remind = waiter.terminal, waiter.notify.make_reminder(name)
        patience_start = time.monotonic()
        is_optional = any(self.config.min_nodes or host.owner.signs for host in self.hosts)
        # True if a machine that does not answer need not end the start.
        is_lenient = moment is Moment.RESTART or (moment is Moment.START and is_optional)
        while True:
            # Absences may be over: they are forgotten, and the machines are asked anew. But `look`
            # ends an owner's absence and, at a start, the absence of a silent machine.
            lasting = (OWNER,) if moment is Moment.RESTART else (OWNER, SILENT)
            for host in self.hosts:
                absence = self.presence[host.name].absence
                if absence and absence.blocks not in lasting:
                    self.presence[host.name] = Presence()
            with contextlib.ExitStack() as connections:
                selection = self.select(moment)
                # Hours and owners leave enough machines to the run: connect to these machines.
                if not selection.wait:
                    hosts = [host for host in self.hosts if host.name in selection.names]
                    text = f"checking {pluralize(len(hosts), 'machine')}"
                    with waiting(terminal, text):
                        machines = look.open_and_probe(hosts, needs, without_missing=is_lenient)
                    connections.callback(machines.close)
                    owned = [host.name for host in machines.hosts if host.owner.signs]
                    self._note(machines.silent)
                    self._note(ask_owners({name: machines.nodes[name] for name in owned}))
                    selection = self.select(moment, waited=time.monotonic() - patience_start)
                    machines.leave(selection.left_out)
                # Each round may leave machines out that do not suit the run, or one another.
                while not selection.wait:
                    with waiting(terminal, "comparing the machines and their connections"):
                        joins = not self.participated.issuperset(machines.facts)
                        findings = find_problems(machines, needs, moment, joins)
                    selection = self.select(moment, findings, time.monotonic() - patience_start)
                    left_out = selection.left_out.items()
                    unfit = {name: entry for name, entry in left_out if name in machines.facts}
                    if not unfit:
                        break
                    self._note(unfit)
                    machines.leave(unfit)
                if not selection.wait:
                    connections.pop_all()  # the run gets them open
                    break
            # Wait, and report the reason. PATIENCE is counted from the last endless wait.
            if selection.is_endless:
                patience_start = time.monotonic()
            waiter.waited = name
            remind(selection.wait)
            waiter.pause(selection.wait, selection.is_endless, selection.texts)
            if moment is Moment.START and self.select(moment).wait:
                self.look()  # at a restart the thread of `looking` does this
        verb = "begins" if moment is Moment.START else "continues"
        for entry in selection.left_out.values():
            if moment is Moment.START or entry.blocks is not OWNER:
                terminal.say(f"the run {verb} without {entry.text}")
        terminal.say(*selection.texts)
        return machines

    def _note(self, absences: Mapping[str, Problem | None]) -> None:
        """Note why these machines do not participate; None for a machine that can."""
        for name, absence in absences.items():
            if absence:
                self.presence[name] = Presence(absence=absence)
            elif self.presence[name].absence:
                self.presence[name] = Presence(time.monotonic())

    def note_sign(self, name: str, sign: str | None) -> None:
        """Note what a guard reports of its machine's owner: one of SIGNS, None if the owner is
        away."""
        self._note({name: Problem("owner-there", SIGNS[sign], (name,)) if sign else None})

    @contextlib.contextmanager
    def training(self, machines: OpenMachines, needs: Needs) -> Iterator[None]:
        """Count these machines as those of the attempt that trains, while the body runs."""
        self.training_names = [host.name for host in machines.hosts]
        self.attempt_start = time.monotonic()
        self.participated.update(self.training_names)
        # A machine is judged again before it may join, since it has to suit the new machines.
        for name, presence in self.presence.items():
            self.presence[name] = replace(presence, is_fit=False)
        self._training = machines, needs
        try:
            yield
        finally:
            self.training_names, self._training = (), None

    def find_regroup_reason(self) -> str | None:
        """Return why the run has to continue on other machines, or None."""
        selection = self.select(Moment.RUNNING)
        leaving = [name for name in self.training_names if name in selection.left_out]
        # The next attempt also takes every machine that can join. The reason names only who leaves.
        if leaving:
            return "; ".join(f"{n} leaves: {selection.left_out[n].message}" for n in leaving)
        joining = [name for name in selection.names if name not in self.training_names]
        return f"{', '.join(joining)} can participate" if joining else None

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the machines that do not participate, from a thread, while the body runs."""
        # A machine with a short idle_minutes has to be seen free MIN_LOOKS times within it.
        pause = min([LOOK_SECONDS, *(host.owner.idle_seconds / MIN_LOOKS for host in self.hosts)])

        def keep_looking(over: threading.Event) -> None:
            while not over.wait(pause):
                with contextlib.suppress(UserError):  # too few open files
                    self.look()

        try:
            with in_thread("owners", keep_looking):
                yield
        finally:
            self._close_connections(())

    def look(self) -> None:
        """Ask the machines that do not participate and may join, within their hours: machines with
        an owner, and machines that never participated. A machine that failed is not asked."""
        local_time = datetime.now()
        hosts = {
            host.name: host
            for host in self.hosts
            if host.name not in self.training_names
            and (host.owner.signs or host.name not in self.participated)
            and (host.owner.hours is None or host.owner.hours.has(local_time))
        }
        self._close_connections(hosts)
        missing = [host for name, host in hosts.items() if name not in self._connections]
        opened, failures = engine.open_all(missing)
        self._connections.update(opened)
        # Ask whether owners are away. Connections that gave no answer are opened anew next time.
        absences = ask_owners(self._connections)
        silent = {name for name, entry in absences.items() if entry and entry.blocks is SILENT}
        self._close_connections(self._connections.keys() - silent)
        absences.update({name: Problem("unreached", text) for name, text in failures.items()})
        for name, host in hosts.items():
            if name in self.training_names:
                continue  # an attempt has begun meanwhile
            self._note({name: absences[name]})
            find_reason = partial(
                find_exclusion_reason, Moment.RUNNING, host, self, local_time, time.monotonic()
            )
            # Read once: the attempt may end at any moment, in another thread.
            attempt = self._training
            if find_reason() or self.presence[name].is_fit or not attempt:
                continue
            # The machine is free. Find out whether it suits the machines of the attempt.
            training_machines, needs = attempt
            machines = look.open_and_probe([host], needs, without_missing=True)
            machines.close()
            facts = {**training_machines.facts, **machines.facts}
            joint_machines = OpenMachines([*training_machines.hosts, host], {}, facts)
            findings = [*machines.silent.values()]
            findings = findings or find_problems(joint_machines, needs, Moment.RUNNING, False)
            entry = find_reason(findings)
            if name not in self.training_names:  # meanwhile no attempt has begun with this machine
                self.presence[name] = replace(self.presence[name], absence=entry, is_fit=not entry)

    def _close_connections(self, needed_hosts: Collection[str]) -> None:
        """Close the connections, except to these hosts."""
        # Connections stay open from one look to the next, because each new connection writes a
        # dozen lines into the journal of a machine's owner.
        connections = self._connections
        self._connections = {
            name: connections[name] for name in connections if name in needed_hosts
        }
        engine.close_all({n: connections[n] for n in connections if n not in needed_hosts})


# ---- problems of machines ----


def find_problems(
    machines: OpenMachines, needs: Needs, moment: Moment, joins: bool
) -> list[Problem]:
    """Return everything that is wrong with machines for a run: with each machine, and between
    machines. `joins`: some machines never participated."""
    findings: list[Problem] = []
    control = look.ControlFacts(folders.disk_free())
    is_first = moment in (Moment.DRY_RUN, Moment.START)
    if is_first:
        try:
            needs = replace(needs, program=with_layer(needs.program, machines))
        except Refused as refused:
            findings = refused.reasons
        control = replace(control, sources=look.read_data_sources(machines, needs))
    findings = [*findings, *judge.find_problems(machines, needs, control)]
    # The connections are tried last, if there are only warnings (NEVER): a machine that cannot
    # train anyway need not open its ports.
    if (is_first or joins) and all(entry.blocks is NEVER for entry in findings):
        findings += judge.name_unreachable_pairs(machines, look.find_unreachable_peers(machines))
    return findings


def ask_owners(nodes: Mapping[str, Node]) -> dict[str, Problem | None]:
    """Ask machines whether their owners use them. Returns why a machine cannot participate, by
    name; None for a machine that is free."""
    return dict(zip(nodes, engine.map_parallel(_ask_owner, nodes.values())))


def _ask_owner(node: Node) -> Problem | None:
    """Ask one machine. Its problem is "owner-unknown" if it gives no usable answer."""
    host, owner = node.host, node.host.owner
    call = f"show({remote.MARK!r}, {list(owner.signs)!r}, {owner.away_dir!r})"
    try:
        sign: str = remote.ask(node, "launcher.node.owner", call, OwnerAnswer).sign
    except UserError as error:
        return problem("owner-unknown", host, why=error)
    except Exception as error:  # whatever a machine's answer breaks here is that machine's problem
        return problem("owner-unknown", host, why=error_location(error))
    return problem("owner-there", host, sign=SIGNS[sign]) if sign else None
