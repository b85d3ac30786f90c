#!/usr/bin/python
"""Collects the facts by which role driver decides: packages, modules, displays and processes.

Ansible runs this file on each machine, so it has to run on Python 3.6 without other packages. The
module only reads; planning/reading.py checks what it returns, and planning/driver.py decides.
"""

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
    description: Role driver's file of apt preferences, which is ignored when the archive is read.
    type: path
    required: true
  simulate:
    description: Whether apt simulates which of the drivers it could install.
    type: bool
    default: false
author: Tandem
"""

# Installed packages that are reported: of the driver, of the kernel, and to build a module.
REPORTED = re.compile(
    r"^(nvidia-|libnvidia-|libcuda1$|xserver-xorg-video-nvidia|firmware-nvidia|cuda-drivers"
    r"|linux-(image|headers|modules|generic|lowlatency|virtual|aws|azure|gcp|oem|cloud)|dkms$|g(cc|\+\+)(-\d+)?$|make$|openssl$"
    r"|initramfs-tools$|unattended-upgrades$)"
)
# Packages of the archive that are reported.
OFFERED = re.compile(
    r"^(nvidia-(driver|headless|kernel|open-kernel|tesla|utils|smi)|libnvidia-tesla|linux-(modules-nvidia|headers)-"
    r"|libcuda1$|dkms$|g(cc|\+\+)(-\d+)?$|make$|openssl$)"
)
# Packages that depend on a whole driver. Other names do not show their dependencies.
DRIVER_PACKAGES = re.compile(
    r"nvidia-(driver|headless)-\d+[a-z-]*$|nvidia-(tesla-\d+-)?(open-)?kernel-dkms$"
)
# A package of one branch. Group 1 is its kind and group 2 its branch: "nvidia-driver-" and "570" of
# nvidia-driver-570-server. The suffix may also be the kernel or series of Ubuntu's signed modules.
BRANCH_PACKAGE = re.compile(
    r"(linux-modules-nvidia-|(?:lib|xserver-xorg-video-)?nvidia-(?:[a-z0-9-]+-)?)(\d{3})(?:-[a-z].*)?$"
)
# The package of a kernel, on which a metapackage depends: linux-image-6.8.0-64-generic.
KERNEL = re.compile(r"linux-image-(?:unsigned-)?(\d+\.\d+[a-z0-9.+~-]*)")
# The metapackage for a series of kernels: linux-image-generic-hwe-24.04.
SERIES = re.compile(r"linux-image-([a-z][a-z0-9.-]*)$")
# Ubuntu's package of signed modules, by branch, and by kernel or series of kernels.
SIGNED_MODULES = "linux-modules-nvidia-{}-{}"
# read_archive() reports these packages if they would come with a driver.
KERNEL_PARTS = re.compile(r"linux-(modules-nvidia|image)-|nvidia-dkms-|dkms$")
# The folders of the drivers that DKMS can build for another kernel.
DKMS = "/var/lib/dkms/nvidia*"
# The names of the packages that role driver holds. The machine's owner may hold other packages.
HELD = "/var/lib/tandem/driver/held"
PREFERENCES = "/etc/apt/preferences.d/*"
PROCESSES = "/proc/[0-9]*"
DISPLAY_PROGRAMS = (
    "Xorg",
    "X",
    "Xwayland",
    "gnome-shell",
    "kwin_wayland",
    "weston",
    "sway",
    "labwc",
)
# Sessions that draw on a screen, by logind. source: sd_session_get_type(3).
GRAPHICAL_SESSIONS = ("x11", "wayland", "mir")
# NVIDIA's services have a GPU open, but need not end. /proc cuts names after 15 letters.
NVIDIA_SERVICES = ("nvidia-persiste", "nvidia-powerd")
# The device of the driver's unified memory, with which CUDA manages a GPU's memory: every process
# that computes has it open, and a compositor that only draws does not.
COMPUTE_DEVICE = "/dev/nvidia-uvm"
# The folders whose disks need free space for an installation; planning/driver.py has the bytes.
FOLDERS = ("/usr", "/var/lib", "/var/tmp", "/boot")  # noqa: S108
# The keys by which DKMS signs modules: Ubuntu's, then DKMS's own from 3.0 on.
SIGNING_KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")


def read_output(*argv):
    """Return a command's output, "" if it fails."""
    # The time limit is long: a command that a slow machine cannot end would give "" and change the
    # plan.
    return output(*argv, seconds=300) or ""


def list_installed(waiting=None):
    """Return the versions of installed packages, the transitional and the held packages.

    "packages": {name: version}, without half-installed packages. "held": names. "transitional":
    {package: the package of another branch that it leads to}. "kernel_series": the series of the
    metapackage that brings the running or the waiting kernel ("generic-hwe-24.04"), None without a
    metapackage. waiting: the name of the waiting kernel, or None.
    """
    layout = "${db:Status-Abbrev}\t${Package}\t${Version}\t${Depends}\n"
    versions, holds, transitional = {}, [], {}
    kernel_series = []  # [(true for the series of the running kernel, series)]
    for line in read_output("dpkg-query", "--show", "--showformat", layout).splitlines():
        # Two letters of status come first, the wanted and the actual one: "ii" or "hi".
        status, name, version, depends = line.split("\t")
        if REPORTED.match(name) and status[1] in "iWt":  # installed, or triggers are pending
            versions[name] = version
            target = find_target(name, depends)
            if target:
                transitional[name] = target
            # A desktop may have the metapackages of two series, or a kernel that no metapackage
            # brings. The running kernel decides.
            metapackage, kernels = SERIES.match(name), KERNEL.findall(depends)
            if metapackage and {platform.release(), waiting} & set(kernels):
                # max() below prefers true, which stands for the running kernel.
                kernel_series.append((platform.release() in kernels, metapackage.group(1)))
        if status[0] == "h":  # held, whether it is installed or not
            holds.append(name)
    return {
        "packages": versions,
        "held": holds,
        "transitional": transitional,
        "kernel_series": max(kernel_series)[-1] if kernel_series else None,
    }


def find_target(name, depends):
    """Find the package to which a transitional package leads; None for any other package.

    A transitional package only leads to the package of the same kind of another branch, or, from
    615 on, to the package of the open module. depends: dpkg's field Depends.
    """
    # Ubuntu has packages with the names of ended branches (nvidia-driver-550 depends on
    # nvidia-driver-580), and Debian has some (nvidia-tesla-450-kernel-dkms). The version of such a
    # package is not a driver's version.
    branch = BRANCH_PACKAGE.match(name)
    if not branch:
        return None
    # "nvidia-driver-580 (>= 580.65), libc6 | libc6.1": names without versions.
    for dependency in re.findall(r"[a-z0-9][a-z0-9+.-]+", re.sub(r"\([^)]*\)", "", depends)):
        target = BRANCH_PACKAGE.match(dependency)
        is_same_kind = target and target.group(1) == branch.group(1)
        if (is_same_kind and target.group(2) != branch.group(2)) or dependency == name + "-open":
            return dependency
    return None


def read_archive(pin, simulate, installed):
    """Return the archive's packages, and what apt would install with drivers, without our pin.

    pin: the path of role driver's pin; installed: the result of list_installed(); simulate: true
    to ask apt about each driver. Keys of the result:
    "offered": {package: version}. "offered_transitional": {transitional package: its target}.
    "uninstallable": {names: reason} of drivers whose dependencies the archive lacks. "prebuilt":
    {names: modules and kernels that would come too} of drivers with signed modules. Names are of
    packages to install together, joined by blanks. If `simulate` is false, "uninstallable" is {},
    and "prebuilt" has no modules or kernels.
    """
    names = {name for name in read_output("apt-cache", "pkgnames").split() if OFFERED.match(name)}
    names |= {name for name in installed["packages"] if name.startswith("linux-")}
    with tempfile.TemporaryDirectory() as folder:
        # Our pin forbids other drivers, but the plan may be to replace the driver.
        for path in glob.glob(PREFERENCES):
            if path != pin:
                shutil.copy(path, folder)
        option = "Dir::Etc::preferencesparts=" + folder
        text = read_output("apt-cache", "-o", option, "policy", *sorted(names)) if names else ""
        # "nvidia-driver-570:\n  Installed: (none)\n  Candidate: 570.133.07-0ubuntu1"
        pairs = re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (\S+)", text, re.MULTILINE)
        offered = {name: version for name, version in pairs if version != "(none)"}
        targets = find_transitional(option, sorted(offered))
        drivers = [name for name in offered if DRIVER_PACKAGES.match(name) and name not in targets]
        signed_sets = list_signed_sets(offered, installed["kernel_series"])
        # The results have sets of packages as keys, each in one string: JSON has no other keys.
        package_sets = sorted(drivers) + signed_sets if simulate else []
        # With broken packages apt would refuse every installation, so its answers say nothing.
        if package_sets and apt_broken():
            package_sets = []
        # apt reads its lists anew for each simulation, so four run at a time.
        with ThreadPoolExecutor(max_workers=4) as pool:
            answers = pool.map(lambda names: simulate_install(names.split(), option), package_sets)
            results = dict(zip(package_sets, answers))
    return {
        "offered": offered,
        "offered_transitional": targets,
        "uninstallable": {names: reason for names, (_, reason) in results.items() if reason},
        "prebuilt": {names: results.get(names, ([], None))[0] for names in signed_sets},
    }


def list_signed_sets(offered, series):
    """List sets of packages that bring a driver with Ubuntu's signed modules.

    Each set is one string: the metapackage of the modules, the modules of the running kernel if the
    archive has them, and the driver.
    """
    # Every driver depends on nvidia-dkms. Only the metapackage of the kernel's series provides it,
    # not the modules of one kernel. The running kernel may be older than the metapackage's kernel.
    package_sets = []
    for name in sorted(offered):
        branch = re.match(r"nvidia-(?:driver|headless-no-dkms)-(\d.*)$", name)
        meta = branch and SIGNED_MODULES.format(branch.group(1), series)
        if meta in offered:
            module = SIGNED_MODULES.format(branch.group(1), platform.release())
            package_sets.append(" ".join([meta] + [module] * (module in offered) + [name]))
    return package_sets


def find_transitional(option, names):
    """Return {transitional package: the package that it leads to} of packages of the archive.

    option: apt's option that leaves out our pin.
    """
    names = [name for name in names if BRANCH_PACKAGE.match(name)]
    text = (
        read_output("apt-cache", "-o", option, "show", "--no-all-versions", *names) if names else ""
    )
    targets = {}
    for stanza in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Depends): (.*)$", stanza, re.MULTILINE))
        target = find_target(fields["Package"], fields["Depends"]) if "Depends" in fields else None
        if target:
            targets[fields["Package"]] = target
    return targets


def simulate_install(names, option):
    """Simulate an installation. Return (modules and kernels that would come, apt's refusal)."""
    # The simulation ignores holds, since role driver releases its own holds before it installs.
    argv = ["apt-get", "-o", option, "-o", "APT::Ignore-Hold=true", "--simulate"]
    argv.append("--no-install-recommends")
    succeeded, text = outcome(*argv, "--allow-change-held-packages", "install", *names)
    if succeeded:
        # "Inst nvidia-driver-570 (570.133.07-0ubuntu1 Ubuntu:24.04/noble [amd64])"
        incoming = re.findall(r"^Inst (\S+) ", text, re.MULTILINE)
        return sorted(name for name in incoming if KERNEL_PARTS.match(name)), None
    return [], apt_reason(text) or "it does not say why"


def read_runfile_version():
    """Read the version of the driver that NVIDIA's own installer installed; None without one."""
    text = read("/var/lib/nvidia/log")
    if text is None:
        return None
    # The first line is "580.126.20", or "1.0-10033 (440.33.01)" from older installers. The version
    # of a driver with another first line is unknown: "0".
    match = re.search(r"\d{3}\.\d+(\.\d+)?", text.split("\n")[0])
    return match.group() if match else "0"


def read_module_version(kernel):
    """Read the version of the module that is installed for `kernel`; None if there is none."""
    # Debian's modules have the names of their packages: nvidia-current, nvidia-tesla-470. If there
    # are several, Debian's alternatives prefer the newest.
    names = {"nvidia", "nvidia-current", *(os.path.basename(path) for path in glob.glob(DKMS))}
    texts = [read_output("modinfo", "-k", kernel, "-F", "version", name) for name in names]
    versions = [text for text in texts if text]  # "" is no module of this kernel
    return max(versions, key=numbers) if versions else None


def read_kernel_compiler():
    """Read the major version of the gcc that built the running kernel, "12"; None if unknown."""
    # "Linux version 6.8.0-64-generic (...) (x86_64-linux-gnu-gcc-13 (Ubuntu 13.3.0-6ubuntu2) ..."
    built = re.search(r"gcc-(\d+) \(|gcc version (\d+)\.", read("/proc/version") or "")
    return built.group(1) or built.group(2) if built else None


def list_sessions():
    """Return (units, names) of the sessions at this machine's seats.

    units: the control groups of the processes of graphical sessions, including login screens;
    names: the people who are logged in at the seats.
    """
    units, names = [], set()
    for line in read_output("loginctl", "list-sessions", "--no-legend").splitlines():
        name = line.split()[0]  # "2 1000 anna seat0 tty2"
        text = read_output("loginctl", "show-session", name)  # lines such as Seat=seat0
        session = dict(row.split("=", 1) for row in text.splitlines() if "=" in row)
        # A desktop's processes are in the session's scope, or in services of the user's systemd.
        if session.get("Seat") and session.get("Type") in GRAPHICAL_SESSIONS:
            units += [session.get("Scope"), "user@%s.service" % session.get("User")]
        if session.get("Seat") and session.get("Class", "user") == "user":
            names.add(session.get("Name") or "session " + name)
    return units, sorted(names)


def list_processes(manager):
    """List processes that draw on a screen, other processes with an open NVIDIA device, and users.

    manager: the unit of the login screen, or None.
    """
    session_units, seated = list_sessions()
    display_units = set(session_units + [manager] * bool(manager))
    displays, gpu_processes = [], []
    for folder in glob.glob(PROCESSES):
        pid, command = int(os.path.basename(folder)), read(folder + "/comm")
        row = {"pid": pid, "command": command}
        if command in DISPLAY_PROGRAMS:
            displays.append(row)
        elif command not in NVIDIA_SERVICES and has_open_file(folder + "/fd", "/dev/nvidia"):
            # "0::/system.slice/gdm.service": a process of these units would end with the display.
            groups = (read(folder + "/cgroup") or "").replace("\n", "/").split("/")
            ends_with_display = display_units.intersection(groups)
            draws = ends_with_display and not has_open_file(folder + "/fd", COMPUTE_DEVICE)
            (displays if draws else gpu_processes).append(row)
    return {"displays": displays, "gpu_processes": gpu_processes, "seated": seated}


def has_open_file(folder, prefix):
    """Return true if a process has a file open whose path starts with `prefix`."""
    try:
        return any(os.readlink(path).startswith(prefix) for path in glob.glob(folder + "/*"))
    except OSError:  # the process has ended meanwhile
        return False


def find_display_manager():
    """Find the unit of the login screen, such as "gdm.service", and whether it runs."""
    text = read_output(
        "systemctl", "show", "--property=Id,ActiveState,LoadState", "display-manager.service"
    )
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    is_loaded = values.get("LoadState") == "loaded"
    return {
        # display-manager.service is only an alias. Its Id is the name of the unit: gdm.service.
        "display_manager": values["Id"] if is_loaded else None,
        "display_manager_active": is_loaded and values.get("ActiveState") == "active",
    }


def main():
    ansible_module = AnsibleModule(
        argument_spec={
            "pin": {"type": "path", "required": True},
            "simulate": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    kernel = platform.release()
    waiting = waiting_kernel(kernel)
    facts = {
        "kernel_compiler": read_kernel_compiler(),
        "waiting_kernel": waiting,
        "waiting_module": read_module_version(waiting) if waiting else None,
        "runfile": read_runfile_version(),
        "module": read_module_version(kernel),
        "dkms": bool(glob.glob(DKMS)),
        "signing_key": next((path for path in SIGNING_KEYS if os.path.exists(path)), None),
        "free": {
            folder: state.f_bavail * state.f_frsize
            for folder, state in zip(FOLDERS, map(os.statvfs, FOLDERS))
        },
        "held_by_us": (read(HELD) or "").split(),
        "pending": os.path.exists("/var/lib/tandem/driver/before"),
    }
    # read_archive() needs the facts of list_installed(), list_processes() the display manager's.
    facts.update(list_installed(waiting))
    facts.update(find_display_manager())
    facts.update(list_processes(facts["display_manager"]))
    parameters = ansible_module.params
    facts.update(read_archive(parameters["pin"], parameters["simulate"], facts))
    ansible_module.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
