"""What to do about a machine's NVIDIA driver: a pure function of facts, settings and stacks.yml.

Facts are those of ansible/library/machine_facts.py and driver_facts.py together, with the inventory
name as "host". roles/driver only carries the plan out.
"""

import dataclasses
import re
from typing import Any

from . import PlanError, driver_result, stacks
from . import driver_candidates as offers
from . import packages as apt

ADD_SOURCES = (
    "add the components contrib and non-free (Debian) or restricted and multiverse (Ubuntu) to "
    "/etc/apt/sources.list"
)
# Packages whose version is the driver's.
LIBRARIES = re.compile(
    r"(nvidia-kernel-common|libnvidia-compute)(-\d|$)"
    r"|lib(cuda1|nvidia-(tesla-(\d+-)?|legacy-\d+xx-)?ml1)$"
)
# Bytes that an installation needs: libraries and firmware, DKMS with its build and the installer,
# what the initial RAM disk is made of, and that disk.
SPACE = {
    "/usr": 1_500_000_000,
    "/var/lib": 1_300_000_000,
    "/var/tmp": 500_000_000,  # noqa: S108
    "/boot": 150_000_000,
}
# What of '*nvidia*' is no part of a driver, and outlives one: for containers that use cards.
CONTAINERS = re.compile(r"(lib)?nvidia-(container|docker)")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What group_vars/all.yml and the inventory may say; `default` where they say nothing."""

    name: str
    default: str | bool
    choices: tuple[Any, ...] = ()


# By what driver_plan calls them.
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
    """The settings for one machine: SETTINGS' values by their keys, and "at_hand".

    variables: {name: value}; at_hand: names of the installers that the control machine has. Raises
    PlanError for a value that a setting cannot have.
    """
    settings = {key: _value(variables, setting) for key, setting in SETTINGS.items()}
    return {**settings, "at_hand": list(at_hand)}


def _value(variables, setting):
    value = variables.get(setting.name, setting.default)
    if isinstance(setting.default, bool):  # an inventory says it as text
        words = {"true": True, "yes": True, "false": False, "no": False}
        if str(value).lower() not in words:
            raise PlanError(f"{setting.name} is {value!r}: write true or false")
        return words[str(value).lower()]
    if setting.choices and value not in setting.choices:
        choices = f"{', '.join(setting.choices[:-1])} or {setting.choices[-1]}"
        raise PlanError(f"{setting.name} is {value!r}: write {choices}")
    return str(value)


def driver_plan(facts, wanted, stack, table):
    """The plan for one machine.

    wanted: as driver_wanted has it. stack: a row of table["rows"] with "name". table: stacks.yml's
    "stacks".
    """
    try:
        plan = decide(facts, wanted, stack, table)
    except offers.Refusal as refusal:
        plan = offers.Plan("refuse", *refusal.args)
    except PlanError as error:
        reason = str(error).removeprefix(f"{facts['host']}: ")
        plan = offers.Plan("refuse", reason, "see docs/stacks.md")
    return dataclasses.asdict(plan)


def decide(facts, wanted, stack, table):
    """The plan, by which preflight, dry-provision and role driver judge alike.

    Raises offers.Refusal where the machine stands in the way, PlanError where no driver fits it.
    """
    plan = _plan(facts, wanted, stack, table)
    if plan.action not in ("nothing", "load"):
        _refuse_full_disks(facts)
        if plan.action != "build":
            _refuse_holds(facts, filter(driver_result.DRIVER.match, facts["packages"]))
        broken = apt.broken(facts)
        if broken:
            raise offers.Refusal(*broken)
    return plan if plan.action == "nothing" else _with_display(plan, facts)


def upgrade_plan(facts, wanted, stack, table, here=""):
    """What `make upgrade` does to one machine, as driver_plan has it, before anything is let go.

    here: the control machine's own machine_id, which does not reboot itself.

    Returns {"action": nothing, upgrade or refuse; "reason", "remedy"; "kernel": whether a newer
    kernel comes, and with it a reboot; "without": the display manager that stays off in that boot
    until the driver is there}.
    """
    names, packages = driver_result.kernel_packages(facts), facts["packages"]
    newer = [name for name in names if facts["offered"].get(name, packages[name]) != packages[name]]
    kernel = bool(facts["waiting_kernel"] or newer)
    plan = driver_plan(facts, {**wanted, "policy": "upgrade"}, stack, table)
    shape = {"remedy": plan["remedy"], "kernel": kernel, "without": ""}
    if plan["action"] == "refuse" or (plan["action"] == "nothing" and not kernel):
        return {"action": plan["action"], "reason": plan["reason"], **shape}
    coming = facts["waiting_kernel"] or f"by {', '.join(newer)}"
    parts = [f"a newer kernel ({coming})"] * kernel
    parts += [plan["reason"]] * (plan["action"] != "nothing")
    why = "; ".join(parts)
    try:
        if kernel:
            _refuse_full_disks(facts)
            _refuse_holds(facts, names)
        _refuse_processes(facts)
        refused = driver_result.reboot_refused(facts, wanted)
        if refused and not (here and facts["machine_id"] == here):
            raise offers.Refusal(f"{why}, and {refused[0]}", refused[1])
    except offers.Refusal as refusal:
        reason, remedy = refusal.args
        return {"action": "refuse", "reason": reason, **shape, "remedy": remedy}
    shape["without"] = _screen(facts) if kernel else ""
    return {"action": "upgrade", "reason": why, **shape}


def _plan(facts, wanted, stack, table):
    if stack["cuda"] is None:
        return offers.Plan("nothing", f"stack {stack['name']} needs no driver")
    rows = [row for _, row in stacks.known_gpus(facts, table)]
    hidden = stacks.hidden_gpu(facts)
    if rows and hidden:
        raise offers.Refusal(*hidden)
    if not rows:
        return offers.Plan("nothing", hidden[0] if hidden else "no NVIDIA card that takes part")
    loaded, needed = facts["driver"], stack["driver"]
    enough = loaded and stacks.version(loaded) >= stacks.version(needed)
    consistent = facts["driver_library"] in (None, loaded)
    if wanted["policy"] == "keep":
        if enough and consistent:
            return offers.Plan("nothing", f"driver {loaded} is loaded, {needed} or newer is needed")
        there = _installed(facts)
        old = there is not None and stacks.version(there[1]) < stacks.version(needed)
        raise offers.Refusal(
            f"{_state(facts)}, and stack {stack['name']} needs {needed} or newer; driver_policy: "
            "keep forbids a change",
            f"set driver_policy: {'upgrade' if old else 'install'} in group_vars/all.yml",
        )
    installed = _installed(facts)
    if facts["pending"]:  # an earlier run was interrupted, so the same way is tried again
        again = _in_the_same_way(wanted, installed[0]) if installed else wanted
        return _fresh(facts, again, stack, table, rows)
    if installed is not None:
        return _present(facts, wanted, stack, table, rows, installed)
    if loaded is None:
        return _fresh(facts, wanted, stack, table, rows)
    came = (
        f"driver {loaded} is loaded, and was installed neither from packages nor by NVIDIA's "
        "installer"
    )
    if enough and consistent:
        return offers.Plan("nothing", came)
    raise offers.Refusal(f"{came}; {needed} is needed", "remove it by hand, then run again")


def _in_the_same_way(wanted, kind):
    """The settings for a driver of the kind that is there; "bound": nobody set that kind."""
    return {**wanted, "source": kind, "bound": wanted["source"] == "auto"}


def removal(facts, kind):
    """The command that removes a driver, and nothing that is not part of it."""
    if kind == "runfile":
        return "sudo nvidia-uninstall"
    # A name with a + is kept by apt-get (its manual, "install").
    containers = [f" {name}+" for name in sorted(facts["packages"]) if CONTAINERS.match(name)]
    return f"sudo apt-get purge '*nvidia*'{''.join(containers)}"


def _installed(facts):
    """(package or runfile, version) of the installed driver; None if there is none."""
    own = [name for name in facts["packages"] if name not in facts["transitional"]]
    names = [name for name in own if stacks.PACKAGED.match(name)]
    if names and facts["runfile"]:
        raise offers.Refusal(
            f"it has two drivers, one over the other: {', '.join(sorted(names))} and NVIDIA's own "
            f"installer's {facts['runfile']}",
            f"remove both: {removal(facts, 'runfile')}; {removal(facts, 'package')}; "
            "then run again",
        )
    if facts["runfile"]:
        return "runfile", facts["runfile"]
    if not names:
        return None
    # Old ones may stand beside it: what programs load decides, else what was installed last.
    present = names + [name for name in own if LIBRARIES.match(name)]
    versions = {stacks.upstream(facts["packages"][name]) for name in present}
    if facts["driver_library"] in versions:
        return "package", facts["driver_library"]
    return "package", max(versions, key=stacks.version)


def _present(facts, wanted, stack, table, rows, installed):
    """The plan if a driver is installed."""
    kind, version = installed
    _refuse_foreign(version, kind, rows, removal(facts, kind))
    if wanted["source"] not in ("auto", kind):
        raise offers.Refusal(
            f"driver {version} was installed {_by(kind)}, and driver_source is "
            f"{wanted['source']}: the one is never installed over the other",
            f"set driver_source: auto, or remove it first: {removal(facts, kind)}",
        )
    newer = _newer(facts, wanted, stack, table, rows, installed)
    if newer is not None:
        if wanted["policy"] == "upgrade":
            return newer
        if stacks.version(version) < stacks.version(stack["driver"]):
            raise offers.Refusal(
                f"driver {version} is installed, and stack {stack['name']} needs {stack['driver']}",
                f"set driver_policy: upgrade, which installs {newer.version}",
            )
    hold = {"version": version, "hold": True}
    if facts["module"] is None:
        reason = f"driver {version} has no module for the running kernel {facts['kernel']}"
        if kind == "runfile" and not facts["dkms"]:
            # Installed anew, this time with DKMS, so that the next kernel gets its module.
            again = _fresh(facts, _in_the_same_way(wanted, kind), stack, table, rows)
            unknown = f"{reason}, and DKMS does not know it: {again.reason}"
            return dataclasses.replace(again, reason=unknown)
        signed = offers.signed_modules(facts)
        if signed:
            return offers.Plan("package", reason, packages=signed, **hold)
        return offers.Plan("build", reason, **offers.building(facts, version, table), **hold)
    if facts["driver"] == version and facts["driver_library"] in (None, version):
        return _for_the_next_boot(facts, version, table, hold)
    return offers.Plan("load", f"driver {version} is installed, but {_state(facts)}", **hold)


def _for_the_next_boot(facts, version, table, hold):
    """The plan for a driver that works: nothing, or its module for the next boot's kernel."""
    well, waiting = f"driver {version} is installed and loaded", facts["waiting_kernel"]
    if not waiting or facts["waiting_module"]:
        return offers.Plan("nothing", well, **hold)
    lacking = f"{well}, but the next boot starts kernel {waiting}, which has no module of it"
    if not facts["dkms"]:
        # Nothing rebuilds it now; after that boot the plan is a different one.
        return offers.Plan("nothing", f"{lacking}: make provision again after that boot", **hold)
    wrong = offers.too_new(waiting, version, table)
    if wrong:
        return offers.Plan("nothing", f"{lacking}: {wrong}: stay with this kernel", **hold)
    built = offers.building(facts, version, table)
    if not built.get("waiting"):
        return offers.Plan("nothing", f"{lacking} and no headers: stay with this kernel", **hold)
    return offers.Plan("build", lacking, **built, **hold)


def _refuse_foreign(version, kind, rows, removal):
    """Refuses a driver branch that does not support the cards, such as 590 for Pascal."""
    foreign = [row for row in rows if not offers.knows(stacks.version(version)[0], [row])]
    if not foreign:
        return
    limits = foreign[0]
    until = (
        f"{limits['newest_driver']} is the last"
        if limits["newest_driver"]
        else (f"{limits['oldest_driver']} is the first")
    )
    raise offers.Refusal(
        f"driver {version} was installed {_by(kind)} and does not support "
        f"{limits['name']} ({until})",
        f"remove it: {removal}; if it came from NVIDIA's own repository, also remove its "
        "line in /etc/apt/sources.list.d/; then run again",
    )


def _newer(facts, wanted, stack, table, rows, installed):
    """The plan for a newer driver that is installed in the same way; None if there is none."""
    kind, version = installed
    try:
        target = _fresh(facts, _in_the_same_way(wanted, kind), stack, table, rows)
    except (offers.Refusal, PlanError) as error:
        if stacks.version(version) >= stacks.version(stack["driver"]):
            return None
        # A refusal has a remedy of its own, by which what is missing may become available.
        consent = "" if wanted["policy"] == "upgrade" else ", then driver_policy: upgrade"
        own = f"{error.args[1]}{consent}; or " if len(error.args) > 1 else ""
        raise offers.Refusal(
            f"driver {version} was installed {_by(kind)}, stack {stack['name']} needs "
            f"{stack['driver']}, and no newer one can be installed that way: {error.args[0]}",
            f"{own}remove it ({removal(facts, kind)}) and run again: another way is then chosen",
        ) from None
    return target if stacks.version(target.version) > stacks.version(version) else None


def _fresh(facts, wanted, stack, table, rows):
    """The plan to install a driver: by packages if they suffice, else by NVIDIA's runfile."""
    if wanted["source"] == "runfile" or (wanted["source"] == "auto" and wanted["runfile"]):
        return offers.runfile(facts, wanted, stack, table, rows)
    plan = offers.packages(facts, wanted, stack, table, rows)
    if plan is not None:
        return plan
    why_not = offers.why_not_by_packages(facts, table)
    if wanted["source"] == "auto":
        plan = offers.runfile(facts, wanted, stack, table, rows)
        reason = f"{plan.reason}, since {why_not}" if why_not else plan.reason
        return dataclasses.replace(plan, reason=reason)
    or_else = "" if wanted.get("bound") else "; or set driver_source: auto"
    if why_not:
        raise offers.Refusal(why_not, f"fix what apt names{or_else}")
    raise offers.Refusal(
        f"its package archive offers no driver for its cards that stack {stack['name']} could use "
        f"({stack['driver']} or newer)",
        f"{ADD_SOURCES}{or_else}; or take a stack that needs less",
    )


def _refuse_full_disks(facts):
    full = [
        f"{folder} has {facts['free'][folder] / 1e9:.1f} GB free, and the driver needs "
        f"{needed / 1e9:.1f} GB"
        for folder, needed in SPACE.items()
        if facts["free"].get(folder, needed) < needed
    ]
    if full:
        raise offers.Refusal("; ".join(full), "make room there, then run again")


def _refuse_holds(facts, moving):
    """Refuses to move packages that somebody else holds."""
    theirs = set(facts.get("held", ())) - set(facts.get("held_by_us", ()))
    held = " ".join(sorted(theirs & set(moving)))
    if held:
        raise offers.Refusal(
            f"{held} would move, and is held there by somebody (apt-mark hold)",
            f"if whoever held it agrees, there: sudo apt-mark unhold {held}; then run again",
        )


def _refuse_processes(facts):
    users = [f"{row['command']} (process {row['pid']})" for row in facts["gpu_processes"]]
    if users:
        raise offers.Refusal(f"{', '.join(users)} uses the card", "end it, then run again")


def _screen(facts):
    """The running display manager, such as gdm.service; "" where none runs."""
    return facts["display_manager"] if facts["display_manager_active"] else ""


def _with_display(plan, facts):
    """The plan where a display runs: packages come under it, and the next boot changes drivers.

    NVIDIA's installer refuses to work under one, so it waits for a boot that ends without.
    """
    _refuse_processes(facts)
    shown = [f"{row['command']} (process {row['pid']})" for row in facts["displays"]]
    unit = _screen(facts)
    if not shown and not unit:
        return plan
    if plan.action != "runfile":
        return dataclasses.replace(plan, screen=True)
    if not unit:
        raise offers.Refusal(
            f"{', '.join(shown)} was not started by a display manager, and NVIDIA's installer does "
            "not work under it",
            "log out there, then run again",
        )
    return dataclasses.replace(plan, without=unit, reboot_first=True)


def _state(facts):
    if facts["driver"] is None:
        return "no driver is loaded"
    if facts["driver_library"] not in (None, facts["driver"]):
        return (
            f"the loaded driver is {facts['driver']} and the library {facts['driver_library']} "
            "(driver/library version mismatch)"
        )
    return f"driver {facts['driver']} is loaded"


def _by(kind):
    return "from packages" if kind == "package" else "by NVIDIA's own installer"
