"""Exchanges in the background: who sends to whom and when, and what a stage may hold up."""

import dataclasses
import itertools
import threading
from typing import Any, List, Tuple

import torch
import torch.distributed as dist

from contract.options import Options
from tandem.sync import carrier
from tandem.sync.carrier import Carrier, Stage, all_gather, all_to_all
from tests.trainer_ranks import run_ranks
from trainer.world import start


@dataclasses.dataclass
class Noted:
    """A send or a receive whose end is written into `calls`."""

    work: Any
    ended: Tuple[str, int]
    calls: List[Tuple[str, int]]

    def wait(self):
        self.work.wait()
        self.calls.append(self.ended)


def exchanged():
    """(rank, what it received of both kinds, its sends and receives in order)."""
    world, calls = start(Options()), []
    for name, ended in (("isend", "sent"), ("irecv", "came")):
        real = getattr(dist, name)

        def noted(tensor, peer, name=name, ended=ended, real=real, **words):
            calls.append((name, peer))
            return Noted(real(tensor, peer, **words), (ended, peer), calls)

        setattr(carrier.dist, name, noted)
    rows = torch.arange(world.size, dtype=torch.uint8)[:, None] + 10 * world.rank
    swapped = all_to_all(rows.expand(-1, 5), None)[:, 0].tolist()
    gathered = all_gather(rows[0].expand(5), world.size, None)[:, 0].tolist()
    return world.rank, swapped, gathered, calls


def test_rows_go_round_so_that_no_two_ranks_send_to_the_same_one_at_a_time():
    for rank, swapped, gathered, calls in run_ranks([1, 1, 1, 1], exchanged):
        assert swapped == [rank, 10 + rank, 20 + rank, 30 + rank]
        assert gathered == [0, 10, 20, 30]
        once = calls[: len(calls) // 2]
        assert once == calls[len(calls) // 2 :]
        # Asked for only when its turn comes, or it would be sent while another sends to this rank.
        turns = [((rank + step) % 4, (rank - step) % 4) for step in (1, 2, 3)]
        each = [
            [("irecv", source), ("isend", to), ("sent", to), ("came", source)]
            for to, source in turns
        ]
        assert once == list(itertools.chain.from_iterable(each))


def order_of_work():
    """The link's second turn comes while the stage after the first one is still at work."""
    start(Options())
    second = threading.Event()

    def link(job, group):
        if job == 1:
            second.set()
        return job

    def slow(job):
        return torch.tensor(second.wait(30))

    carried = Carrier([Stage(link, sends=True), Stage(slow)], torch.device("cpu"), 30)
    results = [carried.future() for _ in range(2)]
    for job, result in enumerate(results):
        carried.start(job, result)
    ended = [bool(result.wait()) for result in results]
    dist.barrier()  # the other rank may still be making its group, by this one's store
    return ended


def test_the_link_carries_the_next_bucket_while_the_last_one_is_decoded():
    assert run_ranks([1, 1], order_of_work) == [[True, True]] * 2
