"""Collects the facts about a machine that the launcher needs before it starts a run there. It only
writes a cache, the data's listing. Standard library only.
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

SECONDS = 20  # for one command: the control node waits 30 for the whole answer


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
        "missing": missing_packages(question["packages"]),
        "distributions": distributions(question["distributions"]),
        "glibc": glibc(),
        "architecture": platform.machine(),
        "gpus": gpus(),
        "runs": claims(),
        "toolkit": pathlib.Path(question["toolkit"]).exists(),
        "interfaces": {peer: route(peer)["interface"] for peer in question["peers"]},
        "free_ports": free_ports(question["ports"]),
        "data": data(
            question["data"],
            question["data_kind"],
            folder,
            is_listed=not question["data_reader"],
        ),
        "disk_free": disk_free(existing_folder(folder)),
        "writable": os.access(existing_folder(folder), os.W_OK),
        "guard_python": os.access(question["guard_python"], os.X_OK),
    }
    print(mark + json.dumps(facts))


def machine_id():
    """Return a text that is equal for all nodes that share one kernel, and so its cores: local
    nodes and containers."""
    # Not boot_id: a container has another one than its machine. The disks' serial numbers
    # distinguish PCs; the kernel's address in memory (random at each boot) distinguishes virtual
    # machines without serial numbers.
    block, kernel = pathlib.Path("/sys/block"), pathlib.Path("/sys/kernel/vmcoreinfo")
    names = ("serial", "wwid", "device/wwid")
    serials = sorted(path for name in names for path in block.glob("*/" + name))
    try:
        facts = [path.read_text() for path in [*serials, kernel]]
        facts.append(pathlib.Path("/proc/meminfo").read_text().splitlines()[0])
    except OSError:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def versions():
    """Return the versions of Python, torch, torchvision, NCCL and torch's CUDA; None if missing."""
    # Imported here, because 3.6 lacks it: the environment's Python is at least 3.9, but the guard's
    # may be older.
    from importlib import metadata

    # From the metadata of packages: importing torch takes seconds.
    packages = {"python": "{}.{}.{}".format(*sys.version_info[:3])}
    for name in ("torch", "torchvision"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    packages["nccl"] = packages["cuda"] = None
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.match(r"nvidia-nccl-cu\d+$", name):
            packages["nccl"] = distribution.version
    # torch's metadata lacks the CUDA version that it was built with; its version.py has it.
    for folder in sys.path:
        path = pathlib.Path(folder, "torch", "version.py")
        if path.exists():
            match = re.search(r"^cuda[^=]*= *'([^']+)'", path.read_text(), re.MULTILINE)
            packages["cuda"] = match.group(1) if match else None
            break
    return packages


def distributions(max_count):
    """Return {name: version} of at most `max_count` packages, as pip spells their names."""
    from importlib import metadata

    packages = {}
    for distribution in metadata.distributions() if max_count else ():
        name = distribution.metadata["Name"]
        # The first of a name on the path is the one that Python imports.
        if name and len(packages) < max_count:
            packages.setdefault(name, distribution.version)
    return packages


def glibc():
    """Return 36 for glibc 2.36; 0 for another library."""
    match = re.match(r"2\.(\d{1,3})", platform.libc_ver()[1])
    return int(match.group(1)) if match else 0


def missing_packages(names):
    """Return the packages among `names` that the environment lacks."""
    # Found, not imported: an import may take seconds, or print.
    missing = []
    for name in names:
        try:
            has_package = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            has_package = False
        missing += [] if has_package else [name]
    return missing


def cpu_flags(names):
    """Return the flags among `names` that /proc/cpuinfo has."""
    text = pathlib.Path("/proc/cpuinfo").read_text(errors="replace")
    match = re.search(r"^flags\s*:(.*)", text, re.MULTILINE)
    flags = match.group(1).split() if match else []
    return sorted(set(flags).intersection(names))


def free_ports(ports):
    """Return the ports among `ports` that are free on every address."""
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


def existing_folder(path):
    """Return the path itself, or the nearest folder above it that exists."""
    # The first run makes the folder, but its disk is known now.
    path = pathlib.Path.cwd() / path
    while not path.exists():
        path = path.parent
    return str(path)


def gpus_on_bus():
    """Return the number of NVIDIA's display controllers (PCI class 03), even without a driver."""
    count = 0
    for device in pathlib.Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        count += vendor.strip() == "0x10de" and kind.startswith("0x03")
    return count


def gpus():
    """Return the GPUs in the order of nvidia-smi, the driver version and the processes that use
    them."""
    facts = {"cards": [], "driver": None, "processes": [], "error": None, "on_bus": gpus_on_bus()}
    if shutil.which("nvidia-smi") is None:
        return facts
    rows = query(("driver_version", "name", "uuid", "pci.device_id"))
    if rows is None:
        return dict(facts, error=run_error(["nvidia-smi"]))
    # A driver of 2021 or older does not know the field, and refuses the whole question.
    capabilities = query(("compute_cap",)) or []
    capabilities += [[""]] * (len(rows) - len(capabilities))
    cards = [parse_gpu(row, capability) for row, capability in zip(rows, capabilities)]
    text = output(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]) or ""
    pids = [int(line) for line in text.splitlines() if line.strip().isdigit()]
    driver = rows[0][0] if rows else None
    return dict(facts, cards=cards, driver=driver, processes=[*map(describe_process, pids)])


def query(fields):
    """Return a row of nvidia-smi's answers for each GPU; None if it fails."""
    text = output(["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader"])
    if text is None:
        return None
    return [[word.strip() for word in line.split(",")] for line in text.splitlines() if line]


def parse_gpu(row, capability):
    """Return a GPU's facts. `sm` is 10 x major + minor of the compute capability, None if the
    driver does not say; `pci` is the PCI device number, None if unknown."""
    _, name, uuid, device = [*row, "", "", ""][:4]
    major, _, minor = capability[0].partition(".")
    has_capability = major.isdigit() and minor.isdigit()
    # The vendor's number, 10DE, follows the device's: 0x1E0710DE.
    pci = re.match(r"0x([0-9A-Fa-f]{4})10DE$", device)
    return {
        "name": name or "GPU",
        "uuid": uuid,
        "pci": pci.group(1).lower() if pci else None,
        "sm": 10 * int(major) + int(minor) if has_capability else None,
    }


def describe_process(pid):
    """Return a process's user and command, for people."""
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
    """Return why a command fails; if it works, nvidia-smi finds no GPU."""
    try:
        subprocess.check_output(
            argv, stderr=subprocess.STDOUT, timeout=SECONDS, universal_newlines=True
        )
        return "it lists no GPU"
    except subprocess.CalledProcessError as error:
        return " ".join(error.output.split())[:300]
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def data(folder, kind, node_dir, is_listed=True):
    """Return the listings of a data set of this kind (contract/layout.py), or the `problem` that
    keeps the folder from being one. If it is not listed here, only the folder's time tells whether
    another machine reads the same."""
    root = pathlib.Path(folder)
    exists = bool(folder) and root.is_dir()
    facts = {"exists": exists, "problem": None, "splits": {}, "others": []}
    # In microseconds, since shares round to fractions of them.
    facts["changed"] = root.stat().st_mtime_ns // 1000 if exists else 0
    # Name at most ten data sets beside one that is missing: it may be misspelled.
    if folder and not exists:
        try:
            names = layout.data_sets(root.parent)
            facts["others"] = [name for name in names if name.isprintable()][:10]
        except OSError:
            pass
    if exists and is_listed:
        try:
            facts["splits"] = layout.listings(root, pathlib.Path(node_dir), Pulse().beat, kind)
        except layout.LayoutError as error:
            facts["problem"] = str(error)
    return facts


def show_data(folder, kind, node_dir, mark):
    """Print the answer of `data` after the mark."""
    print(mark + json.dumps(data(folder, kind, node_dir)))


def output(argv):
    """Return what a command prints; None if it fails or takes too long."""
    try:
        return subprocess.check_output(
            argv, stderr=subprocess.DEVNULL, timeout=SECONDS, universal_newlines=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
