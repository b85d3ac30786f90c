"""Whether a model of the given name exists, found out without importing torch; and whether one's
own can be trained, by building it on the first machine of the run: it is somebody's code, and runs
where the run does, as its user."""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contract.errors import TRIAL_SKIPPED, UserError
from contract.options import DEFAULT_MODEL, path_of
from contract.options import Options as TrainerOptions
from launcher.machines.engine import Node, talk
from launcher.machines.inventory import CHECKOUT
from launcher.plan import code
from launcher.plan.sources import loaded_by, parsed

if TYPE_CHECKING:
    from launcher.plan.layer import Layer

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
        if ":" in name and (here := in_checkout(path)):
            _refuse_unknown(name, CHECKOUT / here, function)
        return name
    file = path_of("MODEL", name, path)
    if not file.is_file():
        raise UserError(f"MODEL={name}: there is no file {file}.")
    if not function:
        with contextlib.suppress(SyntaxError, ValueError):
            function = next(iter(_defined(parsed(file))), "")
        raise UserError(
            f"MODEL={name}: name the function that returns the model, like "
            f"MODEL={path}:{function or 'function'}."
        )
    _refuse_unknown(name, file, function)
    if file.is_relative_to(CHECKOUT / "examples"):
        module = file.relative_to(CHECKOUT).with_suffix("")
        return f"{'.'.join(module.parts)}:{function}"
    return f"{file}:{function}"


def in_checkout(module: str) -> str | None:
    """The file of a module of the checkout, relative to it; None where there is none."""
    stem = module.replace(".", "/")
    files = (file for file in (f"{stem}.py", f"{stem}/__init__.py") if (CHECKOUT / file).is_file())
    return next(files, None)


def folder(name: str) -> Path | None:
    """The folder to send for this model, beside the checkout's own; None for none."""
    return Path(name.rpartition(":")[0]).parent if is_path(name) else None


@dataclass(frozen=True)
class Trial:
    """Building one's own model, and computing with it once: `words` are those of trainer.models.
    `on` returns what is worth saying, and raises UserError in words of make."""

    name: str
    words: tuple[str, ...]

    @classmethod
    def of(cls, settings: TrainerOptions, ranks_share: bool) -> Trial | None:
        """None for a model that is known to work. `ranks_share`: the run has several ranks."""
        name = settings.model
        if ":" not in name or name == DEFAULT_MODEL:
            return None
        asked = {
            "image_size": settings.image_size,
            "model_args": settings.model_arguments(),
            "find_unused_parameters": settings.find_unused_parameters or not ranks_share,
        }
        return cls(name, ("-m", "trainer.models", name, json.dumps(asked)))

    def on(self, node: Node, below: str, packages: Layer | None = None) -> list[str]:
        """On a machine, from a folder of its own `below` that of the runs."""
        host, place = node.host, f"{below}/trial-{secrets.token_hex(4)}"
        sent = code.current(folder(self.name))
        code.send(sent, {host.name: node}, {host.name: place})
        run = 'cd "$1" && shift && "$@" 2>&1; status=$?; rm -rf "$PWD"; exit $status'
        own = [f"TANDEM_MODEL_FOLDER={code.OWN}"] if is_path(self.name) else []
        if packages:
            there = f"{below}/{packages.folder}"
            code.send(packages.code(), {host.name: node}, {host.name: there})
            own.append(f"PYTHONPATH={there}")
        argv = ["sh", "-c", run, "sh", place, "env", *own, host.env_python, *self.words]
        output, _, status = talk(node.start(argv), b"", TRY_SECONDS)
        said = output.decode(errors="replace")
        if status is None:
            slow = f"which takes over {TRY_SECONDS:.0f} s"
            return [f"MODEL={self.name}: it was not tried out on {host.name}, {slow}"]
        if status == TRIAL_SKIPPED:  # another machine may have the package that is missing there
            return [_in_words_of_make(said)]
        if status:
            raise UserError(_in_words_of_make(said or "the trial of the model was killed"))
        return [_in_words_of_make(line) for line in said.splitlines() if line]


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


def _defined(body: list[ast.stmt]) -> list[str]:
    return [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def _refuse_unknown(name: str, file: Path, function: str) -> None:
    """Raises UserError for a function that the file surely does not have."""
    try:
        body = parsed(file)
    except SyntaxError as error:
        why = f"{file.name}, line {error.lineno}: {error.msg}: correct it."
        raise UserError(f"MODEL={name}: {why}") from None
    except ValueError as error:
        raise UserError(f"MODEL={name}: {file.name} cannot be read as Python: {error}.") from None
    own = _defined(body)
    # A name may also come from an import or an assignment: only a file of definitions is certain.
    others = (ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If, ast.Try)
    bound = {word for node in body if isinstance(node, others) for word in _words(node)}
    if function not in own and function not in bound:
        near = ", ".join(difflib.get_close_matches(function, own, 3) or own) or "none"
        raise UserError(f"MODEL={name}: {file.name} has no {function!r}; it has {near}.")


def _words(statement: ast.stmt) -> set[str | None]:
    """The names and texts in a statement, however deep."""
    found = {getattr(node, "id", getattr(node, "name", None)) for node in ast.walk(statement)}
    found |= {node.asname for node in ast.walk(statement) if isinstance(node, ast.alias)}
    texts = {node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)}
    return found | {text for text in texts if isinstance(text, str)}
