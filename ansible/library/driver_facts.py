#!/usr/bin/python
"""Collects what the role driver decides upon. Reads only. Python >= 3.6, standard library."""

import glob
import os
import platform
import re
import shutil
import tempfile

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.looking import output, read

DOCUMENTATION = r"""
---
module: driver_facts
short_description: Collects what the role driver decides upon
description:
  - Reads packages, a runfile's traces, the kernel's module, displays and processes on the card.
  - Changes nothing.
options:
  pin:
    description: The role's own file of apt preferences; what the archive offers is read without it.
    type: path
    required: true
author: Tandem
"""

EXAMPLES = r"""
- name: Collect
  driver_facts:
    pin: /etc/apt/preferences.d/tandem-driver
"""

RETURN = r"""
facts:
  description: What was read; None where a machine does not say.
  returned: always
  type: dict
"""

# Packages that may matter: the driver's, and the kernel's that must not move without it.
MATTER = re.compile(
    r"^(nvidia-|libnvidia-|libcuda1$|xserver-xorg-video-nvidia|firmware-nvidia|cuda-drivers"
    r"|linux-(image|headers|modules|generic|lowlatency|virtual|aws|azure|gcp|oem|cloud)|dkms$|gcc$|make$"
    r"|initramfs-tools$|unattended-upgrades$)"
)
OFFERED = re.compile(
    r"^(nvidia-(driver|headless|kernel|open-kernel|utils|smi)|linux-(modules-nvidia|headers)-"
    r"|libcuda1$|dkms$|gcc$|make$)"
)
PREFERENCES = "/etc/apt/preferences.d/*"
PROCESSES = "/proc/[0-9]*"
DISPLAYS = ("Xorg", "X", "Xwayland", "gnome-shell", "kwin_wayland", "weston", "sway", "labwc")
# Where an installation writes: libraries, DKMS and records, the installer, the initial RAM disk.
FOLDERS = ("/usr", "/var/lib", "/var/tmp", "/boot")  # noqa: S108
# The keys by which DKMS signs modules: Ubuntu's, then DKMS's own from 3.0 on.
KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")


def said(*argv):
    """What a command prints, "" where it fails. A plan that follows is worth waiting for."""
    return output(*argv, seconds=300) or ""


def packages():
    """Installed packages by name, without those that are half installed; those that are held."""
    layout = "${db:Status-Abbrev}\t${Package}\t${Version}\n"
    found, held = {}, []
    for line in said("dpkg-query", "--show", "--showformat", layout).splitlines():
        status, name, version = line.split("\t")
        if MATTER.match(name) and status[1] in "iWt":  # installed, or triggers are left to do
            found[name] = version
        if status[0] == "h":
            held.append(name)
    return {"packages": found, "held": held}


def offered(pin):
    """{package: version} that apt would install, were it not for the pin of ours."""
    names = [name for name in said("apt-cache", "pkgnames").split() if OFFERED.match(name)]
    with tempfile.TemporaryDirectory() as folder:
        for path in glob.glob(PREFERENCES):
            if path != pin:
                shutil.copy(path, folder)
        option = "Dir::Etc::preferencesparts=" + folder
        text = said("apt-cache", "-o", option, "policy", *names) if names else ""
    pairs = re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (\S+)", text, re.MULTILINE)
    return {name: version for name, version in pairs if version != "(none)"}


def runfile():
    """The version that NVIDIA's own installer has put here; None: it has not been here."""
    text = read("/var/lib/nvidia/log")
    if text is None:
        return None
    found = re.search(r"\d{3}\.\d+(\.\d+)?", text.split("\n")[0])
    return found.group() if found else "0"


def module(kernel):
    """The version of the kernel module that lies ready for `kernel`; None: there is none."""
    for name in ("nvidia", "nvidia-current"):
        found = said("modinfo", "-k", kernel, "-F", "version", name)
        if found:
            return found
    return None


def processes():
    """Who draws on a screen, and who else has the NVIDIA device open."""
    displays, users = [], []
    for folder in glob.glob(PROCESSES):
        pid, command = int(os.path.basename(folder)), read(folder + "/comm")
        row = {"pid": pid, "command": command}
        if command in DISPLAYS:
            displays.append(row)
        elif command != "nvidia-persiste" and opens(folder + "/fd", "/dev/nvidia"):
            users.append(row)
    return {"displays": displays, "gpu_processes": users}


def opens(folder, prefix):
    """Whether a process has a file open whose path starts with `prefix`."""
    try:
        return any(os.readlink(path).startswith(prefix) for path in glob.glob(folder + "/*"))
    except OSError:  # it has ended meanwhile
        return False


def display_manager():
    """The unit that shows the login screen, e.g. "gdm.service"; whether it runs."""
    text = said(
        "systemctl", "show", "--property=Id,ActiveState,LoadState", "display-manager.service"
    )
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    there = values.get("LoadState") == "loaded"
    return {
        "display_manager": values["Id"] if there else None,
        "display_manager_active": there and values.get("ActiveState") == "active",
    }


def free(folder):
    """Free bytes of the file system that holds a folder."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def main():
    module_ = AnsibleModule(
        argument_spec={"pin": {"type": "path", "required": True}}, supports_check_mode=True
    )
    kernel = platform.release()
    facts = {
        "offered": offered(module_.params["pin"]),
        "runfile": runfile(),
        "module": module(kernel),
        # Whether DKMS knows a driver, and so can build it for another kernel.
        "dkms": bool(glob.glob("/var/lib/dkms/nvidia*")),
        "signing_key": next((path for path in KEYS if os.path.exists(path)), None),
        "free": {folder: free(folder) for folder in FOLDERS},
        "pending": os.path.exists("/var/lib/tandem/driver/before"),
    }
    for part in (packages(), processes(), display_manager()):
        facts.update(part)
    module_.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
