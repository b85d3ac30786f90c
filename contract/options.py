"""Every option of the trainer, each as one field; command_line.py reads flags and YAML files.

A field's text is its `--help` text. `free` marks options that a resumed run may change because they
do not change what is learned.
"""

import dataclasses
import math
import os
import sys
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

from contract import prices, strategies
from contract.errors import UserError

# This is not in compat.py, which imports torch, since the control machine reads options without it.
# Python 3.9 has no keyword-only dataclasses; options are always given by keyword there too.
KW_ONLY = {"kw_only": True} if sys.version_info >= (3, 10) else {}

# The first option of each group in --help.
GROUPS = {
    "config": "run",
    "data": "data",
    "model": "model",
    "per_node_batch_size": "batch and memory",
    "optimizer": "optimizer and schedule",
    "augment": "regularisation",
    "parallel": "parallelism and precision",
    "output": "checkpoints and results",
    "log_every": "logs",
}

# Options that must be 1 or more, that must be 1 or less, and that make the run write to --output.
# Options that were there once, and what to do instead.
GONE = {"sync_rule": "no strategy has rounds any more, so leave it out, and use --sync ef:1.6"}
ONE_OR_MORE = (
    *("epochs", "timeout", "image_size", "eval_size", "eval_resize", "per_node_batch_size"),
    *("accumulate", "gpu0_batch", "ema_every", "bucket_mb", "keep", "evaluate_every", "log_every"),
    "nonfinite_steps",
)
FRACTIONS = ("random_erase", "label_smoothing", "ema", "momentum", "beta2", "warmup_factor")
WRITTEN = ("checkpoint_every", "sample_log", "tensorboard")


class Optimizer(NamedTuple):
    """`torch`: its class in torch.optim. `arguments`: its own, beside the learning rate and the
    weight decay. `keeps`: the tensors that it keeps of each weight, of the weight's size, by
    torch's names. `counts`: it also counts the weight's steps, and all is there from the first."""

    torch: str
    arguments: Callable[["Options"], Dict[str, Any]]
    keeps: Callable[["Options"], Tuple[str, ...]]
    counts: bool


OPTIMIZERS = {
    "sgd": Optimizer(
        "SGD",
        lambda options: {"momentum": options.momentum},
        lambda options: ("momentum_buffer",) * (options.momentum > 0),
        counts=False,
    ),
    "adamw": Optimizer(
        "AdamW",
        lambda options: {"betas": (options.momentum, options.beta2)},
        lambda options: ("exp_avg", "exp_avg_sq"),
        counts=True,
    ),
}


# What others call it.
FP16_NAMES = ("fp16", "float16", "half", "16", "mixed", "amp")
FP16 = ": O1 is fp16, with fp32 where it is needed"


def opt(
    default: Any, text: str, choices: Tuple[str, ...] = (), changes: bool = True, was: Any = None
) -> Any:
    """A field that changes what is learned. `was`: the behaviour before this option existed, if it
    differs from the default; a checkpoint from then counts as made with that value."""
    was = default if was is None else was
    metadata = {"help": text, "choices": choices, "free": not changes, "was": was}
    return dataclasses.field(default=default, metadata=metadata)


def free(default: Any, text: str, choices: Tuple[str, ...] = ()) -> Any:
    """A field that a resumed run may change."""
    return opt(default, text, choices, changes=False)


@dataclasses.dataclass(frozen=True, **KW_ONLY)
class Options:
    # run
    config: Optional[str] = free(None, "YAML file with any of these options")
    epochs: int = opt(16, "passes over the training images")
    seed: int = opt(0, "seed of weights, order, augmentation and dropout")
    deterministic: bool = opt(False, "use only deterministic algorithms; slower on CUDA")
    spawn: int = free(0, "start this many processes on this machine without a launcher")
    tf32: str = opt(
        "auto",
        "TF32 in fp32's matrix products and convolutions on Ampere and later; auto: as torch does, "
        "in convolutions alone",
        ("auto", "on", "off"),
    )
    device: str = free("auto", "device to compute on", ("auto", "cpu", "cuda"))
    trial: int = free(
        0,
        "time steps for so many seconds and train nothing; without --data on noise of 1000 classes",
    )
    timeout: int = free(120, "seconds after which a silent peer ends the run")
    local_rank: Optional[int] = free(None, "set by torch.distributed.launch, not by people")

    # data
    data: Optional[str] = free(None, "folder with train/<class>/<image> and val/<class>/<image>")
    image_size: Optional[int] = opt(
        None, "side in pixels; default 224, or the images' own size if smaller"
    )
    eval_size: Optional[int] = opt(None, "side in pixels in evaluation; default image_size")
    eval_resize: Optional[int] = opt(
        None, "short side before evaluation's crop; default size / 0.875"
    )
    workers: Optional[int] = free(None, "loader processes per rank; 0 by default for small images")
    jpeg_scaling: Optional[bool] = opt(
        None,
        "decode a JPEG to a half, quarter or eighth of its pixels a side where a training crop has "
        "enough of them left; default: on",
        was=False,
    )
    bad_images: int = free(100, "unreadable images per rank after which the run stops")

    # model
    model: str = opt(
        "resnet18", "a torchvision name, path/file.py:function or package.module:function"
    )
    weights: Optional[str] = free(None, "file of weights to start from")
    channels_last: Optional[bool] = opt(
        None,
        "use the memory format that tensor cores prefer; default: on CUDA in 16 bits, unless "
        "deterministic",
        was=False,
    )
    compile: bool = opt(False, "compile the model by torch.compile, where this torch has it")
    checkpoint_activations: bool = free(
        False, "recompute activations in backward: less memory, a third slower"
    )

    # batch and memory
    per_node_batch_size: int = opt(32, "images per step and node, split over its ranks")
    accumulate: int = free(1, "split each rank's batch into this many micro-batches")
    auto_batch: bool = free(False, "find the largest micro-batch that fits, by trial")
    nonfinite_steps: int = free(
        3, "end the run after so many steps in a row whose loss is not finite"
    )
    skip_oom: bool = free(False, "skip a step that runs out of memory (one process only)")
    gpu0_batch: Optional[int] = free(
        None, "images for GPU 0 with balanced-dp; others share the rest"
    )

    # optimizer and schedule
    optimizer: str = opt("sgd", "the optimizer", tuple(OPTIMIZERS))
    lr: float = opt(0.1, "peak learning rate")
    lr_batch: int = opt(0, "global batch that lr is meant for, scaled linearly; 0: not scaled")
    momentum: float = opt(0.9, "momentum of SGD, or the first beta of AdamW")
    beta2: float = opt(0.999, "decay of AdamW's second moment")
    weight_decay: float = opt(0.0001, "weight decay of weights")
    norm_weight_decay: float = opt(0.0, "weight decay of biases and normalisation layers")
    clip_grad_norm: float = opt(0.0, "clip the gradient to this norm; 0: do not clip")
    schedule: str = opt("cosine", "schedule of the learning rate", ("cosine", "step", "constant"))
    warmup_epochs: float = opt(strategies.WARMUP_EPOCHS, "epochs of linear warm-up")
    warmup_factor: float = opt(0.01, "fraction of lr with which warm-up begins")
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
    random_erase: float = opt(0.0, "probability of erasing a rectangle")
    label_smoothing: float = opt(0.0, "fraction of the target spread over all classes")
    mixup: float = opt(0.0, "alpha of mixup; 0: off")
    cutmix: float = opt(0.0, "alpha of CutMix; 0: off; with mixup, each step draws one of the two")
    ema: float = opt(0.0, "decay of averaged weights, which are then evaluated; 0: off")
    ema_every: int = opt(1, "steps between updates of the average")

    # parallelism and precision
    parallel: str = free(
        "ddp", "one process per GPU, or one for all GPUs", ("ddp", "dp", "balanced-dp")
    )
    precision: str = opt(
        "auto",
        "best that all devices have; autocast to bf16 or fp16 (O1), half with fp32 masters (O2), "
        "half (O3)",
        ("auto", "fp32", "fp64", "bf16", "O0", "O1", "O2", "O3"),
        was="fp32",
    )
    amp: str = free(
        "auto",
        "who does O0 to O3: NVIDIA's apex or torch; auto: apex where all ranks have it and its "
        "kernels",
        ("auto", "apex", "torch"),
    )
    emulate: bool = free(False, "allow bf16 on devices that only emulate it, slowly")
    sync: str = opt(
        strategies.EXACT,
        f"how ranks sum gradients: {strategies.usages()}. Price in accuracy, as "
        f"measured on one task: {prices.labels() or 'of none yet'}",
    )
    sync_warmup: Optional[float] = opt(
        None, "epochs with exact sums before a strategy that leaves bits out; default warmup_epochs"
    )
    sync_bn: bool = opt(False, "compute batch statistics over all ranks")
    broadcast_buffers: bool = opt(False, "copy rank 0's BN buffers at each forward, as DDP did")
    find_unused_parameters: bool = free(False, "for models that leave parameters out of some steps")
    static_graph: bool = free(
        False, "for models whose graph is the same in each step (DDP); torch 2 with --accumulate"
    )
    bucket_mb: Optional[int] = free(
        None,
        f"size of a gradient bucket in MiB; default {strategies.BUCKET_MB}, or the strategy's own",
    )

    # checkpoints and results
    output: Optional[str] = free(None, "folder for checkpoints and timings")
    resume: str = free("none", "none; auto: the newest in --output, if any; or a folder or file")
    checkpoint_every: int = free(0, "steps between checkpoints; 0: one after each epoch")
    keep: int = free(2, "number of newest checkpoints to keep, besides the best")
    evaluate_every: int = free(1, "epochs between evaluations; the last is always evaluated")
    sample_log: bool = free(False, "record which images each rank trained on, and when")
    predict: Optional[str] = free(
        None, "write path,class,probability of val to this file; train nothing"
    )
    extract: Optional[str] = free(None, "write embeddings of val to this file; train nothing")

    # logs
    log_every: int = free(10, "steps between readings of loss and top-1")
    progress: str = free(
        "auto", "a bar on a terminal, plain lines elsewhere", ("auto", "bar", "plain")
    )
    tensorboard: bool = free(False, "also write TensorBoard events to --output")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            choices, value = field.metadata["choices"], getattr(self, field.name)
            if choices and value not in choices:
                hint = FP16 if field.name == "precision" and value in FP16_NAMES else ""
                raise UserError(
                    f"--{field.name} {value}: choose one of {', '.join(choices)}{hint}."
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"--{field.name} {value}: must be a number.")
            least, most = int(field.name in ONE_OR_MORE), 1 if field.name in FRACTIONS else math.inf
            if isinstance(value, (int, float)) and not least <= value <= most:
                limit = f"at least {least}" if value < least else f"at most {most}"
                raise UserError(f"--{field.name} {value}: must be {limit}.")
        strategies.parse(self.sync)
        asked = ["resume auto"] if self.resume == "auto" else []
        asked += [name for name in WRITTEN if getattr(self, name)]
        if asked and self.output is None:
            raise UserError(f"--{asked[0]} needs --output DIR.")

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
