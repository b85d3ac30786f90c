"""What comes before a run: machines are queried and checked until nothing is wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from contract import strategies, verbs
from contract.errors import UserError
from contract.options import Config
from contract.options import Options as TrainerOptions
from contract.runs import run_id, slug
from contract.text import pluralize
from launcher import here, hours, judge, look
from launcher.look import OpenMachines, Requirements
from launcher.machines import inventory
from launcher.machines.engine import Host
from launcher.notify import Notify
from launcher.options import for_trainer, trainer_settings, with_trainer
from launcher.owners import Owners
from launcher.plan import balance as balancing
from launcher.plan import code, devices, models, plan, predictions, weights
from launcher.plan import layer as layers
from launcher.plan.balance import Balance
from launcher.plan.plan import AS_ASKED, Plan
from launcher.plan.script import Script
from launcher.plan.script import read as read_script
from launcher.problems import BUSY, NEVER, Problem, Refused, problem, refuse_or_warn
from launcher.terminal import Terminal, WaitNotice, waiting

QUEUE_POLL_SECONDS = 10.0
# Where they are set, oneDNN and torch's own kernels use no newer instructions than they say. A
# rank's environment is made from scratch, so it has them only through the plan.
INSTRUCTION_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def instruction_limits() -> dict[str, str]:
    """The variables above that are set in the launcher's own environment."""
    return {name: os.environ[name] for name in INSTRUCTION_LIMITS if os.environ.get(name)}


@dataclass
class ReadyRun:
    """Everything that was asked and found out before anything is started. `hosts` take part at the
    start, `owners` knows all machines of the run."""

    options: Config
    settings: TrainerOptions | Script
    hosts: list[Host]
    machines: OpenMachines
    needs: Requirements
    precision_why: str = AS_ASKED
    sync_why: str = AS_ASKED
    balance: Balance = field(default_factory=Balance)
    owners: Owners = field(default_factory=lambda: Owners((), None))

    def __post_init__(self) -> None:
        if not self.owners.hosts:
            self.owners = Owners(self.hosts, self.options.min_nodes)


def check_machines(
    options: Config,
    terminal: Terminal,
    turn: Turn | None = None,
    run: str | None = None,
    before: Mapping[str, int] | None = None,
    everybody: bool = False,
) -> ReadyRun:
    """Check everything and change nothing; `run` is the one to continue, and `before` the weights
    of the machines that it had last, unless others are asked for. `everybody`: also machines that
    their owners use. Raises UserError."""
    turn = turn or Turn(options, terminal)
    if options.script:
        hosts = _hosts(options)
        here.add_torch(hosts, terminal)
        script = read_script(options)
        if secret := script.readable_secrets():
            terminal.say(secret)
        needs = Requirements(options, script, run)
        owners = Owners(hosts, options.min_nodes)
        machines = _fit(needs, owners, terminal, everybody, turn)
        needs = _with_packages(needs, machines)
        return ReadyRun(options, needs.settings, machines.hosts, machines, needs, owners=owners)
    automatic = asks_auto(options)
    options = with_trainer(options, sync=strategies.EXACT) if automatic else options
    settings = trainer_settings(options)
    if run is None:  # one that goes on has them in its checkpoint
        weights.check(settings)
    hosts = _hosts(options)
    balancing.check(options.balance, len(hosts))
    here.add_torch(hosts, terminal)
    trial = models.Trial.of(settings, ranks_share=len(hosts) > 1)
    needs = Requirements(options, settings, run, keeps_precision=run is not None)
    owners = Owners(hosts, options.min_nodes)
    machines = _fit(needs, owners, terminal, everybody, turn)
    if trial:
        _try_out(trial, machines, terminal)
    return decide(needs, owners, machines, automatic, before, terminal)


def _try_out(trial: models.Trial, machines: OpenMachines, terminal: Terminal) -> None:
    """Build one's own model on the first machine. Raises UserError."""
    first = machines.hosts[0]
    folder = machines.facts[first.name].absolute(first.node_dir)
    try:
        with waiting(terminal, f"building the model once on {first.name}"):
            notes = trial.on(machines.nodes[first.name], folder)
    except UserError:
        machines.close()
        raise
    for note in notes:
        terminal.say(note)


def gather(options: Config, terminal: Terminal) -> Path:
    """Gather the packages of a script for the machines into the bundle; returns the folder. Raises
    UserError."""
    script, hosts = read_script(options), _hosts(options)
    if script.requirements is None:
        raise UserError(
            f"SCRIPT={script.words[-1]}: there is no requirements.txt beside it, so nothing is to "
            "be gathered; REQUIREMENTS= names another file."
        )
    with waiting(terminal, f"asking {pluralize(len(hosts), 'machine')} what is there"):
        machines = look.open_and_probe(hosts, Requirements(options, script))
    try:
        if wrong := judge.python(machines):
            raise Refused(wrong)
        with waiting(terminal, "gathering the packages of the script"):
            return layers.bundle(script.requirements, machines.environment)
    finally:
        machines.close()


def problems_of(machines: OpenMachines, needs: Requirements) -> list[Problem]:
    """Everything that is wrong with machines for a run, the ways between them included."""
    control = look.control_machine_facts(needs)
    if not isinstance(needs.settings, Script):
        control = replace(control, sources=look.data_sources(machines, needs))
    found = judge.problems(machines, needs, control)
    fit = all(one.blocks is NEVER for one in found)
    return (
        [*found, *judge.unreachable_pairs(machines, look.unreachable_pairs(machines))]
        if fit
        else found
    )


def _with_packages(needs: Requirements, machines: OpenMachines) -> Requirements:
    """The same with the layer of a script's packages for these machines. Raises UserError."""
    script = needs.settings
    if not isinstance(script, Script) or not script.requirements or judge.python(machines):
        return needs
    layer = _layer(script.requirements, machines.environment)
    imports = tuple(sorted({*script.imports} - layer.modules()))
    return replace(needs, settings=replace(script, layer=layer, imports=imports))


@lru_cache(maxsize=1)
def _layer(requirements: Path, environment: layers.Environment) -> layers.Layer:
    """Once, however often a run that waits looks at the machines. Raises UserError."""
    return layers.of(requirements, environment)


def _hosts(options: Config) -> list[Host]:
    """The machines of the run. Raises UserError."""
    hosts = select(inventory.load(Path(options.inventory)), options)
    check_minimum(options, hosts)
    return hosts


def _fit(
    needs: Requirements, owners: Owners, terminal: Terminal, everybody: bool, turn: Turn
) -> OpenMachines:
    """Connections to the run's machines, once nothing is wrong with them; with QUEUE=1 those that
    are busy are waited for, and with AT= that time. Those that their owners use are left out, as
    are, with MIN_NODES, those that do not answer or are busy. Raises UserError."""
    what = f"{slug(needs.subject)} on {pluralize(len(owners.hosts), 'machine')}"
    if hours.wait(needs.options.at, terminal):
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
    options = needs.options
    queues = options.queue and not everybody  # what starts nothing waits for nobody
    with waiting(terminal, f"asking {pluralize(len(owners.hosts), 'machine')} what is there"):
        machines = owners.strict(needs) if everybody else owners.present(needs)
    if len(machines.hosts) < (0 if everybody else owners.least):
        machines.close()
        return owners.waits(owners.least)
    try:
        try:
            needs, problems = _with_packages(needs, machines), []
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


def decide(
    needs: Requirements,
    owners: Owners,
    machines: OpenMachines,
    automatic: bool,
    before: Mapping[str, int] | None,
    terminal: Terminal,
) -> ReadyRun:
    """What is left open until the machines are known: once for the run its precision, and its
    strategy where that is `automatic`; and the parts of these machines. Raises UserError."""
    options, hosts, sync_why = needs.options, machines.hosts, AS_ASKED
    assert isinstance(needs.settings, TrainerOptions)
    settings, why = decide_precision(machines, needs, terminal)
    if automatic:
        settings, sync_why = decide_sync(settings, hosts, terminal)
        options = with_trainer(options, sync=settings.sync)
    options = with_trainer(options, precision=settings.precision)
    needs = replace(needs, options=options, settings=settings, keeps_precision=True)
    balance = Balance.before(before or {}, hosts) or decide_balance(
        needs, owners.hosts, machines, terminal
    )
    return ReadyRun(options, settings, hosts, machines, needs, why, sync_why, balance, owners)


def check_minimum(options: Config, hosts: list[Host]) -> None:
    """Raises UserError where so many restarts, or so few machines, cannot be."""
    if options.script and options.max_restarts and not options.resume_args:
        raise UserError(
            f"MAX_RESTARTS={options.max_restarts}: another attempt would begin anew, for how the "
            "script goes on was not said: give RESUME_ARGS=, like RESUME_ARGS='--resume {last}' "
            "(docs/own-script.md)."
        )
    if options.min_nodes is not None and not 1 <= options.min_nodes <= len(hosts):
        raise UserError(
            f"MIN_NODES={options.min_nodes}: give a number from 1 to the {len(hosts)} machines of "
            f"the run."
        )


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


def decide_precision(
    machines: OpenMachines, needs: Requirements, terminal: Terminal
) -> tuple[TrainerOptions, str]:
    """The trainer's options with the device and the precision that are decided once for the run,
    and why it is this precision. Raises UserError."""
    settings = needs.settings
    assert isinstance(settings, TrainerOptions)
    parts = devices.assign(machines.hosts, machines.facts, settings)
    level = devices.precision(parts, machines, needs)
    why = "as the run began" if needs.keeps_precision and level.why == AS_ASKED else level.why
    terminal.say(f"precision {level.name}: {why}")
    kind = parts[machines.hosts[0].name].kind
    return replace(settings, device=kind, precision=level.name), why


def decide_sync(
    settings: TrainerOptions, hosts: list[Host], terminal: Terminal
) -> tuple[TrainerOptions, str]:
    """The same with the strategy that `auto` becomes, and why."""
    nodes, size = len(hosts), settings.image_size
    found = predictions.foreseen(settings, hosts)
    measure = verbs.line(
        "plan",
        NODES=nodes,
        MODEL=settings.model,
        BATCH=settings.per_node_batch_size,
        PRECISION=settings.precision,
        ARGS=f"--image_size {size}" if size else None,
    )
    speeds = found.speeds if found else {}
    choice = predictions.choose_sync(speeds, nodes, measure, settings.family)
    terminal.say(f"sync {choice.sync}: {choice.why}")
    return replace(settings, sync=choice.sync), choice.why


def decide_balance(
    needs: Requirements, everybody: list[Host], machines: OpenMachines, terminal: Terminal
) -> Balance:
    """How a step's images are divided among the machines of a start, of `everybody` in the run,
    said where the parts differ. Raises UserError."""
    hosts, facts, settings = machines.hosts, machines.facts, needs.settings
    assert isinstance(settings, TrainerOptions)
    balance = balancing.decide(
        needs.options.balance,
        everybody,
        hosts,
        facts,
        lambda: predictions.own_speeds(settings, hosts),
    )
    ranks = [part.processes for part in devices.assign(hosts, facts, settings).values()]
    line = balancing.told(balance, hosts, ranks, settings.per_node_batch_size)
    if line:
        terminal.say(line)
    return balance


def make_plan(checked: ReadyRun, machines: OpenMachines, **details: Any) -> Plan:
    """The plan of an attempt on these machines; `details` are plan.Request's. Raises UserError."""
    settings = checked.settings
    if isinstance(settings, Script):
        foreseen, sent = None, code.current(settings.folder)
    else:
        foreseen = predictions.predicted(settings, machines.hosts)
        sent = code.current(models.folder(settings.model))
    env = {**instruction_limits(), **details.pop("extra_env", {})}
    request = plan.Request(
        unix=time.time(),
        options=checked.options,
        settings=settings,
        code=sent,
        predicted=foreseen,
        precision_why=checked.precision_why,
        sync_why=checked.sync_why,
        balance=checked.balance,
        extra_env=env,
        weights=weights.of(settings),
        **details,
    )
    return plan.build(machines.hosts, machines.facts, request)


def warnings(settings: TrainerOptions | Script, hosts: list[Host]) -> list[str]:
    """Sentences on a run that begins nevertheless."""
    if isinstance(settings, Script):
        return []
    strategy = strategies.parse(settings.sync)
    warm_up = settings.phases.all_warm_up(strategy) if len(hosts) > 1 else None
    return [told for told in (warm_up, predictions.slower_than_one(settings, hosts)) if told]


def new_id(checked: ReadyRun) -> str:
    return run_id(checked.needs.subject, len(checked.hosts), time.time())


def asks_auto(options: Config) -> bool:
    """Whether the last --sync that the trainer would read is `auto`. Raises UserError."""
    return bool(for_trainer(options).get("sync") == strategies.AUTO)


def select(hosts: list[Host], options: Config) -> list[Host]:
    """The first NODES hosts. Raises UserError."""
    if options.nodes is None:
        return hosts
    if options.nodes > len(hosts):
        raise UserError(
            f"NODES={options.nodes}, but {options.inventory} lists {len(hosts)} "
            f"({', '.join(host.name for host in hosts)}): add machines to [cluster] there, "
            f"or give NODES={len(hosts)} or less."
        )
    return hosts[: options.nodes]
