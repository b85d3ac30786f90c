"""Using a trained model on the evaluation images: predictions and embeddings."""

import csv
import pathlib
from typing import Dict, List

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
    for file in filter(None, (options.predict, options.extract)):
        if not pathlib.Path(file).parent.is_dir():
            raise UserError(f"{file}: there is no such folder to write to.")
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
        print(f"{len(rows[0])} images of val: written")
    return 0


@torch.no_grad()
def _gathered(made: Job) -> List[torch.Tensor]:
    """Index, class, probability, embedding of all images of all ranks, in data-set order."""
    seen: Dict[str, torch.Tensor] = {}
    last = last_linear(made.model)
    if made.options.extract and last is None:
        raise UserError("--extract: this model has no linear layer whose input to take.")
    if last is not None:
        last.register_forward_pre_hook(lambda _, inputs: seen.update(features=inputs[0]))
    parts = []
    made.model.eval()
    for batch in eval_batches(made.eval_set, made.options, made.world):
        images, _ = batch.on(made.world.device)
        with made.precision.computing():
            outputs = made.model(made.normalise(images))
        best = outputs.double().softmax(1).max(1)
        features = seen["features"].flatten(1).float() if made.options.extract else best.values
        found = (batch.indices, best.indices, best.values, features)
        parts.append([column.cpu() for column in found])
    rows = [part for several in made.world.gather(parts) for part in several]
    if not rows:
        raise UserError("--predict and --extract: not one image of val can be read.")
    columns = [torch.cat(column) for column in zip(*rows)]
    return [column[columns[0].argsort()] for column in columns]


def _write_predictions(made: Job, columns: List[torch.Tensor], path: pathlib.Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "class", "probability"])
        for index, label, probability in zip(*(column.tolist() for column in columns[:3])):
            path_and_class = made.eval_set.paths[index], made.train_set.classes[label]
            table.writerow([*path_and_class, f"{probability:.6f}"])


def _write_embeddings(made: Job, columns: List[torch.Tensor], path: pathlib.Path) -> None:
    """A torch file: `paths`, and `embeddings` float32 (images, features)."""
    paths = [made.eval_set.paths[index] for index in columns[0].tolist()]
    torch.save({"paths": paths, "embeddings": columns[3]}, path)
