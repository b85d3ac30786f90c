"""Nodes that need no torch: an environment whose launch and trainer are stand-ins."""

from pathlib import Path

LAUNCH = Path(__file__).parents[1] / "unit" / "launcher" / "launcher_python.py"
TRAINER = """
import os, signal, subprocess, sys, time
def leave(*_): print("saved", flush=True); sys.exit(75)
signal.signal(signal.SIGTERM, leave)
# A loader with a session of its own, as some make: the run's end must find it, too.
subprocess.Popen(["sleep", "7777"], start_new_session=True)
print("training", flush=True)
time.sleep(float(os.environ["SECONDS_TO_TRAIN"]) if os.environ["TANDEM_ATTEMPT"] == "1" else 1)
"""
PYTHON = """#!/bin/sh
export TANDEM_TEST_PYTHON=/opt/standin/real TANDEM_TEST_SCRIPT=/opt/standin/trainer.py
exec /usr/bin/python3 /opt/standin/launch.py "$@"
"""
# -I would hide the packages' metadata that stands for torch.
REAL = """#!/bin/sh
[ "$1" = -IB ] && shift && set -- -B "$@"
PYTHONPATH=/opt/standin/lib exec /usr/bin/python3 "$@"
"""
PACKAGES = {"torch": "2.15.0", "torchvision": "0.29.2"}
ALIVE = (
    "ps -eo args | grep -E '^sleep 7777|[l]auncher/node|/opt/standin/' | grep -vc 'grep' || true"
)


def install(lab, node: int) -> None:
    """The environment at /opt/standin/python and two images at /srv/standin."""
    lab.ssh(node, "sudo install -d -o tandem /opt/standin /srv/standin")
    files = {"python": PYTHON, "real": REAL, "trainer.py": TRAINER, "launch.py": LAUNCH.read_text()}
    for name, text in files.items():
        lab.ssh(node, f"cat > /opt/standin/{name} && chmod +x /opt/standin/{name}", input=text)
    for name, version in PACKAGES.items():
        info = f"/opt/standin/lib/{name}-{version}.dist-info"
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        lab.ssh(node, f"mkdir -p {info} && cat > {info}/METADATA", input=text)
    for split in ("train", "val"):
        lab.ssh(node, f"mkdir -p /srv/standin/d/{split}/a && touch /srv/standin/d/{split}/a/1.png")


def inventory(folder: Path, nodes: int, seconds: int) -> Path:
    settings = (
        f"ansible_user=tandem env_python=/opt/standin/python data_root=/srv/standin "
        f"""run_env='{{"SECONDS_TO_TRAIN": "{seconds}"}}'"""
    )
    lines = [f"node{n} ansible_host=192.168.56.{110 + n} {settings}" for n in range(1, nodes + 1)]
    file = folder / "chaos.ini"
    file.write_text("\n".join(["[cluster]", *lines, ""]))
    return file


def alive(lab, node: int) -> int:
    """Processes of a run on a node."""
    return int(lab.ssh(node, ALIVE))
