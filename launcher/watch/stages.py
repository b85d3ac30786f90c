"""The stages of the watch over an attempt, and what moves it on. Pure: it reads no clock."""

from __future__ import annotations

import enum

# A stall of 8 s makes TCP silent for up to 12.6 s (docs/guard-protocol.md); a frozen machine has to
# be noticed within 20 s.
SILENCE = 15.0
# How long the watch waits, after the first failure, for reports of other nodes.
SETTLE = 1.5
STOP_GRACE = 20
EXITS_WITHIN = 10.0


class Stage(enum.Enum):
    """Where a watch stands; `due` says how one stage follows another."""

    RUNNING = enum.auto()
    SETTLING = enum.auto()  # something failed: what others report now may turn out to be its cause
    STOPPING = enum.auto()  # the user asked: the workers save and leave
    ENDING = enum.auto()  # every guard was told to kill what is left
    OVER = enum.auto()  # guards that are silent even now are given up


def due(stage: Stage, seconds: float, failed: bool, asked: int) -> Stage:
    """The stage to be in, `seconds` after entering `stage`. `failed`: some node has failed;
    `asked`: how often the user asked to stop."""
    if stage is Stage.RUNNING and failed:
        return Stage.SETTLING
    # Also while a failure settles: whoever asked wants checkpoints of the ranks that still run.
    if stage in (Stage.RUNNING, Stage.SETTLING) and asked:
        return Stage.STOPPING
    if stage is Stage.SETTLING and seconds >= SETTLE:
        return Stage.ENDING
    # Failures change nothing here: one rank that cannot save must not keep the others from it.
    if stage is Stage.STOPPING and (asked > 1 or seconds > STOP_GRACE + EXITS_WITHIN):
        return Stage.ENDING
    # A living guard answers a kill at once; one that is silent for this long is gone or frozen.
    if stage is Stage.ENDING and seconds > SILENCE:
        return Stage.OVER
    return stage
