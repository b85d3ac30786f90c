"""Collects the facts about a machine that the launcher needs before it starts a run there.
launcher/look.py runs `main` on each machine, or `show_data` on a file server. boundary/answers.py
has the types of the answers. The only file that the probe writes is a cache of the data's listing.
Standard library only."""

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

COMMAND_SECONDS = 20  # for one command: the control node waits 30 s for the whole answer


def main(question, mark):
    """Print the facts that `question` (make_question in launcher/look.py) asks for, as a line of
    JSON that begins with `mark`: a .bashrc may print lines of its own before it."""
    node_dir = question["node_dir"]
    # /proc/cpuinfo has `flags\t\t: fpu vme de ...` for each processor, with equal flags.
    cpu_info = pathlib.Path("/proc/cpuinfo").read_text(errors="replace")
    match = re.search(r"^flags\s*:(.*)", cpu_info, re.MULTILINE)
    cpu_flags = set(match.group(1).split() if match else ()).intersection(question["cpu_flags"])
    glibc = re.match(r"2\.(\d{1,3})", platform.libc_ver()[1])
    facts = {
        "unix": time.time(),
        "home": str(pathlib.Path.home()),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_flags": sorted(cpu_flags),
        "machine": identify_machine(),
        "versions": find_versions(),
        "missing": find_missing_packages(question["packages"]),
        "distributions": list_distributions(question["distributions"]),
        "glibc": int(glibc.group(1)) if glibc else 0,  # 36 for 2.36; 0 for another library of C
        "architecture": platform.machine(),
        "gpus": list_gpus(),
        "runs": claims(),
        "toolkit": pathlib.Path(question["toolkit"]).exists(),
        "interfaces": {peer: route(peer)["interface"] for peer in question["peers"]},
        "free_ports": find_free_ports(question["ports"]),
        "data": describe_data_set(
            question["data"],
            question["data_kind"],
            node_dir,
            is_listed=not question["data_reader"],
        ),
        "disk_free": disk_free(nearest_folder(node_dir)),
        "writable": os.access(nearest_folder(node_dir), os.W_OK),
        "guard_python": os.access(question["guard_python"], os.X_OK),
    }
    print(mark + json.dumps(facts))


def identify_machine():
    """Return a text that is equal for nodes on one kernel (local nodes, containers)."""
    # A container's boot_id differs from that of its machine, so it does not help. The serial
    # numbers of disks distinguish PCs. The kernel's address in memory, which is random at each
    # boot, distinguishes virtual machines without serial numbers.
    disks, kernel_address = pathlib.Path("/sys/block"), pathlib.Path("/sys/kernel/vmcoreinfo")
    names = ("serial", "wwid", "device/wwid")  # which of them a disk has depends on its driver
    serials = sorted(path for name in names for path in disks.glob("*/" + name))
    try:
        facts = [path.read_text() for path in [*serials, kernel_address]]
        # `MemTotal:       16318772 kB`
        facts.append(pathlib.Path("/proc/meminfo").read_text().splitlines()[0])
    except OSError:  # a container may hide these files
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def find_versions():
    """Return the versions of Python, torch, torchvision, NCCL and torch's CUDA; None if missing."""
    # Imported here, because Python 3.6 lacks this module. Only the environment's Python, 3.9 or
    # later, calls this function. The guard's Python may be older.
    from importlib import metadata

    # The metadata of packages has their versions. An import of torch would take seconds.
    versions = {"python": "{}.{}.{}".format(*sys.version_info[:3])}
    for name in ("torch", "torchvision"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    versions["nccl"] = versions["cuda"] = None
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.match(r"nvidia-nccl-cu\d+$", name):  # nvidia-nccl-cu12
            versions["nccl"] = distribution.version
    # torch's CUDA version is only in its version.py: `cuda = '12.8'`, or `cuda = None`.
    for folder in sys.path:
        path = pathlib.Path(folder, "torch", "version.py")
        if path.exists():
            match = re.search(r"^cuda[^=]*= *'([^']+)'", path.read_text(), re.MULTILINE)
            versions["cuda"] = match.group(1) if match else None
            break  # Python imports the first torch on the path
    return versions


def list_distributions(max_count):
    """Return {name: version} of at most `max_count` packages, as pip spells their names."""
    from importlib import metadata

    versions = {}
    for distribution in metadata.distributions() if max_count else ():
        name = distribution.metadata["Name"]
        # If a name is on the path twice, Python imports the first, so its version counts.
        if name and len(versions) < max_count:
            versions.setdefault(name, distribution.version)
    return versions


def find_missing_packages(names):
    """Return the packages among `names` that the environment lacks."""
    # find_spec only looks for a package. An import may take seconds, or print something.
    missing = []
    for name in names:
        try:
            has_package = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):  # a broken package, or a module without a spec
            has_package = False
        if not has_package:
            missing.append(name)
    return missing


def find_free_ports(ports):
    """Return the ports among `ports` that are free on every address."""
    free = []
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            try:
                # A port that waits after a connection (TIME_WAIT) is free for the ranks, too.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("", port))
            except OSError:
                continue
        free.append(port)
    return free


def nearest_folder(path):
    """Return the path itself if it exists, else the nearest folder above it that does."""
    # Before the first run the folder is missing, but the disk that will hold it is known.
    path = pathlib.Path.cwd() / path
    while not path.exists():
        path = path.parent
    return str(path)


def list_gpus():
    """Return the fields of Gpus (boundary/answers.py): the GPUs, their driver, their processes."""
    facts = {"cards": [], "driver": None, "processes": [], "error": None, "on_bus": 0}
    # Count NVIDIA's display controllers (PCI class 03) on the bus, also without a driver.
    for device in pathlib.Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, pci_class = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        facts["on_bus"] += vendor.strip() == "0x10de" and pci_class.startswith("0x03")
    if shutil.which("nvidia-smi") is None:
        return facts
    rows = query_gpus("driver_version", "name", "uuid", "pci.device_id")
    if rows is None:
        return dict(facts, error=explain_nvidia_smi_failure())
    # A driver of 2021 or older rejects a query with this field, hence a query of its own.
    capabilities = [row[0] for row in query_gpus("compute_cap") or []]
    capabilities += [""] * (len(rows) - len(capabilities))
    cards = []
    for row, capability in zip(rows, capabilities):
        # ["535.261.03", "NVIDIA GeForce RTX 2080 Ti", "GPU-6f1c...", "0x1E0710DE"] and "7.5". If
        # nvidia-smi prints fewer fields, the others are empty.
        _, name, uuid, device = [*row, "", "", ""][:4]
        major, _, minor = capability.partition(".")
        has_capability = major.isdigit() and minor.isdigit()
        # 1E07 is the device's number, and 10DE is the vendor's.
        pci = re.match(r"0x([0-9A-Fa-f]{4})10DE$", device)
        card = {"name": name or "GPU", "uuid": uuid}
        card["pci"] = pci.group(1).lower() if pci else None
        card["sm"] = 10 * int(major) + int(minor) if has_capability else None
        cards.append(card)
    text = run_command(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]) or ""
    pids = [int(line) for line in text.splitlines() if line.strip().isdigit()]
    driver = rows[0][0] if rows else None
    return dict(facts, cards=cards, driver=driver, processes=[*map(describe_process, pids)])


def query_gpus(*fields):
    """Return a list of the values of these fields for each GPU; None if nvidia-smi fails."""
    text = run_command(["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader"])
    if text is None:
        return None
    return [[word.strip() for word in line.split(",")] for line in text.splitlines() if line]


def describe_process(pid):
    """Return the pid, the user and the command of a process, for people."""
    try:
        uid = pathlib.Path("/proc", str(pid)).stat().st_uid
    except OSError:
        return {"pid": pid, "user": "?", "command": "?"}
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return {"pid": pid, "user": user, "command": command_of(pid)[:120]}


def explain_nvidia_smi_failure():
    """Run nvidia-smi again, and return why it fails."""
    try:
        subprocess.check_output(
            ["nvidia-smi"],
            stderr=subprocess.STDOUT,
            timeout=COMMAND_SECONDS,
            universal_newlines=True,
        )
        return "it lists no GPU"  # alone it succeeds, only the query fails
    except subprocess.CalledProcessError as error:
        return " ".join(error.output.split())[:300]
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def describe_data_set(folder, kind, node_dir, is_listed=True):
    """Return the facts about a data set of this `kind` (contract/layout.py): its listings, or the
    `problem` that keeps the folder from being such a data set. If not `is_listed`, another client
    of the same file server lists the data, and the folder's time must suffice to compare them."""
    root = pathlib.Path(folder)
    exists = bool(folder) and root.is_dir()
    facts = {"exists": exists, "problem": None, "splits": {}, "others": []}
    # A file server rounds times to fractions of a microsecond, so only microseconds are compared.
    facts["changed"] = root.stat().st_mtime_ns // 1000 if exists else 0
    # If the data set is missing, list the data sets beside it: its name may be misspelled.
    if folder and not exists:
        try:
            names = layout.find_data_sets(root.parent)
            facts["others"] = [name for name in names if name.isprintable()][:10]
        except OSError:
            pass
    if exists and is_listed:
        try:
            facts["splits"] = layout.read_listings(root, pathlib.Path(node_dir), Pulse().beat, kind)
        except layout.LayoutError as error:
            facts["problem"] = str(error)
    return facts


def show_data(folder, kind, node_dir, mark):
    """Print the facts about a data set as a line of JSON that begins with `mark`."""
    print(mark + json.dumps(describe_data_set(folder, kind, node_dir)))


def run_command(argv):
    """Return the output of a command; None if the command fails or takes too long."""
    try:
        return subprocess.check_output(
            argv, stderr=subprocess.DEVNULL, timeout=COMMAND_SECONDS, universal_newlines=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
