"""A script of the user's own in the place of the trainer: what is refused of it before any machine
is asked, what is sent of it, how its processes are started and go on, and what comes back."""

from __future__ import annotations

import posixpath
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from boundary.answers import MOST_PACKAGES, NodeFacts
from contract.errors import UserError
from contract.options import Config, as_typed
from contract.text import pluralize
from launcher import judge, look
from launcher.look import Control, OpenMachines
from launcher.machines import inventory
from launcher.machines.engine import Host
from launcher.options import script_resumed, script_words
from launcher.plan import code, layer
from launcher.plan.code import LIBRARY, WORK, Code, Delivery
from launcher.plan.devices import NodeDevices
from launcher.plan.files import MOST_BYTES, Files
from launcher.plan.layer import Layer
from launcher.plan.plan import Command, NodePart, Plan, rank_port
from launcher.plan.requirements import RequirementsFile, find_requirements, read_requirements
from launcher.plan.sources import declares, first_line, loaded_by
from launcher.problems import Problem, Refused, problem, together
from launcher.terminal import Terminal, waiting
from launcher.workload import Collected, Requirements, RunSite, Workload

LAST = "{last}"  # in RESUME_ARGS: the newest checkpoint in OUTPUT
NAMED = re.compile(r"\{\w+\}")  # meant for a value, as {latest}
SHELLS = (".sh", ".bash", ".zsh")
# --hf_token X, --api-key=X, wandb.password=X; but neither --max_tokens 512 nor --mask_token [MASK].
SECRET = re.compile(
    r"((?:.*[-_.])?(?:token|secret|password|passwd|(?:api[-_]?)key|credentials?))(?:=(.*))?", re.I
)
VALUE = re.compile(r"(?!-)(?=.*\d)(?=.*[^\d.])[^\s/]{8,}")
MISSING_MODULE = re.compile(r"No module named '?([\w.]+)")
PATHS = re.compile(r"[^\s'\"`,:;()\[\]<>]*[./][^\s'\"`,:;()\[\]<>]+")
IN_FOLDER = "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
LOCAL_RANK = ("--local_rank", "--local-rank")  # by which torch.distributed.launch gave it


@dataclass(frozen=True)
class Script(Workload):
    """What SCRIPT= and its companions ask for. `words` are what launch starts, a file below
    `folder` or -m and a module; `local_rank` is the option by which the script wants its local
    rank, as it spells it; `imports` are the packages that it loads in any case, by the names that
    they are imported by, `broken` says why our Python cannot read it."""

    words: tuple[str, ...]
    folder: Path
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    resume: tuple[str, ...]
    resume_from: str | None
    local_rank: str | None
    imports: tuple[str, ...]
    broken: str | None = None
    requirements: RequirementsFile | None = None
    layer: Layer | None = None  # of its packages, once the machines are known
    files: Files = field(default_factory=Files)

    # One process for each GPU, or for each machine without one.
    device = "auto"
    parallel = "ddp"

    # ---- before any machine is asked ----

    @classmethod
    def read(cls, config: Config, run: str | None = None) -> Script:
        return read(config)

    @classmethod
    def resumed(cls, plan_file: Path, began: Config, given: Mapping[str, Any]) -> Config:
        return script_resumed(began, given)

    @classmethod
    def unnamed_code(cls, began: Config, given: Mapping[str, Any]) -> list[str]:
        named = {"SCRIPT": began.script, "FOLDER": began.folder}
        named["REQUIREMENTS"] = began.requirements
        return [as_typed(key, v) for key, v in named.items() if v and key.lower() not in given]

    def check(self, config: Config, hosts: Sequence[Host]) -> list[str]:
        if config.max_restarts and not self.resume:
            raise UserError(
                f"MAX_RESTARTS={config.max_restarts}: another attempt would begin anew, for how "
                "the script goes on was not said: give RESUME_ARGS=, like RESUME_ARGS='--resume "
                "{last}' (docs/own-script.md)."
            )
        secret = self.readable_secrets()
        return [secret] if secret else []

    def readable_secrets(self) -> str | None:
        """A sentence about arguments that look like a password; None where there are none."""
        names = [
            match[1]
            for word, following in zip(self.arguments, (*self.arguments[1:], ""))
            if (match := SECRET.fullmatch(word)) and VALUE.fullmatch(match[2] or following)
        ]
        if not names:
            return None
        return (
            f"{', '.join(names)}: everybody on the machines can read what is in ARGS, and so can "
            "who reads report.html. If it is secret, give it in run_env of the inventory or a file."
        )

    # ---- while the machines are looked at ----

    @property
    def name(self) -> str:
        """train for tools/train.py and for package.train."""
        last = self.words[-1]
        return last.rpartition(".")[2] if len(self.words) > 1 else PurePosixPath(last).stem

    @property
    def packages(self) -> list[str]:
        return [*self.imports]

    def question(self, is_first: bool) -> dict[str, Any]:
        return {"models": None, "distributions": MOST_PACKAGES if self.requirements else 0}

    def of_checkout(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), ()

    def for_machines(self, machines: OpenMachines) -> Script:
        """With the layer of its packages for them."""
        if not self.requirements or judge.python(machines):
            return self
        made = layer.layer_for_machines(self.requirements, machines)
        imports = tuple(sorted({*self.imports} - made.modules()))
        return replace(self, layer=made, imports=imports)

    def problems(
        self,
        machines: OpenMachines,
        parts: Mapping[str, NodeDevices],
        control: Control,
        others: Sequence[Problem],
    ) -> list[Problem]:
        if self.requirements and (wrong := judge.python(machines)):
            return wrong
        name = self.words[-1]
        facts = [(host, machines.facts[host.name]) for host in machines.hosts]
        if self.broken and any(_reads_no_more(own) for _, own in facts):
            return [problem("script-broken", script=name, why=self.broken)]
        wrong = judge.layer(machines, self.layer)
        # It was read here, not run: it may find these in another way, or never come to them.
        lacking = judge.lacking_imports(machines, self.imports, "script-imports", script=name)
        return together([*wrong, *lacking])

    def decide(
        self,
        config: Config,
        everybody: Sequence[Host],
        machines: OpenMachines,
        before: Mapping[str, int],
        terminal: Terminal,
    ) -> tuple[Config, Script]:
        return config, self.for_machines(machines)

    def for_attempt(
        self,
        config: Config,
        everybody: Sequence[Host],
        machines: OpenMachines,
        terminal: Terminal,
    ) -> Script:
        return self

    # ---- for a plan ----

    def warnings(self, hosts: Sequence[Host]) -> list[str]:
        return []

    def code(self) -> Code:
        file = _file(self.folder, list(self.words))
        return code.current(self.folder, str(file.parent.relative_to(self.folder)))

    def plan_fields(
        self,
        config: Config,
        hosts: Sequence[Host],
        counts: Sequence[int],
        first: NodeFacts,
        used_ports: Collection[int],
    ) -> dict[str, Any]:
        document = {
            "words": list(self.words),
            "folder": str(self.folder),
            "arguments": list(self.arguments),
            "outputs": list(self.outputs),
            "packages": self.layer.packages if self.layer else {},
            "sent": self.files.lines(),
            "port": rank_port(first, config.port, used_ports),
        }
        return {"script": document}

    def plan_lines(self, plan: Plan) -> list[str]:
        """What is sent, and what comes back."""
        back = ", ".join(self.outputs) or "what it writes beside its code (OUTPUT= names folders)"
        own = self.layer.packages if self.layer else {}
        packages = ", ".join(f"{name} {version}" for name, version in own.items())
        return [
            f"script {shlex.join(self.words)}, with {self.folder}",
            *self.files.lines(),
            f"packages: {packages or 'those of the environment'}",
            f"comes back: {back}",
        ]

    def command(self, plan: Plan, part: NodePart, last: str | None) -> Command:
        """Where `last` is None it begins anew."""
        assert plan.script
        work = f"{part.output}/{WORK}/{part.host.name}"
        sent = f"{part.node_dir}/{part.code}"
        packages = f"{part.node_dir}/{self.layer.folder}" if self.layer else ""
        paths = [work, f"{sent}/{LIBRARY}", packages, part.env.get("PYTHONPATH", "")]
        env = {"TANDEM_OUTPUT": part.output, "TANDEM_SCRIPT_PORT": str(plan.script["port"])}
        env["PYTHONPATH"] = ":".join(filter(None, paths))
        if self.local_rank:  # how a process is told its own (launcher/node/supervisor.py)
            env["TANDEM_LOCAL_RANK"] = self.local_rank
        resume = [word.replace(LAST, last) for word in self.resume] if last is not None else []
        *module, name = self.words
        # Without --, launch takes --d for a beginning of options of its own.
        program = ("--use_env", *module, "--", name, *self.arguments, *resume)
        return Command(program, (part.host.env_python, "-c", IN_FOLDER, work), env)

    # ---- for an attempt ----

    @property
    def can_go_on(self) -> bool:
        return bool(self.resume)

    def find_checkpoint(self, site: RunSite) -> str | None:
        """None if it begins anew, "" if the script looks for a checkpoint itself."""
        from launcher import checkpoints

        if not self.outputs:
            site.terminal.say("OUTPUT= is not given, so no checkpoint is copied between machines")
            return ""
        is_told = any(LAST in word for word in self.resume)
        name = checkpoints.hand_over(site, self.outputs, is_told, bool(self.resume_from))
        return name if is_told else ""

    def prepare_machines(self, site: RunSite, plan: Plan) -> None:
        from launcher.watch.guards import lay_out

        with waiting(site.terminal, "laying out the code"):
            lay_out(plan, site.machines, self.outputs, site.terminal.say)

    def deliveries(self) -> list[Delivery]:
        own = self.code()
        named = ", ".join(own.files.lines()[:1])
        sent = [Delivery(own, f"code {own.sha256[:12]} ({named}) goes to")]
        if self.layer:
            sent.append(Delivery(self.layer.code(), f"packages {self.layer.summary()} go to"))
        return sent

    def when_stopped(self, seconds: int) -> str:
        return f"have {seconds} s to end"

    def hint(self, error: str, host: str) -> str | None:
        """Of the files and modules that an error on a machine names, one that is here and was not
        sent, or that Python did not find where it lies: what to do about it."""
        modules = [name.replace(".", "/") for name in MISSING_MODULE.findall(error)]
        names = [*PATHS.findall(error), *modules, *(f"{name}.py" for name in modules)]
        for name in names:
            # As the script there names it, or as it is called here.
            inside = name.rpartition(f"/{WORK}/{host}/")[2].removeprefix(f"{self.folder}/")
            inside = posixpath.normpath(inside)
            why = self.files.why_not(inside)
            if why and (self.folder / inside).exists():
                return (
                    f"{inside} is here and was not sent ({why}): have it sent, or put it where all "
                    "machines have it, and name that path in ARGS"
                )
        for module in (name.partition("/")[0] for name in modules):
            if folder := self.files.folder_of(module):
                return (
                    f"{module} was sent, in {folder}, where Python does not look: put that folder "
                    f"on sys.path, or PYTHONPATH={folder} into run_env of the inventory; if a "
                    "package of that name is meant, name it in requirements.txt"
                )
        return None

    # ---- after the last attempt ----

    def collect(self, site: RunSite, there: dict[str, str], most: int) -> Collected:
        """What it saved is known only when it is fetched."""
        from launcher import collect, outputs
        from launcher.watch.attempts import not_copied

        nodes, whole = site.machines.nodes, True
        try:
            said = collect.bring(nodes, there, site.attempts.list, site.folder, most)
            limit = most if self.outputs else MOST_BYTES
            said += outputs.bring(nodes, there, self.outputs, site.folder, limit)
        except collect.Unwritable as error:
            said, whole = [not_copied(site.folder, error)], False
        return Collected(said, True, whole)


def _reads_no_more(facts: NodeFacts) -> bool:
    """Whether its Python is not newer than ours, by which the script was read."""
    minor = re.match(r"(\d{1,4})\.(\d{1,4})", str(facts.versions.python))
    return minor is None or (int(minor[1]), int(minor[2])) <= sys.version_info[:2]


def gather(config: Config, terminal: Terminal) -> list[Path]:
    """Gather the packages of a script for the machines into the bundle; returns where. Raises
    UserError."""
    script, hosts = read(config), inventory.hosts_of(config)
    if script.requirements is None:
        raise UserError(
            f"SCRIPT={script.words[-1]}: there is no requirements.txt beside it, so nothing is to "
            "be gathered; REQUIREMENTS= names another file."
        )
    with waiting(terminal, f"asking {pluralize(len(hosts), 'machine')} what is there"):
        machines = look.open_and_probe(hosts, Requirements(config, script))
    try:
        if wrong := judge.python(machines):
            raise Refused(wrong)
        with waiting(terminal, "gathering the packages of the script"):
            return [layer.bundle_layer(script.requirements, layer.environment_of(machines))]
    finally:
        machines.close()


def read(options: Config) -> Script:
    """The script of a run; what is sent of it is copied at the same time. Raises UserError."""
    assert options.script is not None and options.folder is not None
    root, typed = Path(options.folder), script_words(options.script)
    if not root.is_dir():
        raise UserError(f"FOLDER={root}: there is no such folder.")
    file = _file(root, typed)
    if file.suffix == ".ipynb":
        raise UserError(
            f"SCRIPT={options.script}: it is a notebook, and torch's launcher starts Python: "
            f"`jupyter nbconvert --to script {file.name}` makes {file.stem}.py of it."
        )
    # A large folder is refused before any file is parsed.
    files = code.current(root, str(file.parent.relative_to(root))).files
    found = loaded_by(file, [file.parent, root] if len(typed) == 1 else [root])
    inside = file.relative_to(root).as_posix()
    if inside not in files.sent:
        raise UserError(
            f"SCRIPT={options.script}: {inside} is not sent ({files.why_not(inside)}): give one "
            "that is, or another FOLDER=."
        )
    if shell := _shell(file):
        raise UserError(
            f"SCRIPT={options.script}: it is a program of {shell}, and torch's launcher starts "
            "Python: give the file that it starts, as SCRIPT=train.py, and its options as ARGS=."
        )
    requirements = find_requirements(dict.fromkeys((file.parent, root)), options.requirements)
    outputs, resume = _outputs(options.output), _split("RESUME_ARGS", options.resume_args)
    if other := next((w[0] for word in resume for w in NAMED.finditer(word) if w[0] != LAST), None):
        raise UserError(
            f"RESUME_ARGS={options.resume_args}: {other} would reach the script as it stands: "
            f"{LAST} is the newest checkpoint in OUTPUT."
        )
    if any(LAST in word for word in resume) and not outputs:
        raise UserError(
            f"RESUME_ARGS={options.resume_args}: {LAST} is the newest checkpoint in OUTPUT: give "
            "OUTPUT=, the folder that the script saves in."
        )
    if options.resume_from and not any(LAST in word for word in resume):
        raise UserError(
            f"RESUME_FROM=self: it says which file {LAST} is: give RESUME_ARGS=, like "
            f"RESUME_ARGS='--resume {LAST}'."
        )
    return Script(
        words=(inside,) if len(typed) == 1 else tuple(typed),
        folder=root,
        arguments=options.words,
        outputs=outputs,
        requirements=read_requirements(requirements) if requirements else None,
        resume=resume,
        resume_from=options.resume_from,
        local_rank=declares(found.sources, LOCAL_RANK),
        imports=tuple(sorted(found.packages - {"tandem"} - files.modules())),
        broken=found.broken,
        files=files,
    )


def _shell(file: Path) -> str | None:
    """The program that another one than Python is for, by its name or its first line."""
    first = first_line(file)
    named = first[2:].strip() if first.startswith("#!") and "python" not in first else ""
    return named or ("a shell" if file.suffix in SHELLS else None)


def _file(root: Path, typed: list[str]) -> Path:
    """The file that is run. Raises UserError."""
    if len(typed) == 1:
        return root / typed[0]
    stem = root / typed[1].replace(".", "/")
    file = next((f for f in (stem.with_suffix(".py"), stem / "__main__.py") if f.is_file()), None)
    if file is None:
        raise UserError(
            f'SCRIPT="-m {typed[1]}": {root} has no such module: name the folder that '
            f"{typed[1].partition('.')[0]} is in by FOLDER=."
        )
    return file


def _split(name: str, text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError:
        raise UserError(f"{name}={text}: a quote is not closed.") from None


def _outputs(text: str | None) -> tuple[str, ...]:
    """Folders below the one that the script runs in. Raises UserError."""
    found = []
    for word in _split("OUTPUT", text):
        path = PurePosixPath(word)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise UserError(
                f"OUTPUT={text}: {word} is not below the folder that the script runs in: let it "
                "write there, and give the folder's name, like OUTPUT=checkpoints."
            )
        found.append(str(path))
    return tuple(found)
