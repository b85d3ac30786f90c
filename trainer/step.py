"""One optimizer step: forward and backward over micro-batches, with gradients summed over ranks.

train.py calls `agree_micro_batches` and `rebuild_buckets` before the first step, and `train_step`
for each step.
"""

import contextlib
from typing import ContextManager, Iterator, List, Sequence, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contract.errors import UserError
from contract.options import OPTIMIZERS
from contract.split import SMALLEST, StepShape, micro_batches, step_shape

from .build import Job
from .data.batch import Batch, derive_seed, mix_images, plan_mix
from .memory import OutOfMemory, detect_out_of_memory
from .precision import weights_of


def shape_of(job: Job, sizes: Sequence[int]) -> StepShape:
    """Return how this rank computes a step (contract/split.py). `sizes`: the samples of each rank
    in the step."""
    return step_shape(sizes, job.world.rank, job.micro_batches, job.options.sync_bn)


def train_step(job: Job, batch: Batch, step: int, lr: float) -> torch.Tensor:
    """Train on this rank's share of the step with the global number `step`, from 0.

    Returns the sums of the loss and of the hits over this rank's samples: a tensor (2) on the
    device, without an autograd graph. Waits for the device only with a loss scale."""
    clock = job.clock
    clock.enter("h2d")
    images, targets = batch.copy_to(job.world.device)
    clock.enter("optimizer")
    seed_step(job, step)
    for group in job.optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    # Gradients become None, not zero: the optimizer skips weights that get no gradient.
    job.net.zero_grad(set_to_none=True)
    shape = shape_of(job, batch.sizes)
    with frozen_batch_norm(job.norms, shape.running_statistics):
        tally = _sum_gradients(job, images, targets, batch.global_count, shape.micro, step)
    clock.enter("optimizer")
    is_skipped = job.precision.step(job.optimizer, job.options.clip_grad_norm)
    # A skipped step has not changed the weights: the average would count them twice. `is_skipped`
    # comes last, because it may be a tensor on the device, for whose value the host then waits.
    if job.ema is not None and (step + 1) % job.options.ema_every == 0 and not is_skipped:
        job.ema.update(job.precision.live_state(job.model))
    clock.enter("other")
    return tally


def seed_step(job: Job, step: int) -> None:
    """Seed dropout by step and rank. A resumed run then draws the same numbers in each step."""
    seed = derive_seed("dropout", job.options.seed, step, job.world.rank)
    # torch.manual_seed would seed the same generators, but search for devices in each step.
    torch.default_generator.manual_seed(seed)
    if job.world.device.type == "cuda":
        generators = torch.cuda.default_generators
        # With dp one process computes on all GPUs of its machine.
        if job.options.parallel == "ddp":
            generators = (generators[job.world.device.index],)
        for generator in generators:
            generator.manual_seed(seed)


def _sum_gradients(
    job: Job, images: torch.Tensor, targets: torch.Tensor, count: int, sizes: List[int], step: int
) -> torch.Tensor:
    """Sum the gradients of loss / `count` over micro-batches of `sizes` samples. `count`: the
    samples of all ranks in this step. `step`: its global number, from which the mix is drawn.
    Returns the sums of loss and hits over this rank's samples: a tensor (2)."""
    # The peers also wait for a rank without samples, whose gradients are zero. One image is enough:
    # `train_step` has frozen batch normalisation.
    if not sizes:
        job.clock.enter("forward")
        dummy_pass(job, job.net, 1, is_last=True)
        return torch.zeros(2, device=job.world.device)
    mix = plan_mix(job.options, images.shape[-1], step, job.world.rank)
    # Each image may be mixed with its neighbour in the batch. Neighbours stay bytes here, so that
    # only one micro-batch at a time is converted to floats.
    neighbours = images if mix is None else images.roll(1, 0)
    tallies = []  # a tensor (2) for each micro-batch: loss and hits
    columns = (images, neighbours, targets, targets.roll(1, 0))
    # `both_targets` are the classes of a micro-batch's images, and of their neighbours.
    chunks = list(zip(*(column.split(sizes) for column in columns)))
    for number, (chunk_images, chunk_neighbours, *both_targets) in enumerate(chunks):
        is_last = number == len(chunks) - 1
        with local_only(job.net, not is_last):
            job.clock.enter("forward")
            inputs = job.normalise(chunk_images)
            if mix is not None:
                inputs = mix_images(inputs, job.normalise(chunk_neighbours), mix)
            with job.precision.computing():
                outputs = job.net(inputs)
            # The loss sums exponentials, which overflow in fp16.
            if outputs.dtype is not torch.float64:
                outputs = outputs.float()
            loss = job.loss(outputs, both_targets, mix)
            job.clock.enter("backward")
            # DDP divides the sum of the ranks' gradients by the number of ranks. With this factor
            # the result is the mean over samples, though ranks may have different shares.
            mean_loss = loss * job.world.size / count
            job.precision.backward(mean_loss, is_last)
        # A mixed image counts as a hit for the class of its larger part.
        main_targets = both_targets[0] if mix is None or mix.weight >= 0.5 else both_targets[1]
        hits = (outputs.detach().argmax(1) == main_targets).sum()
        tallies.append(torch.stack([loss.detach(), hits.to(loss.dtype)]))
    return torch.stack(tallies).sum(0)


def dummy_pass(
    job: Job, net: nn.Module, count: int, is_last: bool = False, unseen: bool = False
) -> None:
    """Run forward and backward of `count` blank images through `net`: the job's net, or the model
    within it. All gradients are zero.

    `is_last`: this is the last backward of a step that the loss scale counts. `unseen`: the weights
    get no gradients, so DDP's hooks do not run. (The hooks are attached to the weights, and would
    run even if only the inner model is called.)"""
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
        job.precision.backward(loss, is_last)


@contextlib.contextmanager
def keep_buffers(job: Job) -> Iterator[None]:
    """Restore the model's buffers at the end of the block, and remove its gradients."""
    buffers = {name: buffer.clone() for name, buffer in job.model.named_buffers()}
    try:
        yield
    finally:
        job.net.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in job.model.named_buffers():
                buffer.copy_(buffers[name])


@contextlib.contextmanager
def frozen_batch_norm(norms: List[nn.Module], on: bool) -> Iterator[None]:
    """Make batch normalisation use its running statistics, unchanged, within the block."""
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
    """Accumulate gradients within the block on this rank, without communication."""
    if on and isinstance(net, DistributedDataParallel):
        return net.no_sync()
    return contextlib.nullcontext()


def _dummy_sizes(job: Job) -> List[int]:
    """Return the number of images of each dummy pass. The list is equally long on all ranks."""
    # With --compile, the passes have the sizes of an epoch's micro-batches, so that torch compiles
    # for each size before the first step.
    if not job.options.compile:
        return [SMALLEST]
    images_per_step = len(job.train_set) // job.steps_per_epoch
    # The steps of an epoch differ by at most one image.
    counts = {min(images_per_step + extra, job.world.global_batch) for extra in (0, 1)}
    steps = [job.world.rank_samples(count) for count in sorted(counts)]
    # A rank without images in such a step runs a pass, too, because its peers wait for this rank.
    micro_sizes = [shape_of(job, sizes).micro or [SMALLEST] for sizes in steps]
    # The micro-batches of a step differ by at most one image.
    return [size for sizes in micro_sizes for size in (min(sizes), max(sizes))]


def rebuild_buckets(job: Job) -> None:
    """Run two dummy passes, which change nothing that training sees. Collective.

    DDP rebuilds its buckets in its second forward, and then sums in another order. Without the
    first pass, the first step after a resume would differ from the same step of a run that was
    never stopped. The rebuilding is a collective. Without the second pass, a rank that has no image
    in the first step would not rebuild, and the other ranks would wait. Raises UserError for
    parameters without a gradient, for which DDP would wait.

    Before these passes, each rank runs a local pass, and then all ranks meet. The first pass may
    compile, which takes longer on one rank than on another. The other ranks wait for this in the
    meeting, and not in a collective with --timeout. Batch normalisation over ranks is switched off
    in the local pass, since its statistics are collectives. With --static_graph, the local pass
    uses the model inside DDP, unseen: DDP counts how often each weight gets a gradient up to the
    end of its first backward. DDP would also count the local pass, then expect as many gradients in
    each step, and sum nothing.
    """
    with keep_buffers(job), detect_out_of_memory():
        if job.world.exchange is not None:
            static_graph = job.options.static_graph
            local_net = cast(nn.Module, job.net.module if static_graph else job.net)
            with local_only(local_net, True), frozen_batch_norm(job.norms, job.options.sync_bn):
                for size in _dummy_sizes(job):
                    dummy_pass(job, local_net, size, unseen=static_graph)
            job.net.zero_grad(set_to_none=True)
            job.world.exchange.meet()
        if job.attached is None:
            _make_two_passes(job)
        else:
            job.attached.warm_up_buckets(lambda: _make_two_passes(job))


def _make_two_passes(job: Job) -> None:
    """Run the two passes of `rebuild_buckets` that need all ranks. With --compile, the first pass
    consists of one pass for each size. Raises UserError for a parameter that gets no gradient."""
    for size in _dummy_sizes(job):
        dummy_pass(job, job.net, size)
    # In the second pass, DDP would wait for the gradient of such a parameter.
    weights = job.model.named_parameters()
    unused = [name for name, p in weights if p.requires_grad and p.grad is None]
    if unused and job.world.size > 1 and not job.options.find_unused_parameters:
        raise UserError(
            f"the model's output does not depend on {unused[0]} (one of {len(unused)} such "
            "parameters), so the ranks would wait for its gradient forever: add "
            "--find_unused_parameters."
        )
    dummy_pass(job, job.net, _dummy_sizes(job)[-1])


def agree_micro_batches(job: Job) -> None:
    """Set the job's `micro_batches` to the smallest number that fits into the memory of all ranks.
    Collective.

    Ranks do this only with --auto_batch, and on GPUs with --balance, because a fast machine may
    then get more images than --per_node_batch_size. A trial pass contains no collectives, since a
    rank that runs out of memory would not enter them: batch normalisation over ranks is off.
    """
    is_balanced = bool(job.options.balance) and job.world.device.type == "cuda"
    if not job.options.auto_batch and not is_balanced:
        return
    samples = job.world.batches[job.world.rank]  # of this rank in a full step
    number = job.micro_batches
    with frozen_batch_norm(job.norms, job.options.sync_bn):
        # If not even SMALLEST samples fit, training runs out of memory and reports it.
        while not _fits(job, max(micro_batches(samples, number))) and samples // number > SMALLEST:
            number *= 2
    job.micro_batches = max(job.world.gather(number))


def _fits(job: Job, size: int) -> bool:
    """Return whether forward and backward of `size` images fit into the memory, besides the memory
    that later steps allocate."""
    try:
        with keep_buffers(job), detect_out_of_memory():
            reserve = reserve_bytes(job) if job.world.device.type == "cuda" else 0
            # The ballast takes the memory that later steps allocate.
            ballast = torch.empty(reserve, dtype=torch.uint8, device=job.world.device)
            dummy_pass(job, job.model, size)
            del ballast
    except OutOfMemory:
        return False
    return True


def reserve_bytes(job: Job) -> int:
    """Return the bytes of GPU memory that a trial pass must leave free."""
    # The optimizer and the strategy allocate at their first step; masters and average exist
    # already. For each weight, the optimizer keeps `copies` tensors of the weight's size.
    copies = len(OPTIMIZERS[job.options.optimizer].keeps(job.options))
    weights = weights_of(job.optimizer)
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    gradient_bytes = sum(weight.numel() for weight in weights) * 4  # as fp32
    strategy_bytes = gradient_bytes * job.sync.state_copies if job.sync is not None else 0
    total_bytes = torch.cuda.get_device_properties(job.world.device).total_memory
    # A twentieth of the memory is lost to fragmentation.
    return copies * weight_bytes + int(strategy_bytes) + int(total_bytes) // 20
