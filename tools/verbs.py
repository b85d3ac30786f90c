"""The Makefile's verbs and their variables: the only table of what each verb takes, from which the
launcher's command line is made, too. Variables that are options of the trainer stand with these, in
contract/options.py.

`verbs.py help [VERB]` prints it, `verbs.py known` refuses what a verb does not take, and `verbs.py
run VERB COMMAND...` becomes COMMAND with the options that the variables stand for. The Makefile
passes what was typed in the environment, so that no shell ever expands a value: TANDEM_VERBS (the
words after `make`), TANDEM_GIVEN (the names before a =), and each variable.

Standard library only, Python >= 3.6: it runs before there is an environment.
"""

import ast
import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ON, OFF = ("1", "yes", "on", "true"), ("0", "no", "off", "false")


# A list of machines other than inventory.ini, for the commands that this process and its children
# print: see `keeping`.
MACHINES = "TANDEM_MACHINES"


class VerbError(Exception):
    """A sentence for the person who typed the line."""


class Variable(NamedTuple):
    """A variable that verbs take. `kind`: text, number, switch (1 or 0: the option or none), truth
    (1 or 0: true or false), path (relative to the working directory), run (the run itself, without
    an option), words (several options, after `option` if there is one)."""

    name: str
    option: str
    help: str
    kind: str = "text"
    choices: tuple = ()


class Verb(NamedTuple):
    help: str
    variables: tuple = ()
    example: str = ""


INVENTORY = Variable("INVENTORY", "--inventory", "the list of machines (default: inventory.ini)")
NODES = Variable("NODES", "--nodes", "the first N machines (default: all)", "number")
ARGS = Variable(
    "ARGS", "--", "any option of `.venv/bin/python -m trainer --help`; those of SCRIPT", "words"
)
RUN = Variable("RUN", "", "its name or path (default: the newest)", "run")
LIMIT = Variable("LIMIT", "--limit", "only these machines: pc3, or pc1,pc2")
JSON = Variable("JSON", "--json", "1: for scripts", "switch")
ASK_SUDO = Variable("ASK_SUDO", "--ask-become-pass", "1: ask for sudo's password once", "switch")
STOP_DISPLAY = Variable(
    "STOP_DISPLAY",
    "-e allow_stop_display",
    "1: reboot for the driver although somebody is logged in",
    "switch",
)
CORE = Variable(
    "CORE", "", "2.16: an older Ansible, for machines with Python 3.6", choices=("2.16",)
)

ONLY = Variable("ONLY", "--only", "a room (launcher, train, gpu ...) or a file below tests/")

# The kind of a variable by the type of its option.
KINDS = {"int": "number", "bool": "truth"}


def _trainer_options():
    """{option: its Variable, None where it has none} of the trainer, read from the source: an old
    Python has no dataclasses."""
    path = Path(__file__).resolve().parents[1] / "contract" / "options.py"
    for one in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(one, ast.ClassDef) and one.name == "Options":
            fields = [field for field in one.body if isinstance(field, ast.AnnAssign)]
            return {field.target.id: _of_trainer(field) for field in fields}
    raise AssertionError("contract/options.py has no class Options")


def _of_trainer(field):
    words = {word.arg: word.value for word in field.value.keywords}
    if "make" not in words:
        return None
    name = ast.literal_eval(words["make"])
    text = ast.literal_eval(words.get("make_help") or field.value.args[1])
    types = [node.id for node in ast.walk(field.annotation) if isinstance(node, ast.Name)]
    kinds = [KINDS[one] for one in types if one in KINDS]
    return Variable(name, "--" + name.lower(), text, *kinds)


TRAINER_OPTIONS = _trainer_options()
WHAT = (INVENTORY, NODES, *filter(None, TRAINER_OPTIONS.values()))
QUEUE = Variable("QUEUE", "--queue", "1: wait for machines that are busy", "switch")
FORCE = Variable("FORCE", "--force", "1: start even though something is wrong", "switch")
START = (
    Variable("MAX_RESTARTS", "--max-restarts", "attempts after the first (default: 0)", "number"),
    Variable(
        "MIN_NODES",
        "--min-nodes",
        "so few machines suffice (default: all without an owner)",
        "number",
    ),
    Variable("BALANCE", "--balance", "unlike machines: auto (by speed), off, or like 3:2:2:1"),
    Variable("DETACH", "--detach", "1: run in the background", "switch"),
    Variable("PORT", "--port", "of the rendezvous on node 0 (default: a free one)", "number"),
    QUEUE,
    FORCE,
    Variable("KEEP", "--keep", "MiB a file may keep: log=256,steps=1024,output=4096 ..."),
)
HOURS = (
    Variable("AT", "--at", "begin at this time of day, like 19:00"),
    Variable("UNTIL", "--until", "save and end at this time of day, like 07:30"),
)
RESUME = Variable("RESUME", "--resume", "a run to continue, as it began (docs/launcher.md)")

DEVICES = ("cuda", "cpu")

# A script of one's own, in the place of the trainer (docs/own-script.md).
PACKAGES = (
    Variable("SCRIPT", "--script", 'your own: path/train.py, or "-m package.train" in FOLDER'),
    Variable("FOLDER", "--folder", "what is sent of it (default: its checkout, or folder)", "path"),
    Variable(
        "REQUIREMENTS",
        "--requirements",
        "its packages (default: requirements.txt beside it)",
        "path",
    ),
)
SCRIPT = (
    *PACKAGES,
    Variable("OUTPUT", "--output", "folders that it writes, which are brought here at the end"),
    Variable("RESUME_ARGS", "--resume-args", "how it goes on, like '--resume {last}'"),
    Variable(
        "RESUME_FROM",
        "--resume-from",
        "self: each machine from a file of its own, so that none goes to another machine",
        choices=("self",),
    ),
)

# In the order of `make help`; None starts a new paragraph.
VERBS = {
    "help": Verb("print this list; `make help VERB` says what VERB takes"),
    "env": Verb("make .venv with everything the control machine needs"),
    "demo": Verb(
        "train the digits on four local nodes: no root, no other machine",
        (*WHAT[1:], *START, ARGS),
        "make demo EPOCHS=3",
    ),
    "The machines": None,
    "bootstrap": Verb(
        "let this control machine into new machines",
        (
            INVENTORY,
            LIMIT,
            Variable("LOGIN", "--login", "a user there who may use sudo (default: you)"),
            Variable("KEEP_SUDO", "--keep-sudo", "1: write no sudo rule", "switch"),
            CORE,
        ),
        "make bootstrap LIMIT=pc3 LOGIN=anna",
    ),
    "check": Verb(
        "report how machines are and what is wrong; changes nothing",
        (INVENTORY, JSON, ASK_SUDO, CORE),
    ),
    "dry-provision": Verb(
        "print what `make provision` would install where",
        (
            INVENTORY,
            Variable(
                "FACTS", "--facts", "a file of facts instead of machines (examples/machines/)"
            ),
        ),
    ),
    "provision": Verb(
        "make the machines of inventory.ini a cluster",
        (
            INVENTORY,
            LIMIT,
            Variable(
                "DELETE", "-e data_delete", "1: delete data there that is gone here", "switch"
            ),
            Variable("TAGS", "--tags", "only these parts of site.yml: network, or driver,data"),
            STOP_DISPLAY,
            ASK_SUDO,
            CORE,
        ),
    ),
    "verify": Verb(
        "check that machines are still as provisioned; changes nothing", (INVENTORY, ASK_SUDO, CORE)
    ),
    "upgrade": Verb(
        "upgrade kernel, driver and stack, machine by machine",
        (INVENTORY, LIMIT, STOP_DISPLAY, ASK_SUDO, CORE),
    ),
    "poweroff": Verb(
        "switch off the machines if no run uses them; asks once",
        (
            INVENTORY,
            LIMIT,
            Variable("YES", "-e poweroff_sure", "1: do not ask", "switch"),
            ASK_SUDO,
            CORE,
        ),
        "make poweroff LIMIT=pc2,pc3",
    ),
    "wake": Verb("switch them on again over the network (wake_on_lan: true)", (INVENTORY, LIMIT)),
    "accept": Verb("measure the network between machines, their disks and cards", (INVENTORY,)),
    "bundle": Verb(
        "gather what machines without internet need",
        (
            INVENTORY,
            Variable(
                "FORCE", "-e bundle_for_nobody", "1: though no machine is offline=true", "switch"
            ),
            *PACKAGES,
        ),
    ),
    "usb": Verb(
        "put an ssh server on a USB stick, for machines that have none",
        (
            INVENTORY,
            Variable("TO", "-e usb_folder", "the stick's folder", "path"),
            Variable("RELEASES", "-e usb_releases", "names like jammy, with spaces between"),
        ),
        'make usb TO=/media/anna/STICK RELEASES="bookworm jammy"',
    ),
    "imagenet": Verb(
        "make class folders from the archives of ILSVRC2012",
        (
            Variable("SRC", "--source", "the folder of its archives", "path"),
            Variable("TO", "--to", "where (default: data/imagenet)", "path"),
        ),
        "make imagenet SRC=/media/anna/ILSVRC2012",
    ),
    "Training": None,
    "plan": Verb(
        "predict the next run; measures first if nothing is known",
        (
            *WHAT,  # four of which mean something else here
            Variable("NODES", "--nodes", "up to how many machines (default: all)", "number"),
            Variable("DATA", "--data", "measure with these (default: noise; no MODEL: digits)"),
            Variable("EPOCHS", "--epochs", "of the run that is counted (default: 90)", "number"),
            Variable("SYNC", "--sync", "for the file: as in `make train`"),
            Variable("MEASURE", "--measure", "1: measure anew, for a minute", "switch"),
            QUEUE,
            FORCE,
            Variable("RUN", "--run", "predict from this run"),
            Variable("GPU", "--gpu", "on paper, without machines: 2080ti, 3090 ..."),
            Variable("LINK", "--link", "the network: 1gbit, 2.5gbit (default: as measured)"),
            Variable("ALL", "--all", "1: each strategy and number of machines", "switch"),
            ARGS,
        ),
        "make plan MODEL=resnet50 BATCH=64",
    ),
    "train": Verb(
        "start a run",
        (*WHAT, RESUME, *SCRIPT, *START, *HOURS, ARGS),
        "make train NODES=4 MODEL=resnet50 DATA=imagenet EPOCHS=90 BATCH=64",
    ),
    "dry-run": Verb(
        "print exactly what `make train` would run on each machine",
        (*WHAT, *SCRIPT, *START, ARGS),
    ),
    "slurm": Verb("write the same run as a batch script for a Slurm cluster", (*WHAT, ARGS)),
    "status": Verb("say how far a run is, what holds it up, how its machines are", (RUN, JSON)),
    "top": Verb(
        "the same on a live screen; between runs, how the machines are",
        (INVENTORY, Variable("RUN", "--run", "a run (default: the one under way, if any)")),
    ),
    "attach": Verb("show a run that is under way", (RUN,)),
    "stop": Verb("end a run; its workers save a checkpoint first", (RUN,)),
    "runs": Verb("list all runs, newest first"),
    "report": Verb(
        "make the report of a run from its files",
        (RUN, Variable("JSON", "--json", "1: print summary.json instead", "switch")),
    ),
    "compare": Verb(
        "set runs side by side: what differs, and what came of it",
        (
            Variable("RUNS", "--", "2 to 8 runs with spaces between", "words"),
            Variable("JSON", "--json", "1: print the figures for scripts", "switch"),
        ),
        'make compare RUNS="latest latest~1"',
    ),
    "tensorboard": Verb("write a run's figures for TensorBoard, and show them", (RUN,)),
    "sweep": Verb(
        "try each combination of settings in short runs, and compare",
        (
            Variable("SWEEP", "--sweep", "NAME=value,value ... (in ARGS with | between)"),
            *WHAT,
            Variable("ROUNDS", "--rounds", "how often each one runs (default: 2)", "number"),
            Variable("RESUME", "--resume", "go on with a sweep: its name, or latest"),
            Variable("FORCE", "--force", "1: though it takes more than a day", "switch"),
            ARGS,
        ),
        """make sweep SWEEP="SYNC=allreduce,ef:1.6 ARGS='--sync_bn|'" BATCH=64""",
    ),
    "For changing the code": None,
    "test": Verb(
        "run linters, unit tests and some training: minutes, no root",
        (ONLY,),
        "make test ONLY=launcher",
    ),
    "test-lab": Verb(
        "provision and train on machines of the lab (root)",
        (ONLY,),
        "make test-lab ONLY=test_train.py",
    ),
    "test-all": Verb(
        "run all other tests, piece by piece: hours (root)",
        (ONLY, Variable("AGAIN", "--again", "1: also what passed before", "switch")),
        "make test-all ONLY=test_torture",
    ),
    "test-gpu": Verb(
        "test what GPUs compute and survive: docs/gpu.md (a GPU)",
        (Variable("DEVICE", "--device", "cpu: only cases that need no GPU", choices=DEVICES),),
        "make test-gpu DEVICE=cpu",
    ),
    "snapshots": Verb("write the sentences that users meet anew: tests/messages/"),
    "mutants": Verb("change rules of the product: do the tests notice? (root, hours)"),
    "lint": Verb("run every linter"),
    "bench": Verb("measure figures, by the methods of bench/README.md (root)"),
    "bench-gpu": Verb(
        "measure our steps beside others': docs/performance.md (a GPU)",
        (Variable("DEVICE", "--device", "cpu: a tiny version, to try it", choices=DEVICES),),
        "make bench-gpu DEVICE=cpu",
    ),
    "lock": Verb("make requirements/*.txt anew from *.in (needs uv)"),
}
# Verbs that read the list of machines in the launcher, which refuses it in the same words.
LOOKING = ("plan", "train", "dry-run", "slurm")
PYTHON = ".venv/bin/python"
INTERNAL = ("ansible-env", "data/digits", "known")
# Said in the list of machines, of one machine.
IN_INVENTORY = {
    "GPUS": "how many GPUs of a machine take part is said in the inventory: gpus={} in its line."
}
# Read by tools/venv.sh, which any verb may call.
ANY = ("PYTHON",)


def variables_of(verb):
    """{name: Variable} of a verb: of two with one name the later."""
    return {variable.name: variable for variable in VERBS[verb].variables}


def check(typed, given, environment):
    """Refuse what was mistyped by raising VerbError. Returns sentences on what is ignored.

    typed: the words after make; given: names of variables typed there; environment: their values.
    """
    for verb in typed:
        if VERBS.get(verb) is None and verb not in INTERNAL:
            raise VerbError(f"there is no verb {verb}{_did_you_mean(verb, _verbs())}")
    verbs = [verb for verb in typed if verb in VERBS] or ["help"]
    taken = {}
    for verb in verbs:
        taken.update(variables_of(verb))
    for name in given:
        if name not in taken and name not in ANY:
            raise VerbError(_not_taken(name, environment[name], verbs, taken))
        if name in taken:
            value_of(taken[name], environment[name])
    return [
        f"{name}={environment[name]} in your shell's environment is not used: "
        f"type it after make: make {verbs[0]} {name}={shlex.quote(environment[name])}"
        for name in taken
        if name not in given and environment.get(name)
    ]


def _verbs():
    return [name for name, verb in VERBS.items() if verb is not None]


def _did_you_mean(word, known):
    by_folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_folded, n=1)
    return f": did you mean {by_folded[near[0]]}?" if near else ": `make help` lists them."


def _elsewhere(name, value, taken):
    """Where stands what is no variable, but an option of the trainer or of a machine; "" if it is
    neither."""
    if name in IN_INVENTORY:
        return f"{name}={value}: " + IN_INVENTORY[name].format(value)
    if "ARGS" in taken and name.lower() in TRAINER_OPTIONS:
        words = shlex.quote(f"--{name.lower()} {value}")
        return f"{name}={value} is an option of the trainer: ARGS={words}"
    return ""


def _not_taken(name, value, verbs, taken):
    elsewhere = _elsewhere(name, value, taken)
    if elsewhere:
        return elsewhere
    every = {v.name for verb in _verbs() for v in VERBS[verb].variables}
    verb = " ".join(verbs)
    if name in every:
        names = " ".join(taken) or "no variable"
        return f"make {verb} does not take {name}; it takes {names} (make help {verbs[0]})."
    for known in (taken, every):
        hint = _did_you_mean(name, known)
        if hint.endswith("?"):
            return f"there is no variable {name}{hint}"
    return f"there is no variable {name}: `make help {verbs[0]}` lists those of make {verb}."


def value_of(variable, text):
    """What a text means: None (nothing given), True, False, words, or text. Raises VerbError."""
    name = variable.name
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise VerbError(f"{name} contains a line break or another control character: leave it out.")
    if not text:
        return None
    if variable.choices and text not in variable.choices:
        raise VerbError(
            f"{name}={text}: it may be {' or '.join(variable.choices)}, or be left out."
        )
    if variable.kind == "number" and not re.match(r"-?[0-9]{1,9}$", text):
        raise VerbError(f"{name}={text} is not a whole number: write it like {name}=4.")
    if variable.kind in ("switch", "truth"):
        if text.lower() not in ON + OFF:
            raise VerbError(f"{name}={text}: {name}=1 means on, {name}=0 off.")
        on = text.lower() in ON
        return on if variable.kind == "switch" else str(on).lower()
    if variable.kind == "words":
        try:
            return shlex.split(text)
        except ValueError:
            raise VerbError(f"{name}={text}: a quote is not closed.") from None
    return _path(name, text) if variable.kind == "path" else text


def _path(name, text):
    try:
        return str(Path(text).expanduser().resolve())
    except (OSError, RuntimeError) as error:  # ~nobody, a circle of links
        raise VerbError(f"{name}={text} is no path: {error}") from None


def options(verb, given, environment):
    """The arguments that a verb's variables stand for, words after `--` last. Raises VerbError."""
    argv, last = [], []
    for name, variable in variables_of(verb).items():
        value = value_of(variable, environment[name]) if name in given else None
        if variable.kind == "run":
            last = ["--", value or "latest"]
        elif value is None or value is False or variable is CORE:
            continue
        elif variable.kind == "words":
            last = [variable.option, *value] if variable.option else value
        elif variable.option.startswith("-e "):
            argv += ["--extra-vars", json.dumps({variable.option[3:]: value})]
        else:
            argv.append(variable.option if value is True else f"{variable.option}={value}")
    return argv + last


def line(verb, **words):
    """`make VERB NAME=value ...` without those of the words that are None or empty. Raises KeyError
    for a variable that the verb does not take."""
    taken = variables_of(verb)
    typed = [(taken[name].name, value) for name, value in words.items() if value not in (None, "")]
    return " ".join(["make", verb, *(f"{name}={shlex.quote(str(value))}" for name, value in typed)])


def commands(text):
    """The commands that a text tells people to type: those in backticks that begin with `make`."""
    return re.findall(r"`make ([^`]+)`", text)


def keeping(text):
    """The text, whose commands keep this process's list of machines: typed as they are printed they
    concern the same machines. A command that continues a run has them from the run."""
    machines = os.environ.get(MACHINES)

    def kept(match):
        words = match[1].split()
        takes = VERBS.get(words[0]) and "INVENTORY" in variables_of(words[0])
        if not takes or any(word.startswith(("INVENTORY=", "RESUME=")) for word in words):
            return match[0]
        return f"`make {' '.join([words[0], f'INVENTORY={shlex.quote(machines)}', *words[1:]])}`"

    return re.sub(r"`make ([^`]+)`", kept, text) if machines else text


def help_text(verb=None, width=80):
    """What `make help` and `make help VERB` print."""
    if verb is None:
        lines = ["make VERB NAME=value ...", ""]
        for name, one in VERBS.items():
            lines += ["", f"{name}:"] if one is None else [f"  {name:<14} {one.help}"]
        return "\n".join(
            [*lines, "", "make help VERB: what VERB takes, for example make help train"]
        )
    one = VERBS[verb]
    lines = [f"make {verb}: {one.help}"]
    for name, variable in variables_of(verb).items():
        indent = " " * 17
        lines += textwrap.wrap(f"  {name:<14} {variable.help}", width, subsequent_indent=indent)
    return "\n".join([*lines, f"For example: {one.example}"] if one.example else lines)


def refusal(verb, given, environment):
    """The command that refuses a list of machines with which the verb would do nothing and be
    content; [] where the verb reads no such list (what is resumed has its own), or the launcher,
    which looks by itself."""
    if verb in LOOKING or "INVENTORY" not in variables_of(verb) or {"FACTS", "RESUME"} & {*given}:
        return []
    typed = [one for one in (INVENTORY, LIMIT) if one.name in given and environment[one.name]]
    words = [f"{one.option}={environment[one.name]}" for one in typed]
    return [PYTHON, "-m", "launcher", "inventory", *words]


def run(verb, command, given, environment):
    """Become the command with its options; never returns, but for a list of machines that is
    refused: its exit code."""
    argv = [*command, *options(verb, given, environment)]
    looking = refusal(verb, given, environment)
    refused = subprocess.call(looking) if looking else 0
    if refused:
        return refused
    if command[0] == "ansible-playbook":  # shown, since it can be typed without make as well
        print(" ".join(map(shlex.quote, argv)), flush=True)
    path = shutil.which(argv[0])
    if path is None:
        raise VerbError(f"{argv[0]} is missing: `make env` installs it.")
    os.execv(path, argv)  # noqa: S606 (without a shell on purpose)


def say(sentence):
    """A sentence on stderr: in the columns of a terminal, in one line where a program reads."""
    text = f"tandem: {sentence}"
    wide = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    print(wrapped(text, wide) if wide else text, file=sys.stderr)


def wrapped(text, width):
    """The text in lines of `width`, none of which breaks a command or a quoted value."""
    whole = r"`[^`]+`|\S+='[^']*'|make \S+ [A-Z_]+=\S+"
    kept = re.sub(whole, lambda match: match[0].replace(" ", "\0"), text)
    words = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(kept, width, subsequent_indent="  ", **words).replace("\0", " ")


def main(argv):
    typed = os.environ.get("TANDEM_VERBS", "").split()
    given = os.environ.get("TANDEM_GIVEN", "").split()
    try:
        if argv[0] == "help":
            check(typed, given, os.environ)
            asked = [verb for verb in typed if verb in VERBS and verb != "help"]
            print("\n\n".join(map(help_text, asked)) if asked else help_text())
        elif argv[0] == "known":
            for sentence in check(typed, given, os.environ):
                say(sentence)
        else:
            return run(argv[1], argv[2:], given, os.environ)
    except VerbError as error:
        say(error)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
