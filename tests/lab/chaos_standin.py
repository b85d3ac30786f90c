"""Nodes that need no torch: an environment whose launch and trainer are stand-ins."""

import shlex
from pathlib import Path

HERE = Path(__file__).parent
LAUNCH = HERE.parent / "unit" / "launcher" / "launcher_python.py"
TRAINER = HERE / "standin_trainer.py"
PYTHON = """#!/bin/sh
export TANDEM_TEST_PYTHON=/opt/standin/real TANDEM_TEST_SCRIPT=/opt/standin/trainer.py
exec /usr/bin/python3 /opt/standin/launch.py "$@"
"""
# -I would hide the packages' metadata that stands for torch.
REAL = """#!/bin/sh
[ "$1" = -IB ] && shift && set -- -B "$@"
PYTHONPATH=/opt/standin/lib exec /usr/bin/python3 "$@"
"""
# GPUs, where a machine has any, would need a torch that was built for CUDA.
VERSION = "cuda: Optional[str] = '13.2'\n"
PACKAGES = {"torch": "2.15.0", "torchvision": "0.29.2"}


def install(lab, node: int) -> None:
    """The environment at /opt/standin/python and two images at /srv/standin."""
    lab.admin(node, "sudo install -d -o tandem /opt/standin /srv/standin")
    texts = {"launch.py": LAUNCH.read_text(), "trainer.py": TRAINER.read_text()}
    files = {"python": PYTHON, "real": REAL, **texts}
    for name, text in files.items():
        lab.ssh(node, f"cat > /opt/standin/{name} && chmod +x /opt/standin/{name}", input=text)
    for name, version in PACKAGES.items():
        info = f"/opt/standin/lib/{name}-{version}.dist-info"
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        lab.ssh(node, f"mkdir -p {info} && cat > {info}/METADATA", input=text)
    torch = "/opt/standin/lib/torch"
    lab.ssh(node, f"mkdir -p {torch} && cat > {torch}/version.py", input=VERSION)
    # Two classes, and more images than a batch of the usual size takes on the nodes of a test.
    for folder in (f"/srv/standin/d/{split}/{name}" for split in ("train", "val") for name in "ab"):
        lab.ssh(node, f"mkdir -p {folder} && touch $(seq -f {folder}/%g.png 200)")


def take_sudo(lab, node: int, way: str) -> None:
    """Who trains has no sudo from here on: its guards are services of its own manager (`way` is
    service, as role base sets it up) or live by wardens (where there is no such manager)."""
    lingers = "loginctl enable-linger tandem"
    none = "loginctl disable-linger tandem; systemctl mask --now user@$(id -u tandem).service"
    line = f"sed -i '/^tandem /d' /etc/sudoers.d/tandem; {lingers if way == 'service' else none}"
    lab.admin(node, f"sudo sh -c {shlex.quote(line)}")


def inventory(folder: Path, nodes: int, mark: str, step_seconds: float) -> Path:
    """An inventory of stand-in nodes whose runs carry the variable `mark`."""
    name, _, value = mark.partition("=")
    settings = (
        "ansible_user=tandem-admin train_user=tandem "
        "env_python=/opt/standin/python data_root=/srv/standin "
        f"""run_env='{{"{name}": "{value}", "STEP_SECONDS": "{step_seconds}"}}'"""
    )
    lines = [f"node{n} ansible_host=192.168.56.{110 + n} {settings}" for n in range(1, nodes + 1)]
    file = folder / "standin.ini"
    file.write_text("\n".join(["[cluster]", *lines, ""]))
    return file
