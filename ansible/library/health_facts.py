#!/usr/bin/python
"""Collects how a machine is between runs. Reads only. Python >= 3.6, standard library."""

import glob
import os
import platform
import re
import shutil

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.commands import outcome, output, read
from ansible.module_utils.kernels import waiting_kernel

DOCUMENTATION = r"""
---
module: health_facts
short_description: Collects how a machine is between runs
description:
  - Asks nvidia-smi, the kernel's log of this boot, file systems, and apt what it holds.
  - Only root may read the kernel's log everywhere.
  - Changes nothing.
options:
  folders:
    description: Folders whose disks are looked at; they need not exist yet.
    type: list
    elements: str
    required: true
author: Tandem
"""

EXAMPLES = r"""
- name: Collect
  health_facts:
    folders: [/, /srv/tandem/data]
"""

RETURN = r"""
health:
  description: What was read, as planning/health.py takes it; None where a machine does not say.
  returned: always
  type: dict
"""

SMI = ("nvidia-smi", "--query-gpu=index,temperature.gpu,power.draw,name")
XID = re.compile(r"NVRM: Xid \((?:PCI:)?[0-9A-Fa-f:.]+\): (\d{1,4}),")
# The block layer of each kernel since 4.15, and the file systems.
DISK = re.compile(
    r"(?:I/O error|critical medium error|critical target error), dev (\S+?),"
    r"|Buffer I/O error on dev(?:ice)? (\S+?),"
    r"|EXT4-fs error \(device (\S+?)\)"
    r"|XFS \((\S+?)\): .*(?:I/O error|[Cc]orruption)"
    r"|BTRFS error \(device (\S+?)[ )]"
)
# No disks that data lies on: an empty drive of floppies or DVDs says errors all day.
ODD = re.compile(r"(loop|sr|fd|ram|zram)\d")
KINDS = 100  # of errors; a log may be anything


def smi():
    """What nvidia-smi says of its cards: {"done": whether it did well, "text"}; None without it."""
    if shutil.which("nvidia-smi") is None:
        return None
    succeeded, text = outcome(*SMI, "--format=csv,noheader,nounits", seconds=60)
    return {"done": succeeded, "text": text[:4096]}


def kernel_log():
    """What the kernel has said since it booted; None where we may not read it."""
    argv = ("journalctl", "--dmesg", "--boot", "--no-pager", "--output=cat", "--quiet")
    return output(*argv, seconds=60) or output("dmesg") or None


def errors(text):
    """{"xids": {number: how many}, "disks": {device: how many}} of a kernel's log."""
    counts = {"xids": {}, "disks": {}}
    for line in text.splitlines():
        xid, disk = XID.search(line), DISK.search(line)
        if xid:
            count(counts["xids"], xid.group(1))
        if disk:
            name = next(filter(None, disk.groups()))
            if not ODD.match(name):
                count(counts["disks"], name)
    return counts


def count(counts, name):
    if name in counts or len(counts) < KINDS:
        counts[name] = counts.get(name, 0) + 1


def ext4_errors():
    """{device: how many} of errors that ext4 has written down in its file systems, over boots."""
    counts = {}
    for path in glob.glob("/sys/fs/ext4/*/errors_count"):
        text = read(path) or "0"
        if text.isdigit() and int(text):
            counts[path.split("/")[-2]] = int(text)
    return counts


def disks(folders):
    """[{"folder", "size", "free"}]: one folder of each file system, and bytes."""
    rows = {}
    for folder in folders:
        there = os.path.abspath(folder)
        while not os.path.exists(there):
            there = os.path.dirname(there)
        state = os.statvfs(there)
        size = state.f_blocks * state.f_frsize
        row = {"folder": there, "size": size, "free": state.f_bavail * state.f_frsize}
        rows.setdefault(os.stat(there).st_dev, row)
    return list(rows.values())


def main():
    module = AnsibleModule(
        argument_spec={"folders": {"type": "list", "elements": "str", "required": True}},
        supports_check_mode=True,
    )
    log, held = kernel_log(), output("apt-mark", "showhold")
    health = {
        "smi": smi(),
        "errors": None if log is None else errors(log),
        "ext4_errors": ext4_errors(),
        "disks": disks(module.params["folders"]),
        "held": None if held is None else held.split(),
        "kernel": platform.release(),
        "waiting_kernel": waiting_kernel(platform.release()),
        "reboot_required": os.path.exists("/run/reboot-required"),
    }
    module.exit_json(changed=False, health=health)


if __name__ == "__main__":
    main()
