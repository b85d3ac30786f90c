"""Makes a layer of the packages of a script's requirements.txt, above the stack's environment: once
and here, so that it is the same on all machines.

After requirements.py has read the requirements, uv on this machine resolves them for the Python of
the machines and unpacks the wheels. The folder stays here and on the machines, under a hash of the
request. Only wheels are installed, so nothing is built, and a machine needs neither uv nor
internet. uv gets a wheel without contents for each package of the environment, with the package's
version and a local label. It prefers these wheels, so it downloads none of these packages and
cannot replace torch or CUDA. Scripts find the unpacked wheels by PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from boundary.run_files import LayerRecord
from boundary.schema import Invalid, decode
from contract.errors import UserError
from contract.text import open_lock
from launcher.folders import relative
from launcher.machines.inventory import CHECKOUT
from launcher.node.machine import tree_sha256
from launcher.plan.code import Code
from launcher.plan.pip_settings import pip_options, read_pip_settings, uv_settings
from launcher.plan.requirements import OWN_WHEEL, Package, RequirementsFile, read_requirements

CACHE, BUNDLE = CHECKOUT / ".tandem/layers", CHECKOUT / "bundle/layers"
FOLDER = "layers"  # below node_dir
SHOWN = 6  # packages that are named
DAYS = 30  # after its last use a layer is thrown away, here and on the machines
MAX_BYTES = 1 << 30  # of what uv writes, and of its memory
POLL_SECONDS = 0.05
LABEL = "stack"
# The C libraries, glibc 2.x, for which uv chooses wheels: a machine between two gets those of the
# lower one. Wheels for newer ones would not run on all that site.yml sets up.
GLIBCS = (28, 17)
# What belongs to the stack: a script's layer neither replaces nor adds any of it. nvidia-ml-py only
# reads the driver's figures for packages such as ultralytics.
STACKS = re.compile(r"torch|torchvision|pytorch-triton|triton|apex|nvidia-(?!ml-py$).*|cuda-.*")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
LABELLED = re.compile(rf"[+.]{LABEL}\b")
NO_WHEEL = re.compile(r"(?:Wheels are required|Building source distributions) for `(\S+)`")
# The variables that uv gets. In addresses, even in those of a wheel's metadata, it replaces ${NAME}
# in capitals by its value. So proxies, which may have passwords, have their names in small letters.
VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@dataclass(frozen=True)
class Environment:
    """The environment of machines: Python 3.11, the suitable one of GLIBCS, and packages by their
    canonical names."""

    python: str
    glibc: int
    packages: tuple[tuple[str, str], ...]
    architecture: str = "x86_64"

    @classmethod
    def from_facts(
        cls, python: str, glibc: int, packages: Mapping[str, str], architecture: str = "x86_64"
    ) -> Environment:
        minor = ".".join(python.split(".")[:2])
        # Names come from a machine and become names of files here.
        real = {name: version for name, version in packages.items() if NAME.fullmatch(name)}
        named = sorted((canonical(name), version) for name, version in real.items())
        suitable = max([GLIBCS[-1], *(wheels for wheels in GLIBCS if wheels <= glibc)])
        return cls(minor, suitable, tuple(named), architecture)


@dataclass(frozen=True)
class Layer:
    """A layer. `tree`: its folder, with a hash of the request in the name; `sha256`: of its files;
    `packages`: those in it; `provided`: those of the environment that it needs. Both map names to
    versions."""

    tree: Path
    sha256: str
    packages: dict[str, str]
    provided: dict[str, str]

    @property
    def folder(self) -> str:
        """Return its folder on a machine, below node_dir."""
        return self.code().folder

    def code(self) -> Code:
        """Return its files as code to send."""
        files = (path for path in self.tree.rglob("*") if path.is_file())
        names = sorted(str(path.relative_to(self.tree)) for path in files)
        return Code(tuple(names), self.sha256, None, "", self.tree, FOLDER)

    def summary(self) -> str:
        """Name the first of its packages."""
        shown = [f"{name} {version}" for name, version in [*self.packages.items()][:SHOWN]]
        count = len(self.packages) - len(shown)
        return f"{', '.join(shown)}{f' and {count} more' if count else ''}"

    def modules(self) -> set[str]:
        """Return the modules that can be imported from it."""
        return {path.name.partition(".")[0] for path in self.tree.iterdir()}

    def differs(self, packages: Mapping[str, str]) -> list[str]:
        """Return the packages that a machine with these `packages` lacks, or has in another
        version."""
        versions = {canonical(name): version for name, version in packages.items()}
        provided = self.provided.items()
        return [f"{name} {version}" for name, version in provided if versions.get(name) != version]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def layer_key(requirements: RequirementsFile, environment: Environment) -> str:
    """Hash the request and all that decides which wheels fit; the stack's own packages stand for
    all of the environment."""
    stack = [package for package in environment.packages if STACKS.fullmatch(package[0])]
    packages = [[package.line() for package in requirements.packages]]
    packages += [[package.line() for package in requirements.constraints]]
    machine = [environment.python, environment.glibc, environment.architecture]
    request = [packages, requirements.options, *machine, stack]
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:16]


def build_layer(
    requirements: RequirementsFile, environment: Environment, folder: Path | None = None
) -> Layer:
    """Return the layer, and make it in `folder` (the cache, or BUNDLE for a day without internet)
    if neither that folder nor the bundle has it. Raises UserError."""
    # The key has all that decides which wheels fit, so an equal key needs no resolving.
    key, folder = layer_key(requirements, environment), folder or CACHE
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with open_lock(CACHE / ".lock") as file:
            # Only one launcher of a checkout makes layers: a second one waits, then finds them.
            fcntl.flock(file, fcntl.LOCK_EX)
            layer = load_layer(BUNDLE / key) or load_layer(folder / key)
            layer = layer or make_layer(requirements, environment, folder / key)
            if layer.tree.is_relative_to(CACHE):
                os.utime(layer.tree.parent)
            for path in CACHE.iterdir():
                if path.stat().st_mtime < time.time() - DAYS * 86400:
                    shutil.rmtree(path, ignore_errors=True)
            return layer
    except OSError as error:
        failed_path = error.filename or CACHE
        raise UserError(
            f"the script's packages could not be stored: {failed_path}: {error.strerror or error}"
        ) from None


def load_layer(folder: Path) -> Layer | None:
    """Return the layer in a folder, or None if it is not complete."""
    try:
        record = decode((folder / "layer.json").read_bytes(), LayerRecord, "layer")
        layer = Layer(folder / "tree", **structs.asdict(record))
    except (OSError, ValueError, Invalid):
        return None
    return layer if tree_sha256(layer.tree) == layer.sha256 else None


def make_layer(requirements: RequirementsFile, environment: Environment, target: Path) -> Layer:
    """Resolve and unpack the packages into `target`, whole or not at all. Raises UserError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as name:
        scratch = Path(name)
        locked = resolve(requirements, environment, scratch)
        missing, provided = split_packages(locked, requirements, environment)
        fresh = scratch / "layer"
        tree = fresh / "tree"
        tree.mkdir(parents=True)
        if missing:
            write_packages(scratch / "lock.txt", missing)
            words = ["install", "--target", str(tree), "--no-deps", "--require-hashes"]
            run_uv([*words, "-r", str(scratch / "lock.txt")], requirements, environment, scratch)
            (tree / ".lock").unlink(missing_ok=True)  # uv's
        unpacked = importlib.metadata.distributions(path=[str(tree)])
        packages = {canonical(package.metadata["Name"]): package.version for package in unpacked}
        # The packages that the file names come first.
        named = [package.name for package in requirements.packages]
        packages = {name: packages[name] for name in (*named, *packages) if name in packages}
        sha256 = tree_sha256(tree) or ""
        record = {"packages": packages, "provided": provided, "sha256": sha256}
        (fresh / "layer.json").write_text(json.dumps(record), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        fresh.replace(target)
    return Layer(target / "tree", sha256, packages, provided)


def resolve(
    requirements: RequirementsFile, environment: Environment, scratch: Path
) -> tuple[Package, ...]:
    """Return what uv chooses, each package with its version and hashes. Raises UserError."""
    stubs, request, limits, lock = (
        scratch / name for name in ("stubs", "asked.txt", "constraints.txt", "resolved.txt")
    )
    # A stub is a wheel of a package of the environment, with nothing in it.
    stubs.mkdir()
    text = "Wheel-Version: 1.0\nGenerator: tandem\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    for name, version in environment.packages:
        label = label_version(version)
        stem = f"{name.replace('-', '_')}-{label}"
        with zipfile.ZipFile(stubs / f"{stem}-py3-none-any.whl", "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {label}\n"
            wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
            wheel.writestr(f"{stem}.dist-info/WHEEL", text)
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
    pins = [f"{name}=={label_version(version)}" for name, version in environment.packages]
    stack = [line for line in pins if STACKS.fullmatch(line.partition("==")[0])]
    # uv prefers what a lock has already: packages of the environment are kept if they can be, and
    # torch and CUDA in any case.
    lock.write_text("\n".join(pins) + "\n", encoding="utf-8")
    write_packages(request, requirements.packages)
    write_packages(limits, requirements.constraints, stack)
    words = ["compile", str(request), "--output-file", str(lock), "--generate-hashes"]
    words += ["--no-header", "--no-annotate", "--find-links", str(stubs)]
    run_uv([*words, "--constraint", str(limits)], requirements, environment, scratch)
    return read_requirements(lock).packages


def split_packages(
    locked: Sequence[Package], requirements: RequirementsFile, environment: Environment
) -> tuple[list[Package], dict[str, str]]:
    """Return the packages to unpack, and the versions of those that the environment has. Raises
    UserError."""
    available = dict(environment.packages)
    hashes: dict[str, tuple[str, ...]] = {}
    for package in (*requirements.packages, *requirements.constraints):
        if package.hashes:
            hashes[package.name] = (*hashes.get(package.name, ()), *package.hashes)
    missing, provided = [], {}
    for package in locked:
        if available.get(package.name) == LABELLED.sub("", package.version):
            provided[package.name] = available[package.name]
        else:
            missing.append(replace(package, hashes=hashes.get(package.name, package.hashes)))
    # As with pip, a file with hashes has to name everything.
    is_complete = any(package.hashes for package in requirements.packages)
    unnamed = [p.name for p in missing if is_complete and p.name not in hashes]
    if unnamed:
        raise UserError(
            f"{relative(requirements.path)} has hashes, but not for {', '.join(unnamed)}: add "
            "these hashes, or remove all hashes."
        )
    replaced = [f"{p.name} {p.version}".rstrip() for p in missing if STACKS.fullmatch(p.name)]
    if replaced:
        names = ("apex", "torch")
        stack = ", ".join(f"{name} {available[name]}" for name in names if name in available)
        raise UserError(
            f"{relative(requirements.path)} would bring {', '.join(replaced)}, and only the stack "
            f"brings torch and CUDA ({stack}): ask for packages that use what it has."
        )
    return missing, provided


def write_packages(path: Path, packages: Sequence[Package], lines: Sequence[str] = ()) -> None:
    written = [*(package.line() for package in packages), *lines]
    path.write_text("".join(f"{line}\n" for line in written), encoding="utf-8")


def label_version(version: str) -> str:
    return f"{version}{'.' if '+' in version else '+'}{LABEL}"


def run_uv(
    words: Sequence[str], requirements: RequirementsFile, environment: Environment, scratch: Path
) -> None:
    """Run `uv pip` for the machines, with pip's settings and the options of the requirements.
    Raises UserError."""
    settings = read_pip_settings()
    options = [*pip_options(settings), *requirements.options]
    for name, place in options:
        if name == "find-links" and any(path.is_fifo() for path in Path(place).glob("*")):
            raise UserError(f"{place} has a named pipe, and uv would wait for it: remove it.")
    config = uv_settings(options)
    (scratch / "uv.toml").write_text(config, encoding="utf-8", errors="surrogateescape")
    argv = [str(Path(sys.executable).with_name("uv")), "--config-file", str(scratch / "uv.toml")]
    argv += ["--quiet", "pip", *words, "--no-build", "--python", sys.executable]
    argv += ["--python-version", environment.python]
    argv += ["--python-platform", f"{environment.architecture}-manylinux_2_{environment.glibc}"]
    variables = {name: os.environ.get(name, "") for name in VARIABLES}
    variables |= {
        name: os.environ.get(name) or os.environ.get(name.upper(), "") for name in PROXIES
    }
    variables["SSL_CERT_FILE"] = settings.get("cert") or variables["SSL_CERT_FILE"]
    variables = {name: value for name, value in variables.items() if value}
    # The metadata of a wheel may name a repository of git, which uv would fetch before it refuses
    # to build it. With links instead of copies, what uv writes counts once.
    variables |= {"GIT_ALLOW_PROTOCOL": "none", "UV_LINK_MODE": "hardlink"}
    variables["UV_CACHE_DIR"] = str(scratch / "cache")
    with subprocess.Popen(
        argv,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=scratch,
        env=variables,
    ) as process:
        while process.returncode is None:
            try:
                _, stderr = process.communicate(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                # A small wheel may unpack to any size, whatever size it claims.
                # What it has written counts, or what it has in memory if that is more.
                size = 0
                with contextlib.suppress(OSError, IndexError):  # it has just ended
                    proc = Path(f"/proc/{process.pid}")
                    written = (proc / "io").read_text(encoding="ascii").partition("wchar: ")[2]
                    pages = (proc / "statm").read_text(encoding="ascii").split()[1]
                    memory = int(pages) * os.sysconf("SC_PAGE_SIZE")
                    size = max(int(written.split()[0]), memory)
                if size > MAX_BYTES:
                    process.kill()
                    raise UserError(
                        f"{relative(requirements.path)}: its packages need more than "
                        f"{MAX_BYTES >> 20} MiB, which is the limit: require fewer packages."
                    ) from None
    if process.returncode:
        # uv explains over many lines, with the labels of our stubs: one sentence remains.
        stderr = LABELLED.sub("", stderr)
        source = NO_WHEEL.search(stderr)
        reason = " ".join(stderr.partition("cause:")[2].partition("hint:")[0].split())
        reason = reason or stderr.strip()
        reason = re.sub(r",? we can conclude that your requirements are unsatisfiable", "", reason)
        remedy = (
            f"{source[1]} exists only as a source package. {OWN_WHEEL}"
            if source
            else "correct the file, or connect the control node to the internet (`make bundle "
            "SCRIPT=...` downloads the packages beforehand). Tandem never changes torch and "
            "CUDA of the stack."
        )
        raise UserError(f"{relative(requirements.path)}: {reason.rstrip('.')}: {remedy}")
