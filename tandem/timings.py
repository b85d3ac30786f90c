"""Times a loop of the user's own: `timed` and `step`.

Hooks of the loader and of the models switch a stopwatch (clock.py) from one category to the next.
Each step becomes a line for the report (step_lines.py).
"""

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Iterable
from typing import Any, Callable, Dict, Iterator, List, Optional, cast

import torch
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from contract.errors import UserError
from contract.strategies import EXACT, MIB

from . import balance
from .clock import Clock
from .compat import autocast_type
from .coordinates import host_name, read_coordinates
from .process_facts import describe_gradients, describe_process, peak_memory_bytes
from .samples import SampleCounter, checksum, pixels_of, tensors_in
from .scalars import StepScalars
from .step_lines import Lines
from .sums import SUMS
from .sync.attach import find_attached
from .sync.unsummed import UnsummedSteps, watch_steps


class Timings:
    """Times the loops of a process by hooks of their loaders and models; see `timed`. A process has
    one, whichever models it trains in turn, so that each of its seconds is counted once."""

    def __init__(self, model: nn.Module) -> None:
        self.process = os.getpid()
        self.coordinates, self.host = read_coordinates(os.environ), host_name(os.environ)
        weight = next(model.parameters(), torch.zeros(0))
        self.device, self._weight_type = weight.device, weight.dtype
        self.clock = Clock(self.device)
        SUMS.share(self.device)
        self.lines = Lines(
            os.environ.get("TANDEM_OUTPUT"), self.host, self.coordinates.rank, self.clock
        )
        self._models: List[Callable[[], Any]] = []  # weak references, of the current loop
        # For each model that has hooks: how many backwards of the first step sum its gradients.
        self._sums: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._unsummed: List[UnsummedSteps] = []  # one for each DDP model of the current loop
        self._sum_hooks: List[Any] = []  # on parameters, until the first step is over
        self._has_started = False  # whether the `start` line is written
        self._loader: Any = None
        self._epochs, self._steps = 0, 0
        self._samples: List[Optional[int]] = []  # in each batch since the last step
        self._scalar_names: Dict[str, None] = {}
        self._has_asked = False  # for the number of samples
        self._checksum = self._seen = 0  # of its first batches, as many as COMPARED
        self._precision, self._pixels = "fp32", 0
        atexit.register(self._end)

    def watch(self, *models: nn.Module) -> None:
        """Time these models from now on."""
        self._models = [weakref.ref(model) for model in models]
        self._unsummed = []
        for model in models:
            steps = watch_steps(model)
            if steps is not None:
                self._unsummed.append(steps)
            if model in self._sums:
                continue
            self._sums[model] = 0
            if steps is not None:
                model.register_forward_pre_hook(steps.note_forward)
            model.register_forward_pre_hook(self._forward)
            model.register_forward_hook(self._wait_for_backward)
            if not self._has_started:
                self._count_sums(model)

    def _count_sums(self, model: nn.Module) -> None:
        """Count the backwards that sum the model's gradients, until the first step is over."""
        in_backward: List[bool] = []

        # Each backward calls this for each parameter, and counts once.
        def count(_: torch.Tensor) -> None:
            if not in_backward and getattr(model, "require_backward_grad_sync", True):
                in_backward.append(True)
                self._sums[model] += 1
                _call_after_backward(in_backward.clear)

        weights = [p for p in model.parameters() if p.requires_grad]
        count = torch.utils.hooks.unserializable_hook(count)
        self._sum_hooks += [p.register_hook(count) for p in weights]

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the loader's batches, and switch the clock around each."""
        self._loader, counter = loader, SampleCounter(loader)
        sampler = getattr(loader, "batch_sampler", None)
        parts = sampler.sizes() if isinstance(sampler, balance.BalancedSampler) else None
        self.clock.enter("data")
        try:
            for batch in loader:
                known = balance.receive(next(parts)) if parts else counter.count(batch)
                self._samples.append(known)
                if self._seen < COMPARED:
                    self._compare(batch)
                if not self._has_started:
                    self._pixels = pixels_of(batch)
                self.clock.enter("h2d")
                yield batch
                self.clock.enter("data")
        finally:
            self.clock.enter("between_epochs")
            self._epochs += 1

    def _compare(self, batch: Any) -> None:
        """Say so once if this rank begins with the same samples as one before it: a stream or a
        sampler that is not divided. By a counter in torch's store, so that no rank waits."""
        self._seen += 1
        with contextlib.suppress(Exception):  # odd tensors, or a store that is gone
            self._checksum = checksum(batch, self._checksum)
            if (
                self._seen < COMPARED
                or not self._checksum
                or not torch.distributed.is_initialized()
            ):
                return
            store = _get_default_store()
            if store.add(f"tandem/samples/{self._checksum}", 1) == 2:
                print(DUPLICATES, file=sys.stderr, flush=True)

    def step(self, samples: Optional[int], scalars: Dict[str, Any]) -> None:
        """End a step of this rank; see the function `step`."""
        # A loss without its name would be taken for a number of samples.
        if samples is not None and float(samples) != int(samples):
            raise UserError(
                f"tandem.timings.step: {float(samples):g} is no number of samples: name a value "
                "that is to be recorded, like step(loss=loss)."
            )
        step_scalars = StepScalars(scalars) if scalars else None
        self._scalar_names.update(dict.fromkeys(scalars))
        if len(self._scalar_names) > MOST_SCALARS:
            kept = list(self._scalar_names)
            raise UserError(
                f"tandem.timings.step: {kept[MOST_SCALARS]} is one scalar too many: a run records "
                f"{MOST_SCALARS}, and has {', '.join(kept[:MOST_SCALARS])}."
            )
        counts, self._samples = self._samples, []
        if samples is None and None not in counts:
            samples = sum(cast(List[int], counts))
        if samples is None and not self._has_asked:
            self._has_asked = True
            if self.coordinates.rank == 0:
                print(UNCOUNTED, file=sys.stderr, flush=True)
        if not self._has_started:
            self._has_started = True
            for hook in self._sum_hooks:
                hook.remove()
            self._sum_hooks = []
            self.lines.add("start", timed=False, **self._start_line(samples, len(counts)))
            are_attached = all(find_attached(model()) for model in self._models)
            warning = balance.state().warning(are_attached)
            if warning and self.coordinates.rank == 0:
                print(warning, file=sys.stderr, flush=True)
        self._steps += 1
        fields: Dict[str, Any] = {"step": self._steps, "epoch": self._epochs}
        fields["samples"] = samples if samples is None else int(samples)
        # A strategy that has not begun yet sums exactly.
        exchanges = [find_attached(model()) for model in self._models]
        if any(e and e.sync.strategy.rule.warms and e.exact for e in exchanges):
            fields["exact"] = True
        unsummed = max((steps.count for steps in self._unsummed), default=0)
        if unsummed:
            fields["unsummed"] = unsummed
        self.clock.enter("other")
        self.lines.add("step", scalars=step_scalars, **fields)
        self.lines.flush_ready()

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            number_type = autocast_type(self.device) or self._weight_type
            self._precision = PRECISIONS.get(number_type, "fp32")
            self.clock.enter("forward")

    def _wait_for_backward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Switch the clock as the backward of these outputs begins and ends.

        Autograd calls the hooks of the outputs as their backward begins, and after it what they
        have queued: ours comes before that of DDP, which waits for the sums.
        """
        in_backward: List[bool] = []

        def note_begin(_: torch.Tensor) -> None:
            if not in_backward:
                in_backward.append(True)
                self.clock.enter("backward")
                _call_after_backward(note_end)

        def note_end() -> None:
            if getattr(module, "require_backward_grad_sync", False):
                self.clock.enter("sync_exposed")
                # `attach` counts its sums by itself, bucket by bucket.
                if find_attached(module) is None:
                    SUMS.enter()
            # This is queued behind DDP's own wait for the sums.
            _call_after_backward(lambda: self.clock.enter("optimizer"))

        for tensor in tensors_in(outputs):
            if module.training and tensor.requires_grad:
                tensor.register_hook(note_begin)

    def _start_line(self, samples: Optional[int], micro_batches: int) -> Dict[str, Any]:
        """Describe the loop by its first step."""
        wrapped = [cast(Any, model()) for model in self._models]
        rank_batch = int(samples or 0)
        models = [getattr(wrapper, "module", wrapper) for wrapper in wrapped]
        summed = [m for w, m in zip(wrapped, models) for _ in range(self._sums[w])]
        exchanges = [find_attached(wrapper) for wrapper in wrapped]
        specs = [exchange.sync.strategy.spec if exchange else EXACT for exchange in exchanges]
        fields = {
            **describe_process(self.coordinates, self.host, self.device, self.clock.started),
            "node_rank": self.coordinates.node or 0,
            "model": "+".join(type(model).__name__ for model in models),
            "parameters": sum(p.numel() for model in models for p in model.parameters()),
            **describe_gradients(*(summed or models)),
            "sync": "+".join(dict.fromkeys(specs)),
            "precision": self._precision,
            "rank_batch": rank_batch,
            "global_batch": rank_batch * self.coordinates.size,
            "accumulate": micro_batches,
            "workers": getattr(self._loader, "num_workers", 0),
            "image_size": self._pixels,
            "resumed_samples": 0,
        }
        decided = balance.state().record()
        if decided:
            shared = {"precision": fields["precision"], "sync": fields["sync"]}
            fields["decided"] = {**shared, **decided}
        received = balance.state().received
        if received:
            fields["global_batch"] = sum(received)
        if hasattr(wrapped[0], "bucket_bytes_cap"):
            fields["bucket_mb"] = wrapped[0].bucket_bytes_cap / MIB
        with contextlib.suppress(TypeError, AttributeError):  # a loader may have no length
            fields["steps_per_epoch"] = max(1, len(self._loader) // max(1, micro_batches))
            fields["train_images"] = len(self._loader.dataset)
        if any(exchanges) and "steps_per_epoch" in fields:
            warmup_steps = max(exchange.warmup_steps for exchange in exchanges if exchange)
            fields["warmup"] = warmup_steps / fields["steps_per_epoch"]
        return fields

    def _end(self) -> None:
        if not self._has_started or os.getpid() != self.process:
            return
        # Python sets sys.last_value if an exception ended the process.
        status = "failed" if hasattr(sys, "last_value") else "finished"
        with contextlib.suppress(RuntimeError):  # a broken device cannot be read any more
            self.lines.end(status=status, peak_memory_bytes=peak_memory_bytes(self.device))


_current: Optional[Timings] = None
UNCOUNTED = (
    "tandem: a batch of this loader does not say how many samples it holds: end each step with "
    "timings.step(samples=N). Until then no speed is reported."
)
MOST_SCALARS = 8  # of a run
COMPARED = 5  # batches of each rank
DUPLICATES = (
    f"tandem: the first {COMPARED} batches of this rank are another rank's, too: the ranks do not "
    "divide the samples, so more machines learn nothing more. Give the DataLoader a "
    "DistributedSampler, and let a stream (IterableDataset) leave out the other ranks' samples."
)
PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class Batches:
    """The timed batches of a loader, with the loader's length."""

    def __init__(self, loader: Any, timings: Timings) -> None:
        self.loader, self.timings = loader, timings

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self.timings.batches(self.loader)


def timed(loader: Iterable[Any], model: nn.Module, *others: nn.Module) -> Batches:
    """Return the loader's batches, and time a loop over them until the next call.

    Times are those of waiting for data, of forward and backward of all models, and of waiting for
    the sums of their gradients. Pass the DDP wrapper if a model has one, and each model of a loop
    that trains several, such as a GAN's. Call it once an epoch, and `step` at the end of each step.
    The loop never waits for the device. The times are written below TANDEM_OUTPUT, which the
    launcher sets; without it nothing is written.
    """
    global _current
    if _current is None or _current.process != os.getpid():
        _current = Timings(model)
    _current.watch(model, *others)
    return Batches(loader, _current)


def step(samples: Optional[int] = None, **scalars: Any) -> None:
    """End a step of the optimizer, and record up to eight scalars, such as `loss=loss`.

    `samples`: how many this rank has trained on; by default as many as the batches since the last
    step hold, if that is known. A scalar is a number or a tensor of one element; None is left out.
    The host never waits for a tensor on a GPU: it is copied in the background. Raises UserError.
    """
    if _current is None:
        raise UserError("tandem.timings.step: nothing is timed: for batch in timed(loader, model).")
    _current.step(samples, scalars)


def _call_after_backward(function: Callable[[], None]) -> None:
    """Have autograd call a function after this backward, behind what was queued before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)
