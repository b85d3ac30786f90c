"""Find the NVIDIA drivers for a machine's GPUs: packages of its archive, or NVIDIA's installer.

driver.py decides whether a driver is installed at all, and from which source. It then calls
`plan_packages` or `plan_installer` here, and `plan_module_build` for a driver without a module.
"""

import re
from dataclasses import dataclass
from typing import Any

from boundary.facts import PlanFacts

from . import stacks
from .driver_actions import InstallPackages, ModuleBuild, Refusal, RunInstaller

OPEN, PROPRIETARY = "open", "proprietary"  # the kinds of kernel modules
# A branch is the first number of a version: 570 of 570.133.07.
# The branch from which NVIDIA recommends its open modules for Turing and newer, and from which
# its installer has --kernel-module-type.
OPEN_SINCE = 560
# The branch from which there are no proprietary modules. source: NVIDIA's repositories since
# 615.71.09 (github.com/cupy/cupy/pull/10295), Ubuntu 26.04, where nvidia-driver-615 only leads to
# nvidia-driver-615-open, and "Proprietary Kernel Modules Removed" in the installation guide of 620.
OPEN_ONLY_SINCE = 615
# From here on NVIDIA's installer has --skip-module-load. source: option_table.h of
# github.com/NVIDIA/nvidia-installer, of all its tags.
SKIP_LOAD_SINCE = "550.40.07"
# {distribution: (private key, certificate)} with which DKMS signs what it builds.
# source: prepare_signing() of Debian's dkms 3.0.10 and 3.2.2, which knows both distributions.
SIGNING_KEYS = {
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
SIGNED_PREFIX = "linux-modules-nvidia-"
# Ubuntu's signed modules: linux-modules-nvidia-570-server-open-6.8.0-64-generic for one kernel, or
# linux-modules-nvidia-570-generic-hwe-24.04, the metapackage for a series of kernels. Group 1 is
# the branch with its suffixes: "570-server-open".
SIGNED_MODULES = re.compile(r"linux-modules-nvidia-(\d+(?:-server)?(?:-open)?)-")
SIGNED_KERNEL = re.compile(SIGNED_MODULES.pattern + r"(\d+\.\d.*)")  # group 2: "6.8.0-64-generic"
HEADERS = re.compile(r"linux-headers-\d")  # of one kernel
IMAGE = re.compile(r"linux-image-(?:unsigned-)?(\d+\.\d.*)")  # group 1: "6.8.0-64-generic"
# Debian names its current branch nvidia-kernel-dkms. Older branches have the name of cards for data
# centres: nvidia-tesla-470-kernel-dkms is the last that knows Kepler. Group 1: "tesla-470-" or "".
DEBIAN_DRIVER = re.compile(r"nvidia-((?:tesla-\d+-)?)(open-)?kernel-dkms$")
# "nvidia-driver-570-server-open"
UBUNTU_DRIVER = re.compile(r"nvidia-driver-(\d+)(-server)?(-open)?$")


@dataclass(frozen=True)
class Case:
    """All that a decision about one machine's driver depends on."""

    facts: PlanFacts
    settings: dict[str, Any]  # the result of driver.driver_wanted
    stack: dict[str, Any]  # a row of stacks.yml that needs a driver
    table: dict[str, Any]  # "stacks" of stacks.yml
    gpus: tuple[Any, ...] = ()  # the table's rows (generations) of the GPUs that participate

    @property
    def oldest(self):
        """Return the version of the oldest driver that the stack can use, as numbers."""
        return stacks.parse_version(self.stack["driver"])


@dataclass(frozen=True)
class Candidate:
    """A driver of the archive."""

    name: str  # the package that depends on the whole driver
    version: str  # the version of that package: "570.133.07-0ubuntu1"
    module: str  # OPEN or PROPRIETARY
    for_servers: bool
    # Packages to install together, signed modules first. () if apt cannot install them; then
    # may_install returns false.
    packages: tuple[str, ...]

    @property
    def branch(self):
        """Return the first number of NVIDIA's version, 570."""
        return stacks.parse_version(stacks.upstream_version(self.version))[0]

    @property
    def is_prebuilt(self):
        """Return true if packages bring signed modules, so that the machine builds no module."""
        return self.packages[0].startswith(SIGNED_PREFIX)


def plan_packages(case):
    """Plan the packages of the best driver of rank_candidates; None if no driver fits.

    Raises Refusal if the best driver needs a build, and its module cannot be built or signed.
    """
    fitting = rank_candidates(case)
    if not fitting:
        return None
    best = fitting[0]
    # With Secure Boot a person would have to enrol the key of a module that is built here.
    if not best.is_prebuilt:
        _refuse_unsigned(case.facts, [candidate.name for candidate in fitting])
    version = stacks.upstream_version(best.version)
    return InstallPackages(
        f"driver {version}, from packages",
        version,
        module=best.module,
        packages=tuple(f"{name}={case.facts.offered[name]}" for name in best.packages),
        build=ModuleBuild() if best.is_prebuilt else plan_module_build(case, best.version),
    )


def rank_candidates(case):
    """List the archive's drivers for these GPUs, this stack and this kernel, the best first."""

    def preference(candidate):
        # A desktop gets a branch for desktops. source: ubuntu.com/server/docs, "NVIDIA drivers
        # installation": -server is for servers and computing, a name without it for desktops.
        for_desktops = not candidate.for_servers
        # The first difference decides, and the greater value wins.
        return (
            candidate.is_prebuilt,
            for_desktops and case.facts.display_manager is not None,
            candidate.branch,
            # The recommended kind of module is the first of the list: 0 is more than -1.
            -list_module_kinds(case.gpus, candidate.branch).index(candidate.module),
            # A machine without a display takes the branch for servers only if no other is as good.
            for_desktops,
        )

    fitting = [driver for driver in list_archive_drivers(case.facts) if may_install(driver, case)]
    return sorted(fitting, key=preference, reverse=True)


def may_install(candidate, case):
    """Return true if a candidate may be installed for this case."""
    # A branch that is newer than the table's newest driver has not been tried with the stacks.
    newest_branch = max(row["branch"] for row in case.table["drivers"])
    return (
        stacks.parse_version(candidate.version) >= case.oldest
        and case.settings["version"] in ("auto", stacks.upstream_version(candidate.version))
        and candidate.branch <= newest_branch
        and supports_gpus(candidate.branch, case.gpus)
        and candidate.module in list_module_kinds(case.gpus, candidate.branch)
        and candidate.packages
        and (candidate.is_prebuilt or not explain_kernel_limit(case, candidate.version))
    )


def list_archive_drivers(facts):
    """Yield each driver of the archive as a Candidate."""
    for name, version in sorted(facts.offered.items()):
        if name in facts.offered_transitional:
            continue  # the archive also has the branch that this package leads to
        ubuntu, debian = UBUNTU_DRIVER.match(name), DEBIAN_DRIVER.match(name)
        if ubuntu:
            server, open_module = ubuntu[2], ubuntu[3]
            packages = tuple(_ubuntu_packages(facts, name))
        elif debian:
            # Debian's older branches, "tesla-470-", are NVIDIA's branches for servers.
            server, open_module = debian.groups()
            packages = tuple(_debian_packages(facts, name, server))
        else:
            continue
        yield Candidate(name, version, OPEN if open_module else PROPRIETARY, bool(server), packages)


def _debian_packages(facts, name, infix):
    """List the packages of a driver of Debian; [] if apt cannot install them in one version.

    infix: "tesla-470-", or "".
    """
    if name in facts.uninstallable:
        return []
    library = f"libnvidia-{infix}cuda1" if infix else "libcuda1"
    packages = [name, f"nvidia-{infix}smi", library]
    if facts.display_manager:  # a desktop needs the libraries for displays too
        packages.append(f"nvidia-{infix}driver")
    present = [package for package in packages if package in facts.offered]
    # With NVIDIA's repository too, apt may combine Debian's module with newer libraries.
    versions = {stacks.upstream_version(facts.offered[package]) for package in present}
    return present if len(versions) == 1 else []


def _ubuntu_packages(facts, name):
    """Choose the packages of a driver of Ubuntu; [] if apt cannot install any set of them."""
    # nvidia-driver has everything, nvidia-headless the module and the libraries for computing. The
    # sets stand in the order of preference: signed modules, then few packages.
    suffix = name.removeprefix("nvidia-driver-")  # "570-server-open"
    utilities = f"nvidia-utils-{suffix.removesuffix('-open')}"
    package_sets = [
        *_list_signed_sets(facts, suffix, utilities),
        [f"nvidia-headless-{suffix}", utilities],
        [name],
    ]
    if facts.display_manager:  # a desktop needs the libraries for displays too
        package_sets = [packages for packages in package_sets if name in packages]
    for packages in package_sets:
        if all(p in facts.offered and p not in facts.uninstallable for p in packages):
            return packages
    return []


def _list_signed_sets(facts, suffix, utilities):
    """List sets of packages that bring a driver and its signed modules: DKMS builds nothing then.

    suffix: "570-server-open", for example; utilities: the package of its programs.
    """
    # A metapackage brings the modules of its own kernel. That kernel never starts on a machine with
    # a newer kernel (mainline, xanmod). Modules without the metapackage are not enough: only the
    # metapackage provides nvidia-dkms, on which nvidia-driver and nvidia-headless depend.
    package_sets = []
    # facts.prebuilt: {"MODULES... DRIVER": modules and kernels that apt would install with them}.
    # In reverse order, the smaller nvidia-headless-no-dkms comes before nvidia-driver.
    for joined_names, incoming in sorted(facts.prebuilt.items(), reverse=True):
        names = joined_names.split()
        driver = names[-1]
        if driver not in (f"nvidia-headless-no-dkms-{suffix}", f"nvidia-driver-{suffix}"):
            continue
        if joined_names in facts.uninstallable or _find_dkms_packages(incoming):
            continue
        added = [*names, *incoming]
        module_packages = map(SIGNED_KERNEL.fullmatch, [*added, *facts.packages])
        module_kernels = {match[2] for match in module_packages if match and match[1] == suffix}
        # The next boot starts the newest kernel of all that are installed then.
        images = {match[1] for match in map(IMAGE.fullmatch, added) if match}
        installed_kernels = {facts.kernel, facts.waiting_kernel or facts.kernel, *images}
        next_kernel = max(installed_kernels, key=_numbers)
        if module_kernels & {facts.kernel, next_kernel}:
            # nvidia-driver brings the utilities itself.
            package_sets.append(names + [utilities] * ("headless" in driver))
    return package_sets


def _numbers(kernel):
    """Read the numbers by which the boot loader orders kernels, as module_utils/kernels.py does."""
    return [int(digits) for digits in re.findall(r"\d+", kernel)]


def _find_dkms_packages(incoming):
    """List the incoming packages with which the machine builds a module: dkms, nvidia-dkms-570."""
    return [name for name in incoming if "dkms" in name]


def _refuse_unsigned(facts, drivers):
    """With Secure Boot, refuse a build if the archive's signed modules do not fit its drivers.

    This is the case for some days after the archive got a newer driver, until the signed modules
    follow. drivers: names of the packages that would need a build, such as nvidia-driver-570.
    """
    if not facts.secure_boot:
        return
    for joined_names, incoming in sorted(facts.prebuilt.items(), reverse=True):
        names = joined_names.split()
        modules, driver = names[0], names[-1]
        if driver.replace("headless-no-dkms", "driver") not in drivers:
            continue
        if joined_names in facts.uninstallable:
            apt_error = facts.uninstallable[joined_names]
            cause = f"apt cannot install {modules} together with {driver} ({apt_error})"
        elif _find_dkms_packages(incoming):
            built = " and ".join(_find_dkms_packages(incoming))
            cause = (
                f"together with {modules}, apt would install {built}, to build an unsigned module"
            )
        else:
            continue
        raise Refusal(
            f"Secure Boot is on, and {cause}",
            "run the command again in some days, because after an update the archive may lack "
            "signed modules for its new driver; or set driver_source: runfile, whose module "
            "is signed with a key that you enrol on that machine",
        )


def explain_no_packages(case):
    """Explain in a clause why the archive's driver cannot be installed.

    Returns "" if the archive has no driver, or only drivers that do not fit for other reasons.
    """
    uninstallable = case.facts.uninstallable
    if not uninstallable:
        # apt can install all drivers, so perhaps their modules do not build on this kernel. The
        # clause is about the newest branch that has this obstacle.
        drivers = list_archive_drivers(case.facts)
        newest_first = sorted(drivers, key=lambda driver: driver.branch, reverse=True)
        clauses = (explain_kernel_limit(case, driver.version) for driver in newest_first)
        return next(filter(None, clauses), "")
    name = max(uninstallable)  # usually of the newest branch
    cause, remedy = uninstallable[name], ""
    # Debian's driver needs this firmware, which is in a component of its own since Debian 12.
    if "firmware-nvidia" in cause:
        remedy = "; the component non-free-firmware in /etc/apt/sources.list would fix it"
    return f"apt cannot install the archive's {name} ({cause}{remedy})"


def plan_installer(case):
    """Plan NVIDIA's installer: the file of driver_runfile, or the table's newest usable file.

    Raises Refusal if no file is usable, or if its module cannot be built or signed.
    """
    url, sha256, version = _choose_installer(case)
    branch = stacks.parse_version(version)[0]
    kinds = list_module_kinds(case.gpus, branch)
    gpu_names = " and ".join(sorted({row["name"] for row in case.gpus}))  # "Kepler and Turing"
    if not kinds:
        raise Refusal(f"no single driver supports {gpu_names}", "remove one of these cards")
    if not supports_gpus(branch, case.gpus):
        raise Refusal(
            f"the runfile's driver {version} does not support {gpu_names}",
            "set driver_runfile to a runfile that does",
        )
    flags = ["--silent", "--dkms", "--disable-nouveau"]
    if branch >= OPEN_SINCE:
        flags.append(f"--kernel-module-type={kinds[0]}")
    if case.facts.secure_boot:
        # DKMS takes over the module that the installer has built, and DKMS does not sign this
        # module. So the installer signs the module, with DKMS's key. The installer's test loads
        # the module, which fails until a person has enrolled the key. source:
        # assisted_module_signing(), test_kernel_modules() and dkms_register_module() of
        # nvidia-installer 590.48.01.
        if stacks.parse_version(version) < stacks.parse_version(SKIP_LOAD_SINCE):
            raise Refusal(
                f"Secure Boot is on, and NVIDIA's installer {version} loads the module after it "
                "was built, although the firmware does not know its key yet: only "
                f"{SKIP_LOAD_SINCE} and newer can skip this step",
                "set driver_runfile to a newer one, or switch Secure Boot off in the firmware's "
                "setup",
            )
        private_key, certificate = _find_signing_key(case.facts)
        flags += [
            f"--module-signing-secret-key={private_key}",
            f"--module-signing-public-key={certificate}",
            "--skip-module-load",
        ]
    return RunInstaller(
        f"driver {version}, from NVIDIA's installer",
        version,
        module=kinds[0],
        build=plan_module_build(case, version),
        url=url,
        sha256=sha256,
        flags=tuple(flags),
        nouveau=case.facts.nouveau,
    )


def _choose_installer(case):
    """Choose (url, SHA-256, version) of the installer; url may also be a path.

    Raises Refusal for a file that is no driver, is too old or is missing. Root will run the file,
    so a file without a known SHA-256 is refused too.
    """
    settings = case.settings
    row = stacks.resolve_driver(case.facts, case.stack, case.table, settings["version"])
    url, sha256 = row["url"], row["sha256"]
    if settings["runfile"]:
        url, sha256 = settings["runfile"], settings["runfile_sha256"]
    file = RUNFILE.search(url)
    if file is None:
        raise Refusal(
            f"{url} is not a runfile that contains only a driver: its name is not "
            "NVIDIA-Linux-x86_64-VERSION.run",
            "set driver_runfile and driver_runfile_sha256",
        )
    if not sha256:
        raise Refusal(
            f"no SHA-256 of {file[0]} is known, so root would run an unchecked file",
            f"get {url}, compare its SHA-256 with one that you trust, and set "
            "driver_runfile and driver_runfile_sha256",
        )
    if stacks.parse_version(file[1]) < case.oldest:
        raise Refusal(
            f"the runfile's driver {file[1]} is older than the {case.stack['driver']} that stack "
            f"{case.stack['name']} needs",
            "set driver_runfile to a newer one",
        )
    # A URL needs internet, unless `make bundle` has downloaded its file.
    name = url.rpartition("/")[2]
    if settings["offline"] and "://" in url and name not in settings["at_hand"]:
        raise Refusal(
            f"offline is true, but bundle/installers/{case.stack['name']}/{name} is missing",
            "type make bundle on a machine with internet",
        )
    return url, sha256, file[1]


def _find_signing_key(facts):
    """Find (private key, certificate) with which DKMS of the machine's distribution signs."""
    return SIGNING_KEYS.get(facts.distribution, SIGNING_KEYS["debian"])


def list_module_kinds(gpus, branch):
    """List the kinds of kernel modules that can drive all these GPUs, the recommended one first."""
    # Open modules support Turing (sm 75) and newer GPUs. For Blackwell (sm 100), and in the newest
    # branches, there are only open modules. source: the README of NVIDIA's open-gpu-kernel-modules.
    sms = [row["sm"] for row in gpus]
    if max(sms) >= 100 or branch >= OPEN_ONLY_SINCE:
        return (OPEN,) if min(sms) >= 75 else ()
    if min(sms) < 75 or branch < OPEN_SINCE:
        return (PROPRIETARY,)
    return (OPEN, PROPRIETARY)


def supports_gpus(branch, gpus):
    """Return true if a branch of the driver serves all these GPUs."""
    limits = [(row["oldest_driver"], row["newest_driver"] or branch) for row in gpus]
    return all(oldest <= branch <= newest for oldest, newest in limits)


def explain_kernel_limit(case, version, kernel=None):
    """Explain in a clause why a driver's module does not build on a kernel; "" if it may build.

    kernel: the release of the kernel; None: the running kernel.
    """
    kernel, ceilings = kernel or case.facts.kernel, case.table["ceilings"]
    name = stacks.upstream_version(version)
    driver = stacks.parse_version(name)
    # A row of a branch counts from the driver "since" on. The first row is the one with the newest
    # "since", so it decides.
    branch_rows = [row for row in ceilings if row["branch"] == driver[0]]
    branch_rows = [row for row in branch_rows if driver >= stacks.parse_version(row["since"])]
    # A driver without a row cannot build on newer kernels than the newer branches can.
    newer_rows = [row for row in ceilings if row["branch"] > driver[0]]
    limits = [stacks.parse_version(row["below"]) for row in branch_rows[:1] or newer_rows]
    if not limits or stacks.parse_version(kernel) < min(limits):
        return ""
    below = ".".join(map(str, min(limits)))
    return f"driver {name} builds only on kernels below {below}, not on {kernel}"


def plan_module_build(case, version):
    """Plan the build of a driver's module, for the running kernel and the next boot's kernel.

    Raises Refusal if packages are missing, if the driver does not support the kernel, or if DKMS
    cannot sign.
    """
    facts = case.facts
    obstacle = explain_kernel_limit(case, version)
    if obstacle:
        raise Refusal(obstacle, OLDER_KERNEL)
    if facts.secure_boot and not dkms_can_sign(facts):
        raise Refusal(
            "Secure Boot is on, and DKMS of Debian 11 cannot sign the module that it builds",
            "switch Secure Boot off in the firmware's setup, then run again",
        )
    key = _find_signing_key(facts)[1] if facts.secure_boot else ""  # the certificate
    waiting = facts.waiting_kernel
    waiting_headers = bool(waiting) and _is_available(facts, f"linux-headers-{waiting}")
    # Without headers for the running kernel, headers for the next boot's kernel may do.
    headers = f"linux-headers-{facts.kernel}"
    if not facts.kernel_headers and not _is_available(facts, headers):
        if not waiting_headers:
            # The boot loader would not start the archive's newest kernel if the running one is
            # newer.
            archive_kernels = [name for name in facts.offered if HEADERS.match(name)]
            if any(_numbers(facts.kernel) < _numbers(name) for name in archive_kernels):
                remedy = NEWEST_KERNEL
            else:
                remedy = f"install {headers} from the source of that kernel; or {OLDER_KERNEL}"
            raise Refusal(
                f"its package archive has no headers ({headers}) for the running kernel", remedy
            )
        obstacle = explain_kernel_limit(case, version, waiting)
        if obstacle:
            raise Refusal(f"{obstacle}, which the next boot starts", OLDER_KERNEL)
        # After the reboot that kernel runs, and the driver is planned again.
        return ModuleBuild(key=key, reboot_first=True)
    compiler = name_kernel_gcc(facts)
    tools = _list_build_tools(facts, compiler, key)
    # The next boot's kernel gets the module too, if it can have one.
    lacks_module = waiting_headers and not facts.waiting_module
    if lacks_module and not explain_kernel_limit(case, version, waiting):
        return ModuleBuild((*tools, f"linux-headers-{waiting}"), compiler, key, waiting)
    return ModuleBuild(tools, compiler, key)


def _list_build_tools(facts, compiler, key):
    """List the packages that a build needs. Raises Refusal if the archive lacks one.

    compiler: the package of a gcc, or "" for the machine's own; key: a path, or "" to sign nothing.
    """
    tools = ["dkms", "gcc", "make"] + [compiler] * bool(compiler)
    tools += ["openssl"] * key.startswith("/var/lib/dkms/")  # DKMS makes this key with openssl
    tools += [f"linux-headers-{facts.kernel}"] * (not facts.kernel_headers)
    # With the metapackage of headers, DKMS builds for each later kernel too.
    series = f"linux-headers-{facts.kernel_series}"  # linux-headers-generic-hwe-24.04
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


def name_kernel_gcc(facts):
    """Name the gcc that built the running kernel if the machine's gcc is older; "" otherwise."""
    # An older gcc does not know all options of the kernel's makefiles: Ubuntu 22.04 has gcc 11, and
    # its kernels from 6.5 on were built by gcc 12.
    present = facts.gcc or packaged_gcc_version(facts)
    if present is None or facts.kernel_compiler is None:
        return ""
    is_older = stacks.parse_version(present)[0] < int(facts.kernel_compiler)
    name = f"gcc-{facts.kernel_compiler}"
    return name if is_older and _is_available(facts, name) else ""


def packaged_gcc_version(facts):
    """Read the version of the release's gcc; None if no archive was asked, or it has none."""
    package_version = facts.packages.get("gcc") or facts.offered.get("gcc")
    return stacks.upstream_version(package_version) if package_version else None


def dkms_can_sign(facts):
    """Return true if the release's DKMS signs its modules, as Secure Boot requires."""
    return (facts.distribution, facts.release) != ("debian", "11")
