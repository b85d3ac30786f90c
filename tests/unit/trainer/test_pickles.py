"""A checkpoint is tensors and plain values: whatever else a file holds is not loaded, nor run."""

import ast
import inspect
import io
import pickle
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tandem
import trainer
from contract.errors import UserError
from tandem.sync.feedback import ErrorFeedback
from tests.trainer_ranks import make_images, run_ranks, said
from trainer import checkpoint, export, predict, weights

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
        assert str(file) in text and "could run code" in text
    assert not made.exists()
    assert export.main([str(run), f"TO={run}/out.pt"]) == 2
    assert sorted(path.name for path in run.rglob("*.*")) == ["step-2.pt"]
    assert not made.exists()


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def number(value):
    return pickle.dumps(value, 2)[2:-1]


def storage(items, more=b""):
    kind = text("storage") + b"ctorch\nByteStorage\n"
    return b"(" + kind + text("0") + text("cpu") + number(items) + more + b"tQ"


def tensor(items, length, begin=0):
    shape = b"(" + number(length) + b"t(" + number(1) + b"t\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(items) + number(begin) + shape + b"tR"


def archive(*values, names=("data.pkl",), first=b""):
    """A checkpoint of these values, each made by its operations, and a storage of 1 kB. `names`: of
    the last file with them; those before it have none."""
    made = [b"\x80\x02].", b"\x80\x02](" + b"".join(values) + b"e."]
    files = [*zip(names, made[-len(names) :]), ("data/0", b"0" * 1000), ("version", "3\n")]
    content = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(content, "w") as file:
        warnings.simplefilter("ignore")  # of a name that is there twice
        for name, inside in files:
            file.writestr(f"archive/{name}", inside)
    return first + content.getvalue()


SIZE = number(1 << 40)
BYTES = b"c__builtin__\nbytearray\n" + SIZE + b"\x85R"
LEGACY = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {})]
ASKS = {
    "a bytearray": (archive(BYTES), "bytearray"),
    "in capitals": (archive(BYTES, names=("DATA.PKL",)), "bytearray"),
    "in capitals, beside": (archive(BYTES, names=("data.pkl", "DATA.PKL")), "damaged"),
    "twice": (archive(BYTES, names=("data.pkl", "data.pkl")), "damaged"),
    "before an archive": (
        archive(first=b"".join(LEGACY) + b"\x80\x02" + BYTES + b"."),
        "bytearray",
    ),
    "two lists of files": (archive(BYTES, first=archive()), "damaged"),
    "of TorchScript": (archive(names=("constants.pkl", "data.pkl")), "a program"),
    "a storage": (archive(b"ctorch.storage\nUntypedStorage\n" + SIZE + b"\x85R"), "UntypedStorage"),
    "a tensor": (archive(b"ctorch\nTensor\n" + SIZE + b"\x85R"), "torch.Tensor"),
    "longer texts": (
        archive(b"c_codecs\nencode\n" + text("a") + text("utf-32") + b"\x86R"),
        "encode",
    ),
    "more than its storage": (archive(tensor(1000, 1 << 30)), "larger than its storage"),
    "more than the file": (archive(tensor(1 << 30, 1 << 30)), "more bytes than the file"),
    "one storage often": (archive(*(tensor(1000, 900, n) for n in range(50))), "many times"),
    "lists of lists": (archive(b"]q\0", b"]h\0ah\0aq\0" * 40), "inside each other"),
    "a number of many digits": (archive(b"L" + b"7" * 9999 + b"L\n"), "the operation LONG"),
    "a list in itself": (archive(b"]q\0h\0a"), "deep in each other"),
    "a deep list": (archive(b"]" * 60 + b"a" * 59), "deep in each other"),
    "a key of keys": (archive(b"})" + b"\x85" * 9 + b"Ns"), "a key"),
    "an attribute": (archive(b"ccollections\nOrderedDict\n)RNb"), "attributes"),
    "keys of one hash": (archive(b"}" + number(1 << 61) + b"Ns"), "a key"),
    "an old file's storage": (
        b"".join(LEGACY) + b"\x80\x02" + storage(1 << 40, b"N") + b".",
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


def test_an_export_is_no_larger_for_a_tensor_s_many_names(monkeypatch):
    half, looked = torch.ones(1000, dtype=torch.float16), []
    isfinite = torch.Tensor.isfinite
    monkeypatch.setattr(torch.Tensor, "isfinite", lambda one: looked.append(one) or isfinite(one))
    state = {"ema": None, "model": {str(n): half for n in range(50)}}
    made = export.model_weights(state)
    assert len({value.data_ptr() for value in made.values()}) == 1 and len(made) == 50
    assert len(looked) == 1


def test_what_a_file_names_often_is_not_copied_as_often():
    """A tensor that a strategy kept, a long key above tensors, and classes without weights."""
    one, key = torch.ones(9), "k" * 5000
    with pytest.raises(ValueError, match="the same tensor twice"):
        ErrorFeedback.load_state_dict(
            SimpleNamespace(errors={}), {"scale": 1, "kept": {"0": [one] * 9}}
        )
    names = [
        name
        for name, _ in weights._iterate_tensors({key: dict.fromkeys("abc", one), "a": {"b": one}})
    ]
    assert names == ["a.b"]
    with pytest.raises(UserError, match="1,000 classes"):
        predict._refuse_more_classes(torch.nn.Linear(9, 3), {"weight": torch.ones(3, 9)}, 3, 1000)
    good = torch.nn.Linear(9, 5).state_dict()
    predict._refuse_more_classes(torch.nn.Linear(9, 3), good, 3, 5)


def test_no_file_of_the_trainer_has_another_program_load_pickles():
    """A torch of 2022 runs what is in them; a newer one reads other bytes than were checked."""
    unsafe = {"torch.load", "torch.jit.load", "pickle.load", "pickle.loads", "pickle.Unpickler"}
    found = set()
    folders = (Path(trainer.__file__).parent, Path(tandem.__file__).parent)
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        called = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        found |= {path.name} if called & unsafe else set()
    assert not found
