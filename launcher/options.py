"""What a person asked for, and what the trainer makes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract import command_line
from contract.errors import UserError
from contract.options import DEFAULT_DATA, DEFAULT_INVENTORY, ENTRIES, MODEL_OF_DATA, VARIABLES
from contract.options import Options as TrainerOptions
from contract.runs import short_name
from contract.strategies import AUTO, EXACT, instead_of
from contract.validate import LARGEST, NATURAL, Match, Maybe, One
from launcher.machines.inventory import CHECKOUT


@dataclass(frozen=True)
class Options:
    """The options of `python -m launcher train`; None means the tools' own default. `data` is empty
    where the run trains on noise (measure.py). `variables` has what was given of the trainer's
    other options that are variables of make, by these names in lower case: epochs, batch ...; and
    `trainer` the words after `--`. With a `script` these are the script's, and what else concerns
    the trainer is empty (launcher/plan/script.py). `at`, `until`: when the run begins and ends, in
    Unix seconds."""

    inventory: str = DEFAULT_INVENTORY
    nodes: int | None = None
    model: str | None = None
    data: str = DEFAULT_DATA
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)
    script: str | None = None
    folder: str | None = None
    output: str | None = None
    resume_args: str | None = None
    resume_from: str | None = None
    requirements: str | None = None
    max_restarts: int = 0
    min_nodes: int | None = None
    balance: str = "auto"
    at: int | None = None
    until: int | None = None
    port: int | None = None
    queue: bool = False
    force: bool = False
    keep: str | None = None
    trainer: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Options from values by name, as the command line gives them and plan.json keeps them;
        one that is None was not given. Raises UserError for a name that is none."""
        values = {name: value for name, value in given.items() if value is not None}
        own = {name: values.pop(name) for name in FIELDS if name in values}
        unknown = [name for name in values if name.upper() not in VARIABLES]
        if unknown:
            raise UserError(f"{unknown[0]} is no option of python -m launcher train.")
        return cls(**{**own, "trainer": tuple(own.get("trainer", ()))}, variables=values)

    def flat(self) -> dict[str, Any]:
        """The values by name, from which `of` makes these options again."""
        own = {name: getattr(self, name) for name in FIELDS}
        return {**own, **self.variables}

    def trainer_args(self) -> list[str]:
        """Arguments of the trainer, except its folders: the same on each node. Raises UserError."""
        files, words = _split_config(self.trainer)
        model = self.model or MODEL_OF_DATA
        own = CHECKOUT / f"recipes/{short_name(model)}-{self.data}.yaml"
        if not files and "/" not in self.data and own.exists():
            files = [own]
        with _trainers_words():
            args = [word for file in files for word in command_line.read_config(str(file))]
        if "precision" in self.variables:  # a recipe's `auto` would stand beside the level chosen
            args = without("--precision", args)
        if self.model or not files:
            args += ["--model", model]
        for name, value in self.variables.items():
            args += [f"--{VARIABLES[name.upper()]}", str(value)]
        return args + words

    def asked(self, name: str) -> str:
        """The last value given to an option of the trainer; empty where there is none. Raises
        UserError."""
        value = ""
        words = self.trainer_args()
        for word, following in zip(words, [*words[1:], ""]):
            given, equals, own = word.partition("=")
            if given == name:
                value = own if equals else following
        return value

    def with_precision(self, level: str) -> Options:
        """The options with the level that was decided in place of the one asked for."""
        return self._with("precision", level)

    def with_sync(self, spec: str) -> Options:
        return self._with("sync", spec)

    def _with(self, name: str, value: str) -> Options:
        words = tuple(without(f"--{name}", self.trainer))
        variables = {**self.variables, name: value}
        return dataclasses.replace(self, variables=variables, trainer=words)


FIELDS = tuple(field.name for field in dataclasses.fields(Options) if field.name != "variables")


# Options as plan.json has them: words, paths, whole numbers; an older plan may lack variables.
WORD, COUNT = Match("[^\0-\x1f\x7f-\x9f\ud800-\udfff]*"), (None, One(range(1, LARGEST)))
STORED: dict[str, object] = {
    **dict.fromkeys(("inventory", "data"), WORD),
    **dict.fromkeys(("model", "keep"), (None, WORD)),
    **dict.fromkeys(("script", "folder", "output", "resume_args", "requirements"), Maybe(WORD)),
    **{"resume_from": Maybe(One(("self",)))},
    **dict.fromkeys(("nodes", "min_nodes"), COUNT),
    **{"max_restarts": NATURAL, "port": (None, One(range(1 << 16)))},
    **dict.fromkeys(("at", "until"), Maybe(NATURAL)),
    **{"balance": Maybe(WORD), "queue": bool, "force": bool, "trainer": [WORD]},
    **{
        name.lower(): Maybe((WORD, NATURAL))
        for name, option in VARIABLES.items()
        if option not in FIELDS
    },
}


def without(name: str, words: Sequence[str]) -> list[str]:
    """`words` without an option and its value."""
    kept: list[str] = []
    skipping = False
    for word in words:
        if not skipping and word.partition("=")[0] != name:
            kept.append(word)
        skipping = not skipping and word == name
    return kept


def _split_config(trainer: tuple[str, ...]) -> tuple[list[Path], list[str]]:
    """The files of --config, and all other words. Raises UserError."""
    files: list[Path] = []
    words = list(trainer)
    for index in reversed(range(len(words))):
        name, equals, path = words[index].partition("=")
        if name != "--config":
            continue
        if not equals and index + 1 == len(words):
            raise UserError("--config needs a file: --config recipes/resnet18-digits.yaml.")
        files.insert(0, Path(path if equals else words[index + 1]))
        del words[index : index + (1 if equals else 2)]
    return files, words


@contextlib.contextmanager
def _trainers_words(typed: Sequence[str] = ()) -> Iterator[None]:
    """Turns the trainer's sentence about bad input into an error of the launcher, in words of make:
    BATCH=0 rather than --per_node_batch_size 0. What was `typed` for the trainer keeps its name."""
    try:
        yield
    except UserError as error:
        raise UserError(in_words_of_make(str(error), typed)) from None


def in_words_of_make(text: str, typed: Sequence[str]) -> str:
    own = {word.partition("=")[0] for word in typed}
    for name, option in VARIABLES.items():
        if f"--{option}" not in own:
            text = re.sub(rf"--{option} (?=[^-\s])", f"{name}=", text)
    return text


def asks_for_help(options: Options) -> bool:
    return not {"-h", "--help"}.isdisjoint(options.trainer)


def trainer_help() -> int:
    """Print what may come after `--`; returns the exit code."""
    command_line.parser().print_help()
    return 0


def trainer_settings(options: Options) -> TrainerOptions:
    """Every option of the trainer as it will read them. Raises UserError."""
    # Some options need a folder to write to: each node gets one of its own.
    argv = ["--output", ".", *options.trainer_args()]
    with _trainers_words(options.trainer):
        return command_line.parse(argv)


def typed(name: str, value: object) -> str:
    """An option of the trainer as people give it to make."""
    if ENTRIES[name].make:
        return f"{ENTRIES[name].make}={value}"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"ARGS='--{name} {text}'"


def resumed(began: Options, changes: dict[str, Any]) -> Options:
    """The options of a run that is resumed: those it began with, and `changes`, which has the
    fields that were given now; words for the trainer are added. `began` names precision and
    strategy as they were decided. Raises UserError for changes after which other things would be
    learned."""
    before = began.asked("--sync")
    if instead := instead_of(before):
        raise UserError(
            f"the run cannot go on: SYNC={before}, with which it began, is no longer there. Start "
            f"a new run with SYNC={instead}, from this one's weights (ARGS='--weights FILE')."
        )
    words = (*began.trainer, *changes.get("trainer", ()))
    options = Options.of({**began.flat(), **changes, "trainer": words})
    if options.asked("--sync") == AUTO:
        options = options.with_sync(began.variables.get("sync", EXACT))
    if trainer_settings(options).precision == "auto":
        options = options.with_precision(began.variables.get("precision", "auto"))
    # For another model or data set the recipe is another, too, which would only repeat the reason.
    same_recipe = dataclasses.replace(options, data=began.data, model=began.model)
    then = trainer_settings(began)
    model = trainer_settings(options).model
    now = dataclasses.replace(trainer_settings(same_recipe), model=model)
    fixed = [name for name, entry in ENTRIES.items() if not entry.resumable]
    values = [(name, getattr(now, name), getattr(then, name)) for name in fixed]
    other = [(name, new, old) for name, new, old in values if new != old]
    if options.data != began.data:
        other.insert(0, ("data", options.data, began.data))
    if other:
        said = [f"{typed(name, new)} (the run has {old})" for name, new, old in other]
        raise UserError(
            f"the run goes on as it began: leave out {' and '.join(said)}, or start a new run. A "
            "run that is resumed may have other machines (NODES, MIN_NODES, INVENTORY), another "
            "MAX_RESTARTS or KEEP, and ARGS that do not change what is learned (docs/launcher.md)."
        )
    return options


# What may be another when a script's run goes on.
RESUMABLE = (
    *("inventory", "nodes", "min_nodes", "max_restarts", "port", "queue", "force", "keep"),
    *("resume_args", "resume_from", "output", "at", "until"),
)


def script_resumed(began: Options, changes: dict[str, Any]) -> Options:
    """The same of a script's run. Raises UserError."""
    wrong = [name for name, value in changes.items() if name not in RESUMABLE and value]
    if wrong:
        words = {"trainer": "ARGS"}
        raise UserError(
            f"the run goes on as it began: leave out {words.get(wrong[0], wrong[0].upper())}, or "
            "start a new run."
        )
    options = Options.of({**began.flat(), **changes})
    if not options.resume_args:
        raise UserError(
            "how the script goes on was not said: give RESUME_ARGS=, like RESUME_ARGS='--resume "
            "{last}' (docs/own-script.md)."
        )
    return options
