"""The forty trials, and the rule by which each is right: fixed before the first run. What is right
for a fault is said here and in README.md; no threshold of the report is changed for one trial.

A trial is a run of its own on four machines that do nothing else but sleep (workload.py). Its fault
begins at the third step (where nothing goes on with it, 15 s later) and is there until the run is
stopped, a little more than a minute later.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

SEED = 20260
BATCH, NODES = 8, (1, 2, 3, 4)
# Where the images are: with the nodes' other files, behind slow_files.c, or on a disk of their own.
FILES, SLOW_FILES, DISK = "/srv/trials", "/srv/share", "/srv/disk"
STEPS_ALONE = "--trial 3000"  # seconds: until it is stopped
Line = Mapping[str, Any]  # of the file of results: what a trial said


class Variant(NamedTuple):
    """`words`: of a fault's method in faults.py; `remedies`: of REMEDIES, those of which the report
    predicts a gain that is tried; `is_share`: the slow files are a share's though they are not to
    be blamed."""

    script: bool
    words: Mapping[str, Any] = {}
    remedies: tuple[str, ...] = ()
    is_share: bool = False


def trainer(*remedies: str, **words: Any) -> Variant:
    return Variant(False, words, remedies)


def script(*remedies: str, **words: Any) -> Variant:
    return Variant(True, words, remedies)


@dataclass(frozen=True)
class Fault:
    """`text`: what is done. `method`: of faults.py, which also undoes it; "" for machines that are
    made up of records. `right`: what the report may call it, with spaces between: a value of
    `bottleneck`, or what `report_answer` makes of a run that stands or has ended. `compared`:
    whether `make compare` is to show that the same cause grew most. `after`: seconds of steps
    without it, where no step is made with it."""

    text: str
    method: str
    right: str
    compared: bool = True
    variants: tuple[Variant, ...] = (trainer(),)
    root: str = FILES
    args: str = STEPS_ALONE
    after: float = 0.0


# fmt: off
FAULTS = {
    "nothing": Fault("links of 1 Gbit/s, as in all other trials", "nothing", "compute", True,
        (trainer(), script()) * 4),
    "rate": Fault("all links at 25, 50 or 75 Mbit/s", "rate", "network", True,
        (trainer("SYNC", "BATCH", mbit=50), script("NODES", mbit=50), trainer("NODES", mbit=25),
         script("SYNC", mbit=75))),
    "loss": Fault("each machine drops 3 or 4 % of the packets that come", "loss", "network", True,
        (trainer(percent=3), script(percent=4))),
    "slow link": Fault("one machine's link at 50 or 75 Mbit/s", "rate", "slow_link",
        True, (trainer("SYNC", mbit=50, node=3), script(mbit=75, node=2))),
    "duplex": Fault("one link at 100 Mbit/s drops 2 % both ways, as one of half duplex",
        "half_duplex", "slow_link network", True,
        (trainer(mbit=100, percent=2, node=3), script(mbit=100, percent=2, node=4))),
    "slow share": Fault("a share takes 120 or 140 ms a file", "slow_files", "data_share", True,
        (trainer(milliseconds=120), script(milliseconds=140)), SLOW_FILES),
    "slow disk": Fault("the disks read 1 or 0.9 MB/s", "slow_disk", "data_disk", True,
        (trainer(megabytes=1), script(megabytes=0.9)), DISK),
    "frozen disk": Fault("one machine's disk stands still", "frozen_disk", "node3-stands data_disk",
        False, (script(node=3),), DISK, after=15),
    "decoding": Fault(
        "a file takes a loader 120 ms, in the third of computing, on one machine, from a share",
        "slow_files", "data_decode", True,
        (trainer("WORKERS", milliseconds=120), script("WORKERS", milliseconds=120),
         Variant(True, {"milliseconds": 120, "node": 3, "computes": True}, is_share=True)),
        SLOW_FILES),
    "copies": Fault("a batch takes 250 or 300 ms to the device", "change", "h2d", True,
        (trainer(copy=0.25), script(copy=0.3))),
    "duty cycle": Fault("one rank is stopped for 90 of each 200 ms", "duty_cycle", "straggler",
        True, (trainer(node=3), script(node=1))),
    "neighbour": Fault("five programs on the processor of a rank; all compute for 60 ms a step",
        "neighbours", "cpu_contention", True,
        (trainer(node=3, programs=5), script(node=2, programs=5))),
    "smaller part": Fault("one machine takes 1.6 or 1.4 times as long for an image", "change",
        "straggler", True, (trainer("BALANCE", node=3, times=1.6), script(node=4, times=1.4))),
    "clock": Fault("records of a GPU at 600 of 1770 MHz, whose rank is slow", "", "straggler",
        False),
    "memory": Fault("records of a machine that swaps, whose rank is slow", "", "memory_pressure",
        False),
    "checkpoint": Fault("the disks write 0.4 MB/s, and each eighth step is saved", "slow_writes",
        "checkpoint", False, (trainer("SAVING", megabytes=0.4),), args="--checkpoint_every 8"),
    "oversubscribed": Fault("each rank computes 150 ms a step in three threads, and sleeps little",
        "change", "cpu_oversubscribed", True,
        (script(times=0.1, burn=0.15, threads=3),)),
    "hang": Fault("one rank does not come out of its forward", "change", "node3-stands", False,
        (trainer(node=3, hang=True),), after=15),
    "leaves": Fault("one rank ends in order, the others go on", "change", "node3-ended", False,
        (script(node=3, leave=True),), after=15),
}
# fmt: on


class Trial(NamedTuple):
    """`remedy`: of REMEDIES, where it is that trial again with what its report advised."""

    name: str
    kind: str  # of FAULTS
    variant: Variant
    remedy: str = ""
    usual: Mapping[str, float] = {}  # what workload.py reads from the start

    @property
    def fault(self) -> Fault:
        return FAULTS[self.kind]

    @property
    def repeats(self) -> list[Trial]:
        """With each remedy that is tried."""
        names = self.variant.remedies
        return [self._replace(name=f"{self.name}+{name}", remedy=name) for name in names]


def base_of(script: bool) -> str:
    """The trial with which others of its kind are compared."""
    return "nothing-2" if script else "nothing-1"


def all_trials() -> list[Trial]:
    """In the order in which they are done: what others are compared with first."""
    trials = [
        Trial(f"{name.replace(' ', '-')}-{number}", name, variant)
        for name, fault in FAULTS.items()
        for number, variant in enumerate(fault.variants, 1)
    ]
    random.Random(SEED).shuffle(trials)
    return sorted(trials, key=lambda trial: trial.name != base_of(trial.variant.script))


class Way(NamedTuple):
    """How a remedy is tried: by what its advice begins or contains, with its value or else `value`,
    and the variable of make and the option of the trainer or the script that take it."""

    advice: str
    value: str
    variable: str = ""
    option: str = ""


REMEDIES = {
    "SYNC": Way(r'^SYNC=(\S+): |attach\(model, "([^"]+)"', "", "SYNC", "--sync"),
    "BATCH": Way("^twice the BATCH", f"{2 * BATCH}", "BATCH"),
    "NODES": Way(r"^NODES=(\d)", "", "NODES"),
    # By hand, as `auto` would: machines of a lab are of one kernel, for which it keeps equal parts.
    "BALANCE": Way("^BALANCE=auto", "16:16:10:16", "BALANCE"),
    "WORKERS": Way("^twice the loader processes", "2", option="--workers"),
    "SAVING": Way("^save half as often", "16", option="--checkpoint_every"),
}


def find_remedy(name: str, advice: list[Line]) -> tuple[Line, str] | None:
    """The entry of the report's advice that is this remedy, and its value; None without one."""
    way = REMEDIES[name]
    for entry in advice:
        if match := re.search(way.advice, entry["change"]):
            return entry, next(filter(None, match.groups()), way.value)
    return None


# What `make status` calls those whose reason only the report says.
LIVE = {
    **{"slow_link": "network", "cpu_contention": "straggler"},
    **dict.fromkeys(("data_disk", "data_share", "data_decode"), "data"),
}


def live_answer(status: Line) -> str:
    """What JSON of `make status` says of a run."""
    if status.get("hang"):
        hosts = sorted({host for host, _ in status["hang"]["ranks"]})
        return f"{'-'.join(hosts) or 'all'}-stands"
    if status["state"] == "failed":
        return f"{(status.get('first_cause') or {}).get('host')}-ended"
    return status.get("bottleneck") or "none"


def report_answer(summary: Line, silent_ranks: list[str]) -> str:
    """What summary.json says, and attempts.json of ranks that stood when the run was stopped: those
    that did not enter a sum, or else those that stand elsewhere than most."""
    lines = [re.sub(r"(\w+), rank \d+(?=.* did not enter)", r"(\1)", line) for line in silent_ranks]
    named = filter(None, (re.findall(r"\((\w+)\)", line) for line in lines))
    hosts = min(named, key=len, default=[])
    if hosts:
        return f"{'-'.join(hosts)}-stands"
    if summary["status"] == "failed":
        return f"{(summary['first_cause'] or {}).get('host')}-ended"
    answer: str = summary["bottleneck"]
    return answer


def grown_cause(changes: Mapping[str, float]) -> str:
    """The cause that grew most by what `make compare` says of two runs, in which computing grows
    only with a fault; `nothing` where none did."""
    grown = [cause for cause, change in changes.items() if change > 0 and cause != "compute"]
    return grown[0] if grown else "nothing"
