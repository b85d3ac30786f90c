"""What `make` calls: `python3 -m tools.verbs help` prints the verbs (contract/verbs.py), `known`
refuses what a verb does not take, and `run VERB COMMAND...` becomes COMMAND, a tool of others, with
the options that the variables stand for. Our own programs are given the words as they were typed.

The Makefile passes what was typed in the environment, so that no shell ever expands a value:
TANDEM_VERBS (the words after `make`), TANDEM_GIVEN (the names before a =), and each variable.

Standard library only: it runs before there is an environment.
"""

import json
import os
import shlex
import shutil
import sys

if sys.version_info < (3, 7):  # noqa: UP036 (this file alone is read by Python 3.6)
    sys.exit("tandem: python3 is too old here: put one of at least 3.7 first on PATH.")

from contract import verbs
from contract.command_line import verb_words
from contract.errors import UserError

INTERNAL = ("ansible-env", "data/digits", "known", "machines")
# Read by tools/venv.sh, which any verb may call.
ANY = ("PYTHON",)


def check(typed, names, environment):
    """Refuse what was mistyped by raising UserError. Returns sentences on what is ignored.

    typed: the words after make; names: of variables typed there; environment: their values.
    """
    for verb in typed:
        if verb not in (*verbs.names(), *INTERNAL) and typed[:2] != ["help", "develop"]:
            raise UserError(f"there is no verb {verb}{verbs.did_you_mean(verb, verbs.names())}")
    named = [verb for verb in typed if verb in verbs.names()] or ["help"]
    # Each is given all the words, but for those that take none, such as env.
    for verb in [verb for verb in named if verbs.variables_of(verb)] or named[:1]:
        words = [f"{name}={environment[name]}" for name in names if name not in ANY]
        verb_words(verb, words, f"make {verb}")
    variables = {name for verb in named for name in verbs.variables_of(verb)}
    return [
        f"{name}={environment[name]} in your shell's environment is not used: "
        f"type it after make: make {named[0]} {name}={shlex.quote(environment[name])}"
        for name in sorted(variables)
        if name not in names and environment.get(name)
    ]


def options(verb, names, environment):
    """The arguments that a verb's variables stand for, words after `--` last. Raises UserError."""
    words = [f"{name}={environment[name]}" for name in names if name not in ANY]
    values = verb_words(verb, words, f"make {verb}")
    argv, last = [], []
    for row in verbs.variables_of(verb).values():
        value = values.get(row.key)
        if row.kind == "run":
            last = ["--", value or row.default]
        elif value is None or value is False or row is verbs.CORE:
            continue
        elif row.kind == "words":
            last = [row.word, *value]
        elif row.word.startswith("-e "):
            argv += ["--extra-vars", json.dumps({row.word[3:]: value})]
        else:
            argv.append(row.word if value is True else f"{row.word}={value}")
    return argv + last


def run(verb, command, names, environment):
    """Become the command with its options."""
    argv = [*command, *options(verb, names, environment)]
    if command[0] == "ansible-playbook":  # shown, since it can be typed without make as well
        print(" ".join(map(shlex.quote, argv)), flush=True)
    path = shutil.which(argv[0])
    if path is None:
        raise UserError(f"{argv[0]} is missing: `make env` installs it.")
    os.execv(path, argv)  # noqa: S606 (without a shell on purpose)


def say(sentence):
    """A sentence on stderr: in the columns of a terminal, in one line where a program reads."""
    text = f"tandem: {sentence}"
    wide = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    print(verbs.wrapped(text, wide) if wide else text, file=sys.stderr)


def main(argv):
    typed = os.environ.get("TANDEM_VERBS", "").split()
    names = os.environ.get("TANDEM_GIVEN", "").split()
    try:
        if argv[0] == "run":
            return run(argv[1], argv[2:], names, os.environ)
        ignored = check(typed, names, os.environ)
        if argv[0] == "help":
            wanted = [verb for verb in typed if verb in verbs.names() and verb != "help"]
            texts = [verbs.help_text(f"make {verb}", verbs.VERBS[verb]) for verb in wanted]
            print("\n\n".join(texts) or verbs.list_verbs("develop" in typed))
        else:
            for sentence in ignored:
                say(sentence)
    except UserError as error:
        say(error)
        return error.code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
