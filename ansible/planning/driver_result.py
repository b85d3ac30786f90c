"""What came of a driver's installation, and what is held so that it stays. Pure functions."""

import re

from . import driver_candidates as offers
from . import stacks

# A kernel's packages name a release ("linux-image-6.1.0-50-amd64"); the metapackages, which bring
# the next kernel, do not.
KERNEL = re.compile(
    r"linux-(image|headers|modules|modules-extra|generic|lowlatency|virtual|oem|cloud)(-|$)"
)
RELEASE = re.compile(r"-\d+\.\d+\.\d+")
DRIVER = re.compile(
    r"(lib)?nvidia-|libcuda1$|xserver-xorg-video-nvidia|firmware-nvidia|cuda-drivers"
)


def driver_hold(facts, version, wanted, stack, let_go=()):
    """What keeps driver `version` (NVIDIA's) from moving, and the kernel where that has to stay.

    wanted: as driver.driver_wanted has it; let_go: what was held before an installation that broke
    off, and is there. Returns {"packages": those to hold, "preferences": text for apt,
    "unattended": text for unattended-upgrades}. Packages: the driver's (by their version, so that
    nvidia-container-toolkit and other neighbours stay free), the transitional ones, which would
    bring another branch, and what was let go, at whichever version it is; where kernel_stays, the
    kernel's metapackages and linux-modules-nvidia-* too.
    """
    stays = kernel_stays(facts, wanted, stack)
    holds = {}
    for name, present in sorted(facts["packages"].items()):
        own = version and DRIVER.match(name) and stacks.upstream(present).startswith(version)
        own = own or name in facts["transitional"] or name in let_go
        due = stays if of_kernel(name) else own
        if due:
            holds[name] = present
    stanzas = [
        f"Package: {' '.join(name for name in holds if holds[name] == present)}\n"
        f"Pin: version {present}\nPin-Priority: 999\n"
        for present in sorted(set(holds.values()))
    ]
    # Half installed: of no version that a pin could name.
    half = sorted(name for name in set(let_go) - set(holds) if stays or not of_kernel(name))
    patterns = [f"{name}$" for name in [*holds, *half]] + [offers.MODULES] * stays
    lines = "".join(f'    "{pattern}";\n' for pattern in patterns)
    block = f"Unattended-Upgrade::Package-Blacklist {{\n{lines}}};\n"
    return {"packages": [*holds, *half], "preferences": "\n".join(stanzas), "unattended": block}


def kernel_stays(facts, wanted, stack):
    """Whether the kernel is held with its driver: by setting, where its next one would get no
    module, and for the stack of CUDA 10.2 on Ubuntu 18.04 and 20.04, whose later kernels its
    driver does not know."""
    old = stack["name"] == "cu102" and facts["release"] in ("18.04", "20.04")
    return wanted["hold_kernel"] or old or not module_follows(facts)


def module_follows(facts):
    """Whether the next kernel of its series comes with a module, built before or by DKMS here."""
    series = facts["kernel_series"]
    built = any(
        offers.SIGNED.match(name) and name.endswith(f"-{series}")
        for name in facts["packages"].keys() - facts["transitional"].keys()
    )
    by_dkms = facts["dkms"] and f"linux-headers-{series}" in facts["packages"]
    return series is not None and (built or by_dkms)


def of_kernel(name):
    """Whether a package brings the next kernel, or the module that Ubuntu built for one."""
    return bool(KERNEL.match(name) and not RELEASE.search(name)) or name.startswith(offers.MODULES)


def kernel_packages(facts):
    """The metapackages that bring a machine's next kernel, and its headers where it has them."""
    names = facts["packages"]
    return sorted(name for name in names if KERNEL.match(name) and not RELEASE.search(name))


def reboot_refused(facts, wanted, here=""):
    """(why the machine is not rebooted now, remedy), or ().

    here: the control machine's own machine_id; wanted: as driver.driver_wanted has it.
    """
    if here and facts["machine_id"] == here:
        return (
            "it is this control machine itself, which does not reboot itself, and its driver needs "
            "a reboot",
            "save what is open, then sudo reboot; afterwards run the same command again (log in on "
            "the text screen, if that boot ends there): it continues from there",
        )
    if facts["seated"] and not wanted["interrupt"]:
        who = f"{', '.join(facts['seated'])} {'is' if len(facts['seated']) == 1 else 'are'}"
        return (
            f"{who} logged in at its screen, and its driver needs a reboot",
            "save what is open there, then run again: STOP_DISPLAY=1 after make, or "
            "-e allow_stop_display=true after ansible-playbook; or reboot it yourself, then run "
            "again",
        )
    return ()


def driver_outcome(facts, loading, smi):
    """What to do next: {"state": done, reboot or refuse; "reason"; "remedy"}.

    facts: read after the driver was installed. loading: what `modprobe nvidia` complained about.
    smi: {"rc", "text"} of `nvidia-smi --query-gpu=driver_version --format=csv,noheader`.
    """
    loaded, kernel = facts["driver"], facts["kernel"]
    versions = set(re.findall(r"\d+\.\d+[.\d]*", smi["text"])) if smi["rc"] == 0 else set()
    if loaded and versions == {loaded}:
        return _next("done", f"module and nvidia-smi agree: {loaded}")
    if facts["nouveau"]:
        return _next("reboot", "nouveau drives the card until the next boot")
    apart = loaded and facts["driver_library"] not in (None, loaded)
    if "version mismatch" in smi["text"] or apart:
        return _next(
            "reboot",
            f"driver/library version mismatch: the kernel has {loaded}, the library is "
            f"{facts['driver_library']}",
        )
    if facts["module"] is None and facts["waiting_kernel"] and facts["waiting_module"]:
        return _next("reboot", f"the module is there for kernel {facts['waiting_kernel']}")
    if facts["module"] is None:
        return _next(
            "refuse",
            f"there is no nvidia module for the running kernel {kernel}",
            "see /var/lib/dkms/nvidia*/*/build/make.log and /var/log/nvidia-installer.log there",
        )
    if loaded is None:
        return _not_loaded(facts, loading)
    return _next(
        "refuse",
        f"module {loaded} is loaded, but nvidia-smi fails: {_line(smi['text'])}",
        "see `sudo dmesg | grep -i nvrm` there",
    )


def _not_loaded(facts, loading):
    ready = f"module {facts['module']} is built for {facts['kernel']}"
    if re.search(r"[Kk]ey was rejected|Required key|Operation not permitted", loading):
        return _next("refuse", f"{ready}, and Secure Boot does not trust its key", mok_steps(facts))
    if "No such device" in loading:
        return _next(
            "refuse",
            f"{ready}, but cannot be loaded: the kernel finds no card for it (No such device)",
            "is the card seated and powered? lspci -d 10de: and sudo dmesg | grep -i nvrm say more",
        )
    return _next(
        "refuse", f"{ready}, but cannot be loaded: {_line(loading)}", "see `sudo dmesg` there"
    )


def mok_steps(facts):
    """What a person has to do at the machine, since the firmware asks only there."""
    key = facts["signing_key"] or "/var/lib/dkms/mok.pub"
    return (
        f"at that machine: 1. sudo apt install mokutil && sudo mokutil --import {key} (choose a "
        "password, needed once). 2. sudo reboot; in the blue screen choose Enroll MOK, Continue, "
        "Yes, and give that password. 3. Run the same command here again, which goes on from there"
    )


def _next(state, reason, remedy=""):
    return {"state": state, "reason": reason, "remedy": remedy}


def _line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"
