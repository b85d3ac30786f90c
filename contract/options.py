"""Define every option: the trainer's are the fields of Options, and a run's of Config.
These tables also have the texts of --help and of `make help`. verbs.py lists the options of each
verb, and command_line.py reads the command line.

Standard library, Python >= 3.7: `make` checks the command before there is an environment.
"""

import json
import math
import re
import shlex
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple, get_type_hints

from contract import decisions, precisions, strategies
from contract.errors import UserError

# The groups of the trainer's --help. Each group is listed with its first option: it contains the
# options from that field of Options to the next field that is listed here.
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
# The values of INVENTORY, DATA and MODEL if the user types none. Several verbs use these names.
DEFAULT_INVENTORY = "inventory.ini"
DEFAULT_DATA = "digits"
# For a first run: this model trains in seconds on two old cores (examples/small_cnn.py).
DEFAULT_MODEL = "examples.small_cnn:small_cnn"
MODEL_OF_DATA = "resnet18"  # if the user types DATA, but no MODEL
TIMM = "timm:"  # the prefix of the name of a model of timm


def default_model(name: Optional[str], data: Optional[str]) -> str:
    """Return the model of a run with MODEL=`name` and DATA=`data` (None: not typed)."""
    return name or (DEFAULT_MODEL if data is None else MODEL_OF_DATA)


def as_typed(name: str, value: Any) -> str:
    """Return an option as the user typed it: NAME=value for make, --name value for the trainer."""
    return f"{name}{' ' if name.startswith('--') else '='}{value}"


def path_of(name: str, typed: str, path: Optional[str] = None) -> Path:
    """Return the absolute path that the user `typed` for the option `name`. `path`: the path within
    that text, if the text has more than a path. Raises UserError."""
    try:
        return Path(typed if path is None else path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # ~nobody, a circle of links, a NUL
        reason = str(error).rstrip(".")
        raise UserError(f"{as_typed(name, typed)} is not a path: {reason}.") from None


# Types of options, in addition to str, float and Path. Each function makes a value from the text
# that a user typed, or raises ValueError.


def integer(typed: str) -> int:
    # torch stores integers in 64 bits. Each number of 18 digits fits, and longer ones may not.
    if len(typed) > 18:
        raise ValueError
    return int(typed)


def numbers(typed: str) -> Tuple[int, ...]:
    # `3,5` and `3,5,` are (3, 5), and an empty text is ().
    return tuple(integer(number) for number in typed.split(",") if number)


ON, OFF = ("1", "yes", "on", "true"), ("0", "no", "off", "false")


def switch(typed: str) -> bool:
    if typed.lower() not in ON + OFF:
        raise ValueError
    return typed.lower() in ON


def time_of_day(typed: str) -> str:
    # launcher/hours.py turns the text into Unix seconds, because only the launcher knows when the
    # run begins.
    return typed


# For the error about a text that does not fit: {type: (its description, an example)}.
EXAMPLES: Dict[Any, Tuple[str, str]] = {
    integer: ("a whole number", "4"),
    float: ("a number", "0.5"),
    numbers: ("whole numbers with commas between", "3,5"),
    switch: ("on or off", "1"),
    shlex.split: ("text with every quote closed", "'--lr 0.1'"),
}
# {annotation of a field: type of its option}.
TYPES: Dict[Any, Callable[[str], Any]] = {
    **{str: str, int: integer, float: float, bool: switch, Tuple[int, ...]: numbers},
    **{Optional[str]: str, Optional[int]: integer, Optional[float]: float, Optional[bool]: switch},
}


@dataclass(frozen=True)
class Option:
    """Describe an option.

    `help`: the text of --help. `type`: makes the value from the text that a user typed. `least`,
    `most`: the bounds of a number, which are allowed values; without `least` a number may not be
    negative. `make`: the variable of make that sets the option. `make_help`: the text of `make help
    VERB`, if it differs from `help`. `stored`: plan.json records the value. `changeable_on_resume`:
    a resumed run may have another value.
    """

    help: str
    choices: Tuple[str, ...] = ()
    type: Callable[[str], Any] = str
    least: float = 0
    most: float = math.inf
    make: str = ""
    make_help: str = ""
    stored: bool = True
    changeable_on_resume: bool = False
    default: Any = None

    def read(self, name: str, typed: str) -> Any:
        """Return the value of the text that a user typed for NAME or --name. Raises UserError."""
        # Messages print a value within a line, and some files store one value in each line.
        if any(letter < " " or letter == "\x7f" for letter in typed):
            raise UserError(
                f"{name} contains a line break or another control character: remove it."
            )
        if self.type is Path:
            return str(path_of(name, typed))
        try:
            return self.check(name, self.type(typed), typed)
        except ValueError:
            description, example = EXAMPLES[self.type]
            raise UserError(
                f"{as_typed(name, typed)} is not {description}: write, for example, "
                f"{as_typed(name, example)}."
            ) from None

    def check(self, name: str, value: Any, typed: Optional[str] = None) -> Any:
        """Return the value if the option allows it. Raises UserError, which shows the value as it
        was `typed`. `typed` is None if the value comes from a file or a checkpoint."""
        shown = as_typed(name, value if typed is None else typed)
        if self.choices and value not in self.choices:
            # Users of other programs look for fp16, which is called O1 here.
            hint = FP16_HINT if value in FP16_NAMES and "O1" in self.choices else ""
            choice = f"one of {', '.join(self.choices)}"
            if len(self.choices) == 1:
                choice = self.choices[0]
            # Without a default, None is a value, too.
            omission = ", or leave it out" if self.default is None else ""
            raise UserError(f"{shown}: choose {choice}{hint}{omission}.")
        # float also accepts `nan` and `inf`, and an upper bound may be missing.
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{shown}: must be a number.")
        if isinstance(value, (int, float)) and not self.least <= value <= self.most:
            is_low = value < self.least
            bound = f"at least {self.least}" if is_low else f"at most {self.most}"
            raise UserError(f"{shown}: must be {bound}.")
        return value


# The names of O1 in other programs.
FP16_NAMES = ("fp16", "float16", "half", "16", "mixed", "amp")
FP16_HINT = ": O1 is fp16, with fp32 where it is needed"


def option(default: Any, help: str, choices: Tuple[str, ...] = (), **settings: Any) -> Any:
    """Make a field of the tables below, whose value a resumed run must keep."""
    row = Option(help, choices, default=default, **settings)
    return field(default=default, metadata={"option": row})


def changeable(default: Any, help: str, choices: Tuple[str, ...] = (), **settings: Any) -> Any:
    """Make a field of the tables below, whose value a resumed run may change."""
    return option(default, help, choices, changeable_on_resume=True, **settings)


def options_of(table: Any) -> Dict[str, Option]:
    """Return {name: Option} of a table, such as Options. The annotation of a field gives the type
    of its option, unless the option has another type than str."""
    hints = get_type_hints(table)
    rows = {entry.name: entry.metadata.get("option") for entry in fields(table)}
    return {
        name: replace(row, type=TYPES[hints[name]] if row.type is str else row.type)
        for name, row in rows.items()
        if row
    }


class Optimizer(NamedTuple):
    """Describe an optimizer.

    `maker`: module:class. `arguments`: the arguments in addition to the learning rate and the
    weight decay. `keeps`: the names of the state's tensors that are as large as their weight.
    `counts`: the state also has the number of steps of each weight, and it is complete after the
    first step.
    `family`: SGD or ADAM of contract/strategies.py; contract/prices.py has its accuracy costs.
    """

    maker: str
    arguments: Callable[["Options"], Dict[str, Any]]
    keeps: Callable[["Options"], Tuple[str, ...]]
    counts: bool
    family: str


OPTIMIZERS = {
    "sgd": Optimizer(
        "torch.optim:SGD",
        lambda options: {"momentum": options.momentum},
        lambda options: ("momentum_buffer",) * (options.momentum > 0),  # () without momentum
        counts=False,
        family=strategies.SGD,
    ),
    "adamw": Optimizer(
        "torch.optim:AdamW",
        lambda options: {"betas": (options.momentum, options.beta2)},
        lambda options: ("exp_avg", "exp_avg_sq"),
        counts=True,
        family=strategies.ADAM,
    ),
}


# Each of these options names a file. With such an option the trainer applies a trained model to
# images, writes this file, and trains nothing.
RESULTS = ("predict", "extract", "evaluate")
RESULTS_FOLDER = "results"  # the folder of a run with these files


@dataclass(frozen=True)
class Options:
    """Hold the trainer's options."""

    # The options are in the order of --help. Each begins a line, because one argument a line would
    # make the table three times as long.
    # fmt: off
    # run
    config: Optional[str] = changeable(None, "YAML file with any of these options, or JSON of them")
    seed: int = option(0, "seed of weights, order, augmentation and dropout")
    deterministic: bool = option(False, "use only deterministic algorithms; slower on CUDA")
    spawn: int = changeable(0, "start this many processes on this machine without a launcher")
    tf32: str = option("auto",
        "TF32 in fp32's matrix products and convolutions on Ampere and later; auto: as torch "
        "does, only in convolutions", ("auto", "on", "off"))
    device: str = changeable("auto", "device to compute on", ("auto", "cpu", "cuda"))
    trial: int = changeable(0,
        "time steps for this number of seconds and train nothing; without --data with noise "
            "of 1000 classes")
    check: bool = changeable(False,
        "check model and weights, and train nothing; needs one process")
    timeout: int = changeable(120, "seconds after which a silent peer ends the run", least=1)
    local_rank: Optional[int] = changeable(None, "set by torch.distributed.launch, not by people")

    # data
    data: Optional[str] = changeable(None,
        "folder with train/<class>/<image> and val/<class>/<image>", make="DATA",
        make_help="a name below data_root, or a folder")
    image_size: Optional[int] = option(None,
        "side in pixels; default 224, or the images' own size if smaller", least=1)
    eval_size: Optional[int] = option(None,
        "side in pixels in evaluation; default image_size", least=1)
    eval_resize: Optional[int] = option(None,
        "short side before evaluation's crop; default size / 0.875", least=1)
    workers: Optional[int] = changeable(None,
        "loader processes per rank; 0 by default for small images")
    jpeg_scaling: Optional[bool] = option(None,
        "decode a JPEG to a half, quarter or eighth of its pixels a side if that is enough for a "
        "training crop; default: on")
    bad_images: int = changeable(100, "unreadable images per rank after which the run stops")

    # model
    model: str = option("resnet18",
        "a torchvision name, timm:NAME, path/file.py:function or package.module:function",
        make="MODEL")
    model_args: Optional[str] = option(None,
        """more arguments of the model, in JSON: '{"drop_path_rate": 0.1}'""")
    weights: Optional[str] = changeable(None,
        "file of weights to start from; a head for other classes is new", make="WEIGHTS")
    weights_prefix: Optional[str] = changeable(None,
        "prefix of the tensors to start from, if several networks of the file fit",
        make="WEIGHTS_PREFIX")
    freeze: Optional[str] = option(None,
        "do not train: backbone (all except the head), or names of modules with commas "
            "between, such as conv1,bn1,layer[12]")
    head_lr: float = option(1.0, "factor of the learning rate of the head")
    channels_last: Optional[bool] = option(None,
        "use the memory format that tensor cores prefer; default: on CUDA in 16 bits, unless "
        "deterministic")
    compile: bool = option(False, "compile the model with torch.compile, if this torch has it")
    checkpoint_activations: bool = changeable(False,
        "recompute activations in backward: less memory, a third slower")

    # batch and memory
    per_node_batch_size: int = option(32,
        "images per step and node, split over its ranks", least=1, make="BATCH")
    balance: Tuple[int, ...] = changeable((),
        "of the nodes' images of a step, each node's in proportion to its number, node 0 first; "
        "default: equal parts")
    accumulate: int = changeable(1, "split each rank's batch into this many micro-batches", least=1)
    auto_batch: bool = changeable(False, "find the largest micro-batch that fits, by trial")
    nonfinite_steps: int = changeable(3,
        "end the run after this number of consecutive steps whose loss is not finite", least=1)
    skip_oom: bool = changeable(False, "skip a step that runs out of memory (one process only)")
    gpu0_batch: Optional[int] = changeable(None,
        "images for GPU 0 with balanced-dp; others share the rest", least=1)

    # optimizer and schedule
    epochs: int = changeable(16, "passes over the training images", least=1, make="EPOCHS")
    optimizer: str = option("sgd", "the optimizer", tuple(OPTIMIZERS))
    lr: float = option(0.1, "peak learning rate")
    lr_batch: int = option(0, "global batch that lr is meant for, scaled linearly; 0: not scaled")
    momentum: float = option(0.9, "momentum of SGD, or the first beta of AdamW", most=1)
    beta2: float = option(0.999, "decay of AdamW's second moment", most=1)
    weight_decay: float = option(0.0001, "weight decay of weights")
    norm_weight_decay: float = option(0.0, "weight decay of biases and normalisation layers")
    clip_grad_norm: float = option(0.0, "clip the gradient to this norm; 0: do not clip")
    schedule: str = option("cosine",
        "schedule of the learning rate", ("cosine", "step", "constant"))
    warmup_epochs: float = option(strategies.WARMUP_EPOCHS, "epochs of linear warm-up")
    warmup_factor: float = option(0.01, "fraction of lr with which warm-up begins", most=1)
    step_epochs: Tuple[int, ...] = option((30, 60, 80),
        "epochs at which the step schedule lowers the learning rate")
    step_gamma: float = option(0.1, "factor by which the step schedule lowers it")
    min_lr: float = option(0.0, "learning rate at which the cosine schedule ends")

    # regularisation
    augment: str = option("auto",
        "auto: crop photographs, shift small images; trivial: TrivialAugment",
        ("auto", "none", "shift", "crop", "trivial"))
    repeat_augment: int = option(1,
        "number of times that an image is in an epoch, augmented differently, on several ranks if "
        "possible; an epoch keeps its length, so it has fewer different images", least=1)
    random_erase: float = option(0.0, "probability of erasing a rectangle", most=1)
    loss: str = option("cross_entropy",
        "bce: binary cross-entropy, the mean of a yes or no to each class",
        ("cross_entropy", "bce"))
    bce_threshold: float = option(0.0,
        "with bce, classes with more than this fraction of the target count as 1, and other "
            "classes as 0; 0: use the fraction itself", most=1)
    label_smoothing: float = option(0.0, "fraction of the target spread over all classes", most=1)
    mixup: float = option(0.0, "alpha of mixup; 0: off")
    cutmix: float = option(0.0,
        "alpha of CutMix; 0: off; with mixup, each step draws one of the two")
    ema: float = option(0.0, "decay of averaged weights, which are then evaluated; 0: off", most=1)
    ema_every: int = option(1, "steps between updates of the average", least=1)

    # parallelism and precision
    parallel: str = changeable("ddp",
        "one process per GPU, or one for all GPUs", ("ddp", "dp", "balanced-dp"))
    precision: str = option("auto",
        "best that all devices have; autocast to bf16 or fp16 (O1), half with fp32 masters (O2), "
        "half (O3)", ("auto", *precisions.BITS), make="PRECISION",
        make_help="auto (default), fp32, bf16, O2 ...")
    amp: str = changeable("auto",
        "what computes O0 to O3: NVIDIA's apex or torch; auto: apex if all ranks have it and its "
        "kernels", ("auto", "apex", "torch"))
    emulate: bool = changeable(False, "allow bf16 on devices that emulate it slowly")
    sync: str = option(strategies.EXACT,
        f"how ranks sum gradients: {strategies.list_usages()} (docs/slow-networks.md)", make="SYNC",
        make_help="how ranks sum: allreduce (default), auto, ef:5 ... (docs/slow-networks.md)")
    sync_warmup: Optional[float] = option(None,
        "epochs with exact sums before a strategy that omits bits; default warmup_epochs, or 0 if "
        "pairs of runs lost nothing without them")
    sync_bn: bool = option(False, "compute batch statistics over all ranks")
    broadcast_buffers: bool = option(False, "copy rank 0's BN buffers at each forward, as DDP did")
    find_unused_parameters: bool = changeable(False,
        "for models that leave parameters out of some steps")
    static_graph: bool = changeable(False,
        "for models whose graph is the same in each step (DDP); torch 2 with --accumulate")
    bucket_mb: Optional[int] = changeable(None,
        f"size of a gradient bucket in MiB; default {strategies.BUCKET_MB}, or the strategy's own",
        least=1)

    # checkpoints and results
    output: Optional[str] = changeable(None, "folder for checkpoints and timings")
    resume: str = changeable("none",
        "none; auto: the newest in --output, if any; or a folder or file")
    checkpoint_every: int = changeable(0,
        "steps between checkpoints; 0: one after each epoch")
    keep: int = changeable(2, "number of newest checkpoints to keep, besides the best", least=1)
    evaluate_every: int = changeable(1,
        "epochs between evaluations; the last is always evaluated", least=1)
    sample_log: bool = changeable(False,
        "record which images each rank trained on, and when")
    predict: Optional[str] = changeable(None,
        "write path,class,probability of val to this file; train nothing")
    extract: Optional[str] = changeable(None, "write embeddings of val to this file; train nothing")
    evaluate: Optional[str] = changeable(None,
        "write top-1, top-5 and loss of val and of each class to this file, as JSON; train nothing")

    # logs
    log_every: int = changeable(10, "steps between readings of loss and top-1", least=1)
    progress: str = changeable("auto",
        "a bar on a terminal, plain lines elsewhere", ("auto", "bar", "plain"))
    # fmt: on

    def __post_init__(self) -> None:
        for name, entry in TRAINER_OPTIONS.items():
            entry.check(f"--{name}", getattr(self, name))
        if self.sync != strategies.AUTO:  # the ranks replace `auto` when they start
            strategies.parse(self.sync)
        if self.bce_threshold and self.loss != "bce":
            raise UserError(
                f"--bce_threshold works only with --loss bce, but the loss is {self.loss}."
            )
        self.model_arguments()  # raises UserError if the text is not an object in JSON
        # These options write files, or look for files, in the output folder.
        needs_output = {
            "resume auto": self.resume == "auto",
            "checkpoint_every": self.checkpoint_every,
            "sample_log": self.sample_log,
        }
        for name, is_set in needs_output.items():
            if is_set and self.output is None:
                raise UserError(f"--{name} needs --output DIR.")

    def model_arguments(self) -> Dict[str, Any]:
        """Return the arguments in --model_args. Raises UserError."""
        try:
            values = json.loads(self.model_args or "{}")
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise UserError(
                f"--model_args {self.model_args}: is no object in JSON, like "
                """--model_args '{"drop_path_rate": 0.1}'."""
            )
        return values

    @property
    def request(self) -> decisions.Request:
        """Return the options that the decisions of the ranks depend on."""
        return decisions.Request(
            model=self.model,
            batch=self.per_node_batch_size,
            image_size=self.image_size,
            precision=self.precision,
            emulate=self.emulate,
            sync=self.sync,
            phases=self.phases,
            optimizer=self.optimizer,
            family=self.family,
        )

    @property
    def family(self) -> str:
        """Return the optimizer's family, SGD or ADAM of contract/strategies.py."""
        return OPTIMIZERS[self.optimizer].family

    @property
    def exact_epochs(self) -> float:
        """Return the number of epochs with exact sums before the strategy omits bits."""
        return self.phases.exact_epochs(strategies.parse(self.sync))

    @property
    def phases(self) -> strategies.Phases:
        """Return the run's length and its warm-up with exact sums. Without --sync_warmup, the sums
        are exact for as long as the learning rate warms up."""
        is_chosen = self.sync_warmup is not None
        warmup = self.warmup_epochs if self.sync_warmup is None else self.sync_warmup
        return strategies.Phases(self.epochs, warmup, self.family, is_chosen)

    @property
    def results(self) -> Dict[str, str]:
        """Return {name of an option in RESULTS: file to write} of the options that were typed."""
        files = {name: getattr(self, name) for name in RESULTS}
        return {name: file for name, file in files.items() if file}

    @property
    def trains_on_noise(self) -> bool:
        """Return whether the trainer trains on noise, and loads no images."""
        return bool(self.trial) and not (self.data or self.results)

    @property
    def bucket_size(self) -> int:
        """Return the size of a gradient bucket in MiB."""
        return self.bucket_mb or strategies.parse(self.sync).rule.bucket_mb


TRAINER_OPTIONS = options_of(Options)  # {name: Option}


def in_words_of_make(text: str) -> str:
    """Return a sentence of the trainer with its options as a user of make types them."""
    for name, row in TRAINER_OPTIONS.items():
        if row.make:
            # `--per_node_batch_size 0` becomes `BATCH=0`. A dash after the blank begins another
            # option, so that this option has no value.
            text = re.sub(rf"--{name} (?=[^-\s])", f"{row.make}=", text)
        elif row.type is switch:
            # `--sync_bn` becomes `ARGS=--sync_bn`, but `ARGS=--sync_bn` stays as it is.
            text = re.sub(rf"(?<!\S)--{name}\b", f"ARGS=--{name}", text)
    return text


@dataclass(frozen=True)
class Config:
    """Hold the options of a run. The name of each option in capitals is a variable of make.

    `data`: "" if the run has a script, or if it trains on noise. `trainer`: {name: value} of the
    options of the trainer that the user typed. `words`: the arguments of `script`, which replaces
    the trainer (launcher/build_script.py). `at`, `until`: Unix seconds.
    """

    data: str = DEFAULT_DATA
    trainer: Mapping[str, Any] = field(default_factory=dict)
    words: Tuple[str, ...] = ()
    # fmt: off
    inventory: str = changeable(DEFAULT_INVENTORY, "the list of machines (default: inventory.ini)")
    nodes: Optional[int] = changeable(None, "the first N machines (default: all)", least=1)
    resume: Optional[str] = option(None,
        "a run to resume, with its options (docs/launcher.md)", stored=False)
    script: Optional[str] = option(None, 'your own: path/train.py, or "-m package.train" in FOLDER')
    folder: Optional[str] = option(None,
        "the folder that is sent (default: its git checkout, or its folder)", type=Path)
    requirements: Optional[str] = option(None,
        "its packages (default: the requirements.txt next to it)", type=Path)
    precheck: Optional[str] = changeable(None,
        "a command that runs on node 0 before the ranks start; if it fails, nothing starts")
    output: Optional[str] = changeable(None,
        "folders that it writes, which Tandem copies back at the end")
    resume_args: Optional[str] = changeable(None, "how it resumes, such as '--resume {last}'")
    resume_from: Optional[str] = changeable(None,
        "self: each machine resumes from its own file, and Tandem sends no file",
        ("self",))
    max_restarts: int = changeable(0, "attempts after the first (default: 0)")
    min_nodes: Optional[int] = changeable(None,
        "the smallest number of machines (default: all without owner=)")
    balance: Optional[str] = changeable(None, "unequal machines: auto (by speed, the default), "
        "off, or numbers such as 3:2:2:1")
    detach: bool = option(False, "1: run in the background", stored=False)
    port: Optional[int] = changeable(None,
        "of the rendezvous on node 0 (default: a free one)", most=65535)
    queue: bool = changeable(False,
        "1: wait until busy machines are free, and check every 10 s; there is no queue order")
    force: bool = changeable(False, "1: start in spite of problems")
    keep: int = changeable(4096,
        "the largest file that a machine sends back, in MiB (default: 4096)", least=1)
    notify: Optional[str] = changeable(None,
        "a command on the control node at the run's end, such as 'mail -s {run}:{status} "
        "anna' (docs/launcher.md)", stored=False)
    at: Optional[int] = changeable(None,
        "start at this time of day, such as 19:00", type=time_of_day)
    until: Optional[int] = changeable(None,
        "save and end at this time of day, such as 07:30", type=time_of_day)
    # fmt: on


RUN_OPTIONS = options_of(Config)  # {name: Option}, without the first three fields
