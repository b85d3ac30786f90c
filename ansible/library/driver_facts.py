#!/usr/bin/python
"""Collects the facts by which role driver decides. Only reads. Python >= 3.6, standard library."""

import glob
import os
import platform
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.commands import apt_broken, apt_reason, outcome, output, read
from ansible.module_utils.kernels import numbers, waiting_kernel

DOCUMENTATION = r"""
---
module: driver_facts
short_description: Collects the facts by which role driver decides
description:
  - Reads packages, traces of a runfile, the kernel module, displays and processes on the card.
  - Changes nothing.
options:
  pin:
    description: The role's own file of apt preferences, which is ignored when the archive is read.
    type: path
    required: true
  simulate:
    description: Whether apt simulates which of the drivers it could install.
    type: bool
    default: false
author: Tandem
"""

EXAMPLES = r"""
- name: Collect
  driver_facts:
    pin: /etc/apt/preferences.d/tandem-driver
"""

RETURN = r"""
facts:
  description: What was read; None where the machine does not report it.
  returned: always
  type: dict
"""

# Installed packages that matter: the driver's, and the kernel's, since each needs the other.
MATTER = re.compile(
    r"^(nvidia-|libnvidia-|libcuda1$|xserver-xorg-video-nvidia|firmware-nvidia|cuda-drivers"
    r"|linux-(image|headers|modules|generic|lowlatency|virtual|aws|azure|gcp|oem|cloud)|dkms$|g(cc|\+\+)(-\d+)?$|make$|openssl$"
    r"|initramfs-tools$|unattended-upgrades$)"
)
OFFERED = re.compile(
    r"^(nvidia-(driver|headless|kernel|open-kernel|tesla|utils|smi)|libnvidia-tesla|linux-(modules-nvidia|headers)-"
    r"|libcuda1$|dkms$|g(cc|\+\+)(-\d+)?$|make$|openssl$)"
)
# Packages that depend on a whole driver. Other names do not show their dependencies.
DRIVERS = re.compile(
    r"nvidia-(driver|headless)-\d+[a-z-]*$|nvidia-(tesla-\d+-)?(open-)?kernel-dkms$"
)
# A package of one branch of the driver: its prefix and the branch. A suffix may be its kind, or the
# kernel or series of Ubuntu's signed modules.
BRANCH = re.compile(
    r"(linux-modules-nvidia-|(?:lib|xserver-xorg-video-)?nvidia-(?:[a-z0-9-]+-)?)(\d{3})(?:-[a-z].*)?$"
)
# A kernel, on which a metapackage depends; and the metapackage with its series: generic-hwe-24.04.
KERNEL = re.compile(r"linux-image-(?:unsigned-)?(\d+\.\d+[a-z0-9.+~-]*)")
SERIES = re.compile(r"linux-image-([a-z][a-z0-9.-]*)$")
# Ubuntu's metapackage of signed modules for a branch and a series of kernels; and the packages of
# an installation that are reported.
MODULES = "linux-modules-nvidia-{}-{}"
KERNEL_PARTS = re.compile(r"linux-(modules-nvidia|image)-|nvidia-dkms-|dkms$")
# The drivers that DKMS knows, so that it can build them for another kernel.
DKMS = "/var/lib/dkms/nvidia*"
# The packages that role driver holds. The machine's owner may hold others.
HELD = "/var/lib/tandem/driver/held"
PREFERENCES = "/etc/apt/preferences.d/*"
PROCESSES = "/proc/[0-9]*"
DISPLAYS = ("Xorg", "X", "Xwayland", "gnome-shell", "kwin_wayland", "weston", "sway", "labwc")
# Sessions that draw on a screen, by logind. source: sd_session_get_type(3).
GRAPHICAL = ("x11", "wayland", "mir")
# NVIDIA's services, which have a GPU open and need not end: one keeps it initialised, the other
# distributes a laptop's power.
SERVICES = ("nvidia-persiste", "nvidia-powerd")
# The device of the driver's unified memory, with which CUDA manages a GPU's memory: every process
# that computes has it open, and a compositor that only draws does not.
COMPUTES = "/dev/nvidia-uvm"
# The folders of an installation: libraries, DKMS and records, the installer, the initial RAM disk.
FOLDERS = ("/usr", "/var/lib", "/var/tmp", "/boot")  # noqa: S108
# The keys by which DKMS signs modules: Ubuntu's, then DKMS's own from 3.0 on.
KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")


def text_of(*argv):
    """Return a command's output, "" if it fails."""
    # Long, because an empty answer of a slow machine would change the plan.
    return output(*argv, seconds=300) or ""


def packages(waiting=None):
    """Return the versions of installed packages, the transitional and the held packages.

    "packages" has no half-installed ones. "transitional": {package: the package of another branch
    that it leads to}. "kernel_series": the series of the metapackage that brings the running or the
    waiting kernel ("generic-hwe-24.04"), None without one.
    """
    layout = "${db:Status-Abbrev}\t${Package}\t${Version}\t${Depends}\n"
    versions, holds, transitional, series = {}, [], {}, []
    for line in text_of("dpkg-query", "--show", "--showformat", layout).splitlines():
        status, name, version, depends = line.split("\t")
        if MATTER.match(name) and status[1] in "iWt":  # installed, or triggers are pending
            versions[name] = version
            transitional.update(leads_to(name, depends))
            # A desktop may have the metapackages of two series, or a kernel that no metapackage
            # brings. The running kernel decides.
            meta, kernels = SERIES.match(name), KERNEL.findall(depends)
            if meta and {platform.release(), waiting} & set(kernels):
                series.append((platform.release() in kernels, meta.group(1)))
        if status[0] == "h":  # held, in any state
            holds.append(name)
    return {
        "packages": versions,
        "held": holds,
        "transitional": transitional,
        "kernel_series": max(series)[-1] if series else None,
    }


def leads_to(name, depends):
    """Find {name: package} for a package that only leads to the same one of another branch.

    From 615 on it may lead to the package of the open module. Returns {} for other packages.
    """
    # Ubuntu has packages with the names of ended branches (nvidia-driver-550 depends on
    # nvidia-driver-580), and Debian has some (nvidia-tesla-450-kernel-dkms). The version of such a
    # package is not a driver's version.
    branch = BRANCH.match(name)
    for dependency in re.findall(r"[a-z0-9][a-z0-9+.-]+", re.sub(r"\([^)]*\)", "", depends)):
        other_branch = branch and BRANCH.match(dependency)
        another_branch = (
            other_branch
            and other_branch.group(1) == branch.group(1)
            and other_branch.group(2) != branch.group(2)
        )
        if another_branch or (branch and dependency == name + "-open"):
            return {name: dependency}
    return {}


def archive(pin, simulate, installed):
    """Simulate what apt would install without our pin; installed: the result of packages().

    "offered": {package: version}. "offered_transitional": the transitional ones, as packages()
    returns them. "uninstallable": {package, or packages that belong together: reason} of drivers
    whose dependencies the archive lacks. "prebuilt": {packages that belong together: modules and
    kernels that come with them} of drivers with signed modules for the kernel's series. The last
    two are {} without a simulation.
    """
    names = {name for name in text_of("apt-cache", "pkgnames").split() if OFFERED.match(name)}
    names |= {name for name in installed["packages"] if name.startswith("linux-")}
    with tempfile.TemporaryDirectory() as folder:
        # Our pin forbids other drivers, but the plan may be to replace the driver.
        for path in glob.glob(PREFERENCES):
            if path != pin:
                shutil.copy(path, folder)
        option = "Dir::Etc::preferencesparts=" + folder
        text = text_of("apt-cache", "-o", option, "policy", *sorted(names)) if names else ""
        pairs = re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (\S+)", text, re.MULTILINE)
        offered = {name: version for name, version in pairs if version != "(none)"}
        leading = transitional(option, sorted(offered))
        drivers = [name for name in offered if DRIVERS.match(name) and name not in leading]
        signed = prebuilt(offered, installed["kernel_series"])
        ways = sorted(drivers) + signed if simulate else []
        answers = dict.fromkeys(ways, ([], None))
        if ways and apt_broken():  # apt would refuse everything, so its answers say nothing
            ways = []
        with ThreadPoolExecutor(max_workers=4) as pool:
            tries = pool.map(lambda way: simulate_install(way.split(), option), ways)
            answers.update(zip(ways, tries))
    return {
        "offered": offered,
        "offered_transitional": leading,
        "uninstallable": {way: reason for way, (_, reason) in answers.items() if reason},
        "prebuilt": {way: answers.get(way, ([], None))[0] for way in signed},
    }


def prebuilt(offered, series):
    """List drivers with Ubuntu's signed modules: packages that belong together, in one string."""
    # Every driver depends on nvidia-dkms. Only the metapackage of the kernel's series provides it,
    # not the modules of one kernel. The running kernel may be older than the metapackage's kernel.
    ways = []
    for name in sorted(offered):
        branch = re.match(r"nvidia-(?:driver|headless-no-dkms)-(\d.*)$", name)
        meta = branch and MODULES.format(branch.group(1), series)
        if meta in offered:
            module = MODULES.format(branch.group(1), platform.release())
            ways.append(" ".join([meta] + [module] * (module in offered) + [name]))
    return ways


def transitional(option, names):
    """Map each transitional package to the package of another branch that it leads to."""
    names = [name for name in names if BRANCH.match(name)]
    text = text_of("apt-cache", "-o", option, "show", "--no-all-versions", *names) if names else ""
    targets = {}
    for stanza in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Depends): (.*)$", stanza, re.MULTILINE))
        if "Depends" in fields:
            targets.update(leads_to(fields["Package"], fields["Depends"]))
    return targets


def simulate_install(names, option):
    """Simulate an installation. Return (modules and kernels that would come, apt's refusal)."""
    # Without holds, since the role releases its driver before it installs another.
    argv = ["apt-get", "-o", option, "-o", "APT::Ignore-Hold=true", "--simulate"]
    argv.append("--no-install-recommends")
    succeeded, text = outcome(*argv, "--allow-change-held-packages", "install", *names)
    if succeeded:
        coming = re.findall(r"^Inst (\S+) ", text, re.MULTILINE)
        return sorted(name for name in coming if KERNEL_PARTS.match(name)), None
    return [], apt_reason(text) or "it does not say why"


def runfile():
    """Read the version that NVIDIA's own installer installed; None if it was not used."""
    text = read("/var/lib/nvidia/log")
    if text is None:
        return None
    match = re.search(r"\d{3}\.\d+(\.\d+)?", text.split("\n")[0])
    return match.group() if match else "0"


def module(kernel):
    """Read the version of the module that is installed for `kernel`; None if there is none."""
    # Debian's modules have the names of their packages: nvidia-current, nvidia-tesla-470. Debian's
    # alternatives prefer the newest of several.
    names = {"nvidia", "nvidia-current", *(os.path.basename(path) for path in glob.glob(DKMS))}
    versions = {text_of("modinfo", "-k", kernel, "-F", "version", name) for name in names} - {""}
    return max(versions, key=numbers) if versions else None


def kernel_compiler():
    """Read the major version of the gcc that built the running kernel, "12"; None if unknown."""
    built = re.search(r"gcc-(\d+) \(|gcc version (\d+)\.", read("/proc/version") or "")
    return built.group(1) or built.group(2) if built else None


def sessions():
    """Return (units, names) of the sessions at this machine's seats.

    units: the control groups of the processes of graphical sessions, including login screens;
    names: of the people who are logged in there.
    """
    units, names = [], set()
    for line in text_of("loginctl", "list-sessions", "--no-legend").splitlines():
        name = line.split()[0]
        text = text_of("loginctl", "show-session", name)
        session = dict(row.split("=", 1) for row in text.splitlines() if "=" in row)
        if session.get("Seat") and session.get("Type") in GRAPHICAL:
            units += [session.get("Scope"), "user@%s.service" % session.get("User")]
        if session.get("Seat") and session.get("Class", "user") == "user":
            names.add(session.get("Name") or "session " + name)
    return units, sorted(names)


def processes(manager):
    """List processes that draw on a screen, and others that have the NVIDIA device open.

    manager: the unit of the login screen, or None. A process of this unit or of a graphical session
    counts as drawing unless it computes: it ends when the display stops.
    """
    seats, seated = sessions()
    units = seats + [manager] * bool(manager)
    displays, users = [], []
    for folder in glob.glob(PROCESSES):
        pid, command = int(os.path.basename(folder)), read(folder + "/comm")
        row = {"pid": pid, "command": command}
        if command in DISPLAYS:
            displays.append(row)
        elif command not in SERVICES and opens(folder + "/fd", "/dev/nvidia"):
            groups = (read(folder + "/cgroup") or "").replace("\n", "/").split("/")
            drawing = set(units) & set(groups) and not opens(folder + "/fd", COMPUTES)
            (displays if drawing else users).append(row)
    return {"displays": displays, "gpu_processes": users, "seated": seated}


def opens(folder, prefix):
    """Return true if a process has a file open whose path starts with `prefix`."""
    try:
        return any(os.readlink(path).startswith(prefix) for path in glob.glob(folder + "/*"))
    except OSError:  # the process has ended meanwhile
        return False


def display_manager():
    """Find the unit of the login screen, such as "gdm.service", and its state."""
    text = text_of(
        "systemctl", "show", "--property=Id,ActiveState,LoadState", "display-manager.service"
    )
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    is_loaded = values.get("LoadState") == "loaded"
    return {
        # Its Id, since display-manager.service is only another name.
        "display_manager": values["Id"] if is_loaded else None,
        "display_manager_active": is_loaded and values.get("ActiveState") == "active",
    }


def free(folder):
    """Measure the free bytes of the file system that a folder is on."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def main():
    module_ = AnsibleModule(
        argument_spec={
            "pin": {"type": "path", "required": True},
            "simulate": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    kernel = platform.release()
    waiting = waiting_kernel(kernel)
    facts = {
        "kernel_compiler": kernel_compiler(),
        "waiting_kernel": waiting,
        "waiting_module": module(waiting) if waiting else None,
        "runfile": runfile(),
        "module": module(kernel),
        "dkms": bool(glob.glob(DKMS)),
        "signing_key": next((path for path in KEYS if os.path.exists(path)), None),
        "free": {folder: free(folder) for folder in FOLDERS},
        "held_by_us": (read(HELD) or "").split(),
        "pending": os.path.exists("/var/lib/tandem/driver/before"),
    }
    facts.update(packages(waiting))
    facts.update(display_manager())
    facts.update(processes(facts["display_manager"]))
    facts.update(archive(module_.params["pin"], module_.params["simulate"], facts))
    module_.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
