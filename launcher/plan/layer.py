"""The packages of a script's requirements.txt: a layer above the stack's environment, made here
once and sent to all machines, so that it is the same on each of them.

pip on this machine resolves for the machines' Python, and only wheels are taken: pip may start no
other program, so nothing is built here, and a machine needs neither pip nor internet. What the
environment has is offered to pip as wheels without contents, under its own versions and a local
label: so pip keeps those where it can, downloads none of them, and cannot replace torch or CUDA.
The layer is a folder of unpacked wheels on PYTHONPATH, kept here and on the machines under a hash
of what was asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contract import validate
from contract.errors import UserError
from contract.locks import open_lock
from contract.options import path_of
from contract.validate import Each, Invalid, Match
from launcher.folders import relative
from launcher.machines.inventory import CHECKOUT
from launcher.node.machine import tree_sha256
from launcher.plan.code import Code
from launcher.plan.requirements import texts

CACHE, BUNDLE = CHECKOUT / ".tandem/layers", CHECKOUT / "bundle/layers"
FOLDER = "layers"  # below node_dir
DAYS = 30  # after its last use a layer is thrown away, here and on the machines
MOST_BYTES = 1 << 30
LABEL = "stack"
NEWEST_GLIBC = 28  # 2.28: wheels for newer ones would not run on all that site.yml sets up
# What belongs to the stack: a script's layer neither replaces nor adds any of it.
STACKS = re.compile(r"torch|torchvision|pytorch-triton|triton|apex|nvidia-.*|cuda-.*")
SHA256 = Match("[0-9a-f]{64}")
RECORD = {"sha256": SHA256, "packages": Each(str), "provided": Each(str)}
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
ERRORS = re.compile(r"^ERROR: (.*)", re.MULTILINE)
# pip may start no other program, so that it builds nothing, whatever leads it to a source: an
# option or an address in the file, or what a package says that it needs.
NOT_BUILT = "nothing is built here"
ONLY_WHEELS = f"""
import runpy, sys
def refuse(event, _):
    if event in ("subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "os.system"):
        raise PermissionError({NOT_BUILT!r})
sys.addaudithook(refuse)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
COLLECTED = re.compile(r"^ *(?:Collecting|Processing) (\S+)", re.MULTILINE)
CAUSE = re.compile(r"The conflict is caused by:\n((?: +\S.*\n?)+)")


@dataclass(frozen=True)
class Environment:
    """What machines have: Python 3.11, the minor number of their glibc 2.x, and their packages by
    their canonical names."""

    python: str
    glibc: int
    packages: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, python: str, glibc: int, packages: Mapping[str, str]) -> Environment:
        minor = ".".join(python.split(".")[:2])
        # A machine may tell any name; of these files are made here.
        real = {name: version for name, version in packages.items() if NAME.fullmatch(name)}
        named = sorted((canonical(name), version) for name, version in real.items())
        return cls(minor, min(glibc, NEWEST_GLIBC), tuple(named))


@dataclass(frozen=True)
class Layer:
    """`key`: a hash of what was asked for; `sha256`: of its files; `packages` are in it, `provided`
    are those that it needs of the environment, by name with their versions."""

    key: str
    sha256: str
    packages: dict[str, str]
    provided: dict[str, str]

    @property
    def tree(self) -> Path:
        return CACHE / self.key / "tree"

    def code(self) -> Code:
        """What is sent."""
        files = (path for path in self.tree.rglob("*") if path.is_file())
        names = sorted(str(path.relative_to(self.tree)) for path in files)
        return Code(tuple(names), self.sha256, None, "", self.tree)

    def modules(self) -> set[str]:
        """What can be imported from it."""
        return {path.name.partition(".")[0] for path in self.tree.iterdir()}

    def differs(self, packages: Mapping[str, str]) -> list[str]:
        """What a machine with these packages has not, or not in this version."""
        there = {canonical(name): version for name, version in packages.items()}
        return [
            f"{name} {version}"
            for name, version in self.provided.items()
            if there.get(name) != version
        ]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def key_of(requirements: Path, environment: Environment) -> str:
    """It depends on the file, on those that it names and on what decides which wheels fit; the
    stack's own packages stand for all of the environment. Raises UserError."""
    stacks = [one for one in environment.packages if STACKS.fullmatch(one[0])]
    text, *others = texts(requirements)
    asked = [text, environment.python, environment.glibc, stacks, *others]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def of(requirements: Path, environment: Environment) -> Layer:
    """The layer, made if it is not kept here already. Raises UserError."""
    key = key_of(requirements, environment)
    with _alone():
        kept = _kept(key)
        if kept is None:
            gathered = BUNDLE / key
            if not (gathered / "lock.txt").is_file():
                gathered = CACHE / f"{key}.wheels"
                gather(requirements, environment, gathered)
            kept = _built(key, gathered, environment)
            shutil.rmtree(CACHE / f"{key}.wheels", ignore_errors=True)
        os.utime(CACHE / key)
        throw_away(CACHE)
    return kept


def bundle(requirements: Path, environment: Environment) -> Path:
    """Gather the same into the bundle, for a day without internet; returns its folder there. Raises
    UserError."""
    folder = BUNDLE / key_of(requirements, environment)
    with _alone():
        if not (folder / "lock.txt").is_file():
            gather(requirements, environment, folder)
    return folder


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One launcher of a checkout at a time makes layers: a second waits, then finds them made.
    Raises UserError where the disk fails."""
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with open_lock(CACHE / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        named = error.filename or CACHE
        raise UserError(
            f"the packages of the script could not be kept: {named}: {error.strerror or error}"
        ) from None


def throw_away(cache: Path) -> None:
    """Remove the layers that nobody used for DAYS."""
    for path in cache.iterdir():
        if path.stat().st_mtime < time.time() - DAYS * 86400:
            shutil.rmtree(path, ignore_errors=True)


def _kept(key: str) -> Layer | None:
    try:
        found = json.loads((CACHE / key / "layer.json").read_text(encoding="utf-8"))
        layer = Layer(key, **validate.check(found, RECORD, "layer"))
    except (OSError, ValueError, Invalid):
        return None
    return layer if tree_sha256(layer.tree) == layer.sha256 else None


def gather(requirements: Path, environment: Environment, folder: Path) -> None:
    """Bring the wheels and a lock of them into `folder`. Raises UserError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="tandem-layer-") as scratch:
        chosen = _resolved(requirements, environment, Path(scratch))
    provided = {name: version for name, version, url, _ in chosen if not url}
    taken = [one for one in chosen if one[2]]
    wrong = [f"{name} {version}" for name, version, *_ in taken if STACKS.fullmatch(name)]
    if wrong:
        raise UserError(
            f"{relative(requirements)} would bring {', '.join(wrong)}, and torch and CUDA are the "
            f"stack's alone ({_stack(environment)}): ask for packages that use what it has."
        )
    lines = [f"{name} @ {url} --hash=sha256:{digest}" for name, _, url, digest in taken]
    wanted = folder / "wanted.txt"
    wanted.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if taken:
        words = ["download", "--no-deps", "--dest", str(folder / "wheels")]
        _pip([*words, *_target(environment), "--requirement", str(wanted)], requirements)
    record = {"packages": {name: version for name, version, *_ in taken}, "provided": provided}
    (folder / "record.json").write_text(json.dumps(record), encoding="utf-8")
    lock = [f"{name}=={version} --hash=sha256:{digest}" for name, version, _, digest in taken]
    (folder / "lock.txt").write_text("\n".join(lock) + "\n", encoding="utf-8")  # the last: whole


def _resolved(
    requirements: Path, environment: Environment, scratch: Path
) -> list[tuple[str, str, str, str]]:
    """(name, version, address, SHA-256) of what the requirements come to; what the environment
    provides has no address. Raises UserError."""
    stubs = scratch / "stubs"
    stubs.mkdir()
    for name, version in environment.packages:
        _stub(stubs, name, version)
    report = scratch / "report.json"
    hashed = any("--hash" in text for text in texts(requirements))
    words = ["install", "--dry-run", "--ignore-installed", "--report", str(report)]
    words += ["--target", str(scratch / "none"), *_target(environment)]
    # A file with hashes is complete, and so is what it names.
    words += ["--no-deps", "--require-hashes"] if hashed else ["--find-links", str(stubs)]
    words += ["--requirement", str(requirements)]
    if hashed:
        _pip(words, requirements)
    else:
        stacks = [one for one in environment.packages if STACKS.fullmatch(one[0])]
        # What the environment has is kept where it can be, and torch and CUDA in any case.
        for last, held in ((False, environment.packages), (True, stacks)):
            limits = scratch / "constraints.txt"
            limits.write_text("".join(f"{n}=={_labelled(v)}\n" for n, v in held), encoding="utf-8")
            if _pip([*words, "--constraint", str(limits)], requirements, not last) is None:
                break
    chosen = [_entry(one) for one in json.loads(report.read_text(encoding="utf-8"))["install"]]
    there = dict(environment.packages)
    same = {name for name, version, *_ in chosen if there.get(name) == version}
    return [(n, v, "" if n in same else url, digest) for n, v, url, digest in chosen]


def _entry(one: Mapping[str, Any]) -> tuple[str, str, str, str]:
    name, version = canonical(one["metadata"]["name"]), one["metadata"]["version"]
    own = re.sub(rf"[+.]{LABEL}$", "", version)
    address = one["download_info"]
    archive = address.get("archive_info", {})
    # pip before 23.1, which is Debian 12's, gives one digest, as "sha256=...".
    digest = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").partition("=")[2]
    return name, own, "" if own != version else address["url"], digest


def _labelled(version: str) -> str:
    return f"{version}{'.' if '+' in version else '+'}{LABEL}"


def _stub(folder: Path, name: str, version: str) -> None:
    """A wheel of this name and version with nothing in it."""
    stem = f"{name.replace('-', '_')}-{_labelled(version)}"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {_labelled(version)}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: tandem\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as made:
        made.writestr(f"{stem}.dist-info/METADATA", about)
        made.writestr(f"{stem}.dist-info/WHEEL", wheel)
        made.writestr(f"{stem}.dist-info/RECORD", "")


def _target(environment: Environment) -> list[str]:
    """Options of pip by which it works for the machines rather than for this one."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(environment.glibc, 4, -1)]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    words = ["--only-binary", ":all:", "--implementation", "cp"]
    words += ["--python-version", environment.python]
    return [*words, *(word for tag in tags for word in ("--platform", tag))]


def _built(key: str, gathered: Path, environment: Environment) -> Layer:
    """Unpack the wheels into the cache. Raises UserError."""
    target = CACHE / key
    fresh = CACHE / f".{key}.{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    tree = fresh / "tree"
    tree.mkdir(parents=True)
    try:
        record = json.loads((gathered / "record.json").read_text(encoding="utf-8"))
        if record["packages"]:
            words = ["install", "--no-deps", "--no-index", "--no-compile", "--require-hashes"]
            words += ["--find-links", str(gathered / "wheels"), "--target", str(tree)]
            lock = gathered / "lock.txt"
            _pip([*words, *_target(environment), "--requirement", str(lock)], lock)
        size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
        if size > MOST_BYTES:
            raise UserError(
                f"the packages of the script have {size >> 20} MiB, and a layer has up to "
                f"{MOST_BYTES >> 20}: ask for fewer."
            )
        layer = Layer(key, tree_sha256(tree) or "", record["packages"], record["provided"])
        own = {name: value for name, value in asdict(layer).items() if name != "key"}
        (fresh / "layer.json").write_text(json.dumps(own), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        fresh.replace(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return layer


def _pip(words: Sequence[str], asked: Path, may_conflict: bool = False) -> str | None:
    """Run pip; what it said where requirements contradict each other, if they `may_conflict`,
    else None. Raises UserError."""
    argv = [sys.executable, "-c", ONLY_WHEELS, *words, "--disable-pip-version-check"]
    done = subprocess.run(
        [*argv, "--no-input"], capture_output=True, text=True, check=False, cwd=CHECKOUT
    )
    if done.returncode == 0:
        return None
    said = f"{done.stdout}\n{done.stderr}"
    contradict = "ResolutionImpossible" in said
    if contradict and may_conflict:
        return said
    raise UserError(_why(said, asked, contradict))


def _why(said: str, asked: Path, contradict: bool) -> str:
    """What pip said, as one sentence."""
    listed = CAUSE.search(said)
    if contradict and listed:
        lines = [
            line.strip().removeprefix("The user requested ") for line in listed[1].splitlines()
        ]
        held = [one.removeprefix("(constraint) ") for one in lines if "(constraint)" in one]
        wanted = "; ".join(one for one in lines if one and "(constraint)" not in one)
        if not held:
            return f"{relative(asked)}: these contradict each other: {wanted}: correct the file."
        stacks = ", ".join(re.sub(rf"[+.]{LABEL}\b", "", one).replace("==", " ") for one in held)
        return (
            f"{relative(asked)}: {wanted} would replace {stacks}, which the stack has, and torch "
            "and CUDA are never touched: ask for a version that fits."
        )
    if NOT_BUILT in said:
        source = (COLLECTED.findall(said) or ["a package"])[-1].rstrip("@").rpartition("/")[2]
        return (
            f"{relative(asked)}: {source} comes as its source, which runs code of its own as it is "
            "built, and only wheels are taken: where you trust it, make its wheel yourself (`pip "
            "wheel --wheel-dir FOLDER ...`) and add a line `--find-links FOLDER`."
        )
    lines = ERRORS.findall(said) or said.strip().splitlines() or ["pip said nothing"]
    why = re.sub(rf"[+.]{LABEL}\b", "", lines[-1]).rstrip(".")
    return (
        f"{relative(asked)} cannot be gathered: {why}: only wheels are taken, so that nothing is "
        "built; correct the file, or see that this machine has internet (`make bundle SCRIPT=...` "
        "gathers it beforehand)."
    )


def _stack(environment: Environment) -> str:
    return ", ".join(
        f"{name} {version}" for name, version in environment.packages if name in ("torch", "apex")
    )


def beside(script: Iterable[Path], named: str | None) -> Path | None:
    """The file that REQUIREMENTS= names, else requirements.txt in the first of these folders that
    has one; None for none. Raises UserError."""
    if named:
        path = path_of("REQUIREMENTS", named)
        if not path.is_file():
            raise UserError(f"REQUIREMENTS={named}: there is no file {path}.")
        return path
    files = (folder / "requirements.txt" for folder in script)
    return next((path for path in files if path.is_file()), None)
