"""Builds the Program of a user's own script from SCRIPT= and the options that belong to it. The
script is read here, and never executed. The same public functions are in build_trainer.py for
Tandem's trainer; programs.py chooses.
"""

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
from launcher.options import VARIABLES, make_config
from launcher.program import LAST, Program

# Variables of make that belong to the trainer alone, and that belong to SCRIPT= alone.
TRAINER_VARIABLES = tuple(name for name in VARIABLES if name != "data")
SCRIPT_VARIABLES = ("folder", "output", "resume_args", "resume_from", "requirements", "precheck")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)  # package.train
PLACEHOLDER = re.compile(r"\{\w+\}")  # {last}, or a mistake such as {latest}
SHELL_SUFFIXES = (".sh", ".bash", ".zsh")
# --hf_token X, --api-key=X, wandb.password=X; but neither --max_tokens 512 nor --mask_token [MASK].
# SECRET_VALUE: at least 8 characters with a digit, and no number, option or path.
SECRET = re.compile(
    r"((?:.*[-_.])?(?:token|secret|password|passwd|(?:api[-_]?)key|credentials?))(?:=(.*))?", re.I
)
SECRET_VALUE = re.compile(r"(?!-)(?=.*\d)(?=.*[^\d.])[^\s/]{8,}")
# A script that declares such an option gets its rank on the PC as this option, as older versions of
# torch.distributed.launch gave it.
LOCAL_RANK_OPTIONS = ("--local_rank", "--local-rank")

# Phrases of the report's advice for users of a script; `{}` is the strategy.
PHRASES = {
    "sync": 'tandem.sync.attach(model, "{}", optimizer=optimizer) in the script',
    "warmed_up": "with more steps, or with attach's warmup_steps=0",
    "batch": "twice the batch of each rank, with the script's own option",
    "workers": "twice the loader processes (the DataLoader's num_workers)",
    "saving": "save half as often",
    "memory": "Fewer loader processes (the DataLoader's num_workers) or a smaller batch",
    "longer": "the same script, with options for a longer training (ARGS=)",
}

# Runs on the machine of node 0, whose Python decides whether the script is Python: it may be newer
# than the control node's. `python` in PRECHECK is the Python of the ranks.
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


def resolve_paths(typed: dict[str, Any]) -> None:
    """Replace SCRIPT= and FOLDER= by absolute paths, in the options that were `typed`. Raises
    UserError, also for variables that have no meaning together."""
    names = {name for name, value in typed.items() if value not in (None, [], ())}
    if "script" in names:
        refused = [name.upper() for name in TRAINER_VARIABLES if name in names]
        if refused:
            raise UserError(
                f"{', '.join(refused)} belongs to Tandem's trainer, but SCRIPT= starts your "
                "own program: type the options of your program in ARGS=."
            )
        typed["script"], typed["folder"] = resolve_script(typed["script"], typed.get("folder"))
    # A resumed run has its script in plan.json, so these variables are for that script.
    elif "resume" not in names:
        refused = [name.upper() for name in SCRIPT_VARIABLES if name in names]
        if refused:
            raise UserError(f"{refused[0]} works only with your own script: type SCRIPT=, too.")


def resolve_script(script: str, folder: str | None) -> tuple[str, str]:
    """Return SCRIPT and FOLDER as a run records them, with absolute paths. FOLDER is by default the
    git checkout that has the script, else the script's folder. Raises UserError."""
    words = split_script(script)
    if words[0] == "-m":
        # Python looks for a module below the current folder, so the user means that folder.
        root = path_of("FOLDER", folder or ".")
        return f"-m {words[1]}", str(root if folder else _find_checkout(root) or root)
    file = path_of("SCRIPT", script, words[0])
    if not file.is_file():
        raise UserError(f"SCRIPT={script}: there is no file {file}.")
    root = path_of("FOLDER", folder) if folder else _find_checkout(file.parent) or file.parent
    if not file.is_relative_to(root):
        raise UserError(f"FOLDER={folder} does not contain SCRIPT={script}.")
    return str(file), str(root)


def split_script(script: str) -> list[str]:
    """Split SCRIPT= into one word, a file, or two words: -m and a module. Raises UserError."""
    try:
        # A file's name may have spaces: quotes around it would have to come through two shells.
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


def _find_checkout(folder: Path) -> Path | None:
    """Return the git checkout that a folder is in; None without one, and for Tandem's own, which is
    no folder of the user's."""
    root = git.root_of(folder)
    return None if root in (None, CHECKOUT) else root


def resume_config(began: Config, typed: Mapping[str, Any]) -> Config:
    """Return the options of a run that `began` with other options, and continues with those that
    are `typed` now. Raises UserError for an option that a run keeps, and if nobody said how the
    script continues."""
    # `resume` and `detach` are options of the command. The data may be in another folder now.
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
    config = make_config(typed, began)
    # Without RESUME_ARGS the script would train from its beginning, and overwrite what it saved.
    if not config.resume_args:
        raise UserError(
            "Tandem does not know how the script resumes: type RESUME_ARGS=, such as "
            "RESUME_ARGS='--resume {last}' (docs/own-script.md)."
        )
    return config


def build(config: Config) -> Program:
    """Return the Program for these options. The files to send are copied at the same time. Raises
    UserError."""
    # Imported late, because the error about a mistyped option need not wait for these.
    from launcher.plan import code
    from launcher.plan.requirements import find_requirements, read_requirements
    from launcher.plan.sources import find_declared_option, find_loaded

    assert config.script is not None and config.folder is not None
    root, script_words = Path(config.folder), split_script(config.script)
    is_module = script_words[0] == "-m"
    file = _find_file(config.script, script_words, root)
    script_folder = str(file.parent.relative_to(root))
    # A large folder is rejected before any file is parsed.
    files = code.take_snapshot(root, script_folder).files
    script_path = file.relative_to(root).as_posix()
    if script_path not in files.sent:
        raise UserError(
            f"SCRIPT={config.script}: Tandem does not send {script_path} "
            f"({files.reason_unsent(script_path)}): type another script or another FOLDER=."
        )
    # A shell script that starts Python is the usual mistake here: torch's launcher would report a
    # syntax error from every rank.
    with file.open("rb") as opened:
        first_line = opened.readline(200).decode(errors="replace").strip()
    shell = first_line.removeprefix("#!").strip() if first_line.startswith("#!") else ""
    if not shell or "python" in shell:
        shell = "a shell" if file.suffix in SHELL_SUFFIXES else ""
    if shell:
        raise UserError(
            f"SCRIPT={config.script} is a script for {shell}, but torch's launcher starts "
            "only Python files: type the Python file that it starts, such as "
            "SCRIPT=train.py, and its options in ARGS=."
        )
    requirements_file = find_requirements(dict.fromkeys((file.parent, root)), config.requirements)
    outputs, resume = _read_outputs(config.output), _split("RESUME_ARGS", config.resume_args)
    _check_resume(config, outputs, resume)
    # Python puts the folder of a script first on its path, but not that of a module.
    loaded = find_loaded(file, [root] if is_module else [file.parent, root])
    divides_batches = "tandem" in loaded.packages
    notes = _notes_on_secrets(config.words)
    if config.balance not in (None, OFF) and not divides_batches:
        notes.append(
            f"BALANCE={config.balance}: the script does not import tandem, so its batches stay as "
            "they are: use tandem.sampler or tandem.batch_size (docs/own-script.md)."
        )
    name = script_words[1] if is_module else script_path
    # The words of CHECK: a file to compile, which a module is not, and PRECHECK; "" for none.
    check = ("-c", CHECK, "" if is_module else script_path, config.precheck or "")
    # launcher/node/supervisor.py reads the variable, and gives the rank as this option.
    local_rank = find_declared_option(loaded.sources, LOCAL_RANK_OPTIONS)
    return Program(
        # train for tools/train.py and for package.train
        name=name.rpartition(".")[2] if is_module else PurePosixPath(name).stem,
        typed=f"SCRIPT={name}",
        # Without --, launch takes --d for the beginning of an option of its own.
        words=("--use_env", *(["-m"] if is_module else []), "--", name, *config.words),
        env={"TANDEM_LOCAL_RANK": local_rank} if local_rank else {},
        resume=resume or None,
        needs_port=True,
        divides_batches=divides_batches,
        check=check if config.precheck or not is_module else (),
        folder=root,
        script_folder=script_folder,
        runs_in_folder=True,
        requirements=read_requirements(requirements_file) if requirements_file else None,
        modules=tuple(sorted(loaded.packages - {"tandem"} - files.modules())),
        data_kind=FILES,
        outputs=outputs,
        resumes_own=bool(config.resume_from),
        command=shlex.join([*script_words, *config.words]),
        phrases=PHRASES,
        notes=tuple(notes),
    )


def _find_file(script: str, words: list[str], root: Path) -> Path:
    """Return the file of a script whose `words` split_script returned. A module is a file below
    FOLDER, which is `root`. Raises UserError."""
    if not root.is_dir():
        raise UserError(f"FOLDER={root}: there is no such folder.")
    file = Path(words[0])
    if words[0] == "-m":
        module = words[1]
        stem = root / module.replace(".", "/")
        file = stem.with_suffix(".py")
        if not file.is_file():
            file = stem / "__main__.py"  # the module is a package
        if not file.is_file():
            raise UserError(
                f'SCRIPT="-m {module}": {root} has no such module: set FOLDER= to the '
                f"folder that contains {module.partition('.')[0]}."
            )
    if file.suffix == ".ipynb":
        raise UserError(
            f"SCRIPT={script} is a notebook, but torch's launcher starts only Python "
            f"files: convert it with `jupyter nbconvert --to script {file.name}`, which "
            f"writes {file.stem}.py."
        )
    return file


def executed_options(config: Config) -> dict[str, str]:
    """Return the options that make a run execute or send something, by name, as they are typed."""
    names = ("script", "folder", "requirements", "precheck")
    values = {name: getattr(config, name) for name in names}
    return {name: as_typed(name.upper(), value) for name, value in values.items() if value}


def _check_resume(config: Config, outputs: tuple[str, ...], resume: tuple[str, ...]) -> None:
    """Raise UserError if RESUME_ARGS=, RESUME_FROM=, OUTPUT= and MAX_RESTARTS= contradict each
    other."""
    placeholders = [match[0] for word in resume for match in PLACEHOLDER.finditer(word)]
    unknown = [placeholder for placeholder in placeholders if placeholder != LAST]
    if unknown:
        raise UserError(
            f"RESUME_ARGS={config.resume_args}: nothing replaces {unknown[0]}: only {LAST} becomes "
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


def _notes_on_secrets(words: tuple[str, ...]) -> list[str]:
    """Return a sentence on arguments that look like a password, or [] if there are none."""
    # The value may be in the same word, --token=X, or in the next one, --token X.
    names = [
        match[1]
        for word, following in zip(words, (*words[1:], ""))
        if (match := SECRET.fullmatch(word)) and SECRET_VALUE.fullmatch(match[2] or following)
    ]
    if not names:
        return []
    return [
        f"{', '.join(names)}: every user of the machines and every reader of report.html can "
        "read ARGS. Put secrets into run_env in the inventory, or into a file."
    ]


def _split(name: str, text: str | None) -> tuple[str, ...]:
    """Split the text of a variable into words, as a shell does. Raises UserError."""
    try:
        return tuple(shlex.split(text or ""))
    except ValueError:
        raise UserError(f"{name}={text}: a quote is not closed.") from None


def _read_outputs(text: str | None) -> tuple[str, ...]:
    """Return the folders of OUTPUT=, relative to the folder in which the script runs. Raises
    UserError."""
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
