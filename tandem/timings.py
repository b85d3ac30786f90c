"""Time the loop of a script: scripts call `timed` around the loader, and `step` after each step.

Hooks of the loader and of the models switch a stopwatch (clock.py) from one category to the next.
Each step becomes a line for the report (step_lines.py). trainer/ has its own loop, and uses only
the stopwatch and the lines.
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
from contract.records import MOST_SCALARS
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

UNCOUNTED = (
    "tandem: a batch of this loader does not say how many samples it holds: end each step with "
    "timings.step(samples=N). Until then no speed is reported."
)
COMPARED_BATCHES = 5  # the first ones of each rank, which must differ from those of other ranks
DUPLICATES = (
    f"tandem: the first {COMPARED_BATCHES} batches of this rank are another rank's, too: the ranks "
    "do not divide the samples, so more machines learn nothing more. Give the DataLoader a "
    "DistributedSampler, and let a stream (IterableDataset) leave out the other ranks' samples."
)
PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class Timings:
    """Times the loops of a process by hooks of their loaders and models; see `timed`. A process has
    one `Timings` for all models that it trains in turn, so that each second is counted once."""

    def __init__(self, model: nn.Module) -> None:
        self.process = os.getpid()
        self.coordinates, self.host = read_coordinates(os.environ), host_name(os.environ)
        # A model without parameters counts as one in fp32 on the CPU.
        weight = next(model.parameters(), torch.zeros(0))
        self.device, self._weight_type = weight.device, weight.dtype
        self.clock = Clock(self.device)
        SUMS.share(self.device)  # the guard reads these counters (sums.py)
        self.lines = Lines(
            os.environ.get("TANDEM_OUTPUT"), self.host, self.coordinates.rank, self.clock
        )
        self._models: List[Callable[[], Any]] = []  # weak references, of the current loop
        # For each model that has hooks: how many backwards of the first step sum its gradients.
        self._sum_counts: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._unsummed: List[UnsummedSteps] = []  # one for each DDP model of the current loop
        self._sum_hooks: List[Any] = []  # on parameters, until the first step is over
        self._has_started = False  # whether the `start` line is written
        self._loader: Any = None  # of the current loop
        self._epochs, self._steps = 0, 0  # that have ended
        self._batch_samples: List[Optional[int]] = []  # of each batch since the last step
        self._scalar_names: Dict[str, None] = {}  # a set, in the order of first use
        self._has_warned_uncounted = False
        # The checksum and the number of this rank's first batches, at most COMPARED_BATCHES.
        self._batches_checksum = self._compared_batches = 0
        # For the `start` line: the type of the forward, and the images' side in pixels.
        self._precision, self._pixels = "fp32", 0
        atexit.register(self._end)

    def watch(self, *models: nn.Module) -> None:
        """Time these models from now on."""
        self._models = [weakref.ref(model) for model in models]
        self._unsummed = []
        for model in models:
            unsummed_steps = watch_steps(model)
            if unsummed_steps is not None:
                self._unsummed.append(unsummed_steps)
            # `timed` is called once an epoch, and hooks of earlier calls remain.
            if model in self._sum_counts:
                continue
            self._sum_counts[model] = 0
            if unsummed_steps is not None:
                model.register_forward_pre_hook(unsummed_steps.note_forward)
            model.register_forward_pre_hook(self._note_forward)
            model.register_forward_hook(self._time_backward)
            if not self._has_started:
                self._count_sums(model)

    def _count_sums(self, model: nn.Module) -> None:
        """Count the backwards that sum the model's gradients, until the first step is over."""
        in_backward: List[bool] = []  # empty outside a backward

        # Each backward calls this for each parameter, and counts once. DDP's attribute is False in
        # `no_sync`, where gradients are not summed.
        def count(_: torch.Tensor) -> None:
            if not in_backward and getattr(model, "require_backward_grad_sync", True):
                in_backward.append(True)
                self._sum_counts[model] += 1
                _call_after_backward(in_backward.clear)

        weights = [p for p in model.parameters() if p.requires_grad]
        # torch saves parameters without hooks; unless a hook is marked so, torch warns.
        count = torch.utils.hooks.unserializable_hook(count)
        self._sum_hooks += [p.register_hook(count) for p in weights]

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the loader's batches, and switch the clock around each: the time before a batch is
        `data`, and the loop's time begins with `h2d`."""
        self._loader, counter = loader, SampleCounter(loader)
        sampler = getattr(loader, "batch_sampler", None)
        # `tandem.sampler` knows the samples of each rank in each batch; other samplers do not.
        shares = sampler.sizes() if isinstance(sampler, balance.BalancedSampler) else None
        self.clock.enter("data")
        try:
            for batch in loader:
                count = balance.receive(next(shares)) if shares else counter.count(batch)
                self._batch_samples.append(count)
                # If another rank has the same first batches, the script does not divide its stream
                # or its sampler. Unusual tensors, or a store that is gone, must not end the loop.
                if self._compared_batches < COMPARED_BATCHES:
                    self._compared_batches += 1
                    with contextlib.suppress(Exception):
                        self._batches_checksum = checksum(batch, self._batches_checksum)
                        key = f"tandem/samples/{self._batches_checksum}"
                        # A counter in torch's store makes no rank wait. The second rank that counts
                        # warns. The checksum is 0 if no batch had a tensor on the CPU.
                        if (
                            self._compared_batches == COMPARED_BATCHES
                            and self._batches_checksum
                            and torch.distributed.is_initialized()
                            and _get_default_store().add(key, 1) == 2
                        ):
                            print(DUPLICATES, file=sys.stderr, flush=True)
                if not self._has_started:
                    self._pixels = pixels_of(batch)
                self.clock.enter("h2d")
                yield batch
                self.clock.enter("data")
        finally:
            self.clock.enter("between_epochs")
            self._epochs += 1

    def step(self, samples: Optional[int], scalars: Dict[str, Any]) -> None:
        """End a step of this rank; see the function `step`."""
        # A loss without its name would be taken for a number of samples.
        if samples is not None and not float(samples).is_integer():
            raise UserError(
                f"tandem.timings.step: {float(samples):g} is no number of samples: name a value "
                "that is to be recorded, like step(loss=loss)."
            )
        step_scalars = StepScalars(scalars) if scalars else None
        self._scalar_names.update(dict.fromkeys(scalars))
        if len(self._scalar_names) > MOST_SCALARS:
            names = list(self._scalar_names)
            raise UserError(
                f"tandem.timings.step: {names[MOST_SCALARS]} is one scalar too many: a run records "
                f"{MOST_SCALARS}, and has {', '.join(names[:MOST_SCALARS])}."
            )
        batch_samples, self._batch_samples = self._batch_samples, []
        if samples is None and None not in batch_samples:
            samples = sum(cast(List[int], batch_samples))
        if samples is None and not self._has_warned_uncounted:
            self._has_warned_uncounted = True
            if self.coordinates.rank == 0:
                print(UNCOUNTED, file=sys.stderr, flush=True)
        attached = [find_attached(model()) for model in self._models]
        # The first step shows what the `start` line has to say of the loop.
        if not self._has_started:
            self._has_started = True
            for hook in self._sum_hooks:
                hook.remove()
            self._sum_hooks = []
            self.lines.add("start", timed=False, **self._start_line(samples, len(batch_samples)))
            warning = balance.state().warning(is_attached=all(attached))
            if warning and self.coordinates.rank == 0:
                print(warning, file=sys.stderr, flush=True)
        self._steps += 1
        fields: Dict[str, Any] = {"step": self._steps, "epoch": self._epochs}
        fields["samples"] = samples if samples is None else int(samples)
        # A strategy that has not begun yet sums exactly.
        if any(a and a.sync.strategy.rule.warms and a.exact for a in attached):
            fields["exact"] = True
        unsummed_count = max((steps.count for steps in self._unsummed), default=0)
        if unsummed_count:
            fields["unsummed"] = unsummed_count
        self.clock.enter("other")
        self.lines.add("step", scalars=step_scalars, **fields)
        self.lines.flush_ready()

    def _note_forward(self, module: nn.Module, inputs: Any) -> None:
        """Switch the clock as a forward begins; a forward pre-hook. Validation is not timed."""
        if module.training and torch.is_grad_enabled():
            number_type = autocast_type(self.device) or self._weight_type
            self._precision = PRECISIONS.get(number_type, "fp32")
            self.clock.enter("forward")

    def _time_backward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Switch the clock as the backward of these outputs begins and ends; a forward hook.

        Autograd calls the outputs' hooks as their backward begins. After the backward, autograd
        calls the functions that were queued in it, in their order. `note_end` is queued first, and
        DDP's function, which waits for the sums, comes behind it.
        """
        in_backward: List[bool] = []  # not empty once the backward has begun

        def note_begin(_: torch.Tensor) -> None:
            if not in_backward:
                in_backward.append(True)
                self.clock.enter("backward")
                _call_after_backward(note_end)

        def note_end() -> None:
            if getattr(module, "require_backward_grad_sync", False):
                self.clock.enter("sync_exposed")
                # `Attached` counts its own sums, bucket by bucket.
                if find_attached(module) is None:
                    SUMS.enter()
            # This function is queued behind DDP's, so it runs when the sums are there.
            _call_after_backward(lambda: self.clock.enter("optimizer"))

        for tensor in tensors_in(outputs):
            if module.training and tensor.requires_grad:
                tensor.register_hook(note_begin)

    def _start_line(self, samples: Optional[int], micro_batches: int) -> Dict[str, Any]:
        """Return the fields of the `start` line, which describe the loop by its first step.
        `samples`: how many this rank trained on in the step. `micro_batches`: in how many
        batches."""
        wrappers = [cast(Any, model()) for model in self._models]  # DDP, or a model without it
        rank_batch = int(samples or 0)
        models = [getattr(wrapper, "module", wrapper) for wrapper in wrappers]
        # Each model as often as a step sums its gradients.
        sum_counts = [self._sum_counts[wrapper] for wrapper in wrappers]
        summed_models = [model for model, count in zip(models, sum_counts) for _ in range(count)]
        attached = [find_attached(wrapper) for wrapper in wrappers]
        specs = [a.sync.strategy.spec if a else EXACT for a in attached]
        fields = {
            **describe_process(self.coordinates, self.host, self.device, self.clock.started),
            "node_rank": self.coordinates.node or 0,
            "model": "+".join(type(model).__name__ for model in models),
            "parameters": sum(p.numel() for model in models for p in model.parameters()),
            **describe_gradients(*(summed_models or models)),
            "sync": "+".join(dict.fromkeys(specs)),
            "precision": self._precision,
            "rank_batch": rank_batch,
            "global_batch": rank_batch * self.coordinates.size,
            "accumulate": micro_batches,
            "workers": getattr(self._loader, "num_workers", 0),
            "image_size": self._pixels,
            "resumed_samples": 0,
        }
        decisions = balance.state().record()
        if decisions:
            # The script itself chose the precision and the strategy.
            script_choices = {"precision": fields["precision"], "sync": fields["sync"]}
            fields["decided"] = {**script_choices, **decisions}
        # With `tandem.sampler` the ranks' batches differ, so a product would be wrong. `received`:
        # each rank's samples in all batches so far, here in those of the first step.
        received = balance.state().received
        if received:
            fields["global_batch"] = sum(received)
        if hasattr(wrappers[0], "bucket_bytes_cap"):  # an attribute of DDP
            fields["bucket_mb"] = wrappers[0].bucket_bytes_cap / MIB
        with contextlib.suppress(TypeError, AttributeError):  # a loader may have no length
            fields["steps_per_epoch"] = max(1, len(self._loader) // max(1, micro_batches))
            fields["train_images"] = len(self._loader.dataset)
        if any(attached) and "steps_per_epoch" in fields:
            warmup_steps = max(a.warmup_steps for a in attached if a)
            fields["warmup"] = warmup_steps / fields["steps_per_epoch"]
        return fields

    def _end(self) -> None:
        """Write the last line as Python exits; a forked loader process must not write it."""
        if not self._has_started or os.getpid() != self.process:
            return
        # Python sets sys.last_value if an exception ended the process.
        status = "failed" if hasattr(sys, "last_value") else "finished"
        with contextlib.suppress(RuntimeError):  # a broken device cannot be read any more
            self.lines.end(status=status, peak_memory_bytes=peak_memory_bytes(self.device))


_current: Optional[Timings] = None  # of this process


class Batches:
    """The timed batches of a loader, with the loader's length."""

    def __init__(self, loader: Any, timings: Timings) -> None:
        self.loader, self.timings = loader, timings

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self.timings.batches(self.loader)


def timed(loader: Iterable[Any], model: nn.Module, *more_models: nn.Module) -> Batches:
    """Return the loader's batches, and time a loop over them until the next call.

    `loader`: any iterable of batches, with a length or without. `model`, `more_models`: all models
    that the loop trains, such as a GAN's two; pass the DDP wrapper of a model that has one.

    Call `timed` once an epoch, and `step` at the end of each step. Tandem measures the seconds of
    waiting for data, of forward and backward, and of waiting for sums of gradients. The loop never
    waits for the device. Tandem writes the seconds below the folder TANDEM_OUTPUT, which the
    launcher sets (docs/run-directory.md), and writes nothing if this variable is not set. Raises
    UserError if the file cannot be written.
    """
    global _current
    # A process that was forked from a timed process has its own steps.
    if _current is None or _current.process != os.getpid():
        _current = Timings(model)
    _current.watch(model, *more_models)
    return Batches(loader, _current)


def step(samples: Optional[int] = None, **scalars: Any) -> None:
    """End a step of the optimizer, and record up to eight scalars, such as `loss=loss`.

    `samples`: how many samples this rank has trained on in this step; by default the number in the
    batches since the last step, if Tandem can count them. A scalar is a number or a tensor of one
    element; None is skipped. The host never waits for a tensor on a GPU: Tandem copies the tensor
    in the background. Raises UserError before `timed`, for a number of samples that is not whole,
    for a value that is not a single number, and for a ninth scalar.
    """
    if _current is None:
        raise UserError("tandem.timings.step: nothing is timed: for batch in timed(loader, model).")
    _current.step(samples, scalars)


def _call_after_backward(function: Callable[[], None]) -> None:
    """Have autograd call a function after this backward, behind what was queued before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)
