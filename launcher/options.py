"""What a person asked for, as a Config, and what the trainer makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional, Union

from msgspec import Meta, defstruct

from boundary.run_files import Line
from boundary.schema import LARGEST, Count
from contract.command_line import trainer_words, words_for_trainer
from contract.options import (
    ENTRIES,
    RUN_OPTIONS,
    Config,
    Option,
    default_model,
    switch,
    time_of_day,
    whole,
)
from launcher.hours import moments

# {a variable of make, in lower case: its name in the trainer's options}
VARIABLES = {row.make.lower(): name for name, row in ENTRIES.items() if row.make}


def config_of(given: Mapping[str, Any], began: Config | None = None) -> Config:
    """The Config of what was typed for a verb (command_line.verb_words); what it leaves open is as
    in `began`. Raises UserError."""
    began = began or Config()
    values = {name: given[name] for name in RUN_OPTIONS if name in given}
    values.update(moments(given.get("at"), given.get("until")))
    words = given.get("args", ())
    if given.get("script") or began.script:
        data = given.get("data", began.data if began.script else "")
        return dataclasses.replace(began, **values, data=data, words=(*began.words, *words))
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
