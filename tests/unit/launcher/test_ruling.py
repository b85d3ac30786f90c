"""The line that is said while a run goes on when a wait rules it."""

import pytest

from contract.digests import Least, RankSums, RunSums
from launcher.watch.digests import LEAST_SECONDS, LEAST_STEPS, Ruling
from tests.unit.contract.test_waits import row

TOLD = "network: 0.40 s of 0.90 s a step; `make report` says what to do"


class Attempt:
    """One rank that is looked at once a second."""

    def __init__(self, ranks=1):
        self.said, self.now = [], 0.0
        self.ruling = Ruling(self.said.append)
        self.sums, self.least = RunSums(1, ranks), Least(ranks)
        self.sums.least = self.least.sums

    def steps(self, seconds, each=1, **spent):
        for _ in range(seconds):
            self.now += 1.0
            if each:
                told = row(steps=each, **spent)
                self.sums.ranks.setdefault(0, RankSums()).add(told)
                self.least.add(told)
            self.ruling.look(self.now, self.sums)


def test_a_wait_that_rules_for_a_minute_is_said_once():
    run = Attempt()
    run.steps(int(LEAST_SECONDS), sync=0.4)
    assert run.said == []
    run.steps(600, sync=0.4)
    assert run.said == [TOLD]


def test_each_kind_is_said_once_and_what_comes_later_too():
    run = Attempt()
    run.steps(120, sync=0.4)
    run.steps(120, sync=0.0)
    run.steps(120, sync=0.4)
    assert run.said == [TOLD]
    run.steps(200, sync=0.0, data=0.5)
    assert run.said == [TOLD, "images: 0.50 s of 1.00 s a step; `make report` says what to do"]


def test_the_time_before_the_first_steps_keeps_nothing_from_being_said():
    run = Attempt()
    run.steps(100, each=0)
    run.steps(120, sync=0.4)
    assert run.said == [TOLD]


@pytest.mark.parametrize("phase", ["first", "exact"])
def test_steps_of_which_none_counts_say_nothing(phase):
    run = Attempt()
    run.steps(120, phase=phase, sync=0.0)
    assert run.said == []


@pytest.mark.parametrize("steps", [LEAST_STEPS - 5, 0])
def test_few_steps_say_nothing(steps):
    run = Attempt()
    run.steps(steps, sync=0.4)
    run.steps(300, each=0)
    assert run.said == []


def test_a_run_that_computes_says_nothing():
    run = Attempt()
    run.steps(600, sync=0.01)
    assert run.said == []


def test_nothing_is_said_while_a_rank_is_missing():
    run = Attempt(ranks=2)
    run.steps(600, sync=0.4)
    assert run.said == []
