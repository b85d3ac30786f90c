"""Name runs, and read and write the predictions of `make plan`.

The report writes the file of a prediction. The launcher reads that file before a run, to choose the
strategy (SYNC=auto), to warn if the run will be slower than one machine, and to compare the
prediction with the result.
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

# The version of a run's records (docs/run-directory.md). A new version means that older runs cannot
# be compared with newer runs, because a setting is new or has another meaning.
RECORD = 2
TIME_FORMAT = "%Y%m%dT%H%M%SZ"  # UTC, in the names of runs
RUNS = "runs"  # the folder with the folders of all runs, in the checkout and on each machine
MEASURED = "measured"  # the folder below runs/ with measurements without a run


def folder_on_machine(node_dir: str, run: str) -> str:
    """Return a run's folder on a machine whose folder for this project is `node_dir`."""
    return f"{node_dir}/{RUNS}/{run}"


def short_name(model: str) -> str:
    """Return a model's name in the names of recipes, without its file, module or library."""
    # `resnet50` of resnet50, of path/file.py:resnet50, and of timm:resnet50.
    return model.rpartition(":")[2]


def slug(model: str) -> str:
    """Return a model's name in the names of runs and files: letters, digits, - and _ of ASCII."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", short_name(model))


def run_id(model: str, nodes: int, unix: float) -> str:
    """Return the name of a run, such as 20261130T051500Z-resnet50-4n."""
    stamp = time.strftime(TIME_FORMAT, time.gmtime(unix))
    return f"{stamp}-{slug(model)}-{nodes}n"


def begin_unix(run: str) -> float:
    """Return the time in a run's name, in Unix seconds: when the run began, or began to wait."""
    return float(calendar.timegm(time.strptime(run.partition("-")[0], TIME_FORMAT)))


def bump_second(run: str) -> str:
    """Return the name of a run that begins a second later, for use if the name is taken."""
    _, dash, model_and_nodes = run.partition("-")
    return time.strftime(TIME_FORMAT, time.gmtime(begin_unix(run) + 1)) + dash + model_and_nodes


def may_be_a_run(name: str) -> bool:
    """Return whether a folder with this name may be a run's."""
    return bool(re.fullmatch(r"\d{8}T\d{6}Z-[A-Za-z0-9_-]+", name))


def may_have_trained(run: str, model: str) -> bool:
    """Return whether a run of this name trained this model, or one with the same short name."""
    return bool(re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{re.escape(slug(model))}-\d+n", run))


def prediction_path(runs: Path, model: str, nodes: int) -> Path:
    return runs / f"plan-{slug(model)}-{nodes}n.json"


DAYS = 7  # measurements of more days ago are not used
SCRIPT_DAYS = 30  # the same for a script, which no command measures again


@dataclass(frozen=True)
class Setting:
    """Hold the settings that the time of a step depends on. In the setting of a planned run, None
    and the precision `auto` match every value."""

    model: str
    batch: int | None = None  # images per node and step
    image_size: int | None = None
    precision: str | None = None
    machines: tuple[str, ...] = ()  # the names in the inventory, node 0 first


def still_applies(measured: Setting, planned: Setting, nodes: int) -> bool:
    """Return whether measurements apply to a run on `nodes` machines. Measurements of single
    machines (`measured.machines`) apply only to these machines. A run's mean step applies to
    all."""
    return (
        measured.model == planned.model
        and planned.batch in (None, measured.batch)
        and planned.image_size in (None, measured.image_size)
        and planned.precision in (None, "auto", measured.precision)
        and (not measured.machines or measured.machines[:nodes] == planned.machines[:nodes])
    )


def is_fresh(unix: float, days: int = DAYS) -> bool:
    return time.time() - unix <= days * 86400


@dataclass(frozen=True)
class Prediction:
    """Hold a prediction. `speeds`: images/s of all machines together, by (strategy, number of
    machines). One machine is equally fast with each strategy, so the number 1 has only one row."""

    made_unix: float
    speeds: dict[tuple[str, int], float]

    def speed(self, sync: str, nodes: int) -> float | None:
        """Return images/s, or None if this number of machines has no prediction with the
        strategy."""
        if nodes == 1:
            return next((speed for (_, count), speed in self.speeds.items() if count == 1), None)
        return self.speeds.get((sync, nodes))


def prediction_text(
    measured: Setting,
    nodes: int,
    measured_unix: float | None,
    rows: list[dict[str, Any]],
    **notes: Any,
) -> str:
    """Return the text of a prediction's file. `measured_unix`: when the machines were measured, or
    None if the prediction comes from a run, which stays valid. Each of `rows` has `nodes`, `sync`
    and `images_per_second`. `notes`: for people; `prediction_in` does not read them."""
    now_unix = time.time()
    times = {"made_unix": now_unix, "measured_unix": measured_unix or now_unix}
    document = {**asdict(measured), **times, **notes, "nodes": nodes, "rows": rows}
    return json.dumps(document, indent=1)


# Errors of a file that is damaged, or that another version wrote.
UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError),
    *(AttributeError, ArithmeticError, RecursionError),
)


def read_prediction(path: Path) -> dict[str, Any] | None:
    """Return the content of a prediction's file; None if the file is missing or damaged."""
    try:
        document = json.loads(read_text(path))
    except UNREADABLE:
        return None
    return document if isinstance(document, dict) else None


def prediction_in(
    document: Mapping[str, Any] | None, planned: Setting, nodes: int
) -> Prediction | None:
    """Return the prediction in a file's content; None if it does not apply to the planned run."""
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
        # Old measurements may be of another driver, cable or torch.
        if not (still_applies(measured, planned, nodes) and is_fresh(measured_unix)):
            return None
        speeds = {
            (str(row["sync"]), int(row["nodes"])): _read_positive(row["images_per_second"])
            for row in document["rows"]
        }
        return Prediction(_read_positive(document["made_unix"]), speeds)
    except UNREADABLE:
        return None


def _read_positive(value: object) -> float:
    """Return a positive, finite number. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e18:
        raise ValueError("no number")
    return float(value)
