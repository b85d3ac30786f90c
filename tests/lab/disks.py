"""What differs on a node's disk from the base: the upper folder of its overlay has every file."""

import hashlib
from pathlib import Path

# What any machine changes by itself, and what Ansible leaves in its user's home for its own use.
RESTLESS = ("var/log/", "var/lib/systemd/", "var/lib/chrony/", "var/cache/", "var/tmp/", "tmp/",
            "run/", "root/", "home/tandem/.ansible/", "etc/.updated", "var/.updated")  # fmt: skip


def changed_files(lab, node: int, besides: tuple[str, ...] = ()) -> dict[str, str]:
    """{path: digest} of a node's disk, without RESTLESS and without what begins as in `besides`."""
    upper = Path("/var/lib/tandem-lab") / lab.name / f"node{node}" / "upper"
    assert upper.is_dir()
    found = {}
    for path in upper.rglob("*"):
        name = str(path.relative_to(upper))
        if name.startswith((*RESTLESS, *besides)) or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "removed"
    return found
