"""Reading safetensors files: 8 bytes with the length of a header in JSON, which tells each tensor's
type, shape and place, then the tensors' bytes. The package of that name is in no stack, and this
much of it is all that is needed."""

import json
import math
from typing import Any, Dict

import torch

from contract.errors import UserError

TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
LONGEST = 100_000_000  # bytes of a header, as the format itself has it


def is_such(content: bytes) -> bool:
    """Whether a file's bytes begin like it: neither a zip archive nor a pickle does."""
    return len(content) > 8 and content[8:9] == b"{"


def read(name: str, content: bytes) -> Dict[str, torch.Tensor]:
    """The tensors of a file that messages call `name`. Raises UserError."""
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        if end > min(len(content), LONGEST):
            raise ValueError("its header is cut off")
        header = json.loads(content[8:end])
        entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
        data, most = bytearray(content[end:]), len(content) - end
        # Entries of the same bytes could ask for any memory.
        places = [entry["data_offsets"] for entry in entries.values()]
        if sum(last - first for first, last in places) > most:
            raise ValueError("tensors of more bytes than the file has")
        return {key: _tensor(data, **entry) for key, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"{name} is a damaged safetensors file ({str(error)[:100]}): copy or save it again."
        ) from error


def _tensor(data: bytearray, dtype: str, shape: Any, data_offsets: Any) -> torch.Tensor:
    """Raises ValueError, TypeError, KeyError."""
    kind, (begin, end) = TYPES[dtype], data_offsets
    if not all(type(count) is int and count >= 0 for count in (*shape, begin, end)):
        raise ValueError("a count that is none")
    size = torch.empty((), dtype=kind).element_size()
    if end > len(data) or end - begin != math.prod(shape) * size:
        raise ValueError("a tensor outside of the file")
    if begin == end:
        return torch.empty(shape, dtype=kind)
    # A copy, for what stands in the file need not be aligned.
    raw = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=begin).clone()
    return raw.view(kind).reshape(shape)
