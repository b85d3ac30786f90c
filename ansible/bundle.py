"""Gathers into bundle/ what machines without internet need: `python ansible/bundle.py --stack cpu`.

Resumable: a wheel that is there with the right hash is not fetched again. The manifest is written
last, so that a folder with one is complete; its first line names the lock it was gathered for.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

ANSIBLE = Path(__file__).resolve().parent
BUNDLE = ANSIBLE.parent / "bundle"
MANIFEST = "MANIFEST.sha256"


class BundleError(Exception):
    """A sentence for the user."""


@dataclass(frozen=True)
class Requirement:
    """One line of a lock: a package, its version, and the SHA-256 of each file that may be it."""

    name: str
    version: str
    hashes: frozenset

    def line(self):
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in sorted(self.hashes))
        return f"{self.name}=={self.version} {hashes}\n"


@dataclass(frozen=True)
class Plan:
    """Which wheels, for which Python and C library, into which folder."""

    lock: Path
    python: str
    glibc: str
    folder: Path
    index_url: str

    def lock_sha256(self):
        return hashlib.sha256(self.lock.read_bytes()).hexdigest()


def plan(stack, python, index_url, bundle=BUNDLE):
    """The plan for a row of stacks.yml; an empty `python`: the row's first. Raises BundleError."""
    rows = yaml.safe_load((ANSIBLE / "stacks.yml").read_text())["stacks"]["rows"]
    if stack not in rows:
        raise BundleError(
            f"stack {stack!r} is not in ansible/stacks.yml, which has {', '.join(rows)}"
        )
    row = rows[stack]
    python = python or row["python"][0]
    if python not in row["python"]:
        raise BundleError(
            f"stack {stack} has no lock for Python {python}, only for {', '.join(row['python'])}"
        )
    name = f"{row['lock']}-py{python}"
    return Plan(
        lock=ANSIBLE / "locks" / f"{name}.txt",
        python=python,
        glibc=row["glibc"],
        folder=bundle / "wheels" / name,
        index_url=index_url,
    )


def parse_lock(text):
    """The requirements of a lock as `uv pip compile --generate-hashes` writes it."""
    joined = text.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)==(\S+)", line)
        if match:
            hashes = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
            found.append(Requirement(match[1], match[2], hashes))
    return found


def platforms(glibc):
    """pip's platform tags for a C library, "2.28" -> manylinux_2_28 ... manylinux1."""
    newest = int(glibc.split(".")[1])
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(newest, 4, -1)]
    older = {"manylinux2014_x86_64": 17, "manylinux2010_x86_64": 12, "manylinux1_x86_64": 5}
    return tags + [tag for tag, minor in older.items() if minor <= newest]


def sha256(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch(requirement, order):
    """One wheel by pip, which checks its hash. Raises BundleError with pip's last words."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirement.line())
        file.flush()
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        argv += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
        argv += ["--python-version", order.python, "--implementation", "cp"]
        for tag in platforms(order.glibc):
            argv += ["--platform", tag]
        argv += ["--index-url", order.index_url, "--dest", str(order.folder), "-r", file.name]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        said = [line for line in done.stdout.splitlines() if line.strip()] or ["nothing"]
        raise BundleError(
            f"{requirement.name} {requirement.version} could not be fetched from "
            f"{order.index_url}; pip said: {said[-1]}. Run the same command again: what is there "
            "already is kept"
        )


def is_complete(order):
    """Whether the manifest is of this lock and each of its files is there."""
    manifest = order.folder / MANIFEST
    if not manifest.is_file():
        return False
    first, *lines = manifest.read_text().splitlines()
    if first != f"# lock {order.lock_sha256()}":
        return False
    return all((order.folder / line.split("  ")[1]).is_file() for line in lines)


def gather(order, say=print):
    """Carries the plan out."""
    order.folder.mkdir(parents=True, exist_ok=True)
    (order.folder / MANIFEST).unlink(missing_ok=True)
    there = {sha256(path): path.name for path in sorted(order.folder.glob("*.whl"))}
    requirements = parse_lock(order.lock.read_text())
    for number, requirement in enumerate(requirements, 1):
        if not requirement.hashes & set(there):
            say(f"{number}/{len(requirements)} {requirement.name} {requirement.version}")
            fetch(requirement, order)
    there = {path.name: sha256(path) for path in sorted(order.folder.glob("*.whl"))}
    wanted = frozenset().union(*(requirement.hashes for requirement in requirements))
    for name in [name for name, digest in there.items() if digest not in wanted]:
        (order.folder / name).unlink()
        del there[name]
    lines = [
        f"# lock {order.lock_sha256()}",
        *(f"{digest}  {name}" for name, digest in there.items()),
    ]
    (order.folder / MANIFEST).write_text("\n".join(lines) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(description="Gather what machines without internet need.")
    parser.add_argument("--stack", required=True, help="a row of ansible/stacks.yml")
    parser.add_argument("--python", default="", help="for example 3.11; default: the stack's first")
    parser.add_argument("--index-url", default="https://pypi.org/simple", help="package index")
    args = parser.parse_args(argv)
    try:
        order = plan(args.stack, args.python, args.index_url)
        if is_complete(order):
            print(f"{order.folder} is complete already")
            return 0
        gather(order)
    except BundleError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in order.folder.iterdir())
    print(f"{order.folder}: {size / 1e9:.1f} GB, complete")
    return 0


if __name__ == "__main__":
    sys.exit(main())
