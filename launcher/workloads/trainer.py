"""Our trainer as a workload: its precision, strategy and parts are decided before anything starts,
it is told all of that in one word of JSON, and it goes on from its newest checkpoint by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boundary.answers import MOST_PACKAGES, NodeFacts
from boundary.run_files import Decided
from contract import strategies, verbs
from contract.errors import UserError
from contract.options import DEFAULT_MODEL, RESULTS, TIMM, Config, as_typed, path_of
from contract.options import Options as TrainerOptions
from contract.precisions import Level
from contract.text import pluralize
from launcher import judge, look
from launcher.folders import recorded, relative
from launcher.look import Control, OpenMachines
from launcher.machines import inventory
from launcher.machines.engine import Host, MachineError, talk
from launcher.machines.inventory import CHECKOUT
from launcher.node.machine import tree_sha256
from launcher.options import (
    RESULTS_FOLDER,
    config_of,
    for_trainer,
    results,
    resumed,
    trainer_settings,
    typed,
    with_trainer,
)
from launcher.plan import balance as balancing
from launcher.plan import code, devices, models, predictions
from launcher.plan.balance import OFF, Balance
from launcher.plan.code import OWN, Code, Delivery
from launcher.plan.devices import NodeDevices
from launcher.plan.plan import AS_ASKED, Command, NodePart, Plan, check_batch
from launcher.problems import ALWAYS, Problem, Refused
from launcher.terminal import Terminal, waiting
from launcher.workload import Collected, Requirements, RunSite, Workload, folders_of

if TYPE_CHECKING:
    from launcher.plan.layer import Layer

WEIGHTS = "weights"  # a folder below node_dir
NAMED = ("torchvision:", TIMM)  # before the name of weights that are fetched
TIMM_PACKAGES = CHECKOUT / "requirements/timm.txt"


@dataclass(frozen=True)
class Trainer(Workload):
    """`settings` are the trainer's options as it will read them; both `why`s are a clause on what
    was decided. `keeps_precision`: the run began with that in `settings`; `chooses_sync`: SYNC=auto
    was asked for, and `settings` have the exact strategy until it is decided. `balance` and what
    `make plan` said (`predicted`) are those of an attempt's machines."""

    settings: TrainerOptions
    keeps_precision: bool = False
    chooses_sync: bool = False
    precision_why: str = AS_ASKED
    sync_why: str = AS_ASKED
    balance: Balance = field(default_factory=Balance)
    predicted: dict[str, Any] | None = None
    layer: Layer | None = None  # of timm, where a machine lacks it

    is_trainer = True
    can_go_on = True

    # ---- before any machine is asked ----

    @classmethod
    def read(cls, config: Config, run: str | None = None) -> Trainer:
        automatic = asks_auto(config)
        config = with_trainer(config, sync=strategies.EXACT) if automatic else config
        settings = trainer_settings(config)
        if run is None:  # one that goes on has them in its checkpoint
            check_weights(settings)
        return cls(settings, keeps_precision=run is not None, chooses_sync=automatic)

    @classmethod
    def resumed(cls, plan_file: Path, began: Config, given: Mapping[str, Any]) -> Config:
        planned = recorded(plan_file, Decided)
        began = with_trainer(began, precision=planned["precision"])
        if asks_auto(began):
            began = with_trainer(began, sync=planned["sync"])
        return resumed(began, given)

    @classmethod
    def unnamed_code(cls, began: Config, given: Mapping[str, Any]) -> list[str]:
        unnamed, options = [], for_trainer(began)
        model, file = str(options.get("model")), options.get("weights")
        if ":" in model and model != DEFAULT_MODEL and "model" not in given:
            unnamed.append(as_typed("MODEL", model))
        if file and "weights" not in config_of(given).trainer:  # a file of this machine is sent
            unnamed.append(typed("weights", file))
        return unnamed

    def check(self, config: Config, hosts: Sequence[Host]) -> list[str]:
        balancing.check(config.balance, len(hosts))
        return []

    # ---- while the machines are looked at ----

    @property
    def name(self) -> str:
        return self.settings.model

    @property
    def device(self) -> str:
        return self.settings.device

    @property
    def parallel(self) -> str:
        return self.settings.parallel

    @property
    def packages(self) -> list[str]:
        model = self.settings.model
        module = [] if models.is_path(model) or ":" not in model else [re.split("[.:]", model)[0]]
        return [*models.packages(model), *module]

    def question(self, is_first: bool) -> dict[str, Any]:
        # One machine is enough: a torchvision that differs between machines is reported.
        rule = models.rule(self.name) if is_first else None
        return {"models": rule, "distributions": MOST_PACKAGES if self.wants_timm else 0}

    @property
    def wants_timm(self) -> bool:
        return self.settings.model.startswith(TIMM)

    def of_checkout(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.code().names, tuple(models.packages(self.name))

    def for_machines(self, machines: OpenMachines) -> Trainer:
        """With the layer of timm, where a machine lacks it."""
        lacking = any("timm" in machines.facts[host.name].missing for host in machines.hosts)
        if not self.wants_timm or not lacking or judge.python(machines):
            return self
        from launcher.plan import layer, requirements  # which other models do without

        timm = requirements.read_requirements(TIMM_PACKAGES)
        return replace(self, layer=layer.layer_for_machines(timm, machines))

    def problems(
        self,
        machines: OpenMachines,
        parts: Mapping[str, NodeDevices],
        control: Control,
        others: Sequence[Problem],
    ) -> list[Problem]:
        wrong = judge.model(machines, self.settings.model, control)
        wrong += judge.layer(machines, self.layer)
        wrong += judge.python(machines) if self.wants_timm else []
        wrong += judge.batch(machines, self.settings)
        if not any(problem.blocks is ALWAYS for problem in (*others, *wrong)):
            wrong += judge.refusal("precision", lambda: self._precision(parts, machines))
        return wrong

    def decide(
        self,
        config: Config,
        everybody: Sequence[Host],
        machines: OpenMachines,
        before: Mapping[str, int],
        terminal: Terminal,
    ) -> tuple[Config, Trainer]:
        own = self.for_machines(machines)
        if trial := models.Trial.of(self.settings, ranks_share=len(everybody) > 1):
            _try_out(trial, machines, own.layer, terminal)
        hosts = machines.hosts
        level, kind = self._level(machines)
        terminal.say(f"precision {level.name}: {level.why}")
        file = weights_by_name(self.settings, terminal)
        settings = replace(self.settings, device=kind, precision=level.name, weights=file)
        sync_why = AS_ASKED
        if self.chooses_sync:
            settings, sync_why = choose_sync(settings, hosts, terminal)
            config = with_trainer(config, sync=settings.sync)
        decided = replace(
            own,
            settings=settings,
            keeps_precision=True,
            precision_why=level.why,
            sync_why=sync_why,
        )
        if balance := Balance.before(before, hosts):
            predicted = predictions.predicted(settings, hosts)
            decided = replace(decided, balance=balance, predicted=predicted)
        else:
            decided = decided.for_attempt(config, everybody, machines, terminal)
        return with_trainer(config, precision=settings.precision), decided

    def _level(self, machines: OpenMachines) -> tuple[Level, str]:
        """The precision and the device that are decided once for the run. Raises UserError."""
        parts = devices.assign(machines.hosts, machines.facts, self)
        level = self._precision(parts, machines)
        if self.keeps_precision and level.why == AS_ASKED:
            level = level._replace(why="as the run began")
        return level, parts[machines.hosts[0].name].kind

    def _precision(self, parts: Mapping[str, NodeDevices], machines: OpenMachines) -> Level:
        return devices.precision(parts, machines, self.settings, self.keeps_precision)

    def for_attempt(
        self,
        config: Config,
        everybody: Sequence[Host],
        machines: OpenMachines,
        terminal: Terminal,
    ) -> Trainer:
        """With the parts of a step's images, said where they differ."""
        hosts, facts, settings = machines.hosts, machines.facts, self.settings
        balance = balancing.decide(
            config.balance,
            everybody,
            hosts,
            facts,
            lambda: predictions.own_speeds(settings, hosts),
        )
        ranks = [part.processes for part in devices.assign(hosts, facts, self).values()]
        if line := balancing.told(balance, hosts, ranks, settings.per_node_batch_size):
            terminal.say(line)
        return replace(self, balance=balance, predicted=predictions.predicted(settings, hosts))

    # ---- for a plan ----

    def warnings(self, hosts: Sequence[Host]) -> list[str]:
        settings = self.settings
        strategy = strategies.parse(settings.sync)
        warm_up = settings.phases.all_warm_up(strategy) if len(hosts) > 1 else None
        slower = predictions.slower_than_one(settings, list(hosts))
        return [text for text in (warm_up, slower) if text]

    def code(self) -> Code:
        return code.current(models.folder(self.settings.model))

    def plan_fields(
        self,
        config: Config,
        hosts: Sequence[Host],
        counts: Sequence[int],
        first: NodeFacts,
        used_ports: Collection[int],
    ) -> dict[str, Any]:
        settings, weights_of = self.settings, self.balance.of(hosts)
        check_batch([host.name for host in hosts], counts, settings.per_node_batch_size)
        return {
            "model": settings.model,
            "epochs": settings.epochs,
            "sync": settings.sync,
            "sync_why": self.sync_why,
            "precision": settings.precision,
            "precision_why": self.precision_why,
            "balance": {host.name: weight for host, weight in zip(hosts, weights_of)},
            "balance_why": self.balance.why,
            "predicted": self.predicted,
        }

    def plan_lines(self, plan: Plan) -> list[str]:
        parts = ":".join(map(str, plan.balance.values())) or OFF
        return [
            f"precision {plan.precision}: {plan.precision_why}",
            f"sync {plan.sync}: {plan.sync_why}",
            f"balance {parts}: {plan.balance_why}",
        ]

    def command(self, plan: Plan, part: NodePart, last: str | None) -> Command:
        given: dict[str, Any] = {"data": part.data} if part.data else {}
        given.update(output=part.output, **for_trainer(plan.options))
        for name in RESULTS:
            if given.get(name):
                given[name] = f"{part.output}/{RESULTS_FOLDER}/{given[name]}"
        if file := weights_of(self.settings):
            given["weights"] = f"{part.node_dir}/{file.folder}/{file.names[0]}"
        given["device"] = part.device
        if plan.balance:
            given["balance"] = list(plan.balance.values())
        if plan.attempt > 1:
            given["resume"] = "auto"
        env = {"TANDEM_MODEL_FOLDER": OWN} if models.folder(self.settings.model) else {}
        if self.layer:
            paths = [f"{part.node_dir}/{self.layer.folder}", part.env.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = ":".join(filter(None, paths))
        return Command(("-m", "trainer", "--config", json.dumps(given)), env=env)

    # ---- for an attempt ----

    def find_checkpoint(self, site: RunSite) -> str | None:
        return None  # the trainer finds the newest one of its machines, and distributes it

    def prepare_machines(self, site: RunSite, plan: Plan) -> None:
        before = site.attempts.list[-1]["nodes"] if site.attempts.list else []
        if before and not _hand_on(site, plan, before):
            set_aside(site, plan, before)

    def deliveries(self) -> list[Delivery]:
        own = self.code()
        sent = [Delivery(own, f"code {own.sha256[:12]} goes to")]
        if file := weights_of(self.settings):
            name = relative(file.tree) / file.names[0]
            sent.append(Delivery(file, f"weights {name} go to"))
        if self.layer:
            sent.append(Delivery(self.layer.code(), f"packages {self.layer.summary()} go to"))
        return sent

    def when_stopped(self, seconds: int) -> str:
        return "save and exit"

    def hint(self, error: str, host: str) -> str | None:
        return None  # the trainer says itself what to do

    # ---- after the last attempt ----

    def collect(self, site: RunSite, there: dict[str, str], most: int) -> Collected:
        from launcher import collect
        from launcher.watch.attempts import not_copied

        nodes, attempts, whole = site.machines.nodes, site.attempts, True
        held = collect.checkpoints(nodes, there)
        try:
            said = collect.bring(nodes, there, attempts.list, site.folder, most)
            paths, more = collect.best_and_last(held, nodes, there, site.folder)
            said += [*more, *(f"checkpoint {relative(path)}" for path in paths)]
            if attempts.status == "finished":
                first, files = attempts.list[-1]["nodes"][0], results(site.needs.run_config)
                more, whole = collect.bring_results(nodes, there, first, files, site.folder)
                said += more
        except collect.Unwritable as error:
            said, whole = [not_copied(site.folder, error)], False
        saved = any(map(collect.newest, held.values())) or attempts.saved(site.folder)
        return Collected(said, saved, whole)


def asks_auto(config: Config) -> bool:
    """Whether the last --sync that the trainer would read is `auto`. Raises UserError."""
    return bool(for_trainer(config).get("sync") == strategies.AUTO)


def choose_sync(
    settings: TrainerOptions, hosts: list[Host], terminal: Terminal
) -> tuple[TrainerOptions, str]:
    """The same with the strategy that `auto` becomes, and why."""
    nodes, size = len(hosts), settings.image_size
    prediction = predictions.foreseen(settings, hosts)
    measure = verbs.line(
        "plan",
        NODES=nodes,
        MODEL=settings.model,
        BATCH=settings.per_node_batch_size,
        PRECISION=settings.precision,
        ARGS=f"--image_size {size}" if size else None,
    )
    speeds = prediction.speeds if prediction else {}
    choice = predictions.choose_sync(speeds, nodes, measure, settings.family)
    terminal.say(f"sync {choice.sync}: {choice.why}")
    return replace(settings, sync=choice.sync), choice.why


def _try_out(
    trial: models.Trial, machines: OpenMachines, packages: Layer | None, terminal: Terminal
) -> None:
    """Build one's own model on the first machine. Raises UserError."""
    first = machines.hosts[0]
    folder = machines.facts[first.name].absolute(first.node_dir)
    with waiting(terminal, f"building the model once on {first.name}"):
        notes = trial.on(machines.nodes[first.name], folder, packages)
    for note in notes:
        terminal.say(note)


def _hand_on(site: RunSite, plan: Plan, before: list[str]) -> bool:
    """Give node 0 the newest checkpoint of the last attempt, where none of its machines goes on,
    but their owners have them: by way of here. Returns whether that was so, and done."""
    from launcher import collect, look
    from launcher.outputs import put
    from launcher.watch.attempts import not_copied

    stay = {host.name for host in site.machines.hosts} & set(before)
    hosts = [host for host in site.hosts if host.name in before]
    if stay or not any(host.owner.signs for host in hosts):
        return False
    first = plan.nodes[0]

    def give(file: Path, size: int, name: str) -> None:
        set_aside(site, plan, before, handed=True)
        folder = f"{first.output}/checkpoints/{first.host}"
        put(site.machines.nodes[first.host], file, size, folder, name)

    with waiting(site.terminal, f"giving the newest checkpoint to {first.host}"):
        left = look.open_and_probe(hosts, site.needs, without_missing=True)
        try:
            there = folders_of(left, site.folder.name)
            return collect.hand_on(left.nodes, there, site.folder, give)
        except collect.Unwritable as error:
            raise UserError(not_copied(site.folder, error)) from None
        finally:
            left.close()


def set_aside(site: RunSite, plan: Plan, before: list[str], handed: bool = False) -> None:
    """Hide from the trainer the checkpoints of machines that have come back.

    `before` names the machines of the attempt before. What others hold may be newer than the point
    from which those went on without them: resuming from it would skip the images that those have
    trained on since. Where none of them goes on, all keep what they hold, unless the newest is
    `handed` on to them. Raises MachineError.
    """
    machines = site.machines
    if not handed and not any(host.name in before for host in machines.hosts):
        return
    move = 'test ! -e "$1" || { mkdir -p "$2" && mv "$1" "$2/before-attempt-$3"; }'
    for host in machines.hosts:
        if host.name in before:
            continue
        output = site.folders[host.name]
        held, aside = f"{output}/checkpoints/{host.name}", f"{output}/abandoned/{host.name}"
        argv = ["sh", "-c", move, "sh", held, aside, str(plan.attempt)]
        _, said, status = talk(machines.nodes[host.name].start(argv), b"", 20.0)
        if status != 0:
            message = f"{host.label()}: {held} could not be moved to {aside}: {said}"
            raise MachineError([host.name], message)


# ---- a file of weights on this machine (WEIGHTS=), which every machine is sent ----


def weights_of(settings: TrainerOptions) -> Code | None:
    """What is sent of the file; None where it is not on this machine, since it may be on the
    others. Raises UserError."""
    if not settings.weights:
        return None
    return _weights_here(settings.weights)


@lru_cache(maxsize=1)  # a later attempt sends what the first one sent
def _weights_here(path: str) -> Code | None:
    file = path_of("WEIGHTS", path)
    if not file.is_file():
        return None
    try:
        sha256 = tree_sha256(file.parent, [file.name])
    except OSError as error:
        raise UserError(f"WEIGHTS={path}: cannot be read: {error.strerror}.") from None
    return Code((file.name,), sha256 or "", None, "", file.parent, WEIGHTS)


def weights_by_name(settings: TrainerOptions, terminal: Terminal) -> str | None:
    """The weights as a file, fetched where they have a name. Raises UserError."""
    if not (settings.weights or "").startswith(NAMED):
        return settings.weights
    from launcher.plan import pretrained  # which needs what speaks HTTP

    wanted = pretrained.of(settings)
    if (kept := wanted.kept()) is None:
        with waiting(terminal, f"fetching {wanted.address}"):
            kept = pretrained.fetch(wanted)
    return str(kept)


def gather(config: Config, terminal: Terminal) -> list[Path]:
    """Gather timm for the machines and weights that have a name into the bundle; returns where they
    are. Raises UserError."""
    from launcher.plan import layer, pretrained, requirements

    workload, hosts, found = Trainer.read(config), inventory.hosts_of(config), list[Path]()
    if (workload.settings.weights or "").startswith(NAMED):
        wanted = pretrained.of(workload.settings)
        with waiting(terminal, f"fetching {wanted.address}"):
            found.append(pretrained.fetch(wanted, pretrained.BUNDLE))
    if workload.wants_timm:
        with waiting(terminal, f"asking {pluralize(len(hosts), 'machine')} what is there"):
            machines = look.open_and_probe(hosts, Requirements(config, workload))
        try:
            if wrong := judge.python(machines):
                raise Refused(wrong)
            with waiting(terminal, "gathering timm"):
                timm = requirements.read_requirements(TIMM_PACKAGES)
                found.append(layer.bundle_layer(timm, layer.environment_of(machines)))
        finally:
            machines.close()
    if not found:
        raise UserError(
            "there is nothing to gather: give MODEL=timm:NAME, WEIGHTS=torchvision:NAME or "
            "WEIGHTS=timm:TAG."
        )
    return found


def check_weights(settings: TrainerOptions) -> None:
    """Raise UserError for a file that can be nowhere: on other machines only a path from / leads
    anywhere."""
    path = settings.weights
    if path and path.startswith(NAMED):
        from launcher.plan import pretrained

        pretrained.of(settings)
        return
    if path and not weights_of(settings) and not Path(path).is_absolute():
        raise UserError(
            f"WEIGHTS={path}: there is no such file here: correct the path, or give one from / "
            "that leads to the file on every machine."
        )
