"""The one place that knows that there are two kinds of program: which function builds the Program
of a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from contract.options import Config
from launcher.program import Program


def _builder(config: Config) -> ModuleType:
    # Each imports much, of which a run needs only one.
    if config.script:
        from launcher import build_script

        return build_script
    from launcher import build_trainer

    return build_trainer


def build_program(config: Config) -> Program:
    """Return the Program that these options ask for. Raises UserError."""
    program: Program = _builder(config).build(config)
    return program


def executes(config: Config) -> dict[str, str]:
    """Return what these options would execute or send, as it is typed, by the option's name. Raises
    UserError."""
    named: dict[str, str] = _builder(config).executes(config)
    return named


def resume_config(began: Config, typed: Mapping[str, Any]) -> Config:
    """Return the options of a run that continues: those that it began with, and what was typed now.
    Raises UserError."""
    config: Config = _builder(began).resume_config(began, typed)
    return config


def read_paths(typed: dict[str, Any]) -> None:
    """Replace what was typed for SCRIPT=, FOLDER= and MODEL= by absolute paths. Raises UserError,
    also for variables that have no meaning together."""
    from launcher import build_script, build_trainer

    # The script comes first: it rejects options of the trainer.
    build_script.read_paths(typed)
    build_trainer.read_paths(typed)
