"""Builds the Program of a script of the user's from SCRIPT= and the options that belong to it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from contract import git
from contract.decisions import OFF
from contract.errors import UserError
from contract.layout import FILES
from contract.options import RUN_OPTIONS, Config, as_typed, path_of
from launcher.machines.inventory import CHECKOUT
from launcher.options import VARIABLES, config_of
from launcher.program import LAST, Program

# Variables that only the trainer has, and those that mean something only with SCRIPT=.
TRAINER_VARIABLES = tuple(name for name in VARIABLES if name != "data")
COMPANIONS = ("folder", "output", "resume_args", "resume_from", "requirements", "precheck")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def read_paths(typed: dict[str, Any]) -> None:
    """Replace SCRIPT= and FOLDER= by absolute paths. Raises UserError, also for variables that have
    no meaning together."""
    names = {name for name, value in typed.items() if value not in (None, [], ())}
    if "script" in names:
        refused = [name.upper() for name in TRAINER_VARIABLES if name in names]
        if refused:
            raise UserError(
                f"{', '.join(refused)} belongs to Tandem's trainer, but SCRIPT= starts your "
                "own program: type the options of your program in ARGS=."
            )
        typed["script"], typed["folder"] = script_by_path(typed["script"], typed.get("folder"))
    # A resumed run has its script in plan.json, and may be given these for it.
    elif "resume" not in names:
        refused = [name.upper() for name in COMPANIONS if name in names]
        if refused:
            raise UserError(f"{refused[0]} works only with your own script: type SCRIPT=, too.")


def script_by_path(script: str, folder: str | None) -> tuple[str, str]:
    """Return SCRIPT and FOLDER as a run records them, with absolute paths. Raises UserError."""
    words = script_words(script)
    # Python looks for a module below the current folder, so FOLDER begins there.
    if len(words) == 2:
        root = path_of("FOLDER", folder or ".")
        return f"-m {words[1]}", str(root if folder else _checkout_of(root) or root)
    file = path_of("SCRIPT", script, words[0])
    if not file.is_file():
        raise UserError(f"SCRIPT={script}: there is no file {file}.")
    root = _checkout_of(file.parent) or file.parent
    root = path_of("FOLDER", folder) if folder else root
    if not file.is_relative_to(root):
        raise UserError(f"FOLDER={folder} does not contain SCRIPT={script}.")
    return str(file), str(root)


def script_words(script: str) -> list[str]:
    """Return one file, or -m and a module. Raises UserError."""
    try:
        # Quotes around a name with spaces would have to come through two shells.
        words = [script] if path_of("SCRIPT", script).is_file() else shlex.split(script)
    except ValueError:
        words = []
    if len(words) == 2 and words[0] == "-m" and MODULE.fullmatch(words[1]):
        return words
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(
            f"SCRIPT={script}: type one file, such as SCRIPT=path/train.py, or a module, such "
            'as SCRIPT="-m package.train". Its options belong in ARGS="--lr 0.1".'
        )
    return words


def _checkout_of(folder: Path) -> Path | None:
    """Return the git checkout that a folder is in, unless it is Tandem's own."""
    root = git.root_of(folder)
    return None if root in (None, CHECKOUT) else root


def resume_config(began: Config, typed: Mapping[str, Any]) -> Config:
    """Return the options of a run that continues. Raises UserError for an option that a run keeps,
    and if nobody said how the script continues."""
    refused = [
        name
        for name, value in typed.items()
        if name not in ("resume", "detach", "data")
        and (
            name not in RUN_OPTIONS
            or (not RUN_OPTIONS[name].changeable_on_resume and value != getattr(began, name))
        )
    ]
    if refused:
        raise UserError(
            f"a resumed run keeps its options: omit {refused[0].upper()}, or start a new run."
        )
    config = config_of(typed, began)
    # Without RESUME_ARGS the script would train from its beginning, and overwrite what it saved.
    if not config.resume_args:
        raise UserError(
            "Tandem does not know how the script resumes: type RESUME_ARGS=, such as "
            "RESUME_ARGS='--resume {last}' (docs/own-script.md)."
        )
    return config


PLACEHOLDER = re.compile(r"\{\w+\}")  # meant for a value, as {latest}
SHELLS = (".sh", ".bash", ".zsh")
# --hf_token X, --api-key=X, wandb.password=X; but neither --max_tokens 512 nor --mask_token [MASK].
SECRET = re.compile(
    r"((?:.*[-_.])?(?:token|secret|password|passwd|(?:api[-_]?)key|credentials?))(?:=(.*))?", re.I
)
SECRET_VALUE = re.compile(r"(?!-)(?=.*\d)(?=.*[^\d.])[^\s/]{8,}")
LOCAL_RANK = ("--local_rank", "--local-rank")  # by which torch.distributed.launch gave it

# How advice is given to somebody who trains by a script; `{}` is the strategy.
PHRASES = {
    "sync": 'tandem.sync.attach(model, "{}", optimizer=optimizer) in the script',
    "warmed_up": "with more steps, or with attach's warmup_steps=0",
    "batch": "twice the batch of each rank, with the script's own option",
    "workers": "twice the loader processes (its DataLoader's num_workers)",
    "saving": "save half as often",
    "memory": "Fewer loader processes (its DataLoader's num_workers) or a smaller batch",
    "longer": "the same script, with options for a longer training (ARGS=)",
}


def build(config: Config) -> Program:
    """Return the Program for these options. The files to send are copied at the same time. Raises
    UserError."""
    from launcher.plan import code
    from launcher.plan.requirements import find_requirements, read_requirements
    from launcher.plan.sources import declares, loaded_by

    assert config.script is not None and config.folder is not None
    root, typed = Path(config.folder), script_words(config.script)
    if not root.is_dir():
        raise UserError(f"FOLDER={root}: there is no such folder.")
    if len(typed) == 1:
        file = Path(typed[0])
    else:
        stem = root / typed[1].replace(".", "/")
        file = stem.with_suffix(".py")
        file = file if file.is_file() else stem / "__main__.py"
        if not file.is_file():
            raise UserError(
                f'SCRIPT="-m {typed[1]}": {root} has no such module: set FOLDER= to the '
                f"folder that contains {typed[1].partition('.')[0]}."
            )
    if file.suffix == ".ipynb":
        raise UserError(
            f"SCRIPT={config.script} is a notebook, but torch's launcher starts only Python "
            f"files: convert it with `jupyter nbconvert --to script {file.name}`, which "
            f"writes {file.stem}.py."
        )
    script_folder = str(file.parent.relative_to(root))
    # A large folder is rejected before any file is parsed.
    files = code.current(root, script_folder).files
    inside = file.relative_to(root).as_posix()
    if inside not in files.sent:
        raise UserError(
            f"SCRIPT={config.script}: Tandem does not send {inside} "
            f"({files.why_not(inside)}): type another script or another FOLDER=."
        )
    # A shell script that starts Python is the usual mistake here: torch's launcher would report a
    # syntax error from every rank.
    with file.open("rb") as start:
        line = start.readline(200).decode(errors="replace").strip()
    shebang = line[2:].strip() if line.startswith("#!") and "python" not in line else ""
    if shell := shebang or ("a shell" if file.suffix in SHELLS else ""):
        raise UserError(
            f"SCRIPT={config.script} is a script for {shell}, but torch's launcher starts "
            "only Python files: type the Python file that it starts, such as "
            "SCRIPT=train.py, and its options in ARGS=."
        )
    requirements = find_requirements(dict.fromkeys((file.parent, root)), config.requirements)
    outputs, resume = _read_outputs(config.output), _split("RESUME_ARGS", config.resume_args)
    _check_resume(config, outputs, resume)
    # Python puts the folder of a script first on its path, but not that of a module.
    loaded = loaded_by(file, [file.parent, root] if len(typed) == 1 else [root])
    unused_balance: tuple[str, ...] = ()
    if config.balance not in (None, OFF) and "tandem" not in loaded.packages:
        unused_balance = (
            f"BALANCE={config.balance}: the script does not import tandem, so its batches stay as "
            "they are: use tandem.sampler or tandem.batch_size (docs/own-script.md).",
        )
    words = (inside,) if len(typed) == 1 else tuple(typed)
    *module, name = words
    checks = not module or config.precheck
    env = {}
    if local_rank := declares(loaded.sources, LOCAL_RANK):
        env["TANDEM_LOCAL_RANK"] = local_rank  # launcher/node/supervisor.py gives it as this option
    return Program(
        # train for tools/train.py and for package.train
        name=name.rpartition(".")[2] if module else PurePosixPath(name).stem,
        typed=f"SCRIPT={name}",
        # Without --, launch takes --d for the beginning of an option of its own.
        words=("--use_env", *module, "--", name, *config.words),
        env=env,
        resume=resume or None,
        needs_port=True,
        divides_batches="tandem" in loaded.packages,
        # Of a module only PRECHECK is tried; what is not is an empty word.
        check=("-c", CHECK, "" if module else inside, config.precheck or "") if checks else (),
        folder=root,
        script_folder=script_folder,
        runs_in_folder=True,
        requirements=read_requirements(requirements) if requirements else None,
        modules=tuple(sorted(loaded.packages - {"tandem"} - files.modules())),
        data_kind=FILES,
        outputs=outputs,
        resumes_own=bool(config.resume_from),
        command=shlex.join([*typed, *config.words]),
        phrases=PHRASES,
        notes=(*_notes_on_secrets(config.words), *unused_balance),
    )


def executes(config: Config) -> dict[str, str]:
    """Return what these options would execute or send, as it is typed, by the option's name."""
    names = ("script", "folder", "requirements", "precheck")
    values = {name: getattr(config, name) for name in names}
    return {name: as_typed(name.upper(), value) for name, value in values.items() if value}


# The machine's Python decides whether the script is Python: it may be newer than ours. PRECHECK's
# `python` is that of the ranks.
CHECK = """
import os, subprocess, sys
file, command = sys.argv[1:]
if file:
    compile(open(file, "rb").read(), file, "exec")
os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
code = command and subprocess.call(command, shell=True)
if code:
    print(f"PRECHECK={command} ended with exit code {code}.", flush=True)
sys.exit(bool(code))
"""


def _check_resume(config: Config, outputs: tuple[str, ...], resume: tuple[str, ...]) -> None:
    """Raise UserError for RESUME_ARGS= and its companions if they contradict each other."""
    names = (match[0] for word in resume for match in PLACEHOLDER.finditer(word))
    if unknown := next((name for name in names if name != LAST), None):
        raise UserError(
            f"RESUME_ARGS={config.resume_args}: nothing replaces {unknown}: only {LAST} becomes "
            "the newest checkpoint in OUTPUT."
        )
    wants_last = any(LAST in word for word in resume)
    if wants_last and not outputs:
        raise UserError(
            f"RESUME_ARGS={config.resume_args}: {LAST} is the newest checkpoint in OUTPUT: "
            "set OUTPUT= to the folder in which the script saves."
        )
    if config.resume_from and not wants_last:
        raise UserError(
            f"RESUME_FROM=self chooses the file for {LAST}: type RESUME_ARGS=, such as "
            f"RESUME_ARGS='--resume {LAST}'."
        )
    if config.max_restarts and not resume:
        raise UserError(
            f"MAX_RESTARTS={config.max_restarts}: a restart would train from the beginning, "
            "because Tandem does not know how the script resumes: type RESUME_ARGS=, such as "
            f"RESUME_ARGS='--resume {LAST}' (docs/own-script.md)."
        )


def _notes_on_secrets(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return a sentence on arguments that look like a password, if there are any."""
    names = [
        match[1]
        for word, following in zip(words, (*words[1:], ""))
        if (match := SECRET.fullmatch(word)) and SECRET_VALUE.fullmatch(match[2] or following)
    ]
    if not names:
        return ()
    return (
        f"{', '.join(names)}: every user of the machines and every reader of report.html can "
        "read ARGS. Put secrets into run_env in the inventory, or into a file.",
    )


def _split(name: str, text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError:
        raise UserError(f"{name}={text}: a quote is not closed.") from None


def _read_outputs(text: str | None) -> tuple[str, ...]:
    """Return folders below the one that the script runs in. Raises UserError."""
    folders = []
    for word in _split("OUTPUT", text):
        path = PurePosixPath(word)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise UserError(
                f"OUTPUT={text}: {word} is outside the folder in which the script runs: make "
                "the script write below that folder, and type the folder's name, such as "
                "OUTPUT=checkpoints."
            )
        folders.append(str(path))
    return tuple(folders)
