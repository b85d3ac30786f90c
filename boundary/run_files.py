"""The files of a run, and others that this machine wrote itself, as far as what goes on by them
reads them: they may be damaged, or somebody else's. What the report reads is Lenient: of a damaged
file it shows the rest."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Union

from msgspec import Meta, Struct, field

from boundary.schema import Count, Lenient, Number, Sha256, Text, matching
from contract.records import CATEGORIES

Line = Annotated[str, matching(r"[^\x00-\x1f\x7f-\x9f]*")]


class Decided(Struct):
    """What the ranks of an attempt decided when they started: precision, strategy, and each
    machine's weight in the division of a batch."""

    precision: Line
    sync: Line
    balance: dict[Text, Count]


class Attempt(Struct):
    """An entry of attempts.json."""

    attempt: Count
    nodes: list[Text]
    ranks: dict[Text, list[Count]]
    status: Text
    reason: Text
    master_port: Annotated[int, Meta(ge=0, lt=1 << 16)]
    wall_seconds: Number | None
    decided: Decided | None = None
    went_on_from: Text | None = None


class Attempts(Struct):
    status: Text
    attempts: list[Attempt]


class Start(Struct, tag_field="kind", tag="start"):
    """The line with which a rank begins its timings."""

    attempt: Count
    resumed_samples: Count
    image_size: Count = 0
    decided: Decided | None = None


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


# What the report reads, each part of which may lack.

MOST_ATTEMPTS = 1000
MOST_RANKS = 4096
MOST_PEERS = 256  # of a machine
MOST_THINGS = 64  # of a kind on a machine
_SETTINGS = Meta(max_length=200)  # of a rank, options and versions
_NAME = Meta(max_length=1000)
_LARGEST = 10**18  # no counter of bytes is larger
_LONGEST = 10**10  # seconds

Name = Annotated[str, _NAME]
Texts = Annotated[list[Text], Meta(max_length=MOST_RANKS)]
Natural = Annotated[int, Meta(ge=0, lt=_LARGEST)]
World = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
# As it stands in the file: 64 images are not 64.0.
Figure = Union[
    Annotated[int, Meta(gt=-_LARGEST, lt=_LARGEST)],
    Annotated[float, Meta(gt=-_LARGEST, lt=_LARGEST)],
]
Positive = Union[Annotated[int, Meta(gt=0, lt=_LARGEST)], Annotated[float, Meta(gt=0, lt=_LARGEST)]]
Seconds = Union[Annotated[int, Meta(ge=0, lt=_LONGEST)], Annotated[float, Meta(ge=0, lt=_LONGEST)]]
Share = Union[Annotated[int, Meta(ge=0, le=1)], Annotated[float, Meta(ge=0, le=1)]]
Plain = Union[bool, Figure, Name, None]
TrainerOptions = Annotated[
    dict[Name, Union[Plain, Annotated[list[Plain], Meta(max_length=200)]]], _SETTINGS
]


class PlannedNode(Lenient):
    host: Text | None = None
    connection: Text | None = None
    interface: Text | None = None
    ranks: Annotated[list[Rank], Meta(max_length=MOST_RANKS)] = field(default_factory=list)


class Prediction(Lenient):
    """Of `make plan`."""

    images_per_second: Figure | None = None
    made_unix: Figure | None = None


class Phrases(Lenient):
    """How advice is given to the user of a program; `{}` in `sync` is the strategy. Its defaults
    are for a run that no launcher planned."""

    sync: Text = "the synchronization {}"
    warmed_up: Text = "with fewer steps of warm-up"  # for a run that was all warm-up
    batch: Text = "twice the batch of each rank"
    workers: Text = "twice the loader processes"
    saving: Text = "save half as often"
    memory: Text = "Fewer loader processes, a smaller batch"
    longer: Text = "the same program, for longer"


class PlannedProgram(Lenient):
    """The program of plan.json. `command`: what it is called in sentences. `sample`: what one thing
    that it trains on is called. `adjustable`: make's BATCH, SYNC, EPOCHS and BALANCE and the
    trainer's options change it. `times_steps`: each of its ranks writes timings."""

    command: Text = ""
    sample: Text = "sample"
    adjustable: bool = False
    times_steps: bool = False
    phrases: Phrases = field(default_factory=Phrases)


class RunPlan(Lenient):
    """plan.json."""

    run: Text | None = None
    data: Text | None = None
    git_revision: Text | None = None
    git_diff: Text | None = None
    code_sha256: Text | None = None
    world_size: World | None = None
    created_unix: Figure | None = None
    nodes: Annotated[list[PlannedNode], Meta(max_length=MOST_RANKS)] = field(default_factory=list)
    options: dict[Text, Union[bool, Figure, Text, Texts]] | None = None
    program: PlannedProgram = field(default_factory=PlannedProgram)

    @property
    def trainer_words(self) -> list[str]:
        """As ARGS had them."""
        words = (self.options or {}).get("trainer")
        return words if isinstance(words, list) else []


class FirstCause(Lenient):
    host: Text | None = None
    rank: Natural | None = None
    exit_code: Figure | None = None
    signal: Text | None = None
    exception: Text | None = None
    message: Text | None = None
    remedy: Text | None = None
    last_lines: Texts | None = None


class AttemptRecord(Lenient):
    """An entry of attempts.json."""

    attempt: Annotated[int, Meta(ge=1, le=MOST_ATTEMPTS)] = 1
    nodes: Texts = field(default_factory=list)
    world_size: World | None = None
    reason: Text | None = None
    status: Text | None = None
    wall_seconds: Seconds | None = None
    resumed_samples: Figure | None = None
    first_cause: FirstCause | None = None
    to_resume: Text | None = None
    silent_ranks: Texts = field(default_factory=list)


class RunEnd(Lenient):
    """attempts.json."""

    status: Text | None = None
    attempts: Annotated[list[AttemptRecord], Meta(max_length=MOST_ATTEMPTS)] = field(
        default_factory=list
    )


class Instructions(Lenient):
    onednn_limit: Text | None = None


class RankDecisions(Lenient):
    """What the ranks decided together when they started, and what `make plan` predicted of it."""

    precision_why: Text | None = None
    predicted: Prediction | None = None


class RankStart(Lenient):
    """The first line of a rank."""

    model: Text | None = None
    device: Text | None = None
    torch: Text | None = None
    python: Text | None = None
    cpu: Text | None = None
    sync: Text | None = None
    precision: Text | None = None
    mono_process: Seconds | None = None
    mono: Seconds | None = None
    unix: Figure | None = None
    parameters: Positive | None = None
    gradient_bytes: Positive | None = None
    bucket_mb: Positive | None = None
    global_batch: Positive | None = None
    accumulate: Positive | None = None
    train_images: Positive | None = None
    eval_images: Positive | None = None
    steps_per_epoch: Positive | None = None
    image_size: Positive | None = None
    epochs: Positive | None = None
    warmup: Positive | None = None
    cores: Positive | None = None
    workers: Natural | None = None
    record: Natural = 1
    world_size: World | None = None
    versions: Annotated[dict[Name, Name], _SETTINGS] = field(default_factory=dict)
    options: TrainerOptions = field(default_factory=dict)
    decided: RankDecisions = field(default_factory=RankDecisions)
    instructions: Instructions = field(default_factory=Instructions)


class RankEnd(Lenient):
    """The last line of a rank."""

    mono: Seconds | None = None
    status: Text | None = None
    peak_memory_bytes: Figure | None = None
    bad_images: Figure | None = None


class Stall(Lenient):
    category: Literal[tuple(CATEGORIES)] | None = None  # type: ignore[valid-type]
    step: Natural | None = None
    idle: Seconds = 0.0


class Evaluation(Lenient):
    epoch: Natural | None = None
    samples: Natural | None = None
    top1: Share | None = None
    top5: Share | None = None
    loss: Figure | None = None
    train_loss: Figure | None = None
    train_top1: Share | None = None


class ClassFigures(Struct):
    """Of the images of a class in an evaluation; the figures lack where there is no image."""

    name: Text
    images: Natural
    top1: Share | None = None
    top5: Share | None = None
    loss: Figure | None = None


class Confusion(Struct):
    """Images of a class that were taken for another one."""

    name: Text
    predicted: Text
    images: Natural


class EvaluationFile(Struct):
    """evaluation.json, that of --evaluate."""

    model: Text
    data: Text
    precision: Text
    image_size: Natural
    unreadable: Natural
    images: Natural
    top1: Share
    top5: Share
    loss: Figure
    classes: Annotated[list[ClassFigures], Meta(max_length=1 << 17)]
    confused: Annotated[list[Confusion], Meta(max_length=100)]


class Mount(Lenient):
    type: Text | None = None


class Peer(Lenient, rename={"source": "from"}):
    """What was sent to an address: from which one, bytes, seconds of sending."""

    source: Text | None = None
    sent: Figure | None = None
    busy: Seconds | None = None


class Interface(Lenient):
    """That of the run."""

    interface: Text | None = None
    speed_mbit: Positive | None = None
    tx_bytes: Figure | None = None
    peers: Annotated[dict[str, Peer], Meta(max_length=MOST_PEERS)] = field(default_factory=dict)


class MachineLine(Lenient):
    """What a line of a machine's records says beside figures."""

    data_disk: Text | None = None
    mounts: Annotated[dict[str, Mount], Meta(max_length=MOST_THINGS)] = field(default_factory=dict)
    card: Interface | None = None
    alone: list[Rank] = field(default_factory=list)  # those that have met no other
    finished: list[Rank] = field(default_factory=list)  # those that ended with exit code 0
    only_received: Figure | None = None  # bytes


class Threads(Lenient):
    """Of a rank, in a line of its machine: seconds, and the state of its process."""

    ran: Seconds = 0.0
    waited: Seconds = 0.0
    state: Text | None = None


class GuardEnd(Lenient):
    """The last line of a guard: its time, and what its ranks had at most of memory."""

    mono_start: Seconds | None = None
    mono_end: Seconds | None = None
    peak_memory_bytes: dict[Text, Figure] = field(default_factory=dict)
    only_received: Positive | None = None
    workers: Annotated[dict[Text, Any], Meta(max_length=MOST_RANKS)] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        numbers = {int(name) for name in self.workers if re.fullmatch("[0-9]{1,9}", name)}
        return sorted(number for number in numbers if number < MOST_RANKS)
