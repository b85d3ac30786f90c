"""What a person asked for, as a Config, and what the trainer makes of it."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

from msgspec import Meta, defstruct

from boundary.run_files import Line
from boundary.schema import LARGEST, Count
from contract import git
from contract.command_line import read_config, trainer_words, words_for_trainer
from contract.errors import UserError
from contract.options import (
    ENTRIES,
    MODEL_OF_DATA,
    RESULTS,
    RUN_OPTIONS,
    Config,
    Option,
    as_typed,
    default_model,
    path_of,
    switch,
    time_of_day,
    whole,
)
from contract.options import Options as TrainerOptions
from contract.runs import short_name
from contract.strategies import AUTO, EXACT
from launcher.hours import moments
from launcher.machines.inventory import CHECKOUT

# {a variable of make, in lower case: its name in the trainer's options}
VARIABLES = {row.make.lower(): name for name, row in ENTRIES.items() if row.make}
# Those of the trainer's alone, and those that a script of the user's own has beside SCRIPT.
TRAINERS = (*VARIABLES, "balance")
COMPANIONS = ("folder", "output", "resume_args", "resume_from", "requirements")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
RESULTS_FOLDER = "results"  # of the run, for the files of RESULTS


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


def script_by_path(script: str, folder: str | None) -> tuple[str, str]:
    """SCRIPT and FOLDER as a run records them, with absolute paths. Raises UserError."""
    words = script_words(script)
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


def script_words(script: str) -> list[str]:
    """One file, or -m and a module. Raises UserError."""
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


def config_of(given: Mapping[str, Any], began: Config | None = None) -> Config:
    """The Config of what was typed for a verb (command_line.verb_words); what it leaves open is as
    in `began`. Raises UserError."""
    began = began or Config()
    values = {name: given[name] for name in RUN_OPTIONS if name in given}
    values.update(moments(given.get("at"), given.get("until")))
    words = given.get("args", ())
    if given.get("script") or began.script:
        return dataclasses.replace(began, **values, data="", words=(*began.words, *words))
    trainer = {name: given[key] for key, name in VARIABLES.items() if key in given}
    data = trainer.pop("data", began.data)
    trainer = {**began.trainer, **trainer, **trainer_words(words)}
    return dataclasses.replace(began, **values, data=data, trainer=trainer)


def new_config(given: Mapping[str, Any]) -> Config:
    """The Config of a new run. Raises UserError."""
    config = config_of(given)
    if config.script or not {"model", "config"}.isdisjoint(config.trainer):
        return config
    return with_trainer(config, model=default_model(None, given.get("data")))


def with_trainer(config: Config, **given: Any) -> Config:
    """The same with other values for the trainer, such as those that were decided."""
    return dataclasses.replace(config, trainer={**config.trainer, **given})


def _kind(row: Option) -> Any:
    if row.type is switch:
        return bool
    if row.choices:
        return Literal[row.choices]
    if row.type is whole:
        return Annotated[int, Meta(ge=int(row.least), le=int(min(row.most, LARGEST)))]
    return Count if row.type is time_of_day else Line


# Options as plan.json has them; an older plan may lack some.
STORED = defstruct(
    "Stored",
    [
        ("data", Line),
        ("trainer", list[Line]),
        *((name, Optional[_kind(row)], None) for name, row in RUN_OPTIONS.items() if row.stored),
        *((key, Union[Line, Count, None], None) for key in VARIABLES if key != "data"),
    ],
)


def document(config: Config) -> dict[str, Any]:
    """The options of a run as plan.json has them, by the names of make's variables; `trainer` has
    the words for what has no variable, or a script's words."""
    left = dict(config.trainer)
    own = {name: getattr(config, name) for name, row in RUN_OPTIONS.items() if row.stored}
    named = {key: left.pop(name, None) for key, name in VARIABLES.items() if key != "data"}
    known = {key: value for key, value in named.items() if value is not None or key == "model"}
    words = list(config.words) if config.script else words_for_trainer(left)
    return {**own, **known, "data": config.data, "trainer": words}


def read(planned: Mapping[str, Any]) -> Config:
    """The Config that `document` made, without its hours. Raises UserError."""
    given = {key: value for key, value in planned.items() if value is not None}
    for key in ("at", "until"):
        given.pop(key, None)
    for key, name in VARIABLES.items():
        if key in given:
            given[key] = ENTRIES[name].read(key.upper(), str(given[key]))
    return config_of({**given, "args": given.pop("trainer")})


def for_trainer(config: Config) -> dict[str, Any]:
    """What the trainer is given, except its folders, the same on each node: the options of a file,
    which may be the recipe for this model and data, and over them those that were typed. Raises
    UserError."""
    typed = dict(config.trainer)
    file, model = typed.pop("config", None), typed.get("model", MODEL_OF_DATA)
    recipe = CHECKOUT / f"recipes/{short_name(model)}-{config.data}.yaml"
    if file is None and "/" not in config.data and recipe.exists():
        file = str(recipe)
    if file is None:
        return {"model": model, **typed}
    return {**read_config(file), **typed}


def trainer_settings(config: Config) -> TrainerOptions:
    """Every option of the trainer as it will read them. Raises UserError."""
    # Some options need a folder to write to: each node gets one of its own.
    given = {"output": ".", **for_trainer(config)}
    for name in RESULTS:
        file = given.get(name)
        if file and (file == ".." or Path(file).name != file):
            raise UserError(
                f"{typed(name, file)}: the file comes into the run's folder, "
                f"runs/<run>/{RESULTS_FOLDER}: give a name without a folder, like "
                f"{typed(name, Path(file).name or name)}."
            )
    try:
        return TrainerOptions(**given)
    except UserError as error:
        raise UserError(in_words_of_make(str(error))) from None


def results(config: Config) -> list[str]:
    """The files that the trainer writes, below the run's folder."""
    given = for_trainer(config)
    return [f"{RESULTS_FOLDER}/{given[name]}" for name in RESULTS if given.get(name)]


def in_words_of_make(text: str) -> str:
    """The trainer's sentence with BATCH=0 rather than --per_node_batch_size 0."""
    for key, name in VARIABLES.items():
        text = re.sub(rf"--{name} (?=[^-\s])", f"{key.upper()}=", text)
    return text


def typed(name: str, value: object) -> str:
    """An option of the trainer as people give it to make."""
    row = ENTRIES[name]
    if row.make:
        return as_typed(row.make, value)
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"ARGS='--{name} {text}'"


def resumed(began: Config, given: Mapping[str, Any]) -> Config:
    """The Config of a run that is resumed: `began`, which names precision and strategy as they were
    decided, and what was typed now. Raises UserError for changes after which other things would be
    learned."""
    config = config_of(given, began)
    if for_trainer(config).get("sync") == AUTO:
        config = with_trainer(config, sync=began.trainer.get("sync", EXACT))
    if trainer_settings(config).precision == "auto":
        config = with_trainer(config, precision=began.trainer.get("precision", "auto"))
    # For another model or data set the recipe is another, too, which would only repeat the reason.
    then, model = trainer_settings(began), trainer_settings(config).model
    same = {**config.trainer, "model": began.trainer.get("model", MODEL_OF_DATA)}
    same_recipe = dataclasses.replace(config, data=began.data, trainer=same)
    now = dataclasses.replace(trainer_settings(same_recipe), model=model)
    fixed = [name for name, entry in ENTRIES.items() if not entry.changeable_on_resume]
    values = [(name, getattr(now, name), getattr(then, name)) for name in fixed]
    other = [(name, new, old) for name, new, old in values if new != old]
    if config.data != began.data:
        other.insert(0, ("data", config.data, began.data))
    if other:
        said = [f"{typed(name, new)} (the run has {old})" for name, new, old in other]
        raise UserError(
            f"the run goes on as it began: leave out {' and '.join(said)}, or start a new run. A "
            "run that is resumed may have other machines (NODES, MIN_NODES, INVENTORY), another "
            "MAX_RESTARTS or KEEP, and ARGS that do not change what is learned (docs/launcher.md)."
        )
    return config


def script_resumed(began: Config, given: Mapping[str, Any]) -> Config:
    """The same of a script's run. Raises UserError."""
    own = [key for key in given if key != "resume" and key not in RUN_OPTIONS]
    fixed = [
        key for key in given if key in RUN_OPTIONS and not RUN_OPTIONS[key].changeable_on_resume
    ]
    own += [key for key in fixed if given[key] != getattr(began, key)]
    wrong = [key for key in own if key not in ("resume", "detach")]
    if wrong or "balance" in given:
        raise UserError(
            f"the run goes on as it began: leave out {(wrong or ['balance'])[0].upper()}, or "
            "start a new run."
        )
    config = config_of(given, began)
    if not config.resume_args:
        raise UserError(
            "how the script goes on was not said: give RESUME_ARGS=, like RESUME_ARGS='--resume "
            "{last}' (docs/own-script.md)."
        )
    return config
