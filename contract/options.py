"""Every option, each as one entry: its field in Options (of the trainer) or Config (of a run), or
its row in verbs.py, with type, default, bounds, help, its variable of make, whether a run keeps it
and whether one that is resumed may change it. command_line.py reads what is typed.

Standard library: `make` checks what was typed before there is an environment.
"""

import math
import os
import re
import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple, get_type_hints

from contract import prices, strategies
from contract.errors import UserError

# The first option of each group in --help.
GROUPS = {
    "config": "run",
    "data": "data",
    "model": "model",
    "per_node_batch_size": "batch and memory",
    "epochs": "optimizer and schedule",
    "augment": "regularisation",
    "parallel": "parallelism and precision",
    "output": "checkpoints and results",
    "log_every": "logs",
}


class Optimizer(NamedTuple):
    """`torch`: its class in torch.optim. `arguments`: its own, beside the learning rate and the
    weight decay. `keeps`: the tensors that it keeps of each weight, of the weight's size, by
    torch's names. `counts`: it also counts the weight's steps, and all is there from the first.
    `family`: by which contract/prices.py says what a strategy costs."""

    torch: str
    arguments: Callable[["Options"], Dict[str, Any]]
    keeps: Callable[["Options"], Tuple[str, ...]]
    counts: bool
    family: str


OPTIMIZERS = {
    "sgd": Optimizer(
        "SGD",
        lambda options: {"momentum": options.momentum},
        lambda options: ("momentum_buffer",) * (options.momentum > 0),
        counts=False,
        family=prices.SGD,
    ),
    "adamw": Optimizer(
        "AdamW",
        lambda options: {"betas": (options.momentum, options.beta2)},
        lambda options: ("exp_avg", "exp_avg_sq"),
        counts=True,
        family=prices.ADAM,
    ),
}


ON, OFF = ("1", "yes", "on", "true"), ("0", "no", "off", "false")
# How a value of each type is written.
TYPE_EXAMPLES = {"number": ("a whole number", "4"), "float": ("a number", "0.5")}
TYPE_EXAMPLES["numbers"] = ("whole numbers with commas between", "3,5")


class Option(NamedTuple):
    """One option. `kind`: text, number (whole), float, numbers (with commas between), switch,
    path, run (the run itself, without a flag), words (several, after `--`).

    `make`: its variable of make, whose help is `make_help` where that differs; `flag`: what the
    command takes, where it has another name. `least`, `most`: bounds of a number. `stored`: a run
    keeps it; `changeable_on_resume`: one that is resumed may change it. `writes`: the trainer then
    needs --output.
    """

    help: str
    choices: Tuple[str, ...] = ()
    kind: str = ""
    name: str = ""
    default: Any = None
    least: float = 0
    most: float = math.inf
    make: str = ""
    make_help: str = ""
    flag: str = ""
    stored: bool = True
    changeable_on_resume: bool = False
    writes: bool = False

    @property
    def key(self) -> str:
        """Its name among what was typed for a verb, and in plan.json."""
        return self.make.lower()

    @property
    def word(self) -> str:
        """The flag of a verb's command."""
        return self.flag or "--" + self.key.replace("_", "-")

    def read(self, name: str, text: str) -> Any:
        """The value of a text that was given to NAME or --name. Raises UserError."""
        if re.search("[\0-\x1f\x7f]", text):
            raise UserError(
                f"{name} contains a line break or another control character: leave it out."
            )
        if self.kind == "switch":
            if text.lower() in ON + OFF:
                return text.lower() in ON
            on, off = ("true", "false") if name.startswith("--") else ("1", "0")
            raise UserError(
                f"{as_typed(name, text)}: {as_typed(name, on)} means on, {as_typed(name, off)} off."
            )
        if self.kind == "words":
            try:
                return shlex.split(text)
            except ValueError:
                raise UserError(f"{name}={text}: a quote is not closed.") from None
        if self.kind == "path":
            return str(path_of(name, text))
        return self.check(
            name, self._number(name, text) if self.kind in TYPE_EXAMPLES else text, text
        )

    def _number(self, name: str, text: str) -> Any:
        try:
            if self.kind == "float":
                return float(text)
            parts = [part for part in text.split(",") if part]
            if not all(re.fullmatch("-?[0-9]{1,18}", part) for part in parts):
                raise ValueError
            if self.kind == "numbers":
                return tuple(map(int, parts))
            (whole,) = parts
            return int(whole)
        except ValueError:
            what, example = TYPE_EXAMPLES[self.kind]
            raise UserError(
                f"{as_typed(name, text)} is not {what}: write it like {as_typed(name, example)}."
            ) from None

    def check(self, name: str, value: Any, text: Optional[str] = None) -> Any:
        """The value, if the entry allows it. Raises UserError."""
        typed = as_typed(name, value if text is None else text)
        if self.choices and value not in self.choices:
            hint = FP16 if self.name == "precision" and value in FP16_NAMES else ""
            one = f"one of {', '.join(self.choices)}" if len(self.choices) > 1 else self.choices[0]
            without = ", or leave it out" if self.default is None else ""
            raise UserError(f"{typed}: choose {one}{hint}{without}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{typed}: must be a number.")
        if isinstance(value, (int, float)) and not self.least <= value <= self.most:
            low = value < self.least
            raise UserError(
                f"{typed}: must be {f'at least {self.least}' if low else f'at most {self.most}'}."
            )
        return value


def as_typed(name: str, value: Any) -> str:
    """NAME=value or --name value."""
    return f"{name}{' ' if name.startswith('--') else '='}{value}"


def path_of(name: str, typed: str, path: Optional[str] = None) -> Path:
    """What was typed for a variable of make, or the `path` in it, as an absolute path. Raises
    UserError."""
    try:
        return Path(typed if path is None else path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # ~nobody, a circle of links, a NUL
        why = str(error).rstrip(".")
        raise UserError(f"{as_typed(name, typed)} is no path: {why}.") from None


# What is trained where neither MODEL nor DATA is given, and on which machines without INVENTORY.
# Only these lines hold the names, for train, dry-run, slurm, plan and the demo.
DEFAULT_INVENTORY = "inventory.ini"
DEFAULT_DATA = "digits"
# For a first run: it takes seconds on two old cores (examples/small_cnn.py).
DEFAULT_MODEL = "examples.small_cnn:small_cnn"
MODEL_OF_DATA = "resnet18"  # for the user's own data


def default_model(name: Optional[str], data: Optional[str]) -> str:
    """The model of a run for which `name` and `data` were given (None: not given)."""
    return name or (DEFAULT_MODEL if data is None else MODEL_OF_DATA)


# What others call it.
FP16_NAMES = ("fp16", "float16", "half", "16", "mixed", "amp")
FP16 = ": O1 is fp16, with fp32 where it is needed"


def opt(default: Any, text: str, choices: Tuple[str, ...] = (), **entry: Any) -> Any:
    """A field; `text` is its help, `entry` further names of Option."""
    row = Option(text, choices, default=default, **entry)
    return field(default=default, metadata={"option": row})


def resumable(default: Any, text: str, choices: Tuple[str, ...] = (), **entry: Any) -> Any:
    """A field that a resumed run may change."""
    return opt(default, text, choices, changeable_on_resume=True, **entry)


# The kind of an option by the type of its field, where its entry says no other.
KINDS = {int: "number", float: "float", bool: "switch", str: "text", Tuple[int, ...]: "numbers"}
KINDS.update({Optional[one]: kind for one, kind in [*KINDS.items()]})


def rows(table: Any) -> Dict[str, Option]:
    """{name: its Option} of a class whose fields are options."""
    types = get_type_hints(table)
    options = {one.name: one.metadata["option"] for one in fields(table) if one.metadata}
    return {
        name: row._replace(name=name, kind=row.kind or KINDS[types[name]])
        for name, row in options.items()
    }


@dataclass(frozen=True)
class Options:
    # run
    config: Optional[str] = resumable(None, "YAML file with any of these options, or JSON of them")
    seed: int = opt(0, "seed of weights, order, augmentation and dropout")
    deterministic: bool = opt(False, "use only deterministic algorithms; slower on CUDA")
    spawn: int = resumable(0, "start this many processes on this machine without a launcher")
    tf32: str = opt(
        "auto",
        "TF32 in fp32's matrix products and convolutions on Ampere and later; auto: as torch does, "
        "in convolutions alone",
        ("auto", "on", "off"),
    )
    device: str = resumable("auto", "device to compute on", ("auto", "cpu", "cuda"))
    trial: int = resumable(
        0,
        "time steps for so many seconds and train nothing; without --data on noise of 1000 classes",
    )
    timeout: int = resumable(120, "seconds after which a silent peer ends the run", least=1)
    local_rank: Optional[int] = resumable(None, "set by torch.distributed.launch, not by people")

    # data
    data: Optional[str] = resumable(
        None,
        "folder with train/<class>/<image> and val/<class>/<image>",
        make="DATA",
        make_help="a name below data_root, or a folder",
    )
    image_size: Optional[int] = opt(
        None, "side in pixels; default 224, or the images' own size if smaller", least=1
    )
    eval_size: Optional[int] = opt(
        None, "side in pixels in evaluation; default image_size", least=1
    )
    eval_resize: Optional[int] = opt(
        None, "short side before evaluation's crop; default size / 0.875", least=1
    )
    workers: Optional[int] = resumable(
        None, "loader processes per rank; 0 by default for small images"
    )
    jpeg_scaling: Optional[bool] = opt(
        None,
        "decode a JPEG to a half, quarter or eighth of its pixels a side where a training crop has "
        "enough of them left; default: on",
    )
    bad_images: int = resumable(100, "unreadable images per rank after which the run stops")

    # model
    model: str = opt(
        "resnet18",
        "a torchvision name, path/file.py:function or package.module:function",
        make="MODEL",
        make_help="a name of torchvision, or path/file.py:function",
    )
    weights: Optional[str] = resumable(None, "file of weights to start from")
    channels_last: Optional[bool] = opt(
        None,
        "use the memory format that tensor cores prefer; default: on CUDA in 16 bits, unless "
        "deterministic",
    )
    compile: bool = opt(False, "compile the model by torch.compile, where this torch has it")
    checkpoint_activations: bool = resumable(
        False, "recompute activations in backward: less memory, a third slower"
    )

    # batch and memory
    per_node_batch_size: int = opt(
        32,
        "images per step and node, split over its ranks",
        least=1,
        make="BATCH",
        make_help="images per step and node",
    )
    balance: Tuple[int, ...] = resumable(
        (),
        "of the nodes' images of a step, each node's in proportion to its number, node 0 first; "
        "default: equal parts",
    )
    accumulate: int = resumable(1, "split each rank's batch into this many micro-batches", least=1)
    auto_batch: bool = resumable(False, "find the largest micro-batch that fits, by trial")
    nonfinite_steps: int = resumable(
        3, "end the run after so many steps in a row whose loss is not finite", least=1
    )
    skip_oom: bool = resumable(False, "skip a step that runs out of memory (one process only)")
    gpu0_batch: Optional[int] = resumable(
        None, "images for GPU 0 with balanced-dp; others share the rest", least=1
    )

    # optimizer and schedule
    epochs: int = opt(
        16,
        "passes over the training images",
        least=1,
        make="EPOCHS",
        make_help="how often each image is seen",
    )
    optimizer: str = opt("sgd", "the optimizer", tuple(OPTIMIZERS))
    lr: float = opt(0.1, "peak learning rate")
    lr_batch: int = opt(0, "global batch that lr is meant for, scaled linearly; 0: not scaled")
    momentum: float = opt(0.9, "momentum of SGD, or the first beta of AdamW", most=1)
    beta2: float = opt(0.999, "decay of AdamW's second moment", most=1)
    weight_decay: float = opt(0.0001, "weight decay of weights")
    norm_weight_decay: float = opt(0.0, "weight decay of biases and normalisation layers")
    clip_grad_norm: float = opt(0.0, "clip the gradient to this norm; 0: do not clip")
    schedule: str = opt("cosine", "schedule of the learning rate", ("cosine", "step", "constant"))
    warmup_epochs: float = opt(strategies.WARMUP_EPOCHS, "epochs of linear warm-up")
    warmup_factor: float = opt(0.01, "fraction of lr with which warm-up begins", most=1)
    step_epochs: Tuple[int, ...] = opt(
        (30, 60, 80), "epochs at which the step schedule lowers the learning rate"
    )
    step_gamma: float = opt(0.1, "factor by which the step schedule lowers it")
    min_lr: float = opt(0.0, "learning rate at which the cosine schedule ends")

    # regularisation
    augment: str = opt(
        "auto",
        "auto: crop photographs, shift small images; trivial: TrivialAugment",
        ("auto", "none", "shift", "crop", "trivial"),
    )
    random_erase: float = opt(0.0, "probability of erasing a rectangle", most=1)
    label_smoothing: float = opt(0.0, "fraction of the target spread over all classes", most=1)
    mixup: float = opt(0.0, "alpha of mixup; 0: off")
    cutmix: float = opt(0.0, "alpha of CutMix; 0: off; with mixup, each step draws one of the two")
    ema: float = opt(0.0, "decay of averaged weights, which are then evaluated; 0: off", most=1)
    ema_every: int = opt(1, "steps between updates of the average", least=1)

    # parallelism and precision
    parallel: str = resumable(
        "ddp", "one process per GPU, or one for all GPUs", ("ddp", "dp", "balanced-dp")
    )
    precision: str = opt(
        "auto",
        "best that all devices have; autocast to bf16 or fp16 (O1), half with fp32 masters (O2), "
        "half (O3)",
        ("auto", "fp32", "fp64", "bf16", "O0", "O1", "O2", "O3"),
        make="PRECISION",
        make_help="auto (default), fp32, bf16, O2 ...",
    )
    amp: str = resumable(
        "auto",
        "who does O0 to O3: NVIDIA's apex or torch; auto: apex where all ranks have it and its "
        "kernels",
        ("auto", "apex", "torch"),
    )
    emulate: bool = resumable(False, "allow bf16 on devices that only emulate it, slowly")
    sync: str = opt(
        strategies.EXACT,
        f"how ranks sum gradients: {strategies.usages()}. Price in accuracy, as "
        f"measured with SGD on one task: {prices.labels() or 'of none yet'}",
        make="SYNC",
        make_help="how ranks sum: allreduce (default), auto, ef:5 ... (docs/slow-networks.md)",
    )
    sync_warmup: Optional[float] = opt(
        None, "epochs with exact sums before a strategy that leaves bits out; default warmup_epochs"
    )
    sync_bn: bool = opt(False, "compute batch statistics over all ranks")
    broadcast_buffers: bool = opt(False, "copy rank 0's BN buffers at each forward, as DDP did")
    find_unused_parameters: bool = resumable(
        False, "for models that leave parameters out of some steps"
    )
    static_graph: bool = resumable(
        False, "for models whose graph is the same in each step (DDP); torch 2 with --accumulate"
    )
    bucket_mb: Optional[int] = resumable(
        None,
        f"size of a gradient bucket in MiB; default {strategies.BUCKET_MB}, or the strategy's own",
        least=1,
    )

    # checkpoints and results
    output: Optional[str] = resumable(None, "folder for checkpoints and timings")
    resume: str = resumable(
        "none", "none; auto: the newest in --output, if any; or a folder or file"
    )
    checkpoint_every: int = resumable(
        0, "steps between checkpoints; 0: one after each epoch", writes=True
    )
    keep: int = resumable(2, "number of newest checkpoints to keep, besides the best", least=1)
    evaluate_every: int = resumable(
        1, "epochs between evaluations; the last is always evaluated", least=1
    )
    sample_log: bool = resumable(
        False, "record which images each rank trained on, and when", writes=True
    )
    predict: Optional[str] = resumable(
        None, "write path,class,probability of val to this file; train nothing"
    )
    extract: Optional[str] = resumable(None, "write embeddings of val to this file; train nothing")

    # logs
    log_every: int = resumable(10, "steps between readings of loss and top-1", least=1)
    progress: str = resumable(
        "auto", "a bar on a terminal, plain lines elsewhere", ("auto", "bar", "plain")
    )

    def __post_init__(self) -> None:
        for name, entry in ENTRIES.items():
            entry.check(f"--{name}", getattr(self, name))
        strategies.parse(self.sync)
        asked = ["resume auto"] if self.resume == "auto" else []
        asked += [name for name, entry in ENTRIES.items() if entry.writes and getattr(self, name)]
        if asked and self.output is None:
            raise UserError(f"--{asked[0]} needs --output DIR.")

    @property
    def family(self) -> str:
        """Of its optimizer."""
        return OPTIMIZERS[self.optimizer].family

    @property
    def exact_epochs(self) -> float:
        """Epochs with exact sums, before a strategy that leaves bits out begins to do so."""
        return self.phases.warmup if strategies.parse(self.sync).rule.warms else 0.0

    @property
    def phases(self) -> strategies.Phases:
        exact = self.warmup_epochs if self.sync_warmup is None else self.sync_warmup
        return strategies.Phases(self.epochs, exact)

    @property
    def generated(self) -> bool:
        """Whether images are generated instead of loaded."""
        return bool(self.trial) and not (self.data or self.predict or self.extract)

    @property
    def bucket_size(self) -> int:
        """The size of a gradient bucket in MiB."""
        return self.bucket_mb or strategies.parse(self.sync).rule.bucket_mb

    @property
    def accumulation(self) -> int:
        """Micro-batches per step: `accumulate` times the divisor of an out-of-memory exit."""
        return self.accumulate * int(os.environ.get("TANDEM_MICRO_BATCH_DIVISOR", "1"))


ENTRIES = rows(Options)


@dataclass(frozen=True)
class Config:
    """What a person asked for: a run, on which machines and how. `trainer` has what was given to
    the trainer, by its names; with a `script`, whose `words` are its own, the trainer has no part
    (launcher/plan/script.py), and `data` is empty, as where a run trains on noise. `at`, `until`:
    in Unix seconds."""

    inventory: str = resumable(
        DEFAULT_INVENTORY, "the list of machines (default: inventory.ini)", make="INVENTORY"
    )
    nodes: Optional[int] = resumable(
        None, "the first N machines (default: all)", least=1, make="NODES"
    )
    data: str = DEFAULT_DATA
    trainer: Mapping[str, Any] = field(default_factory=dict)
    words: Tuple[str, ...] = ()
    resume: Optional[str] = opt(
        None, "a run to continue, as it began (docs/launcher.md)", make="RESUME", stored=False
    )
    script: Optional[str] = opt(
        None, 'your own: path/train.py, or "-m package.train" in FOLDER', make="SCRIPT"
    )
    folder: Optional[str] = opt(
        None, "what is sent of it (default: its checkout, or folder)", make="FOLDER", kind="path"
    )
    requirements: Optional[str] = opt(
        None, "its packages (default: requirements.txt beside it)", make="REQUIREMENTS", kind="path"
    )
    output: Optional[str] = resumable(
        None, "folders that it writes, which are brought here at the end", make="OUTPUT"
    )
    resume_args: Optional[str] = resumable(
        None, "how it goes on, like '--resume {last}'", make="RESUME_ARGS"
    )
    resume_from: Optional[str] = resumable(
        None,
        "self: each machine from a file of its own, so that none goes to another machine",
        ("self",),
        make="RESUME_FROM",
    )
    max_restarts: int = resumable(0, "attempts after the first (default: 0)", make="MAX_RESTARTS")
    min_nodes: Optional[int] = resumable(
        None, "so few machines suffice (default: all without an owner)", make="MIN_NODES"
    )
    balance: str = resumable(
        "auto", "unlike machines: auto (by speed), off, or like 3:2:2:1", make="BALANCE"
    )
    detach: bool = opt(False, "1: run in the background", make="DETACH", stored=False)
    port: Optional[int] = resumable(
        None, "of the rendezvous on node 0 (default: a free one)", most=65535, make="PORT"
    )
    queue: bool = resumable(
        False, "1: ask busy machines again every 10 s until they are free; no order", make="QUEUE"
    )
    force: bool = resumable(False, "1: start even though something is wrong", make="FORCE")
    keep: int = resumable(
        4096, "the most MiB of a file that a machine sends (default: 4096)", least=1, make="KEEP"
    )
    notify: Optional[str] = resumable(
        None,
        "a command on this machine at the run's end, like 'mail -s {run}:{status} anna' "
        "(docs/launcher.md)",
        make="NOTIFY",
        stored=False,
    )
    at: Optional[int] = resumable(
        None, "begin at this time of day, like 19:00", make="AT", kind="time"
    )
    until: Optional[int] = resumable(
        None, "save and end at this time of day, like 07:30", make="UNTIL", kind="time"
    )


RUN_OPTIONS = rows(Config)
