"""Whether a checkpoint holds more than tensors, found out without loading it: who loads such a file
runs what its writer put there.

It is a warning and no protection: what torch makes of a file is torch's.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

MOST = 64 << 20  # bytes of a file's pickles; tensors lie beside them
STREAMS = 5  # of a file from before torch 1.6: three numbers and texts, the value, keys
NAMED = 3
# Those that `torch.load(weights_only=True)` takes, or would if all of torch knew them.
TENSORS = re.compile(
    r"collections\.(OrderedDict|Counter|defaultdict)|torch\.\w*Storage|torch\.storage\.\w+Storage|"
    r"torch\._utils\._rebuild_\w+|torch\.(Size|Tensor|device|nn\.parameter\.Parameter)|"
    r"torch\.(float|int|uint|bfloat|half|double|long|short|bool|complex)\w*|"
    r"torch\.serialization\._get_layout|_codecs\.encode|(__builtin__|builtins)\.(set|bytearray)"
)
UNSEEN = "what cannot be seen"


def more_than_tensors(path: Path) -> str:
    """Names of what a file holds beside tensors and plain values; "" where that is nothing, as in
    any .safetensors. Raises OSError."""
    if path.suffix == ".safetensors":
        return ""
    try:
        others = [one for one in dict.fromkeys(_named(path)) if not TENSORS.fullmatch(one)]
    except OSError:
        raise
    except Exception:  # pickletools and zipfile raise whatever a damaged file leads to
        others = [UNSEEN]
    more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
    names = ("".join(filter(str.isprintable, one))[:80] for one in others[:NAMED])
    return ", ".join(names) + more


def _named(path: Path) -> Iterator[str]:
    """What the pickles of a file look up as it is loaded, as `module.name`."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            stream = io.BytesIO(file.read(MOST))
        yield from _of(stream)
        for _ in range(1, STREAMS):
            if stream.read(1) != b"\x80":  # not another pickle of a protocol that torch writes
                return
            stream.seek(-1, io.SEEK_CUR)
            yield from _of(stream)
        return
    with zipfile.ZipFile(path) as archive:
        pickles = [one for one in archive.namelist() if one.endswith(".pkl")]
        for name in pickles or [""]:
            with archive.open(name) as file:
                content = file.read(MOST + 1)
            if len(content) > MOST:
                raise ValueError("too large")
            yield from _of(io.BytesIO(content))


def _of(stream: io.BytesIO) -> Iterator[str]:
    """Those of one pickle, which is read to its end. Raises ValueError."""
    memo: dict[int, str | None] = {}
    pushed: list[str | None] = [None, None]  # by the last two operations, where they were texts
    for operation, value, _ in pickletools.genops(stream):
        name = operation.name
        if name in ("GLOBAL", "INST"):
            yield str(value).replace(" ", ".", 1)
        elif name == "STACK_GLOBAL":
            module, attribute = pushed
            yield f"{module}.{attribute}" if module and attribute else UNSEEN
        elif name.startswith("EXT"):
            yield UNSEEN
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if value is None else value] = pushed[1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            pushed = [pushed[1], memo.get(int(value or 0))]
        elif name != "FRAME":
            pushed = [pushed[1], value if "UNICODE" in name and isinstance(value, str) else None]
