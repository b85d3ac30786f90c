#!/usr/bin/python
"""Collects the facts that preflight checks. Only reads. Python >= 3.6, standard library."""

import glob
import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.commands import apt_broken, outcome, output, read
from ansible.module_utils.kernels import waiting_kernel

DOCUMENTATION = r"""
---
module: machine_facts
short_description: Collects the facts that preflight checks
description: Reads a machine's hardware, system and settings. Changes nothing.
options:
  address:
    description: The address at which the control node reaches this machine.
    type: str
    required: true
  folders:
    description: Folders whose free space matters; they need not exist yet.
    type: list
    elements: str
    default: []
  sources:
    description: >-
      Whether apt's sources are asked for their suites, which a machine without internet may not
      try.
    type: bool
    default: false
author: Tandem
"""

EXAMPLES = r"""
- name: Collect
  machine_facts:
    address: 192.168.56.111
    folders: [/opt/tandem, /srv/tandem/data]
"""

RETURN = r"""
facts:
  description: What was read; None where the machine does not report it.
  returned: always
  type: dict
"""

CRYPTTAB = "/etc/crypttab"
# By which an initial RAM disk opens a disk without anybody: bound to a TPM or a server.
CLEVIS = "/usr/share/initramfs-tools/hooks/clevis"
SOURCES = ("/etc/apt/sources.list", "/etc/apt/sources.list.d/*")
# With these settings apt-get update asks only for each source's Release file, stores it in a
# temporary folder, and runs no hooks. source: apt.conf(5), apt's acquire-additional-files.txt.
ASK_SOURCES = """
#clear Acquire::IndexTargets;
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
Acquire::IndexTargets::deb::Packages::DefaultEnabled "false";
Acquire::IndexTargets::deb::Translations::DefaultEnabled "false";
Acquire::IndexTargets::deb-src::Sources::DefaultEnabled "false";
Acquire::Retries "0";
Acquire::http::Timeout "5";
Acquire::https::Timeout "5";
Dir::State::Lists "%(folder)s/lists";
Dir::Cache "%(folder)s/cache";
"""
PYTHON = "import sys; print('%d.%d' % sys.version_info[:2])"
TOOLKITS = "/usr/local/cuda*"
HOLDS = "/var/lib/tandem/driver/held"
DISPLAY = "0x03"  # PCI class of display controllers
NVIDIA = "10de"
DEVICES = "/sys/bus/pci/devices/*"
# The decision of prime-select: on (nvidia), on-demand, or off (intel), which disables the driver.
PRIME = "/etc/prime-discrete"
XID = re.compile(r"NVRM: Xid \((?:PCI:)?[0-9A-Fa-f:.]+\): (\d{1,4}),")

# Finds another machine with our address by an ARP probe, which changes nobody's cache (RFC 5227).
# Needs root. Prints the hardware address of the machine that answers within half a second.
PROBE = r"""
import socket, struct, sys, time
name, address = sys.argv[1], socket.inet_aton(sys.argv[2])
line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
line.bind((name, 0))
own = line.getsockname()[4]
ask = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + own + bytes(4) + bytes(6) + address
line.send(b"\xff" * 6 + own + b"\x08\x06" + ask)
end = time.time() + 0.5
while time.time() < end:
    line.settimeout(max(0.001, end - time.time()))
    try:
        frame = line.recv(64)
    except socket.timeout:
        break
    if frame[20:22] == b"\0\2" and frame[28:32] == address and frame[22:28] != own:
        print(":".join("%02x" % byte for byte in frame[22:28]))
        break
"""


def system():
    pairs = re.findall(r'^(\w+)="?([^"\n]*)"?$', read("/etc/os-release") or "", re.MULTILINE)
    release = dict(pairs)
    gcc = output("gcc", "-dumpfullversion")
    return {
        "distribution": release.get("ID"),
        "release": release.get("VERSION_ID"),
        "codename": release.get("VERSION_CODENAME"),
        "kernel": platform.release(),
        "kernel_headers": os.path.isdir("/lib/modules/%s/build" % platform.release()),
        "arch": platform.machine(),
        "glibc": (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0").split()[-1],
        "gcc": gcc,
        "python": platform.python_version(),
        "python_venv": output("/usr/bin/python3", "-c", "import ensurepip, venv; print(1)") == "1",
        "systemd": read("/proc/1/comm") == "systemd",
        "memory": int(re.search(r"MemTotal:\s+(\d+)", read("/proc/meminfo")).group(1)) * 1024,
        "machine_id": read("/etc/machine-id"),
    }


def gpus():
    """List the graphics cards, and separately the NVIDIA ones that virtual machines may take."""
    cards, passed = [], []
    for device in sorted(glob.glob(DEVICES)):
        kind = read(device + "/class") or ""
        if kind.startswith(DISPLAY):
            vendor, card = (read(device + "/" + name)[2:] for name in ("vendor", "device"))
            holder = os.path.basename(os.path.realpath(device + "/driver"))
            if vendor == NVIDIA and holder == "vfio-pci":  # reserved for a virtual machine
                passed.append(card)
            else:
                cards.append({"vendor": vendor, "device": card})
    return {"gpus": cards, "passed_through": passed, "prime": read(PRIME)}


def driver():
    loaded = re.search(
        r"Kernel Module.*?\s(\d+\.\d+[.\d]*)", read("/proc/driver/nvidia/version") or ""
    )
    # Programs load this library. Its version may differ from the module's after an upgrade without
    # a reboot. It is a link, which alternatives manage on Debian.
    path = os.path.realpath("/usr/lib/%s-linux-gnu/libnvidia-ml.so.1" % platform.machine())
    library = path.split(".so.")[1] if os.path.exists(path) else None
    secure = None
    for path in glob.glob("/sys/firmware/efi/efivars/SecureBoot-*"):
        with open(path, "rb") as file:
            secure = file.read()[-1:] == b"\1"  # after four bytes of attributes
    return {
        "driver": loaded.group(1) if loaded else None,
        "driver_library": library,
        "nouveau": os.path.isdir("/sys/module/nouveau"),
        "secure_boot": secure,
        "xids": xids(kernel_log()),
    }


def kernel_log():
    """Read the kernel's messages since it booted; "" without permission."""
    argv = ["journalctl", "--dmesg", "--boot", "--no-pager", "--output=cat", "--quiet"]
    # Without sudo, group adm may read the journal, or everybody the kernel's buffer.
    texts = (output(*way, seconds=60) for way in (["sudo", "-n", *argv], argv, ["dmesg"]))
    return next(filter(None, texts), "")


def xids(log):
    """Find the numbers of NVIDIA's errors in a kernel's log."""
    return sorted({int(number) for number in XID.findall(log)})


def disk(folder):
    """Measure the file system that has `folder` or will have it: bytes, inodes, read-only,
    device."""
    existing = os.path.abspath(folder)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    state = os.statvfs(existing)
    return {
        "free": state.f_bavail * state.f_frsize,
        # btrfs reports no number of inodes: it has no limit.
        "free_inodes": state.f_favail if state.f_files else None,
        "read_only": bool(state.f_flag & os.ST_RDONLY),
        "device": os.stat(existing).st_dev,
    }


def mounts():
    """List [{"path", "type"}] of /etc/fstab's network and data mounts that are not mounted."""
    mounted = {line.split()[1] for line in (read("/proc/self/mounts") or "").splitlines()}
    missing = []  # the mount point of swap is "none"
    for line in (read("/etc/fstab") or "").splitlines():
        words = line.split("#")[0].split()
        if len(words) >= 4 and words[1].startswith("/") and "noauto" not in words[3]:
            missing.append({"path": words[1], "type": words[2]})
    return [mount for mount in missing if mount["path"] not in mounted]


def network(address):
    links = []
    # iproute2 4.15 prints {} for links that it omits.
    for link in filter(None, json.loads(output("ip", "-j", "address") or "[]")):
        name = link["ifname"]
        base = "/sys/class/net/%s" % name
        speed = read(base + "/speed")
        links.append(
            {
                "name": name,
                "mac": link.get("address"),
                "mtu": link.get("mtu"),
                "speed": int(speed) if speed and speed.isdigit() else None,
                "duplex": read(base + "/duplex"),
                "wireless": os.path.isdir(base + "/wireless"),
                # WireGuard's and Tailscale's have no hardware address, OpenVPN's and ZeroTier's
                # these flags.
                "tunnel": link.get("link_type") == "none" or os.path.exists(base + "/tun_flags"),
                "physical": os.path.exists(base + "/device"),
                "addresses": [a["local"] for a in ipv4(link)],
                "networks": ["%s/%d" % (a["local"], a["prefixlen"]) for a in ipv4(link)],
            }
        )
    name = socket.gethostname()
    interface = next((link["name"] for link in links if address in link["addresses"]), None)
    return {
        "hostname": name,
        "links": links,
        "loopback_names": loopback_names(),
        "ufw_conf": read("/etc/ufw/ufw.conf") or "",
        "firewalld": output("systemctl", "is-active", "firewalld") == "active",
        "interface": interface,
        "address_owner": address_owner(interface, address) if interface else None,
    }


def ipv4(link):
    return [row for row in link.get("addr_info", []) if row.get("family") == "inet"]


def address_owner(interface, address):
    """Find the hardware address of another machine with our address; None if none answers."""
    argv = [sys.executable, "-c", PROBE, interface, address]
    return output(*argv if os.geteuid() == 0 else ["sudo", "-n", *argv]) or None


def loopback_names():
    """List the names with a loopback address in /etc/hosts, except "localhost" and its like."""
    names = []
    for line in (read("/etc/hosts") or "").splitlines():
        words = line.split("#")[0].split()
        if words and words[0].startswith("127."):
            names += [word for word in words[1:] if not word.startswith("localhost")]
    return names


def reboot_waits():
    """Describe the update that waits for a reboot; None if there is none."""
    kernel = waiting_kernel(platform.release())
    if kernel:
        return "kernel " + kernel
    return "an update of packages" if os.path.exists("/run/reboot-required") else None


def process_with_lock(path):
    """Find {"pid", "command"} of the process that locks a file; None if none does."""
    try:
        inode = os.stat(path).st_ino
    except OSError:
        return None
    for line in (read("/proc/locks") or "").splitlines():
        # "->" marks a process that waits for the lock.
        match = re.search(r"(\d+) [0-9a-f]+:[0-9a-f]+:(\d+) ", line)
        if match and int(match.group(2)) == inode and "->" not in line:
            pid = match.group(1)
            return {"pid": int(pid), "command": read("/proc/%s/comm" % pid)}
    return None


def settings():
    environment = read("/etc/environment") or ""
    libraries = re.search(r'^LD_LIBRARY_PATH="?([^"\n]*)', environment, re.MULTILINE)
    folders = libraries.group(1).split(":") if libraries else []
    return {
        "apt_lock": process_with_lock("/var/lib/dpkg/lock-frontend")
        or process_with_lock("/var/lib/dpkg/lock"),
        "dpkg_broken": bool(
            os.path.isdir("/var/lib/dpkg/updates") and os.listdir("/var/lib/dpkg/updates")
        ),
        "broken": apt_broken(),
        "clock": time.time(),
        "missing_libraries": [name for name in folders if name and not os.path.isdir(name)],
        "rsync": shutil.which("rsync") is not None,
        "conda": output("/opt/tandem/conda/bin/python", "-c", PYTHON),
        "uv": shutil.which("uv", path="/usr/local/bin:/usr/bin:/bin") is not None,  # root's
        "missing_mounts": mounts(),
        "held_since": held_since(),
        "boot_passphrases": boot_passphrases(),
        "reboot_waits": reboot_waits(),
    }


def boot_passphrases():
    """List the encrypted disks that wait for a passphrase at the machine's screen during a boot.

    By crypttab(5): disks without a key file, which no TPM opens, and which must be open.
    """
    waiting, text = [], read(CRYPTTAB)
    if text is None and os.path.exists(CRYPTTAB):  # Ubuntu's installer lets only root read it
        text = output("sudo", "-n", "cat", CRYPTTAB)
    for line in (text or "").splitlines():
        words = line.split("#")[0].split()
        if len(words) < 2:
            continue
        # The third and fourth field may be absent.
        key, listed = [*words[2:4], "none", ""][:2] if len(words) < 4 else words[2:4]
        options = {option.split("=")[0] for option in listed.split(",")}
        by_hand = key in ("none", "-") or "keyscript" in options
        if by_hand and not options & {"noauto", "nofail", "tpm2-device"}:
            waiting.append(words[0])
    return [] if os.path.exists(CLEVIS) else waiting  # Clevis needs no person


def dead_sources():
    """Ask apt for its sources that lack their suite, or that have no valid signature.

    Returns [{"source": "ADDRESS SUITE", "file", "unsigned"}]; [] if no source answers, because then
    the machine has no internet.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("lists/partial", "cache/archives/partial"):
            os.makedirs(os.path.join(folder, name))
        settings_file = os.path.join(folder, "apt.conf")
        with open(settings_file, "w") as file:
            file.write(ASK_SOURCES % {"folder": folder})
        _, text = outcome("apt-get", "update", "-c", settings_file, seconds=30)
    # A source without a suite ("deb ADDRESS /"), as NVIDIA's, has two blanks there.
    refused = (
        r"^(?:E|Error): The repository '(\S+ \S*) (?:In)?Release' (does not have|no longer has|is)"
    )
    names = re.findall(refused, text, re.MULTILINE)
    if not re.search(r"^(Get|Hit):", text, re.MULTILINE):
        return []
    return [
        {"source": name.strip(), "file": file_of_source(name.split()[0]), "unsigned": verb == "is"}
        for name, verb in names
    ]


def file_of_source(address):
    """Find the file of apt's that names an address; None if it cannot be read."""
    for path in (path for pattern in SOURCES for path in sorted(glob.glob(pattern))):
        lines = (line.split("#")[0] for line in (read(path) or "").splitlines())
        if any(word.rstrip("/") == address.rstrip("/") for line in lines for word in line.split()):
            return path
    return None


def toolkits():
    """Return {folder: version of its nvcc, or None} of the CUDA toolkits that others installed in
    the places of Tandem's. A link does not count."""
    versions = {}
    for folder in sorted(glob.glob(TOOLKITS)):
        is_tandems = os.path.exists(folder + "/.tandem/cuda")
        is_toolkit = re.search(r"cuda(-\d+\.\d+)?$", folder) and not os.path.islink(folder)
        if is_toolkit and not is_tandems:
            text = output(folder + "/bin/nvcc", "--version", seconds=60) or ""
            version = re.search(r"\bV(\d+\.\d+\.\d+)", text)
            versions[folder] = version.group(1) if version else None
    return versions


def held_since():
    """Return when role driver last changed its holds, in Unix seconds; None if it holds no kernel.

    `make check` needs it, since a held kernel gets no security fixes.
    """
    if not re.search(r"^linux-(?!modules-nvidia-)", read(HOLDS) or "", re.MULTILINE):
        return None
    return os.stat(HOLDS).st_mtime


def environments():
    """List the environments that role python_env completed."""
    # The role writes the lock last.
    return sorted(path.split("/")[-2] for path in glob.glob("/opt/tandem/envs/*/.tandem-lock"))


def main():
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str", "required": True},
            "folders": {"type": "list", "elements": "str", "default": []},
            "sources": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    facts = {
        "disks": {name: disk(name) for name in module.params["folders"]},
        "environments": environments(),
        "toolkits": toolkits(),
        "dead_sources": dead_sources() if module.params["sources"] else [],
    }
    for group in (gpus(), system(), driver(), network(module.params["address"]), settings()):
        facts.update(group)
    module.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
