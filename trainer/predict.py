"""Using a trained model on the evaluation images: predictions and embeddings."""

import contextlib
import csv
import io
import os
import pathlib
from functools import partial
from typing import BinaryIO, Dict, List

import torch

from contract.errors import RankError, UserError
from contract.options import Options
from contract.text import pluralize
from tandem.timings import Clock

from . import checkpoint, resume
from .build import Job, build_job, build_materials
from .data.loader import eval_batches
from .memory import one_pass
from .models import last_linear
from .weights import TrainedModel, read_weights
from .world import World
from .writer import atomic_write


def infer(options: Options, world: World) -> int:
    """Write the files of --predict and --extract, with each image once, in the order of the data
    set; train nothing."""
    if options.weights is None and options.resume == "none":
        raise UserError(
            "--predict and --extract need a trained model: give --resume auto or --weights."
        )
    with world.raise_on_all_ranks():
        if world.rank == 0:  # which alone writes
            _check_writable(options)
    trained = _trained_model(options, world)
    count = None if trained.classes is None else len(trained.classes)
    job = build_job(options, world, build_materials(options, world, count), Clock(world.device))
    with world.raise_on_all_ranks():
        checkpoint.load_weights(job.model, trained.tensors)
    here = job.train_set.classes
    rows = _infer_all(job)
    if world.rank == 0:
        _write(job, rows, here if trained.classes is None else trained.classes)
        print(f"{pluralize(len(rows[0]), 'image')} of val: written")
        if trained.classes is None:
            print("the weights name no classes: the names are those of --data, by their order")
        elif changes := checkpoint.class_changes(trained.classes, here):
            print(f"classes are named as the model was trained: {changes}")
    return 0


def _trained_model(options: Options, world: World) -> TrainedModel:
    """That of the newest checkpoint, or of --weights where there is none. Collective."""
    state = resume.find_model(options, world)
    if state is not None:
        average = state["ema"]["average"] if state["ema"] else None
        return TrainedModel(average or state["model"], state["classes"] or None)
    if options.weights is None:
        raise UserError(f"--resume {options.resume}: no checkpoint below --output.")
    with world.raise_on_all_ranks():
        trained = read_weights(options.weights)
    return trained


def _check_writable(options: Options) -> None:
    """Raise UserError before the work rather than after it if a file could not be written."""
    files = [pathlib.Path(file) for file in (options.predict, options.extract) if file]
    if len(set(files)) < len(files):
        raise UserError(f"--predict and --extract would both write {files[0]}: give two names.")
    for file in files:
        folder = file.parent
        if options.output and pathlib.Path(options.output) in folder.parents:
            with contextlib.suppress(OSError):  # then there is none, which is said below
                folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            raise UserError(f"{file}: there is no such folder to write to.")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{file}: this user may not write into {folder}.")


def _write(job: Job, rows: List[torch.Tensor], classes: List[str]) -> None:
    """`classes`: the names of the model's."""
    options = job.options
    predictions = partial(_predictions, classes)
    for name, write in ((options.predict, predictions), (options.extract, _embeddings)):
        if name is None:
            continue
        try:
            with atomic_write(pathlib.Path(name)) as file:
                write(job, rows, file)
        except OSError as error:
            raise RankError(f"{name}: cannot be written: {error.strerror}.") from error


@torch.no_grad()
def _infer_all(job: Job) -> List[torch.Tensor]:
    """Index, class, probability and embedding of all images of all ranks, in data-set order."""
    captured: Dict[str, torch.Tensor] = {}
    last = last_linear(job.model)
    if job.options.extract and last is None:
        raise UserError("--extract: this model has no linear layer whose input to take.")
    if last is not None:
        last.register_forward_pre_hook(lambda _, inputs: captured.update(features=inputs[0]))
    parts = []
    job.model.eval()
    for batch in eval_batches(job.eval_set, job.options, job.world, job.micro_batch):
        images, _ = batch.on(job.world.device)
        with one_pass(), job.precision.computing():
            outputs = job.model(job.normalise(images))
        best = outputs.double().softmax(1).max(1)
        features = captured["features"].flatten(1).float() if job.options.extract else best.values
        results = (batch.indices, best.indices, best.values, features)
        parts.append([column.cpu() for column in results])
    mine = [torch.cat(column) for column in zip(*parts)]  # empty if this rank had no image
    rows = [theirs for theirs in job.world.gather_state(mine) if theirs]
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


def _predictions(classes: List[str], job: Job, columns: List[torch.Tensor], file: BinaryIO) -> None:
    """A CSV table. Names that are not UTF-8 keep their bytes, which alone find the file."""
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    table = csv.writer(text)
    table.writerow(["path", "class", "probability"])
    for index, label, probability in zip(*(column.tolist() for column in columns[:3])):
        table.writerow([job.eval_set.paths[index], classes[label], f"{probability:.6f}"])
    text.detach()  # flushes the text and leaves the file open for its owner to close


def _embeddings(job: Job, columns: List[torch.Tensor], file: BinaryIO) -> None:
    """A torch file: `paths`, and `embeddings` float32 (images, features)."""
    paths = [job.eval_set.paths[index] for index in columns[0].tolist()]
    torch.save({"paths": paths, "embeddings": columns[3]}, file)
