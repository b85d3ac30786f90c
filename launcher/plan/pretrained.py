"""Fetches weights by name (WEIGHTS=torchvision:IMAGENET1K_V2, WEIGHTS=timm:a1_in1k): this machine
fetches, checks and keeps them once; then they are a file like any other that a run sends.

This machine has neither torchvision nor timm. A table has the names and files of torchvision. The
address of a file of timm follows from the names, so no machine is asked for it.
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
from contract.verbs import line
from launcher.folders import relative
from launcher.machines.inventory import CHECKOUT
from launcher.node.machine import file_sha256

CACHE, BUNDLE = CHECKOUT / ".tandem/weights", CHECKOUT / "bundle/weights"
TORCHVISION = "torchvision:"
TABLE = Path(__file__).with_name("torchvision.txt")
TORCH = "https://download.pytorch.org/models"
HUB = "https://huggingface.co"  # or HF_ENDPOINT, by which its users name a mirror
SECONDS = 60.0  # without a byte
PIECE = 1 << 20
SHORT = 8  # digits of a hash in a message
MOST_BYTES = 8 << 30  # of a file; the largest of torchvision's has 2.6 GB


@dataclass(frozen=True)
class Pretrained:
    """Weights that have a name. `stem` and `suffix`: of their file here, with its SHA-256 between
    them, or the first digits that the publisher states; `sha256`: as far as it is known."""

    typed: str
    model: str
    address: str
    stem: str
    suffix: str
    sha256: str = ""

    def find_file(self) -> Path | None:
        """Return the file with these weights on this machine, or None."""
        for folder in (BUNDLE, CACHE):
            for path in sorted(folder.glob(f"{self.stem}-*{self.suffix}")):
                digits = path.name[len(self.stem) + 1 : -len(self.suffix)]
                # A folder may have the file of another version, or a damaged one.
                if digits.startswith(self.sha256) and file_sha256(path).startswith(digits):
                    return path
        return None


def find_weights(settings: Options) -> Pretrained:
    """Return the weights that WEIGHTS= names. Raises UserError for unknown names."""
    typed, model = settings.weights or "", settings.model
    if typed.startswith(TORCHVISION):
        rows = [row.split() for row in TABLE.read_text(encoding="utf-8").splitlines()]
        files = {row[1]: row[2] for row in rows if row[0] == model}
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
        return Pretrained(typed, model, f"{TORCH}/{file}", stem, ".pth", digits)
    # A model may be typed with a tag of its own, which WEIGHTS replaces.
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
    """Fetch and check the file, and return its path in a folder (the cache). Says its checksum.
    Raises UserError."""
    folder = into or CACHE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            fresh = Path(scratch, "file")
            if not weights.address.startswith(("https://", "http://")):
                raise ValueError("that is not a web address")

            stated = weights.sha256 or _promised(weights.address)
            sha256 = _download(weights.address, fresh)
            if not sha256.startswith(stated):
                raise UserError(
                    f"WEIGHTS={weights.typed}: {weights.address} sent an unexpected file: its "
                    f"SHA-256 starts with {sha256[:SHORT]}, not {stated[:SHORT]}. Try again, "
                    "or type a file with weights."
                )
            # The name appears only once the file is whole and checked.
            target = folder / f"{weights.stem}-{weights.sha256 or sha256}{weights.suffix}"
            fresh.replace(target)
            advice = "; the server published no checksum: compare it with a checksum that you trust"
            say(f"WEIGHTS={weights.typed}: SHA-256 {sha256}{'' if stated else advice}")
            return target
    except urllib.error.HTTPError as error:
        reason = f"there is no such file ({error.code} {error.reason})"
    except (urllib.error.URLError, HTTPException, ValueError, TimeoutError) as error:
        reason = f"it cannot be fetched ({getattr(error, 'reason', None) or error})"
    except OSError as error:
        path = error.filename or relative(folder)
        raise UserError(
            f"WEIGHTS={weights.typed} could not be stored: {path}: {error.strerror or error}."
        ) from None
    gather = line("bundle", MODEL=weights.model, WEIGHTS=weights.typed)
    raise UserError(
        f"WEIGHTS={weights.typed}: {weights.address}: {reason}: correct the name. If this machine "
        f"has no internet, type `{gather}` on another one and bring its bundle/, or give the file "
        "itself (WEIGHTS=FILE)."
    )


class _Unmoved(urllib.request.HTTPRedirectHandler):
    """Raises HTTPError for a redirect."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _promised(address: str) -> str:
    """Return the SHA-256 that the hub states for a large file; "" if it states none. Raises errors
    of urllib."""
    # The hub redirects to another server, which states none: its own answer counts.
    request = urllib.request.Request(address, method="HEAD")  # noqa: S310 checked
    try:
        with urllib.request.build_opener(_Unmoved).open(request, timeout=SECONDS) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        if error.code >= 400:
            raise
        headers = error.headers
    stated = headers.get("X-Linked-ETag", "").strip('"')
    return stated if re.fullmatch(r"[0-9a-f]{64}", stated) else ""


def _download(address: str, path: Path) -> str:
    """Write a file of the web, and return its SHA-256. Raises errors of urllib, ValueError for
    another size than was stated and for more than MOST_BYTES, OSError if the disk fails."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file, urllib.request.urlopen(address, timeout=SECONDS) as answer:  # noqa: S310
        while True:
            try:
                piece = answer.read(PIECE)
            except OSError as error:  # the connection's, and no disk's
                raise urllib.error.URLError(error) from error
            if not piece:
                break
            size += len(piece)
            # Counted here, since a server need not state a size, or the right one.
            if size > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES >> 30} GiB")
            file.write(piece)
            digest.update(piece)
        stated = answer.headers.get("Content-Length")
    if stated is not None and size != int(stated):
        raise ValueError(f"only {size} of {stated} bytes arrived")
    return digest.hexdigest()
