"""Read the words after `make`, for the Makefile. contract/verbs.py has the verbs and variables.

    python3 -m tools.verbs help                  prints the verbs, or those after `make help`
    python3 -m tools.verbs known                 rejects variables that a verb does not take
    python3 -m tools.verbs run VERB COMMAND...   becomes COMMAND with the options of the variables

COMMAND is a program that is not Tandem's, such as ansible-playbook; Tandem's programs read the
words themselves. The Makefile passes the words in the environment, so that no shell ever expands a
value: TANDEM_VERBS (the words after `make`), TANDEM_GIVEN (the names before a =), and each
variable.
"""

import json
import os
import shlex
import shutil
import signal
import sys

if sys.version_info < (3, 7):  # noqa: UP036 (this file alone is read by Python 3.6)
    sys.exit("tandem: python3 is too old here: put one of at least 3.7 first on PATH.")

from contract import verbs
from contract.command_line import verb_words
from contract.errors import UserError

# Targets of the Makefile that are not for users, so they are not in contract/verbs.py.
INTERNAL = ("ansible-env", "data/digits", "known", "machines")
# The Makefile and tools/venv.sh read these variables with any verb. COMMAND does not get them.
PYTHON, CORE = "PYTHON", "CORE"
# The names of these variables in Ansible's playbooks. Any other variable is an option of COMMAND.
EXTRA_VARS = {
    "DELETE": "data_delete",
    "FORCE": "bundle_for_nobody",
    "STOP_DISPLAY": "allow_stop_display",
    "YES": "poweroff_sure",
}


def typed_words(environment):
    """Return NAME=value of each typed variable, except PYTHON."""
    names = environment.get("TANDEM_GIVEN", "").split()
    return [f"{name}={environment[name]}" for name in names if name != PYTHON]


def check(typed, environment):
    """Check the verbs and variables. Returns warnings about ignored variables. Raises UserError."""
    for verb in typed:
        if verb not in (*verbs.VERBS, *INTERNAL) and typed[:2] != ["help", "develop"]:
            name = verbs.find_nearest(verb, verbs.VERBS)
            hint = f"did you mean {name}?" if name else "`make help` lists them."
            raise UserError(f"there is no command {verb}: {hint}")
    valid = [verb for verb in typed if verb in verbs.VERBS] or ["help"]
    # In `make env train EPOCHS=3`, EPOCHS is for train: env takes no variable.
    for verb in [verb for verb in valid if verbs.VERBS[verb].takes] or valid[:1]:
        verb_words(verb, typed_words(environment), f"make {verb}")
    # Many programs read variables that a user has exported, but make's verbs use only typed ones.
    variables = {name for verb in valid for name in verbs.VERBS[verb].variables}
    return [
        f"{name}={environment[name]} in your shell's environment is not used: "
        f"type it after make: make {valid[0]} {name}={shlex.quote(environment[name])}"
        for name in sorted(variables.difference(environment.get("TANDEM_GIVEN", "").split()))
        if environment.get(name)
    ]


def options(verb, environment):
    """Return the arguments that a verb's variables stand for. Raises UserError."""
    values = verb_words(verb, typed_words(environment), f"make {verb}")
    argv = []
    for name in verbs.VERBS[verb].variables:
        value = values.get(name.lower(), False)
        flag = "--ask-become-pass" if name == "ASK_SUDO" else f"--{name.lower().replace('_', '-')}"
        if value is False or name == CORE:  # the variable was not typed, or is not for COMMAND
            continue
        if name in EXTRA_VARS:
            argv += ["--extra-vars", json.dumps({EXTRA_VARS[name]: value})]
        else:
            argv.append(flag if value is True else f"{flag}={value}")
    return argv


def run(verb, command, environment):
    """Replace this process with the command and its options. Raises UserError."""
    argv = [*command, *options(verb, environment)]
    # People can type the printed command without make, for example to add Ansible's own options.
    if command[0] == "ansible-playbook":
        print(" ".join(map(shlex.quote, argv)), flush=True)
    path = shutil.which(argv[0])
    if path is None:
        raise UserError(f"{argv[0]} is missing: `make env` installs it.")
    os.execv(path, argv)  # noqa: S606 (without a shell on purpose)


def say(sentence):
    """Print a sentence on stderr: wrapped for a terminal, and in one line for a program."""
    text = f"tandem: {sentence}"
    if sys.stderr.isatty():
        text = verbs.wrap_lines(text, shutil.get_terminal_size().columns)
    print(text, file=sys.stderr)


def main(argv):
    typed = os.environ.get("TANDEM_VERBS", "").split()
    try:
        if argv[0] == "run":
            return run(argv[1], argv[2:], os.environ)
        warnings = check(typed, os.environ)
        if argv[0] == "help":
            # By default the end of `head` in `make help | head` would raise an error here.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            typed_verbs = [verb for verb in typed if verb in verbs.VERBS and verb != "help"]
            texts = [verbs.help_text(f"make {verb}", verbs.VERBS[verb]) for verb in typed_verbs]
            print("\n\n".join(texts) or verbs.list_verbs("develop" in typed))
        else:
            for sentence in warnings:
                say(sentence)
    except UserError as error:
        say(error)
        return error.code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
