"""Sum the gradients of any DDP model with one of our strategies.

    ddp = DistributedDataParallel(model)
    tandem.sync.attach(ddp, "ef:5", optimizer=optimizer)

Scripts call `attach`; the trainer makes an `Attached` itself. This file decides when a step begins,
and whether the step sums exactly. The strategy (base.py) does the sums.

The loop does not report its steps to `Attached`. A step is all backwards that sum gradients before
one optimizer step. The first bucket of the next backward closes the step. `SumUsage` finds out
which sums the optimizer used. The received sums show whether gradients overflowed.

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
from contract.strategies import ADAM, ATTACHED, AUTO, EXACT, SGD, list_usages, parse

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

# torch raises RuntimeError for everything, so its message must show that a peer was lost:
#   [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41234
#   Timed out waiting 120000ms for recv operation to complete
LOST_PEER = "gloo|NCCL|[Tt]imed out|Connection (closed|reset)"
SHARDED = ("FullyShardedDataParallel", "FSDPModule")  # FSDP's classes in old and in new torches

# For `find_attached`, because old torches do not list a model's hooks.
_BY_MODEL: "weakref.WeakKeyDictionary[Any, Attached]" = weakref.WeakKeyDictionary()


class Attached:
    """A strategy that averages the gradients of one DDP model.

    `spec` is the strategy as the script typed it: "ef:5". `scaled_spec` also has the scale that the
    optimizer needs: "ef:5:own". `effective_spec` is what the ranks do: "allreduce" on one machine.
    """

    # `connect` sets these.
    sync: Sync
    device: torch.device
    effective_spec: str
    hosts: List[str]  # by rank
    usage: Optional[SumUsage] = None  # only for strategies that keep rounding errors
    world = 0  # the number of ranks; 0 before `connect`

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
                f"Here choose one of {list_usages()}."
            )
        parse(spec, ATTACHED)
        if type(warmup_steps) is not int or warmup_steps < 0:
            raise UserError(
                f"{ATTACHED}: warmup_steps must be a whole number, 0 or greater, not "
                f"{warmup_steps!r}."
            )
        self.spec, self.warmup_steps, self.scaler = spec, warmup_steps, scaler
        self.patience, self.machines, self.family = patience, machines, family_of(optimizer)
        self._optimizer = optimizer  # until `connect`, which passes it to `SumUsage`
        # Called in backward once the last bucket is handed over: from then on backward only waits.
        self.on_last_bucket: Callable[[], None] = lambda: None
        self.say: Callable[[str], None] = lambda note: print(note, file=sys.stderr, flush=True)
        self._printed_notes: Set[str] = set()
        self.scaled_spec = parse(spec).for_family(self.family).spec
        self.steps = 0  # begun so far; the pass of `warm_up_buckets` does not count
        self.exact = True  # whether the newest step sums exactly
        self._loss_scale: Optional[float] = None  # of the next step, if a forward has read it
        # Ranks with more samples count more: `average` multiplies gradients by this rank's weight.
        self._step_weights, self._rank_weight = StepWeights(), 1.0
        self._bucket_sums: List[Future] = []  # of this step's buckets
        self._buckets_are_ordered = False  # DDP orders its buckets by the first backward
        self._in_dummy_pass = False  # `warm_up_buckets` runs
        self._model: Callable[[], Any] = lambda: None  # a weak reference, from `connect` on
        self._unsummed: Optional[UnsummedSteps] = None
        # Ends the strategy. Set from `connect` to `detach`; without it `average` sums as DDP would.
        self._finalizer: Optional[Callable[[], Any]] = None

    def __reduce__(self) -> Tuple[Any, ...]:
        """Copy or save two of the arguments only. A copied model has no process groups and no hook,
        so DDP itself sums the copy's gradients."""
        return Attached, (self.spec, self.warmup_steps)

    def connect(self, device: torch.device, group: Any, model: Any = None) -> None:
        """Agree with the other ranks, and start threads and process groups. They end with the
        model, or with this object if `model` is None. Collective. Raises UserError."""
        if self.patience is None:
            self.patience = find_timeout(group, device).total_seconds()
        exchange = Exchange(timedelta(seconds=self.patience))
        self.world, self.device = exchange.size, device
        SUMS.share(device)  # from now on the machine's guard sees which sums this rank has entered
        # Find out which ranks share a machine. Several nodes of the launcher may run on one
        # machine, so the node's number comes before the host name. The caller's numbers come first.
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
        # Ranks with different strategies would send bytes that their peers cannot decode. `ranks`:
        # such a list from each rank, in rank order.
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
        # `setup` may compile kernels for longer than `patience`, and a step would then fail. So the
        # ranks meet here first: the exchange waits for at least 30 minutes.
        exchange.meet()
        exchange.end()
        if self.sync.strategy.rule.warms:  # only such strategies keep rounding errors
            self.usage = SumUsage(self._optimizer)
        self._optimizer = None
        # Threads and groups end with the model. If the model is unknown, they end with this object.
        # The finalizer of an object must not refer to the object, or the object would live forever.
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
        """End the strategy and drop its tensors: the script may keep this object for longer."""
        self.sync.end()
        del self.sync
        self.usage = None

    def _read_scale_early(self, model: Any, inputs: Any) -> None:
        """Read the loss scale before forward. Reading may wait for the GPU, and would leave the GPU
        idle in the middle of backward."""
        if self._finalizer and torch.is_grad_enabled() and model.require_backward_grad_sync:
            self._loss_scale = self._read_scale()

    def _read_scale(self) -> float:
        """Return the loss scale, or 1 if there is none or the strategy does not need it."""
        needs_scale = self.scaler is not None and self.sync.follows_scale
        return float(self.scaler.get_scale()) if needs_scale else 1.0

    def average(self, bucket: dist.GradBucket) -> Future:
        """Begin to average a bucket over all ranks. The future holds a tensor with the shape and
        type of the bucket's buffer."""
        if bucket.index() == 0:  # DDP hands over this bucket first in each backward
            if self._unsummed is not None:
                self._unsummed.reset()
            self._begin_step(bucket.buffer().device)
        if self.usage is not None:
            self.usage.watch(bucket.parameters())
        if self._rank_weight != 1.0:
            bucket.buffer().mul_(self._rank_weight)
        if self._finalizer:
            SUMS.enter(bucket.index())
            mean = self.sync.hook(bucket)
        else:  # after `detach`: DDP cannot remove this hook, so the hook sums as DDP would
            mean = allreduce_hook(_get_default_group(), bucket)
        self._bucket_sums.append(mean)
        if bucket.is_last():
            self.on_last_bucket()
            # Queued before DDP's own wait, which would hide the exception of a lost peer.
            Variable._execution_engine.queue_callback(self._wait_for_sums)
        return mean

    def _begin_step(self, device: torch.device) -> None:
        """Close the last step, and choose whether the step that begins now sums exactly."""
        if not self.world:  # `hook` was used: the ranks meet in the first backward
            self.connect(device, _get_default_group())
        scale, self._loss_scale = self._loss_scale, None
        self._bucket_sums = []
        self._rank_weight = 1.0 if self._in_dummy_pass else self._step_weights.next()
        # The dummy pass is no step. The strategy sums it exactly, because `begin` was never called.
        if self._in_dummy_pass:
            self._buckets_are_ordered = True
            return
        if scale is None and self._finalizer:
            scale = self._read_scale()
        usage, unused, is_uncertain = self.usage, ALL_USED, False
        if usage is None:  # each backward that sums then counts as a step
            self.steps += 1
        else:
            # A GradScaler that lowered its scale has skipped the optimizer step.
            unused = usage.close(skipped=scale is not None and scale < self.sync.scale)
            # A backward before the optimizer step adds to the same step: micro-batches.
            self.steps += not usage.in_step
            self._print_once(describe_unused_sums(usage))
            # Rounding errors may be kept only if it is known which sums the optimizer used.
            is_uncertain = usage.saw_partial_step or (usage.dropped_sums > 0 and not usage.saw_step)
        # DDP makes new buckets after the first backward. Errors of the first buckets fit none of
        # the new ones, so the first step is exact and keeps no errors.
        is_first = not self._buckets_are_ordered
        self.exact = is_first or self.steps <= self.warmup_steps or is_uncertain
        self._buckets_are_ordered = True
        if self._finalizer:
            self.sync.begin(scale or 1.0, self.exact, unused)
            self._print_once(self.sync.note)

    def _print_once(self, note: Optional[str]) -> None:
        """Print a note on rank 0, unless it is None or was printed before."""
        if note and note not in self._printed_notes and dist.get_rank() == 0:
            self._printed_notes.add(note)
            self.say(note)

    def _wait_for_sums(self) -> None:
        """Wait for this backward's sums. Raises RuntimeError if a peer is lost."""
        bucket_sums, self._bucket_sums = self._bucket_sums, []
        if self.usage is not None and not self._in_dummy_pass:
            # Queued behind DDP's own callback, which writes the sums into the gradients.
            Variable._execution_engine.queue_callback(self.usage.note_sums)
        try:
            for bucket_sum in bucket_sums:
                bucket_sum.wait()
        except RuntimeError as error:
            if not re.search(LOST_PEER, str(error)):
                raise
            # Our own exchange knows which peer was lost. torch's collectives do not say it.
            peer = "another rank"
            if isinstance(error, PeerLost):
                peer = f"{self.hosts[error.rank]} (rank {error.rank})"
            if "imed out" in str(error):  # with a large or a small T
                raise RuntimeError(
                    f"{ATTACHED}: step {self.steps}: {peer} sent nothing for {self.patience:g} s: "
                    f"its process hangs, or the network is interrupted ({error})."
                ) from error
            raise RuntimeError(
                f"{ATTACHED}: step {self.steps}: the connection to {peer} was lost: look for the "
                f"first error in that rank's output ({error})."
            ) from error

    def detach(self) -> None:
        """End threads and connections, and free memory; from the next step on DDP sums exactly.
        Call this between two steps. Collective."""
        if self._finalizer is not None:
            # No rank may end its groups while another rank still sums.
            sum_over_ranks(torch.zeros(1, device=self.device)).wait()
            self._finalizer()
            self._finalizer = None
            vars(self).pop("sync", None)  # `_release` has deleted it already, if the model is known

    def warm_up_buckets(self, closure: Callable[[], Any]) -> None:
        """Run a dummy pass, so that DDP orders its buckets before the first step. Collective.

        `closure` calls the DDP model on a batch of any content, and backward on a loss. Afterwards
        buffers and random numbers are as before, and the gradients are None. Raises UserError if
        `closure` sums no gradients, after the first backward, or for an object of `hook`.

        Without this call the first step sums exactly. A resumed run then sums its first step in
        another order than an uninterrupted run, so the last bits of the two runs differ."""
        if self._buckets_are_ordered:
            raise UserError(
                f"{ATTACHED}: call warm_up_buckets(closure) before the first backward: now DDP has "
                "ordered its buckets."
            )
        model = self._model()
        if model is None:
            raise UserError(
                "tandem.sync.hook: warm_up_buckets(closure) needs the model, which hook() does not "
                "have: call attach() instead of hook()."
            )
        device = model.device
        buffers = [(buffer, buffer.clone()) for buffer in model.module.buffers()]
        self._in_dummy_pass = True
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                closure()
        finally:
            self._in_dummy_pass = False
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
        """Raise UserError unless a strategy averages the gradients of a model that still lives."""
        if not self.at_work or self._model() is None:
            raise UserError(
                f"{ATTACHED}: there is no state: hook() made this object, detach() was "
                "called, or the model was deleted. Use attach() instead of hook(), keep a "
                "reference to the model, and save or load the state before you call detach()."
            )

    def state_dict(self) -> Dict[str, Any]:
        """Return this rank's state: tensors on the model's device, and plain containers.

        Save the state of each rank in a separate file, next to the model's. A state fits a run with
        the same ranks on each machine. Call this between two steps: sums that no optimizer step has
        used are not in the state. Raises UserError for an object of `hook`, and after `detach`."""
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
        """Restore what `state_dict` returned on this rank. Raises UserError if the state is damaged
        or belongs to another strategy or to other machines; the state of this run then stays."""
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
                f"{ATTACHED}: the state was saved by {saved[0]!r} with machines="
                f"{saved[1]!r}, but this run uses {current[0]!r} with "
                f"machines={current[1]!r}: start without this state; the stored rounding "
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
            # A call that fails changes nothing, but `load_common_state` may have succeeded before.
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

    `spec`: a strategy of `--sync`, such as "ef:5" or "bf16" (docs/slow-networks.md).
    `warmup_steps`: the number of first steps with exact sums. The first backward always sums
    exactly. Later steps also sum exactly as long as `attach` cannot know which sums an optimizer
    uses. Rounding errors of sums that no step uses are dropped.
    `scaler`: the GradScaler that scales the loss.
    `patience`: the seconds until a silent peer is an error; by default DDP's own timeout.
    `machines`: a number for each rank, the same for ranks of one machine; by default `attach` finds
    out where ranks run. `ef` codes only between machines: machines=range(world size) shows the
    effect of `ef` on a single PC.
    `optimizer`: the object whose `step` changes the weights; `attach` then sees its steps. With SGD
    `ef` scales each block by its largest value (`peak`), otherwise each value by its own scale.

    Adam and similar optimizers learn less with scale `peak` (docs/slow-networks.md, "With
    Adam"): rank 0 then prints a warning to stderr.

    Returns the object that averages; its `detach` ends the averaging. Raises UserError for an
    argument or a model that no strategy supports, and if the ranks pass different arguments. From
    then on backward raises RuntimeError if a peer is lost. feedback.py and codec.py name the papers
    behind the strategies."""
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
    `model.register_comm_hook(*hook("ef:5"))`. The arguments are those of `attach`.

    The ranks meet in the first backward. The state does not know the model: `warm_up_buckets` and
    `state_dict` raise UserError, and `scaler` is read within backward. Raises UserError for an
    argument that no strategy supports."""
    return Attached(spec, warmup_steps, scaler, patience, machines, optimizer), average_bucket


def average_bucket(state: Attached, bucket: dist.GradBucket) -> Future:
    """Call `state.average`. DDP takes a function, and saves it with the model by its name."""
    return state.average(bucket)


def describe_single_machine(attached: Attached) -> Optional[str]:
    """Return a note if all ranks run on one machine, so that this strategy sums exactly."""
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
    sgd_spec = parse(attached.spec).for_family(SGD).spec
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
    # The first sum that is dropped may be a trial before the loop.
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
    """Return the `Attached` that averages this model's gradients now; None if DDP averages them."""
    # A library may have registered what `hook` returned, and `_BY_MODEL` does not know that model.
    hooks = getattr(model, "_comm_hooks", ())  # [(function, state)]; old torches do not list them
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
