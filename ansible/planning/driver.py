"""Decide about a machine's NVIDIA driver: a pure function of facts, settings and stacks.yml.

Read `decide` first; then driver_actions.py (the actions), driver_candidates.py (the drivers that
can be installed) and driver_result.py (the outcome, and held packages). Preflight, dry-provision
and role driver call this file, and only role driver changes the machine. Facts are PlanFacts
(boundary/facts.py), but driver_plan and upgrade_plan, the filters for roles, take Ansible's facts.
"""

import dataclasses
import re
from typing import Any, NamedTuple

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
# Packages whose version is the driver's: libnvidia-compute-570, libcuda1, libnvidia-ml1, ...
LIBRARIES = re.compile(
    r"(nvidia-kernel-common|libnvidia-compute)(-\d|$)"
    r"|lib(cuda1|nvidia-(tesla-(\d+-)?|legacy-\d+xx-)?ml1)$"
)
# Bytes that an installation needs on the disk of a folder.
REQUIRED_BYTES = {
    "/usr": 1_500_000_000,  # libraries and firmware
    "/var/lib": 1_300_000_000,  # DKMS with its build, and NVIDIA's installer
    "/var/tmp": 500_000_000,  # noqa: S108 - temporary files of update-initramfs
    "/boot": 150_000_000,  # the initial RAM disk
}
# Packages with nvidia in their name that are for containers, and stay when a driver is removed.
CONTAINER_PACKAGES = re.compile(r"(lib)?nvidia-(container|docker)")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of group_vars/all.yml and the inventory; `default` counts if they lack it."""

    name: str
    default: str | bool
    choices: tuple[Any, ...] = ()  # the possible values; () if any text is possible


# {key in the result of driver_wanted: setting}.
SETTINGS = {
    "policy": Setting("driver_policy", "install", ("keep", "install", "upgrade")),
    "source": Setting("driver_source", "auto", ("auto", "package", "runfile")),
    "version": Setting("driver_version", "auto"),  # or a version of the table
    "runfile": Setting("driver_runfile", ""),  # a URL or path, instead of the table's installer
    "runfile_sha256": Setting("driver_runfile_sha256", ""),
    "interrupt": Setting("allow_stop_display", False),  # a reboot may end a user's session
    "hold_kernel": Setting("driver_hold_kernel", False),  # even if the next kernel gets a module
    "offline": Setting("offline", False),
}


def driver_wanted(variables, at_hand):
    """Read the settings for one machine: SETTINGS' values by their keys, and "at_hand".

    variables: {name: value}; at_hand: names of the installers that the control node has. Raises
    PlanError for a value that a setting cannot have.
    """
    settings: dict[str, Any] = {"at_hand": list(at_hand)}
    for key, setting in SETTINGS.items():
        value = variables.get(setting.name)
        # YAML's `driver_version:` has the value None, and `driver_version=` in inventory.ini "".
        if value is None or value == "":
            settings[key] = setting.default
        elif isinstance(setting.default, bool):  # a value in inventory.ini is a text: "true"
            words = {"true": True, "yes": True, "false": False, "no": False}
            if str(value).lower() not in words:
                raise PlanError(f"{setting.name} is {value!r}: write true or false")
            settings[key] = words[str(value).lower()]
        elif setting.choices and value not in setting.choices:
            choices = f"{', '.join(setting.choices[:-1])} or {setting.choices[-1]}"
            raise PlanError(f"{setting.name} is {value!r}: write {choices}")
        else:
            settings[key] = str(value)
    return settings


def driver_plan(facts, settings, stack, table):
    """Plan one machine as a dictionary for role driver: driver_actions.as_dict.

    settings: the result of driver_wanted. stack: the result of stacks.resolve. table: "stacks" of
    stacks.yml.
    """
    return as_dict(plan(reading.as_machine_facts(facts), settings, stack, table))


def plan(facts, settings, stack, table):
    """Plan one machine as an action; a reason against an action becomes Refuse."""
    try:
        return decide(facts, settings, stack, table)
    except Refusal as refusal:
        reason, remedy = refusal.args
        return Refuse(reason, remedy=remedy)
    except PlanError as error:
        # Role driver prints the reason after the machine's name.
        reason = str(error).removeprefix(f"{facts.host}: ")
        return Refuse(reason, remedy="see docs/stacks.md")


def decide(facts, settings, stack, table):
    """Decide on the action for a machine's driver. Arguments: see driver_plan.

    Raises Refusal for an obstacle at the machine, PlanError if no driver fits the machine.
    """
    action = _choose_action(facts, settings, stack, table)
    # The obstacles below count only if role driver would change something.
    if isinstance(action, Nothing):
        return action
    writes_to_disk = isinstance(action, Installation)
    if writes_to_disk:
        _refuse_full_disks(facts)
        # A build installs tools, but neither upgrades nor removes a package of the driver.
        if not isinstance(action, BuildModule):
            _refuse_holds(facts, filter(driver_result.DRIVER.match, facts.packages))
        broken = apt.broken(facts)
        if broken:
            raise Refusal(*broken)
    _refuse_processes(facts)
    # Under a running display only the next boot changes drivers. displays: programs that draw;
    # login_unit: the login screen that starts them.
    displays = [f"{row.command} (process {row.pid})" for row in facts.displays]
    login_unit = _running_login_unit(facts)
    if not displays and not login_unit:
        return action
    # apt works under a display. For NVIDIA's installer, role driver boots without the login screen.
    if not isinstance(action, RunInstaller):
        return dataclasses.replace(action, screen=True)
    if not login_unit:
        raise Refusal(
            f"{', '.join(displays)} was not started by a display manager, and NVIDIA's installer "
            "does not work under it",
            "log out on that machine, then run the command again",
        )
    return dataclasses.replace(action, without=login_unit)


def _choose_action(facts, settings, stack, table):
    """Choose the action for these GPUs and this stack, without regard to disks and programs.

    Raises Refusal and PlanError.
    """
    if stack["cuda"] is None:
        return Nothing(f"stack {stack['name']} needs no driver")
    gpus = tuple(row for _, row in stacks.known_gpus(facts, table))
    hidden = stacks.find_hidden_gpu(facts)
    if gpus and hidden:
        raise Refusal(*hidden)
    if not gpus:
        return Nothing(hidden[0] if hidden else "no NVIDIA card that Tandem uses")
    case = Case(facts, settings, stack, table, gpus)
    # If an upgrade has changed the library, a reboot loads the module of that version.
    is_mixed = facts.driver and facts.driver_library not in (None, facts.driver)
    loaded_suffices = (
        facts.driver and not is_mixed and stacks.parse_version(facts.driver) >= case.oldest
    )
    if settings["policy"] == "keep" and loaded_suffices:
        return Nothing(
            f"driver {facts.driver} is loaded, the stack needs {stack['driver']} or newer; "
            "driver_policy: keep leaves it as it is"
        )
    installed = find_installed_driver(facts)
    if settings["policy"] == "keep":
        # Only policy upgrade replaces an installed driver that is too old.
        is_old = installed is not None and stacks.parse_version(installed.version) < case.oldest
        by_hand = "reboot it" if is_mixed else "install a suitable driver by hand"
        by_tandem = f", or set driver_policy: {'upgrade' if is_old else 'install'} for this machine"
        raise Refusal(
            f"{_describe_loaded(facts)}, but stack {stack['name']} needs {stack['driver']} or "
            "newer; driver_policy: keep forbids a change",
            f"{by_hand}{by_tandem if facts.arch == 'x86_64' else ''}",
        )
    # An installation was interrupted, so it is done again, in the same way if a driver is there.
    if facts.pending:
        return _plan_installation(_restrict_kind(case, installed.kind) if installed else case)
    if installed is not None:
        return _choose_for_installed(case, installed)
    if facts.driver is None:
        return _plan_installation(case)
    origin = (
        f"driver {facts.driver} is loaded, but neither packages nor NVIDIA's installer installed it"
    )
    if loaded_suffices:
        return Nothing(origin)
    raise Refusal(
        f"{origin}; the stack needs {stack['driver']}",
        "uninstall this driver with the program that installed it (`modinfo -n nvidia` shows "
        "its file), then run the command again",
    )


class InstalledDriver(NamedTuple):
    """A driver that is on the disk, whether it is loaded or not."""

    kind: str  # "package" or "runfile" (NVIDIA's own installer)
    version: str  # NVIDIA's: "570.133.07"


def find_installed_driver(facts):
    """Find the InstalledDriver; None if there is none. Raises Refusal if there are two."""
    # A transitional package has the name of an old branch, but only leads to a newer one.
    real_packages = [name for name in facts.packages if name not in facts.transitional]
    driver_packages = [name for name in real_packages if stacks.PACKAGED.match(name)]
    if driver_packages and facts.runfile:
        raise Refusal(
            f"it has two drivers at once: {', '.join(sorted(driver_packages))} from packages, and "
            f"{facts.runfile} from NVIDIA's own installer",
            f"remove both: {removal_command(facts, 'runfile')}; "
            f"{removal_command(facts, 'package')}; then run the command again",
        )
    if facts.runfile:
        return InstalledDriver("runfile", facts.runfile)
    if not driver_packages:
        return None
    # Libraries of an old branch may still be installed: the library that programs load decides.
    version_packages = driver_packages + [name for name in real_packages if LIBRARIES.match(name)]
    versions = {stacks.upstream_version(facts.packages[name]) for name in version_packages}
    if facts.driver_library in versions:
        return InstalledDriver("package", facts.driver_library)
    return InstalledDriver("package", max(versions, key=stacks.parse_version))


def _choose_for_installed(case, installed):
    """Choose a newer driver if policy or stack demand it; otherwise make the installed driver work.

    installed: an InstalledDriver, also in the functions below.
    """
    facts, stack, settings = case.facts, case.stack, case.settings
    kind, version = installed.kind, installed.version
    # An installed branch may be too new or too old for the GPUs, such as 590 for Pascal.
    branch = stacks.parse_version(version)[0]
    unsupported = [row for row in case.gpus if not candidates.supports_gpus(branch, [row])]
    if unsupported:
        # A generation of GPUs has a newest branch only if newer branches do not support it.
        generation = unsupported[0]
        newest_branch = generation["newest_driver"]
        oldest_branch = generation["oldest_driver"]
        limit = f"{newest_branch} is the last" if newest_branch else f"{oldest_branch} is the first"
        raise Refusal(
            f"driver {version} was installed {_describe_origin(kind)} and does not support "
            f"{generation['name']} ({limit})",
            f"remove it: {removal_command(facts, kind)}; if it came from NVIDIA's own repository, "
            "also remove its line in /etc/apt/sources.list.d/; then run the command again",
        )
    if settings["source"] not in ("auto", kind):
        raise Refusal(
            f"driver {version} was installed {_describe_origin(kind)}, but driver_source is "
            f"{settings['source']}: Tandem never installs one kind of driver over the other",
            f"set driver_source: auto, or first remove the driver: {removal_command(facts, kind)}",
        )
    newer = _plan_newer(case, installed)
    if newer is not None:
        if settings["policy"] == "upgrade":
            return newer
        if stacks.parse_version(version) < case.oldest:
            raise Refusal(
                f"driver {version} is installed, but stack {stack['name']} needs {stack['driver']}",
                f"set driver_policy: upgrade, which installs {newer.version}",
            )
    if facts.module is None:
        return _plan_running_kernel(case, installed)
    if facts.driver == version and facts.driver_library in (None, version):
        return _plan_next_boot(case, version)
    return LoadModule(f"driver {version} is installed, but {_describe_loaded(facts)}", version)


def _plan_running_kernel(case, installed):
    """Choose how the installed driver gets a module for the running kernel."""
    facts, version = case.facts, installed.version
    reason = f"driver {version} has no module for the running kernel {facts.kernel}"
    if installed.kind == "runfile" and not facts.dkms:
        # The installer runs again, this time with DKMS, so that the next kernel gets its module.
        action = _plan_installation(_restrict_kind(case, installed.kind))
        reason = f"{reason}, and DKMS does not know it: {action.reason}"
        return dataclasses.replace(action, reason=reason)
    # If modules such as linux-modules-nvidia-570-open-6.8.0-62-generic brought the driver, the
    # archive may have such modules for the running kernel.
    for name in sorted(set(facts.packages) - set(facts.transitional)):
        signed = candidates.SIGNED_MODULES.match(name)
        module = signed and f"{candidates.SIGNED_PREFIX}{signed[1]}-{facts.kernel}"
        if module and module in facts.offered:
            package = f"{module}={facts.offered[module]}"
            return InstallPackages(reason, version, packages=(package,))
    return BuildModule(reason, version, build=candidates.plan_module_build(case, version))


def _plan_next_boot(case, version):
    """Leave a driver that works as it is, or build its module for the kernel of the next boot."""
    facts, waiting = case.facts, case.facts.waiting_kernel
    state = f"driver {version} is installed and loaded"
    if not waiting or facts.waiting_module:
        return Nothing(state, version)
    lacking = (
        f"{state}, but the next boot starts kernel {waiting}, which has no module of this driver"
    )
    # The machine works today, so obstacles to the next kernel's module are no refusal.
    if not facts.dkms:
        return Nothing(f"{lacking}: run make provision again after that boot", version)
    obstacle = candidates.explain_kernel_limit(case, version, waiting)
    if obstacle:
        return Nothing(f"{lacking}: {obstacle}: stay with this kernel", version)
    build = candidates.plan_module_build(case, version)
    if not build.waiting:
        return Nothing(f"{lacking} and no headers: stay with this kernel", version)
    return BuildModule(lacking, version, build=build)


def _plan_newer(case, installed):
    """Plan the installation of a newer driver of the same kind; None if there is none.

    Raises Refusal if the driver is too old for the stack, and no newer one can be installed.
    """
    kind, version = installed.kind, installed.version
    try:
        newest = _plan_installation(_restrict_kind(case, kind))
    except (Refusal, PlanError) as error:
        # An obstacle to a newer driver does not matter if the installed driver suffices.
        if stacks.parse_version(version) >= case.oldest:
            return None
        # Only a Refusal has a remedy (args[1]). After the remedy, an upgrade may need consent.
        consent = "" if case.settings["policy"] == "upgrade" else ", then driver_policy: upgrade"
        remedy = f"{error.args[1]}{consent}; or " if len(error.args) > 1 else ""
        raise Refusal(
            f"driver {version} was installed {_describe_origin(kind)}, but stack "
            f"{case.stack['name']} needs {case.stack['driver']}, and no newer driver can be "
            f"installed in this way: {error.args[0]}",
            f"{remedy}remove this driver ({removal_command(case.facts, kind)}) and run the command "
            "again, which then installs a driver in another way",
        ) from None
    return newest if stacks.parse_version(newest.version) > stacks.parse_version(version) else None


def _restrict_kind(case, kind):
    """Restrict a case to one kind of driver, "package" or "runfile".

    The added setting "bound" is true if driver_source was auto. Then no remedy may propose auto,
    since auto would lead here again.
    """
    changes = {"source": kind, "bound": case.settings["source"] == "auto"}
    return dataclasses.replace(case, settings={**case.settings, **changes})


def _plan_installation(case):
    """Plan an installation by packages, or by NVIDIA's installer if no package suffices.

    Raises Refusal if neither is possible with these settings.
    """
    settings = case.settings
    # driver_runfile names an installer, so a person has chosen it although driver_source is auto.
    if settings["source"] == "runfile" or (settings["source"] == "auto" and settings["runfile"]):
        return candidates.plan_installer(case)
    action = candidates.plan_packages(case)
    if action is not None:
        return action
    why_not = candidates.explain_no_packages(case)
    if settings["source"] == "auto":
        action = candidates.plan_installer(case)
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


def removal_command(facts, kind):
    """Write the command that removes all packages or files of a driver, and only those."""
    if kind == "runfile":
        return "sudo nvidia-uninstall"
    # apt-get keeps a package whose name ends with + (its manual, "install").
    kept = [f" {name}+" for name in sorted(facts.packages) if CONTAINER_PACKAGES.match(name)]
    return f"sudo apt-get purge '*nvidia*'{''.join(kept)}"


def _refuse_full_disks(facts):
    # facts.free: {folder: bytes}. A folder that the facts lack counts as free enough.
    full = [
        f"{folder} has {facts.free[folder] / 1e9:.1f} GB free, and the driver needs "
        f"{required_bytes / 1e9:.1f} GB"
        for folder, required_bytes in REQUIRED_BYTES.items()
        if facts.free.get(folder, required_bytes) < required_bytes
    ]
    if full:
        raise Refusal(
            "; ".join(full), "free disk space on that machine, then run the command again"
        )


def _refuse_holds(facts, upgraded):
    """Refuse to upgrade packages that somebody other than role driver holds.

    upgraded: names of installed packages.
    """
    foreign_holds = set(facts.held) - set(facts.held_by_us)
    names = " ".join(sorted(foreign_holds & set(upgraded)))
    if names:
        raise Refusal(
            f"{names} would be upgraded, but somebody pinned it on that machine (apt-mark hold)",
            "if the person who pinned it agrees, type on that machine: sudo apt-mark unhold "
            f"{names}; then run the command again",
        )


def _refuse_processes(facts):
    """Raise Refusal if a program has a GPU open, since no driver can be replaced under it."""
    users = [f"{row.command} (process {row.pid})" for row in facts.gpu_processes]
    if users:
        raise Refusal(
            f"{', '.join(users)} uses the card", "end this program, then run the command again"
        )


def _running_login_unit(facts):
    """Name the unit of the running login screen, such as gdm.service; "" if none runs."""
    return facts.display_manager if facts.display_manager_active else ""


def _describe_loaded(facts):
    """Describe in a clause which driver is loaded, and whether its library fits."""
    if facts.driver is None:
        return "no driver is loaded"
    if facts.driver_library not in (None, facts.driver):
        return (
            f"the loaded driver is {facts.driver} and the library {facts.driver_library} "
            "(driver/library version mismatch)"
        )
    return f"driver {facts.driver} is loaded"


def _describe_origin(kind):
    return "from packages" if kind == "package" else "by NVIDIA's own installer"


def upgrade_plan(facts, settings, stack, table, control_id=""):
    """Plan `make upgrade` of one machine, before held packages are released.

    facts, settings, stack, table: see driver_plan; control_id: machine_id of the control node,
    which does not reboot itself.

    Returns {"action": nothing, upgrade or refuse; "reason", "remedy"; "kernel": true if a newer
    kernel comes, which needs a reboot; "without": the display manager that stays off during that
    boot until the driver is installed}.
    """
    facts = reading.as_machine_facts(facts)
    kernel_names, packages = driver_result.kernel_packages(facts), facts.packages
    newer_names = [
        name for name in kernel_names if facts.offered.get(name, packages[name]) != packages[name]
    ]
    # A kernel that waits for a reboot, or packages that would bring a newer kernel.
    kernel = facts.waiting_kernel or (f"from {', '.join(newer_names)}" if newer_names else "")
    action = plan(facts, {**settings, "policy": "upgrade"}, stack, table)
    upgrade = {"action": action.name, "reason": action.reason, "remedy": "", "kernel": bool(kernel)}
    upgrade["without"] = _running_login_unit(facts) if kernel else ""
    if isinstance(action, Refuse):
        return {**upgrade, "remedy": action.remedy}
    if isinstance(action, Nothing) and not kernel:
        return upgrade
    reasons = [f"a newer kernel is available ({kernel})"] * bool(kernel)
    reasons += [action.reason] * (not isinstance(action, Nothing))
    reason = "; ".join(reasons)
    # `plan` has checked the driver's obstacles. A new kernel has its own packages and reboot.
    try:
        if kernel:
            _refuse_full_disks(facts)
            _refuse_holds(facts, kernel_names)
        _refuse_processes(facts)
        # The control node does not reboot itself, so a refused reboot does not matter there.
        refused = driver_result.reboot_refused(facts, settings)
        if refused and not (control_id and facts.machine_id == control_id):
            raise Refusal(f"{reason}, and {refused[0]}", refused[1])
    except Refusal as refusal:
        reason, remedy = refusal.args
        return {**upgrade, "action": "refuse", "reason": reason, "remedy": remedy}
    return {**upgrade, "action": "upgrade", "reason": reason}
