"""What the launcher wants to know of a machine before it starts a run there. It writes nothing
but a
cache of the data's listing.

It is not run from a file: the control machine sends this source to `python -`, followed by a call
of `main`; with it goes trainer/data/layout.py, which knows what a data set is. Standard library
only, Python >= 3.6.
"""

import array
import fcntl
import hashlib
import importlib.util
import json
import os
import pathlib
import pwd
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
import types

MARK = "tandem-probe "
PATIENCE = 20  # seconds for one command: the control machine waits for 30


def main(task, layout_source):
    """Print one line of JSON: the facts that `task` asks for."""
    layout = types.ModuleType("layout")
    exec(layout_source, layout.__dict__)  # noqa: S102 the control machine's own file
    found = versions()
    facts = {
        "unix": time.time(),
        "home": str(pathlib.Path.home()),
        "hostname": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_flags": cpu_flags(),
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
        "data": data(task["data"], task["node_dir"], layout),
        "disk_free": disk_free(task["node_dir"]),
        "writable": writable(task["node_dir"]),
        "guard_python": os.access(task["guard_python"], os.X_OK),
    }
    print(MARK + json.dumps(facts))


def machine_id():
    """Equal for all that share one kernel, and so its cores: local nodes, containers.

    Not boot_id: containers get one of their own. The disks' serial numbers tell PCs apart, the
    place of the kernel in memory (random at each boot) tells virtual machines without any.
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
    # Here, because 3.6 has it not: the environment's Python is at least 3.9, the guard's may be
    # older.
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
    """The classifiers of this torchvision, by the trainer's rule (a source, or None: not asked).

    Importing torchvision takes seconds, so its answer is kept. Nothing where it gave none in time.
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
    said = run([sys.executable, "-IB", "-c", rule + ask])
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
    """The runs whose guards live on this machine, by the names they claimed (presence.py)."""
    found = []
    for line in pathlib.Path("/proc/net/unix").read_text().splitlines():
        match = re.search(r" @tandem/(\d+)/([^/]+)/([^/]+)$", line)
        if match:
            pid, run, holder = match.groups()
            found.append({"pid": int(pid), "run": run, "holder": holder})
    return found


def cpu_flags():
    """Those of /proc/cpuinfo that tell whether the CPU computes in 16 bits."""
    text = pathlib.Path("/proc/cpuinfo").read_text(errors="replace")
    match = re.search(r"^flags\s*:(.*)", text, re.MULTILINE)
    flags = match.group(1).split() if match else []
    return sorted(flag for flag in flags if flag in ("avx512_bf16", "amx_bf16"))


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
    none = {"count": 0, "cards": [], "driver": None, "holders": [], "error": None}
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
    held = run(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]) or ""
    holders = []
    for line in held.splitlines():
        if line.strip().isdigit():
            holders.append(holder(int(line)))
    driver = listed[0][0] if listed else None
    return dict(none, count=len(cards), cards=cards, driver=driver, holders=holders)


def query(fields):
    """A row of nvidia-smi's answers for each GPU; None when it fails."""
    text = run(["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader"])
    if text is None:
        return None
    return [[word.strip() for word in line.split(",")] for line in text.splitlines() if line]


def card(row, capability):
    """`sm` is 10 x major + minor of the compute capability, null where the driver does not tell;
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


def holder(pid):
    """Who a process belongs to and what it is, for people."""
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


def run(argv):
    try:
        return subprocess.check_output(
            argv, stderr=subprocess.DEVNULL, timeout=PATIENCE, universal_newlines=True
        )
    except (OSError, subprocess.SubprocessError):
        return None


def run_error(argv):
    try:
        subprocess.check_output(
            argv, stderr=subprocess.STDOUT, timeout=PATIENCE, universal_newlines=True
        )
        return "it lists no GPU"
    except subprocess.CalledProcessError as error:
        return " ".join(error.output.split())[:300]
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def route(peer):
    """The network card through which `peer` (a numeric address) is reached; sends nothing."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((peer, 9))
            source = sock.getsockname()[0]
    except OSError as error:
        return {"interface": None, "source": None, "error": error.strerror or str(error)}
    return {"interface": interface_of(source), "source": source, "error": None}


def interface_of(address):
    """The card that bears an address, without `ip`, which need not be installed."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address.split("%")[0]).hex()
        for line in pathlib.Path("/proc/net/if_inet6").read_text().splitlines():
            fields = line.split()
            if fields[0] == wanted:
                return fields[5]
        return None
    size = 40  # sizeof(struct ifreq) on 64-bit Linux
    memory = array.array("B", bytes(1024 * size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iL", len(memory), memory.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(sock.fileno(), 0x8912, request))[0]  # SIOCGIFCONF
    found = memory.tobytes()[:used]
    wanted = socket.inet_aton(address)
    for start in range(0, used, size):
        if found[start + 20 : start + 24] == wanted:
            # An alias such as eth0:1 is an address of the card eth0.
            return found[start : start + 16].split(b"\0")[0].decode().split(":")[0]
    if address.startswith("127."):
        return "lo"
    return None


def free_ports(ports):
    """Those of `ports` that nobody uses, on any address."""
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


def tree_sha256(folder):
    """SHA-256 over the names and contents of a tree's files, null where there is none.

    launcher/code.py computes the same on the control machine: for each file, in the order of the
    names, name, NUL, "x" or "-" (executable), NUL, SHA-256 of the contents, newline.
    """
    if not folder.is_dir():
        return None
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = [str(path.relative_to(folder)) for path in files if "__pycache__" not in path.parts]
    total = hashlib.sha256()
    for name in sorted(names):
        path = folder / name
        contents = hashlib.sha256(path.read_bytes()).hexdigest()
        mode = "x" if os.access(str(path), os.X_OK) else "-"
        total.update("{}\0{}\0{}\n".format(name, mode, contents).encode())
    return total.hexdigest()


def data(folder, node_dir, layout):
    """Classes and number of images of train/ and val/, or what keeps them from being a data set."""
    root = pathlib.Path(folder)
    found = {"path": folder, "exists": root.is_dir(), "problem": None, "splits": {}}
    if found["exists"]:
        try:
            with layout.readable():
                found["splits"] = splits(root, pathlib.Path(node_dir), layout)
        except layout.LayoutError as error:
            found["problem"] = str(error)
    return found


def splits(root, node_dir, layout):
    """The listings of train/ and val/, made anew only when one of their folders has changed."""
    real = root.resolve()
    cache = node_dir / "manifests" / hashlib.sha256(os.fsencode(str(real))).hexdigest()[:16]
    key = [str(real), *layout.SUFFIXES]
    try:
        cached = json.loads(cache.read_text())
        known = cached["folders"]
        if cached["key"] == key and known == stamps(known):
            return cached["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    folders = stamps(below(real, layout))  # before the listing: what changes meanwhile is seen
    found = {split: listing(real, split, layout) for split in layout.SPLITS}
    keep({"key": key, "folders": folders, "splits": found}, cache)
    return found


def below(root, layout):
    """The folders whose time changes when an image comes or goes."""
    for split in layout.SPLITS:
        names = layout.class_names(root, split)
        yield str(root / split)
        for name in names:
            for where, _, _ in os.walk(str(root / split / name), followlinks=True):
                yield where


def stamps(folders):
    return {folder: pathlib.Path(folder).stat().st_mtime_ns for folder in folders}


def listing(root, split, layout):
    """Number of images, classes and a hash of the names and sizes."""
    by_class = layout.images_by_class(root, split)
    total = hashlib.sha256()
    images = [path for paths in by_class.values() for path in paths]
    for path in images:
        total.update(os.fsencode("{}\0{}\n".format(path, size(root / path))))
    return {
        "classes": sum(bool(paths) for paths in by_class.values()),
        "images": len(images),
        "sha256": total.hexdigest(),
    }


def size(path):
    """In bytes; None for a link that leads nowhere, a bad image in training."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def keep(value, path):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name("{}.{}".format(path.name, os.getpid()))
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
    except OSError:
        pass  # a full disk is told elsewhere; the listing is only made again


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
