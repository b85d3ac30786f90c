"""How a share is mounted, what its failure means, and whether a folder can be shared.

Decided from facts alone: fstab's words, the journal's words, what findmnt and lsblk print.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from boundary.facts import IDS, BlockDevice, BlockDevices, FileSystems

from . import PlanError, reading

NTFS = {"fuseblk", "ntfs", "ntfs3"}
NETWORKED = {"nfs", "nfs4", "cifs", "smb3"}
CACHES = {"ext4", "xfs"}  # whose files can have the attributes that cachefilesd writes
# On data, whoever filled the disk makes nobody root: neither by a program's owner nor by a device.
NO_POWERS = ("nosuid", "nodev")
# What a line of the journal means, whatever the kind of share.
FAILURES = (
    (
        r"unknown filesystem|not supported by the system|No such device|Protocol not supported",
        "this machine's kernel has no driver for it. On Ubuntu: sudo apt install "
        "linux-modules-extra-$(uname -r)",
    ),
    (
        r"No route|unreachable|timed out|error\(11[0-5]\)|refused|[Tt]erminating",
        "the server does not answer. Is it on, and does its own firewall let this machine in?",
    ),
)


@dataclass(frozen=True)
class Kind:
    """A way in which a machine shares its data sets. Its tasks are called after it in share_server
    (NAME.yml, uninstall_NAME.yml, and share_server_kinds of its variables) and share_client."""

    server_packages: tuple[str, ...]
    service: str
    mark: str  # a file of the server's, in which our first line says that the share is ours
    client_packages: tuple[str, ...]
    fstype: str  # in fstab, whose first column `source` is
    source: str
    options: Callable[[dict[str, Any]], list[str]]  # by a machine, beside those of all kinds
    has_password: bool
    cannot_export: frozenset[str]  # types of file systems
    failures: tuple[tuple[str, str], ...]  # FAILURES of its own, by mount.cifs(8) and mount.nfs(8)


def _nfs_options(machine: dict[str, Any]) -> list[str]:
    # One TCP connection fills 1 Gbit/s; a faster link needs several (nfs(5): since Linux 5.3).
    several = _kernel(machine["kernel"]) >= (5, 3) and machine["speed"] > 1000
    return ["vers=4.2", "noatime", *(["nconnect=4"] if several else [])]


def _smb_options(machine: dict[str, Any]) -> list[str]:
    uid, gid = re.findall(IDS, machine["ids"])[0]
    secret = "credentials=/etc/tandem/share.credentials"  # noqa: S105 - a path, no password
    return [secret, "vers=3.1.1", f"uid={uid}", f"gid={gid}", "file_mode=0444", "dir_mode=0555"]


# What share_protocol may be, beside local.
KINDS = {
    "nfs": Kind(
        server_packages=("nfs-kernel-server",),
        service="nfs-server.service",
        mark="/etc/exports.d/tandem.exports",
        client_packages=("nfs-common",),
        fstype="nfs4",
        source="{address}:{path}",
        options=_nfs_options,
        has_password=False,
        # The kernel's server needs file handles that outlive a restart; these give none.
        cannot_export=frozenset(NTFS | {"fuse", "exfat", "vfat", "overlay"}),
        failures=(
            (
                r"access denied|No such file|Operation not permitted",
                "the server does not export the folder to this machine. Run make provision for the "
                "server too: it exports to the members of the inventory.",
            ),
        ),
    ),
    "smb": Kind(
        server_packages=("samba",),
        service="smbd.service",
        mark="/etc/samba/smb.conf",
        client_packages=("cifs-utils",),
        fstype="cifs",
        source="//{address}/{name}",
        options=_smb_options,
        has_password=True,
        cannot_export=frozenset(),
        failures=(
            (
                r"error\(13\)|Permission denied",
                "the password or the account is refused. Is the password that of the server, and "
                "may the account read the share?",
            ),
            (r"error\(2\)|No such file", "the server has no share of that name (share_name)."),
            (
                r"error\(112\)|Host is down",
                "the server is off or asleep, or it speaks SMB 1 alone, as Windows 7 and old NAS "
                "do. Switch SMB 3 on there.",
            ),
        ),
    ),
}


def kind_of(protocol: str) -> Kind:
    if protocol not in KINDS:
        raise PlanError(f"share_protocol is {protocol!r}: write local, {' or '.join(KINDS)}")
    return KINDS[protocol]


def share_kind(protocol: str) -> dict[str, Any]:
    """Give what the roles have to know of a kind."""
    kind = kind_of(protocol)
    names = ("server_packages", "service", "client_packages", "fstype", "has_password")
    return {name: getattr(kind, name) for name in names}


def share_others(protocol: str) -> dict[str, str]:
    """Give {kind: its mark} of the kinds but this one, or all for local."""
    if protocol != "local":
        kind_of(protocol)
    return {name: kind.mark for name, kind in KINDS.items() if name != protocol}


def share_refusal(protocol: str, path: str, findmnt: str) -> str:
    """Say why a server cannot share a path, or "" if it can.

    findmnt: output of `findmnt --mtab --json --output TARGET,SOURCE,FSTYPE,OPTIONS --target PATH`.
    """
    systems = reading.parsed(findmnt, FileSystems, "findmnt").filesystems
    if not systems:
        raise PlanError(f"{path} is on no file system that findmnt knows")
    (disk, *_) = systems
    if disk.fstype in NETWORKED:
        return (
            f"{path} is itself a share of another machine ({disk.fstype}). Make that machine "
            "share_host, so that data travels once."
        )
    if "uhelper=udisks2" in disk.options.split(","):
        return (
            f"{path} lies on a disk that the desktop of a user mounted ({disk.source}), and "
            "goes when that user logs out. Unmount it there, and set share_disk to its name: "
            "lsblk --output NAME,LABEL,UUID shows it."
        )
    no_export = _no_export(protocol, disk.fstype)
    return f"{path} lies on {no_export}" if no_export else ""


def _no_export(protocol: str, fstype: str) -> str:
    if fstype not in kind_of(protocol).cannot_export:
        return ""
    able = next(name for name, kind in KINDS.items() if fstype not in kind.cannot_export)
    return (
        f"{'an NTFS disk' if fstype in NTFS else fstype}, which the kernel's {protocol.upper()} "
        f"server cannot export. Set share_protocol: {able}, or move the data to an ext4 or xfs "
        "disk."
    )


def share_missing(path: str, lsblk: str) -> str:
    """Say that a folder is not there, and which disks nobody has mounted.

    lsblk: output of `lsblk --json --paths --output NAME,FSTYPE,LABEL,UUID,SIZE,MOUNTPOINT`.
    """
    unused = [
        f"{disk.name} ({disk.fstype}, {disk.label or 'no label'}, {disk.size})"
        for disk in block_devices(lsblk)
        if disk.fstype not in (None, "swap", "crypto_LUKS", "LVM2_member") and not disk.mountpoint
    ]
    if not unused:
        return f"{path} does not exist. Correct share_path, or mount its disk."
    return (
        f"{path} does not exist. Is it on a disk that nobody has mounted: {', '.join(unused)}? "
        f"Then set share_disk: {unused[0].split()[0]} and share_path to the folder under "
        "/srv/tandem/disk. Else correct share_path."
    )


def share_disk(
    disk: str, lsblk: str, has_ntfs3: bool, protocol: str, place: str, host: str
) -> dict[str, str]:
    """Plan the mount of a disk at `place`: {"source", "fstype", "options"}; reading alone.

    disk: UUID=..., LABEL=... or a path; lsblk: see share_missing; has_ntfs3: whether the kernel has
    a driver of its own (Linux 5.15); protocol: by which it will be shared. Raises one sentence
    where there is nothing to mount or to share.
    """
    key, _, value = disk.rpartition("=")
    name = {"": "name", "UUID": "uuid", "LABEL": "label"}.get(key)
    devices = block_devices(lsblk)
    matches = [device for device in devices if name and getattr(device, name) == value]
    if len(matches) != 1:
        known = ", ".join(device.name for device in devices if device.fstype)
        what = "is none of its disks" if not matches else "fits several of its disks"
        raise PlanError(f"{host}: share_disk {disk} {what}. Disks with data: {known}.")
    (device,) = matches
    fstype = device.fstype
    if fstype in ("BitLocker", "crypto_LUKS"):
        raise PlanError(
            f"{host}: {device.name} is encrypted ({fstype}), and nobody is there to open it at "
            "boot. Take the encryption off this disk, or copy the data to another one."
        )
    if not fstype:
        raise PlanError(f"{host}: {device.name} holds no file system.")
    if device.mountpoint not in (None, place):
        raise PlanError(
            f"{host}: {device.name} is mounted at {device.mountpoint} already. Unmount it "
            "there, or take share_disk away and set share_path to the folder in it."
        )
    no_export = _no_export(protocol, fstype)
    if no_export:
        raise PlanError(f"{host}: {device.name} is {no_export}")
    options = ["ro", *NO_POWERS, "nofail"]
    if fstype in NTFS | {"exfat", "vfat"}:
        # These know no owner on the disk: everybody reads, nobody writes.
        options += ["umask=0222"]
    if fstype == "ntfs":
        fstype = "ntfs3" if has_ntfs3 else "ntfs-3g"
    source = f"UUID={device.uuid}" if device.uuid else device.name
    return {"source": source, "fstype": fstype, "options": ",".join(options)}


def block_devices(lsblk: str) -> list[BlockDevice]:
    """All devices of lsblk's tree, in its order."""
    devices, waiting = [], reading.parsed(lsblk, BlockDevices, "lsblk").blockdevices[::-1]
    while waiting:
        device = waiting.pop()
        devices.append(device)
        waiting += device.children[::-1]
    return [device for device in devices if device.name]


def share_source(protocol: str, address: str, path: str, name: str) -> str:
    """Give the first column of fstab: what is mounted."""
    return kind_of(protocol).source.format(address=address, path=path, name=name)


def share_options(protocol: str, machine: dict[str, Any], cached: bool = False) -> str:
    """Give the options of fstab.

    machine: kernel ("5.15.0-91-generic"), speed (Mbit/s of the card, less than 1 when unknown),
    ids (what `id` prints for who reads). Mounted at first use, so that no boot waits for the
    server; `hard`, so that a reader waits for a server that restarts instead of failing. cached:
    whether its files are kept on the machine's disk.
    """
    # x-tandem says whose line it is; mount(8) leaves such words to their programs.
    common = ["ro", *NO_POWERS, "hard", "_netdev", "nofail", "x-tandem"]
    common += ["x-systemd.automount", "x-systemd.mount-timeout=20"]
    # The kernel keeps nothing of what was mounted before its daemon ran.
    cache = ["fsc", "x-systemd.after=cachefilesd.service"] if cached else []
    return ",".join([*common, *cache, *kind_of(protocol).options(machine)])


# cachefilesd knows no size, but what percentage of its disk has to be free: below the first it
# takes nothing more, below the second it throws out the oldest until the third is reached. From the
# last to the first, since the kernel takes each by itself, and has 1, 5 and 7 % until then.
CULLING = {"brun": 4, "bcull": 2, "bstop": 0}
LEAST_FREE = 8  # percent


def share_cache(limit_gb: float, disk: str, kept: str, has_module: bool) -> dict[str, Any]:
    """Plan the cache of a share on the disk of /var/cache: {"refusal": why there is none, or "",
    "limits": CULLING in percent that stay free}.

    disk: what `df --block-size=1 --output=fstype,size,avail` prints; kept: the output of `du
    --summarize --block-size=1` of a cache that is there; has_module: whether the kernel can. What
    other programs fill later, the cache gives up, and what they free it may take.
    """
    if not has_module:
        return {"refusal": "its kernel has no module cachefiles", "limits": {}}
    match = re.fullmatch(r"(\S+)\s+(\d+)\s+(\d+)", disk.strip().splitlines()[-1] if disk else "")
    if not match:
        raise PlanError("df did not say how large the disk of /var/cache is")
    fstype, total, free = match[1], int(match[2]), int(match[3])
    if fstype not in CACHES:
        return {"refusal": f"/var/cache lies on {fstype}, not on ext4 or xfs", "limits": {}}
    own = re.match(r"\d+", kept)
    free += int(own[0]) if own else 0
    stop = max(math.ceil(100 * (free - limit_gb * 1e9) / max(1, total)), LEAST_FREE)
    if total * (stop + max(CULLING.values())) >= 100 * free:
        least = max(CULLING.values()) * total / 100e9
        refusal = (
            f"of the {total / 1e9:,.0f} GB of /var/cache {free / 1e9:,.0f} are free; a cache takes "
            f"at least {least:,.0f}, and leaves {LEAST_FREE} % free"
        )
        return {"refusal": refusal, "limits": {}}
    return {"refusal": "", "limits": {name: stop + more for name, more in CULLING.items()}}


def _kernel(release: str) -> tuple[int, int]:
    major, minor = re.findall(r"^(\d+)\.(\d+)", release)[0]
    return int(major), int(minor)


def share_unit(path: str) -> str:
    """Give systemd's name of a mount point, without .mount, as systemd-escape(1) makes it."""
    name = ""
    for number, byte in enumerate(path.strip("/").encode()):
        letter = chr(byte)
        plain = re.fullmatch(r"[A-Za-z0-9:_.]", letter) and (letter != "." or number)
        name += letter if plain else "-" if letter == "/" else f"\\x{byte:02x}"
    return name


def share_loss(listing: str, whole: str, host: str, server: str) -> str:
    """Say what a client does not see of the data sets as their server does, or nothing.

    listing, whole: what contract/layout.py prints on the client, and on the server.
    """
    what = "the listing of data sets"
    there, here = (reading.parsed(text, Any, what) for text in (whole, listing))
    for name, split in ((name, split) for name in there for split in ("train", "val")):
        own, theirs = (_amount(sets.get(name), split) for sets in (here, there))
        if own != theirs:
            return (
                f"{name}/{split} of the data: {host} sees {own}, and {server}, which shares it, "
                f"{theirs}. Links that lead out of the share are lost, and so are names that it "
                "cannot carry: docs/shares.md"
            )
    return ""


def _amount(listings: Any, split: str) -> str:
    if not isinstance(listings, dict):
        return str(listings or "nothing")
    own = listings[split]
    return f"{own['images']} images in {own['classes']} classes ({own['sha256'][:8]})"


def share_failure(protocol: str, journal: str, error: str) -> str:
    """Say in a sentence why a share could not be read.

    journal: the last lines of the mount unit; error: what the reader got.
    """
    for pattern, sentence in (*kind_of(protocol).failures, *FAILURES):
        if re.search(pattern, journal):
            return sentence
    lines = journal.strip().splitlines()
    if not lines:
        return f"{error.strip()}. Nothing tried to mount it. Run: make provision TAGS=data."
    return f"{error.strip()} (the journal's last word: {lines[-1]})"
