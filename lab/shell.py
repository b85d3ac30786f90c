"""Run the host's tools."""

import shutil
import subprocess
from collections.abc import Sequence

from lab.plan import LabError

TOOLS = (
    *("debootstrap", "ip", "nft", "openssl", "nsenter", "ssh", "ssh-keygen", "sshpass"),
    *("systemd-nspawn", "tc", "unshare"),
)
VM_TOOLS = ("cpio", "mke2fs", "qemu-img", "qemu-system-x86_64")
# Begins a command whose mounts nobody else sees, and that end with the command.
PRIVATE_MOUNTS = ("unshare", "--mount", "--propagation", "private", "--")


def missing_tools(vm: bool) -> list[str]:
    """Return the tools that this host lacks. `vm`: include those for virtual machines."""
    tools = (*TOOLS, *VM_TOOLS) if vm else TOOLS
    return [tool for tool in tools if shutil.which(tool) is None]


def run(argv: Sequence[str], stdin: str = "") -> str:
    """Return the standard output of `argv`. Raises LabError with its message if it fails."""
    process = subprocess.run(argv, input=stdin, capture_output=True, text=True)
    if process.returncode:
        reason = (process.stderr or process.stdout).strip() or f"exit code {process.returncode}"
        raise LabError(f"{' '.join(argv)}: {reason}")
    return process.stdout
