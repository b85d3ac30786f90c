"""Where a process's time goes, and the lines that tell the report.

The stopwatch is in exactly one category at each moment. The categories therefore add up by
construction, and none is a remainder. On CUDA, each switch records an event on the current stream,
which takes microseconds and no synchronisation; events are read once the device has passed them.
Between two such readings, the device's timeline is as long as the host's.
"""

import atexit
import contextlib
import json
import math
import os
import pathlib
import platform
import re
import resource
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from importlib import metadata
from typing import IO, Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, cast

import torch
from torch import nn

from contract.errors import UserError
from contract.runs import RECORD
from contract.strategies import EXACT, MIB

from .compat import autocast_type, cpu_capability
from .coordinates import ProcessCoordinates, cores, host_name, read_coordinates
from .samples import SampleCounter, pixels_of, tensors_in
from .sync.attach import attached_to
from .sync.unsummed import UnsummedSteps, watch_steps


class Lap(NamedTuple):
    """The categories since the last lap, and the times at which each began and ended."""

    categories: List[str]
    marks: List[Any]  # one more than categories


class Clock:
    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Forget all before this moment."""
        self.started = time.monotonic()
        self._categories, self._marks = ["other"], [self._now()]

    def _now(self) -> Any:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def category(self) -> str:
        """The one that it is in."""
        return self._categories[-1]

    def enter(self, category: str) -> None:
        """From now on time belongs to `category`."""
        if category != self._categories[-1]:
            self._categories.append(category)
            self._marks.append(self._now())

    @contextlib.contextmanager
    def within(self, category: str) -> Iterator[None]:
        """Time within belongs to `category`; afterwards it belongs to the previous one again."""
        before = self._categories[-1]
        self.enter(category)
        yield
        self.enter(before)

    def lap(self) -> Lap:
        """Everything since the last lap; the current category continues into the next one."""
        now = self._now()
        done = Lap(self._categories, [*self._marks, now])
        self._categories, self._marks = [done.categories[-1]], [now]
        return done

    def passed(self, lap: Lap) -> bool:
        """Whether the device has passed the lap's end, so that `read` would not wait for it."""
        return not self._cuda or bool(lap.marks[-1].query())

    def read(self, lap: Lap, patience: Optional[float] = None) -> Dict[str, float]:
        """Seconds per category. On CUDA this waits until the device has passed the lap's end;
        {} where that takes longer than `patience` seconds."""
        if self._cuda and patience is None:
            lap.marks[-1].synchronize()
        elif self._cuda:
            until = time.monotonic() + float(patience or 0)
            while not self.passed(lap):
                if time.monotonic() > until:
                    return {}
                time.sleep(0.01)
        seconds: Dict[str, float] = {}
        for category, begin, end in zip(lap.categories, lap.marks, lap.marks[1:]):
            spent = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            seconds[category] = seconds.get(category, 0.0) + spent
        return seconds


def attempt() -> int:
    return int(os.environ.get("TANDEM_ATTEMPT", "1"))


def opened(output: str, name: str, mode: str) -> IO[str]:
    """A file below the folder `output`. Raises UserError."""
    path = pathlib.Path(output, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error


def _endless(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


LOOK, STALL = 1.0, 5.0  # seconds: how often a rank's stall is looked for, and after how long
FLUSH = 1.0  # seconds: at most so much of its steps does a killed rank leave untold, and one step


class Block:
    """Steps that share a line: their sums. A loop of hundreds of steps a second would write more
    than anybody reads, so a line has as many steps as take HALF a second, a power of two, and ends
    at a multiple of that: ranks, whose steps last as long, end theirs at the same steps, and their
    waits can be matched. A line also ends after a whole second, so that little is untold."""

    HALF, WHOLE = 0.5, 1.0

    def __init__(self) -> None:
        self.size = 1  # steps that the next line has, if all goes on as before
        self.line: Optional[Dict[str, Any]] = None

    def add(self, line: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        """A step; returns the line that it completes."""
        spent = sum(line["seconds"].values())
        if self.line is None:
            self.line = {**line, "steps": 1, "longest": spent}
        else:
            seconds = self.line["seconds"]
            for name, value in line["seconds"].items():
                seconds[name] = round(seconds.get(name, 0.0) + value, 7)
            samples = self.line["samples"], line["samples"]
            joined = {
                "seconds": seconds,
                "steps": self.line["steps"] + 1,
                "samples": None if None in samples else sum(samples),
                "longest": max(self.line["longest"], spent),
            }
            self.line = {**self.line, **line, **joined}
        whole = sum(self.line["seconds"].values())
        if line["step"] % self.size == 0 or whole >= self.WHOLE:
            self.resize(line["step"], whole / self.line["steps"])
            return self.close()
        return None

    def resize(self, step: int, each: float) -> None:
        """Double or halve it, one at a time: `step` stays a multiple of it."""
        if each * self.size < self.HALF and step % (2 * self.size) == 0:
            self.size *= 2
        elif each * self.size >= 2 * self.HALF and self.size > 1:
            self.size //= 2

    def close(self) -> Optional[Dict[str, Any]]:
        line, self.line = self.line, None
        return line


class Lines:
    """`nodes/<host>/rank<k>.<attempt>.steps.jsonl` below `output`; see docs/run-directory.md.
    Without an output nothing is written. Raises UserError where it cannot be.

    Each line is held with its lap until `flush` or `flush_ready`, because on CUDA a lap can be read
    only once the device has passed its end. Where none is added for STALL seconds, a thread says in
    which category the rank is, and again when that changes: so ranks that wait for another in a sum
    can be told from the one that has not arrived.
    """

    def __init__(self, output: Optional[str], host: str, rank: int, clock: Clock) -> None:
        self._clock = clock
        self._waiting: List[Tuple[Dict[str, Any], Optional[Lap]]] = []
        self._flushed = time.monotonic()
        self._block = Block()
        self._first_step = True  # the next step warms up, and has a line to itself
        self.steps, self.spent = 0, 0.0  # all later ones that were read, and their seconds
        self._added, self._step = time.monotonic(), 0
        self._stalled: Optional[Tuple[float, str]] = None  # what `look` said last
        self._file: Optional[IO[str]] = None
        self._lock = threading.Lock()  # of the file
        self._over = threading.Event()
        if output:
            name = f"nodes/{host}/rank{rank}.{attempt()}.steps.jsonl"
            self._file = opened(output, name, "a")
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="stalls")
            self._watcher.start()

    def add(self, kind: str, timed: bool = True, **fields: Any) -> None:
        """`timed`: the line accounts for all time since the last timed one."""
        # JSON has no NaN and no infinity.
        known = {name: None if _endless(value) else value for name, value in fields.items()}
        own = {"attempt": attempt()} if kind == "start" else {}
        line = {"kind": kind, **own, **known}
        self._waiting.append((line, self._clock.lap() if timed else None))
        self._added, self._step = time.monotonic(), fields.get("step", self._step)

    def _watch(self) -> None:
        # A disk that is full is for the loop to say.
        with contextlib.suppress(OSError):
            while not self._over.wait(LOOK):
                self.look()

    def look(self) -> None:
        """Say where a rank stalls that has added no line for STALL seconds: once, and again where
        it goes on to another category."""
        place = self._added, self._clock.category
        idle = time.monotonic() - self._added
        if idle >= STALL and place != self._stalled:
            self._stalled = place
            line = {"kind": "stall", "category": place[1], "step": self._step}
            self._print({**line, "idle": round(idle, 1)})

    def end(self, **fields: Any) -> None:
        """Write the last line; its `mono` is the time at which the last lap ends."""
        self._over.set()
        if self._file is not None:
            # A thread that wakes while Python ends is ended in the middle of what it does.
            self._watcher.join(LOOK)
        self.add("end", **fields)
        self._waiting[-1][0]["mono"] = time.monotonic()
        # After a failure the device may hang in a collective whose peers are gone.
        self.flush(patience=1.0 if fields["status"] == "failed" else None)

    def flush_ready(self) -> None:
        """Write, once in FLUSH seconds, the lines whose end the device has passed; waits for
        none."""
        if time.monotonic() - self._flushed < FLUSH:
            return
        passed = 0
        while passed < len(self._waiting):
            lap = self._waiting[passed][1]
            if lap is not None and not self._clock.passed(lap):
                break
            passed += 1
        self._write(passed)

    def flush(self, patience: Optional[float] = None) -> None:
        """Write all lines, after waiting for the device, `patience` seconds at most."""
        self._write(len(self._waiting), patience)

    def _write(self, count: int, patience: Optional[float] = None) -> None:
        """Write the first `count` of the lines that wait."""
        for line, lap in self._waiting[:count]:
            if lap is not None:
                spent = self._clock.read(lap, patience)
                if not spent and patience:
                    patience = 0.0  # later laps end later
                line["seconds"] = {name: round(value, 7) for name, value in spent.items() if value}
                if line["kind"] == "step" and not self._first_step:
                    self.steps, self.spent = self.steps + 1, self.spent + sum(spent.values())
            self._put(line)
        del self._waiting[:count]
        self._flushed = time.monotonic()

    def _put(self, line: Dict[str, Any]) -> None:
        """A line, or a step of one. Where sums begin or end to be exact another line begins."""
        if line["kind"] != "step":
            self._print(self._block.close())
            self._print(line)
            return
        before = self._block.line
        if before is not None and before.get("exact") != line.get("exact"):
            self._print(self._block.close())
        done = self._block.add(line)
        self._print(self._block.close() if self._first_step and done is None else done)
        self._first_step = False

    def _print(self, line: Optional[Dict[str, Any]]) -> None:
        if line is not None and self._file is not None:
            with self._lock:
                self._file.write(json.dumps(line, allow_nan=False) + "\n")
                self._file.flush()


def peak(device: torch.device) -> int:
    """The peak memory of this process in bytes: allocated on a GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def process_line(
    coordinates: ProcessCoordinates, host: str, device: torch.device, began: float
) -> Dict[str, Any]:
    """The fields of the `start` line that say which process this is, where, and in which Python.
    `began`: when its clock did."""
    on_gpu = device.type == "cuda"
    return {
        "record": RECORD,
        "mono_process": process_start(),
        "mono": began,
        "unix": time.time(),
        "host": host,
        "rank": coordinates.rank,
        "local_rank": coordinates.local_rank,
        "world_size": coordinates.size,
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "versions": versions(on_gpu),
        **machine(),
        "instructions": instructions(),
    }


def gradients_line(*models: nn.Module) -> Dict[str, Any]:
    """The field that says what a step sums, a model as often as it is named: bytes of all
    gradients."""
    weights = [p for model in models for p in model.parameters() if p.requires_grad]
    return {"gradient_bytes": sum(p.numel() * p.element_size() for p in weights)}


def process_start() -> float:
    """When this process, or the guard that started it, began: CLOCK_MONOTONIC in seconds."""
    if "TANDEM_GUARD_MONO" in os.environ:
        return float(os.environ["TANDEM_GUARD_MONO"])
    # After the name in parentheses, which may hold spaces, starttime is the 20th field.
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    return time.monotonic() - age


PACKAGES = ("torchvision", "numpy", "pillow")
DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def versions(on_gpu: bool) -> Dict[str, str]:
    """Of everything that computes, beside Python and torch: the kernel, and what torch was built
    with where it is used."""
    found = {"kernel": platform.release()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if on_gpu:
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _first(DRIVER, r"Kernel Module.*?\s(\d[\d.]+)") or "unknown"
    return found


def machine() -> Dict[str, Any]:
    """Its processor and how many of its cores this process may use."""
    name = _first(pathlib.Path("/proc/cpuinfo"), r"(?m)^model name\s*:\s*(.+)$")
    return {"cpu": name or platform.machine(), "cores": cores()}


def instructions() -> Dict[str, Optional[str]]:
    """The CPU instructions in use. `aten`: the level that torch chose for its own kernels;
    `onednn_limit`: the environment's limit for oneDNN, which computes convolutions (None: it uses
    the best that the CPU has, and has no way to ask which that is)."""
    return {"aten": cpu_capability(), "onednn_limit": os.environ.get("ONEDNN_MAX_CPU_ISA")}


def _first(path: pathlib.Path, pattern: str) -> Optional[str]:
    """What the group of a pattern first matches in a file; None where it does not, or there is no
    such file."""
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found.group(1).strip() if found else None


class Timings:
    """A process's own loops, timed by hooks of their loaders and models; see `timed`. A process has
    one, whatever models it trains in turn, so that each of its seconds is counted once."""

    def __init__(self, model: nn.Module) -> None:
        self.process = os.getpid()
        self.coordinates, self.host = read_coordinates(os.environ), host_name(os.environ)
        first = next(model.parameters(), torch.zeros(0))
        self.device, self._own_type = first.device, first.dtype
        self.clock = Clock(self.device)
        self.lines = Lines(
            os.environ.get("TANDEM_OUTPUT"), self.host, self.coordinates.rank, self.clock
        )
        self._models: List[Callable[[], Any]] = []  # of the loop that runs
        # Of each model that has hooks: backwards that sum its gradients, in the first step.
        self._sums: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._unsummed: List[UnsummedSteps] = []  # steps of each DDP model of the loop
        self._counting: List[Any] = []  # hooks of parameters, until the first step is over
        self._begun = False  # whether the `start` line is written
        self._loader: Any = None
        self._epochs, self._steps = 0, 0
        self._samples: List[Optional[int]] = []  # of each batch since the last step
        self._has_asked = False  # for the number of samples
        self._type, self._pixels = "fp32", 0
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
            if not self._begun:
                self._count_sums(model)

    def _count_sums(self, model: nn.Module) -> None:
        begun: List[bool] = []

        def count(_: torch.Tensor) -> None:
            if not begun and getattr(model, "require_backward_grad_sync", True):
                begun.append(True)
                self._sums[model] += 1
                _queue(begun.clear)

        weights = [p for p in model.parameters() if p.requires_grad]
        count = torch.utils.hooks.unserializable_hook(count)
        self._counting += [p.register_hook(count) for p in weights]

    def batches(self, loader: Any) -> Iterator[Any]:
        self._loader, counter = loader, SampleCounter(loader)
        self.clock.enter("data")
        try:
            for batch in loader:
                self._samples.append(counter.count(batch))
                if not self._begun:
                    self._pixels = pixels_of(batch)
                self.clock.enter("h2d")
                yield batch
                self.clock.enter("data")
        finally:
            self.clock.enter("between_epochs")
            self._epochs += 1

    def step(self, samples: Optional[int]) -> None:
        counts, self._samples = self._samples, []
        if samples is None and None not in counts:
            samples = sum(cast(List[int], counts))
        if samples is None and not self._has_asked:
            self._has_asked = True
            if self.coordinates.rank == 0:
                print(UNCOUNTED, file=sys.stderr, flush=True)
        if not self._begun:
            self._begun = True
            for hook in self._counting:
                hook.remove()
            self._counting = []
            self.lines.add("start", timed=False, **self._start_line(samples, len(counts)))
        self._steps += 1
        fields: Dict[str, Any] = {"step": self._steps, "epoch": self._epochs}
        fields["samples"] = samples if samples is None else int(samples)
        if self._warming():
            fields["exact"] = True
        unsummed = max((steps.count for steps in self._unsummed), default=0)
        if unsummed:
            fields["unsummed"] = unsummed
        self.clock.enter("other")
        self.lines.add("step", **fields)
        self.lines.flush_ready()

    def _warming(self) -> bool:
        """Whether this step's sums were exact for a strategy that had not begun yet."""
        known = [attached_to(model()) for model in self._models]
        return any(one and one.sync.strategy.rule.warms and one.exact for one in known)

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._type = TYPES.get(autocast_type(self.device) or self._own_type, "fp32")
            self.clock.enter("forward")

    def _wait_for_backward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Autograd calls what the outputs hold as their backward begins, and after it what that has
        queued: ours before DDP's own, which waits for the sums."""
        begun: List[bool] = []

        def begins(_: torch.Tensor) -> None:
            if not begun:
                begun.append(True)
                self.clock.enter("backward")
                _queue(lambda: self._computed(module))

        for tensor in tensors_in(outputs):
            if module.training and tensor.requires_grad:
                tensor.register_hook(begins)

    def _computed(self, module: nn.Module) -> None:
        """All gradients of this rank are there."""
        if getattr(module, "require_backward_grad_sync", False):
            self.clock.enter("sync_exposed")
        _queue(lambda: self.clock.enter("optimizer"))  # behind DDP's own

    def _start_line(self, samples: Optional[int], parts: int) -> Dict[str, Any]:
        """Describe the loop in its first step, which had so many batches."""
        models = [cast(Any, model()) for model in self._models]
        rank_batch = int(samples or 0)
        own = [getattr(model, "module", model) for model in models]
        summed = [one for model, one in zip(models, own) for _ in range(self._sums[model])]
        at_work = [attached_to(model) for model in models]
        specs = [EXACT if one is None else one.sync.strategy.spec for one in at_work]
        fields = {
            **process_line(self.coordinates, self.host, self.device, self.clock.started),
            "node_rank": self.coordinates.node or 0,
            "model": "+".join(type(one).__name__ for one in own),
            "parameters": sum(p.numel() for one in own for p in one.parameters()),
            **gradients_line(*(summed or own)),
            "sync": "+".join(dict.fromkeys(specs)),
            "precision": self._type,
            "rank_batch": rank_batch,
            "global_batch": rank_batch * self.coordinates.size,
            "accumulate": parts,
            "workers": getattr(self._loader, "num_workers", 0),
            "image_size": self._pixels,
            "resumed_samples": 0,
        }
        if hasattr(models[0], "bucket_bytes_cap"):
            fields["bucket_mb"] = models[0].bucket_bytes_cap / MIB
        with contextlib.suppress(TypeError, AttributeError):  # of no known length
            fields["steps_per_epoch"] = max(1, len(self._loader) // max(1, parts))
            fields["train_images"] = len(self._loader.dataset)
        if any(at_work) and "steps_per_epoch" in fields:
            warmup = max(one.warmup_steps for one in at_work if one)
            fields["warmup"] = warmup / fields["steps_per_epoch"]
        return fields

    def _end(self) -> None:
        if not self._begun or os.getpid() != self.process:
            return
        failed = hasattr(sys, "last_value")  # where an exception ended the process
        with contextlib.suppress(RuntimeError):  # a broken device cannot be read any more
            status = "failed" if failed else "finished"
            self.lines.end(status=status, peak_memory_bytes=peak(self.device))


_current: Optional[Timings] = None
UNCOUNTED = (
    "tandem: a batch of this loader does not say how many samples it holds: end each step with "
    "timings.step(samples=N). Until then no speed is reported."
)
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class Batches:
    """A loader's batches, timed; as long as the loader is."""

    def __init__(self, loader: Any, timings: Timings) -> None:
        self.loader, self.timings = loader, timings

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self.timings.batches(self.loader)


def timed(loader: Iterable[Any], model: nn.Module, *others: nn.Module) -> Batches:
    """The loader's batches, while the time between them is booked: waiting for data, forward and
    backward of all models (DDP's, where they are wrapped), and what their gradients' sums are
    waited for. A loop of several, such as a GAN's, names each.
    The device is never read in the loop. To be called for each epoch; `step` ends each step. What
    is found is written below the folder TANDEM_OUTPUT, where the launcher sets that."""
    global _current
    if _current is None or _current.process != os.getpid():
        _current = Timings(model)
    _current.watch(model, *others)
    return Batches(loader, _current)


def step(samples: Optional[int] = None) -> None:
    """Note that a step of the optimizer is done. `samples`: those of this rank; by default as many
    as the batches since the last step hold, if that is known. Raises UserError."""
    if _current is None:
        raise UserError("tandem.timings.step: nothing is timed: for batch in timed(loader, model).")
    _current.step(samples)


def _queue(function: Callable[[], None]) -> None:
    """Have autograd call it once this backward is computed, behind what was queued before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)
