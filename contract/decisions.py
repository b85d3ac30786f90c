"""What the ranks of a run decide together when they start: the strategy that SYNC=auto becomes, and
the batch of each machine (BALANCE=). The rule for precisions is contract/precisions.py.

The ranks call these functions with the devices that they see and with one file of measurements,
which the launcher sends with every run. `make dry-run` calls the same functions with the machines'
facts, and prints what the ranks will decide.
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
    """What the launcher knows of a run's machines before the run starts.

    `hosts`: the machine that each node runs on, by the node's name, in the order of the nodes.
    `speeds`: samples/s of a node by itself, if they were measured.
    `prediction`: what `make plan` wrote for this model and number of nodes, as in its file.
    `measure`: a sentence with the command that would make such a prediction.
    `balance`: auto, off, or the weights that the user gave, by the node's name.
    `decided`: what an earlier attempt of this run decided: `precision`, `sync`, and `balance`, the
    weights by the node's name.
    """

    hosts: Mapping[str, str] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    prediction: Mapping[str, Any] | None = None
    measure: str = "`make plan` makes one"
    balance: str | Mapping[str, int] = OFF
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
    """What a run asks for, as far as the ranks decide by it. `precision` and `sync` may be auto."""

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
        """Return by which predictions and measurements of such a run are found."""
        return runs.Setting(self.model, self.batch, self.image_size, precision, tuple(hosts))


@dataclass(frozen=True)
class Choice:
    """A strategy of --sync; `why` is one clause for people."""

    sync: str
    why: str


@dataclass(frozen=True)
class Balance:
    """Weights by the node's name, empty for equal batches; `why` is one clause for people."""

    weights: Mapping[str, int] = field(default_factory=dict)
    why: str = "equal batches"


@dataclass(frozen=True)
class Decisions:
    """What is decided for an attempt. `prediction`: what `make plan` said of such a run."""

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
    # What an earlier attempt decided holds even if that attempt saved nothing.
    kept = {**stored, **{name: str(value) for name, value in measured.decided.items() if value}}
    before = kept.get("precision", "") if request.precision == AUTO else ""
    before = before if before in precisions.BITS else ""
    asked = before or request.precision
    level = precisions.resolve(asked, devices, request.emulate, bool(before))
    if before and level.why == AS_ASKED:
        level = level._replace(why="as this run began")

    nodes = len(measured.hosts) or len({device.host for device in devices})
    setting = request.setting(list(measured.hosts), level.name)
    prediction = find_prediction(measured, setting, request.phases)
    choice = Choice(request.sync, AS_ASKED)
    if request.sync == AUTO:
        choice = Choice(kept.get("sync", ""), "as this run began")
        if not strategies.known(choice.sync):
            choice = choose_sync(prediction, nodes, request.family, measured.measure)
    return Decisions(level, choice, choose_balance(measured), prediction)


# ---- BALANCE= ----


def read_balance(asked: str, names: Sequence[str]) -> str | dict[str, int]:
    """Return what BALANCE= asks for: auto, off, or the weight of each of these nodes. Raises
    UserError."""
    if asked in (AUTO, OFF):
        return asked
    if not re.fullmatch(r"[0-9]{1,7}(:[0-9]{1,7})*", asked):
        raise UserError(
            f"BALANCE={asked}: give {AUTO}, {OFF}, or a number for each machine, node 0 first, "
            "like 3:2:2:1."
        )
    weights = [int(number) for number in asked.split(":")]
    if len(weights) != len(names):
        raise UserError(
            f"BALANCE={asked} has {len(weights)} numbers, and the run has {len(names)} machines: "
            "give one for each."
        )
    if not all(1 <= weight <= LARGEST_WEIGHT for weight in weights):
        raise UserError(f"BALANCE={asked}: give numbers from 1 to {LARGEST_WEIGHT:,}.")
    return dict(zip(names, weights))


def choose_balance(measured: Measurements) -> Balance:
    """Choose the weights of the nodes of an attempt.

    With equal batches every step lasts as long as that of the slowest machine. With batches in
    proportion to the machines' speeds all of them finish at the same time. The global batch stays
    the same, so what is learned does not change.
    """
    names = list(measured.hosts)
    if len(names) < 2:
        return Balance(why="one machine has the whole batch")
    if isinstance(measured.balance, Mapping):
        return Balance({name: measured.balance[name] for name in names}, AS_ASKED)
    if measured.balance == OFF:
        return Balance(why="equal batches, as asked")
    # On the same machines a run that continues keeps its batches, and so its results stay bit for
    # bit the same.
    before = measured.decided.get("balance")
    if before is not None and set(before) == set(names):
        return Balance(before if len(set(before.values())) > 1 else {}, "as before")
    if len(set(measured.hosts.values())) < len(names):
        return Balance(why="equal batches: nodes of one machine share its speed")
    unknown = [name for name in names if name not in measured.speeds]
    if unknown:
        return Balance(
            why=f"equal batches: neither `make plan` nor a run of the last {runs.DAYS} days has "
            f"measured {', '.join(unknown)} with this model"
        )
    speeds = {name: measured.speeds[name] for name in names}
    fastest, slowest = max(names, key=speeds.__getitem__), min(names, key=speeds.__getitem__)
    ratio = speeds[fastest] / speeds[slowest]
    weights = split.weights_of(list(speeds.values()))
    if not weights:
        return Balance(why=f"equal batches: the measured speeds differ by {ratio - 1:.0%}")
    why = f"{fastest} was measured {ratio:.1f} times as fast as {slowest}"
    return Balance(dict(zip(names, weights)), why)


# ---- SYNC=auto ----


def find_prediction(
    measured: Measurements, setting: runs.Setting, phases: strategies.Phases
) -> runs.Prediction | None:
    """Return what `make plan` predicted for such a run: images/s over the whole run, its warm-up
    included. None if there is no prediction that holds for it."""
    nodes = len(setting.machines)
    found = runs.prediction_in(measured.prediction, setting, nodes)
    if found is None:
        return None
    # The prediction is of steps after the warm-up, in which sums are exact. A strategy without a
    # predicted exact sum beside it is left out: nobody knows what its warm-up costs.
    speeds = {}
    for (spec, count), speed in found.speeds.items():
        strategy, exact = strategies.known(spec), found.speeds.get((strategies.EXACT, count))
        if strategy and speed > 0 and exact:
            speeds[spec, count] = 1 / phases.mean(strategy, 1 / speed, 1 / exact)
    return runs.Prediction(found.made_unix, speeds)


def choose_sync(
    prediction: runs.Prediction | None, nodes: int, family: str, measure: str
) -> Choice:
    """Choose the strategy of SYNC=auto: of those that are exact, or labelled safe for this family
    of optimizers, the most exact one within 5 % of the fastest. `measure`: the command by which
    `make plan` would predict such a run."""
    exact = strategies.EXACT
    if nodes == 1:
        return Choice(exact, "one machine waits for no other")
    speeds = prediction.speeds if prediction else {}
    if (exact, nodes) not in speeds:
        return Choice(exact, f"exact, because there is no prediction of such a run: {measure}")
    spec, fastest = most_exact(speeds, nodes, family)
    if fastest == exact:
        whose = " with Adam" if family == prices.ADAM else ""
        return Choice(exact, f"`make plan` predicts no faster strategy that is safe{whose}")
    figures = ", ".join(
        f"{speeds[other, nodes]:.0f} with {other}"
        for other in dict.fromkeys((fastest, exact))
        if other != spec
    )
    figures = f"{speeds[spec, nodes]:.0f} images/s by `make plan`, {figures}"
    if spec != fastest:
        return Choice(spec, f"the most exact of those that are nearly the fastest: {figures}")
    tasks = prices.tasks(strategies.parse(spec), family)
    return Choice(spec, f"{figures}; safe for accuracy on {tasks}")


def most_exact(speeds: Mapping[tuple[str, int], float], nodes: int, family: str) -> tuple[str, str]:
    """Return the strategy to use by the images/s of each (strategy, number of machines), among
    those that are exact or safe for this family of optimizers; and the fastest of them."""
    covered = {
        spec: 1 / speed
        for (spec, count), speed in speeds.items()
        if count == nodes and prices.is_acceptable(strategies.parse(spec), family)
    }
    if not covered:
        return strategies.EXACT, strategies.EXACT
    return prices.most_exact(covered, strategies.parse), min(covered, key=covered.__getitem__)


def warn_if_slower(
    prediction: runs.Prediction | None, nodes: int, sync: str, family: str
) -> str | None:
    """Return a sentence, with what would help, if `make plan` predicts the run to be slower than
    one machine; None if it does not, or predicted nothing."""
    if prediction is None or nodes == 1:
        return None
    spec = strategies.parse(sync).spec
    alone, all_nodes = prediction.speed(spec, 1), prediction.speed(spec, nodes)
    if alone is None or all_nodes is None or all_nodes >= alone:
        return None
    better, _ = most_exact(prediction.speeds, nodes, family)
    speed = prediction.speed(better, nodes) or 0.0
    remedy = f"SYNC={better} would give {speed:.0f}" if speed > alone else "train on one machine"
    return (
        f"`make plan` predicts that {nodes} machines with SYNC={spec} are slower than one: "
        f"{all_nodes:.0f} against {alone:.0f} images/s: {remedy} (docs/slow-networks.md)"
    )
