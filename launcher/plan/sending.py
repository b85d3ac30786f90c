"""Prepares the parts of a Program that are sent to each machine: code, files and packages.

checks.py and participants.py call it before a run starts; guards.py then sends the deliveries.
"""

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
            from launcher.plan import pretrained  # imported late, with its HTTP modules

            path = weights.find_file()
            if path is None:
                with waiting(terminal, f"fetching {weights.address}"):
                    path = pretrained.fetch(weights, terminal.say)
            file = replace(file, path=path)
        files.append(file)
    return replace(program, files=tuple(files))


def with_layer(program: Program, machines: OpenMachines) -> Program:
    """Return the program, with a layer of packages if its machines need one. Raises Refused."""
    if not judge.needs_layer(program, machines) or judge.compare_pythons(machines):
        return program
    assert program.requirements
    try:
        layer = _build_layer_once(program.requirements, environment_of(machines))
    except UserError as error:
        raise Refused([problem("script-packages", reason=t) for t in error.problems]) from None
    modules = tuple(sorted({*program.modules} - layer.modules()))
    return replace(program, layer=layer, modules=modules)


def environment_of(machines: OpenMachines) -> Environment:
    """Return the environment for which packages are chosen. All machines have the same Python."""
    from launcher.plan import layer  # imported late: most runs have no layer

    # A wheel for the oldest C library runs on all machines. All machines have the same packages of
    # the stack: judge.py checks this (script-stack).
    facts = [machines.facts[host.name] for host in machines.hosts]
    glibc, leader = min(answer.glibc for answer in facts), facts[0]
    python = str(leader.versions.python)
    return layer.Environment.from_facts(python, glibc, leader.distributions, leader.architecture)


@lru_cache(maxsize=1)  # a waiting run asks for its layer again and again
def _build_layer_once(requirements: RequirementsFile, environment: Environment) -> Layer:
    from launcher.plan import layer

    return layer.build_layer(requirements, environment)


def current_code(program: Program) -> Code:
    """Return the code of Tandem and of the user, as it was at the first call. Raises UserError."""
    return code.take_snapshot(program.folder, program.script_folder)


def file_codes(program: Program) -> tuple[Code, ...]:
    """Return each file of the program in the form in which code is sent. Raises UserError."""
    return tuple(_file_code(file.path, file.label) for file in program.files if file.path)


@lru_cache(maxsize=8)  # all attempts send the file of the first attempt
def _file_code(path: Path, label: str) -> Code:
    try:
        sha256 = tree_sha256(path.parent, [path.name])
    except OSError as error:
        raise UserError(f"{label}: {path} cannot be read: {error.strerror}.") from None
    return Code((path.name,), sha256 or "", None, "", path.parent, FILES)


def deliveries(program: Program) -> list[Delivery]:
    """Return the deliveries to each machine. Raises UserError."""
    tandem = current_code(program)
    listed = f" ({', '.join(tandem.files.lines()[:1])})" if program.folder else ""
    # A machine may have some deliveries from earlier runs, so each is sent separately.
    result = [Delivery(tandem, f"code {tandem.sha256[:12]}{listed} goes to")]
    for file in file_codes(program):
        result.append(Delivery(file, f"{relative(file.tree / file.names[0])} goes to"))
    if program.layer:
        packages = program.layer.summary()
        result.append(Delivery(program.layer.code(), f"packages {packages} go to"))
    return result


MISSING_MODULE = re.compile(r"No module named '?([\w.]+)")
# Words with a dot or a slash, between spaces, quotes or brackets: `data/x.csv`.
PATHS = re.compile(r"[^\s'\"`,:;()\[\]<>]*[./][^\s'\"`,:;()\[\]<>]+")


def explain_missing_file(program: Program, error: str, host: str) -> str | None:
    """Return the remedy for an error on a machine that names a file or module of the user's folder:
    the file was not sent, or Python did not look in its folder. Otherwise return None."""
    if program.folder is None:
        return None
    files = current_code(program).files
    # A missing module `a.b` may be the folder a/b or the file a/b.py.
    modules = [name.replace(".", "/") for name in MISSING_MODULE.findall(error)]
    for name in [*PATHS.findall(error), *modules, *(f"{name}.py" for name in modules)]:
        # The error may have the path on the machine, .../work/<host>/data/x.csv, or the path here.
        inside = name.rpartition(f"/{WORK}/{host}/")[2].removeprefix(f"{program.folder}/")
        inside = posixpath.normpath(inside)
        reason = files.reason_unsent(inside)
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
