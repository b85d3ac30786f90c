"""What the launcher wants to know about a machine before it starts a run there. It writes nothing
but a cache, the data's listing. Standard library only.
"""

import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import pwd
import re
import shutil
import socket
import subprocess
import sys
import time

from contract import layout
from contract.interface import route
from launcher.node.machine import Pulse, disk_free
from launcher.node.machine_lock import claims
from launcher.node.processes import command_of

SECONDS = 20  # for one command: the control machine waits 30 in all


def main(question, mark):
    """Print one line of JSON after the mark: the facts that `question` asks for."""
    folder = question["node_dir"]
    facts = {
        "unix": time.time(),
        "home": str(pathlib.Path.home()),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_flags": cpu_flags(question["cpu_flags"]),
        "machine": machine_id(),
        "versions": versions(),
        "missing": [name for name in question["packages"] if not has_package(name)],
        "distributions": distributions(question["distributions"]),
        "glibc": glibc(),
        "architecture": platform.machine(),
        "gpus": gpus(),
        "runs": claims(),
        "toolkit": pathlib.Path(question["toolkit"]).exists(),
        "interfaces": {peer: route(peer)["interface"] for peer in question["peers"]},
        "free_ports": free_ports(question["ports"]),
        "data": data(question["data"], question["data_kind"], folder),
        "disk_free": disk_free(nearest(folder)),
        "writable": os.access(nearest(folder), os.W_OK),
        "guard_python": os.access(question["guard_python"], os.X_OK),
    }
    print(mark + json.dumps(facts))


def machine_id():
    """Equal for all nodes that share one kernel, and so its cores: local nodes and containers.

    It is not boot_id, since containers get one of their own. The disks' serial numbers
    distinguish PCs; the kernel's address in memory (random at each boot) distinguishes virtual
    machines without serial numbers.
    """
    block, kernel = pathlib.Path("/sys/block"), pathlib.Path("/sys/kernel/vmcoreinfo")
    known = sorted(p for name in ("serial", "wwid", "device/wwid") for p in block.glob("*/" + name))
    try:
        facts = [path.read_text() for path in [*known, kernel]]
        facts.append(pathlib.Path("/proc/meminfo").read_text().splitlines()[0])
    except OSError:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def versions():
    """Versions from the metadata of packages: importing torch takes seconds."""
    # Imported here, because 3.6 lacks it: the environment's Python is at least 3.9, but the guard's
    # may be older.
    from importlib import metadata

    found = {"python": "{}.{}.{}".format(*sys.version_info[:3])}
    for name in ("torch", "torchvision"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["nccl"] = None
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.match(r"nvidia-nccl-cu\d+$", name):
            found["nccl"] = distribution.version
    found["cuda"] = torch_cuda()
    return found


def distributions(most):
    """The versions of so many packages at most, as pip would name them."""
    from importlib import metadata

    found = {}
    for one in metadata.distributions() if most else ():
        if one.metadata["Name"] and len(found) < most:
            found.setdefault(one.metadata["Name"], one.version)
    return found


def glibc():
    """36 for glibc 2.36; 0 where it is another library."""
    match = re.match(r"2\.(\d{1,3})", platform.libc_ver()[1])
    return int(match.group(1)) if match else 0


def torch_cuda():
    """The CUDA version that torch was built with, read from its version.py without importing
    torch."""
    for folder in sys.path:
        path = pathlib.Path(folder, "torch", "version.py")
        if path.exists():
            match = re.search(r"^cuda[^=]*= *'([^']+)'", path.read_text(), re.MULTILINE)
            return match.group(1) if match else None
    return None


def has_package(name):
    """Whether a package of this name is in the environment."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def cpu_flags(wanted):
    """Those of `wanted` that /proc/cpuinfo has."""
    text = pathlib.Path("/proc/cpuinfo").read_text(errors="replace")
    match = re.search(r"^flags\s*:(.*)", text, re.MULTILINE)
    flags = match.group(1).split() if match else []
    return sorted(set(flags).intersection(wanted))


def free_ports(ports):
    """The ports among `ports` that are free on every address."""
    free = []
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("", port))
            except OSError:
                continue
        free.append(port)
    return free


def nearest(path):
    """The path itself, or the nearest folder above it that exists."""
    path = pathlib.Path.cwd() / path
    while not path.exists():
        path = path.parent
    return str(path)


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
    found = {"cards": [], "driver": None, "processes": [], "error": None, "on_bus": cards_on_bus()}
    if shutil.which("nvidia-smi") is None:
        return found
    listed = query(("driver_version", "name", "uuid", "pci.device_id"))
    if listed is None:
        return dict(found, error=run_error(["nvidia-smi"]))
    # A driver of 2021 or older does not know the field, and refuses the whole question.
    capabilities = query(("compute_cap",)) or []
    capabilities += [[""]] * (len(listed) - len(capabilities))
    cards = [card(row, sm) for row, sm in zip(listed, capabilities)]
    held = output(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]) or ""
    pids = [int(line) for line in held.splitlines() if line.strip().isdigit()]
    driver = listed[0][0] if listed else None
    return dict(found, cards=cards, driver=driver, processes=[*map(described_process, pids)])


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


def described_process(pid):
    """A process's owner and command, for people."""
    try:
        uid = pathlib.Path("/proc", str(pid)).stat().st_uid
    except OSError:
        return {"pid": pid, "user": "?", "command": "?"}
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return {"pid": pid, "user": user, "command": command_of(pid)[:120]}


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


def data(folder, kind, node_dir):
    """The listings of a data set of this kind (contract/layout.py), or what keeps the folder from
    being one."""
    root = pathlib.Path(folder)
    there = bool(folder) and root.is_dir()
    found = {"exists": there, "problem": None, "splits": {}, "others": []}
    if folder and not there:
        found["others"] = others(root.parent)
    if there:
        try:
            found["splits"] = layout.listings(root, pathlib.Path(node_dir), Pulse().beat, kind)
        except layout.LayoutError as error:
            found["problem"] = str(error)
    return found


def show_data(folder, kind, node_dir, mark):
    """Print after the mark what `data` says."""
    print(mark + json.dumps(data(folder, kind, node_dir)))


def others(folder):
    """The data sets beside one that is missing, by name; at most ten."""
    try:
        return [name for name in layout.data_sets(folder) if name.isprintable()][:10]
    except OSError:
        return []


def output(argv):
    """What a command prints; None where it fails or takes too long."""
    try:
        return subprocess.check_output(
            argv, stderr=subprocess.DEVNULL, timeout=SECONDS, universal_newlines=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
