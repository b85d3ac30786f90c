"""The files of a run, and others that this machine wrote itself, as far as what goes on by them
reads them: they may be damaged, or somebody else's."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from boundary.schema import Count, Number, Sha256, Text, matching

Line = Annotated[str, matching(r"[^\x00-\x1f\x7f-\x9f]*")]


class Attempt(Struct):
    """An entry of attempts.json."""

    attempt: Count
    nodes: list[Text]
    ranks: dict[Text, list[Count]]
    status: Text
    reason: Text
    master_port: Annotated[int, Meta(ge=0, lt=1 << 16)]
    wall_seconds: Number | None
    balance: dict[Text, Count]
    went_on_from: Text | None = None


class Attempts(Struct):
    status: Text
    attempts: list[Attempt]


class Decided(Struct):
    """What plan.json says of a run of the trainer besides its options."""

    precision: Line
    sync: Line


class Start(Struct, tag_field="kind", tag="start"):
    """The line with which a rank begins its timings."""

    attempt: Count
    resumed_samples: Count


class Step(Struct, tag_field="kind", tag="step"):
    pass


class Checkpoint(Struct, tag_field="kind", tag="checkpoint"):
    file: Text


class LayerRecord(Struct):
    """layer.json beside the packages of a script."""

    sha256: Sha256
    packages: dict[Text, Text]
    provided: dict[Text, Text]


class Cell(Struct):
    name: Text
    argv: list[Text]
    command: Text


class SweepRun(Struct):
    round: Count
    cell: Count
    log: Annotated[str, matching(r"\d{1,9}-\d{1,9}-\d{1,9}\.log")]
    run: Text | None
    cause: Text | None


class Sweep(Struct):
    """sweep.json."""

    sweep: Text
    rounds: Annotated[int, Meta(ge=1, le=1000)]
    cells: list[Cell]
    runs: list[SweepRun]
    seal: Text | None = None


class Cause(Struct):
    message: Text


class EndedAttempt(Struct):
    first_cause: Cause | None = None


class Ended(Struct):
    """What a sweep reads of a run's attempts.json."""

    status: Text
    attempts: list[EndedAttempt]
