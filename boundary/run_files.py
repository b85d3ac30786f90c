"""Define the types of a run's files (docs/run-directory.md), and of other files that this machine
wrote and reads again.

The files may be damaged, or come from another person. The launcher rejects such a file. The types
that only the report reads are Lenient: the report shows the valid part of a damaged file. The
functions of schema.py read JSON into these types.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Union

from msgspec import Meta, Struct, field

from boundary.schema import Count, Lenient, Number, Sha256, Text, matching
from contract.records import CATEGORIES, MOST_SCALARS

# A text without control characters, so that it stays one line in a terminal.
Line = Annotated[str, matching(r"[^\x00-\x1f\x7f-\x9f]*")]


class Decided(Struct):
    """The decisions that the ranks of an attempt made when they started: contract/decisions.py."""

    precision: Line
    sync: Line
    balance: dict[Text, Count]  # {node: its weight in the division of a batch}


class Attempt(Struct):
    """An entry of attempts.json, as the launcher reads it."""

    attempt: Count
    nodes: list[Text]
    ranks: dict[Text, list[Count]]  # {node: its ranks}
    status: Text
    reason: Text
    master_port: Annotated[int, Meta(ge=0, lt=1 << 16)]
    wall_seconds: Number | None  # None until the attempt has ended
    decided: Decided | None = None
    went_on_from: Text | None = None  # the checkpoint from which a script continued


class Attempts(Struct):
    """attempts.json, as the launcher reads it."""

    status: Text
    attempts: list[Attempt]


class Start(Struct, tag_field="kind", tag="start"):
    """The first line of a rank's timings, as the launcher reads it."""

    attempt: Count
    resumed_samples: Count
    image_size: Count = 0
    decided: Decided | None = None


class Step(Struct, tag_field="kind", tag="step"):
    """A line of a rank's timings that ends a step. The launcher only needs to know that it came."""


class Checkpoint(Struct, tag_field="kind", tag="checkpoint"):
    """A line of a rank's timings about a checkpoint that the rank has written."""

    file: Text


class LayerRecord(Struct):
    """layer.json, next to the packages of a script (launcher/plan/layer.py)."""

    sha256: Sha256
    packages: dict[Text, Text]
    provided: dict[Text, Text]


# `make sweep` writes the file of a sweep, and resumes the sweep from this file.
class Cell(Struct):
    """One combination of settings. `command`: the command of its runs, for people."""

    name: Text
    argv: list[Text]
    command: Text


class SweepRun(Struct):
    """A run of a cell, or the cause why there is no run. `log`: 012-2-4.log belongs to
    run 12, in round 2, of cell 4. These numbers count from 1; `round` and `cell` count from 0."""

    round: Count
    cell: Count  # index of its cell
    log: Annotated[str, matching(r"\d{1,9}-\d{1,9}-\d{1,9}\.log")]
    run: Text | None
    cause: Text | None


class Sweep(Struct):
    """sweep.json, as `make sweep` reads it. `seal`: see contract/seal.py."""

    sweep: Text
    rounds: Annotated[int, Meta(ge=1, le=1000)]
    cells: list[Cell]
    runs: list[SweepRun]
    seal: Text | None = None


# Below: the files that the report reads. Every field may be absent.

# These limits bound the memory that one file can make the report use.
MOST_ATTEMPTS = 1000
MOST_RANKS = 4096
MOST_STEPS = 1_000_000  # that one line of a rank may be about
MOST_CELLS = 2000
MOST_PEERS = 256  # of a machine
MOST_DEVICES = 64  # of a machine: disks, mounts or GPUs
_SETTINGS = Meta(max_length=200)  # limits the options of a rank, and its versions of packages
# A figure beyond these limits is damaged or invented, and would overflow sums.
LARGEST_FIGURE = 10**18  # no counter of bytes is larger
LONGEST_SECONDS = 10**10  # three centuries

Name = Annotated[str, Meta(max_length=1000)]
Texts = Annotated[list[Text], Meta(max_length=MOST_RANKS)]
# The types of figures. No figure is NaN or infinite: both are outside every pair of bounds.
Natural = Annotated[int, Meta(ge=0, lt=LARGEST_FIGURE)]
World = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
# Integers stay integers, so that 64 images are not printed as 64.0.
Figure = Union[
    Annotated[int, Meta(gt=-LARGEST_FIGURE, lt=LARGEST_FIGURE)],
    Annotated[float, Meta(gt=-LARGEST_FIGURE, lt=LARGEST_FIGURE)],
]
Positive = Union[
    Annotated[int, Meta(gt=0, lt=LARGEST_FIGURE)], Annotated[float, Meta(gt=0, lt=LARGEST_FIGURE)]
]
Seconds = Union[
    Annotated[int, Meta(ge=0, lt=LONGEST_SECONDS)], Annotated[float, Meta(ge=0, lt=LONGEST_SECONDS)]
]
NotNegative = Union[
    Annotated[int, Meta(ge=0, lt=LARGEST_FIGURE)], Annotated[float, Meta(ge=0, lt=LARGEST_FIGURE)]
]
Share = Union[Annotated[int, Meta(ge=0, le=1)], Annotated[float, Meta(ge=0, le=1)]]
Plain = Union[bool, Figure, Name, None]  # a value of JSON that is no list and no object
TrainerOptions = Annotated[
    dict[Name, Union[Plain, Annotated[list[Plain], Meta(max_length=200)]]], _SETTINGS
]


class PlannedNode(Lenient):
    """An entry of `nodes` in plan.json."""

    host: Text | None = None
    connection: Text | None = None
    interface: Text | None = None
    ranks: Annotated[list[Rank], Meta(max_length=MOST_RANKS)] = field(default_factory=list)


class Prediction(Lenient):
    """The prediction of `make plan` for a run. The ranks copy it into their first lines, so that
    the report can compare it with the result."""

    images_per_second: Figure | None = None
    made_unix: Figure | None = None


class Phrases(Lenient):
    """The phrases by which the report's advice names the settings of a program, in the words of
    its users. The defaults are for a run that no launcher planned."""

    sync: Text = "the synchronization {}"  # {}: the strategy
    warmed_up: Text = "with fewer steps of warm-up"  # if the run ended within its warm-up
    batch: Text = "twice the batch of each rank"
    workers: Text = "twice the loader processes"
    saving: Text = "save half as often"
    memory: Text = "Fewer loader processes, a smaller batch"
    longer: Text = "the same program, for longer"


class PlannedProgram(Lenient):
    """`program` of plan.json: the trainer, or a script."""

    command: Text = ""  # the program's name in sentences
    sample: Text = "sample"  # the word for one sample, such as image
    # True if BATCH, SYNC, EPOCHS, BALANCE and the trainer's options apply to the program.
    adjustable: bool = False
    # True if each rank of the program writes timings.
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
        """Return the words of ARGS."""
        words = (self.options or {}).get("trainer")
        return words if isinstance(words, list) else []


class FirstCause(Lenient):
    """The failure that ended an attempt: the first one, of which the others are consequences."""

    host: Text | None = None
    rank: Natural | None = None
    exit_code: Figure | None = None
    signal: Text | None = None
    exception: Text | None = None
    message: Text | None = None
    remedy: Text | None = None
    last_lines: Texts | None = None


# Sweep is for `make sweep`. The report reads the same file into these Lenient types.
class ListedCell(Lenient):
    """A cell of a sweep."""

    name: Text | None = None
    command: Text | None = None


class ListedRun(Lenient):
    """A run of a sweep."""

    cell: Natural | None = None  # index of its cell
    run: Text | None = None
    cause: Text | None = None  # why there is no run


class SweepList(Lenient):
    """sweep.json, as the report reads it."""

    cells: Annotated[list[ListedCell], Meta(max_length=MOST_CELLS)] = field(default_factory=list)
    runs: list[ListedRun] = field(default_factory=list)


class AttemptRecord(Lenient):
    """An entry of attempts.json, as the report reads it."""

    attempt: Annotated[int, Meta(ge=1, le=MOST_ATTEMPTS)] = 1
    nodes: Texts = field(default_factory=list)
    world_size: World | None = None
    reason: Text | None = None
    status: Text | None = None
    wall_seconds: Seconds | None = None
    resumed_samples: Figure | None = None  # samples of earlier attempts, from which it continued
    first_cause: FirstCause | None = None
    to_resume: Text | None = None  # a clause with the command that resumes the run
    silent_ranks: Texts = field(default_factory=list)  # sentences on where ranks waited


class RunEnd(Lenient):
    """attempts.json, as the report reads it."""

    status: Text | None = None
    attempts: Annotated[list[AttemptRecord], Meta(max_length=MOST_ATTEMPTS)] = field(
        default_factory=list
    )


class EarlierSummary(Lenient):
    """summary.json of an earlier run, whose advice a later run may have followed."""

    images_per_second: Positive | None = None
    advice: Annotated[list[dict[Name, Plain]], Meta(max_length=100)] = field(default_factory=list)


class Instructions(Lenient):
    """The limit on a CPU's instructions that was set for oneDNN."""

    onednn_limit: Text | None = None


class RankDecisions(Lenient):
    """The decisions of the ranks when they started, and the prediction for the run."""

    precision_why: Text | None = None
    predicted: Prediction | None = None


# A rank writes RankStart first, then any number of RankLines, then RankEnd, into one file.
class RankStart(Lenient):
    """The first line of a rank: docs/run-directory.md explains its fields."""

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

    mono: Seconds | None = None  # when the training loop ended
    status: Text | None = None
    peak_memory_bytes: Figure | None = None
    bad_images: Figure | None = None


class RankLine(Lenient):
    """A line of a rank between its first and its last. `seconds`: of each category since the
    previous line. A line of kind `step` is about `steps` steps, of which `step` is the last."""

    kind: Text | None = None
    # Literal gets the names at run time, which mypy cannot follow.
    seconds: dict[Literal[tuple(CATEGORIES)], Seconds] = field(  # type: ignore[valid-type]
        default_factory=dict
    )
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 1
    step: Natural = 0
    samples: NotNegative | None = 0  # null: the program could not count them
    longest: Seconds | None = None  # seconds of one step
    loss: Figure | None = None
    top1: Figure | None = None
    epoch: Natural | None = None
    exact: bool = False  # the strategy has not begun, so sums were exact
    unsummed: Natural = 0  # steps in a row whose gradients were not summed
    # {scalar: its mean over the steps of the line}; null for NaN and infinity.
    scalars: Annotated[dict[Name, Union[Figure, None]], Meta(max_length=MOST_SCALARS)] = field(
        default_factory=dict
    )
    # {scalar: the first step at which it was NaN or infinite}.
    not_finite: Annotated[dict[Name, Natural], Meta(max_length=MOST_SCALARS)] = field(
        default_factory=dict
    )


class Stall(Lenient):
    """A line of a rank that has written no line for `idle` seconds: the category that it is in."""

    category: Literal[tuple(CATEGORIES)] | None = None  # type: ignore[valid-type]
    step: Natural | None = None
    idle: Seconds = 0.0


class Evaluation(Lenient):
    """A line of a rank about an evaluation."""

    epoch: Natural | None = None
    samples: Natural | None = None
    top1: Share | None = None
    top5: Share | None = None
    loss: Figure | None = None
    train_loss: Figure | None = None
    train_top1: Share | None = None


# Our trainer writes evaluation.json as a whole. So the report reads no part of a damaged file.
class ClassFigures(Struct):
    """The figures of a class in an evaluation. A class without images has no shares and no loss."""

    name: Text
    images: Natural
    top1: Share | None = None
    top5: Share | None = None
    loss: Figure | None = None


class Confusion(Struct):
    """The number of images of class `name` that the model took for class `predicted`."""

    name: Text
    predicted: Text
    images: Natural


class EvaluationFile(Struct):
    """evaluation.json, which --evaluate writes."""

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
    """An NFS or SMB mount."""

    type: Text | None = None


class Peer(Lenient, rename={"source": "from"}):
    """The traffic to one address."""

    source: Text | None = None  # this machine's address
    sent: Figure | None = None  # bytes
    busy: Seconds | None = None  # of sending


class Interface(Lenient, rename={"name": "interface"}):
    """The network interface that the run uses. `peers`: by address."""

    name: Text | None = None
    speed_mbit: Positive | None = None
    tx_bytes: Figure | None = None
    peers: Annotated[dict[str, Peer], Meta(max_length=MOST_PEERS)] = field(default_factory=dict)


class MachineLine(Lenient, rename={"interface": "card"}):
    """A line of a machine's records without the figures that report/figures.py reads. In the file,
    `interface` is called `card`."""

    data_disk: Text | None = None  # the disk that has the run's data
    mounts: Annotated[dict[str, Mount], Meta(max_length=MOST_DEVICES)] = field(default_factory=dict)
    interface: Interface | None = None
    alone: list[Rank] = field(default_factory=list)  # ranks that connected to no other rank
    finished: list[Rank] = field(default_factory=list)  # ranks that exited with code 0
    # Bytes that its ranks received, if they sent nothing of that size: no gradients were summed.
    only_received: Figure | None = None


class PairMeasurement(Lenient):
    """A machine's link to one peer: Mbit/s of payload, milliseconds, and the MTU in bytes."""

    mbit_to: Positive | None = None
    mbit_from: Positive | None = None
    latency_ms: Positive | None = None
    latency_p99_ms: Positive | None = None
    mtu: Positive | None = None


class RingMeasurement(Lenient):
    """The rate at which a machine receives while all machines send in a ring, in Mbit/s."""

    mbit: Positive | None = None


class InterfaceSettings(Lenient):
    """The settings of the network interface that was measured."""

    mtu: Positive | None = None
    speed: Positive | None = None  # Mbit/s


class LinksFile(Lenient, rename={"interface": "card"}):
    """links.json: the measurements of one machine by `make plan`."""

    pairs: Annotated[dict[Text, PairMeasurement], Meta(max_length=MOST_RANKS)] = field(
        default_factory=dict
    )
    ring: RingMeasurement = field(default_factory=RingMeasurement)
    interface: InterfaceSettings = field(default_factory=InterfaceSettings)


class Threads(Lenient):
    """An entry of `ranks` in a line of a machine: the seconds in which the threads of a rank ran
    and waited for a processor, and the state of its process."""

    ran: Seconds = 0.0
    waited: Seconds = 0.0
    state: Text | None = None


class CountedSums(Lenient):
    """The collective sums that a rank has entered, as its guard read them (contract/records.py).
    The rank writes -1 for an unknown number, which becomes None here.

    `bucket`: of the newest sum; None if the rank counts one sum for each backward pass. `first`,
    `newest`: the times of these sums, in nanoseconds of the machine's clock. `queued`, `completed`:
    numbers of collectives in NCCL's Flight Recorder.
    """

    entered: Natural | None = None
    bucket: Natural | None = None
    passes: Natural = 0
    first: Natural = 0
    newest: Natural = 0
    queued: Natural | None = None
    completed: Natural | None = None


class SilentRank(Lenient):
    """The entry of a silent rank in a `stacks` line of its machine (launcher/node/stacks.py)."""

    last: Seconds | None = None  # the machine's clock when the rank last recorded something
    state: Text | None = None  # of the process
    # At most one item: the main thread's frames, deepest first, each [file, line, function].
    threads: list[list[Any]] = field(default_factory=list)
    sums: CountedSums = field(default_factory=CountedSums)
    # The function of the kernel in which the process waits, if `state` is D (uninterruptible I/O).
    wait: Annotated[str, matching(r"[A-Za-z_][\w.]{0,63}")] | None = None


class GuardEnd(Lenient):
    """The last line of a guard: its times by the machine's clock, and the ends of its ranks."""

    mono_start: Seconds | None = None
    mono_end: Seconds | None = None
    peak_memory_bytes: dict[Text, Figure] = field(default_factory=dict)  # by rank
    only_received: Positive | None = None  # as in MachineLine
    # {rank: how it ended}.
    workers: Annotated[dict[Text, Any], Meta(max_length=MOST_RANKS)] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """Return the sorted ranks of the guard's node: the keys of `workers` that are ranks."""
        numbers = {int(name) for name in self.workers if re.fullmatch("[0-9]{1,9}", name)}
        return sorted(number for number in numbers if number < MOST_RANKS)
