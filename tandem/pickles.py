"""What a file's pickles would make, found out from their operations before one is carried out.
`weights_only` keeps code away and no more: a hundred bytes may ask for any amount of memory
(`bytearray(n)`, a tensor larger than its storage), or for values inside each other so often that no
walk through them ends.

What torch.save writes of tensors and plain values passes. Memory and time to load it and to walk
through it are then bounded by the size of the file.
"""

import io
import pickle
import pickletools
import re
import zipfile
from typing import Any, BinaryIO, Callable, Dict, List, Optional, Set, Tuple

STREAMS = 5  # pickles of a file from before torch 1.6: three about it, the value, names of storages
OPERATIONS = 1 << 21  # of a file; a value takes a hundred bytes for one byte of an operation
DEEPEST = 50  # values inside each other
DIMENSIONS = 64
VIEWS = 4  # times the file's size, of all tensors: several may lie in one storage
SHARED = 1 << 16  # members of containers that stand in several places, for each time they do
ITEM_BYTES = {
    **{"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2},
    **{"Char": 1, "Byte": 1, "Bool": 1},
}
OF_TORCH = re.compile(r"torch\.\w+")  # dtypes and kinds of storages, which are named, not called
MARK, TENSOR = object(), object()


class Refused(pickle.UnpicklingError):
    """The text names what is in the file."""


class Name(str):
    """A global, as `module.name`."""


class Box:
    """A list or a dict, or a tuple, of which `values` are known."""

    __slots__ = ("count", "depth", "shared", "values")

    def __init__(self, values: Tuple[Any, ...] = ()) -> None:
        self.values, self.count, self.depth, self.shared = values, 0, 1, False

    def add(self, values: List[Any]) -> None:
        if self.shared:
            raise Refused("a value that grows where it is used twice")
        self.count += len(values)
        inner = max((value.depth for value in values if isinstance(value, Box)), default=0)
        self.depth = max(self.depth, 1 + inner)
        if self.depth > DEEPEST:
            raise Refused(f"values more than {DEEPEST} deep in each other")


class Storage:
    def __init__(self, key: str, items: int, item_bytes: int) -> None:
        self.key, self.items, self.item_bytes = key, items, item_bytes


def check(content: BinaryIO) -> None:
    """Raises Refused for a file that holds anything else, and whatever the readers of a damaged
    file raise."""
    size = content.seek(0, io.SEEK_END)
    reader = _Reader(size)
    content.seek(0)
    if not zipfile.is_zipfile(content):
        content.seek(0)
        for _ in range(STREAMS):
            reader.read(content)
        return
    with zipfile.ZipFile(content) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > size:  # torch compresses nothing
            raise zipfile.BadZipFile("it is compressed")
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                reader.read(io.BytesIO(archive.read(entry)))


class _Reader:
    """Follows the operations of pickles with stand-ins for their values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.storages: Dict[str, int] = {}
        self.views: Set[Tuple[Any, ...]] = set()
        self.operations = self.storage_bytes = self.view_bytes = self.shared = 0
        self.stack: List[Any] = []
        self.memo: Dict[int, Any] = {}

    def read(self, stream: BinaryIO) -> None:
        self.stack, self.memo = [], {}
        for operation, argument, _ in pickletools.genops(stream):
            self.operations += 1
            if self.operations > OPERATIONS:
                raise Refused(f"more than {OPERATIONS:,} values")
            if operation.name in PLAIN:
                self.stack.append(argument)
            elif operation.name in STEPS:
                STEPS[operation.name](self, argument)
            else:
                raise Refused(f"the operation {operation.name}")

    def last(self, count: int) -> List[Any]:
        if len(self.stack) < count:
            raise Refused("an operation without its values")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def since_mark(self) -> List[Any]:
        values: List[Any] = []
        while self.stack:
            value = self.stack.pop()
            if value is MARK:
                return values[::-1]
            values.append(value)
        raise Refused("an operation without its values")

    def tuple_of(self, values: List[Any]) -> None:
        made = Box(tuple(values))
        made.add(values)
        self.stack.append(made)

    def add(self, values: List[Any]) -> None:
        target = self.stack[-1] if self.stack else None
        if not isinstance(target, Box):
            raise Refused("a value with parts of its own")
        target.add(values)

    def set_items(self, values: List[Any]) -> None:
        # A tuple as a key is walked through each time that it is looked for.
        if not all(key is None or isinstance(key, (str, bytes, int, float)) for key in values[::2]):
            raise Refused("a key that is neither a text nor a number")
        self.add(values[1::2])

    def named(self, name: str) -> None:
        known = Name(name.replace(" ", ".", 1))
        if known not in CALLS and not OF_TORCH.fullmatch(known):
            raise Refused(known)
        self.stack.append(known)

    def put(self, place: int) -> None:
        # torch 1.12 makes a table of as many places.
        if not self.stack or place > self.size:
            raise Refused("a place without a value")
        self.memo[place] = self.stack[-1]

    def get(self, place: int) -> None:
        if place not in self.memo:
            raise Refused("a place without a value")
        value = self.memo[place]
        if isinstance(value, Box):
            value.shared, self.shared = True, self.shared + value.count
            if value.depth > 1 or self.shared > SHARED:
                raise Refused("values that are inside each other too often")
        self.stack.append(value)

    def call(self) -> None:
        function, arguments = self.last(2)
        if not (isinstance(function, Name) and isinstance(arguments, Box)):
            raise Refused("a call of what is no function")
        made = CALLS[function](self, *arguments.values) if function in CALLS else None
        if made is None:
            raise Refused(f"a call of {function}")
        self.stack.append(made)

    def storage(self) -> None:
        (box,) = self.last(1)
        values = box.values if isinstance(box, Box) else ()
        if len(values) < 5 or values[5:] not in ((), (None,)):
            raise Refused("a storage of another kind")
        _, kind, key, _, items = values[:5]
        if not (isinstance(kind, Name) and isinstance(key, str) and _is_count(items)):
            raise Refused("a storage of another kind")
        item_bytes = ITEM_BYTES.get(kind[len("torch.") : -len("Storage")], 16)
        if key not in self.storages:
            self.storages[key] = items * item_bytes
            self.storage_bytes += items * item_bytes
        if items * item_bytes > self.storages[key] or self.storage_bytes > self.size:
            raise Refused("storages of more bytes than the file has")
        self.stack.append(Storage(key, items, item_bytes))

    def tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> object:
        """A view that stays within its storage."""
        if not (isinstance(storage, Storage) and _is_shape(size) and _is_shape(stride)):
            return None
        sizes, strides = size.values, stride.values
        if not _is_count(offset) or len(sizes) != len(strides):
            return None
        numbers = 1
        for length in sizes:
            numbers *= length
        end = offset + sum((length - 1) * step for length, step in zip(sizes, strides))
        if numbers and end >= storage.items:
            raise Refused("a tensor that is larger than its storage")
        view = (storage.key, offset, sizes, strides)
        if view not in self.views:
            self.views.add(view)
            self.view_bytes += numbers * storage.item_bytes
        if self.view_bytes > VIEWS * self.size:
            raise Refused("tensors of many times the bytes that the file has")
        return TENSOR


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, Box)
        and len(value.values) == value.count <= DIMENSIONS
        and all(map(_is_count, value.values))
    )


CALLS: Dict[str, Callable[..., Optional[object]]] = {
    "collections.OrderedDict": lambda _, *values: None if values else Box(),
    "torch._utils._rebuild_tensor_v2": _Reader.tensor,
    "torch._utils._rebuild_parameter": lambda _, value, *more: value if value is TENSOR else None,
    "torch.Size": lambda _, shape: shape if _is_shape(shape) else None,
    "torch.device": lambda _, *values: TENSOR,
}
PLAIN = {
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINSTRING"),
}
STEPS: Dict[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(("PROTO", "STOP"), lambda reader, _: None),
    "MARK": lambda reader, _: reader.stack.append(MARK),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT"), lambda reader, _: reader.stack.append(Box())),
    "EMPTY_TUPLE": lambda reader, _: reader.tuple_of([]),
    "TUPLE": lambda reader, _: reader.tuple_of(reader.since_mark()),
    "TUPLE1": lambda reader, _: reader.tuple_of(reader.last(1)),
    "TUPLE2": lambda reader, _: reader.tuple_of(reader.last(2)),
    "TUPLE3": lambda reader, _: reader.tuple_of(reader.last(3)),
    "APPEND": lambda reader, _: reader.add(reader.last(1)),
    "APPENDS": lambda reader, _: reader.add(reader.since_mark()),
    "SETITEM": lambda reader, _: reader.set_items(reader.last(2)),
    "SETITEMS": lambda reader, _: reader.set_items(reader.since_mark()),
    "BUILD": lambda reader, _: reader.add(reader.last(1)),
    "GLOBAL": lambda reader, name: reader.named(name),
    "REDUCE": lambda reader, _: reader.call(),
    "BINPERSID": lambda reader, _: reader.storage(),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda reader, place: reader.put(place)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda reader, place: reader.get(place)),
}
