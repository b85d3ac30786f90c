"""Evaluation, predictions, embeddings and export count each image once on any number of ranks."""

import csv
import io
import json
import os
import shutil
from collections import Counter
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from PIL import Image

from contract.command_line import parse
from contract.options import Options
from tandem.pickles import load_tensors
from tests.trainer_models import normed
from tests.trainer_ranks import lines, run_ranks, said, snapshot, trainer
from trainer import checkpoint, predict
from trainer.data.batch import Batch
from trainer.evaluate import evaluate
from trainer.export import main as export
from trainer.export import read_best
from trainer.precision import Precision
from trainer.screen import Screen
from trainer.train import Run
from trainer.world import start
from trainer.writer import Writer

PER_CLASS = 8

MODEL = ["--model", "tests.trainer_models:normed", "--workers", 0]


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained")
    argv = ["--data", images, "--output", output, *MODEL, "--epochs", 2, "--ema", 0.5]
    assert run_ranks([1, 1], trainer, *argv, "--per_node_batch_size", 4) == [0, 0]
    return output


def evaluated(count):
    """(samples, hits, loss) of `count` numbered images by the real loop."""
    world = start(Options())
    job = SimpleNamespace(
        options=Options(workers=0), world=world, ema=None, frozen=[], eval_set=range(count),
        precision=Precision("fp64", world.device), normalise=lambda images: images.double(),
        model=_Parity(), eval_batch=64, agreed=nullcontext,
    )  # fmt: skip
    with mock.patch("trainer.evaluate.eval_batches", numbered_batches):
        return tuple(evaluate(job))


class _Parity(torch.nn.Module):
    def forward(self, images):
        number = images[:, 0, 0, 0] + 200 * images[:, 1, 0, 0]
        return torch.stack([number % 7, number % 5, number % 3], 1)


def numbered_batches(dataset, options, world, size):
    mine = torch.arange(world.rank, len(dataset), world.size)
    for part in mine.split(size):
        images = torch.zeros(len(part), 3, 2, 2, dtype=torch.uint8)
        images[:, 0], images[:, 1] = part[:, None, None] % 200, part[:, None, None] // 200
        yield Batch(images, part % 3, part, [len(part)])


def test_each_of_5003_counts_once_on_one_to_five_ranks():
    """Pitfall 19: padded samples counted twice. Also fewer images than ranks."""
    alone = run_ranks([1], evaluated, 5003)[0]
    assert alone[0] == 5003
    for ranks in (2, 5):
        for ours in run_ranks([1] * ranks, evaluated, 5003):
            assert ours[:3] == alone[:3]
            assert ours[3] == pytest.approx(alone[3], rel=1e-12)
    assert {ours[0] for ours in run_ranks([1] * 4, evaluated, 3)} == {3}


def test_predictions_are_in_order_and_agree_for_one_and_three_ranks(images, trained, tmp_path):
    """Also of names that are no UTF-8, which are written as they are."""
    shutil.copytree(images, tmp_path / "images")
    odd = os.fsdecode(os.fsencode(tmp_path / "images/val/class1") + b"/caf\xe9.png")
    os.rename(tmp_path / "images/val/class1/0.png", odd)  # noqa: PTH104 the name is bytes
    tables = []
    for ranks in (1, 3):
        file, vectors = tmp_path / f"{ranks}.csv", tmp_path / f"{ranks}.pt"
        argv = ["--data", tmp_path / "images", *MODEL, "--resume", trained, "--predict", file]
        assert run_ranks([ranks], trainer, *argv, "--extract", vectors) == [0] * ranks
        with file.open(encoding="utf-8", errors="surrogateescape") as text:
            tables.append(list(csv.DictReader(text)))
        with vectors.open("rb") as data:
            found = load_tensors(data)
        assert found["paths"] == [row["path"] for row in tables[-1]]
        assert found["embeddings"].shape == (12, 8 * 9)
    assert [row["path"] for row in tables[0]] == sorted(row["path"] for row in tables[0])
    assert tables[0] == tables[1]
    assert all(Image.open(tmp_path / "images" / row["path"]) for row in tables[0])
    assert os.path.relpath(odd, tmp_path / "images") in {row["path"] for row in tables[0]}
    # By the average, which was evaluated.
    average, same = tmp_path / "average.pt", tmp_path / "same.csv"
    assert export([f"RUN={newest(trained)}", f"TO={average}"]) == 0
    argv = ["--data", tmp_path / "images", *MODEL, "--weights", average, "--predict", same]
    assert run_ranks([1], trainer, *argv) == [0]
    assert same.read_bytes() == (tmp_path / "1.csv").read_bytes()


def test_a_predicted_class_cannot_be_a_formula(tmp_path):
    """A checkpoint names its classes; only the path finds a file, so its bytes stay."""
    paths = ["val/=1/caf\udce9.png", "val/a/\x1b[2J.png"]
    job = SimpleNamespace(eval_set=SimpleNamespace(paths=paths))
    values = {"index": [0, 1], "label": [1, 0], "probability": [0.5, 0.5]}
    with (tmp_path / "out.csv").open("wb") as file:
        columns = {name: torch.tensor(value) for name, value in values.items()}
        predict._write_predictions(["=1", "-1\ud800"], job, columns, file)
    rows = (tmp_path / "out.csv").read_bytes().splitlines()[1:]
    assert rows == [
        b"val/=1/caf\xe9.png,'-1\\ud800,0.500000", rb"val/a/\x1b[2J.png,'=1,0.500000",
    ]  # fmt: skip


def newest(output):
    return sorted(output.glob("checkpoints/*/step-*.pt"))[-1]


def evaluation(images, trained, file, ranks, *argv):
    source = ["--resume", trained, "--evaluate", file, "--per_node_batch_size", 8]
    assert run_ranks(ranks, trainer, "--data", images, *MODEL, *source, *argv) == [0] * sum(ranks)
    return json.loads(file.read_text())


def test_an_evaluation_is_the_same_on_one_and_four_ranks(images, trained, tmp_path):
    """To the bit, with an image that cannot be read; and of fewer classes than the model's."""
    folder = tmp_path / "images"
    shutil.copytree(images, folder)
    (folder / "val/class2/0.png").write_bytes(b"no image")
    table = tmp_path / "out.csv"
    alone = evaluation(folder, trained, tmp_path / "1.json", [1], "--predict", table)
    evaluation(folder, trained, tmp_path / "4.json", [3, 1])
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "4.json").read_bytes()
    assert (alone["images"], alone["unreadable"]) == (11, 1)
    assert [row["images"] for row in alone["classes"]] == [3, 3, 2, 3]
    with table.open() as text:
        pairs = [(row["path"].split("/")[1], row["class"]) for row in csv.DictReader(text)]
    wrong = Counter(pair for pair in pairs if pair[0] != pair[1])
    assert wrong and alone["top1"] == pytest.approx(1 - wrong.total() / 11)
    assert {(r["name"], r["predicted"]): r["images"] for r in alone["confused"]} == wrong
    whole = sum(row["images"] * row["loss"] for row in alone["classes"])
    assert alone["loss"] == pytest.approx(whole / 11, rel=1e-12)
    for split in ("train", "val"):
        shutil.rmtree(folder / split / "class0")
    fewer = evaluation(folder, trained, tmp_path / "fewer.json", [1])
    same = [(row["top1"], pytest.approx(row["loss"])) for row in alone["classes"][1:]]
    assert [(row["top1"], row["loss"]) for row in fewer["classes"]] == same


def test_the_evaluation_of_a_run_is_the_one_that_it_had_in_training(images, trained, tmp_path):
    """By the average, from the checkpoint as a file of weights, too."""
    file = next(trained.glob("checkpoints/*/best.pt"))
    best = max(line["top1"] for line in lines(trained, "evaluate")[0])
    shown = next(line for line in lines(trained, "evaluate")[0] if line["top1"] == best)
    argv = ["--data", images, *MODEL, "--weights", file, "--evaluate", tmp_path / "e.json"]
    assert run_ranks([1], trainer, *argv) == [0]
    again = json.loads((tmp_path / "e.json").read_text())
    assert (again["top1"], again["top5"]) == (shown["top1"], shown["top5"])
    assert again["loss"] == pytest.approx(shown["loss"], rel=1e-6)


def test_images_of_classes_that_a_model_does_not_know_are_not_evaluated(images, trained, tmp_path):
    argv = ["--data", renamed(images, tmp_path / "images"), *MODEL, "--resume", trained]
    ends = run_ranks([1, 1], said, *argv, "--evaluate", tmp_path / "e.json")
    assert [code for code, _ in ends] == [2, 2] and not list(tmp_path.glob("e.*"))
    assert all("zebra" in text and text.count("\n") == 1 for _, text in ends)


def renamed(images, folder, *more):
    """The same images, of which class1 is called zebra, so that all class numbers behind it differ;
    and `more` classes."""
    shutil.copytree(images, folder)
    for split in (folder / "train", folder / "val"):
        (split / "class1").rename(split / "zebra")
        for name in more:
            shutil.copytree(split / "class0", split / name)
    return folder


@pytest.mark.parametrize(
    ("source", "more"), [("--resume", ()), ("--resume", ("ape", "yak")), ("--weights", ("ape",))]
)
def test_classes_are_named_as_the_model_was_trained(images, trained, tmp_path, source, more):
    folder, tables = renamed(images, tmp_path / "images", *more), []
    file = next(trained.glob("checkpoints/*/best.pt"))
    argv = [*MODEL, source, file, "--predict"]
    for data in (images, folder):
        out = tmp_path / f"{len(tables)}.csv"
        (said,) = run_ranks([1], said_by_trainer, "--data", data, *argv, out)
        with out.open() as text:
            rows = {row["path"]: row["class"] for row in csv.DictReader(text)}
        tables.append({path.replace("/zebra/", "/class1/"): name for path, name in rows.items()})
    assert tables[0].items() <= tables[1].items()
    assert {*tables[1].values()} <= {f"class{number}" for number in range(4)}
    assert all(name in said for name in ("class1", "zebra", *more))


def said_by_trainer(*argv):
    with mock.patch("sys.stdout", io.StringIO()) as output:
        assert trainer(*argv) == 0
    return output.getvalue()


def test_a_run_does_not_go_on_with_a_class_of_another_name(images, trained, tmp_path):
    output, argv = tmp_path / "run", [*MODEL, "--epochs", 3, "--ema", 0.5]
    shutil.copytree(trained, output)
    argv += ["--per_node_batch_size", 4, "--data", renamed(images, tmp_path / "images")]
    ((code, text),) = run_ranks([1], said, *argv, "--output", output, "--resume", "auto")
    assert code == 2 and "class1 is not in --data" in text and "zebra is new" in text


def shown(*argv):
    """Loss and top-1 in training, as an epoch's line on the screen has them."""
    said, evaluated = [], Screen.show_evaluation
    told = mock.patch.object(
        Screen, "show_evaluation", lambda *args: (said.append(args[2:4]), evaluated(*args))
    )
    with (
        told,
        mock.patch("tandem.step_lines.Block.SHORT_SECONDS", 0.0),
    ):  # so that each step has a line
        assert trainer(*argv) == 0
    return said


def test_an_epoch_s_loss_and_top1_are_those_of_all_its_steps_and_ranks(images, tmp_path):
    argv = ["--data", images, "--output", tmp_path, *MODEL, "--per_node_batch_size", 5]
    said = run_ranks([2, 1], shown, *argv, "--epochs", 2, "--log_every", 1)
    sums = {0: [0.0, 0.0, 0], 1: [0.0, 0.0, 0]}
    for line in chain.from_iterable(lines(tmp_path, "step")):
        figures = (line["loss"] * line["samples"], line["top1"] * line["samples"], line["samples"])
        sums[line["epoch"]] = [a + b for a, b in zip(sums[line["epoch"]], figures)]
    assert [count for *_, count in sums.values()] == [32, 32]
    wanted = [pytest.approx((loss / 32, hits / 32), rel=1e-6) for loss, hits, _ in sums.values()]
    assert said == [wanted] * 3
    for evaluated in lines(tmp_path, "evaluate"):
        assert [(line["train_loss"], line["train_top1"]) for line in evaluated] == wanted


def writers(*argv):
    """Whether this rank writes its machine's checkpoints, and whether it copies its state."""
    snapshot = mock.patch("trainer.checkpoint.snapshot", wraps=checkpoint.snapshot)
    with mock.patch("trainer.train.Writer", wraps=Writer) as made, snapshot as copied:
        assert trainer(*argv) == 0
    names = [call.args[0].parent.name for call in made.call_args_list]
    return "checkpoints" in names, copied.called


def test_one_process_of_a_machine_looks_after_its_checkpoints(images, tmp_path):
    argv = ["--data", images, "--output", tmp_path, *MODEL, "--epochs", 1]
    assert run_ranks([2, 1], writers, *argv) == [(True,) * 2, (False,) * 2, (True,) * 2]


def beginning(*argv):
    """The average of the weights with which a run begins."""
    options = parse([str(word) for word in argv])
    began = Run(options, start(options)).job.ema.average
    return {key: value.tolist() for key, value in began.items()}


def test_export_gives_plain_weights(images, trained, tmp_path):
    """Pitfalls 6 and 12: no `module.`; one answer to which machine's weights count: those that were
    evaluated as the best. A run that begins with them averages them."""
    plain = tmp_path / "plain.pt"
    assert export([str(trained), f"TO={plain}"]) == 0
    with plain.open("rb") as ours, next(trained.glob("checkpoints/*/best.pt")).open("rb") as theirs:
        ours, theirs = load_tensors(ours), load_tensors(theirs)
    normed(4).load_state_dict(ours)
    assert torch.equal(ours["0.weight"], theirs["ema"]["average"]["0.weight"])
    assert not torch.equal(ours["0.weight"], theirs["model"]["0.weight"])
    argv = ["--data", images, *MODEL, "--ema", 0.9, "--weights", plain]
    assert run_ranks([1], beginning, *argv) == [{k: v.tolist() for k, v in ours.items()}]


def test_weights_with_and_without_ddp_prefix_load(images, trained, tmp_path):
    """Pitfall 6; the test above is without."""
    export([str(trained), f"TO={tmp_path}/plain.pt"])
    with (tmp_path / "plain.pt").open("rb") as file:
        weights = {f"module.{key}": value for key, value in load_tensors(file).items()}
    torch.save(weights, tmp_path / "weights.pt")
    argv = ["--data", images, *MODEL, "--weights", tmp_path / "weights.pt"]
    below = tmp_path / "results/out.csv"  # below --output a folder is made, as for checkpoints
    assert run_ranks([1], trainer, *argv, "--predict", below, "--output", tmp_path) == [0]
    assert below.is_file()


@pytest.mark.parametrize(
    "argv, word",
    [
        (["nowhere"], "RUN=nowhere: there is no such run"),
        (["tests"], "no complete best.pt or step-"),
        (["{trained}", "TO=x.bin"], "must end in .pt"),
        (["{trained}", "TO=/nowhere/x.pt"], "/nowhere/x.pt: there is no such folder"),
    ],
)
def test_export_refuses_in_one_sentence(trained, capsys, argv, word):
    assert export([part.format(trained=trained) for part in argv]) == 2
    assert word in capsys.readouterr().err


def test_export_of_a_scripts_run_names_the_scripts_files(tmp_path, capsys):
    (tmp_path / "work/node1").mkdir(parents=True)
    assert export([str(tmp_path)]) == 2
    assert f"the script wrote are in {tmp_path}/work." in capsys.readouterr().err


def test_lines_add_up_to_the_loops_time(trained):
    """No category is a remainder: the sum of all lines is the time from start to end."""
    for of_rank in lines(trained):
        kinds = [line["kind"] for line in of_rank]
        assert (kinds[0], kinds[-1], of_rank[-1]["status"]) == ("start", "end", "finished")
        steps = sum(line["steps"] for line in of_rank if line["kind"] == "step")
        assert steps == 2 * of_rank[0]["steps_per_epoch"] == 8
        assert kinds.count("evaluate") == 2
        total = sum(sum(line.get("seconds", {}).values()) for line in of_rank)
        assert total == pytest.approx(of_rank[-1]["mono"] - of_rank[0]["mono"], abs=1e-3)
        step = next(line for line in of_rank if line["kind"] == "step")
        assert {"data", "forward", "backward", "sync_exposed", "optimizer"} <= set(step["seconds"])


def test_the_newest_run_counts_more_than_the_longest(tmp_path):
    """A folder may hold an older run's checkpoint with more steps, and broken files."""
    writer = Writer(tmp_path / "checkpoints" / "a", keep=2)
    for run, step in (("2025", 50), ("2026", 7), ("2026", 3)):
        at = {"sample": step, "samples": step, "step": step}
        writer.save(snapshot(model={"x": torch.ones(9)}, run=run, **at), best=False)
        writer.finish()
        assert read_best(str(tmp_path))["run"] == run
    assert read_best(str(tmp_path))["step"] == 7
    path = tmp_path / "checkpoints/a/step-00000007.pt"
    content = bytearray(path.read_bytes())
    # One bit of the tensor's data.
    content[content.index(torch.ones(9).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    assert read_best(str(tmp_path))["step"] == 3
