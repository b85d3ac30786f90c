"""Using a trained model on the evaluation images: predictions and embeddings."""

import csv
import io
import os
import pathlib
from typing import BinaryIO, Dict, List

import torch

from contract.errors import RankError, UserError
from contract.options import Options
from contract.text import counted
from tandem.timings import Clock

from . import checkpoint, resume
from .build import Job, job, materials
from .data.loader import eval_batches
from .memory import one_pass
from .models import last_linear
from .world import World
from .writer import whole


def infer(options: Options, world: World) -> int:
    """Write the files of --predict and --extract, with each image once, in the order of the data
    set; train nothing."""
    if options.weights is None and options.resume == "none":
        raise UserError(
            "--predict and --extract need a trained model: give --resume auto or --weights."
        )
    with world.agreed():
        if world.rank == 0:  # which alone writes
            _check_writable(options)
    made = job(options, world, materials(options, world), Clock(world.device))
    if options.weights is not None:
        checkpoint.read_weights(made)
    state = resume.find(made, same_options=False)
    if state is not None:
        average = state["ema"]["average"] if state["ema"] else None
        checkpoint.load_weights(made.model, average or state["model"])
    elif options.weights is None:
        raise UserError(f"--resume {options.resume}: no checkpoint below --output.")
    rows = _gathered(made)
    if world.rank == 0:
        _write(made, rows)
        print(f"{counted(len(rows[0]), 'image')} of val: written")
    return 0


def _check_writable(options: Options) -> None:
    """Raise UserError before the work rather than after it if a file could not be written."""
    for file in filter(None, (options.predict, options.extract)):
        folder = pathlib.Path(file).parent
        if not folder.is_dir():
            raise UserError(f"{file}: there is no such folder to write to.")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{file}: this user may not write into {folder}.")


def _write(made: Job, rows: List[torch.Tensor]) -> None:
    options = made.options
    for name, write in ((options.predict, _predictions), (options.extract, _embeddings)):
        if name is None:
            continue
        try:
            with whole(pathlib.Path(name)) as file:
                write(made, rows, file)
        except OSError as error:
            raise RankError(f"{name}: cannot be written: {error.strerror}.") from error


@torch.no_grad()
def _gathered(made: Job) -> List[torch.Tensor]:
    """Index, class, probability and embedding of all images of all ranks, in data-set order."""
    seen: Dict[str, torch.Tensor] = {}
    last = last_linear(made.model)
    if made.options.extract and last is None:
        raise UserError("--extract: this model has no linear layer whose input to take.")
    if last is not None:
        last.register_forward_pre_hook(lambda _, inputs: seen.update(features=inputs[0]))
    parts = []
    made.model.eval()
    for batch in eval_batches(made.eval_set, made.options, made.world, made.micro_batch):
        images, _ = batch.on(made.world.device)
        with one_pass(), made.precision.computing():
            outputs = made.model(made.normalise(images))
        best = outputs.double().softmax(1).max(1)
        features = seen["features"].flatten(1).float() if made.options.extract else best.values
        found = (batch.indices, best.indices, best.values, features)
        parts.append([column.cpu() for column in found])
    mine = [torch.cat(column) for column in zip(*parts)]  # empty if this rank had no image
    rows = [theirs for theirs in made.world.gather_state(mine) if theirs]
    if not rows:
        raise UserError("--predict and --extract: not one image of val can be read.")
    columns = [torch.cat(column) for column in zip(*rows)]
    lost = int((~columns[2].isfinite()).sum())
    if lost:
        raise UserError(
            f"the model's outputs for {lost} of {len(columns[2])} images are not finite: give "
            "--precision fp32, or a checkpoint from before it diverged."
        )
    return [column[columns[0].argsort()] for column in columns]


def _predictions(made: Job, columns: List[torch.Tensor], file: BinaryIO) -> None:
    """A CSV table. Names that are not UTF-8 keep their bytes, which alone find the file."""
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    table = csv.writer(text)
    table.writerow(["path", "class", "probability"])
    for index, label, probability in zip(*(column.tolist() for column in columns[:3])):
        path_and_class = made.eval_set.paths[index], made.train_set.classes[label]
        table.writerow([*path_and_class, f"{probability:.6f}"])
    text.detach()  # flushes the text and leaves the file open for its owner to close


def _embeddings(made: Job, columns: List[torch.Tensor], file: BinaryIO) -> None:
    """A torch file: `paths`, and `embeddings` float32 (images, features)."""
    paths = [made.eval_set.paths[index] for index in columns[0].tolist()]
    torch.save({"paths": paths, "embeddings": columns[3]}, file)
