"""Read what people type: the words of the trainer, a file with the trainer's options, and the words
of make's verbs. Each value gets the type of its option. options.py and verbs.py define the options.
"""

import argparse
import re
import shlex
from functools import partial
from typing import Any, Dict, Iterable, List, Mapping, NoReturn, Optional, Sequence, Tuple

from contract import verbs
from contract.errors import DATA_LOST, DIVERGED, OUT_OF_MEMORY, STOPPED, UserError
from contract.options import GROUPS, TRAINER_OPTIONS, Options, integer, numbers, switch

MIN_SIMILARITY = 0.66  # of a suggested name: below, the suggestion would only be a guess
TRAINER = "python -m trainer"
EPILOG = (
    "Dashes and underscores in option names are equivalent. Exit codes: 0 done, 2 bad input, "
    f"{STOPPED} stopped on request after saving, {OUT_OF_MEMORY} out of memory, {DIVERGED} "
    f"the loss or the weights became infinite or NaN, {DATA_LOST} the disk or file server of "
    "the images failed."
)
# How --help shows the value of an option, by the option's type.
METAVARS: Dict[Any, str] = {
    str: "VALUE",
    integer: "N",
    float: "X",
    numbers: "N,N,...",
    switch: "true|false",
}


class Parser(argparse.ArgumentParser):
    """Parse options like --name, with dashes or underscores. Errors are UserErrors."""

    def __init__(self, program: str, **settings: Any):
        # Options that were not typed are absent from the result, so that a file can set them.
        absent = argparse.SUPPRESS
        super().__init__(program, allow_abbrev=False, argument_default=absent, **settings)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See `{self.prog} --help`.")

    def read(self, typed: Sequence[str], names: Iterable[str]) -> Tuple[Dict[str, Any], List[str]]:
        """Return {name: value} of the typed options, and the words that are not options. `names`:
        of all options, for a suggestion. Raises UserError."""
        words = []
        for word in typed:
            name, equals, value = word.partition("=")
            # A word with a blank before the = is a value, for argparse, too.
            if name.startswith("--") and " " not in name:
                word = f"--{name[2:].replace('-', '_')}{equals}{value}"
            words.append(word)
        values, unnamed = self.parse_known_args(words)
        for word in unnamed:
            if word.startswith("--"):
                raise UserError(_unknown_option_text(word.partition("=")[0], names, self.prog))
        return vars(values), unnamed


def _unknown_option_text(flag: str, names: Iterable[str], program: str) -> str:
    """Return a sentence for a flag that is not in `names`, with the nearest name."""
    name = verbs.find_nearest(flag.lstrip("-"), names, MIN_SIMILARITY)
    hint = f"Did you mean --{name}?" if name else f"See `{program} --help`."
    return f"unknown option {flag[:80]}. {hint}"


def parse(argv: Sequence[str], defaults: Optional[Mapping[str, Any]] = None) -> Options:
    """Return the trainer's options. Words override the file of --config, and the file overrides
    `defaults`. Raises UserError, and SystemExit after --help."""
    values = trainer_words(argv)
    if "config" in values:
        values = {**read_config(values["config"]), **values}
    return Options(**{**(defaults or {}), **values})


def trainer_words(argv: Sequence[str]) -> Dict[str, Any]:
    """Return {name: value} of the trainer's options in `argv`. Raises UserError, and SystemExit
    after --help."""
    parser = Parser(
        TRAINER,
        usage=f"{TRAINER} --data DIR --output DIR [options]",
        description="Train an image classifier on one or many processes.",
        epilog=EPILOG,
    )
    for name, row in TRAINER_OPTIONS.items():
        # GROUPS has the first option of each group, and options are in the order of the fields.
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        default = "" if row.default in (None, False) else str(row.default).strip("()")
        help_text = f"{row.help} (default: {default})" if default else row.help
        # A switch may be typed as --name or as --name=false.
        switch_settings: Any = {"nargs": "?", "const": True} if row.type is switch else {}
        group.add_argument(
            f"--{name}",
            type=partial(row.read, f"--{name}"),
            help=help_text.replace("%", "%%"),  # argparse formats it
            metavar="|".join(row.choices) or METAVARS[row.type],
            **switch_settings,
        )
    values, unnamed = parser.read(argv, TRAINER_OPTIONS)
    if unnamed:
        raise UserError(_unknown_option_text(unnamed[0], TRAINER_OPTIONS, TRAINER))
    return values


def words_for_trainer(values: Mapping[str, Any]) -> List[str]:
    """Return words from which trainer_words makes these values again, except None."""
    words: List[str] = []
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            text = _as_word(value)
            # argparse would take a value that begins with a dash for another option.
            words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return words


def _as_word(value: Any) -> str:
    """Return a value as people type it: `3,5` for a list, `true` for a switch."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_config(path: str) -> Dict[str, Any]:
    """Return {name: value} of the options in a YAML file, or in `path` itself if that is JSON, as
    the launcher passes options. Raises UserError.

    The launcher also reads recipes with this function. Therefore nodes need neither the file nor a
    YAML reader, and a dry run shows every option that matters.
    """
    options = _load_config(path)
    if not isinstance(options, dict):
        raise UserError(f"--config {path}: write lines such as `epochs: 90`.")
    values = {}
    # A value becomes a word first, so that it passes the same checks as a typed word.
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name not in TRAINER_OPTIONS:
            text = _unknown_option_text(f"--{name}", TRAINER_OPTIONS, TRAINER)
            raise UserError(f"--config {path}: {text}")
        items = value if isinstance(value, list) else [value]
        # Nested lists may refer to each other, and their text would fill the memory.
        is_flat = not any(isinstance(item, (list, dict, set)) for item in items)
        typed = _as_word(value) if is_flat else ""
        if not is_flat or len(typed) > 4096:
            raise UserError(f"--config {path}: {name} is neither a value nor a list of values.")
        if value is not None:  # `name:` without a value is the default
            values[name] = TRAINER_OPTIONS[name].read(f"--{name}", typed)
    return values


def _load_config(path: str) -> Any:
    """Return the content of a YAML file, or of `path` itself if it begins like JSON."""
    if path.startswith("{"):
        import json

        try:
            return json.loads(path)
        except (RecursionError, ValueError) as error:
            raise UserError(f"--config {path[:80]} is not JSON: {error}.") from None
    # The trainer on a node gets JSON, so that the node needs no YAML reader.
    from contract.text import SHORT, read_text, read_yaml

    try:
        import yaml
    except ImportError as error:
        raise UserError(f"--config {path}: reading YAML needs `pip install pyyaml`.") from error
    try:
        return read_yaml(read_text(path, SHORT)) or {}
    except (RecursionError, ValueError, yaml.YAMLError, OSError) as error:  # ValueError: month 13
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"--config {path}: {reason}.") from error


def verb_words(
    verb: str, typed: Sequence[str], program: str, row: Optional[verbs.Verb] = None
) -> Dict[str, Any]:
    """Return {name: value} of the words of a verb: NAME=value or --name value, and after `--` the
    words of ARGS=. `row`: of a verb that `make` does not have. Raises UserError; SystemExit after
    --help."""
    row = row or verbs.VERBS[verb]
    # The words after `--` are for the script or the trainer, a --help among them included.
    end = [*typed, "--"].index("--")
    if not {"-h", "--help"}.isdisjoint(typed[:end]):
        print(verbs.help_text(program, row))
        raise SystemExit(0)
    parser = Parser(program, add_help=False)  # verbs.help_text replaced argparse's help above
    for name, option in row.variables.items():
        flag = f"--{name.lower()}"
        # A switch takes no value: the word after it may be a run's name.
        settings: Any = {"action": "store_true"}
        if option.type is not switch:
            settings = {"type": partial(option.read, flag)}
        parser.add_argument(flag, **settings)
    values, words = parser.read(typed[:end], map(str.lower, row.variables))
    unnamed = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch("[A-Za-z_]+", name):
            unnamed.append(word)
        elif name not in row.variables:
            verbs.refuse_variable(name, value, verb, row.variables)
        elif value:  # `NAME=` without a value means the default, as in make
            values[name.lower()] = row.variables[name].read(name, value)
    if unnamed and "ARGS" in row.variables:
        hint = "options of the trainer come after `--`"
        raise UserError(f"{unnamed[0]!r} is not an option: {hint}. See `{program} --help`.")
    unnamed += typed[end + 1 :]
    if not unnamed:
        return values
    # ARGS or RUNS gets all words without a name. Without these variables, a word is the RUN.
    lists = [name.lower() for name, option in row.variables.items() if option.type is shlex.split]
    if lists:
        return {**values, lists[0]: [*values.get(lists[0], []), *unnamed]}
    if len(unnamed) > 1 or "run" in values or "RUN" not in row.variables:
        raise UserError(f"{unnamed[-1]!r} is not an option. See `{program} --help`.")
    return {**values, "run": unnamed[0]}
