"""What each strategy of --sync costs in accuracy: paired runs on two tasks.

    python bench/accuracy/study.py --seeds 1 2 3 --sync allreduce ef:5

PROTOCOL.md was written before the runs that it describes. adamw.py makes the runs of its newest
section. A run has four ranks, or it is one machine alone with one machine's batch. The ranks are
threads of one process (one_process.py) with the trainer's own strategies, optimizer, schedule and
EMA. A seed gives the data set, the weights and the order of images to all runs that use it, so runs
are compared within a seed. Each finished run is one line of a file, and is not repeated, so the
study continues where it was stopped.

tables.py makes the tables, the labels and the chart of runs.jsonl.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(Path(__file__).parent)]

import fonts  # noqa: E402
import glyphs  # noqa: E402
import numpy as np  # noqa: E402
import one_process  # noqa: E402
import torch  # noqa: E402

from contract.options import Options  # noqa: E402
from trainer.models import build  # noqa: E402

# Counted up by whoever changes what a run is; lines of another number are compared with none.
TASK = GLYPHS = 3
FONTS = 4
CONVNEXT = 5  # the images of GLYPHS, by the model of convnext.py
TASKS = (GLYPHS, FONTS, CONVNEXT)
LINES = Path(__file__).with_name("runs.jsonl")
NODES, BATCH = 4, 8
TRAIN, VAL = 250, 160  # glyphs of each class: 16,000 to train, and 10,240 to validate
# Of a usual run: eight parts, of which rounds of averages see the end as that of an epoch.
EPOCHS, EPOCH_STEPS, WARMUP = 8, 125, 0.6
LR = 0.2  # of the batch of four machines; less images, less of it in proportion
ALONE_LR = 0.2  # of one machine alone, in the same terms: its own best
EMA = 0.98  # of a step of four machines: as much is kept over as many images
ALONE, EXACT, CODED = "alone", "allreduce", "ef:3"

Results = dict["Case", float]  # top-1, as a fraction


@dataclass(frozen=True)
class Case:
    """One run. `sync` ALONE: one machine. `epochs`: EPOCHS for as many images as all-reduce has.
    `warmup`: epochs in which the learning rate rises; `start`: "none" where none of ef's steps is
    exact, "15" where those of the warm-up have 15 levels instead, "backwards" where sums begin with
    the last rank (a control), "matched" where exact steps adjust the distance of the levels, and
    "matched none" where only steps 1, 2, 4, ... are exact. `step`: of two levels of own scales, in
    root mean squares of a block; 0: the codec's."""

    sync: str
    seed: int
    epochs: int = EPOCHS
    lr: float = LR
    task: int = TASK
    optimizer: str = "sgd"
    warmup: float = WARMUP
    start: str = ""
    step: float = 0.0

    @property
    def nodes(self) -> int:
        return 1 if self.sync == ALONE else NODES

    @property
    def steps_per_epoch(self) -> int:
        return EPOCH_STEPS * NODES // self.nodes

    @property
    def options(self) -> Options:
        """The trainer's."""
        return Options(
            sync="allreduce" if self.nodes == 1 else self.sync,
            seed=self.seed,
            epochs=self.epochs,
            warmup_epochs=self.warmup,
            sync_warmup=0.0 if self.start in ("none", "15", "matched none") else self.warmup,
            per_node_batch_size=BATCH,
            optimizer=self.optimizer,
            lr=self.lr,
            lr_batch=NODES * BATCH,
            weight_decay=5e-4 if self.optimizer == "sgd" else 0.05,
            ema=EMA ** (self.nodes / NODES),
        )


# Of each task and optimizer the usual rate: those of SGD were chosen by all-reduce alone, on seeds
# that nothing else was run on; those of AdamW are not tuned.
RATES = {(GLYPHS, "sgd"): LR, (FONTS, "sgd"): 0.2, (GLYPHS, "adamw"): 0.002}
RATES[FONTS, "adamw"] = 0.002


# Student's t, two-sided 95 %, by degrees of freedom from 1.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
T += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


def interval(values: list[float]) -> tuple[float, float | None, float | None]:
    """Mean, and the interval's ends where there are two values or more."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None, None
    half = T[min(len(values) - 1, len(T)) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


@functools.lru_cache(maxsize=1)
def images(task: int, seed: int, drawn: Path | None = None) -> one_process.Images:
    """A seed's images; `drawn`: the folder of the fonts."""
    if task == FONTS:
        if drawn is None:
            raise SystemExit("study: the fonts' task needs --fonts DIR (fonts.py fills it)")
        all_of_them = fonts.Fonts.read(drawn)
        parts = enumerate(all_of_them.split(seed))
        drawn_parts = [all_of_them.drawn(part, [seed, number]) for number, part in parts]
        return one_process.Images(*drawn_parts[0], *drawn_parts[1])

    def glyphs_of(count: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = [
            glyphs.images(ends, count, [seed, at, number])
            for number, ends in enumerate(glyphs.glyphs())
        ]
        classes = torch.arange(glyphs.CLASSES).repeat_interleave(count)
        return torch.from_numpy(np.concatenate(found)).permute(0, 3, 1, 2), classes

    return one_process.Images(*glyphs_of(TRAIN, 0), *glyphs_of(VAL, 1))


def carry_out(case: Case, data: one_process.Images) -> dict[str, object]:
    """Train; returns what is kept of the run."""
    began, cpu = time.monotonic(), time.process_time()
    torch.manual_seed(case.seed)
    name, classes = "examples.glyph_cnn:glyph_cnn", glyphs.CLASSES
    if case.task == FONTS:
        name, classes = "fonts:residual_net", len(fonts.CHARACTERS)
    if case.task == CONVNEXT:
        name = "convnext:small_convnext"
    model = build(name, classes, glyphs.SIZE).to(memory_format=torch.channels_last)
    settings = case.options, data, model, case.nodes, case.steps_per_epoch
    start_levels = int(case.start) if case.start.isdigit() else None
    hits, loss, ratios = one_process.train(
        *settings,
        backwards=case.start == "backwards",
        start_levels=start_levels,
        level_step=case.step,
        matches_variance=case.start.startswith("matched"),
    )
    return {
        **asdict(case),
        **{"nodes": case.nodes, "steps": case.epochs * case.steps_per_epoch},
        **{"samples": len(hits), "top1": round(float(hits.float().mean()), 6)},
        **{"train_loss": round(loss, 5), "seconds": round(time.monotonic() - began, 1)},
        "cpu_seconds": round(time.process_time() - cpu, 1),
        **ratios,
    }


# Lines that were written when the names of `ef` were of bits (README.md), by today's names.
RENAMED = {"ef:8": "ef:255:peak", "ef:4": "ef:15:peak"}
RENAMED.update(dict.fromkeys(("ef:2", "ef:1.6"), "ef:3:peak"))


def known(*files: Path) -> list[dict[str, object]]:
    """The runs that are finished; not a line that was broken off while it was written."""
    text = "".join(file.read_text() for file in dict.fromkeys([LINES, *files]) if file.exists())
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [{**line, "sync": RENAMED.get(line["sync"], line["sync"])} for line in lines]


def results(lines: list[dict]) -> Results:
    names = {field.name for field in fields(Case)}
    ours = [line for line in lines if line["task"] in TASKS]
    cases = [Case(**{name: line[name] for name in names & line.keys()}) for line in ours]
    return {one: line["top1"] for one, line in zip(cases, ours)}


def asked(options: argparse.Namespace) -> list[Case]:
    """Those of the command line."""
    return [
        replace(Case(sync, seed, epochs, lr, task=options.task), optimizer=options.optimizer)
        for seed in options.seeds
        for epochs in options.epochs
        for lr in options.lr
        for sync in options.sync
    ]


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
    torch.set_num_threads(1)
    with options.lines.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one at a time: they would do the same runs
        while True:
            found = results(known(options.lines))
            left = [one for one in asked(options) if one not in found]
            if not left:
                return
            one = left[0]
            data = images(one.task, one.seed, options.fonts if one.task == FONTS else None)
            line = json.dumps(carry_out(one, data))
            file.write(("" if ends_whole(options.lines) else "\n") + line + "\n")
            file.flush()
            print(line, flush=True)


def ends_whole(file: Path) -> bool:
    """Whether its last line was written to its end."""
    return file.read_bytes()[-1:] in (b"", b"\n")


if __name__ == "__main__":
    main()
