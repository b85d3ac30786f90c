"""Run exchanges of several collectives in the background, in the same order on all ranks.

Gloo matches collectives by their order within a process group. Callbacks run in any order, so a
collective in the callback of another could be matched with the collective of another bucket. Here
each stage of an exchange has a thread, which processes buckets in the order of `start`; DDP starts
them in the same order on all ranks. A stage that sends also has a process group; while it sends one
bucket, the other stages encode or decode the next ones.

On a GPU, numbers are encoded there and travel through pinned host memory and Gloo, so that no NCCL
kernel occupies the GPU during a slow transfer. Each stage has a stream of high priority: its
kernels would otherwise queue behind those of backward, while the link is idle.
"""

import contextlib
import dataclasses
import queue
import threading
import time
from datetime import timedelta
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from ..compat import end_group
from .entropy import EntropyCoder

Result = torch.futures.Future[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of an exchange: `work` gets what the stage before it returned. If it `sends`, it also
    gets a process group: of all ranks, or this rank's one of `groups` (None if it is in none)."""

    work: Callable[..., Any]
    sends: bool = False
    groups: Tuple[Tuple[int, ...], ...] = ()


class Carrier:
    """Runs each job through `stages`, each with a thread, a stream, and a process group if it
    sends. Making one is collective. A job fails if a peer is silent for `patience` seconds."""

    def __init__(self, stages: List[Stage], device: torch.device, patience: float) -> None:
        self.device = device
        self._queues: List[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in stages]
        self._failed: Optional[BaseException] = None
        self._threads: List[threading.Thread] = []
        for number, stage in enumerate(stages):
            groups: Tuple[Any, ...] = ()  # the further arguments of `work`: one group or nothing
            if stage.sends:
                groups = (new_group(stage.groups, timedelta(seconds=patience), "gloo"),)
            arguments = (number, stage, groups)
            thread = threading.Thread(target=self._serve, args=arguments, daemon=True)
            thread.start()
            self._threads.append(thread)

    def start(self, job: Any, result: Result, after: Optional[Result] = None) -> None:
        """Start a job. The caller must not change its tensors until the future `result` is done.
        Its first stage waits for the future `after`."""
        # The first stage's stream must not read the bucket before backward has written it.
        ready = torch.cuda.current_stream().record_event() if self._is_on_gpu else None
        self._queues[0].put((job, result, ready, after))

    def end(self) -> None:
        """End threads and groups, after the last job. A job that failed or hangs is not awaited."""
        self._queues[0].put(None)  # the end of the queue, which each stage passes on
        # After a failure threads may hang in a collective. A finalizer may run this in a thread.
        for thread in self._threads:
            if self._failed is None and thread is not threading.current_thread():
                thread.join(1)

    def future(self) -> Result:
        """Make a future for `start`."""
        return torch.futures.Future(devices=[self.device] if self._is_on_gpu else None)

    @property
    def _is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _serve(self, number: int, stage: Stage, groups: Tuple[Any, ...]) -> None:
        """Run a stage's thread until the end of its queue."""
        stream = None
        if self._is_on_gpu:
            torch.cuda.set_device(self.device)  # otherwise torch makes a context on GPU 0, too
            stream = torch.cuda.Stream(self.device, priority=-1)
        following = self._queues[number + 1 : number + 2]  # the next stage's queue, if any
        for queued_job in iter(self._queues[number].get, None):
            self._run_job(queued_job, stage, groups, stream, following)
        for next_queue in following:
            next_queue.put(None)
        for group in groups:
            end_group(group)

    def _run_job(
        self,
        queued_job: Tuple[Any, Any, Any, Optional[Result]],
        stage: Stage,
        groups: Tuple[Any, ...],
        stream: Any,
        following: Sequence["queue.SimpleQueue[Any]"],
    ) -> None:
        """Run one stage of a job, and hand it to the following stage or set its result."""
        job, result, ready, after = queued_job
        try:
            if self._failed is not None:
                raise self._failed
            # torch.cuda.stream(None) would initialize CUDA in a process that has no GPU to use.
            on_stream = torch.cuda.stream(stream) if stream else contextlib.nullcontext()
            with torch.no_grad(), on_stream:
                if stream is not None:
                    stream.wait_event(ready)
                if after is not None:
                    after.wait()
                if stream is not None:
                    # Once nothing refers to a tensor, the stream that allocated it may reuse
                    # its memory; that must not happen before this stream has read it.
                    for tensor in list_tensors(job):
                        if tensor.is_cuda:
                            tensor.record_stream(stream)
                output = stage.work(job, *groups)
                if not following:
                    result.set_result(output)
                    return
                ready = stream.record_event() if stream is not None else None
            for next_queue in following:
                next_queue.put((output, result, ready, None))
        except BaseException as error:
            # A peer is gone: everything that waits, for this bucket or any other, must fail.
            self._failed = error
            result.set_exception(error)


class Flag:
    """True if a number on the device is at most `limit`; False for NaN. Reading the flag waits only
    for what its stage had queued when it made the flag."""

    def __init__(self, value: torch.Tensor, limit: float) -> None:
        self._value, self._limit, self._arrived = value, limit, None
        if value.is_cuda:
            # Copied at once: a later read would wait for what the stage has queued since.
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()

    def __bool__(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(float(self._value) <= self._limit)


def list_tensors(job: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a job's fields or elements, nested ones included."""
    if isinstance(job, torch.Tensor):
        yield job
    elif dataclasses.is_dataclass(job):
        for field in vars(job).values():
            yield from list_tensors(field)
    elif isinstance(job, (list, tuple)):
        for element in job:
            yield from list_tensors(element)


def new_group(
    groups: Sequence[Sequence[int]], timeout: timedelta, backend: Optional[str] = None
) -> Any:
    """Make process groups of these ranks, and return the one that this rank belongs to, or None;
    without `groups` make one of all ranks. `backend`: by default that of the gradients.
    Collective."""
    local_group = None
    # torch requires that each rank makes all groups, in the same order.
    for ranks in groups or [range(dist.get_world_size())]:
        group = dist.new_group(list(ranks), timeout, backend)
        if dist.get_rank() in ranks:
            local_group = group
    return local_group


def all_to_all(
    rows: torch.Tensor,
    group: Any,
    ranks: Optional[Sequence[int]] = None,
    messages: Sequence[torch.Tensor] = (),
    coder: Optional[EntropyCoder] = None,
) -> torch.Tensor:
    """Send row n of bytes (N, B) to the n-th of `ranks` (all by default), which form the group, and
    return the rows received from them (N, B). If all ranks have a `coder`, `messages` are sent
    instead, the rows as the coder compressed them.

    In step k, rank r sends to r + k, receives from r - k, and finishes both before step k + 1
    (pairwise exchange: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", 2005). Gloo sends nothing before the receive is posted, so no two ranks
    send to a rank that is late. When two did, the switch dropped packets, or shared one link while
    another one idled, and all links were half used.
    """
    sent = to_host(rows) if coder is None else messages
    received = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
    world = len(rows)
    peers = range(world) if ranks is None else ranks
    local = peers.index(dist.get_rank())
    received[local].copy_(rows[local])  # never sent
    expansions = []
    for step in range(1, world):
        target, source = (local + step) % world, (local - step) % world
        if coder is None:
            _trade(sent[target], peers[target], received[source], peers[source], group)
            continue
        message = coder.make_room(received[source])
        begin = time.monotonic()
        _trade(sent[target], peers[target], message, peers[source], group)
        coder.count(sent[target], received[target], time.monotonic() - begin)
        # Expands in a thread while the next rank's message travels.
        expansions.append(coder.begin_expand(message, received[source]))
    for expansion in expansions:
        expansion.result()
    # On a GPU the stage's stream orders this copy before what reads it.
    return received.to(rows.device, non_blocking=True)


def _trade(
    message: torch.Tensor, target: int, received: torch.Tensor, source: int, group: Any
) -> None:
    """Send to rank `target` while rank `source` sends here, at most as many bytes as `received`
    has. Raises PeerLost."""
    # The receive comes first, because the peer's Gloo waits for it before it sends. It raises at
    # once if the connection is already known to be broken.
    with _name_lost_peer(source):
        receiving: Any = dist.irecv(received, source, group=group)
    with _name_lost_peer(target):
        sending: Any = dist.isend(message, target, group=group)
        sending.wait()
    with _name_lost_peer(source):
        receiving.wait()


class PeerLost(RuntimeError):
    """The connection to `rank` is broken, or was silent for too long."""

    def __init__(self, rank: int, reason: Exception) -> None:
        super().__init__(str(reason))
        self.rank = rank


@contextlib.contextmanager
def _name_lost_peer(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(peer, error) from error


def all_gather(
    row: torch.Tensor,
    count: int,
    group: Any,
    ranks: Optional[Sequence[int]] = None,
    coder: Optional[EntropyCoder] = None,
) -> torch.Tensor:
    """Return the rows of bytes (B) of all `count` ranks: (N, B).

    Each rank sends to every other rank directly. Gloo's all_gather would pass rows from rank to
    rank.
    """
    messages = [] if coder is None else [coder.compress(to_host(row))] * count
    return all_to_all(row.expand(count, -1), group, ranks, messages, coder)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, complete on return, or a contiguous CPU tensor itself."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    # A blocking event sleeps. Other events spin, on a core that should load images.
    arrived = torch.cuda.Event(blocking=True)
    arrived.record()
    arrived.synchronize()
    return pinned
