"""What each strategy of --sync costs in accuracy: paired runs.

    python tests/bench/accuracy/study.py --seeds 1 2 3 --sync allreduce ef:2 ef:4

Each run is N = 4 ranks, or one machine alone with one machine's batch, on the images of
examples/glyphs.py: ranks of one process (one_process.py), with the trainer's own strategies,
optimizer, schedule and EMA. A seed is a data set of its own, for training and for validation, and
the same weights and order for all that run on it: runs are compared within a seed. Each finished
run is one line of runs.jsonl, and a run that stands there is not repeated: the study goes on where
it was broken off, and several may run at a time.

tables.py makes the tables, the labels and the chart of these lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(Path(__file__).parent)]

import glyphs  # noqa: E402
import numpy as np  # noqa: E402
import one_process  # noqa: E402
import torch  # noqa: E402

from trainer.models import build  # noqa: E402
from trainer.options import Options  # noqa: E402

# Counted up by whoever changes what a run is; lines of another number are compared with none.
TASK = 3
LINES = Path(__file__).with_name("runs.jsonl")
NODES, BATCH = 4, 8
TRAIN, VAL = 250, 160  # images of each class: 16,000 to train, and 10,240 to validate
# Of a usual run: eight parts, of which rounds of averages see the end as that of an epoch.
EPOCHS, EPOCH_STEPS, WARMUP = 8, 125, 0.6
LR = 0.2  # of the batch of four machines; less images, less of it in proportion
ALONE_LR = 0.2  # of one machine alone, in the same terms: its own best
EMA = 0.98  # of a step of four machines: as much is kept over as many images
ALONE = "alone"


@dataclass(frozen=True)
class Case:
    """One run. `sync` ALONE: one machine. `epochs`: EPOCHS for as many images as all-reduce has."""

    sync: str
    seed: int
    epochs: int = EPOCHS
    lr: float = LR
    task: int = TASK

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
            warmup_epochs=WARMUP,
            per_node_batch_size=BATCH,
            lr=self.lr,
            lr_batch=NODES * BATCH,
            weight_decay=5e-4,
            ema=EMA ** (self.nodes / NODES),
        )


def images(seed: int) -> one_process.Images:
    """A seed's images."""

    def drawn(count: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = [
            glyphs.images(ends, count, [seed, at, number])
            for number, ends in enumerate(glyphs.glyphs())
        ]
        classes = torch.arange(glyphs.CLASSES).repeat_interleave(count)
        return torch.from_numpy(np.concatenate(found)).permute(0, 3, 1, 2), classes

    return one_process.Images(*drawn(TRAIN, 0), *drawn(VAL, 1))


def carry_out(case: Case, data: one_process.Images) -> dict[str, object]:
    """Train; returns what is kept of the run."""
    began, cpu = time.monotonic(), time.process_time()
    torch.manual_seed(case.seed)
    model = build("examples.glyph_cnn:glyph_cnn", glyphs.CLASSES, glyphs.SIZE)
    model = model.to(memory_format=torch.channels_last)
    hits, loss = one_process.train(case.options, data, model, case.nodes, case.steps_per_epoch)
    return {
        **asdict(case),
        **{"nodes": case.nodes, "steps": case.epochs * case.steps_per_epoch},
        **{"samples": len(hits), "top1": round(float(hits.float().mean()), 6)},
        **{"train_loss": round(loss, 5), "seconds": round(time.monotonic() - began, 1)},
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def known(lines: Path = LINES) -> list[dict[str, object]]:
    """The runs that are finished."""
    text = lines.read_text() if lines.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def cases(lines: Path) -> set[Case]:
    ours = [line for line in known(lines) if line["task"] == TASK]
    return {Case(**{name: line[name] for name in Case.__dataclass_fields__}) for line in ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--sync", nargs="+", required=True, help=f"strategies, and `{ALONE}`")
    parser.add_argument("--epochs", type=int, nargs="+", default=[EPOCHS])
    parser.add_argument("--lr", type=float, nargs="+", default=[LR])
    parser.add_argument("--lines", type=Path, default=LINES, help="file of finished runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        data = None
        for case in (
            Case(sync, seed, epochs, lr)
            for epochs in options.epochs
            for lr in options.lr
            for sync in options.sync
        ):
            if case not in cases(options.lines):
                data = data or images(seed)
                line = json.dumps(carry_out(case, data))
                with options.lines.open("a") as file:
                    file.write(line + "\n")
                print(line, flush=True)


if __name__ == "__main__":
    main()
