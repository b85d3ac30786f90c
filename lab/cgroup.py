"""The processes of a lab as control groups (version 2, even where version 1 is mounted as well)."""

import contextlib
import os
import time
from pathlib import Path

from lab.plan import LabError

KILL_SECONDS = 60  # for a kernel that has much to clean up; usually it takes a tenth of one


def mount_point() -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind = line.split()[:3]
        if kind == "cgroup2":
            return Path(point)
    raise LabError("no cgroup2 file system is mounted here: mount -t cgroup2 none /sys/fs/cgroup")


def of(lab: str, part: str = "") -> Path:
    """`part` is a node's name, `control`, `stranger` or `up`; without it, the whole lab."""
    return mount_point() / "tandem-lab" / lab / part


def join(group: Path) -> None:
    """Moves this process into `group`."""
    group.mkdir(parents=True, exist_ok=True)
    (group / "cgroup.procs").write_text("0")


def own() -> Path:
    """The group that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return mount_point() / line[3:].lstrip("/")
    raise LabError("/proc/self/cgroup names no cgroup2 group")


def _event(group: Path, key: str) -> bool:
    try:
        return f"{key} 1" in (group / "cgroup.events").read_text().splitlines()
    except FileNotFoundError:
        return False


def populated(group: Path) -> bool:
    return _event(group, "populated")


def frozen(group: Path) -> bool:
    return _event(group, "frozen")


def freeze(group: Path, *, on: bool) -> None:
    (group / "cgroup.freeze").write_text("1" if on else "0")


def kill(group: Path) -> None:
    """Kills all processes of `group`, including frozen ones, and waits until they are gone."""
    with contextlib.suppress(FileNotFoundError):
        (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + KILL_SECONDS
    while populated(group):
        if time.monotonic() > deadline:
            raise LabError(f"processes of {group} did not end within {KILL_SECONDS} s of SIGKILL")
        time.sleep(0.01)


def remove(group: Path) -> None:
    """Removes an empty group and the groups below it."""
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(FileNotFoundError):
            Path(folder).rmdir()
