"""What each strategy of --sync costs in accuracy: paired runs of the real trainer.

    python tests/bench/accuracy/study.py --seeds 1 2 3 --sync ef:2 ef:4

Each run is N = 4 ranks of `python -m trainer` on this machine over Gloo, or one rank by itself with
one machine's batch, on the images of examples/glyphs.py. A seed is a data set of its own, for
training and for validation, and the same weights and order for all that run on it: runs are
compared within a seed. Each finished run is one line of runs.jsonl, and a run that stands there is
not repeated: the study goes on where it was broken off.

tables.py makes the tables, the labels and the chart of these lines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]

import glyphs  # noqa: E402
import trainer_ranks  # noqa: E402

# Counted up by whoever changes what a run is; lines of another number are compared with none.
TASK = 1
LINES = Path(__file__).with_name("runs.jsonl")
NODES, BATCH = 4, 16
# Images of each class: 16,000 to train, 250 steps an epoch, and 10,240 to validate.
TRAIN, VAL = 250, 160
EPOCHS, WARMUP = 2, 0.15
LR = 0.8  # of the batch of four machines; less images, less of it in proportion


@dataclass(frozen=True)
class Case:
    """One run. `nodes` 1: one machine alone, which needs no `sync`."""

    sync: str
    seed: int
    nodes: int = NODES
    epochs: int = EPOCHS
    lr: float = LR
    task: int = TASK


def argv(case: Case, data: Path, output: Path) -> list[object]:
    """The trainer's command line."""
    return [
        *("--data", data, "--output", output, "--model", "examples.glyph_cnn:glyph_cnn"),
        *("--seed", case.seed, "--epochs", case.epochs, "--warmup_epochs", WARMUP),
        *("--per_node_batch_size", BATCH, "--lr", case.lr, "--lr_batch", NODES * BATCH),
        *("--weight_decay", 5e-4, "--augment", "none", "--precision", "fp32"),
        *("--channels_last", "true", "--evaluate_every", case.epochs, "--timeout", 600),
        *("--device", "cpu", "--keep", 1, "--log_every", 50),
        *(("--sync", case.sync) if case.nodes > 1 else ()),
    ]


def carry_out(case: Case, data: Path) -> dict[str, object]:
    """Train; returns what is kept of the run."""
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        began = time.monotonic()
        words = argv(case, data, Path(folder))
        spent = trainer_ranks.run_ranks([1] * case.nodes, rank, *words, quiet=True)
        lines = Path(folder, "nodes/node1/rank0.steps.jsonl").read_text().splitlines()
        told = [json.loads(line) for line in lines]
    result = [line for line in told if line["kind"] == "evaluate"][-1]
    steps = max(line["step"] for line in told if line["kind"] == "step")
    return {
        **asdict(case),
        **{"steps": steps, "samples": result["samples"], "top1": round(result["top1"], 6)},
        **{"loss": round(result["loss"], 5), "train_loss": round(result["train_loss"], 5)},
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(sum(spent), 1),
    }


def rank(*words: object) -> float:
    """One rank of the trainer; returns the seconds of processor time that it took."""
    code = trainer_ranks.trainer(*words)
    if code:
        raise RuntimeError(f"the trainer ended with {code}")
    return time.process_time()


def known(lines: Path = LINES) -> list[dict[str, object]]:
    """The runs that are finished."""
    text = lines.read_text() if lines.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--sync", nargs="+", required=True, help="strategies, and `alone`")
    parser.add_argument("--epochs", type=int, nargs="+", default=[EPOCHS])
    parser.add_argument("--lr", type=float, nargs="+", default=[LR])
    parser.add_argument("--lines", type=Path, default=LINES, help="file of finished runs")
    options = parser.parse_args()
    fields = Case.__dataclass_fields__
    done = {Case(**{name: line[name] for name in fields}) for line in known(options.lines)}
    for seed in options.seeds:
        todo = [
            Case("-" if sync == "alone" else sync, seed, 1 if sync == "alone" else NODES, *more)
            for more in ((epochs, lr) for epochs in options.epochs for lr in options.lr)
            for sync in options.sync
        ]
        todo = [case for case in todo if case not in done]
        if todo:
            with images(seed) as data:
                for case in todo:
                    line = json.dumps(carry_out(case, data))
                    with options.lines.open("a") as file:
                        file.write(line + "\n")
                    print(line, flush=True)


class images:
    """Within, the folder of a seed's images."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> Path:
        self.folder = Path(tempfile.mkdtemp(prefix=f"glyphs-{self.seed}-"))
        glyphs.write(self.folder, self.seed, TRAIN, VAL)
        return self.folder

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            shutil.rmtree(self.folder)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
