"""The NVIDIA cards of a machine, by its driver's nvidia-smi and on its PCI bus."""

import pathlib
import pwd
import re
import shutil
import subprocess

from launcher.machines.probes.command import SECONDS, output


def cards_on_bus():
    """Number of NVIDIA's display controllers (PCI class 03), with or without a driver."""
    found = 0
    for device in pathlib.Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        found += vendor.strip() == "0x10de" and kind.startswith("0x03")
    return found


def gpus():
    """GPUs in the order of nvidia-smi, driver version and the processes that hold them."""
    none = {"count": 0, "cards": [], "driver": None, "processes": [], "error": None}
    none["cards_on_bus"] = cards_on_bus()
    if shutil.which("nvidia-smi") is None:
        return none
    listed = query(("driver_version", "name", "uuid", "pci.device_id"))
    if listed is None:
        return dict(none, error=run_error(["nvidia-smi"]))
    # A driver of 2021 or older does not know the field, and refuses the whole question.
    capabilities = query(("compute_cap",)) or []
    capabilities += [[""]] * (len(listed) - len(capabilities))
    cards = [card(row, sm) for row, sm in zip(listed, capabilities)]
    held = output(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]) or ""
    processes = []
    for line in held.splitlines():
        if line.strip().isdigit():
            processes.append(of_process(int(line)))
    driver = listed[0][0] if listed else None
    return dict(none, count=len(cards), cards=cards, driver=driver, processes=processes)


def query(fields):
    """A row of nvidia-smi's answers for each GPU; None when it fails."""
    text = output(["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader"])
    if text is None:
        return None
    return [[word.strip() for word in line.split(",")] for line in text.splitlines() if line]


def card(row, capability):
    """`sm` is 10 x major + minor of the compute capability, null where the driver does not say;
    `pci` the PCI device number: nvidia-smi gives it before the vendor's, 0x1E0710DE."""
    _, name, uuid, device = [*row, "", "", ""][:4]
    major, _, minor = capability[0].partition(".")
    known = major.isdigit() and minor.isdigit()
    pci = re.match(r"0x([0-9A-Fa-f]{4})10DE$", device)
    return {
        "name": name or "GPU",
        "uuid": uuid,
        "pci": pci.group(1).lower() if pci else None,
        "sm": 10 * int(major) + int(minor) if known else None,
    }


def of_process(pid):
    """A process's owner and command, for people."""
    try:
        process = pathlib.Path("/proc", str(pid))
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        uid = process.stat().st_uid
    except OSError:
        return {"pid": pid, "user": "?", "command": "?"}
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return {"pid": pid, "user": user, "command": command.strip()[:120]}


def run_error(argv):
    try:
        subprocess.check_output(
            argv, stderr=subprocess.STDOUT, timeout=SECONDS, universal_newlines=True
        )
        return "it lists no GPU"
    except subprocess.CalledProcessError as error:
        return " ".join(error.output.split())[:300]
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
