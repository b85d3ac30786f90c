"""A checkpoint is tensors and plain values: whatever else a file holds is not loaded, nor run."""

import ast
import inspect
import io
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

import tandem
import trainer
from contract.errors import UserError
from tandem import compat
from tests.trainer_ranks import make_images, run_ranks, said
from trainer import checkpoint, export

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
    assert export.main([str(run), f"TO={run}/out.pt"]) == 2
    assert sorted(path.name for path in run.rglob("*.*")) == ["step-2.pt"]
    assert not made.exists()


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def number(value):
    return pickle.dumps(value, 2)[2:-1]


def storage(items):
    return (
        b"("
        + text("storage")
        + b"ctorch\nByteStorage\n"
        + text("0")
        + text("cpu")
        + (number(items) + b"tQ")
    )


def tensor(items, length, begin=0):
    shape = b"(" + number(length) + b"t(" + number(1) + b"t\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(items) + number(begin) + shape + b"tR"


def archive(*values):
    """A checkpoint of these values, each made by its operations, and a storage of 1 kB."""
    made = b"\x80\x02](" + b"".join(values) + b"e."
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, inside in (("data.pkl", made), ("data/0", b"0" * 1000), ("version", "3\n")):
            file.writestr(f"archive/{name}", inside)
    return content.getvalue()


SIZE = number(1 << 40)
LEGACY = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {})]
ASKS = {
    "a bytearray": (archive(b"c__builtin__\nbytearray\n" + SIZE + b"\x85R"), "bytearray"),
    "a storage": (archive(b"ctorch.storage\nUntypedStorage\n" + SIZE + b"\x85R"), "UntypedStorage"),
    "a tensor": (archive(b"ctorch\nTensor\n" + SIZE + b"\x85R"), "a call of torch.Tensor"),
    "longer texts": (
        archive(b"c_codecs\nencode\n" + text("a") + text("utf-32") + b"\x86R"),
        "encode",
    ),
    "more than its storage": (archive(tensor(1000, 1 << 30)), "larger than its storage"),
    "more than the file": (archive(tensor(1 << 30, 1 << 30)), "more bytes than the file"),
    "one storage often": (archive(*(tensor(1000, 900, n) for n in range(50))), "many times"),
    "lists of lists": (archive(b"]q\0]h\0ah\0aq\1", b"]h\1ah\1a"), "inside each other"),
    "a deep list": (archive(b"]" * 60 + b"a" * 59), "deep in each other"),
    "a key of keys": (archive(b"})" + b"\x85" * 9 + b"Ns"), "a key"),
    "a place far away": (archive(b"]r\xff\xff\xff\x7f"), "a place"),
    "an old file's storage": (
        b"".join(LEGACY) + b"\x80\x02" + storage(1 << 40) + b".",
        "more bytes",
    ),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_few_bytes_take_little_memory_and_no_time(name):
    content, what = ASKS[name]
    with pytest.raises(UserError, match=what):
        checkpoint.load("7.pt", io.BytesIO(content))


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saves_of_tensors_and_plain_values_is_let_through(zipped):
    shared = torch.ones(1000)
    state = {
        **{str(n): shared for n in range(50)},  # a layer that is used several times
        "part": shared[3:9].expand(2, 6), "none": torch.ones(0), "betas": [(0.9, 0.99)] * 9,
        "parameter": torch.nn.Parameter(shared), "size": shared.shape, "type": torch.float16,
        "groups": [{"params": [*range(2000)], "lr": 0.1, "on": True, "of": None}],
    }  # fmt: skip
    content = io.BytesIO()
    torch.save(state, content, _use_new_zipfile_serialization=zipped)
    loaded = checkpoint.load("7.pt", content)
    assert loaded.keys() == state.keys() and loaded["49"].tolist() == shared.tolist()


def test_an_export_is_no_larger_for_a_tensor_s_many_names():
    half = torch.ones(1000, dtype=torch.float16)
    state = {"ema": None, "model": {str(n): half for n in range(50)}}
    made = export.weights(state)
    assert len({value.data_ptr() for value in made.values()}) == 1 and len(made) == 50


def test_torch_1_12_takes_tensors_and_plain_values_alone(harmful, monkeypatch):
    """Its torch.load has no `weights_only`; here today's stands in, told to load whatever it is."""
    file, made = harmful
    load = torch.load

    def older(content, map_location, pickle_module):
        return load(content, map_location, pickle_module, **WHATEVER)

    monkeypatch.setattr(compat.torch, "load", older)
    monkeypatch.setattr(compat.pickles, "check", lambda _: None)
    with pytest.raises(compat.pickle.UnpicklingError, match="does not belong into a checkpoint"):
        compat.load_tensors(io.BytesIO(file.read_bytes()))
    assert not made.exists()
    whole, parameter = io.BytesIO(), torch.nn.Parameter(torch.ones(2))
    plain = {"parameter": parameter, "size": parameter.shape, "type": torch.float16}
    torch.save({**TENSORS, **plain}, whole)
    whole.seek(0)
    loaded = compat.load_tensors(whole)
    assert loaded["model"]["weight"].tolist() == loaded["parameter"].tolist() == [1, 1]
    assert (loaded["size"], loaded["type"]) == (parameter.shape, torch.float16)


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
