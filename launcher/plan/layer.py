"""The packages of a script's requirements.txt: a layer above the stack's environment, made here
once and sent to all machines, so that it is the same on each of them.

uv on this machine resolves for the machines' Python, and takes wheels alone, so nothing is built
and a machine needs neither uv nor internet. What the environment has is offered to uv as wheels
without contents, under its own versions and a local label: so uv prefers those, downloads none of
them, and cannot replace torch or CUDA. The layer is a folder of unpacked wheels on PYTHONPATH, kept
here and on the machines under a hash of what was asked for.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from boundary.run_files import LayerRecord
from boundary.schema import Invalid, decode
from contract.errors import UserError
from contract.options import path_of
from contract.text import open_lock, read_text
from launcher.folders import relative
from launcher.machines.inventory import CHECKOUT
from launcher.node.machine import tree_sha256
from launcher.plan.code import Code
from launcher.problems import Refused, problem

if TYPE_CHECKING:
    from launcher.look import OpenMachines

CACHE, BUNDLE = CHECKOUT / ".tandem/layers", CHECKOUT / "bundle/layers"
FOLDER = "layers"  # below node_dir
SHOWN = 6  # packages that are named
DAYS = 30  # after its last use a layer is thrown away, here and on the machines
MOST_BYTES = 1 << 30
LABEL = "stack"
# The C libraries, glibc 2.x, for which uv chooses wheels: what is between two gets those of the
# lower one. Wheels for newer ones would not run on all that site.yml sets up.
GLIBCS = (28, 17)
# What belongs to the stack: a script's layer neither replaces nor adds any of it.
STACKS = re.compile(r"torch|torchvision|pytorch-triton|triton|apex|nvidia-.*|cuda-.*")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
LOCKED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*) *(?:==(\S+)|@)")
NAMES = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)", re.MULTILINE)
LABELLED = re.compile(rf"[+.]{LABEL}\b")
NO_WHEEL = re.compile(r"(?:Wheels are required|Building source distributions) for `(\S+)`")
# Settings of pip, which has the mirror of whoever has one, and uv's names of them.
SETTINGS = {"index-url": "--default-index", "extra-index-url": "--index"}
SETTINGS.update({"find-links": "--find-links", "trusted-host": "--allow-insecure-host"})


@dataclass(frozen=True)
class Environment:
    """What machines have: Python 3.11, that of GLIBCS which suits their glibc, and their packages
    by their canonical names."""

    python: str
    glibc: int
    packages: tuple[tuple[str, str], ...]
    architecture: str = "x86_64"

    @classmethod
    def of(
        cls, python: str, glibc: int, packages: Mapping[str, str], architecture: str = "x86_64"
    ) -> Environment:
        minor = ".".join(python.split(".")[:2])
        # A machine may tell any name; of these files are made here.
        real = {name: version for name, version in packages.items() if NAME.fullmatch(name)}
        named = sorted((canonical(name), version) for name, version in real.items())
        suitable = max([GLIBCS[-1], *(wheels for wheels in GLIBCS if wheels <= glibc)])
        return cls(minor, suitable, tuple(named), architecture)


@dataclass(frozen=True)
class Layer:
    """`tree` is named by a hash of what was asked for; `sha256`: of its files; `packages` are in
    it, `provided` are those that it needs of the environment, by name with their versions."""

    tree: Path
    sha256: str
    packages: dict[str, str]
    provided: dict[str, str]

    @property
    def folder(self) -> str:
        """On a machine, below node_dir."""
        return self.code().folder

    def code(self) -> Code:
        """What is sent."""
        files = (path for path in self.tree.rglob("*") if path.is_file())
        names = sorted(str(path.relative_to(self.tree)) for path in files)
        return Code(tuple(names), self.sha256, None, "", self.tree, FOLDER)

    def summary(self) -> str:
        """The first of its packages."""
        first = [f"{name} {version}" for name, version in [*self.packages.items()][:SHOWN]]
        more = len(self.packages) - len(first)
        return f"{', '.join(first)}{f' and {more} more' if more else ''}"

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
    stacks = [package for package in environment.packages if STACKS.fullmatch(package[0])]
    text, *others = texts(requirements)
    about = [environment.python, environment.glibc, environment.architecture]
    asked = [text, *about, stacks, *others]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def of(requirements: Path, environment: Environment, folder: Path | None = None) -> Layer:
    """The layer, made in `folder` (the cache) if it is kept neither there nor in the bundle.
    Raises UserError."""
    key, folder = key_of(requirements, environment), folder or CACHE
    with _alone():
        layer = _kept(BUNDLE / key) or _kept(folder / key)
        layer = layer or _make(requirements, environment, folder / key)
        if layer.tree.is_relative_to(CACHE):
            os.utime(layer.tree.parent)
        throw_away(CACHE)
    return layer


def environment_of(machines: OpenMachines) -> Environment:
    """What packages have to fit, where all have the same Python."""
    facts = [machines.facts[host.name] for host in machines.hosts]
    glibc, first = min(one.glibc for one in facts), facts[0]
    python = str(first.versions.python)
    return Environment.of(python, glibc, first.distributions, first.architecture)


def for_machines(requirements: Path, machines: OpenMachines) -> Layer:
    """The layer for machines that have the same Python. Raises Refused."""
    try:
        return _once(requirements, environment_of(machines))
    except UserError as error:
        raise Refused([problem("script-packages", said=t) for t in error.problems]) from None


@lru_cache(maxsize=1)
def _once(requirements: Path, environment: Environment) -> Layer:
    """However often a run that waits looks at the machines. Raises UserError."""
    return of(requirements, environment)


def bundle(requirements: Path, environment: Environment) -> Path:
    """The layer's folder in the bundle, for a day without internet. Raises UserError."""
    return of(requirements, environment, BUNDLE).tree.parent


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


def _kept(folder: Path) -> Layer | None:
    try:
        record = decode((folder / "layer.json").read_bytes(), LayerRecord, "layer")
        layer = Layer(folder / "tree", **structs.asdict(record))
    except (OSError, ValueError, Invalid):
        return None
    return layer if tree_sha256(layer.tree) == layer.sha256 else None


def _make(requirements: Path, environment: Environment, target: Path) -> Layer:
    """Resolve and unpack the packages into `target`, whole or not at all. Raises UserError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as name:
        scratch = Path(name)
        lock, provided = _locked(requirements, environment, scratch)
        fresh = scratch / "layer"
        tree = fresh / "tree"
        tree.mkdir(parents=True)
        if any(LOCKED.match(line) for line in lock):
            (scratch / "lock.txt").write_text("\n".join(lock) + "\n", encoding="utf-8")
            words = ["install", "--target", str(tree), "--python", sys.executable]
            words += ["--no-deps", "--require-hashes", "-r", str(scratch / "lock.txt")]
            _uv([*words, *_target(environment)], requirements, scratch)
            (tree / ".lock").unlink(missing_ok=True)  # uv's
        size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
        if size > MOST_BYTES:
            raise UserError(
                f"the packages of the script have {size >> 20} MiB, and a layer has up to "
                f"{MOST_BYTES >> 20}: ask for fewer."
            )
        unpacked = importlib.metadata.distributions(path=[str(tree)])
        packages = {canonical(package.metadata["Name"]): package.version for package in unpacked}
        named = [canonical(name) for text in texts(requirements) for name in NAMES.findall(text)]
        # Those that the file names come first.
        packages = {name: packages[name] for name in (*named, *packages) if name in packages}
        sha256 = tree_sha256(tree) or ""
        record = {"packages": packages, "provided": provided, "sha256": sha256}
        (fresh / "layer.json").write_text(json.dumps(record), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        fresh.replace(target)
    return Layer(target / "tree", sha256, packages, provided)


def _locked(
    requirements: Path, environment: Environment, scratch: Path
) -> tuple[list[str], dict[str, str]]:
    """The lines of a lock of what is to be unpacked, and the versions of what the environment has
    of it already. Raises UserError."""
    asked = texts(requirements)
    if any("--hash" in text for text in asked):
        # Such a file is complete, and so is what it names: it is the lock, with its own hashes.
        text = re.sub(r"\\\r?\n", " ", "\n".join(asked))
        lines = [line for line in text.splitlines() if not re.match(r"\s*(-r|-c|--r|--c)", line)]
    else:
        lines = _resolved(requirements, environment, scratch)
    there, wanted, provided, wrong = dict(environment.packages), [], {}, []
    for line in lines:
        match = LOCKED.match(line)
        package = canonical(match[1]) if match else ""
        version = LABELLED.sub("", match[2] or "") if match else ""
        if match and there.get(package) == version:
            provided[package] = version
            continue
        wanted.append(line)
        if STACKS.fullmatch(package):
            wrong.append(f"{package} {version}".rstrip())
    if wrong:
        stack = ", ".join(f"{name} {there[name]}" for name in ("apex", "torch") if name in there)
        raise UserError(
            f"{relative(requirements)} would bring {', '.join(wrong)}, and torch and CUDA are the "
            f"stack's alone ({stack}): ask for packages that use what it has."
        )
    return wanted, provided


def _resolved(requirements: Path, environment: Environment, scratch: Path) -> list[str]:
    """The lines of uv's lock, each package with its hashes on one. Raises UserError."""
    stubs, lock, stack = scratch / "stubs", scratch / "resolved.txt", scratch / "stack.txt"
    stubs.mkdir()
    for name, version in environment.packages:
        _stub(stubs, name, version)
    held = [f"{name}=={_labelled(version)}" for name, version in environment.packages]
    # What a lock has already uv prefers: what the environment has is kept where it can be, and
    # torch and CUDA in any case.
    lock.write_text("\n".join(held) + "\n", encoding="utf-8")
    fixed = [line for line in held if STACKS.fullmatch(line.partition("==")[0])]
    stack.write_text("\n".join(fixed) + "\n", encoding="utf-8")
    words = ["compile", str(requirements), "--output-file", str(lock), "--generate-hashes"]
    words += ["--no-header", "--no-annotate", "--emit-find-links", "--emit-index-url"]
    words += ["--constraint", str(stack), "--find-links", str(stubs)]
    _uv([*words, *_target(environment)], requirements, scratch)
    return re.sub(r"\\\n +", "", lock.read_text(encoding="utf-8")).splitlines()


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
    """Options of uv by which it works for the machines rather than for this one."""
    platform = f"{environment.architecture}-manylinux_2_{environment.glibc}"
    return ["--no-build", "--python-version", environment.python, "--python-platform", platform]


def _uv(words: Sequence[str], asked: Path, scratch: Path) -> None:
    """Run `uv pip`. Raises UserError."""
    argv = [str(Path(sys.executable).with_name("uv")), "--no-config", "--quiet", "pip", *words]
    options, certificate = _settings_of_pip()
    own = {"UV_CACHE_DIR": str(scratch / "cache"), "UV_LINK_MODE": "copy"}
    environment = {**os.environ, **({"SSL_CERT_FILE": certificate} if certificate else {}), **own}
    done = subprocess.run(
        [*argv, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=CHECKOUT,
        env=environment,
    )
    if done.returncode:
        raise UserError(_why(done.stderr, asked))


def _settings_of_pip() -> tuple[list[str], str | None]:
    """Options of uv, which reads neither pip's files nor its variables; and the certificates."""
    argv = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=CHECKOUT).stdout
    known: dict[str, str] = {}
    for name, value in re.findall(r"^\S*?\.?([\w-]+)=(['\"].*)$", listed, re.MULTILINE):
        # Variables, which win, are listed first.
        known.setdefault(name, str(ast.literal_eval(value)))
    # pip takes the best version of all indexes.
    words = ["--index-strategy", "unsafe-best-match"]
    words += ["--no-index"] if known.get("no-index") in ("1", "true", "yes", "on") else []
    for name, option in SETTINGS.items():
        words += [word for value in known.get(name, "").split() for word in (option, value)]
    return words, known.get("cert")


def _why(said: str, asked: Path) -> str:
    """What uv said, as one sentence."""
    said = LABELLED.sub("", said)
    source = NO_WHEEL.search(said)
    why = " ".join(said.partition("cause:")[2].partition("hint:")[0].split()) or said.strip()
    why = re.sub(r",? we can conclude that your requirements are unsatisfiable", "", why)
    remedy = (
        f"{source[1]} comes as its source. {OWN_WHEEL}"
        if source
        else "correct the file, or see that this machine has internet (`make bundle SCRIPT=...` "
        "gathers it beforehand); torch and CUDA are the stack's, and never touched."
    )
    return f"{relative(asked)}: {why.rstrip('.')}: {remedy}"


def beside(folders: Iterable[Path], named: str | None) -> Path | None:
    """The file that REQUIREMENTS= names, else requirements.txt in the first of these folders that
    has one; None for none. Raises UserError."""
    if named:
        path = path_of("REQUIREMENTS", named)
        if not path.is_file():
            raise UserError(f"REQUIREMENTS={named}: there is no file {path}.")
        return path
    files = (folder / "requirements.txt" for folder in folders)
    return next((path for path in files if path.is_file()), None)


# ---- what requirements.txt says, with the files that it names by -r and -c ----

# A layer is kept under a hash of these texts, so all that decides which packages are chosen has to
# be in them: a line whose meaning can change elsewhere is refused.
MOST_FILES = 64
FILE_BYTES_MAX = 1 << 20  # of each
COMMENT = re.compile(r"(^|\s+)#.*$")
INCLUDE = re.compile(r"(?:-[rc]|--(?:requirement|constraint)s?(?=[ =]))[ =]*(.*)")
# A source, and what uv would build, whatever else it is told.
SOURCE = re.compile(
    r"(.*@\s*)?(git|hg|svn|bzr)\+|--(no-binary|only-binary)[= ]+(?!:all:$)|--no-binary"
)
OWN_WHEEL = (
    "It runs code of its own as it is built, and only wheels are taken: where you trust it, make "
    "its wheel yourself (`pip wheel --wheel-dir FOLDER ...`) and add a line `--find-links FOLDER`."
)
ARCHIVES = (".whl", ".zip", ".gz", ".bz2", ".xz", ".tar", ".tgz")


def texts(requirements: Path) -> list[str]:
    """The file's own text first, then each that it names, once. Raises UserError."""
    by_path: dict[Path, str] = {}
    waiting = [requirements]
    while waiting:
        path = waiting.pop(0)
        if path.resolve() in by_path:
            continue
        if len(by_path) == MOST_FILES:
            raise UserError(
                f"{relative(requirements)} comes to more than {MOST_FILES} files by -r and -c: "
                "write their lines into fewer."
            )
        try:
            by_path[path.resolve()] = text = read_text(path, FILE_BYTES_MAX)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(
                f"{path} cannot be read: {why}. Correct the file, or its name."
            ) from None
        waiting += [path.parent / name for name in _included(path, text)]
    return list(by_path.values())


def _included(path: Path, text: str) -> Iterator[str]:
    """The files that the lines of one name. Raises UserError."""
    for joined in re.sub(r"\\\r?\n", "", text).splitlines():
        line = COMMENT.sub("", joined).strip()
        if why := _why_refused(line):
            raise UserError(f"{relative(path)}: {line} {why}")
        if include := INCLUDE.match(line):
            try:
                (name,) = shlex.split(include[1])
            except ValueError as error:
                raise UserError(f"{relative(path)}: {line}: {error}: correct the line.") from None
            if re.match("[a-z]+:", name):
                raise UserError(
                    f"{relative(path)}: {name} is elsewhere, and a change of it would not be seen: "
                    "fetch the file, and name it by its path."
                )
            yield name


def _why_refused(line: str) -> str | None:
    if SOURCE.match(line):
        return f"asks for a source. {OWN_WHEEL}"
    if re.match("-e|--editable", line):
        return (
            "asks for a source, and only wheels are taken: leave the line out (the script's own "
            "folder can be imported as it is)."
        )
    place = "" if line.startswith("-") else re.split(r"\s*;|\s+--", line)[0]
    is_path = "/" in place or place.startswith(".") or place.lower().endswith(ARCHIVES)
    if "file:" in place or (is_path and "://" not in place):  # as pip tells a path from a name
        return (
            "is a file of this machine, and a change of it would not be seen: name the package and "
            "its version (`--find-links FOLDER` where its wheel is in a folder)."
        )
    return None
