"""Our strategies in anybody's loop: sums of gradients for any DDP model, optimizer and script.

    ddp = DistributedDataParallel(model)
    tandem.sync.attach(ddp, "ef:5", optimizer=optimizer)

The trainer has it, too. Where a step begins, and what its loss scale is, is found out here: a step
is what an optimizer makes of the backwards that communicate before it, and the first bucket of the
next one closes it. `Usage` hears which of them it used, and what each rank receives says whether
gradients overflowed, so a loop needs to tell nothing.

DDP's C++ part owns the hook and with it an `Attached`, which therefore refers to its model weakly:
no garbage collector sees through that part. Threads and process groups end with the model.
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
from contract.strategies import ADAM, AUTO, EXACT, SGD, parse, usages
from contract.strategies import ATTACHED as WHOSE

from ..compat import timeout_of
from ..coordinates import host_name, numbered, read_coordinates
from ..exchange import Exchange
from .base import NONE, Future, Sync, Topology, Unused, sum_over_ranks
from .carrier import PeerLost
from .kinds import effective_spec, family_of, make
from .unsummed import UnsummedSteps, watch_steps
from .usage import Usage

# What torch says where a sum has failed for want of a peer.
LOST = "gloo|NCCL|[Tt]imed out|Connection (closed|reset)"
SHARDED = ("FullyShardedDataParallel", "FSDPModule")

# What is attached to which model, for `tandem.timings`.
ATTACHED: "weakref.WeakKeyDictionary[Any, Attached]" = weakref.WeakKeyDictionary()


class Attached:
    """A strategy at work in the backwards of one DDP model."""

    sync: Sync  # from `connect` on, as are these
    device: torch.device
    effective_spec: str
    hosts: List[str]  # of each rank
    usage: Optional[Usage] = None  # of the sums, where a strategy keeps what it leaves out of them
    world = 0

    def __init__(
        self,
        spec: str,
        warmup_steps: int = 0,
        scaler: Any = None,
        patience: Optional[float] = None,
        machines: Optional[Sequence[int]] = None,
        optimizer: Any = None,
    ) -> None:
        """Raises UserError."""
        if spec == AUTO:
            raise UserError(
                f"{WHOSE} auto: what hides depends on the time of a step and on the link, which a "
                "run measures: time the loop (tandem.timings), and the report of "
                f"`make train SCRIPT=train.py` names the strategy; here it is one of {usages()}."
            )
        parse(spec, WHOSE)
        if type(warmup_steps) is not int or warmup_steps < 0:
            raise UserError(
                f"{WHOSE}: warmup_steps is a whole number from 0, not {warmup_steps!r}."
            )
        self.spec, self.warmup_steps, self.scaler = spec, warmup_steps, scaler
        self.patience, self.machines, self.family = patience, machines, family_of(optimizer)
        self._optimizer = optimizer  # until `connect`
        # Called in backward as the last bucket is handed over: from then on sums are waited for.
        self.on_last_bucket: Callable[[], None] = lambda: None
        self.say: Callable[[str], None] = _say  # on rank 0
        self._said: Set[str] = set()
        self.scaled = parse(spec).of(self.family).spec  # with its scale
        self.steps = 0  # that have begun, without those of `warm_up_buckets`
        self.exact = True  # whether the last step was
        self._scale: Optional[float] = None  # of the coming step, where a forward has read it
        self._sums: List[Future] = []  # of this step's buckets
        self._ordered = False  # whether a backward has told DDP the order of its buckets
        self._settling = False
        self._model: Callable[[], Any] = lambda: None
        self._unsummed: Optional[UnsummedSteps] = None  # of a model that is known
        self._end: Optional[Callable[[], Any]] = None  # from `connect` to `detach`

    def __reduce__(self) -> Tuple[Any, ...]:
        """A copy of a model, or a file of it, has no process groups: DDP sums there by itself."""
        return Attached, (self.spec, self.warmup_steps)

    def connect(self, device: torch.device, group: Any, model: Any = None) -> None:
        """Meet the other ranks. What is needed for it ends with the model, or with this where that
        is not known. Collective. Raises UserError."""
        if self.patience is None:
            self.patience = timeout_of(group, device).total_seconds()
        exchange = Exchange(timedelta(seconds=self.patience))
        self.world, self.device = exchange.size, device
        process = read_coordinates(os.environ)
        host = host_name(os.environ)
        machine = host if process.node is None else str(process.node)
        if self.machines is not None:
            if len(self.machines) != self.world:
                raise UserError(
                    f"{WHOSE}: machines has {len(self.machines)} numbers and the run "
                    f"{self.world} ranks."
                )
            machine = str(self.machines[exchange.rank])
        told = exchange.json([machine, host, self.scaled, self.warmup_steps])
        asked = [(spec, steps) for _, _, spec, steps in told]
        if len(set(asked)) > 1:
            raise UserError(
                f"{WHOSE}: the ranks ask for different things: "
                f"{', '.join(sorted({f'{spec!r} after {n} exact steps' for spec, n in asked}))}."
            )
        nodes, self.hosts = numbered([one[0] for one in told]), [str(one[1]) for one in told]
        self.effective_spec = (
            effective_spec(self.spec, nodes, self.family) if self.world > 1 else EXACT
        )
        self.sync = make(self.effective_spec, self.patience)
        topology = Topology(nodes, exchange.rank).connected(self.patience)
        self.sync.setup(device, topology)
        exchange.meet()
        exchange.end()
        if self.sync.strategy.rule.warms:
            self.usage = Usage(self._optimizer)
        self._optimizer = None
        owner, give_back = (self, self.sync.end) if model is None else (model, self._release)
        ends = weakref.finalize(owner, give_back)
        ends.atexit = False  # where the process ends, all of it does
        self._end = ends
        if model is not None:
            self._model = weakref.ref(model)
            self._unsummed = watch_steps(model)
            if self.scaler is not None:
                model.register_forward_pre_hook(self._before_forward)

    def register(self, model: DistributedDataParallel) -> None:
        """Average the model's gradients from the next backward on. Collective. Raises UserError."""
        _check(model)
        self.connect(model.device, model.process_group, model)
        try:
            model.register_comm_hook(self, average_bucket)
        except RuntimeError as error:
            self.detach()
            raise UserError(
                f"{WHOSE}: this model has a communication hook already, and DDP takes one for good:"
                " remove the other register_comm_hook, or wrap what is in the model anew."
            ) from error
        ATTACHED[model] = self

    def _release(self) -> None:
        self.sync.end()
        del self.sync
        self.usage = None

    def _before_forward(self, model: Any, inputs: Any) -> None:
        """Reading the scale may wait for the device, which would idle within backward."""
        if self._end and torch.is_grad_enabled() and model.require_backward_grad_sync:
            self._scale = self._read_scale()

    def _read_scale(self) -> float:
        follows = self.scaler is not None and self.sync.follows_scale
        return float(self.scaler.get_scale()) if follows else 1.0

    def average(self, bucket: dist.GradBucket) -> Future:
        """Begin to average a bucket over all ranks."""
        if bucket.index() == 0:
            if self._unsummed is not None:
                self._unsummed.reset()
            self._begin(bucket.buffer().device)
        if self.usage is not None:
            self.usage.watch(bucket.parameters())
        mean = self.sync.hook(bucket) if self._end else allreduce_hook(_get_default_group(), bucket)
        self._sums.append(mean)
        if bucket.is_last():
            self.on_last_bucket()
            # Before DDP's own, which waits for the same sums and takes an exception for one.
            Variable._execution_engine.queue_callback(self._wait)
        return mean

    def _begin(self, device: torch.device) -> None:
        if not self.world:
            self.connect(device, _get_default_group())
        scale, self._scale = self._scale, None
        self._sums = []
        if self._settling:  # sums are exact before the strategy's first step
            self._ordered = True
            return
        scale = self._read_scale() if scale is None and self._end else scale
        unused = self._unused(scale)
        self.exact = not self._ordered or self.steps <= self.warmup_steps or self._in_doubt
        self._ordered = True
        if self._end:
            self.sync.begin(scale or 1.0, self.exact, unused)
            self._say_once(self.sync.note)

    def _say_once(self, line: Optional[str]) -> None:
        if line and line not in self._said and dist.get_rank() == 0:
            self._said.add(line)
            self.say(line)

    def _unused(self, scale: Optional[float]) -> Unused:
        """Of the sum before, as the next one begins; counts the step that this is for."""
        usage = self.usage
        if usage is None:
            self.steps += 1
            return NONE
        unused = usage.close(skipped=scale is not None and scale < self.sync.scale)
        self.steps += not usage.in_step
        self._say_once(about_use(usage))
        return unused

    @property
    def _in_doubt(self) -> bool:
        """Whether it cannot be known which sums are used."""
        usage = self.usage
        return usage is not None and (usage.mixed or (usage.dropped > 0 and not usage.heard))

    def _wait(self) -> None:
        """Called as backward ends. Raises RuntimeError where a peer was lost."""
        sums, self._sums = self._sums, []
        if self.usage is not None and not self._settling:
            # Behind DDP's own, which gives each gradient its sum.
            Variable._execution_engine.queue_callback(self.usage.summed)
        try:
            for total in sums:
                total.wait()
        except RuntimeError as error:
            if not re.search(LOST, str(error)):
                raise
            raise RuntimeError(f"{WHOSE}: {self._lost(error)}") from error

    def _lost(self, error: RuntimeError) -> str:
        peer = "a peer"
        if isinstance(error, PeerLost):
            peer = f"{self.hosts[error.rank]} (rank {error.rank})"
        what = "is gone"
        if "imed out" in str(error):
            what = f"was silent for {self.patience:g} s: it hangs, or the way to it is cut"
        return f"{peer} {what}; step {self.steps} cannot be summed ({error})."

    def detach(self) -> None:
        """From the next step on DDP's own sums, exact ones. Threads, memory and connections are
        given back. Collective, between two steps."""
        if self._end is not None:
            sum_over_ranks(torch.zeros(1, device=self.device)).wait()  # all are done
            self._end()
            self._end = None
            vars(self).pop("sync", None)

    def warm_up_buckets(self, closure: Callable[[], Any]) -> None:
        """A throw-away pass, before the first step: `closure` makes a forward through the DDP model
        and a backward, on any images. DDP orders its buckets by it. Without it the first step is
        exact instead, and a run that goes on from a checkpoint sums its first step in another order
        than one that was never stopped. Buffers and random numbers stay as they are, and gradients
        are dropped. Collective. Raises UserError."""
        if self._ordered:
            raise UserError(f"{WHOSE}: warm_up_buckets(closure) comes before the first backward.")
        model = self._model()
        if model is None:
            raise UserError(
                f"{WHOSE}: warm_up_buckets(closure) needs the model: take attach and not hook."
            )
        device = model.device
        buffers = [(one, one.clone()) for one in model.module.buffers()]
        self._settling = True
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                closure()
        finally:
            self._settling = False
            model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        if not self._ordered:
            raise UserError(
                f"{WHOSE}: the closure of warm_up_buckets made no backward that communicates: it "
                "calls the DDP model, not what is in it, and not within no_sync."
            )

    @property
    def at_work(self) -> bool:
        return "sync" in vars(self)

    def _check_model(self) -> None:
        if not self.at_work or self._model() is None:
            raise UserError(
                f"{WHOSE}: there is no state after detach(), nor without the model: keep it, and "
                "take attach and not hook."
            )

    def state_dict(self) -> Dict[str, Any]:
        """What this rank keeps, tensors and plain containers: to be saved in a file of its own. It
        fits a run whose ranks are spread in the same way. Raises UserError."""
        self._check_model()
        self.sync.settle(NONE if self.usage is None else self.usage.unused())
        return {
            WHOSE: 1,  # first of all, by which the launcher knows such a file
            "spec": self.scaled,
            "nodes": list(self.sync.topology.nodes),
            "steps": self.steps,
            "sync": self.sync.state_dict(),
            "common": self.sync.common_state(self._model().module),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises UserError where it does not fit; then nothing
        is changed."""
        self._check_model()
        if not isinstance(state, dict):
            raise UserError(f"{WHOSE}: the state is a {type(state).__name__}, and no dict.")
        nodes = list(self.sync.topology.nodes)
        # By what they look like: a file may hold tensors there, whose comparison is no bool.
        theirs, ours = (state.get("spec"), state.get("nodes")), (self.scaled, nodes)
        if repr(theirs) != repr(ours):
            raise UserError(
                f"{WHOSE}: the state is of {theirs[0]!r} with ranks on machines "
                f"{theirs[1]!r}, and this run is {self.scaled!r} on {nodes}: do not load "
                "it, and what was left out of the sums begins at zero."
            )
        steps = state.get("steps")
        if type(steps) is not int or steps < 0:
            raise UserError(f"{WHOSE}: the state's number of steps is missing or odd.")
        if "sync" not in state:
            raise UserError(f"{WHOSE}: the state lacks what was left out of the sums.")
        if state["sync"] is not None:
            module = self._model().module
            before = self.sync.common_state(module)
            try:
                if before is not None:
                    self.sync.load_common_state(module, state["common"])
                self.sync.load_state_dict(state["sync"])
            except (LookupError, TypeError, ValueError, OverflowError) as error:
                if before is not None:
                    self.sync.load_common_state(module, before)
                raise UserError(
                    f"{WHOSE}: the state is damaged ({error}): do not load it."
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
    """Sum this model's gradients by the strategy `spec` (`--sync`'s: ef:5, bf16, ...;
    docs/slow-networks.md) from the next backward on. The first `warmup_steps` steps, and that
    backward, are exact, and so are all where it cannot be known which sums a step uses; what was
    left out of those that none does is dropped. `scaler`: the GradScaler that scales the loss. An
    exchange fails where a peer is silent for `patience` seconds, by default as many as DDP's own
    sums wait. `machines`: the machine of each rank, by default where it runs; `ef` is between
    machines, so range(world size) shows on one PC what it does. `optimizer`: what steps the
    weights, whose steps are heard, and by which `ef` takes its scale: its own for each value, but
    for SGD. Collective. Raises UserError for what cannot work.

    Adam, and what else divides by the root of a running mean of squares, learns less with levels of
    the peak (docs/slow-networks.md, "With Adam"): rank 0 says so on stderr."""
    attached = Attached(spec, warmup_steps, scaler, patience, machines, optimizer)
    attached.register(model)
    if dist.get_rank() == 0:
        notes = about_machines(attached), about_scale(attached, optimizer), about_adam(attached)
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
    """What `attach` registers, as (state, hook), for a library that makes the DDP model by itself:
    `model.register_comm_hook(*hook("ef:5"))`. The ranks meet in the first backward. Without the
    model there is no `warm_up_buckets` and no state, and a `scaler` is read within backward. Raises
    UserError."""
    return Attached(spec, warmup_steps, scaler, patience, machines, optimizer), average_bucket


def average_bucket(state: Attached, bucket: dist.GradBucket) -> Future:
    return state.average(bucket)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def about_machines(attached: Attached) -> Optional[str]:
    """A line on a strategy between machines where all ranks are on one."""
    spec = attached.spec
    if attached.effective_spec != EXACT or parse(spec).exact or attached.world == 1:
        return None
    return (
        f"{WHOSE}: all {attached.world} ranks are on one machine, where {spec} sums exactly; "
        f"machines=range({attached.world}) makes a machine of each, to try it."
    )


def about_scale(attached: Attached, optimizer: Any) -> Optional[str]:
    """A line on what a strategy made of an optimizer that was not named, or is not known."""
    spec = attached.effective_spec
    if spec in (attached.spec, EXACT) or attached.family is not None:
        return None
    what = "no optimizer= was named"
    if optimizer is not None:
        what = f"{type(optimizer).__name__} is not known here"
    return (
        f"{WHOSE}: {what}, so {attached.spec} is {spec}, which Adam's family needs; for SGD take "
        f"{parse(attached.spec).of(SGD).spec}."
    )


def about_use(usage: Usage) -> Optional[str]:
    """A line on sums that no step used, or of which that cannot be known."""
    if usage.mixed:
        return (
            f"{WHOSE}: a step moved some of this model's weights and left others with gradients: "
            "which sums are used cannot be known, so they are exact from here on. Wrap what each "
            "optimizer steps in a DistributedDataParallel of its own."
        )
    if usage.heard and usage.dropped:
        return (
            f"{WHOSE}: gradients of this model were summed and zeroed before a step: what was left "
            f"out of them is dropped, too. (A loop that uses copies of them needs {EXACT}.)"
        )
    if usage.dropped > 1:
        return (
            f"{WHOSE}: gradients of this model were zeroed, and no step was heard that used them: "
            "sums are exact until one is. Name what steps the weights: "
            "attach(..., optimizer=optimizer)."
        )
    return None


def about_adam(attached: Attached) -> Optional[str]:
    """A line on a strategy that leaves out what Adam needs."""
    strategy = parse(attached.effective_spec)
    known = not strategy.rule.warms or prices.is_acceptable(strategy, ADAM)
    if attached.family == SGD or known:
        return None
    return (
        f"{WHOSE}: {strategy.spec} with Adam or its family: {prices.with_adam(strategy)} "
        f"(docs/slow-networks.md). {EXACT} leaves nothing out."
    )


def attached_to(model: Any) -> Optional[Attached]:
    """What sums this model's gradients now; None for DDP itself."""
    hooks = getattr(model, "_comm_hooks", ())  # not in old torches
    known = [state for _, state in hooks if isinstance(state, Attached)]
    found = known[0] if known else ATTACHED.get(model)
    return found if found is not None and found.at_work else None


def _check(model: Any) -> None:
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if kinds & set(SHARDED):
        raise UserError(
            f"{WHOSE}: this model is FSDP's, whose ranks each hold a part of the gradients: wrap "
            "it in DistributedDataParallel instead, if it fits into one GPU's memory."
        )
    if not isinstance(model, DistributedDataParallel):
        raise UserError(
            f"{WHOSE}: this model is a {type(model).__name__}: wrap it first, "
            "ddp = torch.nn.parallel.DistributedDataParallel(model), and give it ddp."
        )
    for name, part in model.named_modules():
        if getattr(part, "sparse", False) is True:
            raise UserError(
                f"{WHOSE}: {name.removeprefix('module.')} has sparse gradients, which no strategy "
                "sums: make it with sparse=False."
            )
    own, every = dist.get_world_size(model.process_group), dist.get_world_size()
    if own != every:
        raise UserError(
            f"{WHOSE}: this model's process group has {own} of {every} ranks, and strategies sum "
            "over all: leave process_group out."
        )
