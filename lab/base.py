"""The root file system that the nodes of all labs share: a small Debian, freshly installed."""

import fcntl
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from lab.plan import CACHE, Lab, System
from lab.shell import run

MIRROR = "http://deb.debian.org/debian"

# What a fresh desktop or server has, as far as roles and launcher can notice.
PACKAGES = (
    *("systemd", "systemd-sysv", "libpam-systemd", "dbus", "dbus-user-session"),
    *("openssh-server", "sudo", "python3", "python3-apt", "python3-venv"),
    *("iproute2", "iputils-ping", "nftables", "procps", "kmod", "pciutils"),
    *("rsync", "sysstat", "chrony", "ca-certificates", "less", "nano"),
)

# Run inside the new system. Machines must not share host keys or a machine id.
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
# Servers that only a role should start, and units that cost half a minute of an emulated boot.
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
    """Named by content: a new list of packages makes a new base, and running nodes keep theirs."""
    content = "\n".join([system.release, MIRROR, *packages(system), finish(system)])
    name = f"{system.release}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    return CACHE / "bases" / name


def ensure(system: System, lab: Lab) -> Path:
    """The base of `system`, made if it does not exist; an unfinished one is removed with `lab`."""
    return ensure_folder(folder(system), lab, lambda target: _make(system, target))


def ensure_folder(wanted: Path, lab: Lab, make: Callable[[Path], None]) -> Path:
    """`wanted`, filled by `make` if it does not exist; it appears only once it is complete."""
    if wanted.is_dir():
        return wanted
    unfinished = wanted.with_name(f"{wanted.name}.{lab.name}.unfinished")
    wanted.parent.mkdir(parents=True, exist_ok=True)
    with (wanted.parent / "lock").open("w") as lock:
        # One byte of the file is locked for each name, so that making one does not block another.
        fcntl.lockf(lock, fcntl.LOCK_EX, 1, zlib.crc32(wanted.name.encode()))
        if not wanted.is_dir():
            make(unfinished)
            os.sync()
            unfinished.rename(wanted)
    return wanted


def _make(system: System, target: Path) -> None:
    print(f"lab: making the base system (Debian {system.release}): a minute, once", flush=True)
    # debootstrap mounts /proc and /sys; in its own namespace they vanish even when it is killed.
    private = ["unshare", "--mount", "--propagation", "private", "--"]
    include = f"--include={','.join(packages(system))}"
    make = ["debootstrap", "--variant=minbase", include, system.release, str(target), MIRROR]
    run([*private, *make])
    run(["chroot", str(target), "/bin/sh", "-c", finish(system)])


def remove_unfinished(lab: str) -> None:
    for path in (CACHE / "bases").glob(f"*.{lab}.unfinished"):
        shutil.rmtree(path)
