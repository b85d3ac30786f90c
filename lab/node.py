"""Switch a node of a lab on and off, freeze it, reboot it, and report its state.

A node without a virtual machine is a container of systemd-nspawn. Its power is a process: the node
is on while the process runs.
"""

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from lab import base, cgroup, control, disk, network, vm
from lab.plan import Lab, LabError, Node
from lab.shell import PRIVATE_MOUNTS

BOOT_SECONDS = 300  # an emulated machine on a busy host needs minutes, a container one second
SSH_LOST = 255  # ssh's exit code if the connection ends
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


def make_container_command(lab: Lab, node: Node) -> list[str]:
    """Return the command that boots `node` in its namespace and root file system."""
    # The first node of a system makes and tests an environment in the cache; other nodes read it.
    first_node = next(member for member in lab.nodes if member.system == node.system)
    bind = "--bind" if first_node == node else "--bind-ro"
    return [
        "systemd-nspawn",
        *("--quiet", "--boot", "--settings=no", "--register=no", "--keep-unit", "--console=pipe"),
        f"--directory={node.disk / 'root'}",
        f"--machine={node.machine}",
        f"--hostname={node.name}",
        *("--link-journal=no", "--resolv-conf=off", "--timezone=off"),
        f"--network-namespace-path=/run/netns/{node.netns}",
        "--capability=all",
        # Otherwise a node could set the host's clock.
        "--drop-capability=CAP_SYS_TIME",
        # File servers mount file systems, and use file handles that outlive an open file.
        "--system-call-filter=@mount",
        "--system-call-filter=open_by_handle_at",
        f"{bind}={node.envs}:/opt/tandem/envs",
    ]


def make_power_command(lab: Lab, node: Node, group: Path) -> list[str]:
    """Return the command that runs as long as `node` has power."""
    script = Path(__file__).with_name("boot.sh")
    relative = str(group.relative_to(cgroup.mount_point()))
    arguments = [relative, node.netns, str(node.disk), str(base.folder(node.system))]
    return [*PRIVATE_MOUNTS, "sh", str(script), *arguments, *make_container_command(lab, node)]


def boot(lab: Lab, node: Node) -> subprocess.Popen[bytes]:
    """Switch `node` on and return at once. The process runs as long as the node has power."""
    group = cgroup.group_of(lab.name, node.name)
    group.mkdir(parents=True, exist_ok=True)
    cgroup.freeze(group, on=False)  # it may have been frozen when it lost power
    command = (vm.make_power_command if lab.vm else make_power_command)(lab, node, group)
    with node.console.open("ab") as console:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
        )


def is_on(lab: Lab, node: Node) -> bool:
    return cgroup.is_populated(cgroup.group_of(lab.name, node.name))


def wait_for_ssh(lab: Lab, booting: Mapping[Node, subprocess.Popen[bytes]]) -> None:
    """Wait until all nodes greet. Raises LabError with a node's console if it does not."""
    deadline = time.monotonic() + BOOT_SECONDS
    for node, power in booting.items():
        # The time to connect is short, because the address may appear at any moment. The time to
        # greet is long: a slow machine that got new connections all the time would never answer.
        while not network.answers_ssh(lab, node, connect=1, greet=30):
            if time.monotonic() > deadline:
                raise LabError(_with_console(node, f"does not answer ssh for {BOOT_SECONDS} s"))
            if power.poll() is not None:
                raise LabError(_with_console(node, f"went off at boot, exit code {power.poll()}"))
            time.sleep(0.05)


def _with_console(node: Node, trouble: str) -> str:
    """Return an error about a node, with the end of its console."""
    lines = node.console.read_text(errors="replace").splitlines()[-15:]
    return "\n".join([f"{node.name} {trouble}; its console:", *(lines or ["(nothing)"])])


def power_off(lab: Lab, node: Node) -> None:
    """Cut the power of `node`."""
    # The cable is unplugged first, so that no peer gets a packet that closes a connection.
    network.plug(lab, node, on=False)
    cgroup.kill(cgroup.group_of(lab.name, node.name))


def freeze(lab: Lab, node: Node) -> None:
    """Make `node` hang. Raises LabError if it is off."""
    if not is_on(lab, node):
        raise LabError(f"{node.name} is off: a machine without power cannot be frozen")
    cgroup.freeze(cgroup.group_of(lab.name, node.name), on=True)


def mend(lab: Lab, node: Node) -> None:
    """Thaw `node` and plug it in, or switch it on. Its disk is as before."""
    group = cgroup.group_of(lab.name, node.name)
    network.plug(lab, node, on=True)
    if is_on(lab, node):
        cgroup.freeze(group, on=False)
    else:
        wait_for_ssh(lab, {node: boot(lab, node)})


def reboot(lab: Lab, node: Node) -> None:
    """Reboot `node` from inside, as its user would. Return when that user can log in again."""
    first_boot = control.run_on(lab, node, BOOT_ID)
    if first_boot.returncode:
        reason = first_boot.stderr.strip() or f"exit code {first_boot.returncode}"
        raise LabError(
            f"{node.name} refuses the login that would reboot it ({reason}): mend {node.index}"
        )
    # Only bare machines ask for the password; sudo on other machines ignores it.
    line = "sudo --stdin --prompt= systemctl reboot"
    answer = control.run_on(lab, node, line, stdin=f"{disk.PASSWORD}\n")
    # The reboot may end the connection before the answer.
    if answer.returncode not in (0, SSH_LOST):
        raise LabError(f"{node.name} refuses to reboot: {answer.stderr.strip()}")
    deadline = time.monotonic() + BOOT_SECONDS
    while True:
        if network.answers_ssh(lab, node, connect=1, greet=30):
            # The old system may still answer, but it has the old boot id.
            boot = control.run_on(lab, node, BOOT_ID)
            if boot.returncode == 0 and boot.stdout != first_boot.stdout:
                return
        if time.monotonic() > deadline:
            raise LabError(_with_console(node, f"did not come back within {BOOT_SECONDS} s"))
        time.sleep(0.05)


def describe_state(lab: Lab, node: Node, plugged: bool, answers: bool) -> str:
    """Return a word for people: dead, frozen, cut, booting or running."""
    group = cgroup.group_of(lab.name, node.name)
    if not cgroup.is_populated(group):
        return "dead"
    troubles = ["frozen"] if cgroup.is_frozen(group) else []
    troubles += [] if plugged else ["cut"]
    return ", ".join(troubles) or ("running" if answers else "booting")
