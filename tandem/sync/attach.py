"""Our strategies in anybody's loop: sums of gradients for any DDP model, optimizer and script.

    ddp = DistributedDataParallel(model)
    tandem.sync.attach(ddp, "ef:5", optimizer=optimizer)

What the trainer tells a strategy (where a step begins, what its loss scale is) is found out here. A
step is one backward that communicates; the first bucket of the next one closes it. What each rank
receives says whether gradients overflowed, so a loop needs to tell nothing.
"""

import os
import sys
import weakref
from datetime import timedelta
from typing import Any, Callable, Dict, Optional, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from contract import prices
from contract.errors import UserError
from contract.strategies import ATTACHED as WHOSE
from contract.strategies import EXACT, SGD, parse

from ..compat import ddp_has_run, timeout_of
from ..exchange import Exchange
from ..place import host_name, numbered, place
from .base import Topology
from .kinds import carried_out, family_of, make

SHARDED = ("FullyShardedDataParallel", "FSDPModule")

# What is attached to which model, for `tandem.timings`.
ATTACHED: "weakref.WeakKeyDictionary[Any, weakref.ref[Attached]]" = weakref.WeakKeyDictionary()


class Attached:
    """A strategy at work in the backwards of one DDP model."""

    def __init__(
        self,
        model: DistributedDataParallel,
        spec: str,
        warmup_steps: int,
        scaler: Any,
        family: Optional[str],
    ):
        self.model, self.spec, self.family = model, spec, family
        self.warmup_steps, self.scaler = warmup_steps, scaler
        self.steps = 0  # backwards that have communicated, without those of `settle`
        self.exact = True  # whether the last step was
        self._ordered = False  # whether a backward has told DDP the order of its buckets
        self._settling = False

    def setup(self, patience: float, machines: Optional[Sequence[int]]) -> None:
        """Collective. Raises UserError."""
        exchange = Exchange(timedelta(seconds=patience))
        self.world, here = exchange.size, place(os.environ)
        machine = host_name(os.environ) if here.node is None else here.node
        if machines is not None:
            if len(machines) != self.world:
                raise UserError(
                    f"{WHOSE}: machines has {len(machines)} numbers and the run {self.world} ranks."
                )
            machine = str(machines[exchange.rank])
        spec = parse(self.spec).of(self.family).spec
        told = exchange.json([machine, spec, self.warmup_steps])
        asked = [(spec, steps) for _, spec, steps in told]
        if len(set(asked)) > 1:
            raise UserError(
                f"{WHOSE}: the ranks ask for different things: "
                f"{', '.join(sorted({f'{spec!r} after {n} exact steps' for spec, n in asked}))}."
            )
        nodes = numbered([machine for machine, _, _ in told])
        self.carried_out = carried_out(self.spec, nodes, self.family) if self.world > 1 else EXACT
        self.sync = make(self.carried_out, lambda: None, patience)
        topology = Topology(nodes, exchange.rank).connected(patience)
        self.sync.setup(self.model.device, topology)
        exchange.meet()

    def hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._begin()
        bucket.buffer().div_(self.world)  # DDP averages, a strategy sums
        return self.sync.hook(None, bucket)

    def _begin(self) -> None:
        if self._settling:  # sums are exact before the strategy's first step
            self._ordered = True
            return
        self.exact = not self._ordered or self.steps < self.warmup_steps
        self._ordered = True
        self.steps += 1
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        self.sync.begin(scale, self.exact)

    def settle(self, closure: Callable[[], Any]) -> None:
        """A throw-away pass, before the first step: `closure` makes a forward through the DDP model
        and a backward, on any images. DDP orders its buckets by it. Without it the first step is
        exact instead, and a run that goes on from a checkpoint sums its first step in another order
        than one that was never stopped. Buffers and random numbers stay as they are, and gradients
        are dropped. Collective. Raises UserError."""
        if self._ordered:
            raise UserError(f"{WHOSE}: settle(closure) comes before the first backward.")
        device = self.model.device
        buffers = [(one, one.clone()) for one in self.model.module.buffers()]
        self._settling = True
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                closure()
        finally:
            self._settling = False
            self.model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        if not self._ordered:
            raise UserError(
                f"{WHOSE}: the closure of settle made no backward that communicates: it calls the "
                "DDP model, not what is in it, and not within no_sync."
            )

    def state_dict(self) -> Dict[str, Any]:
        """What this rank keeps, tensors and plain containers: to be saved in a file of its own. It
        fits a run whose ranks are spread in the same way."""
        return {
            WHOSE: 1,  # first of all, by which the launcher knows such a file
            "spec": self.spec,
            "nodes": list(self.sync.topology.nodes),
            "steps": self.steps,
            "sync": self.sync.state_dict(),
            "common": self.sync.common_state(self.model.module),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises UserError where it does not fit; then nothing
        is changed."""
        if not isinstance(state, dict):
            raise UserError(f"{WHOSE}: the state is a {type(state).__name__}, and no dict.")
        nodes = list(self.sync.topology.nodes)
        # By what they look like: a file may hold tensors there, whose comparison is no bool.
        theirs, ours = (state.get("spec"), state.get("nodes")), (self.spec, nodes)
        if repr(theirs) != repr(ours):
            raise UserError(
                f"{WHOSE}: the state is of {theirs[0]!r} with ranks on machines "
                f"{theirs[1]!r}, and this run is {self.spec!r} on {nodes}: do not load "
                "it, and what was left out of the sums begins at zero."
            )
        steps = state.get("steps")
        if type(steps) is not int or steps < 0:
            raise UserError(f"{WHOSE}: the state's number of steps is missing or odd.")
        if "sync" not in state:
            raise UserError(f"{WHOSE}: the state lacks what was left out of the sums.")
        if state["sync"] is not None:
            try:
                self.sync.load_state_dict(state["sync"])
                if self.sync.common_state(self.model.module) is not None:
                    self.sync.load_common_state(self.model.module, state["common"])
            except (LookupError, TypeError, ValueError, OverflowError) as error:
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
    """Sum this model's gradients by the strategy `spec` (`--sync`'s: ef:3, powersgd:4, bf16, ...;
    docs/slow-networks.md) from its first forward on. The first `warmup_steps` steps, and the first
    backward, are exact. `scaler`: the GradScaler that scales the loss. An exchange fails where a
    peer is silent for `patience` seconds, by default as many as DDP's own sums wait. `machines`:
    the machine of each rank, by default where it runs; `ef` and `powersgd` are between machines, so
    range(world size) shows on one PC what they do. `optimizer`: what steps the weights, by which
    `ef` takes its scale: its own for each value, but for SGD. Collective. Raises UserError for what
    cannot work.

    Adam, and what else divides by the root of a running mean of squares, learns less with levels of
    the peak and with powersgd (docs/slow-networks.md, "With Adam"): rank 0 says so on stderr."""
    _check(model, spec, warmup_steps)
    family = family_of(optimizer)
    attached = Attached(model, spec, warmup_steps, scaler, family)
    if patience is None:
        patience = timeout_of(model.process_group, model.device).total_seconds()
    attached.setup(patience, machines)
    lines = about_machines(spec, attached), about_scale(attached, optimizer), about_adam(attached)
    if dist.get_rank() == 0 and any(lines):
        print(*filter(None, lines), sep="\n", file=sys.stderr, flush=True)
    try:
        model.register_comm_hook(None, attached.hook)
    except RuntimeError as error:
        raise UserError(
            f"{WHOSE}: this model has a communication hook already, and DDP takes one: remove the "
            "other register_comm_hook."
        ) from error
    ATTACHED[model] = weakref.ref(attached)  # which holds the model; its hook is DDP's
    return attached


def about_machines(spec: str, attached: Attached) -> Optional[str]:
    """A line on a strategy between machines where all ranks are on one."""
    if attached.carried_out != EXACT or parse(spec).exact or attached.world == 1:
        return None
    return (
        f"{WHOSE}: all {attached.world} ranks are on one machine, where {spec} sums exactly; "
        f"machines=range({attached.world}) makes a machine of each, to try it."
    )


def about_scale(attached: Attached, optimizer: Any) -> Optional[str]:
    """A line on what a strategy made of an optimizer that was not named, or is not known."""
    spec = attached.carried_out
    if spec in (attached.spec, EXACT) or attached.family is not None:
        return None
    what = "no optimizer= was named"
    if optimizer is not None:
        what = f"{type(optimizer).__name__} is not known here"
    return (
        f"{WHOSE}: {what}, so {attached.spec} is {spec}, which serves every optimizer; for SGD "
        f"{parse(attached.spec).of(SGD).spec} needs less memory."
    )


def about_adam(attached: Attached) -> Optional[str]:
    """A line on a strategy that advice would not name for a run with Adam."""
    strategy = parse(attached.carried_out)
    if attached.family == SGD or prices.serves_adam(strategy):
        return None
    return (
        f"{WHOSE}: if the optimizer is Adam or of its family, take {EXACT} or bf16 instead of "
        f"{strategy.spec}; what is known of it there: {prices.with_adam(strategy)} "
        "(docs/slow-networks.md)."
    )


def attached_to(model: Any) -> Optional[Attached]:
    found = ATTACHED.get(model)
    return None if found is None else found()


def _check(model: Any, spec: str, warmup_steps: int) -> None:
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
    parse(spec, WHOSE)
    for name, part in model.named_modules():
        if getattr(part, "sparse", False) is True:
            raise UserError(
                f"{WHOSE}: {name.removeprefix('module.')} has sparse gradients, which no strategy "
                "sums: make it with sparse=False."
            )
    if type(warmup_steps) is not int or warmup_steps < 0:
        raise UserError(f"{WHOSE}: warmup_steps is a whole number from 0, not {warmup_steps!r}.")
    own, every = dist.get_world_size(model.process_group), dist.get_world_size()
    if own != every:
        raise UserError(
            f"{WHOSE}: this model's process group has {own} of {every} ranks, and strategies sum "
            "over all: leave process_group out."
        )
    if ddp_has_run(model):
        raise UserError(f"{WHOSE}: this model has run already: attach before its first forward.")
