"""Makes a layer: a folder with the packages of a script's requirements.txt, which the machines use
in addition to the stack's environment. The control node makes the layer once for all machines.

requirements.py reads the file. Then uv on the control node resolves it for the machines' Python and
unpacks the wheels. guards.py sends the folder, which scripts find by PYTHONPATH. On the control
node its name is a hash of the request (layer_key). Only wheels are installed: nothing is built, and
machines need no internet.

uv must not replace torch or CUDA. So it gets a stub, an empty wheel, for each package of the
environment. A stub has the package's version with the label `stack`. uv prefers these versions.
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
SUMMARY_PACKAGES = 6  # packages that a summary names
UNUSED_DAYS = 30  # then a layer is deleted, on the control node and on the machines
MAX_BYTES = 1 << 30  # that uv may write, and also that uv may use of memory
POLL_SECONDS = 0.05  # between two looks at what uv has written
LABEL = "stack"  # of the versions of stubs
# Minor versions of glibc 2.x for which uv chooses wheels. A machine gets wheels for the highest of
# these versions that its own glibc reaches. Ubuntu 18.04, which site.yml sets up, has 2.27.
GLIBCS = (28, 17)
# Packages of the stack, which a script's layer neither replaces nor adds. nvidia-ml-py is not in
# the stack: it only reads the driver's figures, for packages such as ultralytics.
STACK_PACKAGES = re.compile(
    r"torch|torchvision|pytorch-triton|triton|apex|nvidia-(?!ml-py$).*|cuda-.*"
)
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")  # of a package
# In `2.15.0+stack` and `1.12.1+cu102.stack` this is `+stack` and `.stack`.
LABELLED = re.compile(rf"[+.]{LABEL}\b")
# uv's error for a package without wheels: `Building source distributions for `tool` is disabled`.
NO_WHEEL = re.compile(r"(?:Wheels are required|Building source distributions) for `(\S+)`")
# The only variables that uv gets. uv replaces ${NAME} in addresses, even in those of a wheel's
# metadata, so a wheel's author could have any variable sent to his server. uv replaces only names
# in capitals, so it gets the proxies, which may have passwords, under names in small letters.
VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@dataclass(frozen=True)
class Environment:
    """Describes the environment of the machines, for which wheels are chosen."""

    python: str  # such as "3.11"
    glibc: int  # the minor version, from GLIBCS
    packages: tuple[tuple[str, str], ...]  # (canonical name, version), sorted
    architecture: str = "x86_64"

    @classmethod
    def from_facts(
        cls, python: str, glibc: int, packages: Mapping[str, str], architecture: str = "x86_64"
    ) -> Environment:
        """Return the environment of a machine with this `python` (3.11.2) and glibc 2.`glibc`."""
        minor_version = ".".join(python.split(".")[:2])  # "3.11" for "3.11.2"
        # A machine reports these names, which become file names of stubs. Skip invalid names.
        valid = {name: version for name, version in packages.items() if NAME.fullmatch(name)}
        pairs = sorted((canonical_name(name), version) for name, version in valid.items())
        wheel_glibc = max([GLIBCS[-1], *(version for version in GLIBCS if version <= glibc)])
        return cls(minor_version, wheel_glibc, tuple(pairs), architecture)


@dataclass(frozen=True)
class Layer:
    """Describes a layer on the control node."""

    tree: Path  # its folder; the parent's name is the hash of the request
    sha256: str  # of the files in `tree`
    packages: dict[str, str]  # {name: version} of the packages in the layer
    provided: dict[str, str]  # {name: version} of packages that it needs from the environment

    @property
    def folder(self) -> str:
        """The layer's folder on a machine, below node_dir."""
        return self.code().folder

    def code(self) -> Code:
        """Return the layer's files in the form in which code is sent."""
        files = (path for path in self.tree.rglob("*") if path.is_file())
        names = sorted(str(path.relative_to(self.tree)) for path in files)
        # Packages have no git revision (None) and no git diff ("").
        return Code(tuple(names), self.sha256, None, "", self.tree, FOLDER)

    def summary(self) -> str:
        """Return the names and versions of the first packages, for a message."""
        first_packages = [*self.packages.items()][:SUMMARY_PACKAGES]
        shown = [f"{name} {version}" for name, version in first_packages]
        count = len(self.packages) - len(shown)
        return f"{', '.join(shown)}{f' and {count} more' if count else ''}"

    def modules(self) -> set[str]:
        """Return the names of the modules that scripts can import from the layer."""
        return {path.name.partition(".")[0] for path in self.tree.iterdir()}

    def differs(self, packages: Mapping[str, str]) -> list[str]:
        """Return the packages in `provided` that a machine with these `packages` lacks, or has in
        another version."""
        versions = {canonical_name(name): version for name, version in packages.items()}
        provided = self.provided.items()
        return [f"{name} {version}" for name, version in provided if versions.get(name) != version]


def canonical_name(name: str) -> str:
    """Return a package's name as indexes compare it: `real-name` for `Real_Name`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def layer_key(requirements: RequirementsFile, environment: Environment) -> str:
    """Return a hash of the request: requirements, Python, glibc, architecture and the stack."""
    # The stack's packages stand for the whole environment: judge.py checks by Layer.differs that a
    # machine has the other packages that the layer needs.
    stack = [package for package in environment.packages if STACK_PACKAGES.fullmatch(package[0])]
    packages = [[package.line() for package in requirements.packages]]
    packages += [[package.line() for package in requirements.constraints]]
    machine = [environment.python, environment.glibc, environment.architecture]
    request = [packages, requirements.options, *machine, stack]
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:16]


def build_layer(
    requirements: RequirementsFile, environment: Environment, folder: Path | None = None
) -> Layer:
    """Return the layer for these requirements. Make it in `folder` if neither `folder` nor BUNDLE
    has it; `folder` is CACHE by default, and BUNDLE in `make bundle`. Raises UserError."""
    # A layer with this key is used again as it is: packages without a pin keep their versions.
    key, folder = layer_key(requirements, environment), folder or CACHE
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with open_lock(CACHE / ".lock") as file:
            # A second launcher process waits for this lock, and then finds the layer.
            fcntl.flock(file, fcntl.LOCK_EX)
            layer = load_layer(BUNDLE / key) or load_layer(folder / key)
            # The environment's packages may have changed since, although its stack is the same.
            if layer is None or layer.differs(dict(environment.packages)):
                layer = make_layer(requirements, environment, folder / key)
            if layer.tree.is_relative_to(CACHE):
                os.utime(layer.tree.parent)  # the time of the last use
            for path in CACHE.iterdir():
                if path.stat().st_mtime < time.time() - UNUSED_DAYS * 86400:
                    shutil.rmtree(path, ignore_errors=True)
            return layer
    except OSError as error:
        failed_path = error.filename or CACHE
        raise UserError(
            f"the script's packages could not be stored: {failed_path}: {error.strerror or error}"
        ) from None


def load_layer(folder: Path) -> Layer | None:
    """Return the layer in a folder; None if its files are incomplete or have changed."""
    try:
        record = decode((folder / "layer.json").read_bytes(), LayerRecord, "layer")
        layer = Layer(folder / "tree", **structs.asdict(record))
    except (OSError, ValueError, Invalid):
        return None
    return layer if tree_sha256(layer.tree) == layer.sha256 else None


def make_layer(requirements: RequirementsFile, environment: Environment, target: Path) -> Layer:
    """Resolve the packages, and unpack them into `target` or not at all. Raises UserError."""
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
            (tree / ".lock").unlink(missing_ok=True)  # uv leaves this file
        unpacked = importlib.metadata.distributions(path=[str(tree)])
        packages = {canonical_name(dist.metadata["Name"]): dist.version for dist in unpacked}
        # Packages that the user requires come before their dependencies, as a summary shows only
        # the first few.
        required = [package.name for package in requirements.packages]
        packages = {name: packages[name] for name in (*required, *packages) if name in packages}
        sha256 = tree_sha256(tree) or ""  # None only if there is no folder
        record = {"packages": packages, "provided": provided, "sha256": sha256}
        (fresh / "layer.json").write_text(json.dumps(record), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        fresh.replace(target)
    return Layer(target / "tree", sha256, packages, provided)


def resolve(
    requirements: RequirementsFile, environment: Environment, scratch: Path
) -> tuple[Package, ...]:
    """Return the packages that uv chooses, each with its version and hashes. Raises UserError."""
    # Write a stub for each package of the environment.
    stubs = scratch / "stubs"
    stubs.mkdir()
    wheel_text = "Wheel-Version: 1.0\nGenerator: tandem\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    pins, stack_pins = [], []
    for name, version in environment.packages:
        # Such as 2.15.0+stack, or 1.12.1+cu102.stack.
        stub_version = f"{version}{'.' if '+' in version else '+'}{LABEL}"
        stem = f"{name.replace('-', '_')}-{stub_version}"
        with zipfile.ZipFile(stubs / f"{stem}-py3-none-any.whl", "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {stub_version}\n"
            wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
            wheel.writestr(f"{stem}.dist-info/WHEEL", wheel_text)
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
        pins.append(f"{name}=={stub_version}")
        if STACK_PACKAGES.fullmatch(name):
            stack_pins.append(pins[-1])
    # uv prefers the versions in an existing lock, so it keeps packages of the environment if the
    # requirements allow. The stack's packages are also constraints, which uv must keep.
    lock, request = scratch / "resolved.txt", scratch / "asked.txt"
    constraints = scratch / "constraints.txt"
    lock.write_text("\n".join(pins) + "\n", encoding="utf-8")
    write_packages(request, requirements.packages)
    write_packages(constraints, requirements.constraints, stack_pins)
    words = ["compile", str(request), "--output-file", str(lock), "--generate-hashes"]
    words += ["--no-header", "--no-annotate", "--find-links", str(stubs)]
    run_uv([*words, "--constraint", str(constraints)], requirements, environment, scratch)
    return read_requirements(lock).packages


def split_packages(
    locked: Sequence[Package], requirements: RequirementsFile, environment: Environment
) -> tuple[list[Package], dict[str, str]]:
    """Split the resolved packages into packages to unpack and packages that the environment
    provides, {name: version}. Raises UserError if the file's hashes are incomplete, or if the
    layer would have packages of the stack."""
    available = dict(environment.packages)
    # {name: the user's hashes}, which replace the hashes that uv wrote into the lock.
    hashes: dict[str, tuple[str, ...]] = {}
    for package in (*requirements.packages, *requirements.constraints):
        if package.hashes:
            hashes[package.name] = (*hashes.get(package.name, ()), *package.hashes)
    missing, provided = [], {}
    for package in locked:
        # A stub in the lock has the environment's version with a label.
        if available.get(package.name) == LABELLED.sub("", package.version):
            provided[package.name] = available[package.name]
        else:
            missing.append(replace(package, hashes=hashes.get(package.name, package.hashes)))
    # As in pip, a file with any hash must have hashes for all packages, also for dependencies.
    needs_hashes = any(package.hashes for package in requirements.packages)
    unhashed = [p.name for p in missing if needs_hashes and p.name not in hashes]
    if unhashed:
        raise UserError(
            f"{relative(requirements.path)} has hashes, but not for {', '.join(unhashed)}: add "
            "these hashes, or remove all hashes."
        )
    additions = [p for p in missing if STACK_PACKAGES.fullmatch(p.name)]
    if additions:
        listed = ", ".join(f"{p.name} {p.version}".rstrip() for p in additions)
        names = ("apex", "torch")
        stack = ", ".join(f"{name} {available[name]}" for name in names if name in available)
        raise UserError(
            f"{relative(requirements.path)} would bring {listed}, and only the stack "
            f"brings torch and CUDA ({stack}): ask for packages that use what it has."
        )
    return missing, provided


def write_packages(path: Path, packages: Sequence[Package], lines: Sequence[str] = ()) -> None:
    """Write a requirements file for uv with these packages, followed by `lines`."""
    all_lines = [*(package.line() for package in packages), *lines]
    path.write_text("".join(f"{line}\n" for line in all_lines), encoding="utf-8")


def run_uv(
    words: Sequence[str], requirements: RequirementsFile, environment: Environment, scratch: Path
) -> None:
    """Run `uv pip` with these words for the machines' Python, with pip's settings and with the
    options of the requirements. Raises UserError."""
    settings = read_pip_settings()
    options = [*pip_options(settings), *requirements.options]
    for name, place in options:
        if name == "find-links" and any(path.is_fifo() for path in Path(place).glob("*")):
            raise UserError(f"{place} has a named pipe, and uv would wait for it: remove it.")
    config = scratch / "uv.toml"
    config.write_text(uv_settings(options), encoding="utf-8", errors="surrogateescape")
    argv = [str(Path(sys.executable).with_name("uv")), "--config-file", str(config)]
    argv += ["--quiet", "pip", *words, "--no-build", "--python", sys.executable]
    # The machines may have another Python and another C library than the control node.
    argv += ["--python-version", environment.python]
    argv += ["--python-platform", f"{environment.architecture}-manylinux_2_{environment.glibc}"]
    variables = {name: os.environ.get(name, "") for name in VARIABLES}
    variables |= {
        name: os.environ.get(name) or os.environ.get(name.upper(), "") for name in PROXIES
    }
    variables["SSL_CERT_FILE"] = settings.get("cert") or variables["SSL_CERT_FILE"]
    variables = {name: value for name, value in variables.items() if value}
    # uv would fetch a git repository that a wheel's metadata names, before it refuses to build the
    # package. With hard links instead of copies, uv writes each file once.
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
                # A small wheel may unpack to any size, whatever size its metadata claims. So uv's
                # written bytes and its memory are both limited, while uv runs.
                size = 0
                with contextlib.suppress(OSError, IndexError, ValueError):  # uv has just ended
                    proc = Path(f"/proc/{process.pid}")
                    # io has `wchar: 323934`; statm begins with the total and the resident pages.
                    io_text = (proc / "io").read_text(encoding="ascii")
                    written_bytes = int(io_text.partition("wchar: ")[2].split()[0])
                    _, resident_pages, *_ = (proc / "statm").read_text(encoding="ascii").split()
                    size = max(written_bytes, int(resident_pages) * os.sysconf("SC_PAGE_SIZE"))
                if size > MAX_BYTES:
                    process.kill()
                    raise UserError(
                        f"{relative(requirements.path)}: its packages need more than "
                        f"{MAX_BYTES >> 20} MiB, which is the limit: require fewer packages."
                    ) from None
    if process.returncode:
        # uv explains an error in many lines, which name the stubs' labels. The message quotes only
        # the sentence between `cause:` and `hint:`, without labels:
        #     error: No solution found when resolving dependencies
        #       cause: Because tool was not found and you require tool==9, we can conclude that ...
        #     hint: Packages were unavailable because ...
        stderr = LABELLED.sub("", stderr)
        source_only = NO_WHEEL.search(stderr)
        reason = " ".join(stderr.partition("cause:")[2].partition("hint:")[0].split())
        reason = reason or stderr.strip()
        reason = re.sub(r",? we can conclude that your requirements are unsatisfiable", "", reason)
        remedy = (
            f"{source_only[1]} exists only as a source package. {OWN_WHEEL}"
            if source_only
            else "correct the file, or connect the control node to the internet (`make bundle "
            "SCRIPT=...` downloads the packages beforehand). Tandem never changes torch and "
            "CUDA of the stack."
        )
        raise UserError(f"{relative(requirements.path)}: {reason.rstrip('.')}: {remedy}")
