"""The root file system that the nodes of all labs share: a small Debian as installed."""

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

from lab.plan import CACHE
from lab.shell import run

MIRROR = "http://deb.debian.org/debian"

# What a fresh desktop or server has, as far as the roles and the launcher could notice.
PACKAGES = (
    *("systemd", "systemd-sysv", "libpam-systemd", "dbus", "dbus-user-session"),
    *("openssh-server", "sudo", "python3", "python3-apt", "python3-venv"),
    *("iproute2", "iputils-ping", "nftables", "procps", "kmod", "pciutils"),
    *("rsync", "sysstat", "ca-certificates", "less", "nano"),
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


def folder(release: str) -> Path:
    """Named by content: a new list of packages is a new base, and running nodes keep theirs."""
    content = "\n".join([release, MIRROR, *PACKAGES, FINISH])
    return CACHE / "bases" / f"{release}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def ensure(release: str, lab: str) -> Path:
    """The base of `release`, made if it is not there; `lab` names the unfinished copy."""
    base = folder(release)
    base.parent.mkdir(parents=True, exist_ok=True)
    with (base.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not base.is_dir():
            print(
                f"lab: making the base system, once (Debian {release}, about a minute)", flush=True
            )
            _make(release, _unfinished(base, lab))
            _unfinished(base, lab).rename(base)
    return base


def _unfinished(base: Path, lab: str) -> Path:
    return base.with_name(f"{base.name}.{lab}.unfinished")


def _make(release: str, target: Path) -> None:
    # debootstrap mounts /proc and /sys: in a namespace of its own they end with it, even killed.
    private = ["unshare", "--mount", "--propagation", "private", "--"]
    include = f"--include={','.join(PACKAGES)}"
    run([*private, "debootstrap", "--variant=minbase", include, release, str(target), MIRROR])
    run(["chroot", str(target), "/bin/sh", "-c", FINISH])
    os.sync()


def remove_unfinished(lab: str) -> None:
    for left in (CACHE / "bases").glob(f"*.{lab}.unfinished"):
        shutil.rmtree(left)
