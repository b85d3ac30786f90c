"""Prepares the parts of a Program that are sent to each machine: code, files and packages."""

from __future__ import annotations

import posixpath
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from contract.errors import UserError
from launcher import judge
from launcher.folders import relative
from launcher.look import OpenMachines
from launcher.node.machine import tree_sha256
from launcher.plan import code
from launcher.plan.code import WORK, Code, Delivery
from launcher.problems import Refused, problem
from launcher.program import Program, SentFile
from launcher.terminal import Terminal, waiting

if TYPE_CHECKING:
    from launcher.plan.layer import Environment, Layer
    from launcher.plan.requirements import RequirementsFile

FILES = "files"  # the folder below node_dir


def fetch_files(program: Program, terminal: Terminal) -> Program:
    """Return the program with all of its files on this machine. Raises UserError."""
    files: list[SentFile] = []
    for file in program.files:
        if weights := file.pretrained:
            from launcher.plan import pretrained  # which needs what speaks HTTP

            path = weights.find_file()
            if path is None:
                with waiting(terminal, f"fetching {weights.address}"):
                    path = pretrained.fetch(weights, terminal.say)
            file = replace(file, path=path)
        files.append(file)
    return replace(program, files=tuple(files))


def with_layer(program: Program, machines: OpenMachines) -> Program:
    """Return the program with its packages for these machines, if they have to be sent. Raises
    Refused."""
    if not judge.needs_layer(program, machines) or judge.python(machines):
        return program
    assert program.requirements
    try:
        layer = _build_layer_once(program.requirements, environment_of(machines))
    except UserError as error:
        raise Refused([problem("script-packages", reason=t) for t in error.problems]) from None
    modules = tuple(sorted({*program.modules} - layer.modules()))
    return replace(program, layer=layer, modules=modules)


def environment_of(machines: OpenMachines) -> Environment:
    """Return the environment that packages have to suit, of machines with the same Python."""
    from launcher.plan import layer  # which most runs do without

    # A wheel for the oldest C library runs on all. Packages of the stack are the same everywhere,
    # which judge.py checks (script-stack).
    facts = [machines.facts[host.name] for host in machines.hosts]
    glibc, leader = min(answer.glibc for answer in facts), facts[0]
    python = str(leader.versions.python)
    return layer.Environment.from_facts(python, glibc, leader.distributions, leader.architecture)


@lru_cache(maxsize=1)  # a run that waits asks again and again
def _build_layer_once(requirements: RequirementsFile, environment: Environment) -> Layer:
    from launcher.plan import layer

    return layer.build_layer(requirements, environment)


def current_code(program: Program) -> Code:
    """Return our code and the user's folder as they were when this was first called. Raises
    UserError."""
    return code.current(program.folder, program.script_folder)


def file_codes(program: Program) -> tuple[Code, ...]:
    """Return each file of the program as what is sent. Raises UserError."""
    return tuple(_file_code(file.path, file.label) for file in program.files if file.path)


@lru_cache(maxsize=8)  # a later attempt sends what the first one sent
def _file_code(path: Path, label: str) -> Code:
    try:
        sha256 = tree_sha256(path.parent, [path.name])
    except OSError as error:
        raise UserError(f"{label}: {path} cannot be read: {error.strerror}.") from None
    return Code((path.name,), sha256 or "", None, "", path.parent, FILES)


def deliveries(program: Program) -> list[Delivery]:
    """Return what each machine is sent, with a sentence that the machines' names follow. Raises
    UserError."""
    tandem = current_code(program)
    listed = f" ({', '.join(tandem.files.lines()[:1])})" if program.folder else ""
    # Each is sent by itself, since a machine may have some of them from earlier runs.
    result = [Delivery(tandem, f"code {tandem.sha256[:12]}{listed} goes to")]
    for file in file_codes(program):
        result.append(Delivery(file, f"{relative(file.tree / file.names[0])} goes to"))
    if program.layer:
        packages = program.layer.summary()
        result.append(Delivery(program.layer.code(), f"packages {packages} go to"))
    return result


MISSING_MODULE = re.compile(r"No module named '?([\w.]+)")
PATHS = re.compile(r"[^\s'\"`,:;()\[\]<>]*[./][^\s'\"`,:;()\[\]<>]+")


def explain_missing_file(program: Program, error: str, host: str) -> str | None:
    """Return what to do about a file or module that an error on a machine names, if it is here and
    was not sent, or if Python did not find it where it is; otherwise None."""
    if program.folder is None:
        return None
    files = current_code(program).files
    # A module that was not found may be a folder or a file.
    modules = [name.replace(".", "/") for name in MISSING_MODULE.findall(error)]
    for name in [*PATHS.findall(error), *modules, *(f"{name}.py" for name in modules)]:
        # The error names the file as it is called there, or as it is called here.
        inside = name.rpartition(f"/{WORK}/{host}/")[2].removeprefix(f"{program.folder}/")
        inside = posixpath.normpath(inside)
        reason = files.why_not(inside)
        if reason and (program.folder / inside).exists():
            return (
                f"{inside} is here and was not sent ({reason}): have it sent, or put it on all "
                "machines under one path, and name that path in ARGS"
            )
    for module in (name.partition("/")[0] for name in modules):
        if folder := files.folder_of(module):
            return (
                f"{module} was sent, in {folder}, which is not on Python's path: put that folder "
                f"on sys.path, or PYTHONPATH={folder} into run_env of the inventory; if a package "
                "of that name is meant, name it in requirements.txt"
            )
    return None
