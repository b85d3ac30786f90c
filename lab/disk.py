"""What makes one node differ from another: the files that overlay the shared base."""

import os
import shutil
import uuid
from pathlib import Path

from lab.plan import Lab, LabError, Node
from lab.shell import run

USER_ID = 1000  # the first user's; the others follow
PASSWORD = "lab"  # noqa: S105  # of the user of a bare machine; docs/lab.md says so
HOST_KEY_TYPES = ("ed25519", "ecdsa")
CHRONY = """\
[Unit]
ConditionCapability=
[Service]
EnvironmentFile=
Environment="DAEMON_OPTS=-F 1 -x"
"""


def files(lab: Lab, node: Node) -> dict[str, tuple[int, str]]:
    """{path: (mode, content)} of what an installer would have written on this machine."""
    sudo_rule = "ALL=(ALL:ALL) ALL" if lab.bare else "ALL=(ALL:ALL) NOPASSWD: ALL"
    return {
        "etc/hostname": (0o644, f"{node.name}\n"),
        # As Debian's installer writes it; 127.0.1.1 for the machine's own name is what roles mend.
        "etc/hosts": (0o644, f"127.0.0.1\tlocalhost\n127.0.1.1\t{node.name}\n::1\tlocalhost\n"),
        "etc/machine-id": (0o444, f"{uuid.uuid4().hex}\n"),
        "etc/systemd/network/10-lan.network": (
            0o644,
            f"[Match]\nName=eth0\n\n[Network]\nAddress={node.address}/24\nIPv6AcceptRA=no\n",
        ),
        # All machines share the host's clock, which is not theirs to set, so chrony only follows.
        # Set in the unit, since purging chrony removes /etc/default/chrony.
        "etc/systemd/system/chrony.service.d/lab.conf": (0o644, CHRONY),
        # A machine whose sshd greets must let its user in: before that unit, logins are refused.
        "etc/systemd/system/ssh.service.d/after-boot.conf": (
            0o644,
            "[Unit]\nAfter=systemd-user-sessions.service\n",
        ),
        f"etc/sudoers.d/{lab.user}": (
            0o440,
            "".join(f"{user} {sudo_rule}\n" for user in lab.users),
        ),
    }


def accounts(lab: Lab, base: dict[str, str]) -> dict[str, str]:
    """The base's passwd, shadow and group files with the users of this lab added."""
    password = password_hash() if lab.bare else "*"
    texts = dict(base)
    for number, user in enumerate(lab.users, USER_ID):
        texts["passwd"] += f"{user}:x:{number}:{number}::/home/{user}:/bin/bash\n"
        texts["shadow"] += f"{user}:{password}:20000:0:99999:7:::\n"
        texts["group"] += f"{user}:x:{number}:\n"
    return texts


def password_hash() -> str:
    return run(["openssl", "passwd", "-6", "-salt", "tandemlab", PASSWORD]).strip()


def write(lab: Lab, node: Node, base: Path) -> None:
    """Makes the disk of `node`; upper/ has what differs from the base."""
    upper = node.disk / "upper"
    for name in ("upper", "work", "root"):
        (node.disk / name).mkdir(parents=True)
    for path, (mode, content) in files(lab, node).items():
        _write(upper / path, mode, content)
    read = {name: (base / "etc" / name).read_text() for name in ("passwd", "shadow", "group")}
    for name, content in accounts(lab, read).items():
        _write(upper / "etc" / name, 0o640 if name == "shadow" else 0o644, content)
        owner = (base / "etc" / name).stat()
        os.chown(upper / "etc" / name, owner.st_uid, owner.st_gid)
    for number, user in enumerate(lab.users, USER_ID):
        _write_home(lab, upper / "home" / user, number, base)
    _write_host_keys(upper / "etc/ssh")


def _write(path: Path, mode: int, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)


def _write_home(lab: Lab, home: Path, owner: int, base: Path) -> None:
    shutil.copytree(base / "etc/skel", home)
    if not lab.bare:
        public_key = (lab.state / "control.ssh/id_ed25519.pub").read_text()
        (home / ".ssh").mkdir(mode=0o700)
        _write(home / ".ssh/authorized_keys", 0o600, public_key)
    for path in [home, *home.rglob("*")]:
        os.chown(path, owner, owner)


def _write_host_keys(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in HOST_KEY_TYPES:
        _keygen(kind, folder / f"ssh_host_{kind}_key", "root@lab")


def _keygen(kind: str, path: Path, comment: str) -> None:
    run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", comment, "-f", str(path)])


def known_hosts(lab: Lab) -> str:
    """Lines for the host keys of all nodes, by address and by name."""
    lines = []
    for node in lab.nodes:
        for kind in HOST_KEY_TYPES:
            key = (node.disk / f"upper/etc/ssh/ssh_host_{kind}_key.pub").read_text()
            lines.append(f"{node.address},{node.name} {' '.join(key.split()[:2])}\n")
    return "".join(lines)


def write_control_keys(lab: Lab) -> None:
    """Makes the folders that replace ~/.ssh on the control machine and the stranger's."""
    for place in ("control", "stranger"):
        (lab.state / f"{place}.ssh").mkdir(mode=0o700)
    if not lab.bare:
        _keygen("ed25519", lab.state / "control.ssh/id_ed25519", "control@lab")


def remove(lab: str, disks: Path) -> None:
    """Removes the disks of a lab, unless something is mounted there."""
    folder = disks / lab
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    busy = [point for point in mounts if Path(point).is_relative_to(folder)]
    if busy:
        raise LabError(f"{busy[0]} is mounted below {folder}: unmount it, then run down again")
    if folder.exists():
        shutil.rmtree(folder)
