"""What is typed, read by the tables: words of the trainer, of a file of its options, and of a verb
of make. This is the only reader of a command line; each value has the type of its option."""

import argparse
import re
import shlex
from functools import partial
from typing import Any, Dict, Iterable, List, Mapping, NoReturn, Optional, Sequence, Tuple

from contract import verbs
from contract.errors import DATA_LOST, DIVERGED, OUT_OF_MEMORY, STOPPED, UserError
from contract.options import ENTRIES, GROUPS, Options, numbers, switch, whole

# Below this similarity, the hint would only be a guess.
NEAR = 0.66
TRAINER = "python -m trainer"
EPILOG = (
    "Dashes and underscores in option names are equivalent. Exit codes: 0 done, 2 bad input, "
    f"{STOPPED} stopped on request after saving, {OUT_OF_MEMORY} out of memory, {DIVERGED} the "
    f"loss or the weights were no finite numbers any more, {DATA_LOST} the disk or file server of "
    "the images failed."
)


METAVARS: Dict[Any, str] = {
    **{str: "VALUE", whole: "N", float: "X", numbers: "N,N,...", switch: "true|false"}
}


class Parser(argparse.ArgumentParser):
    """Of options by --name, with dashes or underscores. What it refuses is a UserError."""

    def __init__(self, program: str, **more: Any):
        super().__init__(program, allow_abbrev=False, argument_default=argparse.SUPPRESS, **more)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See `{self.prog} --help`.")

    def read(self, typed: Sequence[str], known: Iterable[str]) -> Tuple[Dict[str, Any], List[str]]:
        """{name: value} of what was typed, and the words that are no options. Raises UserError."""
        values, rest = self.parse_known_args([_underscored(word) for word in typed])
        for word in rest:
            if word.startswith("--"):
                raise UserError(_unknown(word.partition("=")[0], known, self.prog))
        return vars(values), rest


def _underscored(word: str) -> str:
    name, equals, value = word.partition("=")
    if not name.startswith("--") or " " in name:
        return word
    return f"--{name[2:].replace('-', '_')}{equals}{value}"


def _unknown(word: str, known: Iterable[str], program: str) -> str:
    """What to say of a flag that is none of the known ones."""
    near = verbs.nearest(word.lstrip("-"), known, NEAR)
    hint = f"Did you mean --{near}?" if near else f"See `{program} --help`."
    return f"unknown option {word[:80]}. {hint}"


def trainer_parser() -> Parser:
    parser = Parser(
        TRAINER,
        usage=f"{TRAINER} --data DIR --output DIR [options]",
        description="Train an image classifier on one or many processes.",
        epilog=EPILOG,
    )
    for name, row in ENTRIES.items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        default = "" if row.default in (None, False) else str(row.default).strip("()")
        shown = f"{row.help} (default: {default})" if default else row.help
        switched: Any = {"nargs": "?", "const": True} if row.type is switch else {}
        group.add_argument(
            f"--{name}",
            type=partial(row.read, f"--{name}"),
            help=shown.replace("%", "%%"),
            metavar="|".join(row.choices) or METAVARS[row.type],
            **switched,
        )
    return parser


def parse(argv: Sequence[str], defaults: Optional[Mapping[str, Any]] = None) -> Options:
    """The trainer's options; words override the file of --config, which overrides `defaults`.
    Raises UserError, and SystemExit after --help."""
    values = trainer_words(argv)
    if "config" in values:
        values = {**read_config(values["config"]), **values}
    return Options(**{**(defaults or {}), **values})


def trainer_words(argv: Sequence[str]) -> Dict[str, Any]:
    """{option of the trainer: the value given to it}. Raises UserError, and SystemExit after
    --help."""
    values, rest = trainer_parser().read(argv, ENTRIES)
    if rest:
        raise UserError(_unknown(rest[0], ENTRIES, TRAINER))
    return values


def words_for_trainer(values: Mapping[str, Any]) -> List[str]:
    """Return words from which trainer_words makes these values again. (None is the default.)"""
    words: List[str] = []
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            text = _text(value)
            # argparse would take a value that begins with a dash for another option.
            words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return words


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_config(path: str) -> Dict[str, Any]:
    """The options in a YAML file, a flat mapping of their names, or in JSON itself, as the launcher
    gives them. Raises UserError.

    The launcher reads recipes with it too: so nodes need neither the file nor a YAML reader, and a
    dry run shows every option that matters.
    """
    options = _loaded(path)
    if not isinstance(options, dict):
        raise UserError(f"--config {path}: expected lines like `epochs: 90`.")
    values = {}
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name not in ENTRIES:
            raise UserError(f"--config {path}: {_unknown(f'--{name}', ENTRIES, TRAINER)}")
        parts = value if isinstance(value, list) else [value]
        # Lists of lists may be references to one another, and written out fill the memory.
        plain = not any(isinstance(part, (list, dict, set)) for part in parts)
        typed = _text(value) if plain else ""
        if not plain or len(typed) > 4096:
            raise UserError(f"--config {path}: {name} is neither a value nor a list of values.")
        if value is not None:
            values[name] = ENTRIES[name].read(f"--{name}", typed)
    return values


def _loaded(path: str) -> Any:
    if path.startswith("{"):
        import json

        try:
            return json.loads(path)
        except (RecursionError, ValueError) as error:
            raise UserError(f"--config {path[:80]}: it is no JSON: {error}.") from None
    from contract.text import SHORT, read_text, read_yaml

    try:
        import yaml
    except ImportError as error:
        raise UserError(f"--config {path}: reading YAML needs `pip install pyyaml`.") from error
    try:
        return read_yaml(read_text(path, SHORT)) or {}
    except (RecursionError, ValueError, yaml.YAMLError, OSError) as error:  # ValueError: month 13
        said = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"--config {path}: {said}.") from error


def verb_words(
    verb: str, typed: Sequence[str], program: str, row: Optional[verbs.Verb] = None
) -> Dict[str, Any]:
    """{name: value} of what was typed for a verb, of make unless it has a row of its own:
    NAME=value or --name value, and after `--` what ARGS= has. Raises UserError, and SystemExit
    after --help."""
    row = row or verbs.VERBS[verb]
    end = [*typed, "--"].index("--")
    if not {"-h", "--help"}.isdisjoint(typed[:end]):
        print(verbs.help_text(program, row))
        raise SystemExit(0)
    parser = Parser(program, add_help=False)
    for name, option in row.variables.items():
        flag = f"--{name.lower()}"
        # No value stands behind a switch: it might be a run's name.
        how: Any = {"type": partial(option.read, flag)}
        parser.add_argument(flag, **({"action": "store_true"} if option.type is switch else how))
    values, rest = parser.read(typed[:end], map(str.lower, row.variables))
    unnamed = []
    for word in rest:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch("[A-Za-z_]+", name):
            unnamed.append(word)
        elif name not in row.variables:
            verbs.refuse_variable(name, value, verb, row.variables)
        elif value:
            values[name.lower()] = row.variables[name].read(name, value)
    if unnamed and "ARGS" in row.variables:
        hint = "options of the trainer come after `--`"
        raise UserError(f"{unnamed[0]!r} is no option: {hint}. See `{program} --help`.")
    return {**values, **_without_names([*unnamed, *typed[end + 1 :]], row, values, program)}


def _without_names(
    words: List[str], row: verbs.Verb, values: Mapping[str, Any], program: str
) -> Dict[str, Any]:
    """What words stand for that have no name: several ARGS or RUNS, or one RUN."""
    several = [name.lower() for name, option in row.variables.items() if option.type is shlex.split]
    if words and several:
        return {several[0]: [*values.get(several[0], []), *words]}
    if words and (len(words) > 1 or "run" in values or "RUN" not in row.variables):
        raise UserError(f"{words[-1]!r} is no option. See `{program} --help`.")
    return {"run": words[0]} if words else {}
