"""A machine of the lab that lies: where tests/lab/standins/standin-liar.py is put there."""

from pathlib import Path

LIAR = Path(__file__).parent / "standins" / "standin-liar.py"
PLACE = "/opt/standin"
LYING = f"test -e {PLACE}/lie && exec /usr/bin/python3.11 {PLACE}/liar.py"
# The guard is the one thing that the launcher starts by this name with a path.
PYTHON3 = f"""#!/bin/sh
case "$2" in */launcher/node) {LYING} guard "$@" ;; esac
exec /usr/bin/python3.11 "$@"
"""
ENVIRONMENT = f"""#!/bin/sh
case "$*" in "-IB -") {LYING} answer "$@" ;; esac
exec {PLACE}/honest "$@"
"""
# The user's PATH has /usr/local/bin first.
HEAD = f"""#!/bin/sh
{LYING} head "$@"
exec /usr/bin/head "$@"
"""


def install(lab, node: int) -> None:
    """After chaos_standin.install: this machine lies where a file says how."""
    lab.ssh(node, f"cat > {PLACE}/liar.py", input=LIAR.read_text())
    lab.ssh(node, f"mv {PLACE}/python {PLACE}/honest")
    files = {"/usr/bin/python3": PYTHON3, f"{PLACE}/python": ENVIRONMENT}
    files["/usr/local/bin/head"] = HEAD
    for path, text in files.items():
        lab.admin(node, f"sudo sh -c 'rm -f {path}; cat > {path}; chmod 755 {path}'", input=text)


def tell(lab, node: int, lie: str, precious: Path) -> None:
    """From here on it lies in this way; `precious` is a file of the control node."""
    lab.ssh(node, f"cat > {PLACE}/precious", input=str(precious))
    lab.ssh(node, f"cat > {PLACE}/lie", input=lie)


def mend(lab, node: int) -> None:
    lab.ssh(node, f"rm -f {PLACE}/lie")
