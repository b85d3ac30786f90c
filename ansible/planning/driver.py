"""Decide about a machine's NVIDIA driver: a pure function of facts, settings and stacks.yml.

Read `decide` first; then driver_actions.py (the actions), driver_candidates.py (the drivers that
can be installed) and driver_result.py (the outcome, and held packages). Facts are PlanFacts
(boundary/facts.py); functions for roles take Ansible's facts. Role driver only carries the plan
out.
"""

import dataclasses
import re
from typing import Any

from . import PlanError, driver_result, reading, stacks
from . import driver_candidates as candidates
from . import packages as apt
from .driver_actions import (
    BuildModule,
    Installation,
    InstallPackages,
    LoadModule,
    Nothing,
    Refusal,
    Refuse,
    RunInstaller,
    as_dict,
)
from .driver_candidates import Case

ADD_SOURCES = (
    "add the components contrib and non-free (Debian) or restricted and multiverse (Ubuntu) to "
    "/etc/apt/sources.list"
)
# Packages whose version is the driver's.
LIBRARIES = re.compile(
    r"(nvidia-kernel-common|libnvidia-compute)(-\d|$)"
    r"|lib(cuda1|nvidia-(tesla-(\d+-)?|legacy-\d+xx-)?ml1)$"
)
# Bytes that an installation needs: libraries and firmware; DKMS with its build and the installer;
# temporary files of the initial RAM disk; that disk.
SPACE = {
    "/usr": 1_500_000_000,
    "/var/lib": 1_300_000_000,
    "/var/tmp": 500_000_000,  # noqa: S108
    "/boot": 150_000_000,
}
# Packages named *nvidia* that are no part of a driver, and outlive one: for containers with GPUs.
CONTAINERS = re.compile(r"(lib)?nvidia-(container|docker)")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of group_vars/all.yml and the inventory; `default` counts if they lack it."""

    name: str
    default: str | bool
    choices: tuple[Any, ...] = ()


# The settings by their keys in driver_plan.
SETTINGS = {
    "policy": Setting("driver_policy", "install", ("keep", "install", "upgrade")),
    "source": Setting("driver_source", "auto", ("auto", "package", "runfile")),
    "version": Setting("driver_version", "auto"),  # or one of the table's
    "runfile": Setting("driver_runfile", ""),  # instead of the table's, with its checksum
    "runfile_sha256": Setting("driver_runfile_sha256", ""),
    "interrupt": Setting("allow_stop_display", False),
    "hold_kernel": Setting("driver_hold_kernel", False),  # also where its next one gets a module
    "offline": Setting("offline", False),
}


def driver_wanted(variables, at_hand):
    """Read the settings for one machine: SETTINGS' values by their keys, and "at_hand".

    variables: {name: value}; at_hand: names of the installers that the control node has. Raises
    PlanError for a value that a setting cannot have.
    """
    settings = {key: _value(variables, setting) for key, setting in SETTINGS.items()}
    return {**settings, "at_hand": list(at_hand)}


def _value(variables, setting):
    value = variables.get(setting.name)
    if value is None or value == "":  # `driver_version:` without a value, or driver_version= alone
        return setting.default
    if isinstance(setting.default, bool):  # an inventory has texts only
        words = {"true": True, "yes": True, "false": False, "no": False}
        if str(value).lower() not in words:
            raise PlanError(f"{setting.name} is {value!r}: write true or false")
        return words[str(value).lower()]
    if setting.choices and value not in setting.choices:
        choices = f"{', '.join(setting.choices[:-1])} or {setting.choices[-1]}"
        raise PlanError(f"{setting.name} is {value!r}: write {choices}")
    return str(value)


def driver_plan(facts, settings, stack, table):
    """Plan one machine as a dictionary for role driver: driver_actions.as_dict.

    settings: the result of driver_wanted. stack: a row of table["rows"] with "name". table:
    "stacks" of stacks.yml.
    """
    return as_dict(plan(reading.known(facts), settings, stack, table))


def plan(facts, settings, stack, table):
    """Plan one machine as an action; a reason against one becomes Refuse."""
    try:
        return decide(facts, settings, stack, table)
    except Refusal as refusal:
        reason, remedy = refusal.args
        return Refuse(reason, remedy=remedy)
    except PlanError as error:
        reason = str(error).removeprefix(f"{facts.host}: ")
        return Refuse(reason, remedy="see docs/stacks.md")


def decide(facts, settings, stack, table):
    """Decide on the action, alike for preflight, dry-provision and role driver.

    Raises Refusal for an obstacle at the machine, PlanError if no driver fits it.
    """
    action = _choose(facts, settings, stack, table)
    if isinstance(action, Nothing):
        return action
    if isinstance(action, Installation):
        _refuse_full_disks(facts)
        if not isinstance(action, BuildModule):  # which moves no package
            _refuse_holds(facts, filter(driver_result.DRIVER.match, facts.packages))
        broken = apt.broken(facts)
        if broken:
            raise Refusal(*broken)
    _refuse_processes(facts)
    return _beside_display(action, facts)


def _choose(facts, settings, stack, table):
    """Choose the action for these GPUs and this stack, without regard to disks and programs."""
    if stack["cuda"] is None:
        return Nothing(f"stack {stack['name']} needs no driver")
    gpus = tuple(row for _, row in stacks.known_gpus(facts, table))
    hidden = stacks.hidden_gpu(facts)
    if gpus and hidden:
        raise Refusal(*hidden)
    if not gpus:
        return Nothing(hidden[0] if hidden else "no NVIDIA card that Tandem uses")
    case = Case(facts, settings, stack, table, gpus)
    if settings["policy"] == "keep":
        return _keep(case)
    installed = installed_driver(facts)
    if facts.pending:  # an earlier run was interrupted, so its kind of driver is tried again
        return _install(_restrict_kind(case, installed[0]) if installed else case)
    if installed is not None:
        return _for_installed(case, *installed)
    if facts.driver is None:
        return _install(case)
    origin = (
        f"driver {facts.driver} is loaded, but neither packages nor NVIDIA's installer installed it"
    )
    if _loaded_suffices(case):
        return Nothing(origin)
    raise Refusal(
        f"{origin}; the stack needs {stack['driver']}",
        "uninstall this driver with the program that installed it (`modinfo -n nvidia` shows "
        "its file), then run the command again",
    )


def _loaded_suffices(case):
    loaded = case.facts.driver
    consistent = case.facts.driver_library in (None, loaded)
    return bool(loaded) and stacks.version(loaded) >= case.oldest and consistent


def _keep(case):
    facts, stack = case.facts, case.stack
    if _loaded_suffices(case):
        needed = f"the stack needs {stack['driver']} or newer"
        return Nothing(
            f"driver {facts.driver} is loaded, {needed}; driver_policy: keep leaves it as it is"
        )
    installed = installed_driver(facts)
    is_old = installed is not None and stacks.version(installed[1]) < case.oldest
    is_mixed = facts.driver and facts.driver_library not in (None, facts.driver)
    by_hand = "reboot it" if is_mixed else "install it there by hand"
    by_tandem = f", or set driver_policy: {'upgrade' if is_old else 'install'} for it"
    raise Refusal(
        f"{_state(facts)}, but stack {stack['name']} needs {stack['driver']} or newer; "
        "driver_policy: keep forbids a change",
        f"{by_hand}{by_tandem if facts.arch == 'x86_64' else ''}",
    )


def installed_driver(facts):
    """Find the installed driver: (package or runfile, version); None if there is none.

    Raises Refusal if there are two.
    """
    real = [name for name in facts.packages if name not in facts.transitional]
    names = [name for name in real if stacks.PACKAGED.match(name)]
    if names and facts.runfile:
        raise Refusal(
            f"it has two drivers at once: {', '.join(sorted(names))} from packages, and "
            f"{facts.runfile} from NVIDIA's own installer",
            f"remove both: {removal(facts, 'runfile')}; {removal(facts, 'package')}; then run "
            "the command again",
        )
    if facts.runfile:
        return "runfile", facts.runfile
    if not names:
        return None
    # Old libraries may lie beside new ones: the one that programs load decides, else the newest.
    present = names + [name for name in real if LIBRARIES.match(name)]
    versions = {stacks.upstream(facts.packages[name]) for name in present}
    if facts.driver_library in versions:
        return "package", facts.driver_library
    return "package", max(versions, key=stacks.version)


def _for_installed(case, kind, version):
    """Choose a newer driver, if one is wanted; else make the installed one work."""
    facts, stack, settings = case.facts, case.stack, case.settings
    _refuse_foreign(case, kind, version)
    if settings["source"] not in ("auto", kind):
        raise Refusal(
            f"driver {version} was installed {_by(kind)}, but driver_source is "
            f"{settings['source']}: Tandem never installs one kind of driver over the other",
            f"set driver_source: auto, or first remove the driver: {removal(facts, kind)}",
        )
    newer = _newer(case, kind, version)
    if newer is not None:
        if settings["policy"] == "upgrade":
            return newer
        if stacks.version(version) < case.oldest:
            raise Refusal(
                f"driver {version} is installed, but stack {stack['name']} needs {stack['driver']}",
                f"set driver_policy: upgrade, which installs {newer.version}",
            )
    if facts.module is None:
        return _module_for_this_kernel(case, kind, version)
    if facts.driver == version and facts.driver_library in (None, version):
        return _for_the_next_boot(case, version)
    return LoadModule(f"driver {version} is installed, but {_state(facts)}", version)


def _module_for_this_kernel(case, kind, version):
    """Choose how the installed driver gets a module for the running kernel."""
    facts = case.facts
    reason = f"driver {version} has no module for the running kernel {facts.kernel}"
    if kind == "runfile" and not facts.dkms:
        # Installed anew, this time with DKMS, so that the next kernel gets its module.
        again = _install(_restrict_kind(case, kind))
        unknown = f"{reason}, and DKMS does not know it: {again.reason}"
        return dataclasses.replace(again, reason=unknown)
    signed = candidates.signed_modules(facts)
    if signed:
        return InstallPackages(reason, version, packages=signed)
    return BuildModule(reason, version, build=candidates.module_build(case, version))


def _for_the_next_boot(case, version):
    """Leave a driver that works as it is, or build its module for the kernel of the next boot."""
    facts, waiting = case.facts, case.facts.waiting_kernel
    state = f"driver {version} is installed and loaded"
    if not waiting or facts.waiting_module:
        return Nothing(state, version)
    lacking = (
        f"{state}, but the next boot starts kernel {waiting}, which has no module of this driver"
    )
    if not facts.dkms:
        # Nothing rebuilds it now; after that boot the plan is a different one.
        return Nothing(f"{lacking}: run make provision again after that boot", version)
    obstacle = candidates.kernel_too_new(case, version, waiting)
    if obstacle:
        return Nothing(f"{lacking}: {obstacle}: stay with this kernel", version)
    build = candidates.module_build(case, version)
    if not build.waiting:
        return Nothing(f"{lacking} and no headers: stay with this kernel", version)
    return BuildModule(lacking, version, build=build)


def _refuse_foreign(case, kind, version):
    """Refuse a driver branch that does not support the GPUs, such as 590 for Pascal."""
    branch = stacks.version(version)[0]
    unsupported = [row for row in case.gpus if not candidates.supports(branch, [row])]
    if not unsupported:
        return
    limits = unsupported[0]
    until = (
        f"{limits['newest_driver']} is the last"
        if limits["newest_driver"]
        else (f"{limits['oldest_driver']} is the first")
    )
    raise Refusal(
        f"driver {version} was installed {_by(kind)} and does not support "
        f"{limits['name']} ({until})",
        f"remove it: {removal(case.facts, kind)}; if it came from NVIDIA's own repository, "
        "also remove its line in /etc/apt/sources.list.d/; then run the command again",
    )


def _newer(case, kind, version):
    """Plan the installation of a newer driver of the same kind; None if there is none."""
    try:
        target = _install(_restrict_kind(case, kind))
    except (Refusal, PlanError) as error:
        if stacks.version(version) >= case.oldest:
            return None
        # A refusal has a remedy of its own, by which what is missing may become available.
        consent = "" if case.settings["policy"] == "upgrade" else ", then driver_policy: upgrade"
        remedy = f"{error.args[1]}{consent}; or " if len(error.args) > 1 else ""
        raise Refusal(
            f"driver {version} was installed {_by(kind)}, but stack {case.stack['name']} "
            f"needs {case.stack['driver']}, and no newer driver can be installed in this way: "
            f"{error.args[0]}",
            f"{remedy}remove it ({removal(case.facts, kind)}) and run the command again, "
            "which then chooses another way",
        ) from None
    return target if stacks.version(target.version) > stacks.version(version) else None


def _restrict_kind(case, kind):
    """Restrict a case to the kind of the installed driver; "bound": nobody set that kind."""
    bound = {"source": kind, "bound": case.settings["source"] == "auto"}
    return dataclasses.replace(case, settings={**case.settings, **bound})


def _install(case):
    """Install a driver by packages if they suffice, else by NVIDIA's installer."""
    settings = case.settings
    if settings["source"] == "runfile" or (settings["source"] == "auto" and settings["runfile"]):
        return candidates.by_installer(case)
    action = candidates.by_packages(case)
    if action is not None:
        return action
    why_not = candidates.why_not_by_packages(case)
    if settings["source"] == "auto":
        action = candidates.by_installer(case)
        reason = f"{action.reason}, since {why_not}" if why_not else action.reason
        return dataclasses.replace(action, reason=reason)
    or_else = "" if settings.get("bound") else "; or set driver_source: auto"
    if why_not:
        raise Refusal(why_not, f"fix the packages that apt lists{or_else}")
    raise Refusal(
        f"its package archive has no driver for its cards that stack {case.stack['name']} can "
        f"use ({case.stack['driver']} or newer)",
        f"{ADD_SOURCES}{or_else}; or choose a stack that needs an older driver",
    )


def removal(facts, kind):
    """Write the command that removes a driver, and nothing that is not part of it."""
    if kind == "runfile":
        return "sudo nvidia-uninstall"
    # A name with a + is kept by apt-get (its manual, "install").
    containers = [f" {name}+" for name in sorted(facts.packages) if CONTAINERS.match(name)]
    return f"sudo apt-get purge '*nvidia*'{''.join(containers)}"


def _refuse_full_disks(facts):
    full = [
        f"{folder} has {facts.free[folder] / 1e9:.1f} GB free, and the driver needs "
        f"{needed / 1e9:.1f} GB"
        for folder, needed in SPACE.items()
        if facts.free.get(folder, needed) < needed
    ]
    if full:
        raise Refusal(
            "; ".join(full), "free disk space on that machine, then run the command again"
        )


def _refuse_holds(facts, moving):
    """Refuse to move packages that somebody else holds."""
    theirs = set(facts.held) - set(facts.held_by_us)
    names = " ".join(sorted(theirs & set(moving)))
    if names:
        raise Refusal(
            f"{names} would be upgraded, but somebody pinned it on that machine (apt-mark hold)",
            "if the person who pinned it agrees, type on that machine: sudo apt-mark unhold "
            f"{names}; then run the command again",
        )


def _refuse_processes(facts):
    users = [f"{row.command} (process {row.pid})" for row in facts.gpu_processes]
    if users:
        raise Refusal(f"{', '.join(users)} uses the card", "end it, then run again")


def _running_screen(facts):
    """Name the running display manager, such as gdm.service; "" if none runs."""
    return facts.display_manager if facts.display_manager_active else ""


def _beside_display(action, facts):
    """Adapt the action to a running display, under which only the next boot changes drivers."""
    # Packages come under a display. NVIDIA's installer refuses to work under one, so it waits for a
    # boot without it.
    displays = [f"{row.command} (process {row.pid})" for row in facts.displays]
    unit = _running_screen(facts)
    if not displays and not unit:
        return action
    if not isinstance(action, RunInstaller):
        return dataclasses.replace(action, screen=True)
    if not unit:
        raise Refusal(
            f"{', '.join(displays)} was not started by a display manager, and NVIDIA's installer "
            "does not work under it",
            "log out on that machine, then run the command again",
        )
    return dataclasses.replace(action, without=unit)


def _state(facts):
    if facts.driver is None:
        return "no driver is loaded"
    if facts.driver_library not in (None, facts.driver):
        return (
            f"the loaded driver is {facts.driver} and the library {facts.driver_library} "
            "(driver/library version mismatch)"
        )
    return f"driver {facts.driver} is loaded"


def _by(kind):
    return "from packages" if kind == "package" else "by NVIDIA's own installer"


def upgrade_plan(facts, settings, stack, table, control_id=""):
    """Plan `make upgrade` of one machine, before held packages are released.

    control_id: machine_id of the control node, which does not reboot itself.

    Returns {"action": nothing, upgrade or refuse; "reason", "remedy"; "kernel": whether a newer
    kernel comes, and with it a reboot; "without": the display manager that stays off in that boot
    until the driver is there}.
    """
    facts = reading.known(facts)
    names, packages = driver_result.kernel_packages(facts), facts.packages
    newer = [name for name in names if facts.offered.get(name, packages[name]) != packages[name]]
    kernel = facts.waiting_kernel or (f"by {', '.join(newer)}" if newer else "")
    driver = plan(facts, {**settings, "policy": "upgrade"}, stack, table)
    shape = {"action": driver.name, "reason": driver.reason, "remedy": "", "kernel": bool(kernel)}
    shape["without"] = _running_screen(facts) if kernel else ""
    if isinstance(driver, Refuse):
        return {**shape, "remedy": driver.remedy}
    if isinstance(driver, Nothing) and not kernel:
        return shape
    reasons = [f"a newer kernel ({kernel})"] * bool(kernel)
    reasons += [driver.reason] * (not isinstance(driver, Nothing))
    reason = "; ".join(reasons)
    try:
        if kernel:
            _refuse_full_disks(facts)
            _refuse_holds(facts, names)
        _refuse_processes(facts)
        refused = driver_result.reboot_refused(facts, settings)
        if refused and not (control_id and facts.machine_id == control_id):
            raise Refusal(f"{reason}, and {refused[0]}", refused[1])
    except Refusal as refusal:
        reason, remedy = refusal.args
        return {**shape, "action": "refuse", "reason": reason, "remedy": remedy}
    return {**shape, "action": "upgrade", "reason": reason}
