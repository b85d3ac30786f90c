"""What each strategy of --sync costs in accuracy: paired runs on two tasks.

    python bench/accuracy/study.py --protocol --fonts DIR --lines FILE

carries out PROTOCOL.md, which was fixed before its first run. Each run is N = 4 ranks, or one
machine alone with one machine's batch: ranks of one process (one_process.py), with the trainer's
own strategies, optimizer, schedule and EMA. A seed is a data set of its own, for training and for
validation, and the same weights and order for all that run on it: runs are compared within a seed.
Each finished run is one line of a file, and a run that stands there is not repeated: the study goes
on where it was broken off. `--seeds 1 2 3 --sync allreduce ef:2` runs these, whatever the protocol.

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
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

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
LINES = Path(__file__).with_name("runs.jsonl")
NODES, BATCH = 4, 8
TRAIN, VAL = 250, 160  # glyphs of each class: 16,000 to train, and 10,240 to validate
# Of a usual run: eight parts, of which rounds of averages see the end as that of an epoch.
EPOCHS, EPOCH_STEPS, WARMUP = 8, 125, 0.6
LR = 0.2  # of the batch of four machines; less images, less of it in proportion
ALONE_LR = 0.2  # of one machine alone, in the same terms: its own best
EMA = 0.98  # of a step of four machines: as much is kept over as many images
ALONE, EXACT, CODED = "alone", "allreduce", "ef:1.6"

Results = dict["Case", float]  # top-1, as a fraction

# Other ways through the first steps of ef, the cheapest first: with none of them exact, by another
# strategy instead, or with a fifth of them exact. "" is the trainer's default.
STARTS = ("none", "ef:4", "fifth", "ef:8", "bf16")


@dataclass(frozen=True)
class Case:
    """One run. `sync` ALONE: one machine. `epochs`: EPOCHS for as many images as all-reduce has.
    `warmup`: epochs in which the learning rate rises; `start`: of STARTS, or ""."""

    sync: str
    seed: int
    epochs: int = EPOCHS
    lr: float = LR
    task: int = TASK
    optimizer: str = "sgd"
    warmup: float = WARMUP
    start: str = ""

    @property
    def nodes(self) -> int:
        return 1 if self.sync == ALONE else NODES

    @property
    def steps_per_epoch(self) -> int:
        return EPOCH_STEPS * NODES // self.nodes

    @property
    def options(self) -> Options:
        """The trainer's."""
        exact = {"": None, "fifth": self.warmup / 5}.get(self.start, 0.0)
        return Options(
            sync="allreduce" if self.nodes == 1 else self.sync,
            seed=self.seed,
            epochs=self.epochs,
            warmup_epochs=self.warmup,
            sync_warmup=exact,
            per_node_batch_size=BATCH,
            optimizer=self.optimizer,
            lr=self.lr,
            lr_batch=NODES * BATCH,
            weight_decay=5e-4 if self.optimizer == "sgd" else 0.05,
            ema=EMA ** (self.nodes / NODES),
        )


# Of each task and optimizer: the rates that all-reduce tries on seeds that nothing else is run on.
# The best of them is taken; glyphs and SGD have had theirs.
TRIED = {
    (GLYPHS, "sgd"): (LR,),
    (FONTS, "sgd"): (0.025, 0.05, 0.1, 0.2),
    (GLYPHS, "adamw"): (0.001, 0.002, 0.004, 0.008),
    (FONTS, "adamw"): (0.001, 0.002, 0.004, 0.008),
}
TRIAL_SEEDS = (101, 102)
OTHER_RATE = 2  # times the usual one of SGD
# Steps, in epochs of EPOCH_STEPS, and pairs.
LENGTHS = {4: 12, 8: 12, 16: 15, 32: 6, 64: 3}
SCREENED, CONFIRMED, SECOND = range(1, 9), range(9, 33), range(1, 13)
OTHERS = range(1, 9)  # seeds of AdamW and of the other rate
WORST = -0.3  # points: what a start may cost, as prices.SAFE for a strategy


def case(lr: float, sync: str, seed: int, task: int, epochs: int = EPOCHS, **more: Any) -> Case:
    """A run of the protocol: its warm-up is as much of a long run as of a usual one."""
    return Case(sync, seed, epochs, lr, task, warmup=WARMUP * epochs / EPOCHS, **more)


def trials(task: int, optimizer: str) -> dict[float, list[Case]]:
    """By rate, the runs that choose it."""
    return {
        lr: [case(lr, EXACT, seed, task, optimizer=optimizer) for seed in TRIAL_SEEDS]
        for lr in TRIED[task, optimizer]
        if len(TRIED[task, optimizer]) > 1
    }


def best_rate(found: Results, task: int, optimizer: str) -> float:
    """The one with the highest mean top-1."""
    tried = trials(task, optimizer)
    means = {lr: statistics.fmean(found[one] for one in runs) for lr, runs in tried.items()}
    return max(means, key=lambda lr: means[lr]) if means else TRIED[task, optimizer][0]


def protocol(found: Results) -> Iterator[Case]:
    """The runs of PROTOCOL.md in order, as far as what decides them is done."""
    for stage in (screening, confirming, lengths, adamw_rates, others):
        cases = stage(found)
        yield from cases
        if not found.keys() >= set(cases):
            return


def screening(_: Results) -> list[Case]:
    """All starts, and the rates of the second task."""
    cases = [case(LR, CODED, seed, GLYPHS, start=start) for seed in SCREENED for start in STARTS]
    return cases + [run for runs in trials(FONTS, "sgd").values() for run in runs]


def confirming(found: Results) -> list[Case]:
    """More runs of the best start."""
    best, lr = screened_best(found), best_rate(found, FONTS, "sgd")
    cases = [case(LR, CODED, seed, GLYPHS, start=best) for seed in CONFIRMED if best]
    arms = dict.fromkeys([(EXACT, ""), (CODED, ""), (CODED, best)])
    return cases + [
        case(lr, sync, seed, FONTS, start=start) for seed in SECOND for sync, start in arms
    ]


def lengths(found: Results) -> list[Case]:
    """ef, with the start that was confirmed, against all-reduce: what decides the label first."""
    return [
        run
        for length, count in LENGTHS.items()
        for seed in range(1, count + 1)
        for task in (GLYPHS, FONTS)
        for run in pair(found, best_rate(found, task, "sgd"), seed, task, length)
    ]


def adamw_rates(_: Results) -> list[Case]:
    tasks = GLYPHS, FONTS
    return [run for task in tasks for runs in trials(task, "adamw").values() for run in runs]


def others(found: Results) -> list[Case]:
    """AdamW, and SGD at another rate."""
    return [
        run
        for seed in OTHERS
        for task in (GLYPHS, FONTS)
        for run in (
            *pair(found, best_rate(found, task, "adamw"), seed, task, optimizer="adamw"),
            *pair(found, OTHER_RATE * best_rate(found, task, "sgd"), seed, task),
        )
    ]


def pair(found: Results, lr: float, seed: int, task: int, epochs: int = EPOCHS, **more: Any):
    """All-reduce, and ef with the start that was confirmed."""
    best = screened_best(found)
    start = best if best and confirmed_best(found, best) else ""
    yield case(lr, EXACT, seed, task, epochs, **more)
    yield case(lr, CODED, seed, task, epochs, start=start, **more)


def against_the_usual(
    found: Results, lr: float, seeds: Iterable[int], task: int, start: str
) -> list:
    """Points of ef with this start less those of ef with the default one, by seed."""
    return [
        100 * (found[case(lr, CODED, seed, task, start=start)] - found[case(lr, CODED, seed, task)])
        for seed in seeds
    ]


def screened_best(found: Results) -> str:
    """The cheapest start that eight pairs do not speak against; "" if they do against all."""
    for start in STARTS:
        mean, _, high = interval(against_the_usual(found, LR, SCREENED, GLYPHS, start))
        if mean >= WORST and high >= 0:
            return start
    return ""


def confirmed_best(found: Results, start: str) -> bool:
    """Whether it is no worse over all pairs of the first task, and those of the second agree."""
    seeds, lr = [*SCREENED, *CONFIRMED], best_rate(found, FONTS, "sgd")
    _, low, _ = interval(against_the_usual(found, LR, seeds, GLYPHS, start))
    mean, _, high = interval(against_the_usual(found, lr, SECOND, FONTS, start))
    return low >= WORST and mean >= WORST and high >= 0


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
    model = build(name, classes, glyphs.SIZE).to(memory_format=torch.channels_last)
    start = case.start if ":" in case.start or case.start == "bf16" else ""
    hits, loss = one_process.train(
        case.options, data, model, case.nodes, case.steps_per_epoch, start
    )
    return {
        **asdict(case),
        **{"nodes": case.nodes, "steps": case.epochs * case.steps_per_epoch},
        **{"samples": len(hits), "top1": round(float(hits.float().mean()), 6)},
        **{"train_loss": round(loss, 5), "seconds": round(time.monotonic() - began, 1)},
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def known(*files: Path) -> list[dict[str, object]]:
    """The runs that are finished; not a line that was broken off while it was written."""
    text = "".join(file.read_text() for file in dict.fromkeys([LINES, *files]) if file.exists())
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def results(lines: list[dict]) -> Results:
    names = {field.name for field in fields(Case)}
    ours = [line for line in lines if line["task"] in (GLYPHS, FONTS)]
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
    parser.add_argument("--protocol", action="store_true", help="the runs of PROTOCOL.md")
    parser.add_argument("--status", action="store_true", help="count the runs, and run none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    parser.add_argument("--sync", nargs="+", default=[], help=f"strategies, and `{ALONE}`")
    parser.add_argument("--epochs", type=int, nargs="+", default=[EPOCHS])
    parser.add_argument("--lr", type=float, nargs="+", default=[LR])
    parser.add_argument("--task", type=int, choices=(GLYPHS, FONTS), default=TASK)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--fonts", type=Path, help="the folder that fonts.py filled")
    parser.add_argument("--lines", type=Path, default=LINES, help="file of finished runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with options.lines.open("a+") as file:
        if not options.status:
            fcntl.flock(file, fcntl.LOCK_EX)  # one at a time: they would do the same runs
        while True:
            found = results(known(options.lines))
            cases = list(protocol(found)) if options.protocol else asked(options)
            left = [one for one in cases if one not in found]
            if options.status:
                print(f"{len(cases) - len(left)} of {len(cases)} runs known so far are done")
            if options.status or not left:
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
