"""Read safetensors files: 8 bytes with the length of a header in JSON, then the header, which says
each tensor's type, shape and offsets, then the tensors' bytes. Such a header is
{"fc.bias": {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}}. Not every stack has the
package of this name, and a reader is short."""

import io
import json
import math
from typing import BinaryIO, Dict

import torch

from contract.errors import UserError
from tandem.pickles import DIMENSIONS, fill

TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
LONGEST = 100_000_000  # bytes of a header: the format's own limit


def read(name: str, file: BinaryIO) -> Dict[str, torch.Tensor]:
    """Read the tensors of a file that messages call `name`. Raises UserError and OSError."""
    try:
        file_bytes = file.seek(0, io.SEEK_END)
        file.seek(0)
        data_begin = 8 + int.from_bytes(file.read(8), "little")
        if data_begin > min(file_bytes, LONGEST):
            raise ValueError("its header is cut off")
        # Python 3.9 takes minutes to read a number of a million digits.
        header = json.loads(file.read(data_begin - 8), parse_int=lambda digits: int(digits[:20]))
        header.pop("__metadata__", None)
        # All entries are checked before the first tensor takes memory. In the order of the tensors'
        # bytes, each tensor must begin at the end of the last one.
        last_end, layouts = 0, []
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = TYPES[entry["dtype"]], entry["shape"]
            begin, end = entry["data_offsets"]
            counts = (begin, end, *shape)
            if len(shape) > DIMENSIONS or not all(type(n) is int and n >= 0 for n in counts):
                raise ValueError("a count that is not a number")
            item_bytes = torch.empty((), dtype=dtype).element_size()
            if begin != last_end or end - begin != math.prod(shape) * item_bytes:
                raise ValueError("tensors that overlap, or have something between them")
            layouts.append((key, end - begin, dtype, shape))
            last_end = end
        if data_begin + last_end != file_bytes:
            raise ValueError("the sizes of its tensors do not match the file's size")
        tensors = {}
        for key, length, dtype, shape in layouts:
            content = torch.empty(length, dtype=torch.uint8)
            fill(content, file)
            tensors[key] = content.view(dtype).reshape(shape)
        return tensors
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{name} is a damaged safetensors file ({str(error)[:100]}): copy or save it again."
        ) from error
