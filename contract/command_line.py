"""Options from the command line and from a YAML file; both have the fields of options.py."""

import argparse
import dataclasses
import difflib
import typing
from typing import Any, Dict, List, Sequence, Tuple

from contract.errors import DATA_LOST, DIVERGED, OUT_OF_MEMORY, STOPPED, UserError
from contract.options import ENTRIES, GONE, GROUPS, Options
from contract.text import SHORT, read_text, read_yaml

DEFAULTS = {field.name: field.default for field in dataclasses.fields(Options)}
TYPES = typing.get_type_hints(Options)
# Below this similarity, the hint would only be a guess.
NEAR = 0.66
METAVARS = {str: "VALUE", int: "N", float: "X"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}. See python -m trainer --help.")


def _kind(name: str) -> type:
    """The plain type of an option: int for Optional[int] and for Tuple[int, ...]."""
    arguments = [kind for kind in typing.get_args(TYPES[name]) if kind not in (type(None), ...)]
    return arguments[0] if arguments else TYPES[name]


# These functions' names appear in argparse's messages: "invalid truth value: 'perhaps'".
def truth(text: str) -> bool:
    return bool(("false", "true").index(text.lower()))


def numbers(text: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def parser() -> argparse.ArgumentParser:
    """One argument per field, in the groups of options.py."""
    made = _Parser(
        prog="python -m trainer",
        usage="python -m trainer --data DIR --output DIR [options]",
        description="Train an image classifier on one or many processes.",
        epilog="Dashes and underscores in option names are equivalent. Exit codes: 0 done, 2 bad "
        f"input, {STOPPED} stopped on request after saving, {OUT_OF_MEMORY} out of memory, "
        f"{DIVERGED} the loss or the weights were no finite numbers any more, "
        f"{DATA_LOST} the disk or file server of the images failed.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    group: Any = made
    for name, entry in ENTRIES.items():
        if name in GROUPS:
            group = made.add_argument_group(GROUPS[name])
        text = entry.help.replace("%", "%%")
        if DEFAULTS[name] not in (None, False):
            text += f" (default: {str(DEFAULTS[name]).strip('()')})"
        kind = _kind(name)
        metavar = "|".join(entry.choices) or METAVARS.get(kind)
        settings: Dict[str, Any] = {"help": text, "type": kind, "metavar": metavar}
        if kind is bool:
            settings.update(type=truth, nargs="?", const=True, metavar="true|false")
        elif typing.get_origin(TYPES[name]) is tuple:
            settings.update(type=numbers, metavar="N,N,...")
        group.add_argument(f"--{name}", **settings)
    return made


def parse(argv: Sequence[str]) -> Options:
    """Options from a command line; flags override the file of --config. Raises UserError."""
    flags = [_underscored(word) for word in argv]
    given, unknown = parser().parse_known_args(flags)
    if unknown:
        raise UserError(_unknown(unknown[0].split("=")[0]))
    if "config" in given:
        given = parser().parse_args(read_config(given.config) + flags)
    return Options(**vars(given))


def _underscored(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _unknown(word: str) -> str:
    word = word[:80]
    name = word.lstrip("-")
    if name in GONE:
        return f"--{name} is no longer there: {GONE[name]}."
    near = difflib.get_close_matches(name, ENTRIES, n=1, cutoff=NEAR)
    hint = f" Did you mean --{near[0]}?" if near else " See python -m trainer --help."
    return f"unknown option {word}.{hint}"


def read_config(path: str) -> List[str]:
    """A YAML file, which is a flat mapping of option names, as a command line. Raises UserError.

    The launcher reads recipes with it too: so nodes need neither the file nor a YAML reader, and a
    dry run shows every option that matters.
    """
    try:
        import yaml
    except ImportError as error:
        raise UserError(f"--config {path}: reading YAML needs `pip install pyyaml`.") from error
    try:
        found = read_yaml(read_text(path, SHORT)) or {}
    except (RecursionError, ValueError, yaml.YAMLError, OSError) as error:  # ValueError: month 13
        said = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"--config {path}: {said}.") from error
    if not isinstance(found, dict):
        raise UserError(f"--config {path}: expected lines like `epochs: 90`.")
    argv = []
    for name, value in found.items():
        flag = _underscored(f"--{name}")
        if flag[2:] not in ENTRIES:
            raise UserError(f"--config {path}: {_unknown(flag)}")
        values = value if isinstance(value, list) else [value]
        # Lists of lists may be references to one another, and written out fill the memory.
        plain = not any(isinstance(one, (list, dict, set)) for one in values)
        text = ",".join(map(str, values)) if plain else ""
        if not plain or len(text) > 4096:
            raise UserError(f"--config {path}: {name} is neither a value nor a list of values.")
        argv += [] if value is None else [flag, text.lower() if isinstance(value, bool) else text]
    return argv
