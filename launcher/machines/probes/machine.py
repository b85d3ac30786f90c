"""What the launcher wants to know about a machine before it starts a run there. It writes nothing
but caches: the data's listing, and which models there are. Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import pathlib
import re
import socket
import sys
import time

from contract.card import route
from launcher.machines.probes.command import keep, output
from launcher.machines.probes.dataset import data
from launcher.machines.probes.gpus import gpus
from launcher.node.tree import tree_sha256

MARK = "tandem-probe "
MOST_RUNS = 100  # that are told


def main(task):
    """Print one line of JSON: the facts that `task` asks for."""
    found = versions()
    facts = {
        "unix": time.time(),
        "home": str(pathlib.Path.home()),
        "hostname": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_flags": cpu_flags(task["cpu_flags"]),
        "machine": machine_id(),
        "versions": found,
        "models": models(task["models"], task["node_dir"], found["torchvision"]),
        "packages": {name: has_package(name) for name in task["packages"]},
        "gpus": gpus(),
        "runs": runs(),
        "paths": {path: pathlib.Path(path).exists() for path in task["paths"]},
        "routes": {peer: route(peer) for peer in task["peers"]},
        "free_ports": free_ports(task["ports"]),
        "code_sha256": tree_sha256(pathlib.Path(task["node_dir"], "code")),
        "data": data(task["data"], task["node_dir"]),
        "disk_free": disk_free(task["node_dir"]),
        "writable": writable(task["node_dir"]),
        "guard_python": os.access(task["guard_python"], os.X_OK),
    }
    print(MARK + json.dumps(facts))


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

    found: dict[str, str | None] = {"python": "{}.{}.{}".format(*sys.version_info[:3])}
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


def torch_cuda():
    """The CUDA version that torch was built with, read from its version.py without importing
    torch."""
    for folder in sys.path:
        path = pathlib.Path(folder, "torch", "version.py")
        if path.exists():
            match = re.search(r"^cuda[^=]*= *'([^']+)'", path.read_text(), re.MULTILINE)
            return match.group(1) if match else None
    return None


def models(rule, node_dir, version):
    """The classifiers of this torchvision, by the trainer's rule (its source, or None: not asked).

    Importing torchvision takes seconds, so the answer is kept. Empty where none came in time.
    """
    if rule is None or version is None:
        return []
    cache = pathlib.Path(node_dir, "manifests", "models.json")
    key = [version, sys.prefix, rule]
    try:
        cached = json.loads(cache.read_text())
        if cached["key"] == key:
            return cached["names"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    ask = "\nimport json, torchvision.models\nprint(json.dumps(names(torchvision.models)))"
    said = output([sys.executable, "-IB", "-c", rule + ask])
    if said is None:
        return []
    found = json.loads(said.splitlines()[-1])
    keep({"key": key, "names": found}, cache)
    return found


def has_package(name):
    """Whether a package of this name is in the environment."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def runs():
    """The runs whose guards live on this machine, by the names they claimed (machine_lock.py)."""
    # Every user of the machine may take any name, of any bytes.
    names = pathlib.Path("/proc/net/unix").read_text(errors="replace")
    word = r"/([\w@.+-]+)"
    claimed = re.finditer(rf" @tandem/(\d{{1,9}}){word}{word}$", names, re.ASCII | re.MULTILINE)
    found = (match.groups() for match in itertools.islice(claimed, MOST_RUNS))
    return [{"pid": int(pid), "run": run, "holder": holder} for pid, run, holder in found]


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


def disk_free(path):
    state = os.statvfs(nearest(path))
    return state.f_bavail * state.f_frsize


def writable(path):
    return os.access(nearest(path), os.W_OK)
