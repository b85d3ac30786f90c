"""Debian packages for machines of a lab, which have no way out: a folder on each that apt reads."""

import hashlib
import subprocess
from pathlib import Path

CACHE = Path("/var/cache/tandem-lab/archives")
SOURCE = """
echo 'deb [trusted=yes] file:/var/local/debs ./' | sudo tee /etc/apt/sources.list
sudo apt-get -q update
"""


def give_packages(lab, nodes: list[int], *packages: str) -> None:
    """Lets apt on `nodes` install `packages` and what they need there."""
    status = CACHE / f"status-{lab.name}"
    CACHE.mkdir(parents=True, exist_ok=True)
    status.write_text(lab.ssh(nodes[0], "cat /var/lib/dpkg/status"))
    folder = _gather(status, *packages)
    status.unlink()
    for node in nodes:
        unpack = f"ssh tandem@192.168.56.{110 + node} 'sudo mkdir -p /var/local/debs && "
        unpack += "sudo tar -x -C /var/local/debs'"
        lab.control("sh", "-c", f"tar -C {folder} -c . | {unpack}")
        lab.ssh(node, SOURCE)


def _gather(status: Path, *packages: str) -> Path:
    """A folder that apt reads: `packages` and what a machine lacks for them.

    status: a copy of the machine's /var/lib/dpkg/status.
    This machine downloads; what was downloaded before is kept.
    """
    options = ["-o", f"Dir::State::status={status}", "-o", "APT::Install-Recommends=false"]
    plan = ["apt-get", "--simulate", *options, "install", *packages]
    lines = subprocess.run(plan, check=True, capture_output=True, text=True).stdout.splitlines()
    wanted = [line.split()[1] for line in lines if line.startswith("Inst ")]
    folder = CACHE / hashlib.sha256(" ".join(lines).encode()).hexdigest()[:12]
    if not (folder / "Packages").exists():
        folder.mkdir(parents=True, exist_ok=True)
        download = ["apt-get", "-o", "APT::Sandbox::User=root", "download", *wanted]
        subprocess.run(download, check=True, cwd=folder, capture_output=True)
        (folder / "Packages").write_text(index_of(folder))
    return folder


def index_of(folder: Path) -> str:
    """The index of an archive: an entry for each package of `folder`."""
    stanzas = []
    for deb in sorted(folder.glob("*.deb")):
        fields = subprocess.run(["dpkg-deb", "--field", deb], check=True, capture_output=True)
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        place = f"Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n"
        stanzas.append(fields.stdout.decode() + place)
    return "\n".join(stanzas)
