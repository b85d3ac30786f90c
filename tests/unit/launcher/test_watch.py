"""The stages of a watch: which one follows which, and what causes that."""

import pytest

from launcher.watch.watch import EXITS_WITHIN, SETTLE, SILENCE, STOP_GRACE, Stage, due

RUNNING, SETTLING, STOPPING = Stage.RUNNING, Stage.SETTLING, Stage.STOPPING
ENDING, OVER = Stage.ENDING, Stage.OVER
LATE = STOP_GRACE + EXITS_WITHIN + 1


@pytest.mark.parametrize(
    ("stage", "seconds", "failed", "asked", "then"),
    [
        (RUNNING, 1e6, False, 0, RUNNING),
        (RUNNING, 0, True, 0, SETTLING),
        (RUNNING, 0, False, 1, STOPPING),
        (SETTLING, SETTLE / 2, True, 0, SETTLING),
        (SETTLING, SETTLE, True, 0, ENDING),
        # Who asks while a failure settles gets checkpoints of those that still run.
        (SETTLING, SETTLE, True, 1, STOPPING),
        (STOPPING, STOP_GRACE, True, 1, STOPPING),
        (STOPPING, 0, False, 2, ENDING),
        (STOPPING, LATE, False, 1, ENDING),
        # The order to kill is given only once, whatever comes in.
        (ENDING, SILENCE / 2, True, 3, ENDING),
        (ENDING, SILENCE + 1, True, 0, OVER),
        (OVER, 1e6, True, 3, OVER),
    ],
)
def test_stages_follow_each_other(stage, seconds, failed, asked, then):
    assert due(stage, seconds, failed, asked) is then
