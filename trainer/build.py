"""Build everything that a run consists of, from the options: data sets, model, optimizer, and more.

`build_materials` works on each rank without its peers; `build_job` puts the model on the device and
connects the ranks. train.py and predict.py call both.
"""

import dataclasses
import hashlib
import math
from functools import partial
from typing import Any, List, Optional, Sequence, Tuple, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from contract.errors import UserError
from contract.layout import SPLITS
from contract.options import TIMM, Options
from contract.split import micro_batches, steps_per_epoch
from tandem.clock import Clock
from tandem.sync import Attached, Sync

from . import parallel, precision, syncbn, timm_models
from .apex_amp import choose_precision
from .data.batch import MEAN, STD, Loss, Normalise, build_loss, derive_seed
from .data.folder import ImageFolder
from .data.loader import Generated
from .ema import Ema
from .freeze import freeze, named_head
from .memory import recompute_activations
from .models import build as build_model
from .optim import build_optimizer
from .world import World


@dataclasses.dataclass
class Materials:
    """Data sets and model."""

    train_set: ImageFolder
    eval_set: ImageFolder
    model: nn.Module  # the bare model, which is evaluated and saved

    @property
    def image_size(self) -> int:
        return self.train_set.sizes.train


@dataclasses.dataclass
class Job(Materials):
    """The parts of a run that training, evaluation and checkpoints need."""

    options: Options
    world: World
    clock: Clock
    net: nn.Module  # a training step calls it: `model`, perhaps compiled and wrapped in DDP
    norms: List[nn.Module]  # the model's batch normalisation, without frozen modules
    frozen: List[nn.Module]  # modules that stay in evaluation mode in training
    optimizer: torch.optim.Optimizer
    precision: precision.Precision
    normalise: Normalise
    loss: Loss
    attached: Optional[Attached]  # averages the gradients of `net`; None in a world of one
    ema: Optional[Ema]
    micro_batches: int  # of a full step, agreed by all ranks

    @property
    def sync(self) -> Optional[Sync]:
        """Return the strategy that averages the gradients, or None in a world of one."""
        return None if self.attached is None else self.attached.sync

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.train_set), self.world.global_batch, self.world.smallest)

    @property
    def eval_batch(self) -> int:
        """Return the images at once in a run's evaluation: every rank has memory for so many."""
        return max(micro_batches(min(self.world.batches), self.micro_batches))


def build_materials(options: Options, world: World) -> Materials:
    """Build data sets and model. Raises UserError on all ranks if one rank cannot build them, or if
    the ranks' data sets differ. Collective."""
    with world.raise_on_all_ranks():
        if options.compile and not hasattr(torch, "compile"):
            raise UserError(f"--compile needs torch 2.0 or newer; this is {torch.__version__}.")
        if options.skip_oom and world.size > 1:
            raise UserError(
                "--skip_oom works with one process only, because other processes would wait for "
                "its gradients forever. Omit it: the run then ends with exit code 76, and you "
                "start it again with smaller batches."
            )
        parallel.check(options, world)
        if options.precision.startswith("O"):
            precision.refuse_other_apex()
        train_set, eval_set = (_list_images(options, split, world.rank) for split in SPLITS)
        # All ranks draw the same weights: DDP would copy rank 0's, but a single rank has no DDP.
        torch.manual_seed(derive_seed("weights", options.seed))
        class_count, size = len(train_set.classes), train_set.sizes.train
        model = build_model(options.model, class_count, size, options.model_arguments())
        materials = Materials(train_set, eval_set, model)
    classes_hash = hashlib.sha256(ascii(materials.train_set.classes).encode()).hexdigest()[:8]
    gathered = world.gather((len(materials.train_set), len(materials.eval_set), classes_hash))
    summaries = [tuple(summary) for summary in gathered]  # `gather` turns tuples into lists
    if len(set(summaries)) > 1:
        raise UserError(
            "the ranks see different data sets (train, val images, hash of the classes' names): "
            f"{summaries}. Copy the same images to all machines."
        )
    return materials


def _list_images(options: Options, split: str, rank: int) -> ImageFolder:
    """List the images of a split. Raises UserError, also if none of some images can be read."""
    if options.trains_on_noise:
        return Generated(options)
    if options.data is None:
        raise UserError("--data is missing: give a folder with train/<class>/ and val/<class>/.")
    folder = ImageFolder(options.data, split, options)
    # A trial evaluates nothing. --predict, --extract and --evaluate do not train.
    unused_split = "val" if options.trial else "train" if options.results else ""
    if split != unused_split:
        folder.refuse_if_unusable(rank)
    return folder


def read_color_statistics(options: Options) -> Tuple[Sequence[float], Sequence[float]]:
    """Return the means and standard deviations of the colours for which the model is made."""
    if not options.model.startswith(TIMM):
        return MEAN, STD
    inputs = timm_models.read_inputs(options.model)
    return inputs.mean, inputs.std


def build_job(options: Options, world: World, materials: Materials, clock: Clock) -> Job:
    """Put the model on the device, and make the job. Raises UserError. Collective."""
    # The order matters: the optimizer holds the parameters, `cast_weights` replaces parameters by
    # masters, and DDP must see the final parameters.
    shape = torch.channels_last if options.channels_last else torch.contiguous_format
    chosen_precision = choose_precision(options, world)
    # torch declares no `Module.to` with both arguments, though it supports them.
    model = cast(nn.Module, cast(Any, materials.model).to(world.device, memory_format=shape))
    if options.sync_bn and world.size > 1:
        model = syncbn.convert(model, world.device, clock, options.timeout)
    with world.raise_on_all_ranks():
        classes = len(materials.train_set.classes)
        frozen = freeze(model, options.freeze, classes) if options.freeze else []
        # Parameters of the head are named only if they have another learning rate.
        head: List[str] = []
        if options.head_lr != 1:
            head = named_head(model, classes, f"--head_lr {options.head_lr:g}")
    optimizer = build_optimizer(model, options, world.global_batch, head)
    chosen_precision.cast_weights(model, optimizer)
    if options.checkpoint_activations:
        recompute_activations(model)
    wrapped = model  # which a training step calls, while `model` stays the bare model
    if options.compile:
        # Within DDP's forward, torch compiles the model in parts, one per bucket, so that backward
        # can hand over the gradients of each part at once. torch compiles each batch size
        # separately: code for dynamic sizes is slower.
        wrapped = cast(nn.Module, torch.compile(model, dynamic=False))
    if options.parallel != "ddp":
        wrapped = parallel.Computing(wrapped, chosen_precision)
    attached = None
    if world.size > 1:
        steps = steps_per_epoch(len(materials.train_set), world.global_batch, world.smallest)
        attached = Attached(
            options.sync,
            warmup_steps=math.ceil(options.exact_epochs * steps),
            scaler=chosen_precision,
            patience=options.timeout,
            machines=world.nodes,
            optimizer=optimizer,
        )
        attached.on_last_bucket = partial(clock.enter, "sync_exposed")
    return Job(
        options=options,
        world=world,
        clock=clock,
        **{**vars(materials), "model": model},
        net=parallel.wrap(wrapped, options, world, attached),
        norms=[m for m in model.modules() if isinstance(m, _BatchNorm) and m.training],
        frozen=frozen,
        optimizer=optimizer,
        precision=chosen_precision,
        normalise=Normalise(
            world.device, chosen_precision.input_type, shape, *read_color_statistics(options)
        ),
        loss=build_loss(options),
        attached=attached,
        ema=Ema(chosen_precision.full_state(model), options.ema) if options.ema else None,
        micro_batches=options.accumulate,
    )
