"""What `make plan` predicted of a run, and what follows from it: a warning, or the strategy that
SYNC=auto becomes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from contract import prices, runs, strategies
from contract.options import Options as TrainerOptions
from launcher import folders
from launcher.machines import inventory
from launcher.machines.engine import Host


class Choice(NamedTuple):
    """A `--sync`; `why` is one clause for people."""

    sync: str
    why: str


def setting(settings: TrainerOptions, hosts: Sequence[Host]) -> runs.Setting:
    """By which predictions and measurements of such a run are found."""
    return runs.Setting(
        settings.model,
        settings.per_node_batch_size,
        settings.image_size,
        settings.precision,
        tuple(host.name for host in hosts),
    )


def prediction(settings: TrainerOptions, hosts: list[Host]) -> runs.Prediction | None:
    """What `make plan` predicted for such a run on these machines, if it was asked: images/s over
    the whole run, its warm-up included."""
    found = runs.read_prediction(folders.RUNS, setting(settings, hosts), len(hosts))
    return found and replace(found, speeds=over_a_run(found.speeds, settings))


def foreseen(settings: TrainerOptions, hosts: list[Host]) -> runs.Prediction | None:
    """The same as `prediction`; where there is none, the report first makes one, of an earlier run
    of the model or of what `make plan` measured, if there is either."""
    if len(hosts) > 1 and prediction(settings, hosts) is None:
        asked = {
            "--nodes": len(hosts),
            "--model": settings.model,
            "--batch": settings.per_node_batch_size,
            "--precision": settings.precision,
            "--image-size": settings.image_size,
            "--machines": ",".join(host.name for host in hosts),
            "--runs": folders.RUNS,
        }
        words = [f"{name}={value}" for name, value in asked.items() if value is not None]
        subprocess.run(
            [sys.executable, "-m", "report", "plan", *words],
            cwd=inventory.CHECKOUT,
            capture_output=True,
            check=False,
        )
    return prediction(settings, hosts)


def own_speeds(settings: TrainerOptions, hosts: Sequence[Host]) -> dict[str, float]:
    """Images/s of each machine by itself, of those that `make plan` or a run has measured."""
    from report import measurements  # which no run with equal parts asks for

    return measurements.newest_speeds(folders.RUNS, setting(settings, hosts))


def over_a_run(
    speeds: dict[tuple[str, int], float], settings: TrainerOptions
) -> dict[tuple[str, int], float]:
    """Of images/s after the warm-up, those of a whole run; without a strategy whose warm-up costs
    what nobody predicted."""
    phases, found = settings.phases, {}
    for (spec, nodes), speed in speeds.items():
        strategy, exact = strategies.known(spec), speeds.get((strategies.EXACT, nodes))
        if strategy and speed > 0 and exact:
            found[spec, nodes] = 1 / phases.mean(strategy, 1 / speed, 1 / exact)
    return found


def predicted(settings: TrainerOptions, hosts: list[Host]) -> dict[str, Any] | None:
    """The same for plan.json: `images_per_second`, `made_unix`; None where this strategy was not
    predicted."""
    found = prediction(settings, hosts)
    speed = found.speed(strategies.parse(settings.sync).spec, len(hosts)) if found else None
    if found is None or speed is None:
        return None
    return {"images_per_second": round(speed, 2), "made_unix": found.made_unix}


def slower_than_one(settings: TrainerOptions, hosts: list[Host]) -> str | None:
    """A sentence, with what would help, where `make plan` predicts this run to be slower than one
    machine alone; None where it does not, or was not asked."""
    found, nodes = prediction(settings, hosts), len(hosts)
    if found is None or nodes == 1:
        return None
    sync = strategies.parse(settings.sync).spec
    alone, together = found.speed(sync, 1), found.speed(sync, nodes)
    if alone is None or together is None or together >= alone:
        return None
    taken, _ = most_exact(found.speeds, nodes, settings.family)
    speed, better = found.speed(taken, nodes) or 0.0, taken
    remedy = f"SYNC={better} would give {speed:.0f}" if speed > alone else "train on one machine"
    return (
        f"by make plan {nodes} machines with SYNC={sync} are slower than one alone, "
        f"{together:.0f} against {alone:.0f} images/s: {remedy} (docs/slow-networks.md)"
    )


def most_exact(speeds: dict[tuple[str, int], float], nodes: int, family: str) -> tuple[str, str]:
    """The strategy to take by the images/s of each (strategy, number of machines), among those
    whose label covers such an optimizer; and the fastest of them."""
    covered = {
        spec: 1 / speed
        for (spec, count), speed in speeds.items()
        if count == nodes and prices.is_acceptable(strategies.parse(spec), family)
    }
    if not covered:
        return strategies.EXACT, strategies.EXACT
    return prices.most_exact(covered, strategies.parse), min(covered, key=covered.__getitem__)


def choose_sync(
    speeds: dict[tuple[str, int], float], nodes: int, measure: str, family: str = prices.SGD
) -> Choice:
    """Chooses by the images/s of each (strategy, number of machines); `speeds` is empty where
    nothing is known, and the command `measure` then helps. `family`: of the optimizer."""
    exact, alone = strategies.EXACT, nodes == 1
    if alone or (exact, nodes) not in speeds:
        unknown = f"exact, for make plan knows no such run yet: `{measure}` before it measures one"
        why = "one machine waits for no other" if alone else unknown
        return Choice(exact, why)
    taken, fastest = most_exact(speeds, nodes, family)
    if fastest == exact:
        with_it = " with Adam" if family == prices.ADAM else ""
        return Choice(
            exact, f"no strategy that was measured as safe{with_it} is faster, by make plan"
        )
    figures = ", ".join(
        f"{speeds[spec, nodes]:.0f} with {spec}"
        for spec in dict.fromkeys((fastest, exact))
        if spec != taken
    )
    figures = f"{speeds[taken, nodes]:.0f} images/s by make plan, {figures}"
    if taken != fastest:
        return Choice(taken, f"the most exact of those that are nearly the fastest: {figures}")
    tasks = prices.tasks(strategies.parse(taken), family)
    return Choice(taken, f"{figures}; safe for accuracy on {tasks}")
