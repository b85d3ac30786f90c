"""Use a trained model on the evaluation images: write predictions, embeddings, or its accuracy.

process.py calls `infer` instead of training. The ranks share the images, and rank 0 writes.
"""

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
from .finite import memory_key
from .memory import detect_out_of_memory
from .models import build as build_model
from .models import find_head, last_linear
from .weights import TrainedModel, read_weights
from .world import World
from .writer import atomic_write

MOST_CONFUSED = 10  # pairs of classes that --evaluate lists
Columns = Dict[str, torch.Tensor]  # a table with a row for each image: see `_infer_all`


def infer(options: Options, world: World) -> int:
    """Write the files of --predict, --extract and --evaluate, with each image once, in the order of
    the data set; train nothing. Returns the exit code. Raises UserError. Collective."""
    flags = " and ".join(f"--{name}" for name in options.results)
    if options.weights is None and options.resume == "none":
        raise UserError(f"{flags} needs a trained model: give --resume auto or --weights.")
    with world.raise_on_all_ranks():
        if world.rank == 0:  # the only rank that writes
            _check_writable(options)
    trained = _read_model(options, world)
    materials = build_materials(options, world)
    # A file that has only weights names no classes. Then those of --data must be the model's.
    data_classes = materials.train_set.classes
    classes = data_classes if trained.classes is None else trained.classes
    # The model could only be wrong about an image of a class that it was not trained on.
    class_set = set(classes)
    unknown = [name for name in data_classes if name not in class_set]
    if options.evaluate and unknown:
        raise UserError(
            f"--evaluate: of the {pluralize(len(data_classes), 'class')} of --data the model was "
            f"not trained on {checkpoint.list_some(unknown)}, but on "
            f"{checkpoint.list_some(classes)}: give images of these classes, in folders with "
            "their names."
        )
    # The model was built for the classes of --data: build it again for those it was trained on.
    if len(classes) != len(data_classes):
        with world.raise_on_all_ranks():
            _refuse_more_classes(materials.model, trained.tensors, len(data_classes), len(classes))
            arguments = options.model_arguments()
            model = build_model(options.model, len(classes), materials.image_size, arguments)
        materials = dataclasses.replace(materials, model=model)
    job = build_job(options, world, materials, Clock(world.device))
    with world.raise_on_all_ranks():
        checkpoint.load_weights(job.model, trained.tensors)
    columns = _infer_all(job, classes)
    if world.rank != 0:
        return 0
    writers: Dict[str, Callable[[Job, Columns, BinaryIO], None]] = {
        "predict": partial(_write_predictions, classes),
        "extract": _write_embeddings,
        "evaluate": partial(_write_evaluation, classes),
    }
    for option, path in options.results.items():
        try:
            with atomic_write(pathlib.Path(path)) as file:
                writers[option](job, columns, file)
        except OSError as error:
            raise RankError(f"{path}: cannot be written: {error.strerror}.") from error
    images = pluralize(len(job.eval_set), "image")
    print(f"{len(columns['index'])} of {images} of val: written")
    if trained.classes is None:
        print("the weights name no classes: the names are those of --data, by their order")
    elif changes := checkpoint.class_changes(trained.classes, data_classes):
        print(f"class names are those that the model was trained with: {changes}")
    return 0


def _read_model(options: Options, world: World) -> TrainedModel:
    """Read the model of the newest checkpoint, or of --weights if there is no checkpoint. Return
    the model's average if it has one, as a run evaluates it. Raises UserError. Collective."""
    state = resume.find_newest(options, world)
    if state is not None:
        average = state["ema"]["average"] if state["ema"] else None
        return TrainedModel(average or state["model"], state["classes"] or None)
    if options.weights is None:
        raise UserError(f"--resume {options.resume}: no checkpoint below --output.")
    with world.raise_on_all_ranks():
        trained = read_weights(options.weights, average=True)
    return trained


def _refuse_more_classes(
    model: torch.nn.Module,
    tensors: Dict[str, torch.Tensor],
    data_class_count: int,
    class_count: int,
) -> None:
    """Raise UserError if a file names more classes than its tensors have weights for. `model` is
    built for `data_class_count` classes."""
    # The caller then builds a net for `class_count` classes: a damaged file that names a billion
    # classes must not take the memory for them.
    state = model.state_dict()
    head_numbers = sum(state[name].numel() for name in find_head(model, data_class_count))
    numbers_per_class = head_numbers // data_class_count
    # Tensors that share their memory count once.
    numbers = sum({memory_key(tensor): tensor.numel() for tensor in tensors.values()}.values())
    # A generous limit: the head alone would need more numbers than the whole file has.
    if class_count * max(1, numbers_per_class) > numbers:
        raise UserError(
            f"the weights name {class_count:,} classes and have {numbers:,} numbers, which no "
            "classifier of so many classes has: they are damaged. Take another file."
        )


def _check_writable(options: Options) -> None:
    """Raise UserError before the work if a file of the results could not be written."""
    files = [pathlib.Path(file) for file in options.results.values()]
    if len(set(files)) < len(files):
        flags = " and ".join(f"--{name}" for name in options.results)
        raise UserError(f"{flags} would write the same file: give each another name.")
    for file in files:
        folder = file.parent
        # A launcher names files in the run's output, whose folders nobody has made yet. If mkdir
        # fails, the check below prints that there is no folder.
        if options.output and pathlib.Path(options.output) in folder.parents:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            raise UserError(f"{file}: there is no such folder to write to.")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{file}: this user cannot write to {folder}.")


@torch.no_grad()
def _infer_all(job: Job, classes: List[str]) -> Columns:
    """Run the model over all images of all ranks. Return the columns that the options need, in the
    order of the data set. Each has a row for each image: int64 `index`, `label` (predicted) and
    `target`, fp64 `probability` and `loss`, bool `top1` and `top5`, fp32 `features` (images,
    features). `classes`: the model's names. Raises UserError. Collective."""
    options = job.options
    captured: Dict[str, torch.Tensor] = {}  # "features": the classifier's input in the last forward
    classifier = last_linear(job.model)
    if options.extract and classifier is None:
        raise UserError(
            "--extract: this model has no linear layer, so it has no input of a linear layer to "
            "extract."
        )
    if classifier is not None:
        classifier.register_forward_pre_hook(lambda _, inputs: captured.update(features=inputs[0]))
    # model_numbers[i] is the model's number of class i of --data. A class that the model lacks
    # would shift all later ones, but only --evaluate uses this, and `infer` refused such data.
    model_numbers = torch.tensor(
        [classes.index(name) for name in job.train_set.classes if name in classes]
    )
    # The size of a batch changes a result's last bits, so it must not depend on the ranks.
    size = max(1, options.per_node_batch_size // options.accumulate)
    tables: List[Columns] = []  # of this rank, one for each batch
    job.model.eval()
    for batch in eval_batches(job.eval_set, options, job.world, size):
        images, _ = batch.copy_to(job.world.device)
        with detect_out_of_memory(), job.precision.computing():
            outputs = job.model(job.normalise(images)).double()
        best = outputs.softmax(1).max(1)
        row_columns = {"index": batch.indices, "label": best.indices, "probability": best.values}
        if options.extract:
            row_columns["features"] = captured["features"].flatten(1).float()
        if options.evaluate:
            row_columns["target"] = model_numbers[batch.targets]
            scores = score(outputs, row_columns["target"].to(outputs.device))
            row_columns.update(zip(("top1", "top5", "loss"), scores))
        tables.append({name: column.cpu() for name, column in row_columns.items()})
    # The table of a rank without images has no columns.
    rank_tables = [table for table in job.world.gather_state(_join_columns(tables)) if table]
    if not rank_tables:
        raise UserError("--predict, --extract, --evaluate: no image of val can be read.")
    columns = _join_columns(rank_tables)
    unfinite_count = int((~columns["probability"].isfinite()).sum())
    if unfinite_count:
        raise UserError(
            f"the model's outputs for {unfinite_count} of {len(columns['index'])} images are not "
            "finite: give --precision fp32, or a checkpoint from before it diverged."
        )
    order = columns["index"].argsort()
    return {name: column[order] for name, column in columns.items()}


def _join_columns(tables: List[Columns]) -> Columns:
    """Append the rows of tables with the same columns. Return {} for no tables."""
    names = list(tables[0]) if tables else []
    return {name: torch.cat([table[name] for table in tables]) for name in names}


def _write_predictions(classes: List[str], job: Job, columns: Columns, file: BinaryIO) -> None:
    """Write a CSV table of path, class and probability."""
    # A path that is not UTF-8 keeps its bytes, because only these bytes find the file.
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    table = csv.writer(text)
    table.writerow(["path", "class", "probability"])
    rows = zip(*(columns[name].tolist() for name in ("index", "label", "probability")))
    for index, label, probability in rows:
        path, class_name = csv_cell(job.eval_set.paths[index]), csv_cell(classes[label])
        table.writerow([path, class_name, f"{probability:.6f}"])
    text.detach()  # flushes the text and leaves the file open for its owner to close


def _write_embeddings(job: Job, columns: Columns, file: BinaryIO) -> None:
    """Write a torch file: `paths`, and `embeddings` fp32 (images, features)."""
    paths = [job.eval_set.paths[index] for index in columns["index"].tolist()]
    torch.save({"paths": paths, "embeddings": columns["features"]}, file)


def _write_evaluation(classes: List[str], job: Job, columns: Columns, file: BinaryIO) -> None:
    """Write JSON, described in docs/run-directory.md: the same on any number of ranks."""
    by_class = [
        {"name": name, **_measure(columns, columns["target"] == classes.index(name))}
        for name in job.train_set.classes
    ]
    is_wrong = ~columns["top1"]
    # One number stands for each pair of true and predicted class, so that torch can count pairs.
    pair_numbers = columns["target"][is_wrong] * len(classes) + columns["label"][is_wrong]
    pairs, counts = (column.tolist() for column in pair_numbers.unique(return_counts=True))
    # Equally frequent pairs come in the order of the classes, so that the file is always the same.
    image_counts = dict(zip(pairs, counts))
    by_frequency = sorted(image_counts, key=lambda pair: (-image_counts[pair], pair))
    confused: List[Dict[str, Any]] = []
    for pair in by_frequency[:MOST_CONFUSED]:
        true, predicted = divmod(pair, len(classes))
        names = {"name": classes[true], "predicted": classes[predicted]}
        confused.append({**names, "images": image_counts[pair]})
    document: Dict[str, Any] = {
        "model": job.options.model,
        "data": pathlib.Path(job.options.data or "").name,
        "precision": job.options.precision,
        "image_size": job.eval_set.sizes.evaluate,
        "unreadable": len(job.eval_set) - len(columns["index"]),
        **_measure(columns, torch.ones_like(is_wrong)),
        "classes": by_class,
        "confused": confused,
    }
    file.write(json.dumps(document, indent=1).encode())


def _measure(columns: Columns, chosen: torch.Tensor) -> Dict[str, Any]:
    """Compute accuracy and mean loss of the images that the mask `chosen` (images) selects."""
    # These sums are exact: no order of the images changes their last bit.
    count = int(chosen.sum())
    if not count:
        return {"images": 0, "top1": None, "top5": None, "loss": None}
    shares = {name: int(columns[name][chosen].sum()) / count for name in ("top1", "top5")}
    return {"images": count, **shares, "loss": math.fsum(columns["loss"][chosen].tolist()) / count}
