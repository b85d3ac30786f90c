"""A script of the user's own in the place of the trainer: what is sent of it, how its processes are
started, and what is refused of it before any machine is asked."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from contract import git
from contract.errors import UserError
from contract.options import Config, path_of
from launcher.machines.inventory import CHECKOUT
from launcher.options import VARIABLES
from launcher.plan import code
from launcher.plan.files import Files
from launcher.plan.layer import Layer, beside
from launcher.plan.sources import declares, first_line, loaded_by

WORK = "work"  # of a run, on a machine and here: what the script runs in, by machine
LAST = "{last}"  # in RESUME_ARGS: the newest checkpoint in OUTPUT
# The trainer's variables of make, which have no meaning for a script.
TRAINERS = (*VARIABLES, "balance")
COMPANIONS = ("folder", "output", "resume_args", "resume_from", "requirements")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
NAMED = re.compile(r"\{\w+\}")  # meant for a value, as {latest}
SHELLS = (".sh", ".bash", ".zsh")
# --hf_token X, --api-key=X, wandb.password=X; but neither --max_tokens 512 nor --mask_token [MASK].
SECRET = re.compile(
    r"((?:.*[-_.])?(?:token|secret|password|passwd|(?:api[-_]?)key|credentials?))(?:=(.*))?", re.I
)
VALUE = re.compile(r"(?!-)(?=.*\d)(?=.*[^\d.])[^\s/]{8,}")
MISSING_MODULE = re.compile(r"No module named '?([\w.]+)")
PATHS = re.compile(r"[^\s'\"`,:;()\[\]<>]*[./][^\s'\"`,:;()\[\]<>]+")
LOCAL_RANK = ("--local_rank", "--local-rank")  # by which torch.distributed.launch gave it


@dataclass(frozen=True)
class Script:
    """What SCRIPT= and its companions ask for. `words` are what launch starts, a file below
    `folder` or -m and a module; `local_rank` is the option by which the script wants its local
    rank, as it spells it; `imports` are the packages that it loads in any case, by the names that
    they are imported by, `broken` says why our Python cannot read it."""

    words: tuple[str, ...]
    folder: Path
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    resume: tuple[str, ...]
    resume_from: str | None
    local_rank: str | None
    imports: tuple[str, ...]
    broken: str | None = None
    requirements: Path | None = None
    layer: Layer | None = None  # of its packages, once the machines are known
    files: Files = field(default_factory=Files)
    # One process for each GPU, or for each machine without one.
    device: ClassVar[str] = "auto"
    parallel: ClassVar[str] = "ddp"

    @property
    def name(self) -> str:
        """In the names of runs: train for tools/train.py and for package.train."""
        last = self.words[-1]
        return last.rpartition(".")[2] if len(self.words) > 1 else PurePosixPath(last).stem

    def argv(self, last: str | None) -> list[str]:
        """What follows launch's own arguments. `last` is the checkpoint that an attempt goes on
        from, None in one that begins anew."""
        resume = [word.replace(LAST, last) for word in self.resume] if last is not None else []
        *module, name = self.words
        # Without --, launch takes --d for a beginning of options of its own.
        return [*module, "--", name, *self.arguments, *resume]

    def environment(self) -> dict[str, str]:
        """By this option a process is told its local rank (launcher/node/supervisor.py)."""
        return {"TANDEM_LOCAL_RANK": self.local_rank} if self.local_rank else {}

    def readable_secrets(self) -> str | None:
        """A sentence about arguments that look like a password; None where there are none."""
        names = [
            match[1]
            for word, following in zip(self.arguments, (*self.arguments[1:], ""))
            if (match := SECRET.fullmatch(word)) and VALUE.fullmatch(match[2] or following)
        ]
        if not names:
            return None
        return (
            f"{', '.join(names)}: everybody on the machines can read what is in ARGS, and so can "
            "who reads report.html. If it is secret, give it in run_env of the inventory or a file."
        )

    def file_hint(self, error: str, host: str) -> str | None:
        """Of the files and modules that an error on a machine names, one that is here and was not
        sent, or that Python did not find where it lies: what to do about it."""
        modules = [name.replace(".", "/") for name in MISSING_MODULE.findall(error)]
        names = [*PATHS.findall(error), *modules, *(f"{name}.py" for name in modules)]
        for name in names:
            # As the script there names it, or as it is called here.
            inside = name.rpartition(f"/{WORK}/{host}/")[2].removeprefix(f"{self.folder}/")
            inside = posixpath.normpath(inside)
            why = self.files.why_not(inside)
            if why and (self.folder / inside).exists():
                return (
                    f"{inside} is here and was not sent ({why}): have it sent, or put it where all "
                    "machines have it, and name that path in ARGS"
                )
        for module in (name.partition("/")[0] for name in modules):
            if folder := self.files.folder_of(module):
                return (
                    f"{module} was sent, in {folder}, where Python does not look: put that folder "
                    f"on sys.path, or PYTHONPATH={folder} into run_env of the inventory; if a "
                    "package of that name is meant, name it in requirements.txt"
                )
        return None

    def document(self) -> dict[str, Any]:
        """As plan.json has it."""
        return {
            "words": list(self.words),
            "folder": str(self.folder),
            "arguments": list(self.arguments),
            "outputs": list(self.outputs),
            "packages": self.layer.packages if self.layer else {},
            "sent": self.files.lines(),
        }


def check_together(given: Mapping[str, Any]) -> None:
    """Raises UserError for variables that have no meaning together; `given` has those that were
    typed, by their names in lower case."""
    there = {name for name, value in given.items() if value not in (None, [], ())}
    if "script" in there:
        wrong = [name.upper() for name in TRAINERS if name in there]
        if wrong:
            raise UserError(
                f"{', '.join(wrong)}: of our trainer, and SCRIPT= starts yours: give its own "
                "options as ARGS=."
            )
    elif "resume" not in there:
        wrong = [name.upper() for name in COMPANIONS if name in there]
        if wrong:
            raise UserError(f"{wrong[0]}: it concerns a script of yours: give SCRIPT=, too.")


def by_path(script: str, folder: str | None) -> tuple[str, str]:
    """SCRIPT and FOLDER as a run records them, with absolute paths. Raises UserError."""
    words = _words(script)
    if len(words) == 2:
        root = path_of("FOLDER", folder or ".")
        return f"-m {words[1]}", str(root if folder else _checkout_of(root) or root)
    file = path_of("SCRIPT", script, words[0])
    if not file.is_file():
        raise UserError(f"SCRIPT={script}: there is no file {file}.")
    root = _checkout_of(file.parent) or file.parent
    root = path_of("FOLDER", folder) if folder else root
    if not file.is_relative_to(root):
        raise UserError(f"FOLDER={folder}: SCRIPT={script} is not in it.")
    return str(file), str(root)


def _words(script: str) -> list[str]:
    try:
        # Of a name with spaces, quotes would have to come through two shells.
        words = [script] if path_of("SCRIPT", script).is_file() else shlex.split(script)
    except ValueError:
        words = []
    if len(words) == 2 and words[0] == "-m" and MODULE.fullmatch(words[1]):
        return words
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(
            f'SCRIPT={script}: give one file, like SCRIPT=path/train.py, or SCRIPT="-m '
            'package.train"; its options are ARGS="--lr 0.1".'
        )
    return words


def _checkout_of(folder: Path) -> Path | None:
    """The git checkout that a folder is in, but for Tandem's own."""
    root = git.root_of(folder)
    return None if root in (None, CHECKOUT) else root


def read(options: Config) -> Script:
    """The script of a run; what is sent of it is copied at the same time. Raises UserError."""
    assert options.script is not None and options.folder is not None
    root, typed = Path(options.folder), _words(options.script)
    if not root.is_dir():
        raise UserError(f"FOLDER={root}: there is no such folder.")
    file = _file(root, typed)
    if file.suffix == ".ipynb":
        raise UserError(
            f"SCRIPT={options.script}: it is a notebook, and torch's launcher starts Python: "
            f"`jupyter nbconvert --to script {file.name}` makes {file.stem}.py of it."
        )
    files = code.current(root).files  # which refuses a large folder before any file is parsed
    found = loaded_by(file, [file.parent, root] if len(typed) == 1 else [root])
    inside = file.relative_to(root).as_posix()
    if inside not in files.sent:
        raise UserError(
            f"SCRIPT={options.script}: {inside} is not sent ({files.why_not(inside)}): give one "
            "that is, or another FOLDER=."
        )
    if shell := _shell(file):
        raise UserError(
            f"SCRIPT={options.script}: it is a program of {shell}, and torch's launcher starts "
            "Python: give the file that it starts, as SCRIPT=train.py, and its options as ARGS=."
        )
    outputs, resume = _outputs(options.output), _split("RESUME_ARGS", options.resume_args)
    if other := next((w[0] for word in resume for w in NAMED.finditer(word) if w[0] != LAST), None):
        raise UserError(
            f"RESUME_ARGS={options.resume_args}: {other} would reach the script as it stands: "
            f"{LAST} is the newest checkpoint in OUTPUT."
        )
    if any(LAST in word for word in resume) and not outputs:
        raise UserError(
            f"RESUME_ARGS={options.resume_args}: {LAST} is the newest checkpoint in OUTPUT: give "
            "OUTPUT=, the folder that the script saves in."
        )
    if options.resume_from and not any(LAST in word for word in resume):
        raise UserError(
            f"RESUME_FROM=self: it says which file {LAST} is: give RESUME_ARGS=, like "
            f"RESUME_ARGS='--resume {LAST}'."
        )
    return Script(
        words=(inside,) if len(typed) == 1 else tuple(typed),
        folder=root,
        arguments=options.words,
        outputs=outputs,
        requirements=beside(dict.fromkeys((file.parent, root)), options.requirements),
        resume=resume,
        resume_from=options.resume_from,
        local_rank=declares(found.sources, LOCAL_RANK),
        imports=tuple(sorted(found.packages - {"tandem"} - files.modules())),
        broken=found.broken,
        files=files,
    )


def _shell(file: Path) -> str | None:
    """The program that another one than Python is for, by its name or its first line."""
    first = first_line(file)
    named = first[2:].strip() if first.startswith("#!") and "python" not in first else ""
    return named or ("a shell" if file.suffix in SHELLS else None)


def _file(root: Path, typed: list[str]) -> Path:
    """The file that is run. Raises UserError."""
    if len(typed) == 1:
        return Path(typed[0])
    stem = root / typed[1].replace(".", "/")
    file = next((f for f in (stem.with_suffix(".py"), stem / "__main__.py") if f.is_file()), None)
    if file is None:
        raise UserError(
            f'SCRIPT="-m {typed[1]}": {root} has no such module: name the folder that '
            f"{typed[1].partition('.')[0]} is in by FOLDER=."
        )
    return file


def _split(name: str, text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError:
        raise UserError(f"{name}={text}: a quote is not closed.") from None


def _outputs(text: str | None) -> tuple[str, ...]:
    """Folders below the one that the script runs in. Raises UserError."""
    found = []
    for word in _split("OUTPUT", text):
        path = PurePosixPath(word)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise UserError(
                f"OUTPUT={text}: {word} is not below the folder that the script runs in: let it "
                "write there, and give the folder's name, like OUTPUT=checkpoints."
            )
        found.append(str(path))
    return tuple(found)
