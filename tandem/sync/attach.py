"""Sum the gradients of any DDP model with one of our strategies.

    ddp = DistributedDataParallel(model)
    tandem.sync.attach(ddp, "ef:5", optimizer=optimizer)

The loop reports nothing to us. A step is all backwards that sum gradients before one optimizer
step, and the first bucket of the next backward closes it. `SumUsage` finds out which sums the
optimizer used. The received sums show whether gradients overflowed.

DDP's C++ part owns the hook and its `Attached`, and no garbage collector looks into that part.
`Attached` therefore refers to its model weakly. Threads and process groups end with the model.
"""

import os
import re
import sys
import weakref
from datetime import timedelta
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel

from contract import prices
from contract.errors import UserError
from contract.strategies import ADAM, ATTACHED, AUTO, EXACT, SGD, parse, usages

from ..balance import StepWeights
from ..compat import find_timeout
from ..coordinates import host_name, number_machines, read_coordinates
from ..exchange import Exchange
from ..sums import SUMS
from .base import ALL_USED, Future, Sync, Topology, sum_over_ranks
from .carrier import PeerLost
from .kinds import effective_spec, family_of, make
from .unsummed import UnsummedSteps, watch_steps
from .usage import SumUsage

# torch raises RuntimeError for everything. These words are in its messages about a lost peer.
LOST_PEER = "gloo|NCCL|[Tt]imed out|Connection (closed|reset)"
SHARDED = ("FullyShardedDataParallel", "FSDPModule")

# For `find_attached`, because old torches do not list a model's hooks.
_BY_MODEL: "weakref.WeakKeyDictionary[Any, Attached]" = weakref.WeakKeyDictionary()


class Attached:
    """A strategy that averages the gradients of one DDP model."""

    # `connect` sets these.
    sync: Sync
    device: torch.device
    effective_spec: str
    hosts: List[str]  # by rank
    usage: Optional[SumUsage] = None  # only for strategies that keep rounding errors
    world = 0  # ranks

    def __init__(
        self,
        spec: str,
        warmup_steps: int = 0,
        scaler: Any = None,
        patience: Optional[float] = None,
        machines: Optional[Sequence[int]] = None,
        optimizer: Any = None,
    ) -> None:
        """Check the arguments of `attach`. Raises UserError."""
        if spec == AUTO:
            raise UserError(
                f"{ATTACHED} auto: the best strategy depends on the step time and on the network, "
                "which only a run measures. Time the loop with tandem.timings and start it with "
                "`make train SCRIPT=train.py`: the report recommends a strategy. "
                f"Here choose one of {usages()}."
            )
        parse(spec, ATTACHED)
        if type(warmup_steps) is not int or warmup_steps < 0:
            raise UserError(
                f"{ATTACHED}: warmup_steps must be a whole number, 0 or greater, not "
                f"{warmup_steps!r}."
            )
        self.spec, self.warmup_steps, self.scaler = spec, warmup_steps, scaler
        self.patience, self.machines, self.family = patience, machines, family_of(optimizer)
        self._optimizer = optimizer  # until `connect`
        # Called in backward once the last bucket is handed over: from then on backward only waits.
        self.on_last_bucket: Callable[[], None] = lambda: None
        self.say: Callable[[str], None] = lambda note: print(note, file=sys.stderr, flush=True)
        self._printed_notes: Set[str] = set()
        self.scaled_spec = parse(spec).of(self.family).spec  # with the scale that `auto` means
        self.steps = 0  # begun, without the pass of `warm_up_buckets`
        self.exact = True  # in the last step
        self._loss_scale: Optional[float] = None  # of the next step, if a forward has read it
        self._step_weights, self._weight = StepWeights(), 1.0  # of this rank's gradients
        self._sums: List[Future] = []  # of this step's buckets
        self._buckets_are_ordered = False  # DDP orders its buckets by the first backward
        self._in_blank_pass = False
        self._model: Callable[[], Any] = lambda: None
        self._unsummed: Optional[UnsummedSteps] = None
        self._finalizer: Optional[Callable[[], Any]] = None  # from `connect` to `detach`

    def __reduce__(self) -> Tuple[Any, ...]:
        """Copy or save the arguments only: a copied model has no process groups, and DDP sums."""
        return Attached, (self.spec, self.warmup_steps)

    def connect(self, device: torch.device, group: Any, model: Any = None) -> None:
        """Agree with the other ranks, and start threads and process groups, which end with the
        model or, if that is unknown, with this object. Collective. Raises UserError."""
        if self.patience is None:
            self.patience = find_timeout(group, device).total_seconds()
        exchange = Exchange(timedelta(seconds=self.patience))
        self.world, self.device = exchange.size, device
        SUMS.share(device)
        # Several nodes may run on one machine, so the launcher's number comes before the name.
        process = read_coordinates(os.environ)
        host = host_name(os.environ)
        machine = host if process.node is None else str(process.node)
        if self.machines is not None:
            if len(self.machines) != self.world:
                raise UserError(
                    f"{ATTACHED}: machines has {len(self.machines)} numbers, but the run has "
                    f"{self.world} ranks: pass one machine number for each rank."
                )
            machine = str(self.machines[exchange.rank])
        ranks = exchange.json([machine, host, self.scaled_spec, self.warmup_steps])
        arguments = {(spec, steps) for _, _, spec, steps in ranks}
        if len(arguments) > 1:
            variants = ", ".join(sorted(f"{spec!r} after {n} exact steps" for spec, n in arguments))
            raise UserError(
                f"{ATTACHED}: the ranks passed different arguments ({variants}): "
                "pass the same strategy, optimizer class and warmup_steps on each rank."
            )
        nodes = number_machines([machine for machine, *_ in ranks])
        self.hosts = [str(host) for _, host, *_ in ranks]
        self.effective_spec = EXACT
        if self.world > 1:
            self.effective_spec = effective_spec(self.spec, nodes, self.family)
        self.sync = make(self.effective_spec, self.patience)
        topology = Topology(nodes, exchange.rank).connect(self.patience)
        self.sync.setup(device, topology)
        # `setup` may compile kernels for longer than a step may wait; the exchange waits longer.
        exchange.meet()
        exchange.end()
        if self.sync.strategy.rule.warms:  # only these keep rounding errors
            self.usage = SumUsage(self._optimizer)
        self._optimizer = None
        # A finalizer of this object must not refer to it: the object would live forever.
        owner, release = (self, self.sync.end) if model is None else (model, self._release)
        finalizer = weakref.finalize(owner, release)
        finalizer.atexit = False  # threads and connections end with the process anyway
        self._finalizer = finalizer
        if model is not None:
            self._model = weakref.ref(model)
            self._unsummed = watch_steps(model)
            if self.scaler is not None:
                model.register_forward_pre_hook(self._read_scale_early)

    def register(self, model: DistributedDataParallel) -> None:
        """Average the model's gradients from the next backward on. Collective. Raises UserError."""
        check_model(model)
        self.connect(model.device, model.process_group, model)
        try:
            model.register_comm_hook(self, average_bucket)
        except RuntimeError as error:
            self.detach()
            raise UserError(
                f"{ATTACHED}: this model already has a communication hook, and DDP cannot replace "
                "it: remove the other register_comm_hook call, or wrap the inner model in a new "
                "DistributedDataParallel."
            ) from error
        _BY_MODEL[model] = self

    def _release(self) -> None:
        self.sync.end()
        del self.sync
        self.usage = None

    def _read_scale_early(self, model: Any, inputs: Any) -> None:
        """Read the loss scale before forward. Reading may wait for the GPU, and would leave the GPU
        idle in the middle of backward."""
        if self._finalizer and torch.is_grad_enabled() and model.require_backward_grad_sync:
            self._loss_scale = self._read_scale()

    def _read_scale(self) -> float:
        follows = self.scaler is not None and self.sync.follows_scale
        return float(self.scaler.get_scale()) if follows else 1.0

    def average(self, bucket: dist.GradBucket) -> Future:
        """Begin to average a bucket over all ranks; the future holds a tensor like its buffer."""
        if bucket.index() == 0:  # DDP hands over this bucket first
            if self._unsummed is not None:
                self._unsummed.reset()
            self._begin_step(bucket.buffer().device)
        if self.usage is not None:
            self.usage.watch(bucket.parameters())
        if self._weight != 1.0:
            bucket.buffer().mul_(self._weight)
        if self._finalizer:
            SUMS.enter(bucket.index())
            mean = self.sync.hook(bucket)
        else:  # DDP cannot remove a hook, so a detached one sums as DDP would
            mean = allreduce_hook(_get_default_group(), bucket)
        self._sums.append(mean)
        if bucket.is_last():
            self.on_last_bucket()
            # Queued before DDP's own wait, which would hide the exception of a lost peer.
            Variable._execution_engine.queue_callback(self._wait)
        return mean

    def _begin_step(self, device: torch.device) -> None:
        """Close the step before this first bucket, and choose whether the next one is exact."""
        if not self.world:  # `hook` was used: the ranks meet in the first backward
            self.connect(device, _get_default_group())
        scale, self._loss_scale = self._loss_scale, None
        self._sums = []
        self._weight = 1.0 if self._in_blank_pass else self._step_weights.next()
        if self._in_blank_pass:  # a strategy sums exactly before its first `begin`
            self._buckets_are_ordered = True
            return
        if scale is None and self._finalizer:
            scale = self._read_scale()
        usage, unused, is_uncertain = self.usage, ALL_USED, False
        if usage is None:
            self.steps += 1
        else:
            # A GradScaler that lowered its scale has skipped the optimizer step.
            unused = usage.close(skipped=scale is not None and scale < self.sync.scale)
            self.steps += not usage.in_step
            self._print_once(describe_unused_sums(usage))
            # Rounding errors may be kept only if it is known which sums the optimizer used.
            is_uncertain = usage.saw_partial_step or (usage.dropped_sums > 0 and not usage.saw_step)
        # DDP makes other buckets after the first backward, so its errors would fit none of them.
        is_first = not self._buckets_are_ordered
        self.exact = is_first or self.steps <= self.warmup_steps or is_uncertain
        self._buckets_are_ordered = True
        if self._finalizer:
            self.sync.begin(scale or 1.0, self.exact, unused)
            self._print_once(self.sync.note)

    def _print_once(self, note: Optional[str]) -> None:
        if note and note not in self._printed_notes and dist.get_rank() == 0:
            self._printed_notes.add(note)
            self.say(note)

    def _wait(self) -> None:
        """Wait for this backward's sums. Raises RuntimeError if a peer is lost."""
        sums, self._sums = self._sums, []
        if self.usage is not None and not self._in_blank_pass:
            # Queued behind DDP's own callback, which writes the sums into the gradients.
            Variable._execution_engine.queue_callback(self.usage.note_sums)
        try:
            for total in sums:
                total.wait()
        except RuntimeError as error:
            if not re.search(LOST_PEER, str(error)):
                raise
            peer = "another rank"
            if isinstance(error, PeerLost):
                peer = f"{self.hosts[error.rank]} (rank {error.rank})"
            if "imed out" in str(error):
                raise RuntimeError(
                    f"{ATTACHED}: step {self.steps}: {peer} sent nothing for {self.patience:g} s: "
                    f"its process hangs, or the network is interrupted ({error})."
                ) from error
            raise RuntimeError(
                f"{ATTACHED}: step {self.steps}: the connection to {peer} was lost: look for the "
                f"first error in that rank's output ({error})."
            ) from error

    def detach(self) -> None:
        """End threads, memory and connections; from the next step on DDP sums exactly. Collective,
        between two steps."""
        if self._finalizer is not None:
            # No rank may end its groups while another one still sums.
            sum_over_ranks(torch.zeros(1, device=self.device)).wait()
            self._finalizer()
            self._finalizer = None
            vars(self).pop("sync", None)

    def warm_up_buckets(self, closure: Callable[[], Any]) -> None:
        """Run a forward and a backward without effect, so that DDP orders its buckets before the
        first step. `closure` calls the DDP model on any images, and backward on the outputs.
        Without this call the first step is exact instead, and a resumed run sums its first step in
        another order than an uninterrupted run. Buffers and random numbers are restored, and
        gradients dropped. Collective. Raises UserError."""
        if self._buckets_are_ordered:
            raise UserError(
                f"{ATTACHED}: call warm_up_buckets(closure) before the first backward: now DDP has "
                "ordered its buckets."
            )
        model = self._model()
        if model is None:
            raise UserError(
                f"{ATTACHED}: warm_up_buckets(closure) needs the model, which hook() does not "
                "know: use attach instead."
            )
        device = model.device
        buffers = [(buffer, buffer.clone()) for buffer in model.module.buffers()]
        self._in_blank_pass = True
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                closure()
        finally:
            self._in_blank_pass = False
            model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for buffer, saved_values in buffers:
                    buffer.copy_(saved_values)
        if not self._buckets_are_ordered:
            raise UserError(
                f"{ATTACHED}: the function passed to warm_up_buckets ran no backward pass "
                "that sums gradients: in this function, call the DDP model, not the inner "
                "model, and not within no_sync()."
            )

    @property
    def at_work(self) -> bool:
        """Return whether ranks are connected: after `connect`, before `detach`."""
        return "sync" in vars(self)

    def _check_has_state(self) -> None:
        if not self.at_work or self._model() is None:
            raise UserError(
                f"{ATTACHED}: there is no state: hook() made this object, detach() was "
                "called, or the model was deleted. Use attach() instead of hook(), keep a "
                "reference to the model, and save or load the state before you call detach()."
            )

    def state_dict(self) -> Dict[str, Any]:
        """Return this rank's state: tensors and plain containers, to be saved in one file per rank.
        It fits a run with the same ranks on each machine. Raises UserError."""
        self._check_has_state()
        self.sync.settle(ALL_USED if self.usage is None else self.usage.find_unused())
        return {
            ATTACHED: 1,  # must be the first key: the launcher recognizes such files by it
            "spec": self.scaled_spec,
            "nodes": list(self.sync.topology.nodes),
            "steps": self.steps,
            "sync": self.sync.state_dict(),
            "common": self.sync.common_state(self._model().module),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises UserError, and then changes nothing, if the
        state does not fit this run."""
        self._check_has_state()
        if not isinstance(state, dict):
            raise UserError(
                f"{ATTACHED}: the state is a {type(state).__name__}, not a dict: load what "
                "state_dict() returned."
            )
        saved = state.get("spec"), state.get("nodes")
        current = self.scaled_spec, list(self.sync.topology.nodes)
        # Compared as text: a damaged file may hold tensors, whose comparison returns no bool.
        if repr(saved) != repr(current):
            raise UserError(
                f"{ATTACHED}: the state belongs to {saved[0]!r} with the machines "
                f"{saved[1]!r} of its ranks, but this run uses {current[0]!r} with the "
                f"machines {current[1]!r}: start without this state; the stored rounding "
                "errors are then lost."
            )
        module, steps = self._model().module, state.get("steps")
        common_before = self.sync.common_state(module)
        try:
            if type(steps) is not int or steps < 0:
                raise ValueError("no valid number of steps")
            if "sync" not in state:
                raise ValueError("no entry 'sync'")
            if state["sync"] is not None:
                if common_before is not None:
                    self.sync.load_common_state(module, state["common"])
                self.sync.load_state_dict(state["sync"])
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            # Each of the two calls changes nothing if it fails, but the first may have succeeded.
            if common_before is not None:
                self.sync.load_common_state(module, common_before)
            raise UserError(
                f"{ATTACHED}: the state is damaged ({error}): load another checkpoint."
            ) from error
        self.steps = steps


def attach(
    model: DistributedDataParallel,
    spec: str,
    warmup_steps: int = 0,
    scaler: Any = None,
    patience: Optional[float] = None,
    machines: Optional[Sequence[int]] = None,
    optimizer: Any = None,
) -> Attached:
    """Average this model's gradients with a strategy from the next backward on. Collective.

    `spec`: a strategy of `--sync`, such as ef:5 or bf16 (docs/slow-networks.md).
    `warmup_steps`: the number of steps with exact sums. The first backward is always exact, and so
    is each step if `attach` cannot know which sums an optimizer uses. Rounding errors of sums that
    no step uses are dropped.
    `scaler`: the GradScaler that scales the loss.
    `patience`: the seconds until a silent peer is an error; by default DDP's own timeout.
    `machines`: each rank's machine number; by default where it runs. `ef` works between machines,
    so machines=range(world size) shows its effect on a single PC.
    `optimizer`: the object that steps the weights; `attach` then sees its steps. `ef` scales by the
    block's peak for SGD, and by each value's own scale otherwise.

    Adam and similar optimizers learn less with ef's peak scale (docs/slow-networks.md, "With
    Adam"): rank 0 then prints a warning to stderr. Raises UserError if something cannot work."""
    attached = Attached(spec, warmup_steps, scaler, patience, machines, optimizer)
    attached.register(model)
    if dist.get_rank() == 0:
        notes = (
            describe_single_machine(attached),
            describe_scale(attached, optimizer),
            describe_adam_cost(attached),
        )
        for note in filter(None, notes):
            attached.say(note)
    return attached


def hook(
    spec: str,
    warmup_steps: int = 0,
    scaler: Any = None,
    patience: Optional[float] = None,
    machines: Optional[Sequence[int]] = None,
    optimizer: Any = None,
) -> Tuple[Attached, Callable[[Attached, dist.GradBucket], Future]]:
    """Return what `attach` registers, as (state, hook), for a library that makes the DDP model:
    `model.register_comm_hook(*hook("ef:5"))`. The ranks meet in the first backward. The state does
    not know the model, so `warm_up_buckets` and `state_dict` raise UserError, and `scaler` is read
    within backward. Raises UserError."""
    return Attached(spec, warmup_steps, scaler, patience, machines, optimizer), average_bucket


def average_bucket(state: Attached, bucket: dist.GradBucket) -> Future:
    """Call `state.average`. DDP takes a function, and saves it with the model by its name."""
    return state.average(bucket)


def describe_single_machine(attached: Attached) -> Optional[str]:
    """Return a note if a strategy for several machines runs on one, where it sums exactly."""
    spec = attached.spec
    if attached.effective_spec != EXACT or parse(spec).exact or attached.world == 1:
        return None
    return (
        f"{ATTACHED}: all {attached.world} ranks run on one machine, where {spec} sums exactly. "
        f"To try {spec} here, pass machines=range({attached.world}): each rank then counts as a "
        "machine."
    )


def describe_scale(attached: Attached, optimizer: Any) -> Optional[str]:
    """Return a note if the scale of `ef` was chosen without knowing the kind of optimizer."""
    spec = attached.effective_spec
    if spec in (attached.spec, EXACT) or attached.family is not None:
        return None
    sgd_spec = parse(attached.spec).of(SGD).spec
    if optimizer is None:
        return (
            f"{ATTACHED}: no optimizer= was passed, so {attached.spec} means {spec}, which Adam "
            f"and similar optimizers need. For SGD pass the optimizer, or choose {sgd_spec}."
        )
    return (
        f"{ATTACHED}: {type(optimizer).__name__} is not a known optimizer, so {attached.spec} "
        f"means {spec}, which Adam and similar optimizers need. If it works like SGD, choose "
        f"{sgd_spec}."
    )


def describe_unused_sums(usage: SumUsage) -> Optional[str]:
    """Return a note on sums that no step used, or whose use is unknown."""
    if usage.saw_partial_step:
        return (
            f"{ATTACHED}: an optimizer step changed some weights of this model and skipped others "
            "that have gradients. Sums are exact from now on, because it is unknown which "
            "gradients were used. Wrap the weights of each optimizer in a separate "
            "DistributedDataParallel."
        )
    if usage.saw_step and usage.dropped_sums:
        return (
            f"{ATTACHED}: gradients of this model were summed, and then zeroed before a step used "
            "them. Their rounding errors are dropped. If the loop uses copies of the gradients, "
            f"choose {EXACT}."
        )
    # Only from the second time on: the first may be a trial before the loop.
    if usage.dropped_sums > 1:
        return (
            f"{ATTACHED}: gradients of this model were zeroed, and attach saw no optimizer step "
            "that used them. Sums are exact until it sees one. Name what steps the weights: "
            "attach(..., optimizer=optimizer)."
        )
    return None


def describe_adam_cost(attached: Attached) -> Optional[str]:
    """Return a note if the strategy is not labelled safe for Adam and the optimizer is not SGD."""
    strategy = parse(attached.effective_spec)
    is_safe = not strategy.rule.warms or prices.is_acceptable(strategy, ADAM)
    if attached.family == SGD or is_safe:
        return None
    return (
        f"{ATTACHED}: accuracy of {strategy.spec} with Adam and similar optimizers: "
        f"{prices.with_adam(strategy)} (docs/slow-networks.md). {EXACT} sums exactly."
    )


def find_attached(model: Any) -> Optional[Attached]:
    """Return what averages this model's gradients now; None if DDP does it."""
    # The model's hooks come first: a library may have registered the hook of `hook`.
    hooks = getattr(model, "_comm_hooks", ())  # which old torches do not list
    states = [state for _, state in hooks if isinstance(state, Attached)]
    attached = states[0] if states else _BY_MODEL.get(model)
    return attached if attached is not None and attached.at_work else None


def check_model(model: Any) -> None:
    """Raise UserError if no strategy can sum this model's gradients."""
    # By name, because old torches have only one of these classes.
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if kinds & set(SHARDED):
        raise UserError(
            f"{ATTACHED}: this model is wrapped in FSDP, which gives each rank a part of the "
            "gradients. Wrap it in DistributedDataParallel instead, if it fits into the memory of "
            "one GPU."
        )
    if not isinstance(model, DistributedDataParallel):
        raise UserError(
            f"{ATTACHED}: this model is a {type(model).__name__}, not a DistributedDataParallel. "
            "Wrap it first, ddp = torch.nn.parallel.DistributedDataParallel(model), and pass ddp."
        )
    for name, module in model.named_modules():
        # torch's embeddings have this attribute.
        if getattr(module, "sparse", False) is True:
            raise UserError(
                f"{ATTACHED}: layer {name.removeprefix('module.')!r} has sparse gradients, which "
                "no strategy supports: create the layer with sparse=False."
            )
    group_size, world_size = dist.get_world_size(model.process_group), dist.get_world_size()
    if group_size != world_size:
        raise UserError(
            f"{ATTACHED}: this model's process group has {group_size} of {world_size} ranks, but "
            "strategies sum over all ranks: create the DDP model without process_group."
        )
