"""Codes that travel compressed: the same sums in fewer bytes, and a peer's nonsense."""

import pytest
import torch
import zstandard

from contract.errors import RankError
from contract.options import Options
from tandem.sync import entropy, feedback
from tests.trainer_ranks import run_ranks
from tests.unit.trainer.sync_ranks import Between, Steps
from trainer.world import start

TRIAL = 3  # steps, after which ranks decide


def sums(every):
    """For each of `every`, what came of steps in which transfers are as slow, by this rank, as it
    has it: the sums, bytes sent a step before and after ranks decide, and what is said. None:
    without zstandard."""
    feedback.TRIAL_STEPS = TRIAL
    world = start(Options())
    between = Between(world)
    return [sums_with(gains[world.rank], world, between) for gains in every]


def sums_with(gain, world, between):
    if gain is None:
        entropy.zstandard = None
    else:
        entropy.EntropyCoder.gain = gain
    steps = Steps("ef:5:own", world)
    total, sent = 0, []
    for number in range(TRIAL + 2):
        before = between.sent
        total = total + steps.step(number)
        sent.append(between.sent - before)
    return total.tolist()[::7], sent[TRIAL - 1], sent[-1], steps.sync.note


def test_sums_are_the_same_to_the_bit_compressed_and_not_and_all_ranks_decide_alike():
    every = ((2.0, -1.0), (1.0, -2.0), (1.0, None))
    found = dict(zip(every, zip(*run_ranks([1, 1], sums, every))))
    totals = [rank[0] for ranks in found.values() for rank in ranks]
    assert all(total == totals[0] for total in totals)
    size = lambda gains: [rank[1:3] for rank in found[gains]]  # noqa: E731
    for (before, after), (trial, raw), (never, still) in zip(*map(size, found)):
        assert before == trial
        assert raw == never == still > 1.1 * max(before, after)
    assert all(rank[3] for ranks in found.values() for rank in ranks)


@pytest.mark.parametrize("size", [1, 400_000])
def test_any_row_comes_back_and_no_message_is_longer_than_its_room(size):
    coder = entropy.EntropyCoder()
    for row in (torch.zeros(size, dtype=torch.uint8), torch.randint(256, (size,)).byte()):
        message, came = coder.compress(row), torch.empty_like(row)
        room = coder.make_room(row)
        room[: len(message)] = message
        coder.expand(room, came)
        assert torch.equal(came, row)
    coder.end()


def message(length, frame):
    return torch.frombuffer(bytearray(length.to_bytes(8, "little") + frame), dtype=torch.uint8)


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 26))
SHORT = zstandard.ZstdCompressor().compress(bytes(999))


@pytest.mark.parametrize(
    ("length", "frame"),
    [(2**63, b""), (500, b"\x07" * 500), (len(BOMB), BOMB)],
    ids=["8 EiB", "garbage", "a bomb"],
)
def test_what_is_no_codes_is_refused_before_it_takes_memory(length, frame):
    coder, row = entropy.EntropyCoder(), torch.empty(200_000, dtype=torch.uint8)
    with pytest.raises(RankError):
        coder.expand(message(length, frame), row)
    with pytest.raises(RankError):
        coder.expand(message(len(SHORT), SHORT), row)
    coder.end()
