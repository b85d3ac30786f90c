"""Exchanges in the background: who sends to whom and when, and what a stage may hold up."""

import threading

import pytest
import torch
import torch.distributed as dist

from contract.options import Options
from tandem.sync import carrier
from tandem.sync.carrier import Carrier, Stage
from tests.trainer_ranks import run_ranks
from trainer.world import start


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


@pytest.mark.parametrize(("call", "lost"), [("irecv", 1), ("isend", 2)])
def test_a_peer_whose_end_is_known_before_its_transfer_begins_is_named(monkeypatch, call, lost):
    """Gloo refuses to begin, instead of failing while it waits: which, is a matter of moments."""

    def refuse(*_, **__):
        raise RuntimeError("Connection closed by peer")

    for name in ("irecv", "isend"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist, call, refuse)
    with pytest.raises(carrier.PeerLost) as error:
        carrier._trade(torch.zeros(1), 2, torch.zeros(1), 1, None)
    assert error.value.rank == lost
