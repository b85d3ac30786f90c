"""Judge a driver's installation, and plan held packages, reboots and power limits.

Role driver calls these functions as filters, after driver.py has decided on an action. They are
pure functions of MachineFacts, or of Ansible's variables with the same values.
"""

import math
import re

from . import PlanError, reading, stacks
from .driver_candidates import SIGNED_MODULES, SIGNED_PREFIX

# A kernel's packages name a release ("linux-image-6.1.0-50-amd64"); the metapackages, which bring
# the next kernel, do not.
KERNEL = re.compile(
    r"linux-(image|headers|modules|modules-extra|generic|lowlatency|virtual|oem|cloud)(-|$)"
)
RELEASE = re.compile(r"-\d+\.\d+\.\d+")
DRIVER = re.compile(
    r"(lib)?nvidia-|libcuda1$|xserver-xorg-video-nvidia|firmware-nvidia|cuda-drivers"
)
# A line of grub.cfg that begins an entry of the boot loader's menu.
ENTRY = re.compile(r"(menuentry|submenu) ")
# The query for `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`: one line per GPU.
POWER_QUERY = "name,power.min_limit,power.max_limit,power.limit,persistence_mode"


def driver_hold(facts, version, settings, stack, released=()):
    """Plan which packages are held, so that driver `version` (NVIDIA's) stays.

    settings: the result of driver.driver_wanted; released: packages whose hold was lifted for an
    installation and must return, even if that installation failed. Returns {"packages": names to
    hold, "preferences": text for apt, "unattended": text for unattended-upgrades}.
    """
    facts = reading.as_machine_facts(facts)
    # The kernel is held with its driver if the next kernel would have no module. Later kernels of
    # Ubuntu 18.04 and 20.04 are unknown to the driver of CUDA 10.2.
    is_last_kernel = stack["name"] == "cu102" and facts.release in ("18.04", "20.04")
    # The next kernel of the series has a module if packages bring signed modules for the series, or
    # if DKMS builds one with the series' headers.
    series = facts.kernel_series  # such as generic-hwe-24.04
    is_prebuilt = any(
        SIGNED_MODULES.match(name) and name.endswith(f"-{series}")
        for name in facts.packages.keys() - facts.transitional.keys()
    )
    by_dkms = facts.dkms and f"linux-headers-{series}" in facts.packages
    module_follows = series is not None and (is_prebuilt or by_dkms)
    holds_kernel = settings["hold_kernel"] or is_last_kernel or not module_follows
    versions = {}  # {package to hold: its version}
    for name, present in sorted(facts.packages.items()):
        # The driver's packages have its version, but nvidia-container-toolkit, for example, does
        # not and stays free. A transitional package would bring another branch, so it is held.
        is_driver = (
            version and DRIVER.match(name) and stacks.upstream_version(present).startswith(version)
        )
        is_driver = is_driver or name in facts.transitional or name in released
        is_held = holds_kernel if brings_kernel(name) else is_driver
        if is_held:
            versions[name] = present
    stanzas = [
        f"Package: {' '.join(name for name in versions if versions[name] == present)}\n"
        f"Pin: version {present}\nPin-Priority: 999\n"
        for present in sorted(set(versions.values()))
    ]
    # A released package that is only half installed has no version that a pin could name.
    half_installed = [
        name
        for name in sorted(set(released) - set(versions))
        if holds_kernel or not brings_kernel(name)
    ]
    names = [*versions, *half_installed]
    # unattended-upgrades takes regular expressions, so the prefix matches all of Ubuntu's signed
    # modules.
    patterns = [f"{name}$" for name in names] + [SIGNED_PREFIX] * holds_kernel
    lines = "".join(f'    "{pattern}";\n' for pattern in patterns)
    block = f"Unattended-Upgrade::Package-Blacklist {{\n{lines}}};\n"
    return {"packages": names, "preferences": "\n".join(stanzas), "unattended": block}


def brings_kernel(name):
    """Return true for a package that brings the next kernel, or Ubuntu's module for a kernel."""
    return bool(KERNEL.match(name) and not RELEASE.search(name)) or name.startswith(SIGNED_PREFIX)


def kernel_packages(facts):
    """List the installed metapackages that bring a machine's next kernel and its headers."""
    names = reading.as_machine_facts(facts).packages
    return sorted(name for name in names if KERNEL.match(name) and not RELEASE.search(name))


def reboot_refused(facts, settings, control_id=""):
    """Explain why the machine is not rebooted now: (reason, remedy), or ().

    settings: the result of driver.driver_wanted; control_id: the control node's machine_id.
    """
    facts = reading.as_machine_facts(facts)
    if control_id and facts.machine_id == control_id:
        return (
            "its driver needs a reboot, but it is the control node, which Tandem never reboots",
            "save your work and type sudo reboot; then run the same command again, on the "
            "text screen if no desktop appears: it continues where it stopped",
        )
    if facts.seated and not settings["interrupt"]:
        users = f"{', '.join(facts.seated)} {'is' if len(facts.seated) == 1 else 'are'}"
        return (
            f"{users} logged in at its screen, and its driver needs a reboot",
            "save all work on that machine, then run the command again with STOP_DISPLAY=1 "
            "(make) or -e allow_stop_display=true (ansible-playbook); or reboot it yourself, "
            "then run the command again",
        )
    return ()


def linux_again(grub_cfg, efi):
    """List the commands by which the next boot starts Linux on a machine that also has Windows.

    Each command is a list of words, and only affects the next boot. The firmware gets a command if
    another entry is first in its order. GRUB gets one whenever its menu has Windows, because its
    default may be Windows.
    grub_cfg: text of /boot/grub/grub.cfg; efi: the output of `efibootmgr`, "" without EFI.
    """
    commands = []
    # "BootCurrent: 0002" is Linux, which runs now. "BootOrder: 0000,0002" starts Windows first.
    current = re.search(r"^BootCurrent: ([0-9A-F]{4})$", efi, re.MULTILINE)
    order = re.search(r"^BootOrder: ([0-9A-F]{4})", efi, re.MULTILINE)
    if current and order and current[1] != order[1]:
        commands.append(["efibootmgr", "--quiet", "--bootnext", current[1]])
    # GRUB counts only the entries of the first level. Those of a submenu are indented.
    entries = [line for line in grub_cfg.splitlines() if ENTRY.match(line)]
    linux = [number for number, line in enumerate(entries) if "--class gnu-linux" in line]
    if any("osprober" in line or "--class windows" in line for line in entries) and linux:
        commands.append(["grub-reboot", str(linux[0])])
    return commands


def driver_outcome(facts, loading, smi):
    """Decide what follows an installation: {"state": done, reboot or refuse; "reason"; "remedy"}.

    facts: read after the driver was installed. loading: the errors of `modprobe nvidia`.
    smi: {"rc", "text"} of `nvidia-smi --query-gpu=driver_version --format=csv,noheader`.
    """
    facts = reading.as_machine_facts(facts)
    loaded, kernel = facts.driver, facts.kernel
    versions = set(re.findall(r"\d+\.\d+[.\d]*", smi["text"])) if smi["rc"] == 0 else set()
    if loaded and versions == {loaded}:
        return _next("done", f"module and nvidia-smi agree: {loaded}")
    # First the states that a reboot ends.
    if facts.nouveau:
        return _next("reboot", "nouveau drives the card until the next boot")
    differs = loaded and facts.driver_library not in (None, loaded)
    if "version mismatch" in smi["text"] or differs:
        return _next(
            "reboot",
            f"driver/library version mismatch: the kernel has {loaded}, the library is "
            f"{facts.driver_library}",
        )
    if facts.module is None and facts.waiting_kernel and facts.waiting_module:
        return _next(
            "reboot",
            f"the driver's module was built for kernel {facts.waiting_kernel}, "
            "but another kernel is running",
        )
    if facts.module is None:
        return _next(
            "refuse",
            f"there is no nvidia module for the running kernel {kernel}",
            "read /var/lib/dkms/nvidia*/*/build/make.log and /var/log/nvidia-installer.log "
            "on that machine",
        )
    if loaded is not None:
        return _next(
            "refuse",
            f"module {loaded} is loaded, but nvidia-smi fails: {_last_line(smi['text'])}",
            "type `sudo dmesg | grep -i nvrm` on that machine",
        )
    ready = f"module {facts.module} was built for {facts.kernel}"
    if re.search(r"[Kk]ey was rejected|Required key|Operation not permitted", loading):
        # Only a person can enrol the key, since the firmware asks at the machine's screen.
        key = facts.signing_key or "/var/lib/dkms/mok.pub"
        return _next(
            "refuse",
            f"{ready}, but Secure Boot does not trust its key",
            f"on that machine: 1. sudo apt install mokutil && sudo mokutil --import {key} "
            "(choose a password, needed once). 2. sudo reboot; on the blue screen choose "
            "Enroll MOK, Continue, Yes, and type that password. 3. Run the same command on "
            "the control node again, which continues from there",
        )
    if "No such device" in loading:
        return _next(
            "refuse",
            f"{ready}, but cannot be loaded: the kernel finds no card for it (No such device)",
            "check the card's seat and power; `lspci -d 10de:` and `sudo dmesg | grep -i "
            "nvrm` show more",
        )
    return _next(
        "refuse", f"{ready}, but cannot be loaded: {_last_line(loading)}", "read `sudo dmesg` on it"
    )


def _next(state, reason, remedy=""):
    return {"state": state, "reason": reason, "remedy": remedy}


def _last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"


def power_plan(host, persistence, watts, printed):
    """Plan power limits: {"persistence": bool, "watts": int, "wrong": [differences from the plan]}.

    persistence, watts: the settings; 0 watts leaves NVIDIA's own limit. printed: the answer to
    POWER_QUERY. Raises PlanError if a GPU does not accept the limit.
    """
    watts = int(watts or 0)
    # A GPU loses its limit when its last program ends, unless it stays initialised.
    persistence = bool(persistence) or watts > 0
    differences = []
    for name, min_watts, max_watts, limit, mode in _read_power(printed):
        if watts and None in (min_watts, max_watts):
            raise PlanError(
                f"{host}: the power of its {name} cannot be limited (nvidia-smi prints N/A): "
                "write driver_power_limit_watts=0 into its line in inventory.ini"
            )
        if watts and not min_watts <= watts <= max_watts:
            raise PlanError(
                f"{host}: driver_power_limit_watts is {watts}, but its {name} accepts "
                f"{min_watts:.0f} to {max_watts:.0f} W. Change it in group_vars/all.yml, or for "
                "this machine in its line of inventory.ini"
            )
        if watts and (limit is None or round(limit) != watts):
            differences.append(f"the limit of its {name} is {limit} W")
        if persistence and mode != "Enabled":
            differences.append(f"its {name} is not kept initialised")
    return {"persistence": persistence, "watts": watts, "wrong": differences}


def _read_power(printed):
    """Yield (name, min_watts, max_watts, limit, mode) of each GPU; N/A becomes None."""
    for line in printed.splitlines():
        # "NVIDIA GeForce RTX 3090, 100.00, 350.00, 350.00, Disabled"
        words = [word.strip() for word in line.rsplit(",", 4)]
        if len(words) != 5:
            continue
        name, *texts, mode = words
        figures = []
        for text in texts:
            try:
                watts = float(text)
            except ValueError:
                watts = math.nan
            figures.append(watts if math.isfinite(watts) else None)
        yield (name, *figures, mode)
