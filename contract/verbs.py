"""The verbs that a person types after `make`, each with its options: the only such table. `make
help`, the launcher's command line and whatever prints a command have them from here. Standard
library, as options.py.
"""

import difflib
import os
import re
import shlex
import textwrap
from typing import Any, Dict, List, NamedTuple, Tuple

from contract.options import ENTRIES, RUN_OPTIONS, Option

# A list of machines other than inventory.ini, for the commands that this process and its children
# print: see `with_inventory`.
MACHINES = "TANDEM_MACHINES"


class Verb(NamedTuple):
    """`example`: what works as typed in a checkout, some on the machines of its inventory."""

    help: str
    options: Tuple[Option, ...] = ()
    example: str = ""

    @property
    def variables(self) -> Dict[str, Option]:
        """{NAME: Option}: of two with one name the later."""
        return {option.make: option for option in self.options}


def _row(make: str, text: str, kind: str = "", flag: str = "", **more: Any) -> Option:
    return Option(text, make=make, flag=flag, kind=kind, **more)


INVENTORY, NODES = RUN_OPTIONS["inventory"], RUN_OPTIONS["nodes"]
QUEUE, FORCE = RUN_OPTIONS["queue"], RUN_OPTIONS["force"]
ARGS = _row(
    "ARGS",
    "any option of `.venv/bin/python -m trainer --help`; those of SCRIPT",
    "words",
    flag="--",
)
RUN = _row("RUN", "its name or path (default: the newest)", "run", default="latest")
LIMIT = _row("LIMIT", "only these machines: pc3, or pc1,pc2")
JSON = _row("JSON", "1: for scripts", "switch")
ASK_SUDO = _row("ASK_SUDO", "1: ask for sudo's password once", "switch", flag="--ask-become-pass")
STOP_DISPLAY = _row(
    "STOP_DISPLAY",
    "1: reboot for the driver although somebody is logged in",
    "switch",
    flag="-e allow_stop_display",
)
CORE = _row("CORE", "2.16: an older Ansible, for machines with Python 3.6", choices=("2.16",))
ONLY = _row("ONLY", "a room (launcher, train, gpu ...) or a file below tests/")

TRAINER_OPTIONS = tuple(row for row in ENTRIES.values() if row.make)
SUBJECT = (INVENTORY, NODES, *TRAINER_OPTIONS)
START = tuple(
    RUN_OPTIONS[name]
    for name in (
        *("max_restarts", "min_nodes", "balance", "detach", "notify", "port", "queue", "force"),
        "keep",
    )
)
HOURS = (RUN_OPTIONS["at"], RUN_OPTIONS["until"])
RESUME = RUN_OPTIONS["resume"]
DEVICES = ("cuda", "cpu")
# A script of one's own, in the place of the trainer (docs/own-script.md).
PACKAGES = tuple(RUN_OPTIONS[name] for name in ("script", "folder", "requirements"))
SCRIPT = (*PACKAGES, *(RUN_OPTIONS[name] for name in ("output", "resume_args", "resume_from")))

# The first verb of each group in `make help`.
GROUPS = {
    "help": "First",
    "find": "Machines",
    "imagenet": "Train",
    "top": "Watch",
    "report": "Compare",
    "wake": "Office",
    "test": "Develop",
}
VERBS: Dict[str, Verb] = {
    "help": Verb("print this list; `make help VERB` says what VERB takes", (), "make help train"),
    "env": Verb("install what this machine needs (torch: once it trains here)", (), "make env"),
    "demo": Verb(
        "train the digits on four local nodes: no root, no other machine",
        (*SUBJECT[1:], *START, ARGS),
        "make demo EPOCHS=3",
    ),
    "find": Verb(
        "look for machines in this LAN: lines for inventory.ini",
        (
            INVENTORY,
            _row("NET", "the addresses to ask on port 22: 192.168.1.0/24, at most a /22"),
            _row("WRITE", "1: add the lines to the list, keeping what is there", "switch"),
        ),
        "make find NET=192.168.56.0/24",
    ),
    "bootstrap": Verb(
        "let this control machine into new machines",
        (
            INVENTORY,
            LIMIT,
            _row("LOGIN", "a user there who may use sudo (default: you)"),
            _row("KEEP_SUDO", "1: write no sudo rule", "switch"),
            CORE,
        ),
        "make bootstrap LIMIT=node3 LOGIN=anna",
    ),
    "check": Verb(
        "report what is wrong with machines; changes nothing",
        (INVENTORY, JSON, ASK_SUDO, CORE),
        "make check INVENTORY=examples/demo.ini",
    ),
    "dry-provision": Verb(
        "print what `make provision` would install where",
        (INVENTORY, _row("FACTS", "a file of facts instead of machines (examples/machines/)")),
        "make dry-provision FACTS=examples/machines/2080ti-ubuntu2204.json",
    ),
    "provision": Verb(
        "make the machines of inventory.ini a cluster",
        (
            INVENTORY,
            LIMIT,
            _row(
                "DELETE", "1: delete data there that is gone here", "switch", flag="-e data_delete"
            ),
            _row("TAGS", "only these parts of site.yml: network, or driver,data"),
            STOP_DISPLAY,
            ASK_SUDO,
            CORE,
        ),
        "make provision LIMIT=node3 TAGS=network",
    ),
    "verify": Verb(
        "check that machines are still as provisioned; changes nothing",
        (INVENTORY, ASK_SUDO, CORE),
        "make verify",
    ),
    "upgrade": Verb(
        "upgrade kernel, driver and stack, machine by machine",
        (INVENTORY, LIMIT, STOP_DISPLAY, ASK_SUDO, CORE),
        "make upgrade LIMIT=node3",
    ),
    "bundle": Verb(
        "gather what machines without internet need",
        (
            INVENTORY,
            _row(
                "FORCE",
                "1: though no machine is offline=true",
                "switch",
                flag="-e bundle_for_nobody",
            ),
            *PACKAGES,
        ),
        "make bundle FORCE=1",
    ),
    "imagenet": Verb(
        "make class folders from the archives of ILSVRC2012",
        (
            _row("SRC", "the folder of its archives", "path", flag="--source"),
            _row("TO", "where (default: data/imagenet)", "path"),
        ),
        "make imagenet SRC=/media/anna/ILSVRC2012",
    ),
    "plan": Verb(
        "predict the next run; measures first if nothing is known",
        (
            *SUBJECT,  # four of which mean something else here
            NODES._replace(help="up to how many machines (default: all)"),
            _row("DATA", "measure with these (default: noise; no MODEL: digits)"),
            ENTRIES["epochs"]._replace(make_help="of the run that is counted (default: 90)"),
            _row("SYNC", "for the file: as in `make train`"),
            _row("MEASURE", "1: measure anew: each pair of machines, and steps", "switch"),
            QUEUE,
            FORCE,
            _row("RUN", "predict from this run"),
            _row("GPU", "on paper, without machines: 2080ti, 3090 ..."),
            _row("LINK", "the network: 1gbit, 2.5gbit (default: as measured)"),
            _row("ALL", "1: each strategy and number of machines", "switch"),
            ARGS,
        ),
        "make plan GPU=2080ti LINK=1gbit MODEL=resnet50 BATCH=64",
    ),
    "dry-run": Verb(
        "print exactly what `make train` would run on each machine",
        (*SUBJECT, *SCRIPT, *START, ARGS),
        "make dry-run INVENTORY=examples/demo.ini NODES=2",
    ),
    "train": Verb(
        "start a run",
        (*SUBJECT, RESUME, *SCRIPT, *START, *HOURS, ARGS),
        "make train INVENTORY=examples/demo.ini NODES=2 EPOCHS=3",
    ),
    "stop": Verb("end a run; its workers save a checkpoint first", (RUN,), "make stop RUN=latest"),
    "slurm": Verb(
        "write the same run as a batch script for a Slurm cluster",
        (*SUBJECT, ARGS),
        "make slurm INVENTORY=examples/demo.ini NODES=2",
    ),
    "top": Verb(
        "show a run on a live screen; between runs, how the machines are",
        (INVENTORY, _row("RUN", "a run (default: the one under way, if any)")),
        "make top INVENTORY=examples/demo.ini",
    ),
    "status": Verb(
        "say how far a run is, what holds it up, how its machines are",
        (RUN, JSON),
        "make status JSON=1",
    ),
    "attach": Verb("show a run that is under way", (RUN,), "make attach RUN=latest"),
    "runs": Verb("list all runs, newest first", (), "make runs"),
    "report": Verb(
        "make the report of a run from its files",
        (RUN, _row("JSON", "1: print summary.json instead", "switch")),
        "make report JSON=1",
    ),
    "compare": Verb(
        "set runs side by side: what differs, and what came of it",
        (
            _row("RUNS", "2 to 8 runs with spaces between", "words", flag="--"),
            _row("JSON", "1: print the figures for scripts", "switch"),
        ),
        'make compare RUNS="latest latest~1"',
    ),
    "sweep": Verb(
        "try each combination of settings in short runs, and compare",
        (
            _row("SWEEP", "NAME=value,value ... (in ARGS with | between)"),
            *SUBJECT,
            _row("ROUNDS", "how often each one runs (default: 2)", "number", least=1, most=1000),
            _row("RESUME", "go on with a sweep: its name, or latest"),
            ARGS,
        ),
        'make sweep INVENTORY=examples/demo.ini SWEEP="BATCH=32,64" EPOCHS=2',
    ),
    "tensorboard": Verb(
        "write a run's figures for TensorBoard, and show them",
        (RUN,),
        "make tensorboard RUN=latest",
    ),
    "wake": Verb(
        "switch machines on over the network (wake_on_lan: true)",
        (INVENTORY, LIMIT),
        "make wake LIMIT=node2,node3",
    ),
    "poweroff": Verb(
        "switch off the machines if no run uses them; asks once",
        (
            INVENTORY,
            LIMIT,
            _row("YES", "1: do not ask", "switch", flag="-e poweroff_sure"),
            ASK_SUDO,
            CORE,
        ),
        "make poweroff LIMIT=node2,node3",
    ),
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
        (ONLY, _row("AGAIN", "1: also what passed before", "switch")),
        "make test-all ONLY=test_chaos",
    ),
    "test-gpu": Verb(
        "test what GPUs compute and survive: docs/gpu.md (a GPU)",
        (_row("DEVICE", "cpu: only cases that need no GPU", choices=DEVICES),),
        "make test-gpu DEVICE=cpu",
    ),
    "snapshots": Verb(
        "write the sentences that users meet anew: tests/messages/", (), "make snapshots"
    ),
    "mutants": Verb(
        "change rules of the product: do the tests notice? (root, hours)", (), "make mutants"
    ),
    "lint": Verb("run every linter", (), "make lint"),
    "bench": Verb("measure figures, by the methods of bench/README.md (root)", (), "make bench"),
    "bench-gpu": Verb(
        "measure our steps beside others': bench/performance.md (a GPU)",
        (_row("DEVICE", "cpu: a tiny version, to try it", choices=DEVICES),),
        "make bench-gpu DEVICE=cpu",
    ),
    "lock": Verb("make requirements/*.txt anew from *.in (needs uv)", (), "make lock"),
}
# Said in the list of machines, of one machine.
IN_INVENTORY = {
    "GPUS": "how many GPUs of a machine take part is said in the inventory: gpus={} in its line."
}


def names() -> List[str]:
    return [*VERBS]


def variables_of(verb: str) -> Dict[str, Option]:
    """{NAME: Option} of a verb."""
    return VERBS[verb].variables


def did_you_mean(word: str, known: Any) -> str:
    by_folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_folded, n=1)
    return f": did you mean {by_folded[near[0]]}?" if near else ": `make help` lists them."


def refusal_of(name: str, value: str, verbs: List[str], variables: Dict[str, Option]) -> str:
    """What to say of a variable that these verbs, which take others, do not."""
    if name in IN_INVENTORY:
        return f"{name}={value}: " + IN_INVENTORY[name].format(value)
    if "ARGS" in variables and name.lower() in ENTRIES:
        words = shlex.quote(f"--{name.lower()} {value}")
        return f"{name}={value} is an option of the trainer: ARGS={words}"
    every = {option.make for row in VERBS.values() for option in row.options}
    verb = " ".join(verbs)
    if name in every:
        others = " ".join(variables) or "no variable"
        return f"make {verb} does not take {name}; it takes {others} (make help {verbs[0]})."
    for known in (variables, every):
        hint = did_you_mean(name, known)
        if hint.endswith("?"):
            return f"there is no variable {name}{hint}"
    return f"there is no variable {name}: `make help {verbs[0]}` lists those of make {verb}."


def line(verb: str, **words: object) -> str:
    """`make VERB NAME=value ...` without those of the words that are None or empty. Raises KeyError
    for a variable that the verb does not take."""
    variables = variables_of(verb)
    typed = [
        (name, value)
        for name, value in words.items()
        if variables[name] and value not in (None, "")
    ]
    return " ".join(["make", verb, *(f"{name}={shlex.quote(str(value))}" for name, value in typed)])


def commands(text: str) -> List[str]:
    """The commands that a text tells people to type: those in backticks that begin with `make`."""
    return re.findall(r"`make ([^`]+)`", text)


def with_inventory(text: str) -> str:
    """The text, and at its end which list of machines its commands need, so that they concern those
    of this process. A command that continues a run has them from the run."""
    machines = os.environ.get(MACHINES)
    needing = [
        words[0]
        for words in map(str.split, commands(text) if machines else [])
        if words[0] in VERBS and "INVENTORY" in variables_of(words[0])
        if not any(word.startswith(("INVENTORY=", "RESUME=")) for word in words)
    ]
    if not machines or not needing:
        return text
    verbs = " and ".join(f"make {verb}" for verb in dict.fromkeys(needing))
    return f"{text} (Add INVENTORY={shlex.quote(machines)} to {verbs}.)"


def list_verbs(develop: bool = False) -> str:
    """What `make help` prints, and `make help develop`: the verbs of those who change Tandem."""
    lines, group = [], ""
    for name, row in VERBS.items():
        group = GROUPS.get(name, group)
        if (group == "Develop") is develop:
            lines += ["", f"{group}:"] if name in GROUPS else []
            lines.append(f"  {name:<14} {row.help}")
    lines += ["", "make help VERB: what VERB takes, for example make help train"]
    lines += [] if develop else ["make help develop: the verbs of those who change Tandem"]
    return "\n".join(["make VERB NAME=value ...", *lines])


def help_text(command: str, row: Verb) -> str:
    """What a command takes, as `make help VERB` prints it."""
    lines = [f"{command}: {row.help}"]
    for name, option in row.variables.items():
        text = f"  {name:<14} {option.make_help or option.help}"
        lines += textwrap.wrap(text, 80, subsequent_indent=" " * 17)
    return "\n".join([*lines, f"For example: {row.example}"] if row.example else lines)


def wrapped(text: str, width: int) -> str:
    """The text in lines of `width`, none of which breaks a command or a quoted value."""
    whole = r"`[^`]+`|\S+='[^']*'|make \S+ [A-Z_]+=\S+"
    kept = re.sub(whole, lambda match: match[0].replace(" ", "\0"), text)
    words: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(kept, width, subsequent_indent="  ", **words).replace("\0", " ")
