"""Sums of digests, the mean step that is made of them, and the wait that rules it."""

import json

import pytest

from contract import digests, validate
from contract.digests import Least, RankSums, RunSums
from contract.waits import largest_wait, mean_step

NONE = dict.fromkeys(digests.ROW)


def row(phase="steady", step=1, steps=1, sync=0.1, waits=None, **spent):
    """A row of a digest, times in seconds a step."""
    parts = {"forward": 0.2, "backward": 0.3, "sync_exposed": sync, **spent}
    ticks = [round(steps * parts.get(name, 0.0) / digests.TICK) for name in digests.CATEGORIES]
    waits = [sync] * steps if waits is None else waits
    told = {"phase": phase, "step": step, "epoch": 0, "steps": steps, "samples": 8 * steps}
    return {**NONE, **told, "spent": ticks, "waits": [round(w / digests.TICK) for w in waits]}


def run(*ranks):
    """The sums of ranks, of which each is a list of rows."""
    sums, least = RunSums(1, len(ranks)), Least(len(ranks))
    for rank, rows in enumerate(ranks):
        for one in rows:
            sums.ranks.setdefault(rank, RankSums()).add(one)
            least.add(one)
    sums.least = least.sums
    return sums


def test_a_wait_is_the_networks_as_long_as_even_the_last_rank_waits():
    step = mean_step(run([row(steps=10, step=10, sync=0.5)], [row(steps=10, step=10, sync=0.2)]))
    assert step.network == pytest.approx(0.2) and step.straggler == pytest.approx(0.15)
    assert step.seconds == pytest.approx(0.85) and step.images == pytest.approx(16)
    # Where they take turns, each waits for the other: the network for nobody.
    turns = [0.0, 0.4] * 5
    step = mean_step(
        run(
            [row(steps=10, step=10, sync=0.2, waits=turns)],
            [row(steps=10, step=10, sync=0.2, waits=turns[::-1])],
        )
    )
    assert step.network == pytest.approx(0.0) and step.straggler == pytest.approx(0.2)


def test_the_steps_of_two_ranks_meet_however_they_were_told():
    waits = [n / 100 for n in range(1, 11)]
    halves = [
        row(step=4, steps=4, waits=waits[:4]),
        row(step=10, steps=6, waits=waits[4:]),
    ]
    least = run([row(step=10, steps=10, waits=[0.05] * 10)], halves).least
    assert least["steady"] == (10, pytest.approx(sum(min(0.05, wait) for wait in waits)))


def test_the_first_step_and_the_warm_up_do_not_count():
    first, exact = row("first", sync=9.0), row("exact", step=3, steps=2, sync=2.0)
    assert mean_step(run([first])) is None
    assert mean_step(run([first, exact])).network == pytest.approx(2.0)
    steady = row(step=9, steps=6, sync=0.1)
    assert mean_step(run([first, exact, steady])).network == pytest.approx(0.1)


def test_nothing_is_said_before_all_ranks_have_told():
    sums = run([row()])
    sums.world = 2
    assert mean_step(sums) is None
    assert mean_step(RunSums(1, 1)) is None


@pytest.mark.parametrize(
    ("spent", "wait"),
    [
        ({"sync": 0.1}, None),
        ({"sync": 0.2}, "network"),
        ({"sync": 0.2, "data": 0.3}, "data"),
        ({"h2d": 0.4}, "h2d"),
    ],
)
def test_the_largest_wait_rules_from_a_quarter_of_the_time_on(spent, wait):
    assert largest_wait(mean_step(run([row(step=5, steps=5, **spent)])).fractions) == wait


def test_saving_counts_whether_in_a_step_or_beside_it():
    save = {**NONE, "beside": [0] * 7 + [30000, 0]}
    step = mean_step(run([row(step=5, steps=5), save]))
    assert step.checkpoint == pytest.approx(0.6)
    assert largest_wait(step.fractions) == "checkpoint"


def test_what_lies_between_two_looks_is_their_difference():
    before = run([row(step=5, steps=5, sync=5.0)])
    then = before.copy()
    before.ranks[0].add(row(step=10, steps=5, sync=0.2))
    before.least = {"steady": (10, 26.0), "exact": (0, 0.0)}
    assert then.ranks[0].steps == 5
    assert mean_step(before.since(then)).network == pytest.approx(0.2)
    assert mean_step(before.since(RunSums(1, 1))).network == pytest.approx(2.6)


def test_images_per_second_are_of_all_ranks():
    assert run([row(step=5, steps=5)] * 1, [row(step=5, steps=5)]).images_per_second == (
        pytest.approx(16 / 0.6)
    )
    assert RunSums(1, 2).images_per_second is None


def test_sums_of_a_line_are_the_same_again():
    sums = run([row(step=5, steps=5), {**NONE, "loss": 0.5, "top1": 0.75}]).ranks[0]
    told = json.loads(json.dumps(sums.document()))
    again = RankSums.of(validate.check(told, digests.RANK, "line"))
    assert again.document() == sums.document()
    assert (again.loss, again.steps, again.samples) == (0.5, 5, 40)


def test_steps_that_a_rank_never_tells_of_are_forgotten():
    least = Least(2)
    for step in range(3 * digests.WINDOW):
        least.add(row(step=step + 1))
    assert len(least._open) <= digests.WINDOW and least.sums["steady"] == (0, 0.0)
