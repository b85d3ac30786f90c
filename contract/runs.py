"""The names of runs, and what `make plan` predicted of the next one: its file, and the rule by
which that holds for a run.

The report writes the file, and the launcher reads it before a run: to warn of one that is slower
than one machine, for SYNC=auto, and to show the prediction beside what came true.
"""

from __future__ import annotations

import calendar
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contract.text import read_text

# Of what a run records (docs/run-directory.md). It grows where runs of before could not be compared
# with runs of after: where a record lacks a setting, or means something else by it.
RECORD = 2
RUNS = "runs"  # the folder with the folders of all runs, in the checkout and on each machine
MEASURED = "measured"  # the folder below runs/ that holds what was measured without a run


def folder_on_machine(node_dir: str, run: str) -> str:
    """A run's folder on a machine whose folder for this project is `node_dir`."""
    return f"{node_dir}/{RUNS}/{run}"


def short_name(model: str) -> str:
    """A model's name in the names of recipes; for your own model, the function's."""
    return model.rpartition(":")[2]


def slug(model: str) -> str:
    """A model's name in the names of runs and files: letters, digits, - and _ of ASCII."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", short_name(model))


def run_id(model: str, nodes: int, unix: float) -> str:
    """`<UTC time>-<model>-<N>n`."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(unix))
    return f"{stamp}-{slug(model)}-{nodes}n"


def begun(run: str) -> float:
    """When a run of this name began, or was asked for."""
    return float(calendar.timegm(time.strptime(run[:16], "%Y%m%dT%H%M%SZ")))


def bump_second(run: str) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(begun(run) + 1)) + run[16:]


def may_be_a_run(name: str) -> bool:
    return bool(re.fullmatch(r"\d{8}T\d{6}Z-[A-Za-z0-9_-]+", name))


def may_be_of(run: str, model: str) -> bool:
    """Whether a run of this name trained this model, or another with the same short name."""
    return bool(re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{re.escape(slug(model))}-\d+n", run))


def prediction_path(runs: Path, model: str, nodes: int) -> Path:
    return runs / f"plan-{slug(model)}-{nodes}n.json"


DAYS = 7  # what was measured is used for so long


@dataclass(frozen=True)
class Setting:
    """What a step's time depends on. In a question None, or precision `auto`, stands for any."""

    model: str
    batch: int | None = None  # images per node and step
    image_size: int | None = None
    precision: str | None = None
    machines: tuple[str, ...] = ()  # the names in the inventory, node 0 first


def still_applies(measured: Setting, asked: Setting, nodes: int) -> bool:
    """Whether what was measured serves a run on `nodes` machines. What was measured of machines by
    themselves (`measured.machines`) holds for these alone; a run's mean step serves any."""
    return (
        measured.model == asked.model
        and asked.batch in (None, measured.batch)
        and asked.image_size in (None, measured.image_size)
        and asked.precision in (None, "auto", measured.precision)
        and (not measured.machines or measured.machines[:nodes] == asked.machines[:nodes])
    )


def is_fresh(unix: float) -> bool:
    return time.time() - unix <= DAYS * 86400


@dataclass(frozen=True)
class Prediction:
    """`speeds`: images/s of all machines together by (strategy, number of machines); one machine is
    equally fast with each strategy, and its row has the exact one's name."""

    made_unix: float
    speeds: dict[tuple[str, int], float]

    def speed(self, sync: str, nodes: int) -> float | None:
        """None where nothing was predicted of so many machines with this strategy."""
        if nodes == 1:
            return next((speed for (_, count), speed in self.speeds.items() if count == 1), None)
        return self.speeds.get((sync, nodes))


def prediction_text(
    measured: Setting,
    nodes: int,
    measured_unix: float | None,
    rows: list[dict[str, Any]],
    **more: Any,
) -> str:
    """The file. `measured_unix`: when the machines were measured by themselves; None where a run
    was measured, whose prediction counts from now. `rows` have `nodes`, `sync` and
    `images_per_second`; `more` is for people, and `prediction_in` does not read it."""
    made = time.time()
    since = {"made_unix": made, "measured_unix": measured_unix or made}
    known = {"nodes": nodes, "rows": rows}
    document = {**asdict(measured), **since, **more, **known}
    return json.dumps(document, indent=1)


# What a file of another version, or a damaged one, may raise.
UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError),
    *(AttributeError, ArithmeticError, RecursionError),
)


def read_prediction(path: Path) -> dict[str, Any] | None:
    """Return the content of a prediction's file; None if there is none, or it is damaged."""
    try:
        document = json.loads(read_text(path))
    except UNREADABLE:
        return None
    return document if isinstance(document, dict) else None


def prediction_in(
    document: Mapping[str, Any] | None, asked: Setting, nodes: int
) -> Prediction | None:
    """Return the prediction of such a run from a file's content; None if it does not hold."""
    if document is None:
        return None
    try:
        measured = Setting(
            model=document["model"],
            batch=document["batch"],
            image_size=document["image_size"],
            precision=document["precision"],
            machines=tuple(document["machines"]),
        )
        measured_unix = float(document["measured_unix"])
        if not (still_applies(measured, asked, nodes) and is_fresh(measured_unix)):
            return None
        speeds = {
            (str(row["sync"]), int(row["nodes"])): _positive(row["images_per_second"])
            for row in document["rows"]
        }
        return Prediction(_positive(document["made_unix"]), speeds)
    except UNREADABLE:
        return None


def _positive(value: object) -> float:
    """Raises ValueError for what is no number of a prediction: infinity and NaN, too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e18:
        raise ValueError("no number")
    return float(value)
