"""Builds the Program of Tandem's trainer from MODEL=, DATA= and the other options of the trainer.
The same public functions are in build_script.py for scripts; programs.py chooses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.options import (
    DEFAULT_MODEL,
    MODEL_OF_DATA,
    RESULTS,
    RESULTS_FOLDER,
    TIMM,
    Config,
    as_typed,
    in_words_of_make,
    path_of,
)
from contract.options import Options as TrainerOptions
from contract.runs import short_name
from launcher.machines.inventory import CHECKOUT
from launcher.options import make_config
from launcher.program import Program, SentFile

TIMM_PACKAGES = CHECKOUT / "requirements/timm.txt"
FETCHED_PREFIXES = ("torchvision:", TIMM)  # of weights that are fetched by their name
OUR_PACKAGES = {"trainer", "tandem", "contract", "examples"}  # sent in any case


def build(config: Config) -> Program:
    """Return the Program for these options. Raises UserError."""
    settings = read_settings(config)
    options = collect_trainer_options(config)
    model, weights = settings.model, settings.weights
    folder = model_folder(model)
    files: list[SentFile] = []
    if weights and weights.startswith(FETCHED_PREFIXES):
        from launcher.plan import pretrained  # imports a client for HTTP, which few runs need

        named_weights = pretrained.find_weights(settings)
        files.append(SentFile("TANDEM_WEIGHTS", f"weights {weights}", pretrained=named_weights))
    elif weights and (path := path_of("WEIGHTS", weights)).is_file():
        files.append(SentFile("TANDEM_WEIGHTS", f"weights {weights}", path))
    elif weights and not Path(weights).is_absolute():
        # On other machines only a path from / leads anywhere.
        raise UserError(
            f"WEIGHTS={weights}: there is no such file on the control node: correct the path, or "
            "type an absolute path at which every machine has the file."
        )
    timm = None
    if model.startswith(TIMM):
        from launcher.plan.requirements import read_requirements

        timm = read_requirements(TIMM_PACKAGES)
    # TANDEM_WEIGHTS has the path, which differs from machine to machine.
    if files:
        options.pop("weights")
    words = ("-m", "trainer", "--config", json.dumps(options))
    return Program(
        name=model,
        typed=f"MODEL={model}",
        words=words,
        env={"TANDEM_MODEL_FOLDER": "own"} if folder else {},
        resume=("--resume", "auto"),
        device=settings.device,
        parallel=settings.parallel,
        check=(*words, "--check"),
        request=settings.request,
        folder=folder,
        files=tuple(files),
        requirements=timm,
        unless_module="timm",
        modules=list_imports(model),
        results=tuple(f"{RESULTS_FOLDER}/{options[name]}" for name in RESULTS if options.get(name)),
        ranks_pass_on=True,
        has_exit_codes=True,
        sample="image",
        times_steps=True,
        adjustable=True,
        when_stopped="save and exit",
        phrases=PHRASES,
    )


def executed_options(config: Config) -> dict[str, str]:
    """Return the options that make a run execute or send something, by name, as they are typed.
    Raises UserError."""
    options = collect_trainer_options(config)
    model, weights = str(options["model"]), options.get("weights")
    executed = {}
    if ":" in model and model != DEFAULT_MODEL:  # a function that the user named
        executed["model"] = as_typed("MODEL", model)
    if weights:
        executed["weights"] = as_typed("WEIGHTS", weights)
    return executed


# Phrases of the report's advice for users of the trainer's variables; `{}` is the strategy.
PHRASES = {
    "sync": "SYNC={}",
    "warmed_up": "with more EPOCHS, or with ARGS='--sync_warmup 0'",
    "batch": "twice the BATCH per node (--accumulate 2 if memory is short)",
    "workers": "twice the loader processes (--workers)",
    "saving": "save half as often (--checkpoint_every)",
    "memory": "Fewer loader processes (ARGS='--workers 1') or a smaller BATCH",
    "longer": "more EPOCHS",
}


def collect_trainer_options(config: Config) -> dict[str, Any]:
    """Return the options for the trainer, the same on each machine: the options of a file, which
    may be the recipe for this model and data, and then the typed options, which replace them.
    Raises UserError."""
    from contract.command_line import read_config

    typed = dict(config.trainer)
    file, model = typed.pop("config", None), typed.get("model", MODEL_OF_DATA)
    # A path of data may be on any disk and have any name, so it has no recipe.
    recipe = CHECKOUT / f"recipes/{short_name(model)}-{config.data}.yaml"
    if file is None and "/" not in config.data and recipe.exists():
        file = str(recipe)
    return {"model": model, **typed} if file is None else {**read_config(file), **typed}


def read_settings(config: Config) -> TrainerOptions:
    """Return every option of the trainer as its ranks will read it. Raises UserError."""
    # Some options are valid only with a folder to write to, which differs from machine to machine.
    # Here any folder will do.
    options = {"output": ".", **collect_trainer_options(config)}
    for name in RESULTS:
        file = options.get(name)
        if file and (file == ".." or Path(file).name != file):
            raise UserError(
                f"ARGS='--{name} {file}': Tandem writes the file into "
                f"runs/<run>/{RESULTS_FOLDER}: type a name without a folder, such as "
                f"{Path(file).name or name}."
            )
    try:
        return TrainerOptions(**options)
    except UserError as error:
        raise UserError(in_words_of_make(str(error))) from None


# ---- MODEL= ----


def is_path(model: str) -> bool:
    """Return whether a model is given as path/file.py:function."""
    return ":" in model and model.rpartition(":")[0].endswith(".py")


def model_folder(model: str) -> Path | None:
    """Return the folder to send for a model that is given by its path; None for others."""
    return Path(model.rpartition(":")[0]).parent if is_path(model) else None


def resolve_paths(typed: dict[str, Any]) -> None:
    """Replace the file in MODEL=path/file.py:function, among the options that were `typed`, by its
    absolute path. A file of examples/ is sent in any case, and becomes a module. Raises
    UserError."""
    model = typed.get("model", "")
    path, function = model.rsplit(":", 1) if ":" in model else (model, "")
    if not path.endswith(".py"):
        return
    file = path_of("MODEL", model, path)
    if not file.is_file():
        raise UserError(f"MODEL={model}: there is no file {file}.")
    if not function:
        raise UserError(
            f"MODEL={model}: name the function that returns the model, like MODEL={path}:build."
        )
    if file.is_relative_to(CHECKOUT / "examples"):
        module = file.relative_to(CHECKOUT).with_suffix("")
        typed["model"] = f"{'.'.join(module.parts)}:{function}"
    else:
        typed["model"] = f"{file}:{function}"


def list_imports(model: str) -> tuple[str, ...]:
    """Return the packages that the files of a user's own model import, except the standard library
    and packages that are sent."""
    if ":" not in model:
        return ()
    if model.startswith(TIMM):
        return ("timm",)
    from launcher.plan.sources import find_loaded

    # A model is path/file.py:function, or module:function of the checkout or of the environment.
    path, _, _ = model.rpartition(":")
    root = model_folder(model) or CHECKOUT
    file = root / (Path(path).name if is_path(model) else f"{path.replace('.', '/')}.py")
    names = find_loaded(file, [root]).packages
    names |= set() if is_path(model) or file.is_file() else {path.partition(".")[0]}
    return tuple(sorted(names - OUR_PACKAGES))


def resume_config(began: Config, typed: Mapping[str, Any]) -> Config:
    """Return the options of a run that continues. The ranks refuse them if an option that a run
    keeps differs from the newest checkpoint's (trainer/resume.py)."""
    return make_config(typed, began)
