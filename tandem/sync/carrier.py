"""Exchanges made of several collectives, in the background, in the same order on all ranks.

Gloo matches collectives by their order within a process group. A second collective that is issued
from the callback of the first could therefore be matched with that of another bucket, since
callbacks come in any order. Here each stage of an exchange has a thread of its own, which takes
buckets in the order in which they were handed over; DDP hands them over in the same order on all
ranks. A stage that sends also has a process group of its own; while it sends one bucket, the other
stages encode or decode its neighbours.

On a GPU, the numbers are encoded there and travel through pinned host memory and Gloo, so that no
NCCL kernel occupies the GPU during a slow transfer. Each stage has a stream of high priority: its
kernels would otherwise queue behind those of backward, while the link is idle.
"""

import contextlib
import dataclasses
import queue
import threading
import time
from datetime import timedelta
from typing import Any, Callable, ContextManager, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from ..compat import end_group
from .entropy import EntropyCoder

Result = torch.futures.Future[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of an exchange; it takes what the stage before it returned. One that `sends` is also
    passed a process group: of all ranks, or the one of the groups `among` that this rank belongs to
    (None if it belongs to none)."""

    work: Callable[..., Any]
    sends: bool = False
    among: Tuple[Tuple[int, ...], ...] = ()


class Carrier:
    """Runs each job through `stages`, with a thread and a stream for each, and a process group for
    those that send. Collective. A job fails if a peer is silent for `patience` seconds."""

    def __init__(self, stages: List[Stage], device: torch.device, patience: float) -> None:
        self.device = device
        self._queues: List[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in stages]
        self._failed: Optional[BaseException] = None
        self._threads: List[threading.Thread] = []
        for number, stage in enumerate(stages):
            given: Tuple[Any, ...] = ()
            if stage.sends:
                given = (new_group(stage.among, timedelta(seconds=patience), "gloo"),)
            names = (number, stage, given)
            thread = threading.Thread(target=self._serve, args=names, daemon=True)
            thread.start()
            self._threads.append(thread)

    def start(self, job: Any, result: Result, after: Optional[Result] = None) -> None:
        """Hand over a job. Its tensors must not be changed until the future `result` is done; its
        first stage waits for the future `after`."""
        ready = torch.cuda.current_stream().record_event() if self._cuda else None
        self._queues[0].put((job, result, ready, after))

    def end(self) -> None:
        """Give back threads and groups. No job is under way, unless one has failed or hangs: then
        this does not wait for it."""
        self._queues[0].put(None)  # each stage passes it on behind its last job
        for thread in self._threads:
            if self._failed is None and thread is not threading.current_thread():
                thread.join(1)

    def future(self) -> Result:
        """A future to give to `start`."""
        return torch.futures.Future(devices=[self.device]) if self._cuda else torch.futures.Future()

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    def _serve(self, number: int, stage: Stage, given: Tuple[Any, ...]) -> None:
        stream = None
        if self._cuda:
            torch.cuda.set_device(self.device)  # else torch makes a context on card 0, too
            stream = torch.cuda.Stream(self.device, priority=-1)
        onward = self._queues[number + 1 : number + 2]  # of the next stage, if there is one
        for handed in iter(self._queues[number].get, None):
            self._work(handed, stage, given, stream, onward)
        for queued in onward:
            queued.put(None)
        for group in given:
            end_group(group)

    def _work(
        self,
        handed: Tuple[Any, Any, Any, Optional[Result]],
        stage: Stage,
        given: Tuple[Any, ...],
        stream: Any,
        onward: Sequence["queue.SimpleQueue[Any]"],
    ) -> None:
        """One job in one stage."""
        job, result, ready, after = handed
        try:
            if self._failed is not None:
                raise self._failed
            with torch.no_grad(), self._on(stream, ready):
                if after is not None:
                    after.wait()
                if stream is not None:
                    # Once nothing refers to a tensor, the stream that allocated it may reuse
                    # its memory; that must not happen before this stream has read it.
                    for tensor in filter(_is_on_gpu, tensors_of(job)):
                        tensor.record_stream(stream)
                made = stage.work(job, *given)
                if not onward:
                    result.set_result(made)
                    return
                ready = stream.record_event() if stream is not None else None
            for queued in onward:
                queued.put((made, result, ready, None))
        except BaseException as error:
            # A peer is gone: everything that waits, for this bucket or any other, must fail.
            self._failed = error
            result.set_exception(error)

    def _on(self, stream: Any, ready: Any) -> ContextManager[Any]:
        if stream is None:
            return contextlib.nullcontext()
        stream.wait_event(ready)
        return torch.cuda.stream(stream)


class Flag:
    """Whether a number that a stage has found on the device is at most `most`; no NaN is. Reading
    it waits for what the stage had queued until then, not for anything that was queued since."""

    def __init__(self, value: torch.Tensor, most: float) -> None:
        self._value, self._most, self._arrived = value, most, None
        if value.is_cuda:
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()

    def __bool__(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(float(self._value) <= self._most)


def tensors_of(job: Any) -> Iterator[torch.Tensor]:
    """The tensors in a job's fields or elements, and in the lists among them."""
    if isinstance(job, torch.Tensor):
        yield job
    elif dataclasses.is_dataclass(job):
        for field in vars(job).values():
            yield from tensors_of(field)
    elif isinstance(job, (list, tuple)):
        for element in job:
            yield from tensors_of(element)


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def new_group(
    among: Sequence[Sequence[int]], timeout: timedelta, backend: Optional[str] = None
) -> Any:
    """A new process group: the one of the groups `among` that this rank belongs to, or one of all
    ranks if `among` is empty. All ranks make all groups. `backend`: by default that of the
    gradients. Collective."""
    own = None
    for ranks in among or [range(dist.get_world_size())]:
        made = dist.new_group(list(ranks), timeout, backend)
        own = made if dist.get_rank() in ranks else own
    return own


def all_to_all(
    rows: torch.Tensor,
    group: Any,
    ranks: Optional[Sequence[int]] = None,
    messages: Sequence[torch.Tensor] = (),
    coder: Optional[EntropyCoder] = None,
) -> torch.Tensor:
    """Send row n of bytes (N, B) to the n-th of `ranks` (all by default), which make up the group;
    returns the rows that came from them (N, B). With a `coder`, which all have then, what is sent
    is `messages`, that it made of the rows.

    In step k, rank r sends to r + k, receives from r - k, and is done with both before it goes on
    (pairwise exchange: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", 2005). Gloo sends nothing before the receive is posted, so a rank that is
    late is not sent to by two at a time. Where two did, the switch dropped packets or shared the
    link of the one while that of the other idled, and all links were filled to a half.
    """
    sent = to_host(rows) if coder is None else messages
    received = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
    world = len(rows)
    peers = range(world) if ranks is None else ranks
    own = peers.index(dist.get_rank())
    received[own].copy_(rows[own])
    expanding = []
    for step in range(1, world):
        to, source = (own + step) % world, (own - step) % world
        if coder is None:
            _trade(sent[to], peers[to], received[source], peers[source], group)
            continue
        room = coder.room(received[source])
        begin = time.monotonic()
        _trade(sent[to], peers[to], room, peers[source], group)
        coder.count(sent[to], received[to], time.monotonic() - begin)
        # While the next rank's message travels.
        expanding.append(coder.begin_expand(room, received[source]))
    for row in expanding:
        row.result()
    return received.to(rows.device, non_blocking=True)


def _trade(message: torch.Tensor, to: int, room: torch.Tensor, source: int, group: Any) -> None:
    """Send to one rank while another sends here, which may be less than there is room for."""
    # (torch declares that these may return None, as they do on ranks outside the group)
    # The receive first, for which the peer's Gloo waits before it sends. One whose end is known by
    # now does not even let it begin.
    with _naming(source):
        coming: Any = dist.irecv(room, source, group=group)
    with _naming(to):
        going: Any = dist.isend(message, to, group=group)
        going.wait()
    with _naming(source):
        coming.wait()


class PeerLost(RuntimeError):
    """The connection to `rank` has ended, or nothing came over it for too long."""

    def __init__(self, rank: int, reason: Exception) -> None:
        super().__init__(str(reason))
        self.rank = rank


@contextlib.contextmanager
def _naming(peer: int) -> Iterator[None]:
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
    """The bytes (B) of all `count` ranks, on all of them: (N, B).

    They are sent directly to each rank in turn; Gloo's all_gather would pass them on from rank to
    rank.
    """
    messages = [] if coder is None else [coder.compress(to_host(row))] * count
    return all_to_all(row.expand(count, -1), group, ranks, messages, coder)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, complete on return; a contiguous CPU tensor is returned as it is."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)  # others spin, on a core that loads images
    arrived.record()
    arrived.synchronize()
    return pinned
