"""Reads the files of torch.save: tensors and plain values, and nothing else.

No other program gets such a file, and neither does torch.load. A check is worth nothing if another
reader then reads the file: it may see other files in the same archive, or run code (torch 1.12).
`weights_only` keeps code away and no more: a hundred bytes may ask for any amount of memory
(`bytearray(n)`, a tensor larger than its storage), or for values inside each other so often that no
walk through them ends. Here, memory and time to load the values, and to walk through them, are
bounded by the size of the file. The bytes of tensors are read into place.

Read `load_tensors` first, then `_Reader`, which carries out a pickle's operations.
"""

import collections
import io
import math
import pickletools
import struct
import types
import zlib
from typing import Any, BinaryIO, Callable, Dict, List, NamedTuple, Set, Tuple

import torch

OPERATIONS = 1 << 21  # of a file; a value takes a hundred bytes for one byte of an operation
BYTES_OF_CALL = 32  # of a file, at least, for each tensor and each dict; a tensor takes 600
DEEPEST = 50  # values inside each other
DIMENSIONS = 64
VIEWS = 4  # times the file's size, of all tensors: several may lie in one storage
SHARED = 1 << 16  # members of containers that stand in several places, for each time they do
LARGEST_KEY = 1 << 60  # of numbers; hashes of larger ones repeat
CODES = {operation.code.encode("latin-1"): operation for operation in pickletools.opcodes}
CHUNK_BYTES = 1 << 20

OLD_FORMAT = [0x1950A86A20F9469CFC6C, 1001]  # the first pickles of a file from before torch 1.6
VERSIONS = [str(number).encode() for number in range(1, 11)]  # of later ones
OTHER_KINDS = (b"constants.pkl", b".data/version")  # in the files of TorchScript, torch.package

# The parts of a zip archive.
LOCAL, ENTRY = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L")
END, END_OF_LARGE = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q4sLQL")
LOCATOR_BYTES, END64_BYTES = 20, 44  # of the latter's two parts
ELSEWHERE = 0xFFFFFFFF  # a number that four bytes do not hold
USUAL_FLAGS = 0x0808  # sizes also behind the data; names in UTF-8
FOLDER = 0x10  # among a file's attributes


class Refused(Exception):
    """The text names what is in the file."""


class Record(NamedTuple):
    """A file in a zip archive: where its header begins, its length, and the sum of its bytes."""

    begin: int
    length: int
    crc: int

    def go_to(self, file: BinaryIO) -> None:
        """Move to the first byte of its content."""
        file.seek(self.begin)
        signature, *_, name_bytes, extra_bytes = LOCAL.unpack(file.read(LOCAL.size))
        if signature != b"PK\3\4":
            raise ValueError("a file that does not begin where the list of files says")
        file.seek(name_bytes + extra_bytes, io.SEEK_CUR)

    def read(self, file: BinaryIO) -> bytes:
        self.go_to(file)
        return file.read(self.length)

    def is_whole(self, file: BinaryIO) -> bool:
        """Return whether its bytes have the sum that the archive says."""
        self.go_to(file)
        crc = 0
        for begin in range(0, self.length, CHUNK_BYTES):
            crc = zlib.crc32(file.read(min(CHUNK_BYTES, self.length - begin)), crc)
        return crc == self.crc


class StorageType(NamedTuple):
    dtype: torch.dtype


class Storage(NamedTuple):
    """Bytes that tensors share, as numbers of one type."""

    key: str
    content: torch.Tensor
    dtype: torch.dtype
    items: int


def load_tensors(file: BinaryIO) -> Any:
    """Load tensors and plain values, on the CPU. Executes nothing that the file holds. Raises
    Refused for anything else, OSError, and for a damaged file whatever its readers raise."""
    reader = _Reader(file.seek(0, io.SEEK_END))
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        file.seek(0)
        return _load_old_format(file, reader)
    records = zip_records(file)
    if any(name in records for name in OTHER_KINDS):
        raise Refused("a program")
    if records[b"version"].read(file).strip() not in VERSIONS:
        raise Refused("another version of the format")
    if b"byteorder" in records and records[b"byteorder"].read(file) != b"little":
        raise Refused("numbers that begin with their highest byte")
    value = reader.read(io.BytesIO(records[b"data.pkl"].read(file)))
    for key, storage in reader.storages.items():
        record = records[b"data/" + key.lower().encode()]
        if record.length != len(storage.content):
            raise ValueError("a storage of another size")
        record.go_to(file)
        fill(storage.content, file)
    return value


def _load_old_format(file: BinaryIO, reader: "_Reader") -> Any:
    """Load a file from before torch 1.6: three pickles about the file, the value, the storages'
    keys, then the storages."""
    about = [reader.read(file), reader.read(file), reader.read(file)]
    if about[:2] != OLD_FORMAT:
        raise ValueError("no torch file")
    reader.after_storage = (None,)
    value = reader.read(file)
    keys = reader.read(file)
    if type(keys) is not list or sorted(keys) != sorted(reader.storages):
        raise ValueError("the keys of other storages")
    for key in keys:
        storage = reader.storages[key]
        if int.from_bytes(file.read(8), "little") != storage.items:
            raise ValueError("a storage of another size")
        fill(storage.content, file)
    return value


def fill(content: torch.Tensor, file: Any) -> None:
    """Read a tensor of bytes from the file."""
    if file.readinto(content.numpy()) != len(content):
        raise EOFError("the file is cut off")


def zip_records(file: BinaryIO) -> Dict[bytes, Record]:
    """List the files of an archive that torch.save wrote, by their names in lower case and without
    the archive's own. Raises ValueError and struct.error for an archive that another reader could
    understand in another way."""
    size = file.seek(0, io.SEEK_END)
    end = size - END.size
    file.seek(max(0, end - END_OF_LARGE.size))
    tail = file.read()
    signature, *disks, count, length, begin, comment = END.unpack(tail[-END.size :])
    if tail[-END.size - LOCATOR_BYTES :].startswith(b"PK\6\7"):
        end -= END_OF_LARGE.size
        fields = END_OF_LARGE.unpack(tail[: -END.size])
        first, more, _, _, *disks, count, length, begin, _, _, place, _ = fields
        if (first, more, place) != (b"PK\6\6", END64_BYTES, end):
            raise ValueError("two lists of files")
    if (signature, comment, disks) != (b"PK\5\6", 0, [0, 0, count]) or begin + length != end:
        raise ValueError("its list of files is not at its end")

    file.seek(begin)
    directory, at, archive = file.read(length), 0, None
    records: Dict[bytes, Record] = {}
    for _ in range(count):
        signature, _, _, flags, method, _, _, crc, *numbers = ENTRY.unpack_from(directory, at)
        packed, unpacked, name_bytes, extra_bytes, comment, disk, _, attributes, begin = numbers
        at += ENTRY.size
        folder, slash, name = directory[at : at + name_bytes].partition(b"/")
        sizes = [unpacked, packed, begin]
        wide = sizes.count(ELSEWHERE)
        if wide:  # the first extra field has them, in this order
            kind, width, *numbers = struct.unpack_from(f"<2H{wide}Q", directory, at + name_bytes)
            if kind != 1 or width < 8 * wide or extra_bytes < 4 + width:
                raise ValueError("a number that it does not have")
            sizes = [numbers.pop(0) if size == ELSEWHERE else size for size in sizes]
        unpacked, packed, begin = sizes
        # torch reads nothing of a folder, and takes whatever is in memory for its bytes.
        bytes_of_folder = unpacked if attributes & FOLDER or name.endswith(b"/") else 0
        special = flags & ~USUAL_FLAGS or method or disk or bytes_of_folder
        if signature != b"PK\1\2" or special or packed != unpacked or begin + unpacked > size:
            raise ValueError("a file that is compressed, encrypted or cut off")
        # torch looks for names below the first one's folder, without regard to case.
        archive = folder if archive is None else archive
        if not slash or folder != archive or name.lower() in records:
            raise ValueError("two files of one name, or one in no folder")
        records[name.lower()] = Record(begin, unpacked, crc)
        at += name_bytes + extra_bytes + comment
    if at != length or sum(record.length for record in records.values()) > size:
        raise ValueError("files of more bytes than it has")
    return records


class _Reader:
    """Carries out the operations of a file's pickles. Storages have their bytes only afterwards."""

    def __init__(self, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self.storages: Dict[str, Storage] = {}
        self.after_storage: Tuple[None, ...] = ()  # what follows a storage's description
        self.views: Set[str] = set()
        self.operations = self.calls = self.visits = self.storage_bytes = self.view_bytes = 0
        self.stack: List[Any] = []
        self.outer_stacks: List[List[Any]] = []  # one for each MARK
        self.memo: Dict[int, Any] = {}

    def read(self, stream: BinaryIO) -> Any:
        """Return the value of one pickle."""
        self.stack, self.outer_stacks, self.memo = [], [], {}
        name = ""
        while name != "STOP":
            operation = CODES[stream.read(1)]
            name = operation.name
            self.operations += 1
            if self.operations > OPERATIONS:
                raise Refused(f"more than {OPERATIONS:,} values")
            # Its argument is read afterwards: Python 3.9 reads a million digits for minutes.
            if name not in STEPS:
                raise Refused(f"the operation {name}")
            STEPS[name](self, operation.arg.reader(stream) if operation.arg else None)
        value = self.stack.pop()
        self._walk([value], 0)
        return value

    def _walk(self, values: Any, depth: int) -> None:
        """Visit each value as often as it stands somewhere: a list may hold itself, or one list
        many times."""
        if depth > DEEPEST:
            raise Refused(f"values more than {DEEPEST} deep in each other")
        for value in values:
            self.visits += 1
            if self.visits > self.operations + SHARED:
                raise Refused("values that are inside each other too often")
            if type(value) in (list, tuple):
                self._walk(value, depth + 1)
            elif type(value) in (dict, collections.OrderedDict):
                self._walk(value.values(), depth + 1)
            elif type(value) not in VALUES:
                raise Refused(f"a {type(value).__name__} that nothing uses")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.outer_stacks.append(self.stack)
        self.stack = []

    def since_mark(self) -> List[Any]:
        values, self.stack = self.stack, self.outer_stacks.pop()
        return values

    def last(self, count: int) -> List[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def extend(self, values: List[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise Refused("a value with parts of its own")
        self.stack[-1].extend(values)

    def set_items(self, values: List[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, collections.OrderedDict) or len(values) % 2:
            raise Refused("a value with parts of its own")
        for key, value in zip(values[::2], values[1::2]):
            # A tuple as a key is walked through each time that it is looked for.
            small = type(key) in (int, float, bool) and abs(key) < LARGEST_KEY
            if not (small or key is None or type(key) is str):
                raise Refused("a key that is neither a text nor a number")
            target[key] = value

    def build(self) -> None:
        """Leave out the attributes of a state dict, which are the versions of its modules."""
        attributes = self.stack.pop()
        if not isinstance(attributes, dict) or type(self.stack[-1]) is not collections.OrderedDict:
            raise Refused("a value with attributes")

    def find(self, name: str) -> None:
        if name not in GLOBALS:
            raise Refused(name.replace(" ", ".", 1))
        self.stack.append(GLOBALS[name])

    def put(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def call(self) -> None:
        function, arguments = self.last(2)
        self.calls += 1
        if self.calls * BYTES_OF_CALL > self.file_bytes:
            raise Refused("more calls than a file of its size has")
        if type(function) is not types.FunctionType or type(arguments) is not tuple:
            raise Refused("a call of what is no function")
        self.stack.append(function(self, *arguments))

    def storage(self) -> None:
        kind, storage_type, key, location, items, *more = self.stack.pop()
        named = (type(storage_type), type(key), type(location)) == (StorageType, str, str)
        if (kind, tuple(more)) != ("storage", self.after_storage) or not named & _is_count(items):
            raise Refused("a storage of another kind")
        dtype = storage_type.dtype
        if key not in self.storages:
            self.storage_bytes += items * ITEM_BYTES[dtype]
            if self.storage_bytes > self.file_bytes:
                raise Refused("storages of more bytes than the file has")
            content = torch.empty(items * ITEM_BYTES[dtype], dtype=torch.uint8)
            self.storages[key] = Storage(key, content, dtype, items)
        storage = self.storages[key]
        if items and (storage.dtype, storage.items) != (dtype, items):
            raise Refused("a storage of two kinds")
        self.stack.append(storage._replace(dtype=dtype, items=items))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST_KEY


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= DIMENSIONS and all(map(_is_count, value))


def _tensor(reader: _Reader, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> Any:
    """Make a view that stays within its storage. `more`: whether it has a gradient; hooks, which no
    file can hold; attributes that change its values."""
    shapes = _is_shape(size) and _is_shape(stride) and _is_count(offset)
    if type(storage) is not Storage or not shapes or len(size) != len(stride) or any(more[2:]):
        raise Refused("a tensor of another kind")
    numbers = math.prod(size)
    end = offset + sum((length - 1) * step for length, step in zip(size, stride))
    if numbers and end >= storage.items:
        raise Refused("a tensor that is larger than its storage")
    # As a text: numbers can be chosen such that the hashes of their tuples are the same.
    view = repr((storage.content.data_ptr(), storage.dtype, offset, size, stride))
    if view not in reader.views:
        reader.views.add(view)
        reader.view_bytes += numbers * ITEM_BYTES[storage.dtype]
    if reader.view_bytes > VIEWS * reader.file_bytes:
        raise Refused("tensors of many times the bytes that the file has")
    # `data`: for autograd it is no view, although it shares its storage.
    tensor = storage.content.view(storage.dtype).as_strided(size, stride, offset).data
    return tensor.requires_grad_(more[0] if more else False)


def _ordered_dict(reader: _Reader, pairs: Any = ()) -> Any:
    """Make a dict; Python 2 wrote its items as a list of pairs."""
    if type(pairs) not in (list, tuple):
        raise Refused("a call of collections.OrderedDict")
    reader.operations += len(pairs)  # one list may be given many times
    reader.stack.append(collections.OrderedDict())
    reader.set_items([part for key, value in pairs for part in (key, value)])
    return reader.stack.pop()


def _size(_: _Reader, shape: Any) -> torch.Size:
    if not _is_shape(shape):
        raise Refused("a call of torch.Size")
    return torch.Size(shape)


STORAGE_TYPES = {
    **{"DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16},
    **{"BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32},
    **{"ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8},
    **{"BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64},
    "ComplexDoubleStorage": torch.complex128,
}
ITEM_BYTES = {
    dtype: torch.empty((), dtype=dtype).element_size() for dtype in STORAGE_TYPES.values()
}
DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
# What a pickle may name: functions of this module for torch's, kinds of storages, and dtypes.
GLOBALS: Dict[str, Any] = {
    "collections OrderedDict": _ordered_dict,
    "torch._utils _rebuild_tensor": _tensor,
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": lambda _, data, grad, hooks: torch.nn.Parameter(data, grad),
    "torch Size": _size,
    "torch device": lambda _, *values: torch.device(*values),
    **{f"torch {name}": StorageType(dtype) for name, dtype in STORAGE_TYPES.items()},
    **{str(dtype).replace(".", " "): dtype for dtype in DTYPES},
}
# What a value may be, besides a list, a tuple and a dict.
VALUES = (
    *(type(None), bool, int, float, str),
    *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
)
STEPS: Dict[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(("PROTO", "STOP"), lambda reader, _: None),
    **dict.fromkeys(
        ("NONE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"), _Reader.push
    ),
    "SHORT_BINSTRING": lambda reader, text: reader.push(text.encode("latin-1").decode()),
    "NEWTRUE": lambda reader, _: reader.push(True),
    "NEWFALSE": lambda reader, _: reader.push(False),
    "EMPTY_LIST": lambda reader, _: reader.push([]),
    "EMPTY_DICT": lambda reader, _: reader.push({}),
    "EMPTY_TUPLE": lambda reader, _: reader.push(()),
    "MARK": lambda reader, _: reader.mark(),
    "TUPLE": lambda reader, _: reader.push(tuple(reader.since_mark())),
    "TUPLE1": lambda reader, _: reader.push(tuple(reader.last(1))),
    "TUPLE2": lambda reader, _: reader.push(tuple(reader.last(2))),
    "TUPLE3": lambda reader, _: reader.push(tuple(reader.last(3))),
    "APPEND": lambda reader, _: reader.extend(reader.last(1)),
    "APPENDS": lambda reader, _: reader.extend(reader.since_mark()),
    "SETITEM": lambda reader, _: reader.set_items(reader.last(2)),
    "SETITEMS": lambda reader, _: reader.set_items(reader.since_mark()),
    "BUILD": lambda reader, _: reader.build(),
    "GLOBAL": _Reader.find,
    "REDUCE": lambda reader, _: reader.call(),
    "BINPERSID": lambda reader, _: reader.storage(),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Reader.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda reader, n: reader.push(reader.memo[n])),
}
