"""What is said of a checkpoint's file is what torch says of it, and nothing of it is run."""

import argparse
import collections
import io
import pickle
import zipfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher import pickles
from tests.fuzz import damaged, many

torch = pytest.importorskip("torch")


class Runs:
    def __reduce__(self):
        return (pytest.fail, ("it was run",))


def state():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    more = {"epoch": 3, "half": torch.ones(3, dtype=torch.bfloat16), "size": torch.Size([3])}
    more.update(type=torch.float16, device=torch.device("cpu"))
    more.update(parameter=torch.nn.Parameter(torch.ones(2)))
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


HOLDS = {
    "tensors": state,
    "ordered": lambda: collections.OrderedDict(a=torch.ones(2)),
    "arguments": lambda: {**state(), "args": argparse.Namespace(lr=0.1)},
    "a model": lambda: torch.nn.Linear(2, 2),
    "a command": Runs,
}


def saved(value, way):
    made = io.BytesIO()
    if way == "pickle":
        pickle.dump(value, made)
    else:
        torch.save(value, made, _use_new_zipfile_serialization=way == "zip")
    return made.getvalue()


@pytest.mark.parametrize("way", ["zip", "legacy"])
@pytest.mark.parametrize("name", HOLDS)
def test_it_is_more_than_tensors_where_torch_refuses_it(tmp_path, name, way):
    path = tmp_path / "7.pt"
    path.write_bytes(saved(HOLDS[name](), way))
    try:
        torch.load(path, weights_only=True)
        refused = False
    except pickle.UnpicklingError:
        refused = True
    assert bool(pickles.more_than_tensors(path)) == refused


def test_what_it_looks_up_is_named_in_few_words(tmp_path):
    path = tmp_path / "7.ckpt"
    path.write_bytes(saved([Runs(), argparse.Namespace(), collections.Counter], "pickle"))
    assert pickles.more_than_tensors(path) == "_pytest.outcomes._Fail, argparse.Namespace"
    path.write_bytes(pickle.dumps([io.StringIO, io.BytesIO, io.open, Runs()]))
    assert pickles.more_than_tensors(path).endswith(" and 1 more")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"no pickle", b"\x80\x04\x8c\x02os\x8c\x06system\x30\x93.",  # looked up behind a POP
        b"\x80\x02\x82\x01.", b"\x80\x04\x8e" + b"\xff" * 8, b"PK\x05\x06" + b"\0" * 18,
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_said(tmp_path, content):
    path = tmp_path / "7.tar"
    path.write_bytes(content)
    assert pickles.more_than_tensors(path) == pickles.UNSEEN
    assert pickles.more_than_tensors(path.rename(path.with_suffix(".safetensors"))) == ""


def test_a_file_of_any_size_takes_little(tmp_path, monkeypatch):
    path = tmp_path / "7.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (1 << 20))
    monkeypatch.setattr(pickles, "MOST", 1 << 16)
    assert pickles.more_than_tensors(path) == pickles.UNSEEN


WAYS = ("zip", "legacy", "pickle")
WHOLE = [saved(HOLDS[name](), way) for name in ("arguments", "tensors") for way in WAYS]
OPERATIONS = (
    *(b"\x80\x04", b"\x8c\x02os", b"\x8c\x06system", b"\x93", b"\x94", b"h\x00", b"h\x01"),
    *(b"cos\nsystem\n", b"\x82\x01", b"0", b"N", b"K\x01", b"(", b"t", b"R", b"."),
)
MADE = st.lists(st.sampled_from(OPERATIONS) | st.binary(max_size=3), max_size=30).map(b"".join)


@many(300)
@example(WHOLE[0], ".safetensors", 200)
@example(WHOLE[0], ".pt", 200)
@example(WHOLE[2], ".pt", 1 << 16)
@given(st.sampled_from(WHOLE).flatmap(damaged) | MADE, st.just(".pt"), st.just(1 << 16))
def test_a_damaged_file_is_looked_at_or_said_to_be_none(tmp_path_factory, content, end, most):
    path = tmp_path_factory.getbasetemp() / f"damaged{end}"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickles, "MOST", most)
        assert pickles.more_than_tensors(path).isprintable()


@pytest.mark.hypothesis
@pytest.mark.parametrize("missing", [True, False])
def test_a_disk_that_fails_is_no_file_s_fault(tmp_path, missing):
    path = tmp_path / "7.pt"
    path.touch() if not missing else path.symlink_to("/proc/self/mem")
    if missing:
        with pytest.raises(OSError, match="Input/output error"):
            pickles.more_than_tensors(path)
    else:
        assert pickles.more_than_tensors(path) == pickles.UNSEEN
