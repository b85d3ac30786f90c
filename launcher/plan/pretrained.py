"""Fetches weights by name: WEIGHTS=torchvision:IMAGENET1K_V2 or WEIGHTS=timm:a1_in1k.

build_trainer.py finds the weights that the user names. sending.py fetches them once to the control
node; a run then sends the file. The control node has neither torchvision nor timm: torchvision.txt
lists the files of torchvision, and the address of a file of timm follows from the names.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.options import TIMM, Options
from contract.verbs import format_command
from launcher.folders import relative
from launcher.machines.inventory import CHECKOUT
from launcher.node.machine import file_sha256

CACHE, BUNDLE = CHECKOUT / ".tandem/weights", CHECKOUT / "bundle/weights"
TORCHVISION = "torchvision:"  # begins WEIGHTS=, as TIMM does
TABLE = Path(__file__).with_name("torchvision.txt")
TORCH_MODELS = "https://download.pytorch.org/models"
HUB = "https://huggingface.co"  # unless the user names a mirror in HF_ENDPOINT
SILENCE_SECONDS = 60.0  # that a server may send nothing
PIECE_BYTES = 1 << 20
SHOWN_DIGITS = 8  # of a hash in a message
MAX_BYTES = 8 << 30  # of a file; the largest file of torchvision has 2.6 GB


@dataclass(frozen=True)
class Pretrained:
    """Describes weights that have a name. Their file on the control node is called
    <stem>-<digits><suffix>; the digits are its SHA-256, or the first ones if the publisher states
    only these."""

    typed: str  # by the user, as WEIGHTS=
    model: str
    address: str
    stem: str
    suffix: str
    sha256: str = ""  # the digits that the publisher states

    def find_file(self) -> Path | None:
        """Return the file with these weights on this machine, or None."""
        for folder in (BUNDLE, CACHE):
            for path in sorted(folder.glob(f"{self.stem}-*{self.suffix}")):
                digits = path.name[len(self.stem) + 1 : -len(self.suffix)]
                # The folder may have a file of another version, or a damaged file.
                if digits.startswith(self.sha256) and file_sha256(path).startswith(digits):
                    return path
        return None


def find_weights(settings: Options) -> Pretrained:
    """Return the weights that WEIGHTS= names. Raises UserError for unknown names."""
    typed, model = settings.weights or "", settings.model
    if typed.startswith(TORCHVISION):
        # A line of the table is `resnet50 IMAGENET1K_V2 resnet50-11ad3fa6.pth`, or a comment.
        lines = TABLE.read_text(encoding="utf-8").splitlines()
        rows = (line.split() for line in lines if not line.startswith("#"))
        files = {name: file for row_model, name, file in rows if row_model == model}
        if not files:
            raise UserError(
                f"WEIGHTS={typed}: torchvision has none for MODEL={model} that suit this trainer: "
                "give another model, or the weights as a file."
            )
        file = files.get(typed[len(TORCHVISION) :])
        if file is None:
            raise UserError(
                f"WEIGHTS={typed}: for {model} torchvision has "
                f"{', '.join(TORCHVISION + name for name in files)}."
            )
        stem, _, digits = file.removesuffix(".pth").rpartition("-")
        return Pretrained(typed, model, f"{TORCH_MODELS}/{file}", stem, ".pth", digits)
    # MODEL=timm:resnet50.a1_in1k has a tag, too; the tag in WEIGHTS replaces this tag.
    tag = typed[len(TIMM) :]
    name = f"{model[len(TIMM) :].partition('.')[0]}.{tag}"
    if not model.startswith(TIMM) or not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise UserError(
            f"WEIGHTS={typed}: type a model of timm and the tag of its weights, such as "
            "MODEL=timm:resnet50 WEIGHTS=timm:a1_in1k."
        )
    hub = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
    address = f"{hub}/timm/{name}/resolve/main/model.safetensors"
    return Pretrained(typed, model, address, name, ".safetensors")


def fetch(weights: Pretrained, say: Callable[[str], None], into: Path | None = None) -> Path:
    """Fetch and check the file of the weights, and report its checksum. Return its path in the
    folder `into`, by default the cache. Raises UserError."""
    folder = into or CACHE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            fresh = Path(scratch, "file")
            if not weights.address.startswith(("https://", "http://")):
                raise ValueError("that is not a web address")
            stated = weights.sha256 or _read_stated_sha256(weights.address)
            sha256 = _download(weights.address, fresh)
            if not sha256.startswith(stated):
                begin, stated_begin = sha256[:SHOWN_DIGITS], stated[:SHOWN_DIGITS]
                raise UserError(
                    f"WEIGHTS={weights.typed}: {weights.address} sent an unexpected file: its "
                    f"SHA-256 starts with {begin}, not {stated_begin}. Try again, "
                    "or type a file with weights."
                )
            # The file gets its name only after it is complete and checked. The name has the stated
            # digits, or else all of them.
            target = folder / f"{weights.stem}-{weights.sha256 or sha256}{weights.suffix}"
            fresh.replace(target)
            advice = "; the server published no checksum: compare it with a checksum that you trust"
            say(f"WEIGHTS={weights.typed}: SHA-256 {sha256}{'' if stated else advice}")
            return target
    except urllib.error.HTTPError as error:
        reason = f"there is no such file ({error.code} {error.reason})"
    except (urllib.error.URLError, HTTPException, ValueError, TimeoutError) as error:
        reason = f"it cannot be fetched ({getattr(error, 'reason', None) or error})"
    except OSError as error:  # of the disk: the errors above are OSErrors, too
        path = error.filename or relative(folder)
        raise UserError(
            f"WEIGHTS={weights.typed} could not be stored: {path}: {error.strerror or error}."
        ) from None
    gather = format_command("bundle", MODEL=weights.model, WEIGHTS=weights.typed)
    raise UserError(
        f"WEIGHTS={weights.typed}: {weights.address}: {reason}: correct the name. If this machine "
        f"has no internet, type `{gather}` on another one and bring its bundle/, or give the file "
        "itself (WEIGHTS=FILE)."
    )


class _RefuseRedirect(urllib.request.HTTPRedirectHandler):
    """Raises HTTPError for a redirect."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None  # urllib then treats the redirect as an error


def _read_stated_sha256(address: str) -> str:
    """Return the SHA-256 that the hub states for a large file; "" if the hub states none. Raises
    errors of urllib."""
    # The hub's answer is a redirect, and its headers have the SHA-256. The server to which it
    # redirects states none, so the redirect is not followed.
    request = urllib.request.Request(address, method="HEAD")  # noqa: S310 checked
    try:
        with urllib.request.build_opener(_RefuseRedirect).open(
            request, timeout=SILENCE_SECONDS
        ) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        if error.code >= 400:
            raise
        headers = error.headers
    stated = headers.get("X-Linked-ETag", "").strip('"')
    return stated if re.fullmatch(r"[0-9a-f]{64}", stated) else ""


def _download(address: str, path: Path) -> str:
    """Download a file, and return its SHA-256. Raises errors of urllib, ValueError for more than
    MAX_BYTES or a size other than the stated size, and OSError if the disk fails."""
    digest, size = hashlib.sha256(), 0
    with (
        path.open("wb") as file,
        urllib.request.urlopen(address, timeout=SILENCE_SECONDS) as answer,  # noqa: S310
    ):
        while True:
            try:
                piece = answer.read(PIECE_BYTES)
            except OSError as error:  # of the connection; errors of the disk stay OSErrors
                raise urllib.error.URLError(error) from error
            if not piece:
                break
            size += len(piece)
            # A server may state no size or a wrong size, so the received bytes are counted.
            if size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES >> 30} GiB")
            file.write(piece)
            digest.update(piece)
        stated = answer.headers.get("Content-Length")
    if stated is not None and size != int(stated):
        raise ValueError(f"only {size} of {stated} bytes arrived")
    return digest.hexdigest()
