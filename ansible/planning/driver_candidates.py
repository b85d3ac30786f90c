"""Find the NVIDIA drivers for a machine's GPUs: packages of its archive, or NVIDIA's installer.

`by_packages` and `by_installer` make the actions, `module_build` plans the build of a module.
"""

import re
from dataclasses import dataclass
from typing import Any

from boundary.facts import PlanFacts

from . import stacks
from .driver_actions import InstallPackages, ModuleBuild, Refusal, RunInstaller

OPEN, PROPRIETARY = "open", "proprietary"
# The branch from which NVIDIA recommends its open modules for Turing and newer, and from which
# its installer has --kernel-module-type.
OPEN_SINCE = 560
# The branch from which there are no proprietary modules. source: NVIDIA's repositories since
# 615.71.09 (github.com/cupy/cupy/pull/10295), Ubuntu 26.04, where nvidia-driver-615 only leads to
# nvidia-driver-615-open, and "Proprietary Kernel Modules Removed" in the installation guide of 620.
OPEN_ONLY_SINCE = 615
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


@dataclass(frozen=True)
class Case:
    """Facts, settings and tables for one decision."""

    facts: PlanFacts
    settings: dict[str, Any]  # the result of driver.driver_wanted
    stack: dict[str, Any]  # which needs a driver
    table: dict[str, Any]  # of stacks.yml
    gpus: tuple[Any, ...] = ()  # the table's rows of the GPUs that take part

    @property
    def oldest(self):
        """Return the version of the oldest driver that the stack can use."""
        return stacks.version(self.stack["driver"])


@dataclass(frozen=True)
class Candidate:
    """A driver of the archive."""

    name: str  # of the package that depends on all of it
    version: str  # the package's
    module: str
    for_servers: bool
    packages: tuple[str, ...]  # that bring it; () where apt could not install them

    @property
    def branch(self):
        return stacks.version(stacks.upstream(self.version))[0]

    @property
    def is_prebuilt(self):
        """Return true if a package has its signed module, so that the machine builds none."""
        return self.packages[0].startswith(MODULES)


def by_packages(case):
    """Plan the newest fitting branch of packages, up to the table's; None if none fits."""
    fitting = candidates(case)
    if not fitting:
        return None
    best = fitting[0]
    if not best.is_prebuilt:
        _refuse_unsigned(case.facts, [candidate.name for candidate in fitting])
    version = stacks.upstream(best.version)
    return InstallPackages(
        f"driver {version}, from packages",
        version,
        module=best.module,
        packages=tuple(f"{name}={case.facts.offered[name]}" for name in best.packages),
        build=ModuleBuild() if best.is_prebuilt else module_build(case, best.version),
    )


def candidates(case):
    """List the archive's drivers for these GPUs, this stack and this kernel, the best first."""

    def preference(candidate):
        # A desktop's branch on a desktop. source: ubuntu.com/server/docs, "NVIDIA drivers
        # installation": -server is for servers and computing, the others for desktops.
        for_desktops = not candidate.for_servers
        return (
            candidate.is_prebuilt,
            for_desktops and case.facts.display_manager is not None,
            candidate.branch,
            -module_kinds(case.gpus, candidate.branch).index(candidate.module),
            for_desktops,
        )

    fitting = (each for each in archive_drivers(case.facts) if serves(each, case))
    return sorted(fitting, key=preference, reverse=True)


def serves(candidate, case):
    """Return true if a candidate may be installed for this case."""
    newest_tried = max(row["branch"] for row in case.table["drivers"])
    return (
        stacks.version(candidate.version) >= case.oldest
        and case.settings["version"] in ("auto", stacks.upstream(candidate.version))
        and candidate.branch <= newest_tried
        and supports(candidate.branch, case.gpus)
        and candidate.module in module_kinds(case.gpus, candidate.branch)
        and candidate.packages
        and (candidate.is_prebuilt or not kernel_too_new(case, candidate.version))
    )


def archive_drivers(facts):
    """Yield each driver of the archive as a Candidate."""
    for name, version in sorted(facts.offered.items()):
        ubuntu, debian = UBUNTU.match(name), DEBIAN.match(name)
        if name in facts.offered_transitional:
            continue  # the archive also has the branch that it leads to
        if ubuntu:
            kind, packages = OPEN if ubuntu[3] else PROPRIETARY, _ubuntu_packages(facts, name)
            yield Candidate(name, version, kind, bool(ubuntu[2]), tuple(packages))
        elif debian:
            kind = OPEN if debian[2] else PROPRIETARY
            packages = _debian_packages(facts, name, debian[1])
            yield Candidate(name, version, kind, bool(debian[1]), tuple(packages))


def _debian_packages(facts, name, infix):
    if name in facts.uninstallable:
        return []
    library = f"libnvidia-{infix}cuda1" if infix else "libcuda1"
    packages = [name, f"nvidia-{infix}smi", library]
    if facts.display_manager:  # a desktop needs the part for displays too
        packages.append(f"nvidia-{infix}driver")
    present = [package for package in packages if package in facts.offered]
    # Beside NVIDIA's repository, which has no 580 for Debian 13, apt prefers its newer libraries.
    versions = {stacks.upstream(facts.offered[package]) for package in present}
    return present if len(versions) == 1 else []


def _ubuntu_packages(facts, name):
    """Choose the packages of a driver; [] if apt cannot install any set of them."""
    # nvidia-driver has everything, nvidia-headless the module and the libraries for computing.
    suffix = name.removeprefix("nvidia-driver-")
    utilities = f"nvidia-utils-{suffix.removesuffix('-open')}"
    ways = [[f"nvidia-headless-{suffix}", utilities], [name]]
    ways = _signed_ways(facts, suffix, utilities) + ways
    if facts.display_manager:  # a desktop needs the part for displays too
        ways = [packages for packages in ways if name in packages]
    for packages in ways:
        if all(n in facts.offered and n not in facts.uninstallable for n in packages):
            return packages
    return []


def _signed_ways(facts, suffix, utilities):
    """List sets of packages that bring a driver's signed modules without a build by DKMS."""
    # A metapackage brings the modules of its own kernel, which never starts if somebody else's is
    # newer (mainline, xanmod). So modules have to come for the running kernel, or the next boot's.
    # The modules of one kernel are not enough: only the metapackage of the kernel's series provides
    # nvidia-dkms, on which nvidia-driver and nvidia-headless depend.
    ways = []
    for way, coming in sorted(facts.prebuilt.items(), reverse=True):
        names, driver = way.split(), way.split()[-1]
        ours = driver in (f"nvidia-headless-no-dkms-{suffix}", f"nvidia-driver-{suffix}")
        incoming = [*names, *coming]
        module_packages = map(SIGNED_FOR.fullmatch, [*incoming, *facts.packages])
        kernels = {match[2] for match in module_packages if match and match[1] == suffix}
        images = {match[1] for match in map(IMAGE.fullmatch, incoming) if match}
        boots = {facts.kernel, facts.waiting_kernel or facts.kernel, *images}
        follows = bool(kernels & {facts.kernel, max(boots, key=_numbers)})
        if ours and follows and way not in facts.uninstallable and not _built(coming):
            ways.append(names + [utilities] * ("headless" in driver))
    return ways


def _numbers(kernel):
    """Order kernels as the boot loader does; module_utils/kernels.py does the same."""
    return [int(part) for part in re.findall(r"\d+", kernel)]


def _built(coming):
    """List the incoming packages whose module is built on the machine."""
    return [name for name in coming if "dkms" in name]


def _refuse_unsigned(facts, drivers):
    """Refuse to build a module if the archive has signed ones that do not fit its drivers.

    That happens for some days when the archive has a newer driver than signed modules.
    """
    for way, coming in sorted(facts.prebuilt.items(), reverse=True):
        modules, driver = way.split()[0], way.split()[-1]
        if not facts.secure_boot or driver.replace("headless-no-dkms", "driver") not in drivers:
            continue
        if way in facts.uninstallable:
            cause = (
                f"apt cannot install {modules} together with {driver} ({facts.uninstallable[way]})"
            )
        elif _built(coming):
            built = " and ".join(_built(coming))
            cause = f"together with {modules}, apt would install {built}, which builds a module"
        else:
            continue
        raise Refusal(
            f"Secure Boot is on, and {cause}",
            "the archive's driver and its signed modules do not match, which can last some "
            "days after an update: run the command again later; or set driver_source: "
            "runfile, whose module is signed with a key that you enrol on that machine",
        )


def why_not_by_packages(case):
    """Explain in a clause why the archive's driver cannot be installed; "" if it has none."""
    uninstallable = case.facts.uninstallable
    if not uninstallable:
        newest_first = sorted(archive_drivers(case.facts), key=lambda c: c.branch, reverse=True)
        return next(filter(None, (kernel_too_new(case, c.version) for c in newest_first)), "")
    name = max(uninstallable)
    cause, remedy = uninstallable[name], ""
    if "firmware-nvidia" in cause:
        remedy = "; the component non-free-firmware in /etc/apt/sources.list would fix it"
    return f"apt cannot install the archive's {name} ({cause}{remedy})"


def signed_modules(facts):
    """Find the signed module for the running kernel; () if the driver came without signed ones."""
    for name in sorted(set(facts.packages) - set(facts.transitional)):
        signed = SIGNED.match(name)
        module = signed and f"{MODULES}{signed[1]}-{facts.kernel}"
        if module and module in facts.offered:
            return (f"{module}={facts.offered[module]}",)
    return ()


def by_installer(case):
    """Plan NVIDIA's installer: that of driver_runfile, or the table's newest that serves."""
    url, sha256, version = _installer_file(case)
    branch = stacks.version(version)[0]
    kinds = module_kinds(case.gpus, branch)
    if not kinds:
        raise Refusal(f"no single driver supports {_names(case)}", "remove one of these cards")
    if not supports(branch, case.gpus):
        raise Refusal(
            f"the runfile's driver {version} does not support {_names(case)}",
            "set driver_runfile to another one",
        )
    flags = ["--silent", "--dkms", "--disable-nouveau"]
    if branch >= OPEN_SINCE:
        flags.append(f"--kernel-module-type={kinds[0]}")
    if case.facts.secure_boot:
        flags += _signing_flags(case.facts, version)
    return RunInstaller(
        f"driver {version}, from NVIDIA's installer",
        version,
        module=kinds[0],
        build=module_build(case, version),
        url=url,
        sha256=sha256,
        flags=tuple(flags),
        nouveau=case.facts.nouveau,
    )


def _installer_file(case):
    """Choose (url, SHA-256, version) of the installer. Raises Refusal, since root would run it."""
    settings, required = (
        case.settings,
        f"{case.stack['driver']} that stack {case.stack['name']} needs",
    )
    row = stacks.resolve_driver(case.facts, case.stack, case.table, settings["version"])
    url, sha256 = row["url"], row["sha256"]
    if settings["runfile"]:
        url, sha256 = settings["runfile"], settings["runfile_sha256"]
    file = RUNFILE.search(url)
    if file is None:
        raise Refusal(
            f"{url} is not a runfile of a driver alone: its name is not "
            "NVIDIA-Linux-x86_64-VERSION.run",
            "set driver_runfile and driver_runfile_sha256",
        )
    if not sha256:
        raise Refusal(
            f"no SHA-256 of {file[0]} is known, so root would run an unchecked file",
            f"get {url}, compare its SHA-256 with one that you trust, and set "
            "driver_runfile and driver_runfile_sha256",
        )
    if stacks.version(file[1]) < case.oldest:
        raise Refusal(
            f"the runfile's driver {file[1]} is older than the {required}",
            "set driver_runfile to a newer one",
        )
    name = url.rpartition("/")[2]
    if settings["offline"] and "://" in url and name not in settings["at_hand"]:
        raise Refusal(
            f"offline is true, but bundle/installers/{case.stack['name']}/{name} is missing",
            "type make bundle on a machine with internet",
        )
    return url, sha256, file[1]


def _signing_flags(facts, version):
    """List the installer's flags to sign its module, and to load it only after a reboot.

    DKMS takes over the module that the installer has built and does not sign it, so the installer
    signs with DKMS's key. It loads a module as a test, and installs nothing if that fails.

    source: assisted_module_signing(), test_kernel_modules() and
    dkms_register_module() of nvidia-installer 590.48.01.
    """
    if stacks.version(version) < stacks.version(SKIPS_LOADING):
        raise Refusal(
            f"Secure Boot is on, and NVIDIA's installer {version} loads the module after it "
            "was built, although the firmware does not know its key yet: only "
            f"{SKIPS_LOADING} and newer can skip this step",
            "set driver_runfile to a newer one, or switch Secure Boot off in the firmware's setup",
        )
    private, certificate = KEYS.get(facts.distribution, KEYS["debian"])
    return [
        f"--module-signing-secret-key={private}",
        f"--module-signing-public-key={certificate}",
        "--skip-module-load",
    ]


def module_kinds(gpus, branch):
    """List the kinds of kernel modules that can drive all these GPUs, the recommended one first."""
    # Open ones know Turing and newer. Blackwell and the newest branches have no others (NVIDIA's
    # open-gpu-kernel-modules).
    sms = [row["sm"] for row in gpus]
    if max(sms) >= 100 or branch >= OPEN_ONLY_SINCE:
        return (OPEN,) if min(sms) >= 75 else ()
    if min(sms) < 75 or branch < OPEN_SINCE:
        return (PROPRIETARY,)
    return (OPEN, PROPRIETARY)


def supports(branch, gpus):
    """Return true if a branch of the driver serves all these GPUs."""
    return all(
        row["oldest_driver"] <= branch and branch <= (row["newest_driver"] or branch)
        for row in gpus
    )


def kernel_too_new(case, version, kernel=None):
    """Explain in a clause why a driver's module does not build on a kernel; "" if it may build.

    kernel: its release; None: the running one.
    """
    # A driver without a row of its own ends no later than the newer branches.
    kernel, ceilings = kernel or case.facts.kernel, case.table["ceilings"]
    name = stacks.upstream(version)
    driver = stacks.version(name)
    branch_rows = [
        row
        for row in ceilings
        if row["branch"] == driver[0] and driver >= stacks.version(row["since"])
    ]
    newer_rows = [row for row in ceilings if row["branch"] > driver[0]]
    limits = [stacks.version(row["below"]) for row in branch_rows[:1] or newer_rows]
    if not limits or stacks.version(kernel) < min(limits):
        return ""
    below = ".".join(map(str, min(limits)))
    return f"driver {name} builds only on kernels below {below}, not on {kernel}"


def module_build(case, version):
    """Plan the build of a driver's module, for the running kernel and one that waits for a reboot.

    Raises Refusal if packages are missing, or if the driver does not know the kernel.
    """
    facts = case.facts
    obstacle = kernel_too_new(case, version)
    if obstacle:
        raise Refusal(obstacle, OLDER_KERNEL)
    if facts.secure_boot and not can_sign(facts):
        raise Refusal(
            "Secure Boot is on, and DKMS of Debian 11 cannot sign the module that it builds",
            "switch Secure Boot off in the firmware's setup, then run again",
        )
    key = KEYS.get(facts.distribution, KEYS["debian"])[1] if facts.secure_boot else ""
    waiting = facts.waiting_kernel
    waiting_headers = bool(waiting) and _is_available(facts, f"linux-headers-{waiting}")
    # Without headers for the running kernel, those of the next boot's kernel may do.
    if not facts.kernel_headers and not _is_available(facts, f"linux-headers-{facts.kernel}"):
        if not waiting_headers:
            raise _no_headers(facts)
        obstacle = kernel_too_new(case, version, waiting)
        if obstacle:
            raise Refusal(f"{obstacle}, which the next boot starts", OLDER_KERNEL)
        return ModuleBuild(key=key, reboot_first=True)  # afterwards that kernel is the running one
    compiler = kernels_gcc(facts)
    tools = _tools(facts, compiler, key)
    lacks_module = waiting_headers and not facts.waiting_module
    if lacks_module and not kernel_too_new(case, version, waiting):
        return ModuleBuild((*tools, f"linux-headers-{waiting}"), compiler, key, waiting)
    return ModuleBuild(tools, compiler, key)


def _no_headers(facts):
    """Make the Refusal for a running kernel whose headers the archive lacks."""
    headers = f"linux-headers-{facts.kernel}"
    newer = [_numbers(facts.kernel) < _numbers(n) for n in facts.offered if HEADERS.match(n)]
    return Refusal(
        f"its package archive has no headers ({headers}) for the running kernel",
        # Beside a newer kernel of somebody else's the archive's newest would not start.
        NEWEST_KERNEL
        if any(newer)
        else f"install {headers} from the source of that kernel; or {OLDER_KERNEL}",
    )


def _tools(facts, compiler, key):
    """List the packages that a build needs; Refusal if the archive lacks one."""
    tools = ["dkms", "gcc", "make"] + [compiler] * bool(compiler)
    tools += ["openssl"] * key.startswith("/var/lib/dkms/")  # it makes the key
    tools += [f"linux-headers-{facts.kernel}"] * (not facts.kernel_headers)
    # With those of its series DKMS builds for each kernel to come.
    series = f"linux-headers-{facts.kernel_series}"
    tools += [series] * (series in facts.offered and series not in facts.packages)
    missing = [name for name in tools if not _is_available(facts, name)]
    if missing:
        raise Refusal(
            f"building the module needs {', '.join(missing)}, which its package archive lacks",
            "correct /etc/apt/sources.list, then run again",
        )
    return tuple(tools)


def _is_available(facts, name):
    return name in facts.packages or name in facts.offered


def kernels_gcc(facts):
    """Name the gcc that built the running kernel, if the machine's is older; else ""."""
    # An older gcc does not know all options of the kernel's makefiles: Ubuntu 22.04 has gcc 11, and
    # its kernels from 6.5 on were built by gcc 12.
    present = facts.gcc or packaged_gcc(facts)
    if present is None or facts.kernel_compiler is None:
        return ""
    is_older = stacks.version(present)[0] < int(facts.kernel_compiler)
    name = f"gcc-{facts.kernel_compiler}"
    return name if is_older and _is_available(facts, name) else ""


def packaged_gcc(facts):
    """Read the version of the release's gcc; None if no archive was asked, or it has none."""
    package_version = facts.packages.get("gcc") or facts.offered.get("gcc")
    return stacks.upstream(package_version) if package_version else None


def can_sign(facts):
    """Return true if the release's DKMS signs its modules, as Secure Boot requires."""
    return (facts.distribution, facts.release) != ("debian", "11")


def _names(case):
    return " and ".join(sorted({row["name"] for row in case.gpus}))
