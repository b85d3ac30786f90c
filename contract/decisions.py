"""Decide what the ranks of a run agree on when they start: the strategy if SYNC=auto, and each
machine's batch (BALANCE=). The rule for precisions is in contract/precisions.py.

The ranks call these functions with the devices that they see and with one file of measurements,
which the launcher sends with every run. `make dry-run` calls the same functions with the machines'
facts, and prints what the ranks will decide. Read `decide` first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from contract import precisions, prices, runs, split, strategies
from contract.errors import UserError
from contract.text import read_text

FILE = "measured.json"  # in the run's folder on each machine
VARIABLE = "TANDEM_MEASURED"  # in a rank's environment: the path of that file
AUTO, OFF = "auto", "off"  # BALANCE=
LARGEST_WEIGHT = 1_000_000
AS_ASKED = "as asked"


@dataclass(frozen=True)
class Measurements:
    """Facts that the launcher has about a run's machines before the run starts.

    `hosts`: the machine that each node runs on, by the node's name, in the order of the nodes.
    `speeds`: samples/s of a node that trains without others, if they were measured.
    `prediction`: content of the file that `make plan` wrote for this model and number of nodes.
    `measure`: a clause with the command that would make such a prediction.
    `balance`: auto, off, or the weights that the user gave, by the node's name. `is_typed`: the
    user typed BALANCE=.
    `ranks`: for a script, the number of ranks of each node, in the order of the nodes.
    `unknown`: a clause on nodes ({}) of unknown speed.
    `decided`: decisions of an earlier attempt of this run: `precision`, `sync`, and `balance`, the
    weights by the node's name.
    """

    hosts: Mapping[str, str] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    prediction: Mapping[str, Any] | None = None
    measure: str = "`make plan` makes one"
    balance: str | Mapping[str, int] = OFF
    is_typed: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    unknown: str = (
        f"in the last {runs.DAYS} days, neither `make plan` nor a run has measured {{}} with this "
        "model"
    )
    decided: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return asdict(self)


def read_measurements(environ: Mapping[str, str]) -> Measurements:
    """Read the file that the launcher sent; empty if there is none, as under plain torchrun. Raises
    UserError for a damaged file."""
    path = environ.get(VARIABLE)
    if not path:
        return Measurements()
    try:
        return Measurements(**json.loads(read_text(path)))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}, which the launcher sent, cannot be read: {error}.") from None


@dataclass(frozen=True)
class Request:
    """Options of a run that its decisions depend on. `precision` and `sync` may be auto."""

    model: str
    batch: int  # of a node
    image_size: int | None
    precision: str
    emulate: bool
    sync: str
    phases: strategies.Phases
    optimizer: str
    family: str  # of the optimizer

    def setting(self, hosts: Sequence[str], precision: str) -> runs.Setting:
        """Return the key of predictions and measurements of such a run."""
        return runs.Setting(self.model, self.batch, self.image_size, precision, tuple(hosts))


@dataclass(frozen=True)
class Choice:
    """A strategy of --sync; `reason` is one clause for people."""

    sync: str
    reason: str


@dataclass(frozen=True)
class Balance:
    """Weights by the node's name, empty for equal batches; `reason` is one clause for people."""

    weights: Mapping[str, int] = field(default_factory=dict)
    reason: str = "equal batches"


@dataclass(frozen=True)
class Decisions:
    """The decisions for an attempt. `prediction`: what `make plan` predicted for such a run."""

    precision: precisions.Level
    sync: Choice
    balance: Balance
    prediction: runs.Prediction | None


def decide(
    request: Request,
    devices: Sequence[precisions.Device],
    measured: Measurements,
    stored: Mapping[str, str],
) -> Decisions:
    """Decide for ranks on these devices. `stored`: precision and strategy of the checkpoint that
    the run continues from. Raises UserError for a precision that a device lacks."""
    # An earlier attempt's decisions hold even if it saved nothing: figures of the run stay
    # comparable.
    earlier = {**stored, **{name: str(value) for name, value in measured.decided.items() if value}}
    precision, is_earlier = request.precision, False
    if precision == AUTO and earlier.get("precision") in precisions.BITS:
        precision, is_earlier = earlier["precision"], True
    level = precisions.resolve(precision, devices, request.emulate, is_earlier)
    if is_earlier and level.reason == AS_ASKED:
        level = level._replace(reason="as this run began")

    # Without the launcher's file, as under plain torchrun, only the devices tell the machines.
    nodes = len(measured.hosts) or len({device.host for device in devices})
    setting = request.setting(list(measured.hosts), level.name)
    prediction = find_prediction(measured, setting, request.phases)
    choice = Choice(request.sync, AS_ASKED)
    if request.sync == AUTO:
        choice = Choice(earlier.get("sync", ""), "as this run began")
        # A checkpoint of another version may name a strategy that this version does not have.
        if not strategies.parse_or_none(choice.sync):
            choice = choose_sync(prediction, nodes, request.family, measured.measure)
    return Decisions(level, choice, choose_balance(measured), prediction)


# ---- BALANCE= ----


def read_balance(typed: str, names: Sequence[str]) -> str | dict[str, int]:
    """Return the value of BALANCE=: auto, off, or the weight of each of these nodes by its name.
    Raises UserError."""
    if typed in (AUTO, OFF):
        return typed
    if not re.fullmatch(r"[0-9]{1,7}(:[0-9]{1,7})*", typed):
        raise UserError(
            f"BALANCE={typed}: type {AUTO}, {OFF}, or a number for each machine, node 0 "
            "first, such as 3:2:2:1."
        )
    weights = [int(number) for number in typed.split(":")]
    if len(weights) != len(names):
        raise UserError(
            f"BALANCE={typed} has {len(weights)} numbers, but the run has {len(names)} "
            "machines: type one number for each machine."
        )
    # The pattern above also allows 0 and 9999999.
    if not all(1 <= weight <= LARGEST_WEIGHT for weight in weights):
        raise UserError(f"BALANCE={typed}: type numbers from 1 to {LARGEST_WEIGHT:,}.")
    return dict(zip(names, weights))


def choose_balance(measured: Measurements) -> Balance:
    """Choose the weights of the nodes of an attempt.

    With equal batches every step lasts as long as that of the slowest machine. With batches in
    proportion to the machines' speeds all of them finish at the same time. The global batch stays
    the same, so what is learned does not change.
    """
    names = list(measured.hosts)
    if len(names) < 2:
        return Balance(reason="one machine has the whole batch")
    if isinstance(measured.balance, Mapping):
        return Balance({name: measured.balance[name] for name in names}, AS_ASKED)
    if measured.balance == OFF:
        return Balance(reason="equal batches, as asked")
    # On the same machines a resumed run keeps its batches, and so its results stay bit for bit the
    # same.
    earlier = measured.decided.get("balance")
    if earlier is not None and set(earlier) == set(names):
        return Balance(earlier if len(set(earlier.values())) > 1 else {}, "as before")
    # Each node's speed was measured while the other nodes of its machine were idle.
    if len(set(measured.hosts.values())) < len(names):
        return Balance(reason="equal batches: the nodes are on one machine")
    # With the speed of one machine unknown, no proportion is.
    unknown = [name for name in names if name not in measured.speeds]
    if unknown:
        reason = measured.unknown.replace("{}", ", ".join(unknown))
        return Balance(reason=f"equal batches: {reason}")
    speeds = {name: measured.speeds[name] for name in names}
    fastest, slowest = max(names, key=speeds.__getitem__), min(names, key=speeds.__getitem__)
    ratio = speeds[fastest] / speeds[slowest]
    weights = split.weights_of(list(speeds.values()))
    if not weights:
        return Balance(reason=f"equal batches: the measured speeds differ by {ratio - 1:.0%}")
    reason = f"{fastest} was measured {ratio:.1f} times as fast as {slowest}"
    return Balance(dict(zip(names, weights)), reason)


# ---- SYNC=auto ----


def find_prediction(
    measured: Measurements, setting: runs.Setting, phases: strategies.Phases
) -> runs.Prediction | None:
    """Return the prediction of `make plan` for such a run, or None if none applies to it. Its
    speeds are images/s over the whole run, warm-up included."""
    nodes = len(setting.machines)
    prediction = runs.prediction_in(measured.prediction, setting, nodes)
    if prediction is None:
        return None
    # `make plan` predicts steps after the warm-up, whose sums are exact. Without a predicted speed
    # of exact sums nobody knows what the warm-up of a strategy costs: such a strategy is omitted.
    speeds = {}
    for (spec, count), speed in prediction.speeds.items():
        strategy = strategies.parse_or_none(spec)
        exact_speed = prediction.speeds.get((strategies.EXACT, count))
        if strategy and speed > 0 and exact_speed:
            speeds[spec, count] = 1 / phases.mean(strategy, 1 / speed, 1 / exact_speed)
    return runs.Prediction(prediction.made_unix, speeds)


def choose_sync(
    prediction: runs.Prediction | None, nodes: int, family: str, measure: str
) -> Choice:
    """Choose the strategy if SYNC=auto: of those that are exact, or labelled safe for this family
    of optimizers, the most exact one within 5 % of the fastest. `measure`: the clause of
    Measurements."""
    exact = strategies.EXACT
    if nodes == 1:
        return Choice(exact, "one machine waits for no other")
    speeds = prediction.speeds if prediction else {}
    if (exact, nodes) not in speeds:
        return Choice(exact, f"exact, because Tandem has no prediction for such a run: {measure}")
    spec, fastest = most_exact(speeds, nodes, family)
    if fastest == exact:  # then `spec` is exact, too
        whose = " with Adam" if family == prices.ADAM else ""
        return Choice(exact, f"`make plan` predicts that no safe strategy{whose} is faster")
    figures = f"{speeds[spec, nodes]:.0f} images/s by `make plan`"
    for name in (fastest, exact):
        if name != spec:
            figures += f", {speeds[name, nodes]:.0f} with {name}"
    if spec != fastest:
        return Choice(spec, f"the most exact strategy within 5 % of the fastest: {figures}")
    tasks = prices.tasks(strategies.parse(spec), family)
    return Choice(spec, f"{figures}; safe for accuracy on {tasks}")


def most_exact(speeds: Mapping[tuple[str, int], float], nodes: int, family: str) -> tuple[str, str]:
    """Return the most exact of the strategies that are nearly the fastest, and the fastest one.
    Only strategies that are exact or safe for this family of optimizers count. `speeds`: images/s
    by (strategy, number of machines)."""
    seconds = {
        spec: 1 / speed
        for (spec, count), speed in speeds.items()
        if count == nodes and prices.is_acceptable(strategies.parse(spec), family)
    }
    if not seconds:
        return strategies.EXACT, strategies.EXACT
    return prices.most_exact(seconds, strategies.parse), min(seconds, key=seconds.__getitem__)


def warn_if_slower(
    prediction: runs.Prediction | None, nodes: int, sync: str, family: str
) -> str | None:
    """Return a sentence with a remedy if `make plan` predicts the run to be slower than one
    machine; None otherwise, and without a prediction."""
    if prediction is None or nodes == 1:
        return None
    spec = strategies.parse(sync).spec
    single_speed, speed = prediction.speed(spec, 1), prediction.speed(spec, nodes)
    if single_speed is None or speed is None or speed >= single_speed:
        return None
    better, _ = most_exact(prediction.speeds, nodes, family)
    better_speed = prediction.speed(better, nodes) or 0.0
    remedy = "train on one machine"
    if better_speed > single_speed:
        remedy = f"SYNC={better} would give {better_speed:.0f}"
    return (
        f"`make plan` predicts that {nodes} machines with SYNC={spec} are slower than one: "
        f"{speed:.0f} against {single_speed:.0f} images/s: {remedy} (docs/slow-networks.md)"
    )
