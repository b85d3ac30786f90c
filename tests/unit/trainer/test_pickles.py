"""A checkpoint is tensors and plain values: whatever else a file holds is not loaded, nor run."""

import ast
import inspect
import io
from pathlib import Path

import pytest
import torch

import tandem
import trainer
from tandem import compat
from tests.trainer_ranks import make_images, run_ranks, said
from trainer import export

MODEL = ["--model", "tests.trainer_models:plain", "--workers", 0, "--epochs", 1]
# torch 1.12 has no such keyword, and loads whatever it is.
WHATEVER = (
    {"weights_only": False} if "weights_only" in inspect.signature(torch.load).parameters else {}
)
TENSORS = {"model": {"weight": torch.ones(2)}, "run": "r", "samples": 8, "step": 2}


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", per_class=5)


@pytest.fixture
def harmful(tmp_path):
    """A checkpoint at its place, with an object in it that would make a folder; and that folder."""
    made = tmp_path / "made"
    file = tmp_path / "run/checkpoints/node1/step-2.pt"
    file.parent.mkdir(parents=True)
    torch.save({**TENSORS, "harm": Harm(made)}, file)
    torch.load(file, **WHATEVER)
    made.rmdir()  # it would have been harmful
    return file, made


@pytest.mark.parametrize(
    "words",
    [
        ["--resume", "FILE"],
        ["--resume", "auto", "--output", "RUN"],
        ["--weights", "FILE"],
        ["--resume", "auto", "--output", "RUN", "--predict", "RUN/out.csv"],
    ],
    ids=" ".join,
)
def test_an_object_in_a_checkpoint_is_refused_by_its_name(images, harmful, words):
    file, made = harmful
    run = file.parents[2]
    asked = [word.replace("FILE", str(file)).replace("RUN", str(run)) for word in words]
    for code, text in run_ranks([1, 1], said, "--data", images, *MODEL, *asked):
        assert (code, text.count("\n")) == (2, 1), text
        assert str(file) in text and "could run as code" in text
    assert not made.exists()
    assert export.main([str(run), str(run / "out.pt")]) == 2
    assert sorted(path.name for path in run.rglob("*.*")) == ["step-2.pt"]
    assert not made.exists()


def test_torch_1_12_takes_tensors_and_plain_values_alone(harmful, monkeypatch):
    """Its torch.load has no `weights_only`; here today's stands in, told to load whatever it is."""
    file, made = harmful
    load = torch.load

    def older(content, map_location, pickle_module):
        return load(content, map_location, pickle_module, **WHATEVER)

    monkeypatch.setattr(compat.torch, "load", older)
    with pytest.raises(compat.pickle.UnpicklingError, match="does not belong into a checkpoint"):
        compat.load_tensors(io.BytesIO(file.read_bytes()))
    assert not made.exists()
    whole = io.BytesIO()
    torch.save(TENSORS, whole)
    whole.seek(0)
    assert compat.load_tensors(whole)["model"]["weight"].tolist() == [1, 1]


def test_one_file_of_the_trainer_loads_pickles():
    """tandem/compat.py, whose function all others of the trainer and of tandem/ call."""
    unsafe = {"torch.load", "torch.jit.load", "pickle.load", "pickle.loads", "pickle.Unpickler"}
    found = set()
    folders = (Path(trainer.__file__).parent, Path(tandem.__file__).parent)
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        called = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        found |= {path.name} if called & unsafe else set()
    assert found == {"compat.py"}
