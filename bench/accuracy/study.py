"""Train the runs that show what each strategy of --sync costs in accuracy.

    python bench/accuracy/study.py --seeds 1 2 3 --sync allreduce ef:5

PROTOCOL.md describes the runs, and was written before them. adamw.py makes those of its newest
section, and tables.py makes the tables, the labels and the chart. A run has four ranks, which are
threads of one process (one_process.py), or it is one machine alone with one machine's batch. All
runs of a seed have the same images, weights and order of images, so they are compared in pairs.
Each finished run is one line of runs.jsonl and is not repeated: a stopped study continues.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import functools
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(Path(__file__).parent)]

import fonts  # noqa: E402
import glyphs  # noqa: E402
import numpy as np  # noqa: E402
import one_process  # noqa: E402
import torch  # noqa: E402

from contract.options import Options  # noqa: E402
from trainer.models import build  # noqa: E402

# The number of a task goes up if its runs change; runs are only compared within a task. Runs of
# tasks 1 and 2 had codecs that are gone.
TASK = GLYPHS = 3
FONTS = 4
CONVNEXT = 5  # the images of GLYPHS, by the model of convnext.py
TASKS = (GLYPHS, FONTS, CONVNEXT)
LINES = Path(__file__).with_name("runs.jsonl")
NODES, BATCH = 4, 8  # machines, and images of each machine per step
TRAIN, VAL = 250, 160  # glyphs of each class: 16,000 to train, and 10,240 to validate
# The usual run has 8 x 125 steps. The learning rate rises for WARMUP epochs (75 steps).
EPOCHS, EPOCH_STEPS, WARMUP = 8, 125, 0.6
LR = 0.2  # for the batch of four machines; a smaller batch has a proportionally smaller rate
ALONE_LR = 0.2  # the best rate of one machine alone, also for the batch of four machines
EMA = 0.98  # per step of four machines; one machine keeps as much over as many images
ALONE, EXACT = "alone", "allreduce"

Accuracies = dict["Case", float]  # top-1, from 0 to 1


@dataclass(frozen=True)
class Case:
    """Identify one run. `sync`: a strategy, or ALONE for one machine. `epochs`: EPOCHS for as many
    images as all-reduce has. `warmup`: epochs in which the learning rate rises.

    `start` says which steps have exact sums with `ef`. "": the steps of the warm-up, if the
    strategy begins with exact sums; "none": no step; "backwards": as "", but sums begin with the
    last rank (a control). Finished runs also have other starts, and another distance of the levels
    (`step`); their code is gone (README.md)."""

    sync: str
    seed: int
    epochs: int = EPOCHS
    lr: float = LR
    task: int = TASK
    optimizer: str = "sgd"
    warmup: float = WARMUP
    start: str = ""
    step: float = 0.0  # 0: the codec's own distance

    @property
    def nodes(self) -> int:
        return 1 if self.sync == ALONE else NODES

    @property
    def steps_per_epoch(self) -> int:
        return EPOCH_STEPS * NODES // self.nodes

    @property
    def options(self) -> Options:
        """Return the trainer's options for this run."""
        return Options(
            sync="allreduce" if self.nodes == 1 else self.sync,
            seed=self.seed,
            epochs=self.epochs,
            warmup_epochs=self.warmup,
            sync_warmup=0.0 if self.start == "none" else self.warmup,
            per_node_batch_size=BATCH,
            optimizer=self.optimizer,
            lr=self.lr,
            lr_batch=NODES * BATCH,
            weight_decay=5e-4 if self.optimizer == "sgd" else 0.05,
            ema=EMA ** (self.nodes / NODES),
        )


# The usual rate by (task, optimizer). All-reduce alone chose SGD's rates, on seeds of which no
# other run is made. AdamW's rates here are not tuned; adamw.py tunes its own.
RATES = {(GLYPHS, "sgd"): LR, (FONTS, "sgd"): 0.2}
RATES.update(dict.fromkeys([(GLYPHS, "adamw"), (FONTS, "adamw")], 0.002))

# Student's t, two-sided 95 %, by degrees of freedom from 1.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
T += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


def confidence_interval(values: list[float]) -> tuple[float, float | None, float | None]:
    """Return (mean, lower end, upper end) of the 95 % interval. The ends of one value are None."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None, None
    half = T[min(len(values) - 1, len(T)) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


@functools.lru_cache(maxsize=1)  # the next run often has the same images
def images(task: int, seed: int, fonts_folder: Path | None = None) -> one_process.Images:
    """Return the images that a seed draws. `fonts_folder`: filled by fonts.py, for task FONTS."""
    if task == FONTS:
        if fonts_folder is None:
            raise SystemExit("study: the fonts' task needs --fonts DIR (fonts.py fills it)")
        all_fonts = fonts.Fonts.read(fonts_folder)
        parts = enumerate(all_fonts.split(seed))
        train, val = (all_fonts.drawn(part, [seed, number]) for number, part in parts)
        return one_process.Images(*train, *val)

    def draw_glyphs(count: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [
            glyphs.images(ends, count, [seed, part, number])
            for number, ends in enumerate(glyphs.glyphs())
        ]
        classes = torch.arange(glyphs.CLASSES).repeat_interleave(count)
        return torch.from_numpy(np.concatenate(drawn)).permute(0, 3, 1, 2), classes

    return one_process.Images(*draw_glyphs(TRAIN, 0), *draw_glyphs(VAL, 1))


def train_case(case: Case, data: one_process.Images) -> dict[str, object]:
    """Train a run. Return its line of runs.jsonl."""
    began, cpu_began = time.monotonic(), time.process_time()
    torch.manual_seed(case.seed)
    name, classes = "examples.glyph_cnn:glyph_cnn", glyphs.CLASSES
    if case.task == FONTS:
        name, classes = "fonts:residual_net", len(fonts.CHARACTERS)
    if case.task == CONVNEXT:
        name = "convnext:small_convnext"
    model = build(name, classes, glyphs.SIZE).to(memory_format=torch.channels_last)

    def make_rank() -> one_process.Rank:
        settings = case.options, data, copy.deepcopy(model), case.nodes, case.steps_per_epoch
        return one_process.Rank(*settings)

    hits, loss, figures = one_process.train(make_rank, case.nodes, case.start == "backwards")
    return {
        **asdict(case),
        **{"nodes": case.nodes, "steps": case.epochs * case.steps_per_epoch},
        **{"samples": len(hits), "top1": round(float(hits.float().mean()), 6)},
        **{"train_loss": round(loss, 5), "seconds": round(time.monotonic() - began, 1)},
        "cpu_seconds": round(time.process_time() - cpu_began, 1),
        **figures,
    }


# {name that `ef` had in the oldest lines, by bits (README.md): today's name}.
RENAMED = {"ef:8": "ef:255:peak", "ef:4": "ef:15:peak"}
RENAMED.update(dict.fromkeys(("ef:2", "ef:1.6"), "ef:3:peak"))


def read_runs(*files: Path) -> list[dict[str, object]]:
    """Return the lines of finished runs in runs.jsonl and in these files, without broken lines."""
    text = "".join(file.read_text() for file in dict.fromkeys([LINES, *files]) if file.exists())
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [{**line, "sync": RENAMED.get(line["sync"], line["sync"])} for line in lines]


def accuracy_by_case(lines: list[dict]) -> Accuracies:
    names = {field.name for field in fields(Case)}
    return {
        # The oldest lines lack some fields, whose value was then the default.
        Case(**{name: line[name] for name in names & line.keys()}): line["top1"]
        for line in lines
        if line["task"] in TASKS
    }


def append_line(file: IO[str], line: dict) -> None:
    """Append a finished run to an open file, and print it."""
    text = json.dumps(line)
    file.write(("" if ends_whole(Path(file.name)) else "\n") + text + "\n")
    file.flush()
    print(text, flush=True)


def ends_whole(file: Path) -> bool:
    """Return whether the last line of a file was written to its end."""
    return file.read_bytes()[-1:] in (b"", b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--sync", nargs="+", required=True, help=f"strategies, and `{ALONE}`")
    parser.add_argument("--epochs", type=int, nargs="+", default=[EPOCHS])
    parser.add_argument("--lr", type=float, nargs="+", default=[LR])
    parser.add_argument("--task", type=int, choices=(GLYPHS, FONTS), default=TASK)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--fonts", type=Path, help="the folder that fonts.py filled")
    parser.add_argument("--lines", type=Path, default=LINES, help="file of finished runs")
    options = parser.parse_args()
    axes = (options.seeds, options.epochs, options.lr, options.sync)
    cases = [
        Case(sync, seed, epochs, lr, options.task, options.optimizer)
        for seed, epochs, lr, sync in itertools.product(*axes)
    ]
    torch.set_num_threads(1)
    with options.lines.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a second study would make the same runs
        finished = accuracy_by_case(read_runs(options.lines))
        for case in cases:
            if case not in finished:
                data = images(case.task, case.seed, options.fonts)
                append_line(file, train_case(case, data))


if __name__ == "__main__":
    main()
