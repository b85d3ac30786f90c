"""The power of one node: booting, losing power, freezing."""

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from lab import base, cgroup, control, disk, network, vm
from lab.plan import Lab, LabError, Node

BOOT_SECONDS = 300  # for emulated machines on a busy host; containers need one second
SSH_LOST = 255
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


def container(lab: Lab, node: Node) -> list[str]:
    """The command that boots `node` in its namespace and root file system."""
    # The first machine makes and tests an environment in the cache; the others find it finished.
    bind = "--bind" if lab.is_first_of_its_system(node) else "--bind-ro"
    return [
        "systemd-nspawn",
        "--quiet",
        "--boot",
        "--settings=no",
        "--register=no",
        "--keep-unit",
        "--console=pipe",
        f"--directory={node.disk / 'root'}",
        f"--machine={node.machine}",
        f"--hostname={node.name}",
        "--link-journal=no",
        "--resolv-conf=off",
        "--timezone=off",
        f"--network-namespace-path=/run/netns/{node.netns}",
        "--capability=all",
        # The host's clock is not theirs to set.
        "--drop-capability=CAP_SYS_TIME",
        # File servers need both: mounts of their own, and file handles that outlive an open file.
        "--system-call-filter=@mount",
        "--system-call-filter=open_by_handle_at",
        f"{bind}={node.envs}:/opt/tandem/envs",
    ]


def power(lab: Lab, node: Node, group: Path) -> list[str]:
    """The command that lives as long as `node` has power."""
    script = Path(__file__).with_name("boot.sh")
    relative = str(group.relative_to(cgroup.mount_point()))
    place = [relative, node.netns, str(node.disk), str(base.folder(node.system))]
    private = ["unshare", "--mount", "--propagation", "private", "--"]
    return [*private, "sh", str(script), *place, *container(lab, node)]


def boot(lab: Lab, node: Node) -> subprocess.Popen[bytes]:
    """Switches `node` on and returns at once; the process lives as long as the node has power."""
    group = cgroup.of(lab.name, node.name)
    group.mkdir(parents=True, exist_ok=True)
    cgroup.freeze(group, on=False)
    with node.console.open("ab") as console:
        return subprocess.Popen(
            vm.power(lab, node, group) if lab.vm else power(lab, node, group),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
        )


def running(lab: Lab, node: Node) -> bool:
    return cgroup.populated(cgroup.of(lab.name, node.name))


def wait_for_ssh(lab: Lab, booting: Mapping[Node, subprocess.Popen[bytes]]) -> None:
    """Returns when all nodes greet; raises LabError with the console's end when one does not."""
    deadline = time.monotonic() + BOOT_SECONDS
    for node, power in booting.items():
        # A short time to connect, since the address may come at any moment; a long one to greet,
        # since a slow machine that is asked again and again would never get to answer.
        while not network.answers_ssh(lab, node, connect=1, greet=30):
            if time.monotonic() > deadline:
                raise LabError(_with_console(node, f"does not answer ssh for {BOOT_SECONDS} s"))
            if power.poll() is not None:
                raise LabError(_with_console(node, f"went off at boot, exit code {power.poll()}"))
            time.sleep(0.05)


def _with_console(node: Node, trouble: str) -> str:
    lines = node.console.read_text(errors="replace").splitlines()[-15:]
    return "\n".join([f"{node.name} {trouble}; its console:", *(lines or ["(nothing)"])])


def power_off(lab: Lab, node: Node) -> None:
    """Cuts the power. The cable goes first, so that no peer gets a closing packet."""
    network.plug(lab, node, on=False)
    cgroup.kill(cgroup.of(lab.name, node.name))


def freeze(lab: Lab, node: Node) -> None:
    if not running(lab, node):
        raise LabError(f"{node.name} is off: a machine without power cannot be frozen")
    cgroup.freeze(cgroup.of(lab.name, node.name), on=True)


def mend(lab: Lab, node: Node) -> None:
    """Thaws `node` and plugs it in, or switches it on, with its disk as it was left."""
    group = cgroup.of(lab.name, node.name)
    network.plug(lab, node, on=True)
    if running(lab, node):
        cgroup.freeze(group, on=False)
    else:
        wait_for_ssh(lab, {node: boot(lab, node)})


def reboot(lab: Lab, node: Node) -> None:
    """Reboots `node` from inside, as its user would; returns when that user can log in again."""
    before = control.run_on(lab, node, BOOT_ID)
    if before.returncode:
        reason = before.stderr.strip() or f"exit code {before.returncode}"
        raise LabError(
            f"{node.name} refuses the login that would reboot it ({reason}): mend {node.index}"
        )
    # Only bare machines ask for the password.
    line = "sudo --stdin --prompt= systemctl reboot"
    answer = control.run_on(lab, node, line, stdin=f"{disk.PASSWORD}\n")
    if answer.returncode not in (0, SSH_LOST):
        raise LabError(f"{node.name} refuses to reboot: {answer.stderr.strip()}")
    deadline = time.monotonic() + BOOT_SECONDS
    while True:
        if network.answers_ssh(lab, node, connect=1, greet=30):
            now = control.run_on(lab, node, BOOT_ID)
            if now.returncode == 0 and now.stdout != before.stdout:
                return
        if time.monotonic() > deadline:
            raise LabError(_with_console(node, f"did not come back within {BOOT_SECONDS} s"))
        time.sleep(0.05)


def state(lab: Lab, node: Node, plugged: bool, answers: bool) -> str:
    group = cgroup.of(lab.name, node.name)
    if not cgroup.populated(group):
        return "dead"
    troubles = [
        word for word, is_so in (("frozen", cgroup.frozen(group)), ("cut", not plugged)) if is_so
    ]
    return ", ".join(troubles) or ("running" if answers else "booting")
