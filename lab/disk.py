"""Write the files of each node that differ from the shared base (base.py), and the ssh keys.

life.up calls `write` for each node. boot.sh mounts a node's files over the base.
"""

import os
import shutil
import uuid
from pathlib import Path

from lab.plan import Lab, LabError, Node
from lab.shell import run

USER_ID = 1000  # of the first user; the next users have the next numbers
PASSWORD = "lab"  # noqa: S105  # of the user of a bare machine (docs/lab.md)
HOST_KEY_TYPES = ("ed25519", "ecdsa")
# Debian's unit needs the capability to set the clock. With -x chrony does not set it.
CHRONY = """\
[Unit]
ConditionCapability=
[Service]
EnvironmentFile=
Environment="DAEMON_OPTS=-F 1 -x"
"""


def files(lab: Lab, node: Node) -> dict[str, tuple[int, str]]:
    """Return {path: (mode, content)} of the files that an installer would have written."""
    sudo_rule = "ALL=(ALL:ALL) ALL" if lab.bare else "ALL=(ALL:ALL) NOPASSWD: ALL"
    return {
        "etc/hostname": (0o644, f"{node.name}\n"),
        # Debian's installer writes this file. Roles repair 127.0.1.1 for the machine's own name.
        "etc/hosts": (0o644, f"127.0.0.1\tlocalhost\n127.0.1.1\t{node.name}\n::1\tlocalhost\n"),
        "etc/machine-id": (0o444, f"{uuid.uuid4().hex}\n"),
        "etc/systemd/network/10-lan.network": (
            0o644,
            f"[Match]\nName=eth0\n\n[Network]\nAddress={node.address}/24\nIPv6AcceptRA=no\n",
        ),
        # Machines must not set the host's clock. The option is in the unit, because purging chrony
        # removes /etc/default/chrony.
        "etc/systemd/system/chrony.service.d/lab.conf": (0o644, CHRONY),
        # Logins fail before this unit, but tests log in as soon as sshd greets.
        "etc/systemd/system/ssh.service.d/after-boot.conf": (
            0o644,
            "[Unit]\nAfter=systemd-user-sessions.service\n",
        ),
        f"etc/sudoers.d/{lab.user}": (
            0o440,
            "".join(f"{user} {sudo_rule}\n" for user in lab.users),
        ),
    }


def write(lab: Lab, node: Node, base: Path) -> None:
    """Make the disk of `node`. upper/ has the files that differ from the base."""
    upper = node.disk / "upper"
    for name in ("upper", "work", "root"):
        (node.disk / name).mkdir(parents=True)
    for path, (mode, content) in files(lab, node).items():
        _write(upper / path, mode, content)
    # The base's users, and those of this lab.
    accounts = {name: (base / "etc" / name).read_text() for name in ("passwd", "shadow", "group")}
    hashed = "*"  # no password logs in
    if lab.bare:
        hashed = run(["openssl", "passwd", "-6", "-salt", "tandemlab", PASSWORD]).strip()
    for number, user in enumerate(lab.users, USER_ID):
        accounts["passwd"] += f"{user}:x:{number}:{number}::/home/{user}:/bin/bash\n"
        accounts["shadow"] += f"{user}:{hashed}:20000:0:99999:7:::\n"
        accounts["group"] += f"{user}:x:{number}:\n"
    for name, content in accounts.items():
        _write(upper / "etc" / name, 0o640 if name == "shadow" else 0o644, content)
        owner = (base / "etc" / name).stat()
        os.chown(upper / "etc" / name, owner.st_uid, owner.st_gid)
    for number, user in enumerate(lab.users, USER_ID):
        home = upper / "home" / user
        shutil.copytree(base / "etc/skel", home)
        if not lab.bare:  # bare machines know no key
            public_key = (lab.state / "control.ssh/id_ed25519.pub").read_text()
            (home / ".ssh").mkdir(mode=0o700)
            _write(home / ".ssh/authorized_keys", 0o600, public_key)
        for entry in [home, *home.rglob("*")]:
            os.chown(entry, number, number)
    ssh_folder = upper / "etc/ssh"
    ssh_folder.mkdir(parents=True, exist_ok=True)
    for kind in HOST_KEY_TYPES:
        _make_key(kind, ssh_folder / f"ssh_host_{kind}_key", "root@lab")


def _write(path: Path, mode: int, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)


def _make_key(kind: str, path: Path, comment: str) -> None:
    run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", comment, "-f", str(path)])


def known_hosts(lab: Lab) -> str:
    """Return the lines for the host keys of all nodes, by address and by name."""
    lines = []
    for node in lab.nodes:
        for kind in HOST_KEY_TYPES:
            key = (node.disk / f"upper/etc/ssh/ssh_host_{kind}_key.pub").read_text()
            lines.append(f"{node.address},{node.name} {' '.join(key.split()[:2])}\n")
    return "".join(lines)


def write_control_keys(lab: Lab) -> None:
    """Make the folders that replace ~/.ssh on the control node and the stranger's."""
    for place in ("control", "stranger"):
        (lab.state / f"{place}.ssh").mkdir(mode=0o700)
    if not lab.bare:
        _make_key("ed25519", lab.state / "control.ssh/id_ed25519", "control@lab")


def remove(lab: str, disks: Path) -> None:
    """Remove the disks of a lab. Raises LabError if something is mounted there, because removing
    would delete the files of that mount."""
    folder = disks / lab
    # The second word is the mount point: `overlay /var/lib/tandem-lab/x/node1/root overlay rw 0 0`.
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    busy = [point for point in mounts if Path(point).is_relative_to(folder)]
    if busy:
        raise LabError(f"{busy[0]} is mounted below {folder}: unmount it, then run down again")
    if folder.exists():
        shutil.rmtree(folder)
