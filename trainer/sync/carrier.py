"""Exchanges made of several collectives, in the background, in the same order on all ranks.

Gloo pairs collectives by their order within a process group, so who issues the second one from the
first one's callback pairs it with another bucket's: callbacks come in any order. Here each stage
of an exchange has a thread of its own, which takes buckets in the order in which they were handed
over; DDP hands them over in the same order on all ranks. A stage that sends has a process group of
its own too, and does nothing else: while it carries one bucket, the others code their
neighbours, so that the link does not rest.

On a GPU the numbers are coded there on a stream of their own and travel through pinned host memory
and Gloo, so that no kernel of NCCL holds the GPU while a slow link carries. (That way has never run
on a GPU.)
"""

import contextlib
import dataclasses
import queue
import threading
from datetime import timedelta
from typing import Any, Callable, ContextManager, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

Result = torch.futures.Future[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A step of an exchange, which takes what the stage before it returned. One that `sends` is
    also given a process group: of all ranks, or of those `among` which this rank is (None where it
    is in none)."""

    work: Callable[..., Any]
    sends: bool = False
    among: Tuple[Tuple[int, ...], ...] = ()


class Carrier:
    """Runs each job through `stages`: groups, threads and streams behind them. Collective. A peer
    that is silent for `patience` seconds ends a job with an error."""

    def __init__(self, stages: List[Stage], device: torch.device, patience: float) -> None:
        self.device = device
        self._queues: List[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in stages]
        self._failed: Optional[BaseException] = None
        for number, stage in enumerate(stages):
            given: Tuple[Any, ...] = ()
            if stage.sends:
                given = (new_group(stage.among, timedelta(seconds=patience), "gloo"),)
            names = (number, stage, given)
            threading.Thread(target=self._serve, args=names, daemon=True).start()

    def start(self, job: Any, result: Result, after: Optional[Result] = None) -> None:
        """Hand over a job, whose tensors nobody changes until the future `result` is done; its
        first stage waits for the future `after`."""
        ready = torch.cuda.current_stream().record_event() if self._cuda else None
        self._queues[0].put((job, result, ready, after))

    def future(self) -> Result:
        """A future to give to `start`."""
        return torch.futures.Future(devices=[self.device]) if self._cuda else torch.futures.Future()

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    def _serve(self, number: int, stage: Stage, given: Tuple[Any, ...]) -> None:
        stream = torch.cuda.Stream(self.device) if self._cuda else None
        last = number == len(self._queues) - 1
        while True:
            job, result, ready, after = self._queues[number].get()
            try:
                if self._failed is not None:
                    raise self._failed
                with torch.no_grad(), self._on(stream, ready):
                    if after is not None:
                        after.wait()
                    if stream is not None:
                        # Once nothing refers to a tensor, the stream that allocated it may reuse
                        # its memory, which must not be before this stream has read it.
                        for tensor in filter(_is_on_gpu, tensors_of(job)):
                            tensor.record_stream(stream)
                    made = stage.work(job, *given)
                    if last:
                        result.set_result(made)
                        continue
                    ready = stream.record_event() if stream is not None else None
                self._queues[number + 1].put((made, result, ready, None))
            except BaseException as error:
                # A peer is gone: whoever waits must hear of it, for this bucket and all others.
                self._failed = error
                result.set_exception(error)

    def _on(self, stream: Any, ready: Any) -> ContextManager[Any]:
        if stream is None:
            return contextlib.nullcontext()
        stream.wait_event(ready)
        return torch.cuda.stream(stream)


def tensors_of(job: Any) -> Iterator[torch.Tensor]:
    """Those in a job's fields or elements, and in the lists among them."""
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
    """The new group of those ranks `among` which this one is; of all, where none are named. All
    ranks make all groups. `backend`: by default the one over which gradients travel. Collective."""
    own = None
    for ranks in among or [range(dist.get_world_size())]:
        made = dist.new_group(list(ranks), timeout, backend)
        own = made if dist.get_rank() in ranks else own
    return own


def swap_parts(
    parts: torch.Tensor, group: Any, ranks: Optional[Sequence[int]] = None
) -> torch.Tensor:
    """Row n of bytes (N, B) goes to the n-th of `ranks` (all by default), which make up the group;
    returns the rows that came from them (N, B).

    One peer after the other, the next rank first: so no two ranks send to the same one at a time,
    as they do in Gloo's all_to_all, which took 1.2 to 1.6 times as long over a switch. All receives
    stand before the first send, so that nobody's send waits for them.
    """
    sent = to_host(parts)
    received = torch.empty_like(sent, pin_memory=sent.is_pinned())
    world = len(sent)
    peers = range(world) if ranks is None else ranks
    own = peers.index(dist.get_rank())
    received[own].copy_(sent[own])
    # (torch declares that both may return None, as they do on ranks outside the group)
    before = [(own - step) % world for step in range(1, world)]
    coming: List[Any] = [dist.irecv(received[row], peers[row], group=group) for row in before]
    for step in range(1, world):
        row = (own + step) % world
        going: Any = dist.isend(sent[row], peers[row], group=group)
        going.wait()
    for work in coming:
        work.wait()
    return received.to(parts.device, non_blocking=True)


def gather_parts(
    part: torch.Tensor, count: int, group: Any, ranks: Optional[Sequence[int]] = None
) -> torch.Tensor:
    """The bytes (B) of all `count` ranks, on all of them: (N, B).

    Sent to each rank in turn, as Gloo's all_gather would not: it hands them on from rank to rank.
    """
    return swap_parts(part.expand(count, -1), group, ranks)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, complete when this returns; a CPU's tensor stays as it is."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return pinned
