"""Whether a model of the given name exists, found out without importing torch; and whether one's
own can be trained, by building it here before any machine is asked."""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

from contract.errors import UNTRIED, UserError
from contract.options import DEFAULT_MODEL, path_of
from contract.options import Options as TrainerOptions
from launcher.machines.engine import Host
from launcher.machines.inventory import CHECKOUT
from launcher.machines.probe import Facts
from launcher.plan.code import OWN, loaded_by, parsed

TRY_SECONDS = 120.0


def rule(name: str) -> str | None:
    """The source by which a machine learns which functions of its torchvision are classifiers; None
    for the user's own function, which torchvision does not know."""
    if ":" in name:
        return None
    return (CHECKOUT / "trainer" / "classifiers.py").read_text(encoding="utf-8")


def is_path(name: str) -> bool:
    """Whether a model is given as `path/file.py:function`."""
    return ":" in name and name.rpartition(":")[0].endswith(".py")


def by_path(name: str) -> str:
    """A model that was given by the path of its file, as the trainer reads it: a module where the
    file is sent in any case, else the absolute path. Other names are returned as they are. Raises
    UserError."""
    path, function = name.rsplit(":", 1) if ":" in name else (name, "")
    if not path.endswith(".py"):
        return name
    file = path_of("MODEL", name, path)
    if not file.is_file():
        raise UserError(f"MODEL={name}: there is no file {file}.")
    if not function:
        with contextlib.suppress(SyntaxError, ValueError):
            function = next(iter(_defined(parsed(file)[1])), "")
        raise UserError(
            f"MODEL={name}: name the function that returns the model, like "
            f"MODEL={path}:{function or 'function'}."
        )
    refusal = _function(name, file, function)
    if refusal:
        raise UserError(refusal)
    if file.is_relative_to(CHECKOUT / "examples"):
        module = file.relative_to(CHECKOUT).with_suffix("")
        return f"{'.'.join(module.parts)}:{function}"
    return f"{file}:{function}"


def folder(name: str) -> Path | None:
    """The folder to send for this model, beside the checkout's own; None for none."""
    return Path(name.rpartition(":")[0]).parent if is_path(name) else None


def try_out(settings: TrainerOptions, ranks_share: bool) -> list[str]:
    """Build one's own model here and compute with it once; returns what is worth saying. Raises
    UserError in words of make. `ranks_share`: the run has several ranks."""
    name = settings.model
    if ":" not in name or name == DEFAULT_MODEL:
        return []
    asked = {
        "image_size": settings.image_size,
        "find_unused_parameters": settings.find_unused_parameters or not ranks_share,
    }
    argv = [sys.executable, "-m", "trainer.models", name, json.dumps(asked)]
    try:
        done = subprocess.run(
            argv, cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=TRY_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [f"MODEL={name}: it was not tried out here, which takes over {TRY_SECONDS:.0f} s"]
    if done.returncode == UNTRIED:  # the machines may have the package that is missing here
        return [_in_words_of_make(done.stderr)]
    if done.returncode:
        raise UserError(_in_words_of_make(done.stderr or "the trial of the model was killed"))
    return [_in_words_of_make(line) for line in done.stdout.splitlines() if line]


def _in_words_of_make(text: str) -> str:
    said = (text.strip().splitlines() or [""])[-1].removeprefix("trainer: ")
    said = re.sub(r"(?<!\S)--model (?=\S)", "MODEL=", said)
    return re.sub(r"(?<!\S)(--\w+)", r"ARGS=\1", said)


def packages(name: str) -> list[str]:
    """The packages that the files of one's own model import as they are loaded, without the
    standard library and what is sent along."""
    path, _, _ = name.rpartition(":")
    here = folder(name) or CHECKOUT
    file = here / (Path(path).name if is_path(name) else f"{path.replace('.', '/')}.py")
    return sorted(loaded_by(file, [here]).packages - {"trainer", "tandem", "contract", "examples"})


def lacking(name: str, host: Host, facts: Facts) -> str | None:
    """A sentence where a machine's environment lacks what one's own model imports."""
    missing = [package for package in packages(name) if not facts.packages.get(package)]
    if not missing:
        return None
    return (
        f"{host.label()}: MODEL={name} imports {', '.join(missing)}, missing in the environment "
        f"there: `{host.env_python} -m pip install {' '.join(missing)}` (some packages have "
        "another name than what they are imported by)."
    )


def problem(name: str, host: Host, facts: Facts, sent: tuple[str, ...]) -> str | None:
    """A sentence when the trainer would not find the model on this machine; `sent` names the
    files that will be sent there."""
    if ":" in name:
        return _own(name, host, facts, sent)
    known = facts.models
    if not known or name in known:  # no torchvision, or no answer in time
        return None
    near = difflib.get_close_matches(name, known, 3) or known[:3]
    return (
        f"MODEL={name}: torchvision {facts.versions.get('torchvision')} on {host.name} has no such "
        f"classifier; nearest: {', '.join(near)}. Your own: MODEL=path/file.py:function."
    )


def _own(name: str, host: Host, facts: Facts, sent: tuple[str, ...]) -> str | None:
    """A file of any folder, or `package.module:function` in the checkout or in the machine's
    environment."""
    if is_path(name):
        path, _, function = name.rpartition(":")
        if f"{OWN}/{Path(path).name}" in sent:
            return _function(name, Path(path), function)
        return (
            f"MODEL={name}: {path} is not copied to the machines: git ignores it, or its name "
            "begins with a dot."
        )
    module, _, function = name.partition(":")
    stem = module.replace(".", "/")
    files = [f for f in (f"{stem}.py", f"{stem}/__init__.py") if (CHECKOUT / f).is_file()]
    if files and files[0] not in sent:
        return (
            f"MODEL={name}: {files[0]} is not copied to the machines; files of examples/, recipes/ "
            f"and trainer/ are, but no links: MODEL={files[0]}:{function} sends its folder."
        )
    if files:
        return _function(name, CHECKOUT / files[0], function)
    if facts.packages.get(module.partition(".")[0]):
        return None
    modules = [f.removesuffix(".py").replace("/", ".") for f in sent if f.startswith("examples/")]
    near = difflib.get_close_matches(module, modules, 3)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"MODEL={name}: neither here nor on {host.name} is there a module {module}{hint}."


def _defined(body: list[ast.stmt]) -> list[str]:
    return [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def _function(name: str, file: Path, function: str) -> str | None:
    try:
        body = parsed(file)[1]
    except SyntaxError as error:
        return f"MODEL={name}: {file.name}, line {error.lineno}: {error.msg}: correct it."
    except ValueError as error:
        return f"MODEL={name}: {file.name} is no Python in UTF-8: {error}."
    own = _defined(body)
    # A name may also come from an import or an assignment: only a file of definitions is certain.
    others = (ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If, ast.Try)
    bound = {word for node in body if isinstance(node, others) for word in _words(node)}
    if function in own or function in bound:
        return None
    near = difflib.get_close_matches(function, own, 3) or own
    return f"MODEL={name}: {file.name} has no {function!r}; it has {', '.join(near) or 'none'}."


def _words(statement: ast.stmt) -> set[str | None]:
    """The names and texts in a statement, however deep."""
    found = {getattr(node, "id", getattr(node, "name", None)) for node in ast.walk(statement)}
    found |= {node.asname for node in ast.walk(statement) if isinstance(node, ast.alias)}
    texts = {node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)}
    return found | {text for text in texts if isinstance(text, str)}
