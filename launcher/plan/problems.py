"""What keeps a run from starting on one machine, by what it says of itself, as sentences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from contract.machines import CLOCK_TOLERANCE
from launcher.machines.engine import Host
from launcher.machines.probe import Facts

DISK_FREE = 1 << 30
DISK_FULL = 64 << 20  # nothing can be trained here
BUSY_REMEDY = "wait for it (QUEUE=1), or ask its owner."


@dataclass(frozen=True)
class Problem:
    """One sentence; with FORCE=1 a run starts all the same unless the problem is fatal."""

    text: str
    fatal: bool = True
    busy: bool = False


def machine_problems(host: Host, facts: Facts, run: str | None, on_gpus: bool) -> list[Problem]:
    """What keeps a run from starting on this machine; what is left of `run` itself is no problem.
    `on_gpus`: the node computes on its GPUs, if it has any."""
    state = [*_state(host, facts), *_busy(host, facts, run, on_gpus)]
    return [*_software(host, facts, on_gpus), *data_problems(host, facts), *state]


def control_problems(free: int) -> list[Problem]:
    """What is wrong with the disk that logs, records and checkpoints go to."""
    if free >= DISK_FREE:
        return []
    text = (
        f"this machine: only {free >> 20} MiB free where runs/ lies, to which logs and checkpoints "
        "come: remove old runs."
    )
    return [Problem(text, fatal=free < 2 * DISK_FULL)]


def _software(host: Host, facts: Facts, on_gpus: bool) -> list[Problem]:
    remedy = host.engine.repair_hint
    missing = [name for name in ("torch", "torchvision") if not facts.versions.get(name)]
    if missing:
        return [
            Problem(
                f"{host.label()}: {' and '.join(missing)} missing in {host.env_python}: {remedy}."
            )
        ]
    error = facts.gpus["error"]
    if error and on_gpus:
        upgraded = "its driver was upgraded, and takes effect by its next boot: reboot it"
        cure = upgraded if "version mismatch" in error else "run `make provision`"
        return [
            Problem(
                f"{host.label()}: nvidia-smi fails ({error}): {cure}. To compute on its CPU, give "
                f"gpus=0 for {host.name}.",
            )
        ]
    if not all(facts.paths.values()):
        return [
            Problem(
                f"{host.label()}: cuda_home={host.cuda_home} has no bin/ there: {remedy}, or "
                f"correct cuda_home of {host.name}."
            )
        ]
    if not facts.guard_python:
        return [Problem(f"{host.label()}: {host.engine.guard_python} is missing there: {remedy}.")]
    return []


def data_problems(host: Host, facts: Facts) -> list[Problem]:
    """Why the folder is not a data set, in the trainer's own words (contract/layout.py)."""
    data = facts.data
    if not data["path"]:  # none is needed
        return []
    where = f"{host.label()}: the data folder {data['path']}"
    remedy, name = host.engine.data_hint, Path(data["path"]).name
    if name not in ("digits", "imagenet"):
        remedy = "correct DATA, or put class folders into its train/ and val/" + (
            "" if host.engine.is_local else " (data_sets in group_vars/all.yml brings them there)"
        )
    if name == "imagenet":
        remedy = (
            "`make imagenet SRC=<folder of its archives>` makes data/imagenet here, and `make "
            "provision` with imagenet in data_sets copies it to every machine, or mounts the disk "
            "that has it (docs/shares.md)"
        )
    if not data["exists"]:
        return [Problem(f"{where} is missing{beside(data['others'])}: {remedy}.")]
    if data["problem"]:
        return [Problem(f"{where} cannot be trained on: {data['problem']}")]
    return []


def beside(others: list[str]) -> str:
    if not others:
        return ""
    return f"; there {'is' if len(others) == 1 else 'are'} {', '.join(others)}"


def together(found: list[tuple[Host, Problem]]) -> list[Problem]:
    """What is wrong, each thing once, with the names of all machines that have it."""
    labels: dict[Problem, list[str]] = {}
    for host, problem in found:
        own = replace(problem, text=problem.text.removeprefix(f"{host.label()}: "))
        labels.setdefault(own, []).append(host.label())
    return [replace(one, text=f"{', '.join(named)}: {one.text}") for one, named in labels.items()]


def _state(host: Host, facts: Facts) -> list[Problem]:
    problems = []
    if not facts.writable:
        problems.append(
            Problem(
                f"{host.label()}: {facts.absolute(host.node_dir)} cannot be written: give it to "
                f"the run user, or set node_dir."
            )
        )
    if facts.disk_free < DISK_FREE:
        problems.append(
            Problem(
                f"{host.label()}: only {facts.disk_free >> 20} MiB free where "
                f"{facts.absolute(host.node_dir)} lies: remove old runs there.",
                fatal=facts.disk_free < DISK_FULL,
            )
        )
    if abs(facts.skew) > CLOCK_TOLERANCE:
        way = "ahead of" if facts.skew > 0 else "behind"
        problems.append(
            Problem(
                f"{host.label()}: its clock is {abs(facts.skew):.0f} s {way} this machine's: run "
                f"`make provision`, which sets up time.",
                fatal=False,
            )
        )
    return problems


def _busy(host: Host, facts: Facts, run: str | None, on_gpus: bool) -> list[Problem]:
    """Reports a run on this machine, with GPUs or without; otherwise whoever else uses its GPUs."""
    others = [other for other in facts.runs if other["run"] != run]
    held = sorted({f"{other['holder']}: run {other['run']}" for other in others})
    what = "it is in use by"
    if not facts.runs and on_gpus:
        what = "its GPUs are in use by"
        held = [f"{h['user']}: {h['command']} (pid {h['pid']})" for h in facts.gpus["processes"]]
    if not held:
        return []
    text = f"{host.label()}: {what} {'; '.join(held)}: {BUSY_REMEDY}"
    return [Problem(text, fatal=False, busy=True)]
