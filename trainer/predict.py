"""Using a trained model on the evaluation images: predictions and embeddings."""

import csv
import pathlib
from typing import Any, Dict, List, Tuple

import torch

from . import checkpoint
from .build import Job, job, materials
from .data.loader import eval_batches
from .errors import UserError
from .models import last_linear
from .options import Options
from .timing import Clock
from .world import World


def infer(options: Options, world: World) -> int:
    """Write --predict and --extract, each image once, in data-set order; train nothing."""
    if options.weights is None and options.resume == "none":
        raise UserError("--predict and --extract need a trained model: --resume auto or --weights.")
    made = job(options, world, materials(options, world), Clock(world.device))
    if options.weights is not None:
        checkpoint.read_weights(made)
    state = checkpoint.find(made, same_options=False)
    if state is not None:
        average = state["ema"]["average"] if state["ema"] else None
        checkpoint.load_weights(made.model, average or state["model"])
    elif options.weights is None:
        raise UserError(f"--resume {options.resume}: no checkpoint below --output.")
    rows = _gathered(made)
    if world.rank == 0:
        if options.predict:
            _write_predictions(made, rows, pathlib.Path(options.predict))
        if options.extract:
            _write_embeddings(made, rows, pathlib.Path(options.extract))
    return 0


Row = Tuple[int, int, float, torch.Tensor]


@torch.no_grad()
def _gathered(made: Job) -> List[Row]:
    """(index, class, probability, embedding) of all images of all ranks, in data-set order."""
    seen: Dict[str, torch.Tensor] = {}
    last = last_linear(made.model) if made.options.extract else None
    if made.options.extract and last is None:
        raise UserError("--extract: this model has no linear layer whose input to take.")
    if last is not None:
        last.register_forward_pre_hook(lambda _, inputs: seen.update(features=inputs[0]))
    rows: List[Row] = []
    made.model.eval()
    for batch in eval_batches(made.eval_set, made.options, made.world):
        with made.precision.computing():
            outputs = made.model(made.normalise(batch.images.to(made.world.device)))
        best = outputs.double().softmax(1).max(1)
        features = seen.get("features", torch.empty(len(outputs), 0)).flatten(1).float().cpu()
        rows += zip(
            batch.indices.tolist(), best.indices.tolist(), best.values.tolist(), features.clone()
        )
    everybody: List[Any] = made.world.gather(rows)
    return sorted((row for part in everybody for row in part), key=lambda row: row[0])


def _write_predictions(made: Job, rows: List[Row], path: pathlib.Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "class", "probability"])
        for index, label, probability, _ in rows:
            path_and_class = made.eval_set.paths[index], made.train_set.classes[label]
            table.writerow([*path_and_class, f"{probability:.6f}"])


def _write_embeddings(made: Job, rows: List[Row], path: pathlib.Path) -> None:
    """A torch file: `paths`, and `embeddings` float32 (images, features)."""
    paths = [made.eval_set.paths[index] for index, *_ in rows]
    embeddings = torch.stack([row[3] for row in rows]) if rows else torch.empty(0, 0)
    torch.save({"paths": paths, "embeddings": embeddings}, path)
