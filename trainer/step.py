"""One optimizer step: forward and backward over micro-batches, gradients summed over ranks."""

import contextlib
from typing import ContextManager, Iterator, List, Optional, Sequence, Union, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .build import Job
from .data.loader import Batch
from .data.mix import Mix, mix_images, mixed_loss, plan_mix
from .data.order import derive_seed
from .data.split import SMALLEST, StepShape, step_shape
from .errors import UserError
from .oom import one_pass
from .sync import Moment


def shape_of(job: Job, global_count: int) -> StepShape:
    """This rank's part of a step of `global_count` samples; all ranks compute the same sizes."""
    return step_shape(
        job.world.rank_samples(global_count), job.world.rank, job.micro_batches, job.options.sync_bn
    )


def train_step(
    job: Job,
    batch: Batch,
    step: int,
    lr: float,
    left: int = 1,
    exact: bool = False,
    warm: bool = False,
) -> torch.Tensor:
    """Train on this rank's share; `step` is the global number from 0, `left` the steps to the
    epoch's end with this one, `exact` whether a strategy that leaves bits out is not to yet,
    `warm` whether the learning rate still rises.
    Returns the sums of its loss and of its hits (2), which stay on the device: no wait, no
    graph."""
    clock = job.clock
    clock.enter("h2d")
    images, targets = batch.on(job.world.device)
    clock.enter("optimizer")
    seed_step(job, step)
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    job.net.zero_grad(set_to_none=True)
    summed: Sequence[int] = range(job.world.size)
    alone = False
    rank_samples = job.world.rank_samples(batch.global_count)
    if job.sync is not None:
        follows = job.precision.scale if job.sync.follows_scale else None
        scale = 1.0 if follows is None else follows.value
        job.sync.before_step(Moment(step, left, lr, tuple(rank_samples), scale, exact, warm))
        summed = job.sync.summed
        alone = job.sync.keeps and len(summed) == 1
    # Ranks that sum their gradients step by the mean of all their samples.
    count = sum(rank_samples[rank] for rank in summed)
    shape = shape_of(job, batch.global_count)
    with resting(job.norms, shape.running_statistics):
        tally = _gradients(job, images, targets, count, shape.micro, step, alone)
    clock.enter("optimizer")
    # Ranks that have no samples between them have nothing to step by.
    skipped = count == 0 or job.precision.step(job.optimizer, job.options.clip_grad_norm)
    if job.sync is not None:
        job.sync.after_step(skipped)
        clock.enter("optimizer")
    _average(job, step, skipped)
    clock.enter("other")
    return tally


def _average(job: Job, step: int, skipped: Union[bool, torch.Tensor]) -> None:
    """Take what the step has made into --ema; of ranks by themselves, what they agree on."""
    if job.ema is None:
        return
    if job.sync is not None and job.sync.keeps:
        if job.sync.meets:
            state = job.sync.common(job.precision.live_state(job.model))
            job.ema.update(state, job.sync.covered)
    elif (step + 1) % job.options.ema_every == 0 and not skipped:
        job.ema.update(job.precision.live_state(job.model))


def seed_step(job: Job, step: int) -> None:
    """Dropout depends on the step and rank, not on what was drawn before: a resumed run agrees."""
    seed = derive_seed("dropout", job.options.seed, step, job.world.rank)
    # What torch.manual_seed sets of these generators, without its search for devices.
    torch.default_generator.manual_seed(seed)
    if job.world.device.type == "cuda":
        every = torch.cuda.default_generators
        own = [every[job.world.device.index]] if job.options.parallel == "ddp" else every
        for generator in own:
            generator.manual_seed(seed)


def _gradients(
    job: Job,
    images: torch.Tensor,
    targets: torch.Tensor,
    count: int,
    sizes: List[int],
    step: int,
    alone: bool = False,
) -> torch.Tensor:
    """Sum the gradients of loss / `count`, the samples of all ranks that then sum theirs. A rank
    `alone` asks nobody."""
    if count == 0:
        return torch.zeros(2, device=job.world.device)
    if not sizes:
        return _take_part(job)
    mix = plan_mix(job.options, job.image_size, step, job.world.rank)
    # Neighbours in the batch, as bytes: a micro-batch at a time becomes floats.
    others = images if mix is None else images.roll(1, 0)
    tallies = []
    columns = (images, others, targets, targets.roll(1, 0))
    parts = list(zip(*(column.split(sizes) for column in columns)))
    for number, (part, other, *both) in enumerate(parts):
        with local_only(job.net, alone or number < len(parts) - 1):
            job.clock.enter("forward")
            inputs = _inputs(job, part, other, mix)
            with job.precision.computing():
                outputs = job.net(inputs)
            outputs = outputs.float() if outputs.dtype is not torch.float64 else outputs
            loss = mixed_loss(job.loss, outputs, both, mix)
            job.clock.enter("backward")
            job.precision.backward(loss / count, last=number == len(parts) - 1)
        hits = (outputs.detach().argmax(1) == both[0]).sum()
        tallies.append(torch.stack([loss.detach(), hits.to(loss.dtype)]))
    return torch.stack(tallies).sum(0)


def _inputs(
    job: Job, images: torch.Tensor, neighbours: torch.Tensor, mix: Optional[Mix]
) -> torch.Tensor:
    """What the net gets of a micro-batch; both are uint8."""
    own = job.normalise(images)
    return own if mix is None else mix_images(own, job.normalise(neighbours), mix)


def _take_part(job: Job) -> torch.Tensor:
    """A rank without samples: the peers wait for its gradients, which are zero."""
    job.clock.enter("forward")
    blank_pass(job, job.net, 1, last=True)
    return torch.zeros(2, device=job.world.device)


def blank_pass(
    job: Job, net: nn.Module, count: int, last: bool = False, unseen: bool = False
) -> None:
    """Forward and backward of `count` blank images; all gradients are zero. `last`: of a step,
    which the loss scale counts. `unseen`: the weights get no gradients, so that DDP's hooks, which
    hang on these even where DDP is not called, do not run."""
    shape = (count, 3, job.image_size, job.image_size)
    blank = torch.zeros(shape, dtype=torch.uint8, device=job.world.device)
    with job.precision.computing():
        outputs = net(job.normalise(blank))
    job.clock.enter("backward")
    # A sum in fp16 could be infinite, and 0 times that is no number.
    loss = outputs.float().sum() * 0
    if unseen:
        weights = [p for p in job.model.parameters() if p.requires_grad]
        torch.autograd.grad(loss, weights, allow_unused=True)
    else:
        job.precision.backward(loss, last)


@contextlib.contextmanager
def unchanged(job: Job) -> Iterator[None]:
    """Afterwards the model has its buffers of before, and no gradients."""
    own = {name: buffer.clone() for name, buffer in job.model.named_buffers()}
    try:
        yield
    finally:
        job.net.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in job.model.named_buffers():
                buffer.copy_(own[name])


@contextlib.contextmanager
def resting(norms: List[nn.Module], on: bool) -> Iterator[None]:
    """Within, batch normalisation uses its running statistics and leaves them as they are."""
    if not on:
        yield
        return
    for module in norms:
        module.eval()
    try:
        yield
    finally:
        for module in norms:
            module.train()


def local_only(net: nn.Module, on: bool) -> ContextManager[None]:
    """Within, gradients are summed up on this rank without asking the others."""
    if on and isinstance(net, DistributedDataParallel):
        return net.no_sync()
    return contextlib.nullcontext()


def _settling_sizes(job: Job) -> List[int]:
    """Images of each throw-away pass, as many passes on all ranks. What is compiled is compiled for
    the sizes of an epoch's micro-batches, of which there are two at most, before the first step."""
    if not job.options.compile:
        return [SMALLEST]
    least = len(job.train_set) // job.steps_per_epoch
    counts = {min(count, job.world.global_batch) for count in (least, least + 1)}
    shapes = [shape_of(job, count).micro or [SMALLEST] for count in sorted(counts)]
    return [size for sizes in shapes for size in (min(sizes), max(sizes))]


def settle_buckets(job: Job) -> None:
    """A throw-away forward and backward, after which all is as before.

    DDP orders its buckets anew after its first backward, and sums in another order from then on:
    without this, the first step after a resume would differ from the same step of a run that was
    never stopped. Raises UserError for parameters without a gradient, which DDP would wait for.

    Before it each rank does one by itself, and all meet: what takes long once, and on one rank
    longer than on another, as a compilation does, is no step that a peer waits --timeout for. Batch
    normalisation over ranks rests in it, since its statistics would be such a wait. Of a static
    graph the model within does it, unseen: DDP counts how often each weight gets a gradient in the
    first backward. It would count this one too, wait for as many in each step, and sum nothing.
    """
    with unchanged(job), one_pass():
        if job.world.exchange is not None:
            static = job.options.static_graph
            alone = cast(nn.Module, job.net.module if static else job.net)
            with local_only(alone, True), resting(job.norms, job.options.sync_bn):
                for size in _settling_sizes(job):
                    blank_pass(job, alone, size, unseen=static)
            job.net.zero_grad(set_to_none=True)
            job.world.exchange.meet()
        for size in _settling_sizes(job):
            blank_pass(job, job.net, size)
        weights = job.model.named_parameters()
        unused = [name for name, p in weights if p.requires_grad and p.grad is None]
    if unused and job.world.size > 1 and not job.options.find_unused_parameters:
        raise UserError(
            f"the model's {unused[0]} (of {len(unused)} parameters) takes no part in its output, "
            "and the ranks would wait for its gradient for ever: --find_unused_parameters."
        )
