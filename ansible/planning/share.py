"""Plan the mount of a share, explain its failures, and check that a folder can be shared.

Roles share_server and share_client run the commands (findmnt, lsblk, df) and call these functions
as filters, with the outputs. Nothing here reads or changes a machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from boundary.facts import IDS, BlockDevice, BlockDevices, FileSystems

from . import PlanError, reading

# Types of file systems, as findmnt and lsblk name them.
NTFS_TYPES = {"fuseblk", "ntfs", "ntfs3"}  # findmnt calls ntfs-3g's mounts fuseblk
NETWORK_TYPES = {"nfs", "nfs4", "cifs", "smb3"}
CACHE_TYPES = {"ext4", "xfs"}  # their files can have the attributes that cachefilesd writes
# Somebody who wrote a setuid program or a device file on the disk must not become root by it.
NO_ROOT_OPTIONS = ("nosuid", "nodev")
# (pattern for the journal of a mount, its meaning for users) for all kinds of shares.
FAILURES = (
    (
        r"unknown filesystem|not supported by the system|No such device|Protocol not supported",
        "this machine's kernel has no driver for such a share. On Ubuntu: sudo apt install "
        "linux-modules-extra-$(uname -r)",
    ),
    (
        r"No route|unreachable|timed out|error\(11[0-5]\)|refused|[Tt]erminating",
        "the server does not answer. Check that it is on, and that its own firewall lets "
        "this machine in.",
    ),
)


@dataclass(frozen=True)
class Kind:
    """A protocol by which a machine shares its data sets.

    The tasks for a kind are in files with the kind's name: NAME.yml and uninstall_NAME.yml of role
    share_server, and NAME.yml of role share_client. share_server_kinds lists the kinds for YAML.
    """

    server_packages: tuple[str, ...]
    service: str
    mark: str  # a file of the server; a line "# tandem: this file is ours" marks Tandem's share
    client_packages: tuple[str, ...]
    fstype: str  # in fstab
    source: str  # the first column of fstab
    # Returns the options in fstab that only this kind has, for the `machine` of share_options.
    options: Callable[[dict[str, Any]], list[str]]
    has_password: bool
    cannot_export: frozenset[str]  # types of file systems that the server cannot share
    failures: tuple[tuple[str, str], ...]  # as FAILURES; from mount.cifs(8) and mount.nfs(8)


def _nfs_options(machine: dict[str, Any]) -> list[str]:
    # "5.15.0-91-generic" -> 5, 15
    major, minor = re.findall(r"^(\d+)\.(\d+)", machine["kernel"])[0]
    # One TCP connection fills 1 Gbit/s; a faster link needs several (nfs(5): since Linux 5.3).
    several_connections = (int(major), int(minor)) >= (5, 3) and machine["speed"] > 1000
    return ["vers=4.2", "noatime", *(["nconnect=4"] if several_connections else [])]


def _smb_options(machine: dict[str, Any]) -> list[str]:
    # SMB has no Linux users, so the user who trains owns all files. machine["ids"] has that user:
    # "uid=1001(tandem) gid=1001(tandem) ...".
    uid, gid = re.findall(IDS, machine["ids"])[0]
    secret = "credentials=/etc/tandem/share.credentials"  # noqa: S105 - a path, no password
    return [secret, "vers=3.1.1", f"uid={uid}", f"gid={gid}", "file_mode=0444", "dir_mode=0555"]


# The values of share_protocol, in addition to local.
KINDS = {
    "nfs": Kind(
        server_packages=("nfs-kernel-server",),
        service="nfs-server.service",
        mark="/etc/exports.d/tandem.exports",
        client_packages=("nfs-common",),
        fstype="nfs4",
        source="{address}:{path}",  # for share_source
        options=_nfs_options,
        has_password=False,
        # The kernel's NFS server needs file handles that stay valid after a restart.
        cannot_export=frozenset(NTFS_TYPES | {"fuse", "exfat", "vfat", "overlay"}),
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
                "the server rejected the account or its password. Check the password on the "
                "server, and check that the account may read the share.",
            ),
            (r"error\(2\)|No such file", "the server has no share of that name (share_name)."),
            (
                r"error\(112\)|Host is down",
                "the server is off or asleep, or supports only SMB 1, as Windows 7 and old "
                "NAS do. Switch on SMB 3 on the server.",
            ),
        ),
    ),
}


def find_kind(protocol: str) -> Kind:
    """Find the Kind that share_protocol names. Raises PlanError if there is none."""
    if protocol not in KINDS:
        raise PlanError(f"share_protocol is {protocol!r}: write local, {' or '.join(KINDS)}")
    return KINDS[protocol]


def share_kind(protocol: str) -> dict[str, Any]:
    """Return the fields of a kind that roles use."""
    kind = find_kind(protocol)
    names = ("server_packages", "service", "client_packages", "fstype", "has_password")
    return {name: getattr(kind, name) for name in names}


def share_others(protocol: str) -> dict[str, str]:
    """Return {kind: its mark} of the kinds that share_protocol does not name; of all for local.

    Role share_server removes what Tandem once set up for these kinds.
    """
    if protocol != "local":
        find_kind(protocol)  # raises PlanError for a name that is no kind
    return {name: kind.mark for name, kind in KINDS.items() if name != protocol}


def share_refusal(protocol: str, path: str, findmnt: str) -> str:
    """Explain why a server cannot share a path; "" if it can.

    findmnt: output of `findmnt --mtab --json --output TARGET,SOURCE,FSTYPE,OPTIONS --target PATH`.
    """
    systems = reading.parsed(findmnt, FileSystems, "findmnt").filesystems
    if not systems:
        raise PlanError(f"findmnt does not know the file system of {path}")
    disk = systems[0]  # findmnt lists only the file system that --target is on
    if disk.fstype in NETWORK_TYPES:
        return (
            f"{path} is a share of another machine ({disk.fstype}). Set share_host to "
            "that machine: data then crosses the network only once."
        )
    if "uhelper=udisks2" in disk.options.split(","):
        return (
            f"{path} is on a disk that a user's desktop mounted ({disk.source}), and is "
            "unmounted when that user logs out. Unmount it, and set share_disk to its name, "
            "which lsblk --output NAME,LABEL,UUID shows."
        )
    no_export = _explain_no_export(protocol, disk.fstype)
    return f"{path} is on {no_export}" if no_export else ""


def _explain_no_export(protocol: str, fstype: str) -> str:
    """Explain in a clause that a protocol cannot share a file system; "" if it can."""
    if fstype not in find_kind(protocol).cannot_export:
        return ""
    able_protocol = next(name for name, kind in KINDS.items() if fstype not in kind.cannot_export)
    return (
        f"{'an NTFS disk' if fstype in NTFS_TYPES else fstype}, which the kernel's "
        f"{protocol.upper()} server cannot share. Set share_protocol: {able_protocol}, or move "
        "the data to an ext4 or xfs disk."
    )


def share_missing(path: str, lsblk: str) -> str:
    """Report that a folder does not exist, and name the disks with data that nobody has mounted.

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
        f"{path} does not exist. If it is on a disk that is not mounted, set share_disk: "
        f"{unused[0].split()[0]}, and set share_path to the folder below /srv/tandem/disk, where "
        "Tandem mounts the disk. Otherwise correct share_path. Disks that are not mounted: "
        f"{', '.join(unused)}."
    )


def share_disk(
    disk: str, lsblk: str, has_ntfs3: bool, protocol: str, mount_point: str, host: str
) -> dict[str, str]:
    """Plan the line of fstab that mounts a disk read-only at `mount_point`.

    Returns {"source", "fstype", "options"}.

    disk: UUID=..., LABEL=... or a path; lsblk: see share_missing; has_ntfs3: true if the kernel has
    a driver for NTFS (Linux 5.15); protocol: share_protocol. Raises PlanError if there is nothing
    to mount or to share.
    """
    key, _, value = disk.rpartition("=")  # "LABEL=data", or "/dev/sdb1" without a key
    field = {"": "name", "UUID": "uuid", "LABEL": "label"}.get(key)
    devices = block_devices(lsblk)
    matches = [device for device in devices if field and getattr(device, field) == value]
    if len(matches) != 1:
        names = ", ".join(device.name for device in devices if device.fstype)
        fault = "is not one of its disks" if not matches else "fits several of its disks"
        raise PlanError(f"{host}: share_disk {disk} {fault}. Disks with data: {names}.")
    device = matches[0]
    fstype = device.fstype
    if fstype in ("BitLocker", "crypto_LUKS"):
        raise PlanError(
            f"{host}: {device.name} is encrypted ({fstype}), and nobody can type the "
            "passphrase at boot. Remove the encryption of this disk, or copy the data to "
            "another disk."
        )
    if not fstype:
        raise PlanError(f"{host}: {device.name} has no file system.")
    if device.mountpoint not in (None, mount_point):
        raise PlanError(
            f"{host}: {device.name} is already mounted at {device.mountpoint}. Unmount it, or "
            "remove share_disk and set share_path to the folder on it."
        )
    no_export = _explain_no_export(protocol, fstype)
    if no_export:
        raise PlanError(f"{host}: {device.name} is {no_export}")
    options = ["ro", *NO_ROOT_OPTIONS, "nofail"]
    if fstype in NTFS_TYPES | {"exfat", "vfat"}:
        # These file systems store no owner: everybody reads, nobody writes.
        options += ["umask=0222"]
    if fstype == "ntfs":
        fstype = "ntfs3" if has_ntfs3 else "ntfs-3g"
    # /dev/sdb may be another disk after the next boot.
    source = f"UUID={device.uuid}" if device.uuid else device.name
    return {"source": source, "fstype": fstype, "options": ",".join(options)}


def block_devices(lsblk: str) -> list[BlockDevice]:
    """List all devices of lsblk's tree, in its order."""
    # pop() takes the last device, so each list is reversed: a disk comes before its partitions.
    devices, pending = [], list(reversed(reading.parsed(lsblk, BlockDevices, "lsblk").blockdevices))
    while pending:
        device = pending.pop()
        devices.append(device)
        pending += reversed(device.children)
    return [device for device in devices if device.name]


def share_source(protocol: str, address: str, path: str, name: str) -> str:
    """Return the first column of fstab, the source of the mount.

    address: the server's; path: the folder there, for NFS; name: share_name, for SMB.
    """
    return find_kind(protocol).source.format(address=address, path=path, name=name)


def share_options(protocol: str, machine: dict[str, Any], cached: bool = False) -> str:
    """Return the options of a share in fstab.

    machine: kernel ("5.15.0-91-generic"), speed (Mbit/s of the interface, less than 1 if unknown),
    ids (output of `id` for the user who reads). cached: true if the machine caches the files on its
    disk.
    """
    # automount: the first use mounts the share, so that no boot waits for the server. hard: while a
    # server restarts, a reader waits and does not fail. x-tandem marks the line as
    # Tandem's; mount(8) ignores such words.
    common = ["ro", *NO_ROOT_OPTIONS, "hard", "_netdev", "nofail", "x-tandem"]
    common += ["x-systemd.automount", "x-systemd.mount-timeout=20"]
    # The kernel caches nothing of a share that was mounted before cachefilesd ran.
    cache = ["fsc", "x-systemd.after=cachefilesd.service"] if cached else []
    return ",".join([*common, *cache, *find_kind(protocol).options(machine)])


# cachefilesd has no setting for the size of the cache, but limits in percent of the disk's bytes
# that are free: below bstop it stores nothing more. Below bcull it deletes the oldest files until
# brun is reached. CULLING has the percentages to add to bstop. The kernel wants
# bstop < bcull < brun after each line of the settings, and begins with 1, 5 and 7 %. So the
# largest, brun, comes first.
CULLING = {"brun": 4, "bcull": 2, "bstop": 0}
MIN_FREE_PERCENT = 8  # of the disk, for other programs


def share_cache(limit_gb: float, disk: str, present: str, has_module: bool) -> dict[str, Any]:
    """Plan the cache of a share on the disk of /var/cache: {"refusal", "limits"}.

    "refusal" explains why there is no cache; "" if there is one. "limits" are CULLING's, in percent
    of the disk that stay free. disk: output of `df --block-size=1 --output=fstype,size,avail`;
    present: output of `du --summarize --block-size=1` of an existing cache; has_module: true if the
    kernel has cachefiles. The cache shrinks and grows with the space that programs leave free.
    """
    if not has_module:
        return {"refusal": "its kernel has no module cachefiles", "limits": {}}
    match = re.fullmatch(r"(\S+)\s+(\d+)\s+(\d+)", disk.strip().splitlines()[-1] if disk else "")
    if not match:
        raise PlanError("df did not report the size of the disk of /var/cache")
    fstype, total, free = match[1], int(match[2]), int(match[3])
    if fstype not in CACHE_TYPES:
        return {"refusal": f"/var/cache is on {fstype}, not on ext4 or xfs", "limits": {}}
    # The bytes of an existing cache count as free.
    present_bytes = re.match(r"\d+", present)
    free += int(present_bytes[0]) if present_bytes else 0
    # With a full cache of limit_gb, this percentage of the disk is still free.
    stop = max(math.ceil(100 * (free - limit_gb * 1e9) / max(1, total)), MIN_FREE_PERCENT)
    # Below bcull cachefilesd deletes files until brun is free. If no more than brun is free even
    # without a cache (a full disk, or a limit_gb below 4 % of the disk), no cache would last.
    if total * (stop + CULLING["brun"]) >= 100 * free:
        least_gb = CULLING["brun"] * total / 100e9
        refusal = (
            f"{free / 1e9:,.0f} of {total / 1e9:,.0f} GB of /var/cache are free, but a cache "
            f"needs at least {least_gb:,.0f} GB and keeps {MIN_FREE_PERCENT} % free"
        )
        return {"refusal": refusal, "limits": {}}
    return {"refusal": "", "limits": {name: stop + margin for name, margin in CULLING.items()}}


def share_unit(path: str) -> str:
    """Return systemd's name of a mount point, without .mount, as systemd-escape(1) makes it."""
    name = ""  # "/srv/my-data" becomes "srv-my\x2ddata"
    for number, byte in enumerate(path.strip("/").encode()):
        letter = chr(byte)
        # systemd escapes a dot only at the beginning.
        is_plain = re.fullmatch(r"[A-Za-z0-9:_.]", letter) and (letter != "." or number > 0)
        name += letter if is_plain else "-" if letter == "/" else f"\\x{byte:02x}"
    return name


def share_loss(listing: str, server_listing: str, host: str, server: str) -> str:
    """Describe the first data set that differs between a client and its server; "" if none does.

    listing, server_listing: outputs of contract/layout.py on the client, and on the server:
    {data set: {"train", "val": {"images", "classes", "sha256"}}, or an error}.
    """
    label = "the listing of data sets"
    client_sets = reading.parsed(listing, Any, label)
    server_sets = reading.parsed(server_listing, Any, label)

    def describe(data_set: Any, split: str) -> str:
        if not isinstance(data_set, dict):  # an error that layout.py printed, or None
            return str(data_set or "nothing")
        row = data_set[split]
        # The checksum is that of the names, so equal numbers of other files differ too.
        return f"{row['images']} images in {row['classes']} classes ({row['sha256'][:8]})"

    for name in server_sets:
        for split in ("train", "val"):
            client_amount = describe(client_sets.get(name), split)
            server_amount = describe(server_sets.get(name), split)
            if client_amount != server_amount:
                return (
                    f"{name}/{split}: {host} sees {client_amount}, but {server}, which shares the "
                    f"folder, has {server_amount}. Links that lead out of the share, and names "
                    "that it does not support, are invisible through it: docs/shares.md"
                )
    return ""


def share_failure(protocol: str, journal: str, error: str) -> str:
    """Explain in a sentence why a share could not be read.

    journal: the last lines of the mount unit; error: the reader's error.
    """
    # The patterns of the kind come first, since they are more specific.
    for pattern, sentence in (*find_kind(protocol).failures, *FAILURES):
        if re.search(pattern, journal):
            return sentence
    lines = journal.strip().splitlines()
    if not lines:
        return f"{error.strip()}. Nothing tried to mount it. Run: make provision TAGS=data."
    return f"{error.strip()} (the mount's last log line: {lines[-1]})"
