"""What is typed, read by the tables: words of the trainer, of a file of its options, and of a verb
of make. This is the only reader of a command line; each value has the type of its entry."""

import difflib
import re
import textwrap
from typing import Any, Dict, Iterable, List, Mapping, NoReturn, Optional, Sequence, Tuple

from contract import verbs
from contract.errors import DATA_LOST, DIVERGED, OUT_OF_MEMORY, STOPPED, UserError
from contract.options import ENTRIES, GROUPS, OFF, ON, Option, Options

# Below this similarity, the hint would only be a guess.
NEAR = 0.66
METAVARS = {"text": "VALUE", "number": "N", "float": "X", "numbers": "N,N,..."}
WIDTH = 80  # of --help
FLAGS = {f"--{name}": row for name, row in ENTRIES.items()}
TRAINER = "python -m trainer"
USAGE = f"""usage: {TRAINER} --data DIR --output DIR [options]

Train an image classifier on one or many processes."""
EPILOG = (
    "Dashes and underscores in option names are equivalent. Exit codes: 0 done, 2 bad input, "
    f"{STOPPED} stopped on request after saving, {OUT_OF_MEMORY} out of memory, {DIVERGED} the "
    f"loss or the weights were no finite numbers any more, {DATA_LOST} the disk or file server of "
    "the images failed."
)


def parse(argv: Sequence[str]) -> Options:
    """The trainer's options; words override the file of --config. Raises UserError, and SystemExit
    after --help."""
    if not {"-h", "--help"}.isdisjoint(argv):
        show(trainer_help())
    values = trainer_words(argv)
    if "config" in values:
        values = {**read_config(values["config"]), **values}
    return Options(**values)


def show(text: str) -> NoReturn:
    print(text)
    raise SystemExit(0)


def trainer_words(argv: Sequence[str]) -> Dict[str, Any]:
    """{option of the trainer: the value given to it}. Raises UserError."""
    words, values = list(argv), {}
    while words:
        name, equals, text = words.pop(0).partition("=")
        flag = _underscored(name)
        if flag not in FLAGS:
            raise UserError(_unknown(flag, FLAGS, TRAINER))
        text = text if equals else _value(flag, FLAGS[flag], words, TRAINER)
        values[flag[2:]] = FLAGS[flag].read(flag, text)
    return values


def words_for_trainer(values: Mapping[str, Any]) -> List[str]:
    """Words from which trainer_words makes these values again."""
    words: List[str] = []
    for name, value in values.items():
        words += [f"--{name}"] if value is True else [f"--{name}", _text(value)]
    return words


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(flag: str, row: Option, words: List[str], program: str, positional: bool = False) -> str:
    """The text of a flag's value, taken off the words behind it; a switch may have none."""
    there = bool(words) and (not words[0].startswith("--") or " " in words[0])
    if row.kind == "switch":
        own = there and (not positional or words[0].lower() in ON + OFF)
        return words.pop(0) if own else "true"
    if not there:
        raise UserError(f"{flag} needs a value. See `{program} --help`.")
    return words.pop(0)


def _underscored(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name


def _unknown(word: str, known: Iterable[str], program: str) -> str:
    """What to say of a flag that is none of the known ones."""
    word = word[:80]
    near = difflib.get_close_matches(word.lstrip("-"), [one[2:] for one in known], n=1, cutoff=NEAR)
    hint = f" Did you mean --{near[0]}?" if near else f" See `{program} --help`."
    return f"unknown option {word}.{hint}"


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
    for name, value in options.items():
        flag = _underscored(f"--{name}")
        if flag not in FLAGS:
            raise UserError(f"--config {path}: {_unknown(flag, FLAGS, TRAINER)}")
        parts = value if isinstance(value, list) else [value]
        # Lists of lists may be references to one another, and written out fill the memory.
        plain = not any(isinstance(part, (list, dict, set)) for part in parts)
        text = _text(value) if plain else ""
        if not plain or len(text) > 4096:
            raise UserError(f"--config {path}: {name} is neither a value nor a list of values.")
        if value is not None:
            values[flag[2:]] = FLAGS[flag].read(flag, text)
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


def trainer_help() -> str:
    """One paragraph an option, in the groups of options.py."""
    lines = [USAGE]
    for name, row in ENTRIES.items():
        if name in GROUPS:
            lines += ["", f"{GROUPS[name]}:"]
        default = (
            "" if row.default in (None, False) else f" (default: {str(row.default).strip('()')})"
        )
        metavar = "|".join(row.choices) or METAVARS.get(row.kind, "[true|false]")
        text = textwrap.wrap(row.help + default, WIDTH - 24)
        head = f"  --{name} {metavar}"
        lines.append(f"{head:<23} {text.pop(0)}" if len(head) < 24 else head)
        lines += [" " * 24 + line for line in text]
    return "\n".join([*lines, "", *textwrap.wrap(EPILOG, WIDTH)])


def verb_words(
    verb: str, words: Sequence[str], program: str, table: Optional[verbs.Verb] = None
) -> Dict[str, Any]:
    """{key: value} of what was typed for a verb, of make unless it has a row of its own: NAME=value
    or --name value, and after `--` what ARGS= has. Raises UserError, and SystemExit after
    --help."""
    row = table or verbs.VERBS[verb]
    variables = row.variables
    rest = next((row for row in variables.values() if row.kind in ("run", "words")), None)
    left, values = list(words), {}  # type: List[str], Dict[str, Any]
    while left and left[0] != "--":
        if left[0] in ("-h", "--help"):
            show(verbs.help_text(program, row))
        option, name, text = _word(left, verb, variables, rest, program)
        if text and option.kind == "words" and name != option.make:
            values[option.key] = [*values.get(option.key, []), text]
        elif text:
            values[option.key] = option.read(name, text)
    for word in left[1:]:
        if rest is None or (rest.kind == "run" and rest.key in values):
            raise UserError(f"{word!r} is no option. See `{program} --help`.")
        values[rest.key] = word if rest.kind == "run" else [*values.get(rest.key, []), word]
    return values


def _word(
    left: List[str], verb: str, variables: Dict[str, Option], rest: Optional[Option], program: str
) -> Tuple[Option, str, str]:
    """The option that the next word is about, its name there and the text of its value."""
    word = left.pop(0)
    name, equals, text = word.partition("=")
    if name.startswith("--"):
        flags = {row.word: row for row in variables.values()}
        name = name.replace("_", "-")
        if name not in flags:
            raise UserError(_unknown(name, flags, program))
        row = flags[name]
        return row, name, text if equals else _value(name, row, left, program, rest is not None)
    if equals and re.fullmatch("[A-Za-z_]*", name):
        if name not in variables:
            raise UserError(verbs.refusal_of(name, text, [verb], variables))
        return variables[name], name, text
    if rest is None or rest is verbs.ARGS:
        after = ": options of the trainer come after `--`" if rest else ""
        raise UserError(f"{word!r} is no option{after}. See `{program} --help`.")
    return rest, word if rest.kind == "words" else rest.make, word
