"""One optimizer step: forward and backward over micro-batches, gradients summed over ranks."""

import contextlib
from typing import ContextManager, Iterator, List, Optional, Sequence, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contract.errors import UserError
from contract.options import OPTIMIZERS
from contract.split import SMALLEST, StepShape, micro_batches, step_shape

from .build import Job
from .data.batch import Batch, Mix, derive_seed, mix_images, plan_mix
from .memory import OutOfMemory, one_pass
from .precision import weights_of


def shape_of(job: Job, sizes: Sequence[int]) -> StepShape:
    """What this rank does in a step of `sizes` samples per rank; all ranks know all sizes."""
    return step_shape(sizes, job.world.rank, job.micro_batches, job.options.sync_bn)


def train_step(
    job: Job,
    batch: Batch,
    step: int,
    lr: float,
) -> torch.Tensor:
    """Train on this rank's share. `step` is the global number from 0.
    Returns the sums of the rank's loss and of its hits (2). They stay on the device, without a
    wait, and hold no autograd graph."""
    clock = job.clock
    clock.enter("h2d")
    images, targets = batch.on(job.world.device)
    clock.enter("optimizer")
    seed_step(job, step)
    for group in job.optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    # To None: a weight that takes no part differs from one whose gradient is zero.
    job.net.zero_grad(set_to_none=True)
    shape = shape_of(job, batch.sizes)
    with frozen_batch_norm(job.norms, shape.running_statistics):
        tally = _gradients(job, images, targets, batch.global_count, shape.micro, step)
    clock.enter("optimizer")
    skipped = job.precision.step(job.optimizer, job.options.clip_grad_norm)
    # A skipped step has left the weights as they were: the average would count them twice.
    if job.ema is not None and (step + 1) % job.options.ema_every == 0 and not skipped:
        job.ema.update(job.precision.live_state(job.model))
    clock.enter("other")
    return tally


def seed_step(job: Job, step: int) -> None:
    """Seed dropout by step and rank, not by what was drawn before, so that a resumed run agrees."""
    seed = derive_seed("dropout", job.options.seed, step, job.world.rank)
    # The same as torch.manual_seed for these generators, without its search for devices.
    torch.default_generator.manual_seed(seed)
    if job.world.device.type == "cuda":
        generators = torch.cuda.default_generators
        # With dp one process computes on all GPUs of its machine.
        own = [generators[job.world.device.index]] if job.options.parallel == "ddp" else generators
        for generator in own:
            generator.manual_seed(seed)


def _gradients(
    job: Job,
    images: torch.Tensor,
    targets: torch.Tensor,
    count: int,
    sizes: List[int],
    step: int,
) -> torch.Tensor:
    """Sum the gradients of loss / `count`, where `count` is the samples of all ranks. Returns the
    sums of loss and hits (2)."""
    if not sizes:
        return _empty_step(job)
    mix = plan_mix(job.options, images.shape[-1], step, job.world.rank)
    # Neighbours in the batch, as bytes: only one micro-batch at a time is converted to floats.
    others = images if mix is None else images.roll(1, 0)
    tallies = []
    columns = (images, others, targets, targets.roll(1, 0))
    parts = list(zip(*(column.split(sizes) for column in columns)))
    for number, (part, other, *both) in enumerate(parts):
        with local_only(job.net, number < len(parts) - 1):
            job.clock.enter("forward")
            inputs = _inputs(job, part, other, mix)
            with job.precision.computing():
                outputs = job.net(inputs)
            # The loss sums exponentials, which overflow in fp16.
            outputs = outputs.float() if outputs.dtype is not torch.float64 else outputs
            loss = job.loss(outputs, both, mix)
            job.clock.enter("backward")
            # DDP takes the mean of ranks, whose shares may differ: of it, by all their samples.
            job.precision.backward(loss * job.world.size / count, last=number == len(parts) - 1)
        # Of a mixed image, the class that has the larger part of it.
        heavier = both[0] if mix is None or mix.weight >= 0.5 else both[1]
        hits = (outputs.detach().argmax(1) == heavier).sum()
        tallies.append(torch.stack([loss.detach(), hits.to(loss.dtype)]))
    return torch.stack(tallies).sum(0)


def _inputs(
    job: Job, images: torch.Tensor, neighbours: torch.Tensor, mix: Optional[Mix]
) -> torch.Tensor:
    """The input of the net for one micro-batch; `images` and `neighbours` are uint8."""
    own = job.normalise(images)
    return own if mix is None else mix_images(own, job.normalise(neighbours), mix)


def _empty_step(job: Job) -> torch.Tensor:
    """For a rank without samples: the peers wait for its gradients, which are zero."""
    job.clock.enter("forward")
    dummy_pass(job, job.net, 1, last=True)
    return torch.zeros(2, device=job.world.device)


def dummy_pass(
    job: Job, net: nn.Module, count: int, last: bool = False, unseen: bool = False
) -> None:
    """Forward and backward of `count` blank images; all gradients are zero. `last`: this is the
    last backward of a step that the loss scale counts. `unseen`: the weights get no gradients, so
    that DDP's hooks, which are attached to the weights and run even without DDP's forward, do not
    run."""
    shape = (count, 3, job.image_size, job.image_size)
    blank = torch.zeros(shape, dtype=torch.uint8, device=job.world.device)
    with job.precision.computing():
        outputs = net(job.normalise(blank))
    job.clock.enter("backward")
    # A sum in fp16 could be inf, and 0 times inf is NaN.
    loss = outputs.float().sum() * 0
    if unseen:
        weights = [p for p in job.model.parameters() if p.requires_grad]
        torch.autograd.grad(loss, weights, allow_unused=True)
    else:
        job.precision.backward(loss, last)


@contextlib.contextmanager
def unchanged(job: Job) -> Iterator[None]:
    """Afterwards, the model has the same buffers as before, and no gradients."""
    own = {name: buffer.clone() for name, buffer in job.model.named_buffers()}
    try:
        yield
    finally:
        job.net.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in job.model.named_buffers():
                buffer.copy_(own[name])


@contextlib.contextmanager
def frozen_batch_norm(norms: List[nn.Module], on: bool) -> Iterator[None]:
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
    """Within, gradients are accumulated on this rank without communication."""
    if on and isinstance(net, DistributedDataParallel):
        return net.no_sync()
    return contextlib.nullcontext()


def _throwaway_sizes(job: Job) -> List[int]:
    """Images of each throw-away pass; all ranks make equally many. With --compile, the passes have
    the sizes of an epoch's micro-batches, so that all compilation is done before the first step."""
    if not job.options.compile:
        return [SMALLEST]
    least = len(job.train_set) // job.steps_per_epoch
    counts = {min(count, job.world.global_batch) for count in (least, least + 1)}
    steps = [job.world.rank_samples(count) for count in sorted(counts)]
    shapes = [shape_of(job, sizes).micro or [SMALLEST] for sizes in steps]
    return [size for sizes in shapes for size in (min(sizes), max(sizes))]


def rebuild_buckets(job: Job) -> None:
    """A throw-away forward and backward, and another one, which leave everything as it was.

    DDP rebuilds its buckets in its second forward, and sums in another order from then on: without
    the first pass, the first step after a resume would differ from the same step of a run that was
    never stopped. The rebuilding is a collective: without the second pass, a rank that has no image
    in the first step would leave the others waiting in it. Raises UserError for parameters without
    a gradient, for which DDP would wait.

    Before that, each rank makes such a pass by itself, and then all meet. So what takes long only
    once, and longer on one rank than on another, such as a compilation, is not part of a step for
    which a peer waits only --timeout. Batch normalisation over ranks is switched off in this pass,
    since its statistics would mean such a wait. With --static_graph, this pass uses the model
    inside DDP, unseen: DDP counts how often each weight gets a gradient up to the end of its first
    backward. It would count this pass too, wait for as many gradients in each step, and sum
    nothing.
    """
    with unchanged(job), one_pass():
        if job.world.exchange is not None:
            static = job.options.static_graph
            alone = cast(nn.Module, job.net.module if static else job.net)
            with local_only(alone, True), frozen_batch_norm(job.norms, job.options.sync_bn):
                for size in _throwaway_sizes(job):
                    dummy_pass(job, alone, size, unseen=static)
            job.net.zero_grad(set_to_none=True)
            job.world.exchange.meet()
        if job.attached is None:
            _order_buckets(job)
        else:
            job.attached.warm_up_buckets(lambda: _order_buckets(job))


def _order_buckets(job: Job) -> None:
    """Two passes of all ranks; raises UserError."""
    for size in _throwaway_sizes(job):
        dummy_pass(job, job.net, size)
    _refuse_unused(job)
    dummy_pass(job, job.net, _throwaway_sizes(job)[-1])


def _refuse_unused(job: Job) -> None:
    """Raises UserError for parameters that the pass before left without a gradient."""
    weights = job.model.named_parameters()
    unused = [name for name, p in weights if p.requires_grad and p.grad is None]
    if unused and job.world.size > 1 and not job.options.find_unused_parameters:
        raise UserError(
            f"the model's {unused[0]} (of {len(unused)} parameters) takes no part in its output, "
            "and the ranks would wait for its gradient for ever: give --find_unused_parameters."
        )


def agree_micro_batches(job: Job) -> None:
    """With --auto_batch, the fewest micro-batches that fit, the same on all ranks. Collective. On
    GPUs with --balance, too: a machine may have more images than the batch that was asked for.

    A trial pass contains none of training's own collectives, since a rank that runs out of memory
    would never reach them: batch normalisation over ranks is switched off meanwhile.
    """
    unequal = bool(job.options.balance) and job.world.device.type == "cuda"
    if not job.options.auto_batch and not unequal:
        return
    count = job.world.batches[job.world.rank]
    parts = job.micro_batches
    with frozen_batch_norm(job.norms, job.options.sync_bn):
        while not _fits(job, max(micro_batches(count, parts))) and count // parts > SMALLEST:
            parts *= 2
    job.micro_batches = max(job.world.gather(parts))


def _fits(job: Job, size: int) -> bool:
    """Whether a forward and backward of `size` images fits, together with the memory that is needed
    later; leaves the model as it was."""
    try:
        with unchanged(job), one_pass():
            reserve = reserve_bytes(job) if job.world.device.type == "cuda" else 0
            # In the place of what later steps allocate, for as long as the pass takes.
            ballast = torch.empty(reserve, dtype=torch.uint8, device=job.world.device)
            dummy_pass(job, job.model, size)
            del ballast
    except OutOfMemory:
        return False
    return True


def reserve_bytes(job: Job) -> int:
    """Bytes of GPU memory that a trial pass must leave free: what the optimizer and the strategy
    allocate at their first step (masters and average exist already), and a twentieth for
    fragmentation."""
    copies = len(OPTIMIZERS[job.options.optimizer].keeps(job.options))
    weights = sum(weight.numel() * weight.element_size() for weight in weights_of(job.optimizer))
    summed = sum(weight.numel() for weight in weights_of(job.optimizer)) * 4
    kept = summed * job.sync.state_copies if job.sync is not None else 0
    total = torch.cuda.get_device_properties(job.world.device).total_memory
    return copies * weights + int(kept) + int(total) // 20
