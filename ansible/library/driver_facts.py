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

# Packages that matter: the driver's, and the kernel's, which must not move without it.
MATTER = re.compile(
    r"^(nvidia-|libnvidia-|libcuda1$|xserver-xorg-video-nvidia|firmware-nvidia|cuda-drivers"
    r"|linux-(image|headers|modules|generic|lowlatency|virtual|aws|azure|gcp|oem|cloud)|dkms$|g(cc|\+\+)(-\d+)?$|make$|openssl$"
    r"|initramfs-tools$|unattended-upgrades$)"
)
OFFERED = re.compile(
    r"^(nvidia-(driver|headless|kernel|open-kernel|tesla|utils|smi)|libnvidia-tesla|linux-(modules-nvidia|headers)-"
    r"|libcuda1$|dkms$|g(cc|\+\+)(-\d+)?$|make$|openssl$)"
)
# Those that depend on a whole driver. The other names do not tell what they depend on.
DRIVERS = re.compile(
    r"nvidia-(driver|headless)-\d+[a-z-]*$|nvidia-(tesla-\d+-)?(open-)?kernel-dkms$"
)
# A package of one branch of the driver: what it is, and the branch. At the end may be its kind, and
# of Ubuntu's signed modules their kernel, or its series.
BRANCH = re.compile(
    r"(linux-modules-nvidia-|(?:lib|xserver-xorg-video-)?nvidia-(?:[a-z0-9-]+-)?)(\d{3})(?:-[a-z].*)?$"
)
# A kernel's metapackage, by the kernel that it depends on, and its series: generic-hwe-24.04.
KERNEL = re.compile(r"linux-image-(?:unsigned-)?(\d+\.\d+[a-z0-9.+~-]*)")
SERIES = re.compile(r"linux-image-([a-z][a-z0-9.-]*)$")
# Ubuntu's metapackage of signed modules for a branch and a series of kernels; and what is told of
# the packages that would come with it.
MODULES = "linux-modules-nvidia-{}-{}"
KERNEL_PARTS = re.compile(r"linux-(modules-nvidia|image)-|nvidia-dkms-|dkms$")
# The drivers that DKMS knows, so that it can build them for another kernel.
DKMS = "/var/lib/dkms/nvidia*"
# What role driver holds; others are held by the machine's owner.
HELD = "/var/lib/tandem/driver/held"
PREFERENCES = "/etc/apt/preferences.d/*"
PROCESSES = "/proc/[0-9]*"
DISPLAYS = ("Xorg", "X", "Xwayland", "gnome-shell", "kwin_wayland", "weston", "sway", "labwc")
# Sessions that draw on a screen, by logind. source: sd_session_get_type(3).
GRAPHICAL = ("x11", "wayland", "mir")
# NVIDIA's own services, which have a card open and need not end: one keeps it initialised, the
# other shares a laptop's power out.
SERVICES = ("nvidia-persiste", "nvidia-powerd")
# The device of the driver's unified memory, by which CUDA manages a card's memory: whoever computes
# has it open, and a compositor that only draws does not.
COMPUTES = "/dev/nvidia-uvm"
# Where an installation writes: libraries, DKMS and records, the installer, the initial RAM disk.
FOLDERS = ("/usr", "/var/lib", "/var/tmp", "/boot")  # noqa: S108
# The keys by which DKMS signs modules: Ubuntu's, then DKMS's own from 3.0 on.
KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")


def text_of(*argv):
    """Return a command's output, "" if it fails. It may take long, since a plan depends on it."""
    return output(*argv, seconds=300) or ""


def packages(waiting=None):
    """Installed packages by name, without half-installed ones; the transitional and the held ones.

    "transitional": {package: the package of another branch that it leads to}. "kernel_series":
    what the metapackage is called that brings the running kernel, or the waiting one
    ("generic-hwe-24.04"), None without one.
    """
    layout = "${db:Status-Abbrev}\t${Package}\t${Version}\t${Depends}\n"
    versions, held, transitional, series = {}, [], {}, []
    for line in text_of("dpkg-query", "--show", "--showformat", layout).splitlines():
        status, name, version, depends = line.split("\t")
        if MATTER.match(name) and status[1] in "iWt":  # installed, or triggers are pending
            versions[name] = version
            transitional.update(leads_to(name, depends))
            # A desktop may have the metapackage of the release's first kernel beside that of a
            # newer series, or beside a kernel that no metapackage brings: the running one decides.
            meta, kernels = SERIES.match(name), KERNEL.findall(depends)
            if meta and {platform.release(), waiting} & set(kernels):
                series.append((platform.release() in kernels, meta.group(1)))
        if status[0] == "h":  # held, in whatever state it is
            held.append(name)
    return {
        "packages": versions,
        "held": held,
        "transitional": transitional,
        "kernel_series": max(series)[-1] if series else None,
    }


def leads_to(name, depends):
    """Find {name: package} for a package that only leads to the same one of another branch.

    From 615 on it may lead to that of the open module. Returns {} for other packages.
    """
    # Ubuntu keeps the names of branches that have ended (nvidia-driver-550 depends on
    # nvidia-driver-580), Debian some of its own (nvidia-tesla-450-kernel-dkms). The version of such
    # a package is no driver's.
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

    "offered": {package: version}; "offered_transitional": those among them that lead to another
    branch, as packages() has it. {} if nothing was simulated: "uninstallable": {package, or
    packages that go together: why} of the drivers among them, since an archive may have a driver
    and lack what it depends on; "prebuilt": {packages that go together: modules and kernels that
    come with them} of drivers with signed modules for the kernel's series.
    """
    names = {name for name in text_of("apt-cache", "pkgnames").split() if OFFERED.match(name)}
    names |= {name for name in installed["packages"] if name.startswith("linux-")}
    with tempfile.TemporaryDirectory() as folder:
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
        if ways and apt_broken():  # no word against any of these
            ways = []
        with ThreadPoolExecutor(max_workers=4) as pool:
            tries = pool.map(lambda way: simulate_install(way.split(), option), ways)
            answers.update(zip(ways, tries))
    return {
        "offered": offered,
        "offered_transitional": leading,
        "uninstallable": {way: why for way, (_, why) in answers.items() if why},
        "prebuilt": {way: answers.get(way, ([], None))[0] for way in signed},
    }


def prebuilt(offered, series):
    """List drivers with Ubuntu's signed modules: packages that go together, in one string."""
    # Every driver depends on nvidia-dkms, which only the metapackage of the kernel's series
    # provides, not the modules of one kernel. The running kernel may be older than its kernel.
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
    """Simulate an installation; return (modules and kernels that would come, apt's reason against).

    Holds do not count, since the role releases its driver before it installs another.
    """
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
    # Debian's are called after their package: nvidia-current, nvidia-tesla-470. Of several the
    # newest counts, which its alternatives prefer.
    names = {"nvidia", "nvidia-current", *(os.path.basename(path) for path in glob.glob(DKMS))}
    versions = {text_of("modinfo", "-k", kernel, "-F", "version", name) for name in names} - {""}
    return max(versions, key=numbers) if versions else None


def kernel_compiler():
    """Read the major version of the gcc that built the running kernel, "12"; None if unknown."""
    built = re.search(r"gcc-(\d+) \(|gcc version (\d+)\.", read("/proc/version") or "")
    return built.group(1) or built.group(2) if built else None


def sessions():
    """List (units, names) of the sessions at this machine's seats.

    units: what the control groups of the processes of graphical ones are called, login screens too;
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
    """Processes that draw on a screen, and others that have the NVIDIA device open.

    manager: the unit of the login screen, or None. What belongs to it or to a graphical session
    goes when that is stopped, unless it computes.
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
    except OSError:  # it has ended in the meantime
        return False


def display_manager():
    """Find the unit of the login screen, such as "gdm.service", and its state."""
    text = text_of(
        "systemctl", "show", "--property=Id,ActiveState,LoadState", "display-manager.service"
    )
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    there = values.get("LoadState") == "loaded"
    return {
        "display_manager": values["Id"] if there else None,
        "display_manager_active": there and values.get("ActiveState") == "active",
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
    for part in (packages(waiting), display_manager()):
        facts.update(part)
    facts.update(processes(facts["display_manager"]))
    facts.update(archive(module_.params["pin"], module_.params["simulate"], facts))
    module_.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
