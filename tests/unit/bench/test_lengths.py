"""The second study's label: from which length of runs on a strategy is called safe."""

import pytest

from bench.accuracy import lengths
from bench.accuracy.lengths import study

STAGES = (study.screening, study.confirming, study.lengths)


def finished(differences):
    """All runs up to the lengths; ef:1.6 differs by so many points, by task and epochs, and no
    other start is good."""

    def top1(run):
        if run.start or run.sync == study.EXACT:
            return 0.1 if run.start else 0.8
        return (
            0.8
            + (differences.get((run.task, run.epochs), 0) + (0.1 if run.seed % 2 else -0.1)) / 100
        )

    found = {}
    for stage in STAGES:
        found.update({run: top1(run) for run in stage(found)})
        if stage is study.screening:  # today's, which were run before
            usual = [study.case(study.LR, "ef:1.6", n, study.GLYPHS) for n in study.SCREENED]
            found.update({run: top1(run) for run in usual})
    return found


@pytest.mark.parametrize(
    ("differences", "steps"),
    [
        ({}, 500),
        ({(study.FONTS, 4): -30}, 1000),
        ({(study.FONTS, 4): -30, (study.GLYPHS, 8): -30}, 2000),
        ({(study.FONTS, 16): -30}, None),
    ],
)
def test_it_is_safe_from_the_shortest_length_on_that_both_tasks_allow(differences, steps):
    assert lengths.safe_from(finished(differences)) == steps


def test_nothing_is_said_before_the_last_run():
    found = finished({})
    longest = [run for run in found if run.epochs == 64]
    del found[longest[-1]]
    assert lengths.safe_from(found) is None
