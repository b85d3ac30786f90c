"""Run commands as if on the control node, or on a stranger's machine in the same LAN."""

import os
import pwd
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lab import cgroup, disk
from lab.plan import Lab, Node
from lab.shell import PRIVATE_MOUNTS

PLACES = ("control", "stranger")


def wrap_command(lab: Lab, place: str, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` at `place`. Each program replaces itself with the
    next one."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    (home / ".ssh").mkdir(mode=0o700, exist_ok=True)  # enter.sh mounts the lab's folder over it
    return [
        "nsenter",
        f"--net=/run/netns/{lab.netns(place)}",
        *PRIVATE_MOUNTS,
        "sh",
        str(Path(__file__).with_name("enter.sh")),
        str(cgroup.group_of(lab.name, place)),
        str(lab.state),
        str(lab.state / f"{place}.ssh"),
        str(home),
        *command,
    ]


def make_environment(lab: Lab) -> dict[str, str]:
    """Return the caller's environment with the checkout's tools first, and without an ssh agent,
    whose keys could open the nodes."""
    env = {key: value for key, value in os.environ.items() if key != "SSH_AUTH_SOCK"}
    env["PATH"] = f"{lab.checkout / '.venv/bin'}:{env.get('PATH', os.defpath)}"
    # Ansible finds its open connections by address, and all labs have the same addresses.
    env["ANSIBLE_SSH_CONTROL_PATH_DIR"] = str(lab.state / "ansible")
    return env


def execute(lab: Lab, place: str, command: Sequence[str]) -> None:
    """Replace this process with `command`."""
    argv = wrap_command(lab, place, command)
    os.execvpe(argv[0], argv, make_environment(lab))  # noqa: S606


def run_on(lab: Lab, node: Node, line: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run one command line in a shell on `node`."""
    argv = wrap_command(lab, "control", make_ssh_command(lab, node, [line]))
    return subprocess.run(
        argv, env=make_environment(lab), input=stdin, capture_output=True, text=True, check=False
    )


def make_ssh_command(lab: Lab, node: Node, command_line: Sequence[str]) -> list[str]:
    """Return the ssh command for a shell on `node`, independent of the control node's ~/.ssh."""
    options = {
        "UserKnownHostsFile": lab.state / "known_hosts",
        "GlobalKnownHostsFile": "/dev/null",
        "ConnectTimeout": 10,
        "LogLevel": "ERROR",
    }
    argv = ["ssh", "-F", "/dev/null"]
    if lab.bare:
        # Bare machines accept a password, as before `make bootstrap`.
        argv = ["sshpass", "-p", disk.PASSWORD, *argv]
    else:
        options |= {"IdentityFile": lab.state / "control.ssh/id_ed25519", "BatchMode": "yes"}
    argv += [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    return [*argv, f"{lab.user}@{node.address}", *command_line]
