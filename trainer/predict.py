"""Using a trained model on the evaluation images: predictions, embeddings, and how good it is."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import pathlib
from functools import partial
from typing import Any, BinaryIO, Callable, Dict, List

import torch

from contract.errors import RankError, UserError
from contract.options import Options
from contract.text import csv_cell, pluralize
from tandem.clock import Clock

from . import checkpoint, resume
from .build import Job, build_job, build_materials
from .data.loader import eval_batches
from .evaluate import score
from .finite import place
from .memory import one_pass
from .models import build as build_model
from .models import head, last_linear
from .weights import TrainedModel, read_weights
from .world import World
from .writer import atomic_write

MOST_CONFUSED = 10
Columns = Dict[str, torch.Tensor]  # of all images, by name


def infer(options: Options, world: World) -> int:
    """Write the files of --predict, --extract and --evaluate, with each image once, in the order of
    the data set; train nothing."""
    asked = " and ".join(f"--{name}" for name in options.results)
    if options.weights is None and options.resume == "none":
        raise UserError(f"{asked} needs a trained model: give --resume auto or --weights.")
    with world.raise_on_all_ranks():
        if world.rank == 0:  # which alone writes
            _check_writable(options)
    trained = _trained_model(options, world)
    parts = build_materials(options, world)
    here = parts.train_set.classes
    classes = here if trained.classes is None else trained.classes
    if options.evaluate:
        _check_classes(here, classes)
    if len(classes) != len(here):
        with world.raise_on_all_ranks():
            _refuse_more_classes(parts.model, trained.tensors, len(here), len(classes))
            words = options.model_arguments()
            model = build_model(options.model, len(classes), parts.image_size, words)
        parts = dataclasses.replace(parts, model=model)
    job = build_job(options, world, parts, Clock(world.device))
    with world.raise_on_all_ranks():
        checkpoint.load_weights(job.model, trained.tensors)
    columns = _infer_all(job, classes)
    if world.rank == 0:
        _write(job, columns, classes)
        images = pluralize(len(job.eval_set), "image")
        print(f"{len(columns['index'])} of {images} of val: written")
        if trained.classes is None:
            print("the weights name no classes: the names are those of --data, by their order")
        elif changes := checkpoint.class_changes(trained.classes, here):
            print(f"classes are named as the model was trained: {changes}")
    return 0


def _trained_model(options: Options, world: World) -> TrainedModel:
    """That of the newest checkpoint, or of --weights where there is none; its average where it has
    one, as in a run's own evaluation. Collective."""
    state = resume.find_model(options, world)
    if state is not None:
        average = state["ema"]["average"] if state["ema"] else None
        return TrainedModel(average or state["model"], state["classes"] or None)
    if options.weights is None:
        raise UserError(f"--resume {options.resume}: no checkpoint below --output.")
    with world.raise_on_all_ranks():
        trained = read_weights(options.weights, average=True)
    return trained


def _check_classes(here: List[str], classes: List[str]) -> None:
    """Raise UserError where --data has images that no class of the model is right for."""
    known = set(classes)
    unknown = [name for name in here if name not in known]
    if unknown:
        raise UserError(
            f"--evaluate: of the {pluralize(len(here), 'class')} of --data the model was not "
            f"trained on {checkpoint.listed(unknown)}, but on {checkpoint.listed(classes)}: give "
            "images of its own classes, in folders of their names."
        )


def _refuse_more_classes(
    model: torch.nn.Module, tensors: Dict[str, torch.Tensor], here: int, count: int
) -> None:
    """Raise UserError where a file names `count` classes and has fewer numbers than a classifier of
    so many has: it would be built before its weights are compared. `here`: classes of `model`."""
    state = model.state_dict()
    numbers_per_class = sum(state[name].numel() for name in head(model, here)) // here
    numbers = sum({place(tensor): tensor.numel() for tensor in tensors.values()}.values())
    if count * max(1, numbers_per_class) > numbers:
        raise UserError(
            f"the weights name {count:,} classes and have {numbers:,} numbers, which no classifier "
            "of so many classes has: they are damaged. Take another file."
        )


def _check_writable(options: Options) -> None:
    """Raise UserError before the work rather than after it if a file could not be written."""
    files = [pathlib.Path(file) for file in options.results.values()]
    if len(set(files)) < len(files):
        asked = " and ".join(f"--{name}" for name in options.results)
        raise UserError(f"{asked} would write the same file: give each a name of its own.")
    for file in files:
        folder = file.parent
        if options.output and pathlib.Path(options.output) in folder.parents:
            with contextlib.suppress(OSError):  # then there is none, which is said below
                folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            raise UserError(f"{file}: there is no such folder to write to.")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{file}: this user may not write into {folder}.")


def _write(job: Job, columns: Columns, classes: List[str]) -> None:
    """`classes`: the names of the model's."""
    writers: Dict[str, Callable[[Job, Columns, BinaryIO], None]] = {
        "predict": partial(_predictions, classes),
        "extract": _embeddings,
        "evaluate": partial(_evaluation, classes),
    }
    for option, name in job.options.results.items():
        try:
            with atomic_write(pathlib.Path(name)) as file:
                writers[option](job, columns, file)
        except OSError as error:
            raise RankError(f"{name}: cannot be written: {error.strerror}.") from error


@torch.no_grad()
def _infer_all(job: Job, classes: List[str]) -> Columns:
    """What the options ask for of all images of all ranks, in data-set order; `classes`: the names
    of the model's."""
    options = job.options
    captured: Dict[str, torch.Tensor] = {}
    last = last_linear(job.model)
    if options.extract and last is None:
        raise UserError("--extract: this model has no linear layer whose input to take.")
    if last is not None:
        last.register_forward_pre_hook(lambda _, inputs: captured.update(features=inputs[0]))
    # By their names, since --data may have only some of the model's classes.
    numbers = torch.tensor(
        [classes.index(name) for name in job.train_set.classes if name in classes]
    )
    # The same on any number of ranks, as a rank's part of a step is not.
    size = max(1, options.per_node_batch_size // options.accumulate)
    parts = []
    job.model.eval()
    for batch in eval_batches(job.eval_set, options, job.world, size):
        images, _ = batch.on(job.world.device)
        with one_pass(), job.precision.computing():
            outputs = job.model(job.normalise(images)).double()
        best = outputs.softmax(1).max(1)
        part = {"index": batch.indices, "label": best.indices, "probability": best.values}
        if options.extract:
            part["features"] = captured["features"].flatten(1).float()
        if options.evaluate:
            part["target"] = numbers[batch.targets]
            scores = score(outputs, part["target"].to(outputs.device))
            part.update(zip(("top1", "top5", "loss"), scores))
        parts.append({name: column.cpu() for name, column in part.items()})
    rows = [theirs for theirs in job.world.gather_state(_joined(parts)) if theirs]
    if not rows:
        raise UserError("--predict, --extract, --evaluate: not one image of val can be read.")
    columns = _joined(rows)
    lost = int((~columns["probability"].isfinite()).sum())
    if lost:
        raise UserError(
            f"the model's outputs for {lost} of {len(columns['index'])} images are not finite: "
            "give --precision fp32, or a checkpoint from before it diverged."
        )
    order = columns["index"].argsort()
    return {name: column[order] for name, column in columns.items()}


def _joined(parts: List[Columns]) -> Columns:
    return {name: torch.cat([part[name] for part in parts]) for name in (parts or [{}])[0]}


def _predictions(classes: List[str], job: Job, columns: Columns, file: BinaryIO) -> None:
    """A CSV table. Names that are not UTF-8 keep their bytes, which alone find the file."""
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    table = csv.writer(text)
    table.writerow(["path", "class", "probability"])
    shown = (columns[name].tolist() for name in ("index", "label", "probability"))
    for index, label, probability in zip(*shown):
        path, name = csv_cell(job.eval_set.paths[index]), csv_cell(classes[label])
        table.writerow([path, name, f"{probability:.6f}"])
    text.detach()  # flushes the text and leaves the file open for its owner to close


def _embeddings(job: Job, columns: Columns, file: BinaryIO) -> None:
    """A torch file: `paths`, and `embeddings` float32 (images, features)."""
    paths = [job.eval_set.paths[index] for index in columns["index"].tolist()]
    torch.save({"paths": paths, "embeddings": columns["features"]}, file)


def _evaluation(classes: List[str], job: Job, columns: Columns, file: BinaryIO) -> None:
    """JSON, described in docs/run-directory.md: the same on any number of ranks."""
    by_class = [
        {"name": name, **_figures(columns, columns["target"] == classes.index(name))}
        for name in job.train_set.classes
    ]
    wrong = ~columns["top1"]
    pairs = columns["target"][wrong] * len(classes) + columns["label"][wrong]
    codes, counts = (column.tolist() for column in pairs.unique(return_counts=True))
    most = sorted(zip(codes, counts), key=lambda pair: (-pair[1], pair[0]))[:MOST_CONFUSED]
    confused = [
        {"name": classes[true], "predicted": classes[predicted], "images": number}
        for (true, predicted), number in ((divmod(code, len(classes)), n) for code, n in most)
    ]
    document: Dict[str, Any] = {
        "model": job.options.model,
        "data": pathlib.Path(job.options.data or "").name,
        "precision": job.options.precision,
        "image_size": job.eval_set.sizes.evaluate,
        "unreadable": len(job.eval_set) - len(columns["index"]),
        **_figures(columns, torch.ones_like(wrong)),
        "classes": by_class,
        "confused": confused,
    }
    file.write(json.dumps(document, indent=1).encode())


def _figures(columns: Columns, chosen: torch.Tensor) -> Dict[str, Any]:
    """Of the chosen images; sums are exact, so that no order of images changes their last bit."""
    count = int(chosen.sum())
    if not count:
        return {"images": 0, "top1": None, "top5": None, "loss": None}
    shares = {name: int(columns[name][chosen].sum()) / count for name in ("top1", "top5")}
    return {"images": count, **shares, "loss": math.fsum(columns["loss"][chosen].tolist()) / count}
