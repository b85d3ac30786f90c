"""Download the wheels of a lock for machines without internet: `make bundle`.

pip fetches each wheel for the target's Python and C library, and checks its hash. Role python_env
installs the wheels from the folder.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bundling import manifest, table
from bundling.table import ANSIBLE
from contract.errors import UserError


@dataclass(frozen=True)
class Requirement:
    """A line of a lock: a package, its version, and the SHA-256 of each of its files."""

    name: str
    version: str
    hashes: frozenset[str]

    def line(self):
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in sorted(self.hashes))
        return f"{self.name}=={self.version} {hashes}\n"


@dataclass(frozen=True)
class Wheels:
    """An order: the wheels of a lock for a Python and a C library, and their folder."""

    lock: Path
    python: str
    glibc: str
    folder: Path
    index_url: str

    def purpose(self):
        return f"lock {hashlib.sha256(self.lock.read_bytes()).hexdigest()}"


def plan(stack, python, index_url, bundle):
    """Plan the wheels for a row of stacks.yml; `python` "": the row's first. Raises UserError."""
    row = table.row(table.read(), stack)
    python = python or row["python"][0]
    if python not in row["python"]:
        raise UserError(
            f"stack {stack} has no lock for Python {python}, only for {', '.join(row['python'])}"
        )
    name = f"{row['lock']}-py{python}"
    return Wheels(
        lock=ANSIBLE / "locks" / f"{name}.txt",
        python=python,
        glibc=row["glibc"],
        folder=bundle / "wheels" / name,
        index_url=index_url,
    )


def plan_apex_tools(index_url, bundle):
    """Plan setuptools and wheel for building apex, in versions that torch 1.12 supports."""
    # Both are pure Python, so the wheels for 3.9 run on every newer Python.
    lock, folder = ANSIBLE / "locks" / "apex-build.txt", bundle / "wheels" / "apex-build"
    return Wheels(lock=lock, python="3.9", glibc="2.17", folder=folder, index_url=index_url)


def parse_lock(text):
    """Read the requirements of a lock that `uv pip compile --generate-hashes` wrote."""
    # numpy==1.26.4 \
    #     --hash=sha256:0123... \
    #     --hash=sha256:4567...
    joined = text.replace("\\\n", " ")
    requirements = []
    for line in joined.splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)==(\S+)", line)
        if match:
            hashes = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
            requirements.append(Requirement(match[1], match[2], hashes))
    return requirements


def platforms(glibc):
    """List pip's platform tags for a C library: "2.28" -> manylinux_2_28 ... manylinux1."""
    # A machine with glibc 2.28 runs wheels for every older glibc.
    newest = int(glibc.split(".")[1])
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(newest, 4, -1)]
    older = {"manylinux2014_x86_64": 17, "manylinux2010_x86_64": 12, "manylinux1_x86_64": 5}
    return tags + [tag for tag, minor in older.items() if minor <= newest]


def fetch(requirement, order):
    """Fetch one wheel with pip, which checks its hash. Raises UserError with pip's last line."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirement.line())
        file.flush()
        # pip accepts hashes only in a file of requirements.
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        argv += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
        argv += ["--python-version", order.python, "--implementation", "cp"]
        for tag in platforms(order.glibc):
            argv += ["--platform", tag]
        argv += ["--index-url", order.index_url, "--dest", str(order.folder), "-r", file.name]
        process = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if process.returncode:
        lines = [line for line in process.stdout.splitlines() if line.strip()] or ["nothing"]
        raise UserError(
            f"{requirement.name} {requirement.version} could not be downloaded from "
            f"{order.index_url}; pip printed: {lines[-1]}. Run the same command again: it "
            "continues with the missing wheels"
        )


def gather(order, progress):
    """Fetch the wheels of an order, unless the folder is complete. Raises UserError."""
    if manifest.is_complete(order.folder, order.purpose()):
        return
    order.folder.mkdir(parents=True, exist_ok=True)
    # The folder has no manifest until it is complete.
    (order.folder / manifest.NAME).unlink(missing_ok=True)
    present = {manifest.sha256(path) for path in order.folder.glob("*.whl")}
    requirements = parse_lock(order.lock.read_text())
    with progress.bar(f"wheels {order.folder.name}", len(requirements), "wheel") as advance:
        for number, requirement in enumerate(requirements, 1):
            if not requirement.hashes & present:
                progress.say(
                    f"wheels: {number}/{len(requirements)} {requirement.name} {requirement.version}"
                )
                fetch(requirement, order)
            advance(1)
    # Wheels of an earlier lock are removed, since machines install whatever the manifest lists.
    hashes = frozenset().union(*(requirement.hashes for requirement in requirements))
    digests = {path.name: manifest.sha256(path) for path in sorted(order.folder.glob("*.whl"))}
    for name in [name for name, digest in digests.items() if digest not in hashes]:
        (order.folder / name).unlink()
        del digests[name]
    manifest.write(order.folder, order.purpose(), digests)
