"""Plan the CUDA toolkit, cuDNN, NCCL and apex. Pure functions.

Machines are PlanFacts (boundary/facts.py); `toolkit_plan` also accepts Ansible's variables. Roles
cuda, cudnn, nccl and apex carry the plan out, and `make dry-provision` prints it.
"""

import dataclasses
import re
from typing import Any

from . import PlanError, reading, stacks
from . import driver_candidates as candidates

LINK = "/usr/local/cuda"
COMPILER = re.compile(r"g\+\+-(\d+)$")
SWITCH = ("auto", "true", "false")


@dataclasses.dataclass(frozen=True)
class Part:
    """A file of a publisher. `url` is "" if the user has to download it from `page`.

    `sha256` is "" if it is unknown: the one of the first download counts then. With a `commit`,
    `url` is a git repository, and the file is made from it.
    """

    name: str
    version: str
    file: str
    sha256: str
    url: str
    page: str
    commit: str = ""


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """A folder with nvcc, and cuDNN and NCCL inside; `link` points to it."""

    folder: str
    link: str
    bundle: str  # folder of the files, in bundle/installers
    parts: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A toolkit that somebody else installed. It is never changed."""

    folder: str
    used: bool  # to build apex
    reason: str  # why it is used, or not


@dataclasses.dataclass(frozen=True)
class Apex:
    """apex, which each machine builds: root would run code of a wheel from another machine.

    `arch_list`: TORCH_CUDA_ARCH_LIST, from the machine's GPUs.
    """

    part: Part
    bundle: str
    extensions: bool
    reason: str  # why with CUDA extensions, or without
    arch_list: str
    cuda_home: str
    compiler: str = ""  # the package of an older g++, if the machine's is too new


def toolkit_plan(machines, stack, settings, table):
    """Return {host: {"toolkit": Toolkit or None, "found": Foreign or None, "apex": Apex or None}},
    as dictionaries. `toolkit` will be installed.

    stack: a row of table["rows"] with "name"; settings: {"toolkit", "apex", "apex_extensions"},
    each auto, true or false. Raises PlanError for what these machines cannot have.
    """
    machines = [reading.known(machine) for machine in machines]
    settings = {name: _word(name, value) for name, value in settings.items()}
    foreign = {
        machine.host: foreign_toolkit(machine, stack, settings, table) for machine in machines
    }
    with_toolkit = [
        machine
        for machine in machines
        if _has_toolkit(machine, stack, settings, table)
        and (foreign[machine.host] is None or settings["toolkit"] == "true")
        and not _is_used(foreign[machine.host])
    ]
    with_nvcc = [m for m in machines if m in with_toolkit or _is_used(foreign[m.host])]
    with_apex = [machine for machine in machines if _has_apex(machine, stack, settings, table)]
    toolkit = dataclasses.asdict(_toolkit(stack, table)) if with_toolkit else None
    # Over all machines, since all or none get the extensions.
    obstacle = _no_extensions(with_apex, with_nvcc, stack, settings)
    return {
        machine.host: {
            "toolkit": toolkit if machine in with_toolkit else None,
            "found": foreign[machine.host] and dataclasses.asdict(foreign[machine.host]),
            "apex": (
                dataclasses.asdict(_apex(machine, foreign[machine.host], obstacle, stack, table))
                if machine in with_apex
                else None
            ),
        }
        for machine in machines
    }


def foreign_toolkit(machine, stack, settings, table):
    """Find a toolkit of somebody else in the folder of the stack's toolkit, or None.

    settings: as in toolkit_plan. A toolkit whose nvcc has the stack's version is used.
    """
    name = stack.get("toolkit")
    places = [folder for folder in (f"{LINK}-{name}", LINK) if folder in machine.toolkits]
    if not places or _word("toolkit", settings["toolkit"]) == "false":
        return None
    if not _has_toolkit(machine, stack, settings, table):
        return Foreign(places[0], used=False, reason="not used: nothing is built with it")
    # A user's toolkit is never replaced. The same version serves as well as Tandem's.
    for folder in places:
        version = machine.toolkits[folder]
        if version and version.split(".")[:2] == name.split("."):
            return Foreign(
                folder, used=True, reason=f"CUDA {version} is installed, and is used unchanged"
            )
    answer = machine.toolkits[places[0]]
    answer = f"says {answer}, not {name}" if answer else "gives no answer"
    return Foreign(
        places[0], used=False, reason=f"not used: Tandem did not install it, and its nvcc {answer}"
    )


def _is_used(foreign):
    return foreign is not None and foreign.used


def _word(name, value):
    word = "auto" if value in (None, "") else str(value).lower()
    if word not in SWITCH:
        raise PlanError(f"{name} is {value!r}: write auto, true or false")
    return word


def _has_toolkit(machine, stack, settings, table):
    # Training needs no toolkit, so auto brings one only if nvcc could build apex with it.
    if settings["toolkit"] == "auto":
        able = stack.get("toolkit_default") and stacks.known_gpus(machine, table)
        return bool(able and not machine.driver_kept and not compiler_obstacle(machine, stack))
    if settings["toolkit"] == "true":
        _refuse_architecture(machine, "toolkit")
    if settings["toolkit"] == "true" and not stack.get("toolkit"):
        raise PlanError(
            f"toolkit is true, but stack {stack['name']} has no CUDA: set toolkit: auto, or "
            "choose a stack with CUDA"
        )
    return settings["toolkit"] == "true"


def _refuse_architecture(machine, name):
    if machine.arch != "x86_64":
        raise PlanError(
            f"{name} is true, but Tandem has none for {machine.host}'s processor "
            f"({machine.arch}): write {name}=false into its line in inventory.ini"
        )


def _has_apex(machine, stack, settings, table):
    if settings["apex"] == "true" and not stack.get("apex"):
        with_apex = [name for name, row in table["rows"].items() if row.get("apex")]
        raise PlanError(
            f"apex is true, but stack {stack['name']} has no apex, because apex 25.07 removed "
            "amp, which torch.amp replaces: set apex: auto, or stack: "
            f"{' or '.join(with_apex)}"
        )
    if settings["apex"] == "auto":
        able = stack.get("apex") and stacks.known_gpus(machine, table)
        return bool(able and not machine.driver_kept)
    if settings["apex"] == "true":
        _refuse_architecture(machine, "apex")
    return settings["apex"] == "true"


def _toolkit(stack, table):
    name = stack["toolkit"]
    return Toolkit(
        folder=f"{LINK}-{name}",
        link=LINK,
        bundle=f"toolkit-{name}",
        parts=tuple(_part(entry) for entry in table["toolkits"][name]),
    )


def _part(entry):
    return Part(
        name=entry["name"],
        version=entry["version"],
        file=entry["file"],
        sha256=entry["sha256"] or "",
        url=entry.get("git") or (entry["url"] + entry["file"] if entry["url"] else ""),
        page=entry["page"],
        commit=entry.get("commit", ""),
    )


def _apex(machine, foreign, obstacle, stack, table):
    """Plan apex. foreign: somebody else's toolkit, or None; obstacle: that of _no_extensions."""
    # Only for the machine's GPUs: each further architecture makes the build longer.
    kit = foreign.folder if _is_used(foreign) else f"{LINK}-{stack['toolkit']}"
    sms = sorted({row["sm"] for _, row in stacks.known_gpus(machine, table)})
    gcc, package = compiler(machine, stack)
    return Apex(
        part=_part(table["apex"][stack["apex"]]),
        bundle=f"apex-{stack['apex']}",
        extensions=not obstacle,
        reason=obstacle or f"gcc {gcc}{f' by {package}' if package else ''}",
        arch_list=";".join(f"{sm // 10}.{sm % 10}" for sm in sms),
        cuda_home="" if obstacle else kit,
        compiler="" if obstacle else package,
    )


def _no_extensions(machines, with_toolkit, stack, settings):
    """Explain why apex has no CUDA extensions on all machines; "" if it has them.

    If one machine cannot have them none gets them, so that all compute alike.
    """
    if settings["apex_extensions"] == "false":
        return "apex_extensions is false"
    obstacles = {
        machine.host: compiler_obstacle(machine, stack)
        or ("" if machine in with_toolkit else "no CUDA toolkit")
        for machine in machines
    }
    clauses = [f"{host}: {obstacle}" for host, obstacle in obstacles.items() if obstacle]
    if clauses and settings["apex_extensions"] == "true":
        raise PlanError(
            "apex_extensions is true, but not every machine that gets apex can build them: "
            + "; ".join(clauses)
        )
    return clauses[0] if clauses else ""


def compiler_obstacle(machine, stack):
    """Explain why CUDA extensions cannot be built on a machine; "" if they can."""
    gcc, _ = compiler(machine, stack)
    if gcc is None:
        return "no gcc"
    if stacks.version(gcc)[0] > stack["gcc"]:
        return f"gcc {gcc}; extensions for CUDA {stack['toolkit']} need gcc {stack['gcc']} or older"
    return ""


def compiler(machine, stack):
    """Choose (version, package) of the gcc for extensions; package "": the machine's own."""
    # Role base installs the release's gcc. If that is too new, the newest of the archive's older
    # ones that the stack takes is used.
    present = machine.gcc or candidates.packaged_gcc(machine)
    if present is None or stacks.version(present)[0] <= stack["gcc"]:
        return present, ""
    packages = {**machine.offered, **machine.packages}
    older = {int(match[1]): name for name in packages if (match := COMPILER.match(name))}
    fitting = [number for number in older if number <= stack["gcc"]]
    if not fitting:
        return present, ""
    package = older[max(fitting)]
    return stacks.upstream(packages[package]), package
