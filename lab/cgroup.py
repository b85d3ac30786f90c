"""Keep the processes of a lab in control groups (version 2, even if version 1 is mounted, too)."""

import contextlib
import os
import time
from pathlib import Path

from lab.plan import LabError

KILL_SECONDS = 60  # the kernel may have much to clean up; usually it needs 0.1 s


def mount_point() -> Path:
    """Return where version 2 is mounted. Raises LabError."""
    # A line has the device, the mount point and the type: `cgroup2 /sys/fs/cgroup cgroup2 rw 0 0`.
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind = line.split()[:3]
        if kind == "cgroup2":
            return Path(point)
    raise LabError("no cgroup2 file system is mounted here: mount -t cgroup2 none /sys/fs/cgroup")


def group_of(lab: str, member: str = "") -> Path:
    """Return the group of a node's name, `control`, `stranger` or `up`; by default, of the whole
    lab."""
    return mount_point() / "tandem-lab" / lab / member


def join(group: Path) -> None:
    """Move this process into `group`."""
    group.mkdir(parents=True, exist_ok=True)
    (group / "cgroup.procs").write_text("0")


def current_group() -> Path:
    """Return the group of this process. Raises LabError."""
    # The line of version 2 is like `0::/user.slice/session-1.scope`.
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return mount_point() / line[len("0::") :].lstrip("/")
    raise LabError("/proc/self/cgroup names no cgroup2 group")


def _has_event(group: Path, key: str) -> bool:
    """Return whether the kernel reports the state `key` of a group."""
    try:
        return f"{key} 1" in (group / "cgroup.events").read_text().splitlines()
    except FileNotFoundError:  # the machine has never been switched on
        return False


def is_populated(group: Path) -> bool:
    return _has_event(group, "populated")


def is_frozen(group: Path) -> bool:
    return _has_event(group, "frozen")


def freeze(group: Path, *, on: bool) -> None:
    (group / "cgroup.freeze").write_text("1" if on else "0")


def kill(group: Path) -> None:
    """Kill all processes of `group`, including frozen ones, and wait until they are gone."""
    # One write kills them all at once, so that no process can start another one meanwhile.
    with contextlib.suppress(FileNotFoundError):
        (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + KILL_SECONDS
    while is_populated(group):
        if time.monotonic() > deadline:
            raise LabError(f"processes of {group} did not end within {KILL_SECONDS} s of SIGKILL")
        time.sleep(0.01)


def remove(group: Path) -> None:
    """Remove an empty group and the groups below it."""
    for folder, _, _ in os.walk(group, topdown=False):  # a group that has groups stays
        with contextlib.suppress(FileNotFoundError):
            Path(folder).rmdir()
