"""Run exchanges of several collectives in the background, in the same order on all ranks.

Gloo matches collectives by their order within a process group. Callbacks run in any order, so a
collective in a callback could be matched with the collective of another bucket. Here each stage of
an exchange has a thread, which processes buckets in the order of `start`. DDP starts buckets in the
same order on all ranks. A stage that sends also has a process group. While this stage sends one
bucket, the other stages encode or decode the next buckets. feedback.py defines the stages.

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
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from ..compat import end_group
from .entropy import EntropyCoder

Result = torch.futures.Future[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of an exchange. `work` is called with the result of the stage before, and returns the
    input of the next stage. If the stage `sends`, `work` also gets a process group: of all ranks,
    or that of `groups` to which this rank belongs (None if it belongs to none)."""

    work: Callable[..., Any]
    sends: bool = False
    groups: Tuple[Tuple[int, ...], ...] = ()


class QueuedJob(NamedTuple):
    """A job that waits for its next stage. `job`: the stage's input. `result`: the future of the
    last stage's output. `ready`: the event of CUDA after which `job` is complete; None on a CPU.
    `after`: a future for which the first stage waits, or None."""

    job: Any
    result: "torch.futures.Future[Any]"  # set_exception is typed as if it took the result
    ready: Any
    after: Optional[Result] = None


class Carrier:
    """Runs each job, the exchange of a bucket, through `stages`. Each stage has a thread, a stream,
    and a process group if the stage sends. Making a Carrier is collective. A job fails if a peer is
    silent for `patience` seconds."""

    def __init__(self, stages: List[Stage], device: torch.device, patience: float) -> None:
        self.device = device
        # One for each stage. None ends a queue.
        self._queues: List[queue.SimpleQueue[Optional[QueuedJob]]] = [
            queue.SimpleQueue() for _ in stages
        ]
        self._failure: Optional[BaseException] = None  # the first, of any job
        self._threads: List[threading.Thread] = []
        for number, stage in enumerate(stages):
            group_argument: Tuple[Any, ...] = ()  # of `work`: one group or nothing
            if stage.sends:
                group_argument = (new_group(stage.groups, timedelta(seconds=patience), "gloo"),)
            arguments = (number, stage, group_argument)
            thread = threading.Thread(target=self._serve, args=arguments, daemon=True)
            thread.start()
            self._threads.append(thread)

    def start(self, job: Any, result: Result, after: Optional[Result] = None) -> None:
        """Start a job. The caller must not change its tensors until the future `result` is done.
        Its first stage waits for the future `after`."""
        # The first stage's stream must not read the bucket before backward has written it.
        ready = torch.cuda.current_stream().record_event() if self._is_on_gpu else None
        self._queues[0].put(QueuedJob(job, result, ready, after))

    def end(self) -> None:
        """End threads and groups after the last job. Does not wait for jobs that fail or hang."""
        self._queues[0].put(None)  # each stage passes it on
        # After a failure, threads may hang in a collective. A finalizer may call this function in
        # one of the threads, which cannot wait for itself.
        for thread in self._threads:
            if self._failure is None and thread is not threading.current_thread():
                thread.join(1)  # seconds: the thread may wait for a peer

    def future(self) -> Result:
        """Make a future for `start`."""
        return torch.futures.Future(devices=[self.device] if self._is_on_gpu else None)

    @property
    def _is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _serve(self, number: int, stage: Stage, group_argument: Tuple[Any, ...]) -> None:
        """Run a stage's thread until the end of its queue. The thread does the stage's work for
        each job, and then queues the job for the next stage, or sets its result. After an error
        this job and all later jobs fail."""
        stream = None
        if self._is_on_gpu:
            torch.cuda.set_device(self.device)  # otherwise torch makes a context on GPU 0, too
            stream = torch.cuda.Stream(self.device, priority=-1)
        is_last = number + 1 == len(self._queues)
        next_queue = None if is_last else self._queues[number + 1]
        for queued in iter(self._queues[number].get, None):
            try:
                if self._failure is not None:
                    raise self._failure
                # torch.cuda.stream(None) would initialize CUDA in a process that has no GPU to use.
                on_stream = torch.cuda.stream(stream) if stream else contextlib.nullcontext()
                with torch.no_grad(), on_stream:
                    if stream is not None:
                        stream.wait_event(queued.ready)
                    if queued.after is not None:
                        queued.after.wait()
                    if stream is not None:
                        # Once nothing refers to a tensor, the stream that allocated it may reuse
                        # its memory; that must not happen before this stream has read it.
                        for tensor in list_tensors(queued.job):
                            if tensor.is_cuda:
                                tensor.record_stream(stream)
                    output = stage.work(queued.job, *group_argument)
                    if next_queue is None:
                        queued.result.set_result(output)
                        continue
                    ready = stream.record_event() if stream is not None else None
                next_queue.put(QueuedJob(output, queued.result, ready))
            except BaseException as error:
                # A peer is lost, so the jobs of all buckets must fail. Otherwise they would hang.
                self._failure = error
                queued.result.set_exception(error)
        if next_queue is not None:
            next_queue.put(None)
        for group in group_argument:
            end_group(group)


class Flag:
    """True if a number on the device is at most `limit`; False for NaN. Reading the flag waits
    for its stage's work on the device, but not for work that was queued after the flag was made."""

    def __init__(self, value: torch.Tensor, limit: float) -> None:
        self._value, self._limit, self._arrived = value, limit, None
        if value.is_cuda:
            # Copied at once: a later copy would wait for work that the stage has queued since.
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
    """Make process groups of these ranks, and return the group to which this rank belongs, or None.
    Without `groups`, make one group of all ranks. `backend`: by default the backend that sums the
    gradients. Collective."""
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
    """Send row n of `rows`, uint8 (N, bytes), to the n-th of `ranks`, and return the rows received
    from these ranks (N, bytes). `ranks`: the members of the group, by default all ranks. If all
    ranks have a `coder`, they send `messages` instead, which are the compressed rows. Raises
    PeerLost.

    In step k, rank r sends to r + k, receives from r - k, and finishes both before step k + 1
    (pairwise exchange: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", 2005). Gloo sends nothing before the receive is posted, so no two ranks
    send to a rank that is late. If two ranks sent to one rank, the switch would drop packets, or
    share one link while another link idles. All links would then be half used.
    """
    outgoing = to_host(rows) if coder is None else messages
    received = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
    world = len(rows)
    peers = range(world) if ranks is None else ranks
    local = peers.index(dist.get_rank())
    received[local].copy_(rows[local])  # never sent
    expansions = []
    for step in range(1, world):
        # Positions in `peers` and among the rows.
        target, source = (local + step) % world, (local - step) % world
        if coder is None:
            _trade(outgoing[target], peers[target], received[source], peers[source], group)
            continue
        message = coder.make_room(received[source])
        begin = time.monotonic()
        _trade(outgoing[target], peers[target], message, peers[source], group)
        # All rows have the same length, so this row stands for the row that was not sent.
        coder.count(outgoing[target], received[target], time.monotonic() - begin)
        # Expanded in a thread, while the next rank's message travels.
        expansions.append(coder.pool.submit(coder.expand, message, received[source]))
    for expansion in expansions:
        expansion.result()  # raises the errors of `expand`
    # On a GPU the stage's stream orders this copy before what reads it.
    return received.to(rows.device, non_blocking=True)


def _trade(
    message: torch.Tensor, target: int, received: torch.Tensor, source: int, group: Any
) -> None:
    """Send `message` to rank `target`, and fill `received` from rank `source`, at the same time. A
    received message may have fewer bytes than `received`. Raises PeerLost."""
    # The receive is posted first, because the peer's Gloo waits for the receive before it sends.
    # `irecv` raises at once if the connection is already known to be broken.
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
    """Raise a RuntimeError of the block as PeerLost: torch's own messages name no rank."""
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
    """Return the rows, uint8 (bytes), of all `count` ranks: (count, bytes). Raises PeerLost. Each
    rank sends to every other rank directly. Gloo's all_gather would pass rows from rank to rank."""
    messages = [] if coder is None else [coder.compress(to_host(row))] * count
    return all_to_all(row.expand(count, -1), group, ranks, messages, coder)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, complete on return, or a contiguous CPU tensor itself."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    # A blocking event sleeps. Other events spin on a processor core that should load images.
    arrived = torch.cuda.Event(blocking=True)
    arrived.record()
    arrived.synchronize()
    return pinned
