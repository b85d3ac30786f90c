"""What comes before a run: machines are queried and checked until nothing is wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from contract.errors import UserError
from contract.options import Config
from contract.runs import run_id, slug
from contract.text import pluralize
from launcher import here, hours, judge, look
from launcher.look import OpenMachines
from launcher.machines import inventory
from launcher.notify import Notify
from launcher.owners import Owners
from launcher.plan import plan
from launcher.plan.plan import Plan
from launcher.problems import BUSY, NEVER, Problem, problem, refuse_or_warn
from launcher.terminal import Terminal, WaitNotice, waiting
from launcher.workload import Requirements, Workload
from launcher.workloads import kind_of

QUEUE_POLL_SECONDS = 10.0
# Where they are set, oneDNN and torch's own kernels use no newer instructions than they say. A
# rank's environment is made from scratch, so it has them only through the plan.
INSTRUCTION_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def instruction_limits() -> dict[str, str]:
    """The variables above that are set in the launcher's own environment."""
    return {name: os.environ[name] for name in INSTRUCTION_LIMITS if os.environ.get(name)}


@dataclass(frozen=True)
class ReadyRun:
    """Everything that was asked and found out before anything is started: `machines` take part at
    the start, `owners` knows all of the run."""

    needs: Requirements
    machines: OpenMachines
    owners: Owners

    @property
    def run_config(self) -> Config:
        return self.needs.run_config

    @property
    def workload(self) -> Workload:
        return self.needs.workload


def check_machines(
    config: Config,
    terminal: Terminal,
    turn: Turn | None = None,
    run: str | None = None,
    before: Mapping[str, int] | None = None,
    everybody: bool = False,
) -> ReadyRun:
    """Check everything and change nothing; `run` is the one to continue, and `before` the weights
    of the machines that it had last, unless others are asked for. `everybody`: also machines that
    their owners use. Raises UserError."""
    workload = kind_of(config).read(config, run)
    hosts = inventory.hosts_of(config)
    for text in workload.check(config, hosts):
        terminal.say(text)
    here.add_torch(hosts, terminal)
    needs, owners = Requirements(config, workload, run), Owners(hosts, config.min_nodes)
    machines = _fit(needs, owners, terminal, everybody, turn or Turn(config, terminal))
    try:
        config, workload = workload.decide(config, hosts, machines, before or {}, terminal)
    except BaseException:
        machines.close()
        raise
    return ReadyRun(Requirements(config, workload, run), machines, owners)


def problems_of(machines: OpenMachines, needs: Requirements) -> list[Problem]:
    """Everything that is wrong with machines for a run, the ways between them included."""
    sources = look.data_sources(machines, needs)
    control = replace(look.control_machine_facts(needs), sources=sources)
    found = judge.problems(machines, needs, control)
    if not all(one.blocks is NEVER for one in found):
        return found
    return [*found, *judge.unreachable_pairs(machines, look.unreachable_pairs(machines))]


def _fit(
    needs: Requirements, owners: Owners, terminal: Terminal, everybody: bool, turn: Turn
) -> OpenMachines:
    """Connections to the run's machines, once nothing is wrong with them; with QUEUE=1 those that
    are busy are waited for, and with AT= that time. Those that their owners use are left out, as
    are, with MIN_NODES, those that do not answer or are busy. Raises UserError."""
    what = f"{slug(needs.workload.name)} on {pluralize(len(owners.hosts), 'machine')}"
    if hours.wait(needs.run_config.at, terminal):
        turn.waited = what
    tell = turn.notify.wait(what)
    while True:
        found = _look(needs, owners, terminal, everybody)
        if isinstance(found, OpenMachines):
            return found
        turn.waited = what
        tell(found)
        turn.pause(found)
        if len(owners.available()) < owners.least:
            owners.look()


def _look(
    needs: Requirements, owners: Owners, terminal: Terminal, everybody: bool
) -> OpenMachines | str:
    """The same now, or what is waited for."""
    options = needs.run_config
    queues = options.queue and not everybody  # what starts nothing waits for nobody
    with waiting(terminal, f"asking {pluralize(len(owners.hosts), 'machine')} what is there"):
        machines = owners.strict(needs) if everybody else owners.present(needs)
    if len(machines.hosts) < (0 if everybody else owners.least):
        machines.close()
        return owners.waits(owners.least)
    try:
        try:
            workload, problems = needs.workload.for_machines(machines), []
            needs = replace(needs, workload=workload)
        except UserError as error:
            problems = [problem("script-packages", said=text) for text in error.problems]
        with waiting(terminal, "comparing the machines and the ways between them"):
            problems += problems_of(machines, needs)
        busy = [one for one in problems if one.blocks is BUSY and (queues or everybody)]
        # What waiting cannot fix is reported before the waiting begins.
        passed = refuse_or_warn([one for one in problems if one not in busy], options.force)
    except UserError:
        machines.close()
        raise
    if busy and queues:
        machines.close()
        return busy[0].text
    out = {} if everybody else owners.absent()
    apart = [f"{name} takes no part: {why}" for name, why in out.items()]
    for text in [*apart, *(one.text for one in busy), *passed]:
        terminal.say(text)
    return machines


class Turn:
    """Waits until it is worth asking again, and says for what. There is no order: of those that
    wait, whoever asks first when the machines are free has them. `waited`: what has waited to
    begin, for machines, their owners or a time of day; "" where nothing has."""

    def __init__(self, options: Config, terminal: Terminal):
        self._terminal, self._until = terminal, options.until
        self.notify = Notify(options.notify, terminal)
        self.waited, self._reported = "", ""
        self._notice = WaitNotice(terminal, "waiting for machines")

    def pause(self, why: str) -> None:
        """Raises UserError once the run would have to end."""
        if self._until is not None and time.time() >= self._until:
            raise UserError(
                f"it is {hours.shown(self._until)} (UNTIL) and the run has not begun, since {why}"
            )
        if why != self._reported:
            self._terminal.say(f"waiting: {why}")
        if not self._reported:
            self._terminal.say(
                f"it asks again every {QUEUE_POLL_SECONDS:.0f} s; of runs that wait for the same "
                "machines, whichever asks first has them"
            )
        self._reported = why
        self._notice.update()
        time.sleep(QUEUE_POLL_SECONDS)


def make_plan(checked: ReadyRun, machines: OpenMachines, **details: Any) -> Plan:
    """The plan of an attempt on these machines; `details` are plan.Request's. Raises UserError."""
    workload = checked.workload
    env = {**instruction_limits(), **details.pop("extra_env", {})}
    request = plan.Request(
        unix=time.time(),
        options=checked.run_config,
        workload=workload,
        code=workload.code(),
        extra_env=env,
        **details,
    )
    return plan.build(machines.hosts, machines.facts, request)


def new_id(checked: ReadyRun) -> str:
    return run_id(checked.workload.name, len(checked.machines.hosts), time.time())
