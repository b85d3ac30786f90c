"""Plan the CUDA toolkit, cuDNN, NCCL and apex. Pure functions.

Read `toolkit_plan` first. Roles cuda, cudnn, nccl and apex carry the plan out, and `make
dry-provision` prints it. Machines are PlanFacts (boundary/facts.py); `toolkit_plan` also accepts
Ansible's variables. A stack is its row of stacks.yml: "toolkit" is a version such as "12.6", and
"gcc" the newest major version that this toolkit's nvcc accepts.
"""

import dataclasses
import re

from . import PlanError, reading, stacks
from . import driver_candidates as candidates

CUDA_LINK = "/usr/local/cuda"  # leads to the folder of a version: /usr/local/cuda-12.6
COMPILER = re.compile(r"g\+\+-(\d+)$")  # "g++-7"
SWITCH_VALUES = ("auto", "true", "false")


@dataclasses.dataclass(frozen=True)
class Component:
    """A file of a publisher: the toolkit's installer, an archive of cuDNN or NCCL, or apex."""

    name: str
    version: str
    file: str
    sha256: str  # "" if it is unknown: the SHA-256 of the first download counts then
    url: str  # "" if the user has to download the file from `page`
    page: str
    commit: str = ""  # if it is set, `url` is a git repository, from which the file is made


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """A folder with nvcc, and cuDNN and NCCL inside."""

    folder: str  # "/usr/local/cuda-12.6"
    link: str  # the path of the link to the folder
    bundle: str  # the folder in bundle/installers that has the files
    parts: tuple[Component, ...]


@dataclasses.dataclass(frozen=True)
class ForeignToolkit:
    """A toolkit that somebody else installed. Tandem never changes it."""

    folder: str
    used: bool  # true if it builds apex
    reason: str  # why it is used or not used


@dataclasses.dataclass(frozen=True)
class Apex:
    """apex. Each machine builds its own: with a wheel that another machine built, root would run
    code from that machine."""

    part: Component
    bundle: str  # the folder in bundle/installers that has the file
    extensions: bool
    reason: str  # why apex gets CUDA extensions or no extensions
    arch_list: str  # TORCH_CUDA_ARCH_LIST, from the machine's GPUs
    cuda_home: str  # the folder of the toolkit that builds the extensions; "" without extensions
    compiler: str = ""  # the package of an older g++, if the machine's is too new


def toolkit_plan(machines, stack, settings, table):
    """Return {host: {"toolkit", "foreign", "apex"}}: a Toolkit, a ForeignToolkit and an Apex.

    Each of the three is a dictionary with the fields of its class, or None. Only "toolkit" and
    "apex" will be installed. stack: the result of stacks.resolve; table: `stacks` of
    ansible/stacks.yml; settings: {"toolkit", "apex", "apex_extensions"}, each auto, true or false.
    Raises PlanError if a setting is impossible.
    """
    machines = [reading.as_machine_facts(machine) for machine in machines]
    settings = {name: _read_switch(name, value) for name, value in settings.items()}
    foreign = {
        machine.host: foreign_toolkit(machine, stack, settings, table) for machine in machines
    }
    # A machine with a foreign toolkit gets none of Tandem's, unless toolkit is true and the foreign
    # one cannot be used.
    with_toolkit = [
        machine
        for machine in machines
        if _gets_toolkit(machine, stack, settings, table)
        and (foreign[machine.host] is None or settings["toolkit"] == "true")
        and not _is_used(foreign[machine.host])
    ]
    with_foreign = [machine for machine in machines if _is_used(foreign[machine.host])]
    with_apex = [machine for machine in machines if _gets_apex(machine, stack, settings, table)]
    toolkit = dataclasses.asdict(_plan_toolkit(stack, table)) if with_toolkit else None
    # All machines that get apex get the extensions, or none gets them, so that all compute alike.
    obstacle = _explain_no_extensions(with_apex, with_toolkit + with_foreign, stack, settings)
    return {
        machine.host: {
            "toolkit": toolkit if machine in with_toolkit else None,
            "foreign": foreign[machine.host] and dataclasses.asdict(foreign[machine.host]),
            "apex": (
                dataclasses.asdict(
                    _plan_apex(machine, foreign[machine.host], obstacle, stack, table)
                )
                if machine in with_apex
                else None
            ),
        }
        for machine in machines
    }


def foreign_toolkit(machine, stack, settings, table):
    """Find a toolkit of somebody else where the stack's toolkit would be: ForeignToolkit or None.

    settings: as in toolkit_plan; only "toolkit" counts.
    """
    stack_version = stack.get("toolkit")  # "12.6"; None in the stack cpu
    # machine.toolkits: {folder: version}, without the toolkits that Tandem installed.
    candidate_folders = (f"{CUDA_LINK}-{stack_version}", CUDA_LINK)
    folders = [folder for folder in candidate_folders if folder in machine.toolkits]
    if not folders or _read_switch("toolkit", settings["toolkit"]) == "false":
        return None
    if not _gets_toolkit(machine, stack, settings, table):
        return ForeignToolkit(folders[0], used=False, reason="not used: nothing is built with it")
    # A toolkit of the stack's version can build apex as well as Tandem's toolkit.
    for folder in folders:
        version = machine.toolkits[folder]  # "12.6.85"; None if nvcc does not run
        if version and version.split(".")[:2] == stack_version.split("."):
            return ForeignToolkit(
                folder, used=True, reason=f"CUDA {version} is installed, and is used unchanged"
            )
    version = machine.toolkits[folders[0]]
    answer = f"says {version}, not {stack_version}" if version else "gives no answer"
    return ForeignToolkit(
        folders[0], used=False, reason=f"not used: Tandem did not install it, and its nvcc {answer}"
    )


def _is_used(foreign):
    return foreign is not None and foreign.used


def _read_switch(name, value):
    """Return a setting as one of SWITCH_VALUES. Raises PlanError for another value."""
    word = "auto" if value in (None, "") else str(value).lower()
    if word not in SWITCH_VALUES:
        raise PlanError(f"{name} is {value!r}: write auto, true or false")
    return word


def _gets_toolkit(machine, stack, settings, table):
    """Return true if settings and stack give the machine a toolkit, whoever installs it.

    Raises PlanError if toolkit is true, but Tandem has none for the machine or the stack.
    """
    # Training needs no toolkit, so auto installs one only if nvcc could build apex with it, in a
    # stack whose row asks for it, and not on machines that keep their driver (driver_policy).
    if settings["toolkit"] == "auto":
        has_use = stack.get("toolkit_default") and stacks.known_gpus(machine, table)
        return bool(has_use and not machine.driver_kept and not compiler_obstacle(machine, stack))
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


def _gets_apex(machine, stack, settings, table):
    """Return true if settings and stack give the machine apex.

    Raises PlanError if apex is true, but the stack or the machine's processor has none.
    """
    if settings["apex"] == "true" and not stack.get("apex"):
        with_apex = [name for name, row in table["rows"].items() if row.get("apex")]
        raise PlanError(
            f"apex is true, but stack {stack['name']} has no apex, because apex 25.07 removed "
            "amp, which torch.amp replaces: set apex: auto, or stack: "
            f"{' or '.join(with_apex)}"
        )
    if settings["apex"] == "auto":
        has_use = stack.get("apex") and stacks.known_gpus(machine, table)
        return bool(has_use and not machine.driver_kept)
    if settings["apex"] == "true":
        _refuse_architecture(machine, "apex")
    return settings["apex"] == "true"


def _plan_toolkit(stack, table):
    """Plan the stack's toolkit, the same for every machine that gets it."""
    name = stack["toolkit"]
    return Toolkit(
        folder=f"{CUDA_LINK}-{name}",
        link=CUDA_LINK,
        bundle=f"toolkit-{name}",
        parts=tuple(_make_component(entry) for entry in table["toolkits"][name]),
    )


def _make_component(entry):
    """Make the Component of an entry of "toolkits" or "apex" in stacks.yml."""
    return Component(
        name=entry["name"],
        version=entry["version"],
        file=entry["file"],
        sha256=entry["sha256"] or "",
        # The table has the address of the folder, or that of a git repository.
        url=entry.get("git") or (entry["url"] + entry["file"] if entry["url"] else ""),
        page=entry["page"],
        commit=entry.get("commit", ""),
    )


def _plan_apex(machine, foreign, obstacle, stack, table):
    """Plan apex for one machine.

    foreign: its ForeignToolkit or None; obstacle: the result of _explain_no_extensions.
    """
    toolkit_folder = foreign.folder if _is_used(foreign) else f"{CUDA_LINK}-{stack['toolkit']}"
    # apex is built only for the machine's GPUs: each further architecture makes the build longer.
    sms = sorted({row["sm"] for _, row in stacks.known_gpus(machine, table)})
    gcc, package = choose_compiler(machine, stack)
    return Apex(
        part=_make_component(table["apex"][stack["apex"]]),
        bundle=f"apex-{stack['apex']}",
        extensions=not obstacle,
        reason=obstacle or f"gcc {gcc}{f' by {package}' if package else ''}",
        arch_list=";".join(f"{sm // 10}.{sm % 10}" for sm in sms),  # sm 86 is "8.6"
        cuda_home="" if obstacle else toolkit_folder,
        compiler="" if obstacle else package,
    )


def _explain_no_extensions(machines, with_nvcc, stack, settings):
    """Explain why apex gets no CUDA extensions; "" if every one of `machines` can build them.

    machines: those that get apex; with_nvcc: those that have or get a toolkit. Raises PlanError if
    apex_extensions demands what a machine cannot build.
    """
    if settings["apex_extensions"] == "false":
        return "apex_extensions is false"
    obstacles = {
        machine.host: compiler_obstacle(machine, stack)
        or ("" if machine in with_nvcc else "no CUDA toolkit")
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
    gcc, _ = choose_compiler(machine, stack)
    if gcc is None:
        return "no gcc"
    if stacks.parse_version(gcc)[0] > stack["gcc"]:
        return f"gcc {gcc}; extensions for CUDA {stack['toolkit']} need gcc {stack['gcc']} or older"
    return ""


def choose_compiler(machine, stack):
    """Choose the gcc that builds extensions: (version, package), ("7.5.0", "g++-7").

    package is "" for the machine's default gcc. version is None if there is no gcc at all, and
    newer than nvcc accepts if there is no older g++.
    """
    # The default is the machine's gcc, or the gcc that its distribution would install. If that is
    # too new, the newest g++ that is old enough is used, of those installed or offered by apt.
    default = machine.gcc or candidates.packaged_gcc_version(machine)
    if default is None or stacks.parse_version(default)[0] <= stack["gcc"]:
        return default, ""
    packages = {**machine.offered, **machine.packages}  # {name: version}
    compilers = {int(match[1]): name for name in packages if (match := COMPILER.match(name))}
    fitting_versions = [number for number in compilers if number <= stack["gcc"]]
    if not fitting_versions:
        return default, ""
    package = compilers[max(fitting_versions)]
    return stacks.upstream_version(packages[package]), package
