"""Make the root file system that the nodes of all labs share: a small, fresh Debian.

life.up calls `ensure`. disk.py writes what differs between nodes, and vm.py what a virtual machine
needs besides.
"""

import fcntl
import hashlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path

from lab.plan import CACHE, Lab, System
from lab.shell import PRIVATE_MOUNTS, run

MIRROR = "http://deb.debian.org/debian"

# The packages of a fresh desktop or server that roles and launcher use.
PACKAGES = (
    *("systemd", "systemd-sysv", "libpam-systemd", "dbus", "dbus-user-session"),
    *("openssh-server", "sudo", "python3", "python3-apt", "python3-venv"),
    *("iproute2", "iputils-ping", "nftables", "procps", "kmod", "pciutils"),
    *("rsync", "sysstat", "chrony", "ca-certificates", "less", "nano"),
)

# Runs inside the new system. Machines must not share host keys or a machine id.
FINISH = """
set -eu
apt-get clean
rm -rf /var/lib/apt/lists/* /var/log/bootstrap.log /var/log/apt/* /etc/ssh/ssh_host_*
: >/etc/machine-id
rm -f /var/lib/dbus/machine-id /etc/hostname /etc/resolv.conf
systemctl enable systemd-networkd.service
"""
# Virtual machines have a kernel of their own, and the file servers and clients that need one.
VM_PACKAGES = (
    *("udev", "linux-image-cloud-amd64", "busybox-static"),
    *("nfs-kernel-server", "nfs-common", "samba", "smbclient", "cifs-utils", "cachefilesd"),
)
# Only a role should start these servers; the other units cost half a minute of an emulated boot.
VM_FINISH = """
systemctl disable nfs-server.service nfs-blkmap.service smbd.service nmbd.service
systemctl disable samba-ad-dc.service
systemctl mask e2scrub_reap.service e2scrub_all.timer
"""


def packages(system: System) -> tuple[str, ...]:
    return (*PACKAGES, *(VM_PACKAGES if system.vm else ()), *system.packages)


def finish(system: System) -> str:
    return FINISH + VM_FINISH if system.vm else FINISH


def folder(system: System) -> Path:
    """Return the folder of a base. Its name depends on the content: a new list of packages makes a
    new base, and running nodes keep theirs."""
    content = "\n".join([system.release, MIRROR, *packages(system), finish(system)])
    name = f"{system.release}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    return CACHE / "bases" / name


def ensure(system: System, lab: Lab) -> Path:
    """Return the base of `system`, and make it if it does not exist. `down` of the lab removes an
    unfinished base."""
    return ensure_folder(folder(system), lab, lambda target: _make(system, target))


def ensure_folder(folder: Path, lab: Lab, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache. If it does not exist, `make` fills an unfinished folder, which
    gets the name when it is complete."""
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{lab.name}.unfinished")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        # Each name locks one byte of the file, so that making a folder does not block another one.
        fcntl.lockf(lock, fcntl.LOCK_EX, 1, zlib.crc32(folder.name.encode()))
        if not folder.is_dir():  # another lab may have made it meanwhile
            make(unfinished)
            os.sync()  # after a power cut, no complete name with incomplete files
            unfinished.rename(folder)
    return folder


def _make(system: System, target: Path) -> None:
    print(f"lab: making the base system (Debian {system.release}): a minute, once", flush=True)
    # debootstrap mounts /proc and /sys. In its own namespace they vanish even if it is killed.
    include = f"--include={','.join(packages(system))}"
    make = ["debootstrap", "--variant=minbase", include, system.release, str(target), MIRROR]
    run([*PRIVATE_MOUNTS, *make])
    run(["chroot", str(target), "/bin/sh", "-c", finish(system)])
