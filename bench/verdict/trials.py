"""The trials of test_verdict.py: faults, strengths, order and length, fixed before the first run.

A trial is a window of a run on four machines. Those that differ by what happens to the
machines alone follow one another in one run: a fault begins, SETTLE seconds pass, the window
begins, and when it ends the fault does. What is judged is the report of that window by itself.
"""

from __future__ import annotations

import random
from typing import NamedTuple

SEED = 20260
SETTLE = 4  # seconds
# Seconds, in which a verdict needs 20 steps after the first (report/measure.py), of up to 3 s each
# with a network of 100 Mbit/s.
WINDOWS = {"checkpoint": 80, "timed": 72}
WINDOW = 44  # of the others


class Trial(NamedTuple):
    """`fault` is one of FAULTS, `strength` in its unit, on machine `node` (0: on all)."""

    fault: str
    strength: float
    node: int


class Fault(NamedTuple):
    """`verdict`: the right value of `bottleneck`; `unit`: of the strength; `run`: which run it is
    in; `of`: the strengths and machines of its trials."""

    verdict: str
    unit: str
    run: str
    of: tuple[tuple[float, int], ...]


FAULTS = {
    "nothing": Fault("compute", "", "timed", ((0, 0),) * 4),
    "network of 1 Gbit/s": Fault("network", "Mbit/s", "timed", ((1000, 0),) * 4),
    "network of 100 Mbit/s": Fault("network", "Mbit/s", "timed", ((100, 0),) * 3),
    "one slow link": Fault(
        "slow_link", "Mbit/s, others 1000", "timed", ((100, 3), (200, 2), (200, 4), (300, 1))
    ),
    "a rank slower in backward": Fault(
        "straggler", "times", "timed", ((1.3, 3), (1.3, 1), (1.5, 2), (2.0, 4))
    ),
    "a CPU hog": Fault("cpu_contention", "processes", "timed", ((3, 3), (4, 2), (5, 4), (6, 1))),
    "a slow disk": Fault("data_disk", "kB/s", "disk", ((120, 0), (80, 0), (100, 0))),
    "a slow share": Fault("data_share", "ms a file", "share", ((300, 0), (400, 0), (350, 0))),
    "slow decoding": Fault("data_decode", "images a step", "decode", ((8, 0), (8, 0), (8, 0))),
    "checkpoint stalls": Fault("checkpoint", "MB/s written", "checkpoint", ((3, 0), (2.5, 0))),
}
RUNS = ("timed", "disk", "share", "decode", "checkpoint")


def trials(run: str) -> list[Trial]:
    """The trials of one run, in the order in which they are done."""
    result = [
        Trial(name, strength, node)
        for name, fault in FAULTS.items()
        if fault.run == run
        for strength, node in fault.of
    ]
    random.Random(SEED).shuffle(result)
    return result


# What `make status` calls those whose reason only the report tells.
STATUS = {
    **{"slow_link": "network", "cpu_contention": "straggler"},
    **dict.fromkeys(("data_disk", "data_share", "data_decode"), "data"),
}


class Outcome(NamedTuple):
    """`report`: the verdict of the report; `status`: that of `make status` at the end of the
    window, None where only a record was judged."""

    fault: str
    verdict: str  # the right one
    report: str
    status: str | None

    @property
    def is_right(self) -> bool:
        return self.report == self.verdict

    @property
    def status_is_right(self) -> bool:
        return self.status in (None, STATUS.get(self.verdict, self.verdict))


def matrix(outcomes: list[Outcome]) -> str:
    """A table of how often each fault got which verdict, as Markdown."""
    verdicts = sorted({outcome.report for outcome in outcomes})
    rows = [["fault", "trials", *(f"`{outcome}`" for outcome in verdicts), "right", "status"]]
    rows.append(["---"] * len(rows[0]))
    for name in dict.fromkeys((outcome.fault, outcome.verdict) for outcome in outcomes):
        own = [outcome for outcome in outcomes if (outcome.fault, outcome.verdict) == name]
        title = f"{name[0]}: `{name[1]}`" if name[0] == "recorded" else name[0]
        rows.append([title, *_counts(own, verdicts)])
    rows.append(["all", *_counts(outcomes, verdicts)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _counts(outcomes: list[Outcome], verdicts: list[str]) -> list[str]:
    """Trials, how many got each verdict, for how many it was right, and for how many the status
    was."""
    counts = [
        str([outcome.report for outcome in outcomes].count(verdict) or "") for verdict in verdicts
    ]
    live = [outcome.status_is_right for outcome in outcomes if outcome.status is not None]
    status = f"{sum(live)} of {len(live)}" if live else ""
    return [str(len(outcomes)), *counts, str(sum(outcome.is_right for outcome in outcomes)), status]
