"""Our reader of torch's files and torch's own: of any file, ours loads what torch loads or nothing.
Its memory is bounded by the file's size."""

import io
import pickle
import struct
import tracemalloc
import warnings
import zlib

import pytest
import torch

pytest.importorskip("hypothesis")  # where the newest torch is tested
from hypothesis import given
from hypothesis import strategies as st

from tandem import pickles
from tests.fuzz import damaged, many
from tests.unit.trainer.test_pickles import LEGACY, tensor, text

FLOATS = struct.pack("<4f", 1, 2, 3, 4)
PICKLES = [
    b"\x80\x02}" + text("w") + tensor(16, 16) + b"s.",
    b"\x80\x02]" + tensor(16, 16) + b"a" + tensor(16, 9, 3) + b"a.",
    b"\x80\x02}.",
]
# Operations with their arguments, of which a pickle is made.
PARTS = [
    *(b"N", b"\x88", b"K\1", b"J\xff\xff\xff\xff", b"G\x7f\xf8" + bytes(6), b"\x8a\1\5", b"U\1a"),
    *(b"U\1\xff", text("a"), b"]", b"}", b")", b"(", b"t", b"\x85", b"\x86", b"a", b"e", b"s"),
    *(b"u", b"b", b"R", b"Q", b"q\0", b"h\0", b"j\0\0\0\0", b"0", b"2", b"\x8f", b"\x80\4"),
    *(b"ccollections\nOrderedDict\n", b"ccollections\nOrderedDict\n)R", b"ctorch\nfloat16\n"),
    *(b"ctorch\nSize\nK\1\x85\x85R", b"ctorch\ndevice\n" + text("cpu") + b"\x85R", b"K\2"),
    *(b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"c__builtin__\nset\n"),
    *(tensor(16, 16), tensor(16, 3, 2), tensor(16, 17), tensor(15, 1), tensor(1 << 40, 1)),
]
made = st.lists(st.sampled_from(PARTS), max_size=8).map(b"".join)
contents = st.sampled_from(PICKLES) | made.map(lambda parts: b"\x80\2](" + parts + b"e.")
NAMES = (
    *("a/data.pkl", "a/DATA.PKL", "a/data/0", "a/data/0", "a/DATA/0", "a/data/1", "A/data/0"),
    *("a/version", "a/Version", "b/version", "a/byteorder", "a/.data/version", "a/constants.pkl"),
    *("a", "a/", "/data.pkl", "data.pkl", "a/data.pkl\0x", "a\\data.pkl", "a/.format_version"),
)
VERSIONS = (b"3\n", b"3", b"10\n", b"11", b"0", b"x", b"", b"3x", b"+3", b"-1")
INSIDE = {"version": VERSIONS, "byteorder": (b"little", b"big", b""), "0": (FLOATS, b"", bytes(17))}


def mostly(usual, *odd):
    return st.sampled_from([usual] * 4 * len(odd) + [*odd])


def entry(name, content):
    """The fields of a file in an archive, each of which may be changed on its own."""
    size = len(content)
    return {
        **{"signature": b"PK\1\2", "flags": 0x808, "method": 0, "crc": zlib.crc32(content)},
        **{
            "packed": size,
            "unpacked": size,
            "disk": 0,
            "attributes": 0,
            "name": name,
            "extra": b"",
        },
        **{"comment": b"", "local": b"PK\3\4", "local name": name, "local size": size, "moved": 0},
        "content": content,
    }


def zipped(entries, end):
    """An archive of these files; `end`: the fields of its last parts."""
    made, listed = bytearray(end["before"]), b""
    for one in entries:
        begin, name, local = len(made) + one["moved"], one["name"].encode(), one["local name"]
        sizes = one["crc"], one["local size"], one["unpacked"] & 0xFFFFFFFF, len(local), 2
        made += struct.pack("<4s5H3L2H", one["local"], 0, one["flags"], 0, 0, 0, *sizes)
        made += local.encode() + b"FB" + one["content"]
        sizes = [one["unpacked"], one["packed"], begin]
        extra = b"".join(struct.pack("<Q", size) for size in sizes if end["wide"])
        extra = (struct.pack("<2H", 1, len(extra)) + extra if extra else b"") + one["extra"]
        packed = [0xFFFFFFFF] * 3 if end["wide"] else [size & 0xFFFFFFFF for size in sizes]
        fields = one["signature"], 0, 0, one["flags"], one["method"], 0, 0, one["crc"], packed[1]
        lengths = packed[0], len(name), len(extra), len(one["comment"]), one["disk"], 0
        listed += struct.pack("<4s6H3L5H2L", *fields, *lengths, one["attributes"], packed[2])
        listed += name + extra + one["comment"]
    made += end["gap"] + listed
    begin, length = len(made) - len(listed) + end["begin"], len(listed) + end["length"]
    made += end["second"] % 3 * listed
    fields = 0, 0, len(entries) + end["count"], len(entries), max(0, length), max(0, begin)
    if end["large"]:
        place = max(0, len(made) + end["place"])
        made += struct.pack("<4sQ2H2L4Q", b"PK\6\6", end["more"], 0, 0, *fields)
        made += struct.pack("<4sLQL", b"PK\6\7", 0, place, 1)
        fields = (0, 0, *end["small"])
    made += struct.pack("<4s4H2LH", b"PK\5\6", *fields, len(end["note"])) + end["note"]
    return bytes(made + end["after"])


END = {
    **{"before": b"", "wide": False, "gap": b"", "begin": 0, "length": 0, "second": 0, "count": 0},
    **{"large": False, "place": 0, "more": 44, "small": (3, 3, 0, 0), "note": b"", "after": b""},
}
BYTES = (
    *(b"", b"x", b"PK\3\4", b"PK\5\6" + bytes(18), b"PK\6\7" + bytes(16)),
    struct.pack("<2HQ", 1, 8, 0),
)
NUMBERS = (0, 1, -1, 2, 8, 16, 0x800, 1 << 31, 0xFFFFFFFF, 1 << 63)


def values_like(old):
    if isinstance(old, str):
        return st.sampled_from(NAMES)
    if isinstance(old, tuple):
        return st.sampled_from([(0, 0, 0, 0), (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)])
    return st.sampled_from(BYTES if isinstance(old, bytes) else NUMBERS)


@st.composite
def archives(draw):
    names = ["a/data.pkl", "a/data/0", "a/version"]
    names += draw(st.lists(st.sampled_from(NAMES), max_size=1))
    names = draw(st.just(names) | st.permutations(names))
    entries, end = [], dict(END, wide=draw(st.booleans()), large=draw(st.booleans()))
    for name in names:
        last = name.lower().rpartition("/")[2]
        inside = mostly(*INSIDE[last]) if last in INSIDE else contents
        entries.append(entry(name, draw(inside)))
    for _ in range(draw(st.integers(0, 2))):
        where = draw(st.sampled_from([end, *entries]))
        field = draw(st.sampled_from(sorted(where)))
        where[field] = draw(values_like(where[field]))
    try:
        return zipped(entries, end)
    except struct.error:  # a number that its field cannot hold
        return b""


def described(value):
    if isinstance(value, torch.Tensor):
        kind = type(value), value.dtype, value.shape, value.stride(), value.storage_offset()
        return (*kind, value.requires_grad, value.detach().reshape(-1).tolist())
    if isinstance(value, dict):
        return [type(value), *((repr(key), described(inner)) for key, inner in value.items())]
    if type(value) in (list, tuple):
        return [type(value), *map(described, value)]
    return repr(value)


class Both:
    """Counts files by what became of them."""

    def __init__(self, monkeypatch):
        self.loaded = self.refused = self.bytes_of_tensors = 0
        self._torch_empty = torch.empty
        monkeypatch.setattr(torch, "empty", self._empty)

    def _empty(self, size, **kind):
        self.bytes_of_tensors += size if isinstance(size, int) else 0  # torch's own are tuples
        return self._torch_empty(size, **kind)

    def load(self, raw):
        self.bytes_of_tensors, ours = 0, None
        tracemalloc.start()
        try:
            ours = pickles.load_tensors(io.BytesIO(raw)), True
        except OSError:
            raise
        except Exception:  # each reader of a damaged file has its own
            self.refused += 1
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * len(raw) + 100_000 and self.bytes_of_tensors <= len(raw)
        if ours is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a pickle's protocol
                theirs = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
            assert described(ours[0]) == described(theirs)
            self.loaded += 1


@pytest.mark.hypothesis
def test_of_any_archive_ours_loads_what_torch_loads_or_nothing(monkeypatch):
    both = Both(monkeypatch)
    whole = zipped(
        [entry("a/data.pkl", PICKLES[0]), entry("a/data/0", FLOATS), entry("a/version", b"3")], END
    )
    many(1000)(given(archives() | damaged(whole))(both.load))()
    assert min(both.loaded, both.refused) > 5, vars(both)


@pytest.mark.hypothesis
def test_of_any_file_from_before_archives_ours_loads_what_torch_loads_or_nothing(monkeypatch):
    both = Both(monkeypatch)
    keys = mostly(["0"], [], ["0", "0"], ["1"], ("0",), "0")
    lengths = mostly(16, 15, 17, 1 << 40, -1)
    ends = mostly(b"", b"x", zipped([entry("a/data.pkl", b"\x80\2N.")], END))

    @many(1000)
    @given(contents, keys, lengths, ends, mostly(3, 1, 2))
    def load(content, names, length, end, about):
        value = content.replace(b"tQ", b"NtQ")
        storage = struct.pack("<q", length) + FLOATS if names else b""
        both.load(b"".join(LEGACY[:about]) + value + pickle.dumps(names, 2) + storage + end)

    load()
    assert min(both.loaded, both.refused) > 5, vars(both)
