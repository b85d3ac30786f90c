"""Decide what the ranks of a run agree on when they start: the precision, the strategy (SYNC=auto),
and each machine's batch (BALANCE=). The rule for precisions is in contract/precisions.py. Read
`decide` first.

The ranks call these functions with the devices that they see, and with a file of measurements that
the launcher sends with every run. `make dry-run` calls the same functions with the machines' facts,
and prints what the ranks will decide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from contract import precisions, prices, runs, split, strategies
from contract.errors import UserError
from contract.text import read_text

# The variable of a rank's environment with the path of measured.json, which has Measurements.
MEASURED_VARIABLE = "TANDEM_MEASURED"
AUTO, OFF = "auto", "off"  # values of BALANCE=
LARGEST_TYPED_WEIGHT = 1_000_000  # in BALANCE=
# Reasons of decisions that the user made, and that an earlier attempt of the run made.
AS_ASKED, AS_BEGUN = "as asked", "as this run began"


@dataclass(frozen=True)
class Measurements:
    """Facts that the launcher knows about a run's machines before the run starts.

    `hosts`: {node: the machine that it runs on}, in the order of the nodes.
    `speeds`: {node: samples/s while only this node trains}, without nodes that were not measured.
    `prediction`: the content of the file that `make plan` wrote for this model and number of nodes.
    `prediction_advice`: a clause with the command that would make such a prediction.
    `balance`: auto, off, or {node: weight} as the user typed it. `is_typed`: the user typed
    BALANCE=.
    `ranks`: {node: its number of ranks} in the order of the nodes, if the run has a script.
    `unknown`: a clause for people about nodes of unknown speed; {} stands for their names.
    `decided`: the decisions of an earlier attempt of this run, by the names precision, sync and
    balance.
    """

    hosts: Mapping[str, str] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    prediction: Mapping[str, Any] | None = None
    prediction_advice: str = "`make plan` makes one"
    balance: str | Mapping[str, int] = OFF
    is_typed: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    unknown: str = (
        f"in the last {runs.DAYS} days, neither `make plan` nor a run has measured {{}} with this "
        "model"
    )
    decided: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the content of measured.json, a file that launcher/node/guard.py writes for the
        ranks of its machine."""
        return asdict(self)


def read_measurements(environ: Mapping[str, str]) -> Measurements:
    """Read the file that the launcher sent. Returns Measurements() if there is no file, as under
    plain torchrun. Raises UserError for a damaged file."""
    path = environ.get(MEASURED_VARIABLE)
    if not path:
        return Measurements()
    try:
        return Measurements(**json.loads(read_text(path)))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}, which the launcher sent, cannot be read: {error}.") from None


@dataclass(frozen=True)
class Request:
    """The options of a run that its decisions depend on. `precision` and `sync` may be auto."""

    model: str
    batch: int  # of a node
    image_size: int | None
    precision: str
    emulate: bool
    sync: str
    phases: strategies.Phases
    optimizer: str
    family: str  # of the optimizer

    def make_setting(self, nodes: Sequence[str], precision: str) -> runs.Setting:
        """Return the settings to which a prediction or a measurement must apply for such a run.
        `nodes`: their names in the inventory, node 0 first."""
        return runs.Setting(self.model, self.batch, self.image_size, precision, tuple(nodes))


@dataclass(frozen=True)
class Choice:
    """The chosen strategy. `reason`: one clause for people."""

    sync: str
    reason: str


@dataclass(frozen=True)
class Balance:
    """The chosen batches. `weights`: {node: weight}, {} for equal batches. `reason`: a clause."""

    weights: Mapping[str, int] = field(default_factory=dict)
    reason: str = "equal batches"


@dataclass(frozen=True)
class Decisions:
    """The decisions for an attempt. `prediction`: of `make plan` for such a run, or None."""

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
    """Decide for ranks on these devices. `stored`: `precision` and `sync` of the checkpoint from
    which the run continues. Raises UserError for a precision that a device lacks."""
    # The decisions of an earlier attempt hold even if that attempt saved no checkpoint, so that the
    # figures of a run's attempts are comparable. They only replace `auto`, not a typed value.
    # (`choose_balance` reads the third decision, the balance.)
    earlier = dict(stored)
    for name in ("precision", "sync"):
        if measured.decided.get(name):
            earlier[name] = str(measured.decided[name])
    precision, is_earlier = request.precision, False
    if precision == AUTO and earlier.get("precision") in precisions.BITS:
        precision, is_earlier = earlier["precision"], True
    level = precisions.resolve(precision, devices, request.emulate, is_earlier)
    # "as asked" is wrong for an earlier attempt's choice. A warning about fp16, the other reason
    # that `resolve` gives, stays.
    if is_earlier and level.reason == AS_ASKED:
        level = level._replace(reason=AS_BEGUN)

    # Without the launcher's file, as under plain torchrun, the devices show how many machines run.
    nodes = len(measured.hosts) or len({device.host for device in devices})
    setting = request.make_setting(list(measured.hosts), level.name)
    prediction = find_prediction(measured, setting, request.phases)
    choice = Choice(request.sync, AS_ASKED)
    if request.sync == AUTO:
        choice = Choice(earlier.get("sync", ""), AS_BEGUN)
        # A checkpoint of another version may name a strategy that this version does not have.
        if not strategies.parse_or_none(choice.sync):
            choice = choose_sync(prediction, nodes, request.family, measured.prediction_advice)
    return Decisions(level, choice, choose_balance(measured), prediction)


# ---- BALANCE= ----


def read_balance(typed: str, names: Sequence[str]) -> str | dict[str, int]:
    """Return the value of BALANCE=: auto, off, or {node: weight} of these nodes. Raises
    UserError."""
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
    # The pattern above also allows 0, and numbers above LARGEST_TYPED_WEIGHT.
    if not all(1 <= weight <= LARGEST_TYPED_WEIGHT for weight in weights):
        raise UserError(f"BALANCE={typed}: type numbers from 1 to {LARGEST_TYPED_WEIGHT:,}.")
    return dict(zip(names, weights))


def choose_balance(measured: Measurements) -> Balance:
    """Choose the weights of the nodes of an attempt.

    With equal batches every step lasts as long as the slowest machine needs. With batches in
    proportion to the speeds, all machines finish at the same time. The global batch stays the same,
    so the model learns the same.
    """
    names = list(measured.hosts)
    if len(names) < 2:
        return Balance(reason="one machine has the whole batch")
    if isinstance(measured.balance, Mapping):
        return Balance({name: measured.balance[name] for name in names}, AS_ASKED)
    if measured.balance == OFF:
        return Balance(reason="equal batches, as asked")
    # On the same machines a resumed run keeps its batches, so that its results are bit for bit
    # those of a run without a break.
    earlier = measured.decided.get("balance")
    if earlier is not None and set(earlier) == set(names):
        # Equal weights are recorded as 1 for each node, but Balance has {} for equal batches.
        return Balance(earlier if len(set(earlier.values())) > 1 else {}, "as before")
    # Speeds were measured one node at a time, so they do not apply to nodes that share a machine.
    if len(set(measured.hosts.values())) < len(names):
        return Balance(reason="equal batches: the nodes are on one machine")
    # If the speed of one node is unknown, no proportion is known.
    unmeasured = [name for name in names if name not in measured.speeds]
    if unmeasured:
        reason = measured.unknown.replace("{}", ", ".join(unmeasured))
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
    """Return the prediction of `make plan` for a run with this setting, or None if there is none.
    The speeds in the result are images/s over the whole run, warm-up included."""
    nodes = len(setting.machines)
    prediction = runs.prediction_in(measured.prediction, setting, nodes)
    if prediction is None:
        return None
    # `make plan` predicts the speed after the warm-up. The sums of the warm-up are exact, so its
    # speed is that of EXACT. If that speed was not predicted, the strategy is omitted.
    speeds = {}
    for (spec, count), speed in prediction.speeds.items():
        strategy = strategies.parse_or_none(spec)
        exact_speed = prediction.speeds.get((strategies.EXACT, count))
        if strategy and speed > 0 and exact_speed:
            speeds[spec, count] = 1 / phases.mean(strategy, 1 / speed, 1 / exact_speed)
    return runs.Prediction(prediction.made_unix, speeds)


def choose_sync(
    prediction: runs.Prediction | None, nodes: int, family: str, prediction_advice: str
) -> Choice:
    """Choose the strategy if SYNC=auto: the most exact of the acceptable strategies within 5 % of
    the fastest (prices.TOLERANCE). `prediction_advice`: the clause of
    Measurements."""
    exact = strategies.EXACT
    if nodes == 1:
        return Choice(exact, "one machine waits for no other")
    speeds = prediction.speeds if prediction else {}
    if (exact, nodes) not in speeds:
        return Choice(
            exact, f"exact, because Tandem has no prediction for such a run: {prediction_advice}"
        )
    acceptable = find_acceptable(speeds, nodes, family)
    spec, fastest = acceptable.most_exact, acceptable.fastest
    if fastest == exact:  # then `spec` is the exact strategy, too
        with_text = " with Adam" if family == prices.ADAM else ""
        return Choice(exact, f"`make plan` predicts that no safe strategy{with_text} is faster")
    figures = f"{speeds[spec, nodes]:.0f} images/s by `make plan`"
    for name in (fastest, exact):
        if name != spec:
            figures += f", {speeds[name, nodes]:.0f} with {name}"
    if spec != fastest:
        return Choice(spec, f"the most exact strategy within 5 % of the fastest: {figures}")
    tasks = prices.tasks(strategies.parse(spec), family)
    return Choice(spec, f"{figures}; safe for accuracy on {tasks}")


class Acceptable(NamedTuple):
    """Hold two acceptable strategies. `most_exact`: the most exact of those that are nearly as fast
    as the `fastest`."""

    most_exact: str
    fastest: str


def find_acceptable(speeds: Mapping[tuple[str, int], float], nodes: int, family: str) -> Acceptable:
    """Return the best of the acceptable strategies, which are exact, or labelled safe for this
    family of optimizers. `speeds`: images/s by (strategy, number of machines)."""
    seconds_per_image = {
        spec: 1 / speed
        for (spec, count), speed in speeds.items()
        if count == nodes and prices.is_acceptable(strategies.parse(spec), family)
    }
    if not seconds_per_image:
        return Acceptable(strategies.EXACT, strategies.EXACT)
    return Acceptable(
        most_exact=prices.most_exact(seconds_per_image, strategies.parse),
        fastest=min(seconds_per_image, key=seconds_per_image.__getitem__),
    )


def warn_if_slower(
    prediction: runs.Prediction | None, nodes: int, sync: str, family: str
) -> str | None:
    """Return a sentence with a remedy if `make plan` predicts that the run is slower than one
    machine. Returns None otherwise, and without a prediction."""
    if prediction is None or nodes == 1:
        return None
    spec = strategies.parse(sync).spec
    single_speed, speed = prediction.speed(spec, 1), prediction.speed(spec, nodes)
    if single_speed is None or speed is None or speed >= single_speed:
        return None
    better = find_acceptable(prediction.speeds, nodes, family).most_exact
    better_speed = prediction.speed(better, nodes) or 0.0  # 0 if this number was not predicted
    remedy = "train on one machine"
    if better_speed > single_speed:
        remedy = f"SYNC={better} would give {better_speed:.0f}"
    return (
        f"`make plan` predicts that {nodes} machines with SYNC={spec} are slower than one: "
        f"{speed:.0f} against {single_speed:.0f} images/s: {remedy} (docs/slow-networks.md)"
    )
