"""What can be wrong with machines before a run starts: every sentence, once, by its code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from contract.errors import UserError
from launcher.machines.engine import Host


class Blocks(Enum):
    """Whether a problem keeps a run from starting."""

    ALWAYS = "fatal"
    UNLESS_FORCED = "soft"  # FORCE=1
    BUSY = "busy"  # the same; QUEUE=1 waits until it is over


ALWAYS, UNLESS_FORCED, BUSY = Blocks
BUSY_REMEDY = "wait for it (QUEUE=1), or ask its owner"
STACK = "run `make provision`, so that all have the same stack"
OWN_CPU = "To compute on its CPU, give gpus=0 for {name}"


class Rule(NamedTuple):
    """`said` is the thing and the cause. Of the machine that has the problem both texts may name
    {name} and {repair}, how its environment is repaired."""

    blocks: Blocks
    said: str
    remedy: str = ""

    def sentence(self, values: dict[str, object]) -> str:
        text = self.said.format(**values)
        return f"{text}: {self.remedy.format(**values)}." if self.remedy else text


RULES = {
    # What a machine that was asked did not say.
    "answer-fails": Rule(ALWAYS, "what it answered ended in an error here: {place}."),
    "answer-impossible": Rule(ALWAYS, "what it says of itself is impossible: {why}."),
    "answer-refused": Rule(ALWAYS, "{why}"),
    "unreached": Rule(ALWAYS, "{said}"),  # launcher/machines/engines/ssh.py
    "answer-late": Rule(
        ALWAYS, "gave no answer within {seconds:.0f} s: is its disk or its data share hanging?"
    ),
    "connection-broke": Rule(ALWAYS, "the connection broke while asking it{why}."),
    "python-missing": Rule(
        ALWAYS, "no Python at {python} ({said})", "{repair}, or correct env_python of {name}"
    ),
    "python-fails": Rule(ALWAYS, "{python} could not inspect the machine: {said}"),
    "examples": Rule(
        ALWAYS,
        "these are the machines of the example, and none can be reached",
        "list yours in the inventory, or give INVENTORY=examples/demo.ini, which has four nodes "
        "on this machine",
    ),
    # A machine's software, data and state.
    "torch-missing": Rule(ALWAYS, "{missing} missing in {python}", "{repair}"),
    "driver-upgraded": Rule(
        ALWAYS,
        "nvidia-smi fails ({error})",
        "its driver was upgraded, and takes effect by its next boot: reboot it. " + OWN_CPU,
    ),
    "driver-fails": Rule(ALWAYS, "nvidia-smi fails ({error})", "run `make provision`. " + OWN_CPU),
    "toolkit-missing": Rule(
        ALWAYS, "cuda_home={folder} has no bin/ there", "{repair}, or correct cuda_home of {name}"
    ),
    "guard-python-missing": Rule(ALWAYS, "{python} is missing there", "{repair}"),
    "data-missing": Rule(ALWAYS, "the data folder {folder} is missing{others}", "{remedy}"),
    "data-unfit": Rule(ALWAYS, "the data folder {folder} cannot be trained on: {why}"),
    "not-writable": Rule(
        ALWAYS, "{folder} cannot be written", "give it to the run user, or set node_dir"
    ),
    "disk-full": Rule(ALWAYS, "only {free} MiB free where {folder} lies", "remove old runs there"),
    "disk-low": Rule(
        UNLESS_FORCED, "only {free} MiB free where {folder} lies", "remove old runs there"
    ),
    "clock": Rule(
        UNLESS_FORCED,
        "its clock is {seconds:.0f} s {way} this machine's",
        "run `make provision`, which sets up time",
    ),
    "machine-busy": Rule(BUSY, "it is in use by {holders}", BUSY_REMEDY),
    "gpus-busy": Rule(BUSY, "its GPUs are in use by {holders}", BUSY_REMEDY),
    "queue": Rule(BUSY, "run {run} of {user} ({holder}) waits for it", BUSY_REMEDY),
    # This machine.
    "control-disk-full": Rule(
        ALWAYS,
        "this machine: only {free} MiB free where runs/ lies, to which logs and checkpoints come",
        "remove old runs",
    ),
    "control-disk-low": Rule(
        UNLESS_FORCED,
        "this machine: only {free} MiB free where runs/ lies, to which logs and checkpoints come",
        "remove old runs",
    ),
    # What machines compute on.
    "gpu-named-twice": Rule(
        ALWAYS,
        "{names}: nodes of one machine name the same GPU in CUDA_VISIBLE_DEVICES, and a GPU takes "
        "one process",
        "correct run_env",
    ),
    "gpu-unknown": Rule(
        ALWAYS,
        "CUDA_VISIBLE_DEVICES={visible} in run_env names a GPU that nvidia-smi does not show there "
        "({count})",
        "correct run_env",
    ),
    "gpus-hidden": Rule(
        ALWAYS,
        "the inventory says gpus={gpus}, but CUDA_VISIBLE_DEVICES in run_env names {count} usable "
        "ones",
        "correct the inventory",
    ),
    "gpus-missing": Rule(
        ALWAYS,
        "the inventory says {listed}, but nvidia-smi shows {count}",
        "correct the inventory",
    ),
    "gpus-unusable": Rule(ALWAYS, "the inventory says gpus={gpus}, but {why}"),
    "no-gpu": Rule(ALWAYS, "--device cuda, and {why}"),
    "precision": Rule(ALWAYS, "{said}"),  # contract/levels.py
    # The model, or the script in its place.
    "model-unknown": Rule(
        ALWAYS,
        "MODEL={model}: torchvision {version} on {name} has no such classifier; nearest: {near}. "
        "Your own: MODEL=path/file.py:function.",
    ),
    "model-not-sent": Rule(
        ALWAYS,
        "MODEL={model}: {file} is not copied to the machines: git ignores it, or its name begins "
        "with a dot.",
    ),
    "model-elsewhere": Rule(
        ALWAYS,
        "MODEL={model}: {file} is not copied to the machines; files of examples/, recipes/ and "
        "trainer/ are, but no links: MODEL={file}:{function} sends its folder.",
    ),
    "model-nowhere": Rule(
        ALWAYS, "MODEL={model}: neither here nor on {name} is there a module {module}{near}."
    ),
    "model-imports": Rule(
        ALWAYS,
        "MODEL={model} imports {missing}, missing in the environment there: `{python} -m pip "
        "install {packages}` (some packages have another name than what they are imported by).",
    ),
    "script-broken": Rule(ALWAYS, "SCRIPT={script}: {why}", "correct it"),
    "script-imports": Rule(
        ALWAYS,
        "SCRIPT={script} imports {missing}, missing in the environment there",
        "name it in requirements.txt beside the script, or by REQUIREMENTS= (some packages have "
        "another name than what they are imported by)",
    ),
    "script-packages": Rule(ALWAYS, "{said}"),  # what pip or its lines say: launcher/plan/layer.py
    "script-stack": Rule(
        ALWAYS,
        "{lacks} is missing in the environment there, or there in another version, and the "
        "script's packages need it",
        STACK,
    ),
    # The machines together.
    "versions-differ": Rule(ALWAYS, "{what} differs between machines: {values}", STACK),
    "python-differs": Rule(
        ALWAYS,
        "Python differs between machines: {values}, so the script's packages would, too",
        STACK,
    ),
    "drivers-differ": Rule(
        UNLESS_FORCED, "the NVIDIA driver's branch differs: {values}", "run `make provision`"
    ),
    "data-differs": Rule(
        ALWAYS,
        "{split}/ of the data is not the same on all machines: {values}",
        "copy it anew (`make provision`)",
    ),
    "batch": Rule(ALWAYS, "{said}"),  # contract/split.py
    "no-way": Rule(
        ALWAYS,
        "{of} does not reach {peer} ({address}) by TCP, tried on port {port}: {why}",
        "check the firewall of {peer}, and that its address in the inventory is one of the same "
        "network",
    ),
    "ways-unknown": Rule(ALWAYS, "its peers could not be tried: {why}."),
    # What a plan of them has to be.
    "batch-small": Rule(
        ALWAYS,
        "BATCH={batch} is too small for the {processes} of {name}: batch normalisation needs "
        "{smallest} samples in each",
        "give BATCH={least} or more",
    ),
    "master-loopback": Rule(
        ALWAYS,
        "{name}: its address is {address}, which means on each other machine that machine itself",
        "give its address in the LAN as ansible_host",
    ),
    "port-taken": Rule(
        ALWAYS,
        "{name}: port {port} is in use there",
        "leave PORT out, and a free one is taken, or give another",
    ),
    "no-port": Rule(
        ALWAYS, "{name}: no free port in {first}-{last}", "give another, like PORT=30000"
    ),
    "several-cards": Rule(
        ALWAYS,
        "{name}: its peers are reached through several network cards ({ways})",
        "put all machines in one network, or give interface=<card> for {name} in the inventory",
    ),
}


@dataclass(frozen=True)
class Problem:
    """One problem, of the machines with these labels."""

    code: str
    said: str
    labels: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{', '.join(self.labels)}: {self.said}" if self.labels else self.said

    @property
    def blocks(self) -> Blocks:
        return RULES[self.code].blocks


def problem(code: str, host: Host | None = None, /, **values: object) -> Problem:
    """The problem with this code, of `host` or of none by itself."""
    if host is None:
        return Problem(code, RULES[code].sentence(values))
    own = {"name": host.name, "repair": host.engine.repair_hint}
    return Problem(code, RULES[code].sentence({**own, **values}), (host.label(),))


class Refused(UserError):
    """Machines on which a run must not start."""

    def __init__(self, problems: Sequence[Problem], *hints: str):
        super().__init__(*(one.text for one in problems), *hints)
        self.reasons = list(problems)


def together(problems: Sequence[Problem]) -> list[Problem]:
    """Each problem once, with the labels of all machines that have it."""
    merged: dict[tuple[str, str], Problem] = {}
    for one in problems:
        known = merged.setdefault((one.code, one.said), replace(one, labels=()))
        labels = (*known.labels, *one.labels)
        merged[one.code, one.said] = replace(known, labels=labels)
    return list(merged.values())


def refuse_or_warn(problems: Sequence[Problem], force: bool) -> list[str]:
    """The texts of those that the run starts with. Raises Refused where it must not start."""
    stopping = [one for one in problems if one.blocks is ALWAYS or not force]
    if stopping:
        mended = not any(one.blocks is ALWAYS for one in problems)
        raise Refused(stopping, *["(FORCE=1 starts anyway.)"] * mended)
    return [one.text for one in problems]
