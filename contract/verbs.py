"""Define the verbs that a person types after `make`: VERBS has each verb's help, variables and an
example. `make help`, the readers of command lines, and all code that prints a command use this
table. The Makefile starts the programs of the verbs. Standard library, as options.py."""

import difflib
import os
import re
import shlex
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, NoReturn

from contract.errors import UserError
from contract.options import RUN_OPTIONS, TRAINER_OPTIONS, Option, integer, switch

# The variable of the environment with the inventory of this process and its children, if that is
# not inventory.ini. `with_inventory` adds its value to printed commands.
INVENTORY_VARIABLE = "TANDEM_MACHINES"
LATEST = "latest"  # the value of RUN= for the newest run

# Every variable of make: first the options of a run, then the options of the trainer that have a
# variable, then variables that only verbs take. command_line.py stores the value of NAME as `name`.
VARIABLES: Dict[str, Option] = {
    **{name.upper(): row for name, row in RUN_OPTIONS.items()},
    **{row.make: row for row in TRAINER_OPTIONS.values() if row.make},
    "ARGS": Option(
        "any option of `.venv/bin/python -m trainer --help`; those of SCRIPT", type=shlex.split
    ),
    "RUN": Option("its name or path (default: the newest)"),
    "RUNS": Option("2 to 8 runs with spaces between", type=shlex.split),
    "LIMIT": Option("only these machines: pc3, or pc1,pc2"),
    "JSON": Option("1: for scripts", type=switch),
    "ASK_SUDO": Option("1: ask for sudo's password once", type=switch),
    "CORE": Option(
        "another Ansible: 2.16 for machines with Python 3.6, 2.21 for 3.14", ("2.16", "2.21")
    ),
    "STOP_DISPLAY": Option("1: reboot for the driver although somebody is logged in", type=switch),
    "DELETE": Option("1: delete data there that is gone here", type=switch),
    "TAGS": Option("only these parts of site.yml: network, or driver,data"),
    "YES": Option("1: do not ask", type=switch),
    "NET": Option("the addresses to ask on port 22: 192.168.1.0/24, at most a /22"),
    "WRITE": Option("1: add the lines to the list, keeping what is there", type=switch),
    "LOGIN": Option("a user there who may use sudo (default: you)"),
    "KEEP_SUDO": Option("1: write no sudo rule", type=switch),
    "FACTS": Option("a file of facts instead of machines (examples/machines/)"),
    "SRC": Option("the folder of its archives", type=Path),
    "TO": Option("the new folder (default: data/imagenet)", type=Path),
    "PART": Option("model (default), or backbone: without its last layer", ("model", "backbone")),
    "SIZE": Option("pixels of the short side (default: 256)", type=integer, least=16, most=4096),
    "QUALITY": Option("of JPEG (default: 90)", type=integer, least=1, most=95),
    "MEASURE": Option("1: measure again: each pair of machines, and steps", type=switch),
    "GPU": Option("on paper, without machines: 2080ti, 3090 ..."),
    "LINK": Option("the network: 1gbit, 2.5gbit (default: as measured)"),
    "ALL": Option("1: each strategy and number of machines", type=switch),
    "SWEEP": Option("NAME=value,value ... (in ARGS with | between)"),
    "ROUNDS": Option("how often each one runs (default: 2)", type=integer, least=1, most=1000),
    "ONLY": Option("a room (launcher, train, gpu ...) or a file below tests/"),
    "AGAIN": Option("1: also what passed before", type=switch),
    "DEVICE": Option("cpu: only what needs no GPU", ("cuda", "cpu")),
}
# Variables that several verbs take. SUBJECT: what to train, and on which machines. START: how a run
# starts. PACKAGES and SCRIPT: the user's own script instead of the trainer (docs/own-script.md).
# PRETRAINED: weights of timm or torchvision, by the names of their models.
SUBJECT = "INVENTORY NODES DATA MODEL WEIGHTS BATCH EPOCHS PRECISION SYNC"
START = "MAX_RESTARTS MIN_NODES BALANCE DETACH NOTIFY PORT QUEUE FORCE KEEP"
PACKAGES = "SCRIPT FOLDER REQUIREMENTS"
PRETRAINED = "MODEL WEIGHTS"
SCRIPT = f"{PACKAGES} PRECHECK OUTPUT RESUME_ARGS RESUME_FROM"


@dataclass(frozen=True)
class Verb:
    """Describe a verb. `example`: a command that works in a checkout, in some cases only with the
    machines of inventory.ini. `takes`: names of variables with blanks between. `means`: {name:
    help} of variables that have another meaning with this verb. `table`: {name: Option} of at
    least the variables in `takes`."""

    help: str
    example: str = ""
    takes: str = ""
    means: Mapping[str, str] = field(default_factory=dict)
    table: Mapping[str, Option] = field(default_factory=lambda: VARIABLES)

    @property
    def variables(self) -> Dict[str, Option]:
        """Return {NAME: Option} of the verb's variables."""
        options = {name: self.table[name] for name in self.takes.split()}
        for name, text in self.means.items():
            # `make help VERB` prefers `make_help`, which has the usual meaning.
            options[name] = replace(options[name], help=text, make_help="")
        return options


DEVELOP = "Develop"  # the group that only `make help develop` lists
# {first verb of a group: title of the group in `make help`}.
GROUPS = {
    "help": "First",
    "find": "Machines",
    "imagenet": "Train",
    "top": "Watch",
    "report": "Compare",
    "wake": "Office",
    "test": DEVELOP,
}
# fmt: off
VERBS: Dict[str, Verb] = {
    "help": Verb("print this list; `make help VERB` says what VERB takes", "make help train"),
    "env": Verb("install what this machine needs (torch: once it trains here)", "make env"),
    # The Makefile passes examples/demo.ini, whose nodes are local.
    "demo": Verb("train the digits on four local nodes: no root, no other machine",
        "make demo EPOCHS=3", f"{SUBJECT} {START} ARGS".replace("INVENTORY ", "")),
    "find": Verb("look for machines in this LAN: lines for inventory.ini",
        "make find NET=192.168.56.0/24", "INVENTORY NET WRITE"),
    "bootstrap": Verb("let this control node into new machines",
        "make bootstrap LIMIT=node3 LOGIN=anna", "INVENTORY LIMIT LOGIN KEEP_SUDO CORE"),
    "check": Verb("report what is wrong with machines; changes nothing",
        "make check INVENTORY=examples/demo.ini", "INVENTORY JSON ASK_SUDO CORE"),
    "dry-provision": Verb("print what `make provision` would install where",
        "make dry-provision FACTS=examples/machines/2080ti-ubuntu2204.json", "INVENTORY FACTS"),
    "provision": Verb("make the machines of inventory.ini a cluster",
        "make provision LIMIT=node3 TAGS=network",
        "INVENTORY LIMIT DELETE TAGS STOP_DISPLAY ASK_SUDO CORE"),
    "verify": Verb("check that machines are still as provisioned; changes nothing",
        "make verify", "INVENTORY ASK_SUDO CORE"),
    "upgrade": Verb("upgrade kernel, driver and stack, machine by machine",
        "make upgrade LIMIT=node3", "INVENTORY LIMIT STOP_DISPLAY ASK_SUDO CORE"),
    "bundle": Verb(
        "gather what machines without internet need",
        "make bundle FORCE=1", f"INVENTORY FORCE {PACKAGES} {PRETRAINED}",
        {"FORCE": "1: though no machine is offline=true"}),
    "imagenet": Verb("make class folders from the archives of ILSVRC2012",
        "make imagenet SRC=/media/anna/ILSVRC2012 SIZE=256", "SRC SIZE QUALITY TO",
        {"SIZE": "pixels of the short side of smaller copies (default: as they are)",
         "TO": "the new folder (default: data/imagenet, or data/imagenet-SIZE)"}),
    "shrink": Verb("write a copy of a data set with smaller images",
        "make shrink DATA=imagenet SIZE=256", "DATA SIZE QUALITY TO",
        {"DATA": "a folder in data/, or a path",
         "TO": "the new folder (default: NAME-SIZE, next to it)"}),
    "plan": Verb(
        "predict the next run; measures first if nothing is known",
        "make plan GPU=2080ti LINK=1gbit MODEL=resnet50 BATCH=64",
        f"{SUBJECT} MEASURE QUEUE FORCE RUN GPU LINK ALL ARGS",
        {"NODES": "up to how many machines (default: all)",
         "DATA": "measure with these (default: noise; no MODEL: digits)",
         "EPOCHS": "of the run that is counted (default: 90)",
         "SYNC": "for the file: as in `make train`",
         "RUN": "predict from this run"}),
    "dry-run": Verb("print exactly what `make train` would run on each machine",
        "make dry-run INVENTORY=examples/demo.ini NODES=2", f"{SUBJECT} {SCRIPT} {START} ARGS"),
    "train": Verb("start a run",
        "make train INVENTORY=examples/demo.ini NODES=2 EPOCHS=3",
        f"{SUBJECT} RESUME {SCRIPT} {START} AT UNTIL ARGS"),
    "evaluate": Verb("say how good a run's best model is, and in which classes",
        "make evaluate RUN=latest", "RUN DATA MODEL INVENTORY NODES QUEUE FORCE",
        {"DATA": "other images of the run's classes (default: those of the run)",
         "MODEL": "that of a run which was begun by somebody else",
         "INVENTORY": "on these machines (default: those of the run)"}),
    "export": Verb("write a run's best model, or its backbone, as plain weights",
        "make export RUN=latest PART=backbone", "RUN PART TO",
        {"TO": "a .pt or .safetensors file (default: model.pt or backbone.pt here)"}),
    "stop": Verb("end a run; its workers save a checkpoint first", "make stop RUN=latest", "RUN"),
    "slurm": Verb("write the same run as a batch script for a Slurm cluster",
        "make slurm INVENTORY=examples/demo.ini NODES=2", f"{SUBJECT} ARGS"),
    "top": Verb(
        "show a run on a live screen; between runs, how the machines are",
        "make top INVENTORY=examples/demo.ini", "INVENTORY RUN",
        {"RUN": "a run (default: the one under way, if any)"}),
    "status": Verb("say how far a run is, what holds it up, how its machines are",
        "make status JSON=1", "RUN JSON"),
    "attach": Verb("show a run that is under way", "make attach RUN=latest", "RUN"),
    "runs": Verb("list all runs, newest first", "make runs"),
    "report": Verb(
        "make the report of a run from its files", "make report JSON=1", "RUN JSON",
        {"JSON": "1: print summary.json instead"}),
    "compare": Verb(
        "set runs side by side: what differs, and what came of it",
        'make compare RUNS="latest latest~1"', "RUNS JSON",
        {"JSON": "1: print the figures for scripts"}),
    "sweep": Verb(
        "try each combination of settings in short runs, and compare",
        'make sweep INVENTORY=examples/demo.ini SWEEP="BATCH=32,64" EPOCHS=2',
        f"SWEEP {SUBJECT} ROUNDS RESUME ARGS",
        {"RESUME": "a sweep to continue: its name, or latest"}),
    "tensorboard": Verb("write a run's figures for TensorBoard, and show them",
        "make tensorboard RUN=latest", "RUN"),
    "wake": Verb("switch machines on over the network (wake_on_lan: true)",
        "make wake LIMIT=node2,node3", "INVENTORY LIMIT"),
    "poweroff": Verb("switch off the machines if no run uses them; asks once",
        "make poweroff LIMIT=node2,node3", "INVENTORY LIMIT YES ASK_SUDO CORE"),
    "test": Verb("run linters, unit tests and some training: minutes, no root",
        "make test ONLY=launcher", "ONLY"),
    "test-lab": Verb("provision and train on machines of the lab (root)",
        "make test-lab ONLY=test_train.py", "ONLY"),
    "test-all": Verb("run all other tests, piece by piece: hours (root)",
        "make test-all ONLY=test_chaos", "ONLY AGAIN"),
    "test-gpu": Verb("test what GPUs compute and survive: docs/gpu.md (a GPU)",
        "make test-gpu DEVICE=cpu", "DEVICE"),
    "snapshots": Verb("rewrite the sentences that users meet: tests/messages/",
        "make snapshots"),
    "lint": Verb("run every linter", "make lint"),
    "bench": Verb("measure figures, by the methods of bench/README.md (root)", "make bench"),
    "bench-gpu": Verb("compare our steps with others': bench/performance.md (a GPU)",
        "make bench-gpu DEVICE=cpu", "DEVICE"),
    "lock": Verb("compile requirements/*.txt from *.in (needs uv)", "make lock"),
}
# fmt: on


def find_nearest(word: str, names: Iterable[str], min_similarity: float = 0.6) -> str:
    """Return the name that the user probably meant, or "". `min_similarity`: difflib's ratio, from
    0 to 1; its own default is 0.6, too."""
    # Variables are upper case, options lower case; a user may mix them up.
    by_folded = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(word.lower(), by_folded, n=1, cutoff=min_similarity)
    return by_folded[matches[0]] if matches else ""


def refuse_variable(name: str, value: str, verb: str, variables: Mapping[str, Option]) -> NoReturn:
    """Raise UserError for NAME=`value`, if `verb` takes only `variables`."""
    suggestion = find_nearest(name, variables) or find_nearest(name, VARIABLES)
    if name == "GPUS":  # a variable of other launchers
        message = f"{name}={value}: the inventory sets how many GPUs a machine uses: write "
        message += f"gpus={value} in its line."
    elif "ARGS" in variables and name.lower() in TRAINER_OPTIONS:
        # A correct option in the wrong place.
        words = shlex.quote(f"--{name.lower()} {value}")
        message = f"{name}={value} is an option of the trainer: ARGS={words}"
    elif name in VARIABLES:  # of another verb
        names = " ".join(variables) or "no variable"
        message = f"make {verb} does not take {name}; it takes {names} (make help {verb})."
    elif suggestion:
        message = f"there is no variable {name}: did you mean {suggestion}?"
    else:
        message = f"there is no variable {name}: `make help {verb}` lists those of make {verb}."
    raise UserError(message)


def format_command(verb: str, **values: object) -> str:
    """Return `make VERB NAME=value ...` without the variables that are None or "". Raises KeyError
    for a variable that the verb does not take."""
    variables = VERBS[verb].variables
    command = f"make {verb}"
    for name, value in values.items():
        if name not in variables:
            raise KeyError(name)
        if value not in (None, ""):
            command += f" {name}={_quote(str(value))}"
    return command


def _quote(value: str) -> str:
    """Quote a value for a shell, in double quotes if it contains a single quote."""
    # shlex.quote would write '"'"' for each single quote, which is hard to read. Between double
    # quotes a shell interprets only these characters.
    if "'" in value and not set(value) & set('"$`\\!'):
        return f'"{value}"'
    return shlex.quote(value)


def find_commands(text: str) -> List[str]:
    """Return the commands of make that a text has in backticks, without the word `make`."""
    return re.findall(r"`make ([^`]+)`", text)


def with_inventory(text: str) -> str:
    """Return a text with commands, and after it the INVENTORY= that they need for this process's
    machines."""
    inventory = os.environ.get(INVENTORY_VARIABLE)
    if not inventory:
        return text
    # A command that resumes a run gets the machines from the run, and so needs no INVENTORY=.
    verbs_without = [
        words[0]
        for words in map(str.split, find_commands(text))
        if words[0] in VERBS and "INVENTORY" in VERBS[words[0]].variables
        if not any(word.startswith(("INVENTORY=", "RESUME=")) for word in words)
    ]
    if not verbs_without:
        return text
    verbs_text = " and ".join(f"make {verb}" for verb in dict.fromkeys(verbs_without))
    return f"{text} (Add INVENTORY={shlex.quote(inventory)} to {verbs_text}.)"


def list_verbs(develop: bool = False) -> str:
    """Return the text of `make help`, or of `make help develop` if `develop`."""
    lines, group = [], ""
    for name, row in VERBS.items():
        # A verb that begins no group belongs to the group of the previous verb.
        group = GROUPS.get(name, group)
        if (group == DEVELOP) is develop:
            if name in GROUPS:
                lines += ["", f"{group}:"]
            lines.append(f"  {name:<14} {row.help}")
    lines += ["", "make help VERB: what VERB takes, for example make help train"]
    if not develop:
        lines.append("make help develop: the verbs of those who change Tandem")
    return "\n".join(["make VERB NAME=value ...", *lines])


def help_text(command: str, row: Verb) -> str:
    """Return the help of a command, as `make help VERB` prints it. `row`: the verb's description,
    which for a command outside make is not in VERBS."""
    lines = [f"{command}: {row.help}"]
    for name, option in row.variables.items():
        text = f"  {name:<14} {option.make_help or option.help}"
        lines += textwrap.wrap(text, 80, subsequent_indent=" " * 17)
    return "\n".join([*lines, f"For example: {row.example}"] if row.example else lines)


def wrap_lines(text: str, width: int) -> str:
    """Return the text in lines of `width` characters. Does not break commands and quoted values."""
    # Matches `make env`, ARGS='--lr 0.1', and make train DATA=digits.
    unbreakable = r"`[^`]+`|\S+='[^']*'|make \S+ [A-Z_]+=\S+"
    # NULs hide the blanks of these from textwrap.
    text = re.sub(unbreakable, lambda match: match[0].replace(" ", "\0"), text)
    settings: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, width, subsequent_indent="  ", **settings).replace("\0", " ")
