#!/usr/bin/python
"""Collects the facts that preflight checks: hardware, system, network and settings of a machine.

Ansible runs this file on each machine, so it has to run on Python 3.6 without other packages. The
module only reads; planning/reading.py checks what it returns, and planning/preflight.py judges it.
"""

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

CRYPTTAB = "/etc/crypttab"
# With this file, an initial RAM disk opens encrypted disks by a TPM or a server, without a person.
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
PRINT_PYTHON = "import sys; print('%d.%d' % sys.version_info[:2])"  # a program that prints "3.11"
TOOLKITS = "/usr/local/cuda*"
HOLDS = "/var/lib/tandem/driver/held"  # packages that role driver holds, one name per line
DISPLAY_CLASS = "0x03"  # PCI class of display controllers, which is the beginning of the file class
NVIDIA_VENDOR = "10de"  # PCI vendor
DEVICES = "/sys/bus/pci/devices/*"
# The decision of prime-select on a laptop with two GPUs. The file has "on" (nvidia), "on-demand",
# or "off" (intel), which disables the driver.
PRIME = "/etc/prime-discrete"
# "NVRM: Xid (PCI:0000:01:00): 79, pid=1234, GPU has fallen off the bus."
XID = re.compile(r"NVRM: Xid \((?:PCI:)?[0-9A-Fa-f:.]+\): (\d{1,4}),")

# Finds another machine with our address by an ARP probe, which changes nobody's cache (RFC 5227).
# Needs root. Prints the hardware address of the machine that answers within half a second.
ARP_PROBE = r"""
import socket, struct, sys, time
name, address = sys.argv[1], socket.inet_aton(sys.argv[2])
line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
line.bind((name, 0))
mac = line.getsockname()[4]
# ARP's fields: hardware and protocol type, their lengths, operation 1 (request); sender's hardware
# and IP address (0.0.0.0 makes it a probe), target's hardware and IP address.
request = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + mac + bytes(4) + bytes(6) + address
line.send(b"\xff" * 6 + mac + b"\x08\x06" + request)
end = time.time() + 0.5
while time.time() < end:
    line.settimeout(max(0.001, end - time.time()))
    try:
        frame = line.recv(64)
    except socket.timeout:
        break
    # After the 14 bytes of Ethernet's header: operation 2 (reply) at 20, the sender's hardware
    # address at 22 and its IP address at 28.
    if frame[20:22] == b"\0\2" and frame[28:32] == address and frame[22:28] != mac:
        print(":".join("%02x" % byte for byte in frame[22:28]))
        break
"""


def read_system():
    """Read the facts about the operating system, the compiler, Python and the memory."""
    # /etc/os-release has lines such as VERSION_ID="22.04" and ID=ubuntu.
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


def list_gpus():
    """List the graphics cards, and separately the NVIDIA cards that virtual machines may take.

    "passed_through" has the numbers of devices only: ["1e04"].
    """
    cards, passed_through = [], []
    for folder in sorted(glob.glob(DEVICES)):
        device_class = read(folder + "/class") or ""
        if device_class.startswith(DISPLAY_CLASS):
            # "0x10de" -> "10de"
            vendor, device = (read(folder + "/" + name)[2:] for name in ("vendor", "device"))
            kernel_driver = os.path.basename(os.path.realpath(folder + "/driver"))
            # vfio-pci reserves a device for virtual machines.
            if vendor == NVIDIA_VENDOR and kernel_driver == "vfio-pci":
                passed_through.append(device)
            else:
                cards.append({"vendor": vendor, "device": device})
    return {"gpus": cards, "passed_through": passed_through, "prime": read(PRIME)}


def read_loaded_driver():
    """Read the facts about the loaded NVIDIA driver, and whether Secure Boot is on."""
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025"
    loaded_version = re.search(
        r"Kernel Module.*?\s(\d+\.\d+[.\d]*)", read("/proc/driver/nvidia/version") or ""
    )
    # Programs load this library. Its version may differ from the module's after an upgrade without
    # a reboot. It is a link, which alternatives manage on Debian, to a file with the version in its
    # name: "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05"
    path = os.path.realpath("/usr/lib/%s-linux-gnu/libnvidia-ml.so.1" % platform.machine())
    library_version = path.split(".so.")[1] if os.path.exists(path) else None
    # An EFI variable has four bytes of attributes before its value; a BIOS has no variables.
    secure_boot = None
    for path in glob.glob("/sys/firmware/efi/efivars/SecureBoot-*"):
        with open(path, "rb") as file:
            secure_boot = file.read()[-1:] == b"\1"
    return {
        "driver": loaded_version.group(1) if loaded_version else None,
        "driver_library": library_version,
        "nouveau": os.path.isdir("/sys/module/nouveau"),
        "secure_boot": secure_boot,
        "xids": list_logged_xids(),
    }


def list_logged_xids():
    """List the numbers of NVIDIA's errors that the kernel logged since it booted."""
    journal = ["journalctl", "--dmesg", "--boot", "--no-pager", "--output=cat", "--quiet"]
    # Without sudo, group adm may read the journal, or everybody may read the kernel's buffer.
    commands = (["sudo", "-n", *journal], journal, ["dmesg"])
    # The generator runs a command only if the commands before it printed nothing.
    log = next(filter(None, (output(*command, seconds=60) for command in commands)), "")
    return sorted({int(number) for number in XID.findall(log)})


def measure_disk(folder):
    """Measure the file system on which `folder` is or will be, as boundary/facts.py's Disk."""
    parent = os.path.abspath(folder)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    state = os.statvfs(parent)
    return {
        "free": state.f_bavail * state.f_frsize,
        # btrfs reports no number of inodes: it has no limit.
        "free_inodes": state.f_favail if state.f_files else None,
        "read_only": bool(state.f_flag & os.ST_RDONLY),
        "device": os.stat(parent).st_dev,
    }


def list_missing_mounts():
    """List [{"path", "type"}] of the mounts in /etc/fstab that are not mounted, except noauto."""
    mounted_paths = {line.split()[1] for line in (read("/proc/self/mounts") or "").splitlines()}
    expected = []
    for line in (read("/etc/fstab") or "").splitlines():
        # "UUID=5a3b... /srv/data ext4 defaults,nofail 0 2"; the mount point of swap is "none".
        words = line.split("#")[0].split()
        if len(words) >= 4 and words[1].startswith("/") and "noauto" not in words[3]:
            expected.append({"path": words[1], "type": words[2]})
    return [mount for mount in expected if mount["path"] not in mounted_paths]


def read_network(address):
    """Read the facts about network interfaces, names and firewalls.

    address: this machine's address in the inventory.
    """
    links = []
    # A link is an interface. iproute2 4.15 prints {} for links that it omits.
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
                # Tunnels of WireGuard and Tailscale have no hardware address. Tunnels of OpenVPN
                # and ZeroTier have the file tun_flags.
                "tunnel": link.get("link_type") == "none" or os.path.exists(base + "/tun_flags"),
                "physical": os.path.exists(base + "/device"),
                "addresses": [row["local"] for row in list_ipv4(link)],
                "networks": ["%s/%d" % (row["local"], row["prefixlen"]) for row in list_ipv4(link)],
            }
        )
    interface = next((link["name"] for link in links if address in link["addresses"]), None)
    address_owner = None  # the hardware address of another machine with our IP address
    if interface:
        argv = [sys.executable, "-c", ARP_PROBE, interface, address]
        probe = argv if os.geteuid() == 0 else ["sudo", "-n", *argv]
        address_owner = output(*probe) or None
    return {
        "hostname": socket.gethostname(),
        "links": links,
        "loopback_names": list_loopback_names(),
        "ufw_conf": read("/etc/ufw/ufw.conf") or "",
        "firewalld": output("systemctl", "is-active", "firewalld") == "active",
        "interface": interface,
        "address_owner": address_owner,
    }


def list_ipv4(link):
    """List the IPv4 addresses of a link of `ip -j address`: rows with "local" and "prefixlen"."""
    return [row for row in link.get("addr_info", []) if row.get("family") == "inet"]


def list_loopback_names():
    """List the names with a loopback address in /etc/hosts, except "localhost" and its like."""
    names = []
    for line in (read("/etc/hosts") or "").splitlines():
        words = line.split("#")[0].split()  # "127.0.1.1 pc1.lab pc1"
        if words and words[0].startswith("127."):
            names += [word for word in words[1:] if not word.startswith("localhost")]
    return names


def find_lock_holder(path):
    """Find {"pid", "command"} of the process that locks a file; None if no process does."""
    try:
        inode = os.stat(path).st_ino
    except OSError:
        return None
    for line in (read("/proc/locks") or "").splitlines():
        # "2: POSIX  ADVISORY  WRITE 1234 08:02:393282 0 EOF": 1234 is the pid, 393282 the inode. A
        # process that waits for the lock has "->".
        match = re.search(r"(\d+) [0-9a-f]+:[0-9a-f]+:(\d+) ", line)
        if match and int(match.group(2)) == inode and "->" not in line:
            pid = match.group(1)
            return {"pid": int(pid), "command": read("/proc/%s/comm" % pid)}
    return None


def read_settings():
    """Read the facts about packages, the clock, programs, and settings that people made."""
    environment = read("/etc/environment") or ""
    library_path = re.search(r'^LD_LIBRARY_PATH="?([^"\n]*)', environment, re.MULTILINE)
    folders = library_path.group(1).split(":") if library_path else []
    # Debian and Ubuntu make the file for updates other than kernels too.
    kernel = waiting_kernel(platform.release())
    other_update = "an update of packages" if os.path.exists("/run/reboot-required") else None
    return {
        # apt and other frontends hold the first lock while they run; dpkg itself holds the second.
        "apt_lock": find_lock_holder("/var/lib/dpkg/lock-frontend")
        or find_lock_holder("/var/lib/dpkg/lock"),
        # dpkg leaves files here if it was interrupted.
        "dpkg_broken": bool(
            os.path.isdir("/var/lib/dpkg/updates") and os.listdir("/var/lib/dpkg/updates")
        ),
        "broken": apt_broken(),
        "clock": time.time(),
        "missing_libraries": [name for name in folders if name and not os.path.isdir(name)],
        "rsync": shutil.which("rsync") is not None,
        "conda": output("/opt/tandem/conda/bin/python", "-c", PRINT_PYTHON),
        "uv": shutil.which("uv", path="/usr/local/bin:/usr/bin:/bin") is not None,  # root's PATH
        "missing_mounts": list_missing_mounts(),
        "held_since": read_held_since(),
        "boot_passphrases": list_boot_passphrases(),
        "reboot_waits": "kernel " + kernel if kernel else other_update,
    }


def list_boot_passphrases():
    """List the encrypted disks that wait for a passphrase at the machine's screen during a boot.

    source: crypttab(5).
    """
    waiting_disks, text = [], read(CRYPTTAB)
    if text is None and os.path.exists(CRYPTTAB):  # after Ubuntu's installer only root may read it
        text = output("sudo", "-n", "cat", CRYPTTAB)
    for line in (text or "").splitlines():
        # "sda3_crypt UUID=5a3b... none luks,discard"; the key and the options may be absent.
        words = line.split("#")[0].split()
        if len(words) < 2:
            continue
        key = words[2] if len(words) > 2 else "none"
        option_words = words[3].split(",") if len(words) > 3 else []
        options = {option.split("=")[0] for option in option_words}
        # A person types the passphrase of a disk without a key file. A keyscript may ask a person.
        by_hand = key in ("none", "-") or "keyscript" in options
        # The boot does not wait for a disk with noauto or nofail, and a TPM needs no passphrase.
        if by_hand and not options & {"noauto", "nofail", "tpm2-device"}:
            waiting_disks.append(words[0])
    return [] if os.path.exists(CLEVIS) else waiting_disks


def find_dead_sources():
    """Ask apt for its sources whose suite (such as buster) is missing, or has no valid signature.

    Returns [{"source": "ADDRESS SUITE", "file", "unsigned"}]. "file": apt's file that names the
    address; None if no file that this user can read names it.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("lists/partial", "cache/archives/partial"):
            os.makedirs(os.path.join(folder, name))
        settings_file = os.path.join(folder, "apt.conf")
        with open(settings_file, "w") as file:
            file.write(ASK_SOURCES % {"folder": folder})
        _, text = outcome("apt-get", "update", "-c", settings_file, seconds=30)
    # A source that answers has a line "Get:1 http://..." or "Hit:1 ...". If no source answers, the
    # machine has no internet, and the errors say nothing about sources.
    if not re.search(r"^(Get|Hit):", text, re.MULTILINE):
        return []
    # "E: The repository 'http://deb.debian.org/debian buster Release' no longer has a Release
    # file." and "... InRelease' is not signed." A source without a suite ("deb ADDRESS /"), such as
    # NVIDIA's, has two blanks after the address.
    dead_source = (
        r"^(?:E|Error): The repository '(\S+ \S*) (?:In)?Release' (does not have|no longer has|is)"
    )
    words_of_file = {}  # {path: words, of which one may be an address}
    for path in (path for pattern in SOURCES for path in sorted(glob.glob(pattern))):
        lines = [line.split("#")[0] for line in (read(path) or "").splitlines()]
        words_of_file[path] = {word.rstrip("/") for word in " ".join(lines).split()}
    sources = []
    for name, verb in re.findall(dead_source, text, re.MULTILINE):
        address = name.split()[0].rstrip("/")
        paths = (path for path, words in words_of_file.items() if address in words)
        is_unsigned = verb == "is"  # "is not signed"
        sources.append({"source": name.strip(), "file": next(paths, None), "unsigned": is_unsigned})
    return sources


def find_toolkits():
    """Return {folder: version of its nvcc, or None} of CUDA toolkits that Tandem did not install.

    Only folders that Tandem would use count, such as /usr/local/cuda-12.6.
    """
    versions = {}
    for folder in sorted(glob.glob(TOOLKITS)):
        is_tandems = os.path.exists(folder + "/.tandem/cuda")
        # /usr/local/cuda is usually a link to one of the toolkits, which has its own row.
        is_toolkit = re.search(r"cuda(-\d+\.\d+)?$", folder) and not os.path.islink(folder)
        if is_toolkit and not is_tandems:
            # "Cuda compilation tools, release 12.6, V12.6.85"
            text = output(folder + "/bin/nvcc", "--version", seconds=60) or ""
            version = re.search(r"\bV(\d+\.\d+\.\d+)", text)
            versions[folder] = version.group(1) if version else None
    return versions


def read_held_since():
    """Return when role driver last changed its holds, in Unix seconds; None if it holds no kernel.

    `make check` warns after some time, since a held kernel gets no security fixes.
    """
    # Packages of the driver do not count, not even Ubuntu's signed modules.
    if not re.search(r"^linux-(?!modules-nvidia-)", read(HOLDS) or "", re.MULTILINE):
        return None
    return os.stat(HOLDS).st_mtime


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
        "disks": {name: measure_disk(name) for name in module.params["folders"]},
        # Role python_env writes .tandem-lock last: /opt/tandem/envs/cu126-0123456789ab/.tandem-lock
        "environments": sorted(
            path.split("/")[-2] for path in glob.glob("/opt/tandem/envs/*/.tandem-lock")
        ),
        "toolkits": find_toolkits(),
        "dead_sources": find_dead_sources() if module.params["sources"] else [],
    }
    for group in (
        list_gpus(),
        read_system(),
        read_loaded_driver(),
        read_network(module.params["address"]),
        read_settings(),
    ):
        facts.update(group)
    module.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
