"""Makes a Config from the options that a user typed, or that plan.json has, and writes a Config as
plan.json has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional, Union

from msgspec import Meta, defstruct

from boundary.run_files import Line
from boundary.schema import LARGEST, Count
from contract.command_line import trainer_words, words_for_trainer
from contract.options import (
    RUN_OPTIONS,
    TRAINER_OPTIONS,
    Config,
    Option,
    default_model,
    integer,
    switch,
    time_of_day,
)
from launcher.hours import read_times

# {a variable of make, in lower case: its name in the trainer's options}
VARIABLES = {row.make.lower(): name for name, row in TRAINER_OPTIONS.items() if row.make}


def make_config(typed: Mapping[str, Any], began: Config | None = None) -> Config:
    """Return the Config of the options that were typed for a verb (command_line.verb_words). All
    other options are as in `began`, the run that is resumed. Raises UserError."""
    began = began or Config()
    values = {name: typed[name] for name in RUN_OPTIONS if name in typed}
    values.update(read_times(typed.get("at"), typed.get("until")))
    words = typed.get("args", ())
    # ARGS of a script are its own words; ARGS of the trainer are options, which are checked now.
    if typed.get("script") or began.script:
        data = typed.get("data", began.data if began.script else "")
        return dataclasses.replace(began, **values, data=data, words=(*began.words, *words))
    trainer = {name: typed[key] for key, name in VARIABLES.items() if key in typed}
    data = trainer.pop("data", began.data)
    trainer = {**began.trainer, **trainer, **trainer_words(words)}
    return dataclasses.replace(began, **values, data=data, trainer=trainer)


def new_config(typed: Mapping[str, Any]) -> Config:
    """Return the Config of a new run. Raises UserError."""
    config = make_config(typed)
    if config.script or not {"model", "config"}.isdisjoint(config.trainer):
        return config
    # The user named neither a model nor a file with options: the data decide.
    model = default_model(None, typed.get("data"))
    return dataclasses.replace(config, trainer={**config.trainer, "model": model})


def _stored_type(row: Option) -> Any:
    """Return the type that an option's value in plan.json must have."""
    if row.type is switch:
        return bool
    if row.choices:
        return Literal[row.choices]
    if row.type is integer:
        return Annotated[int, Meta(ge=int(row.least), le=int(min(row.most, LARGEST)))]
    return Count if row.type is time_of_day else Line


# Options as plan.json has them; an older plan may lack some.
STORED = defstruct(
    "Stored",
    [
        ("data", Line),
        ("trainer", list[Line]),
        *(
            (name, Optional[_stored_type(row)], None)
            for name, row in RUN_OPTIONS.items()
            if row.stored
        ),
        *((key, Union[Line, Count, None], None) for key in VARIABLES if key != "data"),
    ],
)


def document(config: Config) -> dict[str, Any]:
    """Return the options of a run as plan.json has them, by the names of make's variables;
    `trainer` has the words for options without a variable, or a script's words."""
    trainer = dict(config.trainer)
    run_options = {name: getattr(config, name) for name, row in RUN_OPTIONS.items() if row.stored}
    variables = {key: trainer.pop(name, None) for key, name in VARIABLES.items() if key != "data"}
    typed = {key: value for key, value in variables.items() if value is not None or key == "model"}
    words = list(config.words) if config.script else words_for_trainer(trainer)
    return {**run_options, **typed, "data": config.data, "trainer": words}


def read(planned: Mapping[str, Any]) -> Config:
    """Return the Config that `document` wrote into plan.json, without AT and UNTIL. Raises
    UserError."""
    values = {key: value for key, value in planned.items() if value is not None}
    # These times are past, or were for the first start only.
    for key in ("at", "until"):
        values.pop(key, None)
    for key, name in VARIABLES.items():
        if key in values:
            values[key] = TRAINER_OPTIONS[name].read(key.upper(), str(values[key]))
    return make_config({**values, "args": values.pop("trainer")})
