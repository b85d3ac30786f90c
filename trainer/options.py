"""Every option of the trainer: one field each. cli.py reads them from flags and YAML files.

A field's text is its `--help`. `free` marks options that a resumed run may change because they
do not change what is learned; all others enter `fingerprint`.
"""

import dataclasses
import hashlib
import json
import os
import sys
from typing import Any, Optional, Tuple

from .errors import UserError

# Here and not in compat.py, which imports torch: the control machine reads options without it.
# Python 3.9 has no keyword-only dataclasses; options are always given by keyword there too.
KW_ONLY = {"kw_only": True} if sys.version_info >= (3, 10) else {}


def opt(
    group: str, default: Any, text: str, choices: Tuple[str, ...] = (), free: bool = False
) -> Any:
    metadata = {"group": group, "help": text, "choices": choices, "free": free}
    return dataclasses.field(default=default, metadata=metadata)


RUN, DATA, MODEL, BATCH = "run", "data", "model", "batch and memory"
OPTIM, REGULAR, PARALLEL, SAVE, LOG = (
    "optimizer and schedule",
    "regularisation",
    "parallelism and precision",
    "checkpoints and results",
    "logs",
)


@dataclasses.dataclass(frozen=True, **KW_ONLY)
class Options:
    config: Optional[str] = opt(RUN, None, "YAML file with any of these options", free=True)
    epochs: int = opt(RUN, 16, "passes over the training images")
    seed: int = opt(RUN, 0, "seed of weights, order, augmentation and dropout")
    deterministic: bool = opt(RUN, False, "only deterministic algorithms; slower on CUDA")
    spawn: int = opt(
        RUN, 0, "start this many processes on this machine without a launcher", free=True
    )
    device: str = opt(RUN, "auto", "where to compute", ("auto", "cpu", "cuda"), free=True)
    timeout: int = opt(RUN, 120, "seconds after which a silent peer ends the run", free=True)
    local_rank: Optional[int] = opt(
        RUN, None, "given by torch.distributed.launch, not by people", free=True
    )

    data: Optional[str] = opt(
        DATA, None, "folder with train/<class>/<image> and val/<class>/<image>", free=True
    )
    image_size: Optional[int] = opt(
        DATA, None, "pixels; default 224, or the images' own size when they are smaller"
    )
    eval_size: Optional[int] = opt(DATA, None, "pixels in evaluation; default image_size")
    eval_resize: Optional[int] = opt(
        DATA,
        None,
        "short side before the evaluation crop; default eval_size / 0.875, unscaled if small",
    )
    workers: Optional[int] = opt(
        DATA,
        None,
        "loader processes per rank; default 0 for small images, else the cores' share",
        free=True,
    )
    bad_images: int = opt(
        DATA, 100, "unreadable images per rank after which the run stops", free=True
    )

    model: str = opt(MODEL, "resnet18", "a torchvision name, or package.module:function")
    weights: Optional[str] = opt(MODEL, None, "file of weights to begin with", free=True)
    zero_init_residual: bool = opt(MODEL, False, "residual branches start at zero (ResNets)")
    channels_last: bool = opt(MODEL, False, "memory format that tensor cores prefer")
    compile: bool = opt(MODEL, False, "torch.compile, where this torch has it")
    checkpoint_activations: bool = opt(
        MODEL,
        False,
        "compute activations again in backward: less memory, about a third slower",
        free=True,
    )

    per_node_batch_size: int = opt(
        BATCH, 32, "images per step and node, split over its ranks; remainders are allowed"
    )
    accumulate: int = opt(
        BATCH, 1, "split each rank's batch into this many micro-batches", free=True
    )
    auto_batch: bool = opt(
        BATCH, False, "find the largest micro-batch that fits by trial", free=True
    )
    skip_oom: bool = opt(
        BATCH, False, "skip a step that does not fit (one process only)", free=True
    )
    gpu0_batch: Optional[int] = opt(
        BATCH, None, "images for GPU 0 with balanced-dp; the others share the rest", free=True
    )

    optimizer: str = opt(OPTIM, "sgd", "which optimizer", ("sgd", "adamw"))
    lr: float = opt(OPTIM, 0.1, "peak learning rate")
    lr_batch: int = opt(
        OPTIM,
        0,
        "lr is meant for this global batch and scales linearly with the real one; 0: no scaling",
    )
    momentum: float = opt(OPTIM, 0.9, "of SGD; the first beta of AdamW")
    nesterov: bool = opt(OPTIM, False, "Nesterov's momentum (SGD)")
    beta2: float = opt(OPTIM, 0.999, "decay of AdamW's second moment")
    weight_decay: float = opt(OPTIM, 1e-4, "on weights")
    norm_weight_decay: float = opt(OPTIM, 0.0, "on biases and normalisation layers")
    clip_grad_norm: float = opt(OPTIM, 0.0, "largest norm of the gradient; 0: no limit")
    schedule: str = opt(OPTIM, "cosine", "of the learning rate", ("cosine", "step", "constant"))
    warmup_epochs: float = opt(OPTIM, 1.0, "epochs of linear warm-up")
    warmup_factor: float = opt(OPTIM, 0.01, "share of lr with which warm-up begins")
    step_epochs: Tuple[int, ...] = opt(OPTIM, (30, 60, 80), "epochs at which lr drops (step)")
    step_gamma: float = opt(OPTIM, 0.1, "factor at each drop (step)")
    min_lr: float = opt(OPTIM, 0.0, "where the cosine ends")

    augment: str = opt(
        REGULAR,
        "auto",
        "auto: crop for photographs, shift for small images; trivial: crop + TrivialAugment",
        ("auto", "none", "shift", "crop", "trivial"),
    )
    random_erase: float = opt(REGULAR, 0.0, "probability of erasing a rectangle")
    label_smoothing: float = opt(REGULAR, 0.0, "share of the target spread over all classes")
    mixup: float = opt(REGULAR, 0.0, "alpha; 0: off")
    cutmix: float = opt(REGULAR, 0.0, "alpha; 0: off; with mixup one of both is drawn per step")
    ema: float = opt(REGULAR, 0.0, "decay of the averaged weights that are evaluated; 0: off")
    ema_every: int = opt(REGULAR, 1, "steps between two updates of the average")

    parallel: str = opt(
        PARALLEL,
        "ddp",
        "one process per device, or one for all",
        ("ddp", "dp", "balanced-dp"),
        free=True,
    )
    precision: str = opt(
        PARALLEL,
        "fp32",
        "bf16: autocast; O0-O3 as in apex: O1 autocast fp16, O2 half with fp32 masters, O3 half",
        ("fp32", "fp64", "bf16", "O0", "O1", "O2", "O3"),
    )
    sync: str = opt(
        PARALLEL, "allreduce", "how gradients are summed over ranks", ("allreduce", "fp16", "bf16")
    )
    sync_bn: bool = opt(PARALLEL, False, "batch statistics over all ranks")
    broadcast_buffers: bool = opt(
        PARALLEL, False, "copy rank 0's BN buffers at each forward (DDP's old habit)"
    )
    find_unused_parameters: bool = opt(
        PARALLEL, False, "for models that leave parameters out of some steps", free=True
    )
    static_graph: bool = opt(PARALLEL, False, "the same graph in each step (DDP)", free=True)
    bucket_mb: int = opt(PARALLEL, 25, "size of the gradient buckets in MiB", free=True)

    output: Optional[str] = opt(SAVE, None, "folder for checkpoints and timings", free=True)
    resume: str = opt(
        SAVE,
        "none",
        "auto: newest in --output, if any; none; or an output folder or checkpoint",
        free=True,
    )
    checkpoint_every: int = opt(
        SAVE, 0, "steps between checkpoints; 0: after each epoch", free=True
    )
    keep: int = opt(SAVE, 2, "newest checkpoints to keep, beside the best", free=True)
    evaluate_every: int = opt(
        SAVE, 1, "epochs between evaluations; the last is always evaluated", free=True
    )
    sample_log: bool = opt(
        SAVE, False, "write which image each rank trained on, and when", free=True
    )
    predict: Optional[str] = opt(
        SAVE,
        None,
        "only predict the val images; write path,class,probability to this file",
        free=True,
    )
    extract: Optional[str] = opt(
        SAVE, None, "only write embeddings of the val images to this file", free=True
    )

    log_every: int = opt(LOG, 10, "steps between two readings of loss and top-1", free=True)
    progress: str = opt(
        LOG,
        "auto",
        "bar where there is a terminal, else plain lines",
        ("auto", "bar", "plain"),
        free=True,
    )
    tensorboard: bool = opt(LOG, False, "also write TensorBoard events to --output", free=True)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            choices, value = field.metadata["choices"], getattr(self, field.name)
            if choices and value not in choices:
                raise UserError(f"--{field.name} {value}: choose one of {', '.join(choices)}.")
        for name in ("epochs", "per_node_batch_size", "accumulate", "keep", "log_every", "timeout"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least 1.")

    @property
    def accumulation(self) -> int:
        """Micro-batches per step: `accumulate` times the divisor of an out-of-memory exit."""
        return self.accumulate * int(os.environ.get("TANDEM_MICRO_BATCH_DIVISOR", "1"))

    def fingerprint(self) -> str:
        """Equal for runs that may continue each other."""
        kept = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if not field.metadata["free"]
        }
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
