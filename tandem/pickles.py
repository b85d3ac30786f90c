"""Read the files of torch.save: tensors and plain values, and nothing else.

Tandem gives such a file to no other reader, not even torch.load. A check would be worth nothing if
another reader then read the file: that reader may see other files in the same archive, or run code
(torch 1.12). torch.load's `weights_only` only prevents code. A hundred bytes may still ask for any
amount of memory (`bytearray(n)`, a tensor larger than its storage). They may also nest values so
that walking through the values never ends. Here the size of the file limits the memory and time for
loading the values and for walking through them. The bytes of tensors are read directly into place.

Read `load_tensors` first, then `_Reader`, which executes a pickle's operations. trainer/ and
exchange.py call `load_tensors`. trainer/writer.py calls `read_zip_records`.
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

# One byte in a file, an operation, may make a value of a hundred bytes in memory.
MAX_OPERATIONS = 1 << 21
# The least bytes of the file for each tensor and each dict; a tensor takes 600 in memory.
BYTES_PER_CALL = 32
MAX_DEPTH = 50  # of nested values
DIMENSIONS = 64  # the most that a tensor may have
MAX_VIEW_FACTOR = 4  # bytes of all tensors / bytes of the file: tensors may share a storage
MAX_SHARED_VISITS = 1 << 16  # of values that occur several times; one visit to each value is free
# Of numbers that are keys or sizes. Hashes of larger numbers repeat, which makes a dict slow.
LARGEST_NUMBER = 1 << 60
# The byte of each operation -> its description, with its name and the reader of its argument.
CODES = {operation.code.encode("latin-1"): operation for operation in pickletools.opcodes}
CHUNK_BYTES = 1 << 20  # of a file, while its checksum is computed

OLD_FORMAT = [0x1950A86A20F9469CFC6C, 1001]  # the first pickles of a file from before torch 1.6
VERSIONS = [str(number).encode() for number in range(1, 11)]  # of the format since torch 1.6
PROGRAM_FILES = (b"constants.pkl", b".data/version")  # of TorchScript and torch.package

# The structures of a zip archive (PKWARE's APPNOTE.TXT, section 4.3): the header before each file's
# content, and the file's entry in the list of files.
LOCAL, ENTRY = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L")
# The archive's end, which points to the list of files. An archive with large numbers has two more
# structures before its end: the large end and its locator. END_OF_LARGE is these two.
END, END_OF_LARGE = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q4sLQL")
LOCATOR_BYTES = 20
END64_BYTES = 44  # of the large end, behind the field that states this number
ELSEWHERE = 0xFFFFFFFF  # the number needs more than four bytes, and is in an extra field
USUAL_FLAGS = 0x0808  # sizes also behind the data; names in UTF-8
FOLDER = 0x10  # the attribute of an entry that is a folder


class RejectedContent(Exception):
    """Raised for content that is not loaded; its text names that content."""


class Record(NamedTuple):
    """A file in a zip archive: the offset of its header, its content's bytes, and their CRC-32."""

    begin: int
    length: int
    crc: int

    def seek_content(self, file: BinaryIO) -> None:
        """Move to the first byte of the content. Raises ValueError if there is no header."""
        file.seek(self.begin)
        # The header repeats the entry's name, which may have another extra field here.
        signature, *_, name_bytes, extra_bytes = LOCAL.unpack(file.read(LOCAL.size))
        if signature != b"PK\3\4":
            raise ValueError("a file does not begin at the offset in the list of files")
        file.seek(name_bytes + extra_bytes, io.SEEK_CUR)

    def read(self, file: BinaryIO) -> bytes:
        self.seek_content(file)
        return file.read(self.length)

    def is_whole(self, file: BinaryIO) -> bool:
        """Return whether the content has the checksum that the archive states."""
        self.seek_content(file)
        crc = 0
        for begin in range(0, self.length, CHUNK_BYTES):
            crc = zlib.crc32(file.read(min(CHUNK_BYTES, self.length - begin)), crc)
        return crc == self.crc


class StorageType(NamedTuple):
    """Stands for one of torch's classes of storages, such as torch.FloatStorage with float32."""

    dtype: torch.dtype


class Storage(NamedTuple):
    """Bytes that tensors can share. `content`: uint8 (bytes). `items`: the count of its numbers of
    type `dtype`. `key`: its name in the file."""

    key: str
    content: torch.Tensor
    dtype: torch.dtype
    items: int


def load_tensors(file: BinaryIO) -> Any:
    """Load tensors and plain values, on the CPU, without executing code from the file. Raises
    RejectedContent for any other content, OSError if the file cannot be read, and exceptions of
    many kinds for a damaged file."""
    reader = _Reader(file.seek(0, io.SEEK_END))
    # torch also decides by the first four bytes: it reads a file in the old format unless these
    # bytes begin an archive.
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        file.seek(0)
        return _load_old_format(file, reader)
    records = read_zip_records(file)
    if any(name in records for name in PROGRAM_FILES):
        raise RejectedContent("a program")
    if records[b"version"].read(file).strip() not in VERSIONS:
        raise RejectedContent("an unknown version of the format")
    if b"byteorder" in records and records[b"byteorder"].read(file) != b"little":
        raise RejectedContent("big-endian numbers")
    value = reader.read(io.BytesIO(records[b"data.pkl"].read(file)))
    for key, storage in reader.storages.items():
        record = records[b"data/" + key.lower().encode()]
        if record.length != len(storage.content):
            raise ValueError("a storage has another size than its file")
        record.seek_content(file)
        # The tensors in `value` are views of this memory, and so receive their numbers.
        fill(storage.content, file)
    return value


def _load_old_format(file: BinaryIO, reader: "_Reader") -> Any:
    """Load a file from before torch 1.6: three pickles that describe the file, a pickle of the
    value, a pickle of the storages' keys, and the content of the storages in that order."""
    # The pickles are [a magic number, the version of the format, facts about the writing machine].
    description = [reader.read(file), reader.read(file), reader.read(file)]
    if description[:2] != OLD_FORMAT:
        raise ValueError("not a torch file")
    reader.storage_suffix = (None,)
    value = reader.read(file)
    keys = reader.read(file)
    if type(keys) is not list or sorted(keys) != sorted(reader.storages):
        raise ValueError("the keys are not those of the storages")
    for key in keys:
        storage = reader.storages[key]
        if int.from_bytes(file.read(8), "little") != storage.items:
            raise ValueError("a storage has another size than its description")
        fill(storage.content, file)
    return value


def fill(content: torch.Tensor, file: Any) -> None:
    """Fill a tensor of bytes from the file. Raises EOFError if the file is too short."""
    if file.readinto(content.numpy()) != len(content):
        raise EOFError("the file is too short")


def read_zip_records(file: BinaryIO) -> Dict[bytes, Record]:
    """Return the files of an archive that torch.save wrote, by their names in lower case without
    the archive's name. Raises ValueError or struct.error for an archive that another reader could
    interpret differently."""
    # The list of files and the structure that points to it must be the very end of the archive:
    # readers differ in which of several lists they use.
    size = file.seek(0, io.SEEK_END)
    end = size - END.size
    file.seek(max(0, end - END_OF_LARGE.size))
    tail = file.read()  # the two structures of a large archive, or other bytes, and END
    # `disks`: this disk's number, that of the list's first disk, and the files on this disk.
    signature, *disks, count, list_bytes, list_begin, comment = END.unpack(tail[-END.size :])
    if tail[-END.size - LOCATOR_BYTES :].startswith(b"PK\6\7"):  # the locator
        end -= END_OF_LARGE.size
        fields = END_OF_LARGE.unpack(tail[: -END.size])
        # The fields of the large end, then those of the locator with the large end's offset.
        signature64, end64_bytes, _, _, *disks, count, list_bytes, list_begin, _, _, end64, _ = (
            fields
        )
        if (signature64, end64_bytes, end64) != (b"PK\6\6", END64_BYTES, end):
            raise ValueError("the archive has two lists of files")
    # An archive on one disk has [0, 0, count].
    is_plain_end = (signature, comment, disks) == (b"PK\5\6", 0, [0, 0, count])
    if not is_plain_end or list_begin + list_bytes != end:
        raise ValueError("the list of files is not at the archive's end")

    file.seek(list_begin)
    directory, offset, archive_folder = file.read(list_bytes), 0, None
    records: Dict[bytes, Record] = {}
    for _ in range(count):
        # The fields that are skipped are versions, times, and attributes of no use here.
        signature, _, _, flags, method, _, _, crc, *numbers = ENTRY.unpack_from(directory, offset)
        packed, unpacked, name_bytes, extra_bytes, comment, disk, _, attributes, begin = numbers
        offset += ENTRY.size
        folder, slash, name = directory[offset : offset + name_bytes].partition(b"/")
        sizes = [unpacked, packed, begin]
        wide_count = sizes.count(ELSEWHERE)
        if wide_count:  # the first extra field holds the large numbers, in the order of `sizes`
            extra_offset = offset + name_bytes
            kind, width, *wide = struct.unpack_from(f"<2H{wide_count}Q", directory, extra_offset)
            if kind != 1 or width < 8 * wide_count or extra_bytes < 4 + width:
                raise ValueError("a number is missing in the extra field")
            sizes = [wide.pop(0) if number == ELSEWHERE else number for number in sizes]
        unpacked, packed, begin = sizes
        # torch does not read a folder's bytes, and would use uninitialized memory for them.
        folder_bytes = unpacked if attributes & FOLDER or name.endswith(b"/") else 0
        # torch.save stores files as they are (method 0), on the only disk.
        is_unusual = flags & ~USUAL_FLAGS or method or disk or folder_bytes
        if signature != b"PK\1\2" or is_unusual or packed != unpacked or begin + unpacked > size:
            raise ValueError("a file is compressed, encrypted or cut off")
        # torch looks for names below the first file's folder, and ignores case.
        archive_folder = folder if archive_folder is None else archive_folder
        if not slash or folder != archive_folder or name.lower() in records:
            raise ValueError("two files have the same name, or a file is in no folder")
        records[name.lower()] = Record(begin, unpacked, crc)
        offset += name_bytes + extra_bytes + comment
    # Files may overlap, and then have more bytes than the archive.
    if offset != list_bytes or sum(record.length for record in records.values()) > size:
        raise ValueError("the files have more bytes than the archive")
    return records


class _Reader:
    """Executes the operations of a file's pickles. `load_tensors` fills the storages later.

    A pickle is a program for a stack machine: most operations push a value, or combine values at
    the stack's end. ACTIONS, at the end of this file, maps each allowed operation to a method.
    `pickletools` in Python's library describes the operations.
    """

    def __init__(self, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self.storages: Dict[str, Storage] = {}  # by key
        # A storage's description has a sixth field in the old format, None.
        self.storage_suffix: Tuple[None, ...] = ()
        self.views: Set[str] = set()  # descriptions of all tensors so far: see `_make_tensor`
        # Totals of all pickles so far. `view_bytes`: of all different tensors.
        self.operations = self.calls = self.visits = self.storage_bytes = self.view_bytes = 0
        self.stack: List[Any] = []
        self.outer_stacks: List[List[Any]] = []  # one for each MARK that is still open
        self.memo: Dict[int, Any] = {}  # values that the pickle uses again, by number

    def read(self, stream: BinaryIO) -> Any:
        """Return the value of one pickle."""
        self.stack, self.outer_stacks, self.memo = [], [], {}
        name = ""
        while name != "STOP":
            operation = CODES[stream.read(1)]
            name = operation.name
            self.operations += 1
            if self.operations > MAX_OPERATIONS:
                raise RejectedContent(f"more than {MAX_OPERATIONS:,} values")
            # Checked before the argument is read: Python 3.9 takes minutes for a million digits.
            if name not in ACTIONS:
                raise RejectedContent(f"the operation {name}")
            ACTIONS[name](self, operation.arg.reader(stream) if operation.arg else None)
        value = self.stack.pop()
        self._walk([value], 0)
        return value

    def _walk(self, values: Any, depth: int) -> None:
        """Check values as any later walk will visit them: each value once for each place in which
        the value occurs. A list may contain itself, or contain another list many times."""
        if depth > MAX_DEPTH:
            raise RejectedContent(f"values more than {MAX_DEPTH} deep in each other")
        for value in values:
            self.visits += 1
            if self.visits > self.operations + MAX_SHARED_VISITS:
                raise RejectedContent("values that are inside each other too often")
            if type(value) in (list, tuple):
                self._walk(value, depth + 1)
            elif type(value) in (dict, collections.OrderedDict):
                self._walk(value.values(), depth + 1)
            elif type(value) not in VALUES:
                raise RejectedContent(f"an unexpected {type(value).__name__}")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        """Begin a new stack, whose values a later operation takes together."""
        self.outer_stacks.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> List[Any]:
        """Return the values since the last MARK, and continue with the stack before it."""
        values, self.stack = self.stack, self.outer_stacks.pop()
        return values

    def pop(self, count: int) -> List[Any]:
        """Remove the last `count` values from the stack; return them in the order of their push."""
        values = [self.stack.pop() for _ in range(count)]
        return values[::-1]

    def extend(self, values: List[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise RejectedContent("an object with elements")
        self.stack[-1].extend(values)

    def set_items(self, values: List[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, collections.OrderedDict) or len(values) % 2:
            raise RejectedContent("an object with items")
        for key, value in zip(values[::2], values[1::2]):
            # A tuple as a key would be walked through at each lookup.
            is_small_number = type(key) in (int, float, bool) and abs(key) < LARGEST_NUMBER
            if not (is_small_number or key is None or type(key) is str):
                raise RejectedContent("a key that is neither a string nor a number")
            target[key] = value

    def build(self) -> None:
        """Drop the attributes of a state dict, which are the versions of its modules."""
        attributes = self.stack.pop()
        if not isinstance(attributes, dict) or type(self.stack[-1]) is not collections.OrderedDict:
            raise RejectedContent("a value with attributes")

    def push_global(self, name: str) -> None:
        # pickletools joins a module and a name by a blank, such as `os system`.
        if name not in GLOBALS:
            raise RejectedContent(name.replace(" ", ".", 1))
        self.stack.append(GLOBALS[name])

    def memoize(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def call(self) -> None:
        function, arguments = self.pop(2)
        # Few bytes of operations can make many tensors, of 600 bytes each.
        self.calls += 1
        if self.calls * BYTES_PER_CALL > self.file_bytes:
            raise RejectedContent("too many tensors and dicts for the file's size")
        # Only `push_global` puts functions on the stack, so this is a function of GLOBALS.
        if type(function) is not types.FunctionType or type(arguments) is not tuple:
            raise RejectedContent("a call of an object that is not a function")
        self.stack.append(function(self, *arguments))

    def push_storage(self) -> None:
        """Replace a storage's description by the storage, whose content is not read yet. A
        description: ("storage", StorageType(torch.float32), "0", "cpu", 4096)."""
        kind, storage_type, key, location, items, *suffix = self.stack.pop()
        types_fit = (type(storage_type), type(key), type(location)) == (StorageType, str, str)
        kind_fits = (kind, tuple(suffix)) == ("storage", self.storage_suffix)
        if not (kind_fits and types_fit and _is_count(items)):
            raise RejectedContent("an invalid storage")
        dtype = storage_type.dtype
        # Memory is allocated only for bytes that the file has.
        if key not in self.storages:
            self.storage_bytes += items * ITEM_BYTES[dtype]
            if self.storage_bytes > self.file_bytes:
                raise RejectedContent("storages of more bytes than the file has")
            content = torch.empty(items * ITEM_BYTES[dtype], dtype=torch.uint8)
            self.storages[key] = Storage(key, content, dtype, items)
        storage = self.storages[key]
        # An empty storage may be described by several types.
        if items and (storage.dtype, storage.items) != (dtype, items):
            raise RejectedContent("a storage of two types")
        self.stack.append(storage._replace(dtype=dtype, items=items))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST_NUMBER


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= DIMENSIONS and all(map(_is_count, value))


def _make_tensor(
    reader: _Reader, storage: Any, offset: Any, size: Any, stride: Any, *options: Any
) -> Any:
    """Make a tensor that stays within its storage, as torch._utils._rebuild_tensor_v2 does.
    `options`: requires_grad, hooks, and attributes, of which a file may have the first ones."""
    are_shapes = _is_shape(size) and _is_shape(stride) and _is_count(offset)
    if type(storage) is not Storage or not are_shapes or len(size) != len(stride):
        raise RejectedContent("an invalid tensor")
    # Files hold no hooks. Attributes, such as a bit for "conjugate", would change the values.
    if any(options[2:]):
        raise RejectedContent("a tensor with attributes")
    item_count = math.prod(size)
    last_index = offset + sum((length - 1) * step for length, step in zip(size, stride))
    if item_count and last_index >= storage.items:
        raise RejectedContent("a tensor that is larger than its storage")
    # The tensor's description is a string: a file can choose numbers so that all tuples have the
    # same hash, which makes a set slow.
    view = repr((storage.content.data_ptr(), storage.dtype, offset, size, stride))
    if view not in reader.views:
        reader.views.add(view)
        reader.view_bytes += item_count * ITEM_BYTES[storage.dtype]
    if reader.view_bytes > MAX_VIEW_FACTOR * reader.file_bytes:
        raise RejectedContent("tensors with many times the bytes of the file")
    # `.data` shares the storage, but autograd does not regard it as a view.
    tensor = storage.content.view(storage.dtype).as_strided(size, stride, offset).data
    return tensor.requires_grad_(options[0] if options else False)


def _make_ordered_dict(reader: _Reader, pairs: Any = ()) -> Any:
    """Make an OrderedDict. SETITEMS sets its items later, unless the file has them as `pairs`."""
    # Python 2 wrote the items as a list of pairs.
    if type(pairs) not in (list, tuple):
        raise RejectedContent("an invalid collections.OrderedDict")
    reader.operations += len(pairs)  # one list may be passed many times
    reader.stack.append(collections.OrderedDict())
    reader.set_items([element for key, value in pairs for element in (key, value)])
    return reader.stack.pop()


def _make_size(_: _Reader, shape: Any) -> torch.Size:
    if not _is_shape(shape):
        raise RejectedContent("an invalid torch.Size")
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
# The names that a pickle may contain, as "module name": of functions, for which this module has
# safe ones; of torch's classes of storages; and of dtypes.
GLOBALS: Dict[str, Any] = {
    "collections OrderedDict": _make_ordered_dict,
    "torch._utils _rebuild_tensor": _make_tensor,
    "torch._utils _rebuild_tensor_v2": _make_tensor,
    "torch._utils _rebuild_parameter": lambda _, data, grad, hooks: torch.nn.Parameter(data, grad),
    "torch Size": _make_size,
    "torch device": lambda _, *values: torch.device(*values),
    **{f"torch {name}": StorageType(dtype) for name, dtype in STORAGE_TYPES.items()},
    **{str(dtype).replace(".", " "): dtype for dtype in DTYPES},
}
# The types of values, in addition to lists, tuples and dicts.
VALUES = (
    *(type(None), bool, int, float, str),
    *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
)
# What each operation does with the reader and the operation's argument, which may be None.
ACTIONS: Dict[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(("PROTO", "STOP"), lambda reader, _: None),
    **dict.fromkeys(
        ("NONE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"), _Reader.push
    ),
    # pickletools has decoded these bytes as Latin-1; here they are UTF-8.
    "SHORT_BINSTRING": lambda reader, text: reader.push(text.encode("latin-1").decode()),
    "NEWTRUE": lambda reader, _: reader.push(True),
    "NEWFALSE": lambda reader, _: reader.push(False),
    "EMPTY_LIST": lambda reader, _: reader.push([]),
    "EMPTY_DICT": lambda reader, _: reader.push({}),
    "EMPTY_TUPLE": lambda reader, _: reader.push(()),
    "MARK": lambda reader, _: reader.mark(),
    "TUPLE": lambda reader, _: reader.push(tuple(reader.pop_to_mark())),
    "TUPLE1": lambda reader, _: reader.push(tuple(reader.pop(1))),
    "TUPLE2": lambda reader, _: reader.push(tuple(reader.pop(2))),
    "TUPLE3": lambda reader, _: reader.push(tuple(reader.pop(3))),
    "APPEND": lambda reader, _: reader.extend(reader.pop(1)),
    "APPENDS": lambda reader, _: reader.extend(reader.pop_to_mark()),
    "SETITEM": lambda reader, _: reader.set_items(reader.pop(2)),
    "SETITEMS": lambda reader, _: reader.set_items(reader.pop_to_mark()),
    "BUILD": lambda reader, _: reader.build(),
    "GLOBAL": _Reader.push_global,
    "REDUCE": lambda reader, _: reader.call(),
    "BINPERSID": lambda reader, _: reader.push_storage(),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Reader.memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda reader, n: reader.push(reader.memo[n])),
}
