"""The forty trials, and for each fault the verdict that is right. Both were fixed before the first
run. No threshold of the report is changed for a trial.

Each trial is a run of its own on four machines that sleep instead of computing (workload.py). Its
fault begins at the third step, or 15 s later if it lets no step end. It stays until the run is
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
# Where the images are: with a machine's other files, behind slow_files.c, or on their own disk.
FILES, SLOW_FILES, DISK = "/srv/trials", "/srv/share", "/srv/disk"
STEPS_ALONE = "--trial 3000"  # train for so many seconds, which is until the run is stopped
Line = Mapping[str, Any]  # a line of the file of results


class Variant(NamedTuple):
    """One way to make a fault. `script`: a training script runs, not the trainer. `words`: the
    arguments of the fault's method. `remedies`: names of REMEDIES whose predicted gain is tested.
    `is_share`: the images are on a share, which is not the cause."""

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
    only records. `right`: the right answers of `report_answer`, with spaces between. `compared`:
    whether `make compare` should show that the same cause grew most. `root`: where the images are.
    `args`: options of the trainer. `after`: seconds before a fault that lets no step end."""

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
    """A run. `remedy`: a name of REMEDIES, if this repeats a trial with what its report advised."""

    name: str
    kind: str  # of FAULTS
    variant: Variant
    remedy: str = ""
    usual: Mapping[str, float] = {}  # what /srv/trial.json has from the start

    @property
    def fault(self) -> Fault:
        return FAULTS[self.kind]

    @property
    def repeats(self) -> list[Trial]:
        """Return the same trial with each remedy that is tested."""
        names = self.variant.remedies
        return [self._replace(name=f"{self.name}+{name}", remedy=name) for name in names]


def base_of(script: bool) -> str:
    """Return the name of the trial with which `make compare` compares the others."""
    return "nothing-2" if script else "nothing-1"


def all_trials() -> list[Trial]:
    """Return the trials in their order: those that others are compared with come first."""
    trials = [
        Trial(f"{name.replace(' ', '-')}-{number}", name, variant)
        for name, fault in FAULTS.items()
        for number, variant in enumerate(fault.variants, 1)
    ]
    random.Random(SEED).shuffle(trials)
    return sorted(trials, key=lambda trial: trial.name != base_of(trial.variant.script))


class Way(NamedTuple):
    """How a remedy is applied. `advice`: a pattern of the report's advice, whose group is the
    value, or else `value`. `variable`: of make; `option`: of the trainer or the script."""

    advice: str
    value: str
    variable: str = ""
    option: str = ""


REMEDIES = {
    "SYNC": Way(r'^SYNC=(\S+): |attach\(model, "([^"]+)"', "", "SYNC", "--sync"),
    "BATCH": Way("^twice the BATCH", f"{2 * BATCH}", "BATCH"),
    "NODES": Way(r"^NODES=(\d)", "", "NODES"),
    # These are the parts that `auto` would choose for PCs. Machines of a lab share a kernel, so
    # `auto` would keep equal parts.
    "BALANCE": Way("^BALANCE=auto", "16:16:10:16", "BALANCE"),
    "WORKERS": Way("^twice the loader processes", "2", option="--workers"),
    "SAVING": Way("^save half as often", "16", option="--checkpoint_every"),
}


def find_remedy(name: str, advice: list[Line]) -> tuple[Line, str] | None:
    """Return (the entry of the report's advice with this remedy, the value). None without it."""
    way = REMEDIES[name]
    for entry in advice:
        if match := re.search(way.advice, entry["change"]):
            return entry, next(filter(None, match.groups()), way.value)
    return None


# {verdict of the report: what `make status` calls it, which shows less detail}.
LIVE = {
    **{"slow_link": "network", "cpu_contention": "straggler"},
    **dict.fromkeys(("data_disk", "data_share", "data_decode"), "data"),
}


def live_answer(status: Line) -> str:
    """Return the answer that the JSON of `make status` contains."""
    if status.get("hang"):
        hosts = sorted({host for host, _ in status["hang"]["ranks"]})
        return f"{'-'.join(hosts) or 'all'}-stands"
    if status["state"] == "failed":
        return f"{(status.get('first_cause') or {}).get('host')}-ended"
    return status.get("bottleneck") or "none"


def report_answer(summary: Line, silent_ranks: list[str]) -> str:
    """Return a summary's bottleneck, `HOST-ended` of a failed run, or `HOST-stands` if ranks stood
    at its end. `silent_ranks`: lines of attempts.json on such ranks. The host is that of ranks that
    did not enter a sum, or of the smallest group of ranks that stand at one place."""
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
    """Return the cause that grew most between two runs, or `nothing`. `changes`: of `make compare`,
    the largest first. `compute` does not count, since it only grows along with a fault."""
    grown = [cause for cause, change in changes.items() if change > 0 and cause != "compute"]
    return grown[0] if grown else "nothing"
