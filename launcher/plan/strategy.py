"""SYNC=auto: the exact sum where that costs little time, else the fastest strategy whose price in
accuracy was measured as safe. Decided once, before anything starts; a resumed run keeps it."""

from __future__ import annotations

from typing import NamedTuple

from contract import prices, strategies
from launcher.options import Options

NEAR = 1.05  # an exact run that is up to this much slower than the fastest is still preferred


class Choice(NamedTuple):
    """A `--sync`; `why` is one clause for people."""

    sync: str
    why: str


def asks_auto(options: Options) -> bool:
    """Whether the last --sync that the trainer would read is `auto`. Raises UserError."""
    return options.asked("--sync") == strategies.AUTO


def choose(speeds: dict[tuple[str, int], float], nodes: int, measure: str) -> Choice:
    """Chooses by the images/s of each (strategy, number of machines); `speeds` is empty where
    nothing is known, and the command `measure` then helps."""
    exact, alone = strategies.EXACT, nodes == 1
    if alone or (exact, nodes) not in speeds:
        unknown = f"exact, for make plan knows no such run yet: `{measure}` before it measures one"
        why = "one machine waits for no other" if alone else unknown
        return Choice(exact, why)
    labels = {spec: prices.label_of(strategies.parse(spec)) for spec, n in speeds if n == nodes}
    safe = [(speeds[spec, nodes], spec) for spec, label in labels.items() if label == "safe"]
    speed, best = max([*safe, (speeds[exact, nodes], exact)])
    if best == exact:
        return Choice(exact, "no strategy that was measured as safe is faster, by make plan")
    figures = f"{speed:.0f} images/s by make plan, {speeds[exact, nodes]:.0f} with {exact}"
    if speed <= NEAR * speeds[exact, nodes]:
        return Choice(exact, f"{best} would give little more: {figures}")
    return Choice(best, f"{figures}; safe for accuracy where it was measured")
