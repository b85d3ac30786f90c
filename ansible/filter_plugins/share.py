"""Which options a share needs, and whether a disk can be shared: decided from facts alone."""

from __future__ import annotations

import re

# The kernel's NFS server needs file handles that outlive a restart; these give none.
NO_HANDLES = {"fuseblk", "fuse", "ntfs", "ntfs3", "exfat", "vfat", "overlay"}
NETWORKED = {"nfs", "nfs4", "cifs", "smb3"}


def share_refusal(protocol: str, path: str, filesystem: str) -> str:
    """Say why a server cannot share a path, or "" if it can.

    filesystem: type as `findmnt` names it, of the file system that holds the path.
    """
    if filesystem in NETWORKED:
        return (
            f"{path} is itself a share of another machine ({filesystem}). Make that machine "
            "share_host, so that data travels once."
        )
    if protocol == "nfs" and filesystem in NO_HANDLES:
        kind = "an NTFS disk" if filesystem in ("fuseblk", "ntfs", "ntfs3") else filesystem
        return (
            f"{path} lies on {kind}, which the kernel's NFS server cannot export. "
            "Set share_protocol: smb, or move the data to an ext4 or xfs disk."
        )
    return ""


def share_source(protocol: str, address: str, path: str, name: str) -> str:
    """Give the first column of fstab: what is mounted."""
    return f"//{address}/{name}" if protocol == "smb" else f"{address}:{path}"


def share_options(protocol: str, machine: dict) -> str:
    """Give the options of fstab.

    machine: kernel ("5.15.0-91-generic"), speed (Mbit/s of the card, less than 1 when unknown),
    uid and gid (who reads). Mounted at first use, so that no boot waits for the server.
    """
    common = ["ro", "_netdev", "nofail", "x-systemd.automount", "x-systemd.mount-timeout=20"]
    if protocol == "smb":
        who = [f"uid={machine['uid']}", f"gid={machine['gid']}", "file_mode=0444", "dir_mode=0555"]
        secret = "credentials=/etc/tandem/share.credentials"  # noqa: S105 - a path, no password
        return ",".join([*common, secret, "vers=3.1.1", *who])
    several = _kernel(machine["kernel"]) >= (5, 3) and machine["speed"] > 1000
    # One TCP connection fills 1 Gbit/s; a faster link needs several (nfs(5): since Linux 5.3).
    return ",".join([*common, "vers=4.2", "noatime", *(["nconnect=4"] if several else [])])


def _kernel(release: str) -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", release).groups()
    return int(major), int(minor)


class FilterModule:
    """Filters of the roles `share_server` and `share_client`."""

    def filters(self) -> dict:
        return {
            "share_refusal": share_refusal,
            "share_source": share_source,
            "share_options": share_options,
        }
