"""Chooses between build_script.py and build_trainer.py, which build the Program of a run. No other
module asks which of the two kinds a program is.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from contract.options import Config
from launcher.program import Program


def builder_of(config: Config) -> ModuleType:
    """Return build_script.py or build_trainer.py, which have the same functions."""
    # A run needs only one of these modules, and each imports much.
    if config.script:
        from launcher import build_script

        return build_script
    from launcher import build_trainer

    return build_trainer


def build_program(config: Config) -> Program:
    """Return the Program that these options ask for. Raises UserError."""
    program: Program = builder_of(config).build(config)
    return program


def resolve_paths(typed: dict[str, Any]) -> None:
    """Replace SCRIPT=, FOLDER= and MODEL= among the typed options by absolute paths. Raises
    UserError, also for variables that have no meaning together."""
    from launcher import build_script, build_trainer

    # The script comes first: it rejects options of the trainer.
    build_script.resolve_paths(typed)
    build_trainer.resolve_paths(typed)
