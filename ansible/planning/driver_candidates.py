"""Which NVIDIA drivers a machine's cards can get: packages of its archive, or the runfile."""

import dataclasses
import re
from typing import Any

from . import stacks

OPEN, PROPRIETARY = "open", "proprietary"
# The branch from which NVIDIA recommends its open modules for Turing and newer, and from which
# its installer has --kernel-module-type.
OPEN_SINCE = 560
# From here on NVIDIA's installer has --skip-module-load. source: option_table.h of
# github.com/NVIDIA/nvidia-installer, of all its tags.
SKIPS_LOADING = "550.40.07"
# (private key, certificate) with which DKMS signs what it builds. source: prepare_signing() of
# Debian's dkms 3.0.10 and 3.2.2, which knows both distributions.
KEYS = {
    "debian": ("/var/lib/dkms/mok.key", "/var/lib/dkms/mok.pub"),
    "ubuntu": ("/var/lib/shim-signed/mok/MOK.priv", "/var/lib/shim-signed/mok/MOK.der"),
}
RUNFILE = re.compile(r"NVIDIA-Linux-x86_64-(\d+\.\d+(?:\.\d+)?)\.run$")
OLDER_KERNEL = (
    "boot an older kernel (its boot loader's menu, Advanced options) and remove this one; or look "
    "for a newer driver (docs/stacks.md, Newer drivers and kernels)"
)
NEWEST_KERNEL = (
    "install the newest kernel and reboot into it (sudo apt update && sudo apt full-upgrade && "
    "sudo reboot), then run again"
)
MODULES = "linux-modules-nvidia-"
SIGNED = re.compile(r"linux-modules-nvidia-(\d+(?:-server)?(?:-open)?)-")
SIGNED_FOR = re.compile(SIGNED.pattern + r"(\d+\.\d.*)")
HEADERS = re.compile(r"linux-headers-\d")
IMAGE = re.compile(r"linux-image-(?:unsigned-)?(\d+\.\d.*)")
# Debian's, of its own branch, and of older ones under the name of the data centre's cards:
# nvidia-tesla-470-kernel-dkms is the last that knows Kepler.
DEBIAN = re.compile(r"nvidia-((?:tesla-\d+-)?)(open-)?kernel-dkms$")
UBUNTU = re.compile(r"nvidia-driver-(\d+)(-server)?(-open)?$")


@dataclasses.dataclass(frozen=True)
class Plan:
    """`action` is one of

    nothing; refuse (`reason`, `remedy`); package (`packages`: apt's name=version); runfile (`url`,
    `sha256`, `flags`); build (make the module for the running kernel: dkms autoinstall); load.
    """

    action: str
    reason: str
    remedy: str = ""
    version: str = ""
    module: str = ""  # open or proprietary
    packages: tuple[Any, ...] = ()
    tools: tuple[Any, ...] = ()  # packages that building the module needs
    compiler: str = ""  # what builds it, if not the machine's own gcc
    key: str = ""  # the certificate that the firmware has to be told of, for Secure Boot
    waiting: str = ""  # a newer kernel that the next boot starts, which gets the module too
    url: str = ""
    sha256: str = ""
    flags: tuple[Any, ...] = ()
    screen: bool = False  # a display runs, under which packages come: a reboot changes drivers
    without: str = ""  # the display manager without which the boot before the installer ends
    reboot_first: bool = False  # to get rid of nouveau or a display, or into a newer kernel
    hold: bool = False


class Refusal(Exception):
    """(reason, remedy) why nothing is done."""


def packages(facts, wanted, stack, table, rows):
    """The plan for the newest fitting branch of packages, up to the table's; None if none fits."""
    fitting = []
    for branch, version, choice in _offers(facts):
        if stacks.version(version) < stacks.version(stack["driver"]):
            continue
        if wanted["version"] not in ("auto", stacks.upstream(version)):
            continue
        if branch <= max(row["branch"] for row in table["drivers"]) and knows(branch, rows):
            kinds = modules(rows, branch)
            names = (_ubuntu if choice["debian"] is None else _debian)(facts, choice)
            if (
                choice["module"] in kinds
                and names
                and (names[0].startswith(MODULES) or not too_new(facts["kernel"], version, table))
            ):
                # Signed modules first, then a desktop's branch on a desktop, then the newest branch
                # with the recommended module. source: ubuntu.com/server/docs, "NVIDIA drivers
                # installation": -server is for servers and computing, the others for desktops.
                signed, general = names[0].startswith(MODULES), not choice["server"]
                screen = general and facts["display_manager"] is not None
                rank = (signed, screen, branch, -kinds.index(choice["module"]), general)
                fitting.append((rank, version, choice, names))
    if not fitting:
        return None
    _, version, choice, names = max(fitting, key=lambda row: row[0])
    if not names[0].startswith(MODULES):
        _refuse_unsigned(facts, [row[2]["name"] for row in fitting])
    packages = tuple(f"{name}={facts['offered'][name]}" for name in names)
    reason = f"driver {stacks.upstream(version)} by packages"
    shape = {"version": stacks.upstream(version), "module": choice["module"], "hold": True}
    # A signed module that comes prebuilt is not built.
    built = {} if names[0].startswith(MODULES) else building(facts, version, table)
    return Plan("package", reason, packages=packages, **built, **shape)


def _offers(facts):
    """(branch, version, choice) of each driver that the archive has."""
    for name, version in sorted(facts["offered"].items()):
        if name in facts["offered_transitional"]:
            continue  # the branch that it leads to is offered by its own name
        branch = stacks.version(stacks.upstream(version))[0]
        ubuntu, debian = UBUNTU.match(name), DEBIAN.match(name)
        if ubuntu:
            kind = OPEN if ubuntu[3] else PROPRIETARY
            choice = {"name": name, "module": kind, "server": bool(ubuntu[2]), "debian": None}
            yield branch, version, choice
        elif debian:
            kind = OPEN if debian[2] else PROPRIETARY
            choice = {"name": name, "module": kind, "server": bool(debian[1]), "debian": debian[1]}
            yield branch, version, choice


def _debian(facts, choice):
    """The packages of a driver; None if apt could not install them."""
    if choice["name"] in facts["uninstallable"]:
        return None
    infix = choice["debian"]
    library = f"libnvidia-{infix}cuda1" if infix else "libcuda1"
    wanted = [choice["name"], f"nvidia-{infix}smi", library]
    if facts["display_manager"]:  # a desktop needs the part for displays too
        wanted.append(f"nvidia-{infix}driver")
    return [name for name in wanted if name in facts["offered"]]


def _ubuntu(facts, choice):
    """The packages of a driver; None if the archive lacks some, or apt could not install them.

    nvidia-driver has everything, nvidia-headless the module and the libraries for computing.
    """
    suffix = choice["name"].removeprefix("nvidia-driver-")
    utilities = f"nvidia-utils-{suffix.removesuffix('-open')}"
    ways = [[f"nvidia-headless-{suffix}", utilities], [choice["name"]]]
    ways = _signed(facts, suffix, utilities) + ways
    if facts["display_manager"]:  # a desktop needs the part for displays too
        ways = [names for names in ways if choice["name"] in names]
    for names in ways:
        if all(n in facts["offered"] and n not in facts["uninstallable"] for n in names):
            return names
    return None


def _signed(facts, suffix, utilities):
    """The ways to a driver's signed modules with which apt builds none by DKMS.

    With the modules of one kernel alone apt would: only the metapackage of the kernel's series
    provides what nvidia-driver and nvidia-headless depend on, nvidia-dkms.
    """
    ways = []
    for way, coming in sorted(facts["prebuilt"].items(), reverse=True):
        names, driver = way.split(), way.split()[-1]
        ours = driver in (f"nvidia-headless-no-dkms-{suffix}", f"nvidia-driver-{suffix}")
        serves = _serves_a_kernel(facts, suffix, [*names, *coming])
        if ours and serves and way not in facts["uninstallable"] and not _built(coming):
            ways.append(names + [utilities] * ("headless" in driver))
    return ways


def _serves_a_kernel(facts, suffix, coming):
    """Whether modules come, or are there, for the running kernel or for the one of the next boot.

    A metapackage brings those of its own kernel, which a newer one of somebody else's (mainline,
    xanmod) keeps from ever starting.
    """
    names = [*coming, *facts["packages"]]
    modules = {m[2] for name in names if (m := SIGNED_FOR.fullmatch(name)) and m[1] == suffix}
    images = {m[1] for name in coming if (m := IMAGE.fullmatch(name))}
    boots = {facts["kernel"], facts["waiting_kernel"] or facts["kernel"], *images}
    return bool(modules & {facts["kernel"], max(boots, key=_numbers)})


def _numbers(kernel):
    """As the boot loader orders kernels: module_utils/kernels.py does the same."""
    return [int(part) for part in re.findall(r"\d+", kernel)]


def _built(coming):
    """The packages, of those that would come, whose module is built on the machine."""
    return [name for name in coming if "dkms" in name]


def _refuse_unsigned(facts, drivers):
    """Refuses to build a module where there are signed ones that do not go with the drivers.

    So it is for some days when the archive has a newer driver than signed modules.
    """
    for way, coming in sorted(facts["prebuilt"].items(), reverse=True):
        modules, driver = way.split()[0], way.split()[-1]
        if not facts["secure_boot"] or driver.replace("headless-no-dkms", "driver") not in drivers:
            continue
        if way in facts["uninstallable"]:
            why = f"apt cannot install {modules} beside {driver} ({facts['uninstallable'][way]})"
        elif _built(coming):
            built = " and ".join(_built(coming))
            why = f"beside {modules} apt would install {built}, by which a module is built"
        else:
            continue
        raise Refusal(
            f"Secure Boot is on, and {why}",
            "the archive's driver and its signed modules do not match, as happens for some days "
            "after an update: run again later; or set driver_source: runfile, whose module is "
            "signed with a key that you enrol at that machine",
        )


def too_new(kernel, version, table):
    """A clause that says that a driver's module does not build on a kernel; "" if none is known.

    A driver of which nothing is known ends no later than the newer ones.
    """
    driver, running = stacks.version(stacks.upstream(version)), stacks.version(kernel)
    own = [
        row
        for row in table["ceilings"]
        if row["branch"] == driver[0] and driver >= stacks.version(row["since"])
    ]
    newer = [row for row in table["ceilings"] if row["branch"] > driver[0]]
    limits = [stacks.version(row["below"]) for row in own[:1] or newer]
    if not limits or running < min(limits):
        return ""
    name, below = stacks.upstream(version), ".".join(map(str, min(limits)))
    return f"driver {name} builds on kernels below {below} only, not on {kernel}"


def why_not_by_packages(facts, table):
    """A clause about a driver that the archive has and that could not be installed; "" if none."""
    if not facts["uninstallable"]:
        newest_first = sorted(_offers(facts), key=lambda row: row[0], reverse=True)
        new = (too_new(facts["kernel"], version, table) for _, version, _ in newest_first)
        return next(filter(None, new), "")
    name = max(facts["uninstallable"])
    why = facts["uninstallable"][name]
    remedy = ""
    if "firmware-nvidia" in why:
        remedy = "; the component non-free-firmware in /etc/apt/sources.list would fix it"
    return f"apt cannot install the archive's {name} ({why}{remedy})"


def signed_modules(facts):
    """The signed module for the running kernel, where the present driver came with such ones."""
    for name in sorted(set(facts["packages"]) - set(facts["transitional"])):
        signed = SIGNED.match(name)
        wanted = signed and f"linux-modules-nvidia-{signed[1]}-{facts['kernel']}"
        if wanted and wanted in facts["offered"]:
            return (f"{wanted}={facts['offered'][wanted]}",)
    return ()


def runfile(facts, wanted, stack, table, rows):
    row = dict(stacks.resolve_driver(facts, stack, table, wanted["version"]))
    if wanted["runfile"]:
        row.update(url=wanted["runfile"], sha256=wanted["runfile_sha256"])
    file = RUNFILE.search(row["url"])
    if file is None:
        raise Refusal(
            f"{row['url']} is not a runfile of a driver alone: its name is not "
            "NVIDIA-Linux-x86_64-VERSION.run",
            "set driver_runfile and driver_runfile_sha256",
        )
    version = file[1]
    if not row["sha256"]:
        raise Refusal(
            f"no SHA-256 of {file[0]} is known, and root would run it unchecked",
            f"get {row['url']}, compare its SHA-256 with one that you trust, and set "
            "driver_runfile and driver_runfile_sha256",
        )
    if stacks.version(version) < stacks.version(stack["driver"]):
        raise Refusal(
            f"the runfile's driver {version} is older than the {stack['driver']} that stack "
            f"{stack['name']} needs",
            "name a newer one in driver_runfile",
        )
    name = row["url"].rpartition("/")[2]
    if wanted["offline"] and "://" in row["url"] and name not in wanted["at_hand"]:
        raise Refusal(
            f"offline is true, and bundle/installers/{stack['name']}/{name} is missing",
            "on a machine with internet: make bundle",
        )
    branch = stacks.version(version)[0]
    kinds = modules(rows, branch)
    if not kinds:
        raise Refusal(f"no single driver supports {_names(rows)}", "take one of these cards out")
    if not knows(branch, rows):
        raise Refusal(
            f"the runfile's driver {version} does not support {_names(rows)}",
            "name another one in driver_runfile",
        )
    flags = ["--silent", "--dkms", "--disable-nouveau"]
    if branch >= OPEN_SINCE:
        flags.append(f"--kernel-module-type={kinds[0]}")
    if facts["secure_boot"]:
        flags += _signing(facts, version)
    return Plan("runfile", f"driver {version} by NVIDIA's installer", version=version,
                module=kinds[0], url=row["url"], sha256=row["sha256"], flags=tuple(flags),
                hold=True, **joined(building(facts, version, table), facts["nouveau"]))  # fmt: skip


def _signing(facts, version):
    """The installer's flags by which its module is signed, and not loaded before its key is known.

    DKMS takes over the module that the installer has built and signs none, so the installer signs,
    with DKMS's key. Without these flags it installs nothing at all, since it loads as a test what
    it has built. source: assisted_module_signing(), test_kernel_modules() and
    dkms_register_module() of nvidia-installer 590.48.01.
    """
    if stacks.version(version) < stacks.version(SKIPS_LOADING):
        raise Refusal(
            f"Secure Boot is on, and NVIDIA's installer {version} loads the module that it has "
            f"just built, whose key the firmware does not know yet: only {SKIPS_LOADING} and newer "
            "can leave that out",
            "name a newer one in driver_runfile, or switch Secure Boot off in the firmware's setup",
        )
    private, certificate = KEYS.get(facts["distribution"], KEYS["debian"])
    return [
        f"--module-signing-secret-key={private}",
        f"--module-signing-public-key={certificate}",
        "--skip-module-load",
    ]


def joined(built, nouveau):
    """What building needs, with a reboot first if nouveau holds the card."""
    return {**built, "reboot_first": built.get("reboot_first", False) or nouveau}


def modules(rows, branch):
    """Kinds of kernel modules that can drive all these cards, the recommended one first.

    Open ones know Turing and newer; Blackwell has no others (NVIDIA's open-gpu-kernel-modules).
    """
    sms = [row["sm"] for row in rows]
    if max(sms) >= 100:
        return (OPEN,) if min(sms) >= 75 else ()
    if min(sms) < 75 or branch < OPEN_SINCE:
        return (PROPRIETARY,)
    return (OPEN, PROPRIETARY)


def knows(branch, rows):
    """Whether a branch of the driver serves all these cards."""
    return all(
        row["oldest_driver"] <= branch and branch <= (row["newest_driver"] or branch)
        for row in rows
    )


def building(facts, version, table):
    """What building a driver's module takes, for the running kernel and for one that waits for a
    reboot: {"tools", "compiler", "waiting", "key"}, or {"reboot_first", "key"}. Refusal if it is
    not available, or if the driver does not know that kernel.
    """
    wrong = too_new(facts["kernel"], version, table)
    if wrong:
        raise Refusal(wrong, OLDER_KERNEL)
    if facts["secure_boot"] and not can_sign(facts):
        raise Refusal(
            "Secure Boot is on, and DKMS of Debian 11 cannot sign the module that it builds",
            "switch Secure Boot off in the firmware's setup, then run again",
        )

    key = KEYS.get(facts["distribution"], KEYS["debian"])[1] if facts["secure_boot"] else ""

    def had(name):
        return name in facts["packages"] or name in facts["offered"]

    headers, waiting = f"linux-headers-{facts['kernel']}", facts["waiting_kernel"]
    if not facts["kernel_headers"] and not had(headers):
        if waiting and had(f"linux-headers-{waiting}"):
            wrong = too_new(waiting, version, table)
            if wrong:
                raise Refusal(f"{wrong}, which the next boot starts", OLDER_KERNEL)
            return {"reboot_first": True, "key": key}  # afterwards that kernel is the running one
        raise Refusal(
            f"its package archive has no headers ({headers}) for the running kernel",
            # Beside a newer kernel of somebody else's the archive's newest would not start.
            NEWEST_KERNEL
            if any(
                _numbers(facts["kernel"]) < _numbers(name)
                for name in facts["offered"]
                if HEADERS.match(name)
            )
            else f"install {headers} from where that kernel came from; or {OLDER_KERNEL}",
        )
    compiler = kernels_gcc(facts)
    wanted = ["dkms", "gcc", "make"] + [compiler] * bool(compiler)
    wanted += ["openssl"] if key.startswith("/var/lib/dkms/") else []  # it makes the key
    wanted += [] if facts["kernel_headers"] else [headers]
    # With those of its series DKMS builds for each kernel to come.
    series = f"linux-headers-{facts['kernel_series']}"
    wanted += [series] * (series in facts["offered"] and series not in facts["packages"])
    missing = [name for name in wanted if not had(name)]
    if missing:
        raise Refusal(
            f"building the module needs {', '.join(missing)}, which its package archive lacks",
            "correct /etc/apt/sources.list, then run again",
        )
    if waiting and (
        facts["waiting_module"]
        or not had(f"linux-headers-{waiting}")
        or too_new(waiting, version, table)
    ):
        waiting = None
    wanted += [f"linux-headers-{waiting}"] if waiting else []
    return {"tools": tuple(wanted), "compiler": compiler, "waiting": waiting or "", "key": key}


def kernels_gcc(facts):
    """The gcc that built the running kernel, if the machine's own is older; else "".

    An older one does not know all the options that the kernel's makefiles pass: Ubuntu 22.04 has
    gcc 11, and its kernels from 6.5 on were built by gcc 12.
    """
    own = facts["gcc"] or packaged_gcc(facts)
    if own is None or facts["kernel_compiler"] is None:
        return ""
    older = stacks.version(own)[0] < int(facts["kernel_compiler"])
    name = f"gcc-{facts['kernel_compiler']}"
    return name if older and (name in facts["packages"] or name in facts["offered"]) else ""


def packaged_gcc(facts):
    """The version of the release's own gcc; None where no archive was asked, or it has none."""
    there = facts.get("packages", {}).get("gcc") or facts.get("offered", {}).get("gcc")
    return stacks.upstream(there) if there else None


def can_sign(facts):
    """Whether the release's DKMS signs what it builds, as Secure Boot requires."""
    return (facts["distribution"], facts["release"]) != ("debian", "11")


def _names(rows):
    return " and ".join(sorted({row["name"] for row in rows}))
